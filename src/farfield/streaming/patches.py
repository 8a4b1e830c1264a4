"""Patches of the volume, on which norms, means and pooling see what a tile reads, and only attention the whole volume.

All else is as in the untiled network: constants and what positions read are compared with those of the whole.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from farfield._refusals import refusal
from farfield.streaming.arguments import iterate_diagonal
from farfield.streaming.graph import Value, run_whole
from farfield.streaming.labels import GraphError, LabelledGraph, find_needs, is_read, label_graph, trace
from farfield.streaming.places import Scales
from farfield.streaming.rules.reading import READING_RULES
from farfield.streaming.rules.rule import OperationCall, Parts, Reduction
from farfield.streaming.run import Read, compute
from farfield.streaming.spans import (
    Box,
    Halo,
    Layout,
    Piece,
    Span,
    box_shape,
    lengths_along,
    take_box,
    whole_box,
)

# Rounding of places and of what follows from them, in units in the last place of numbers up to their length.
_ROUNDING = 8


@dataclass
class Patch:
    """The part of the volume on which a network runs for a tile: all have one size, also at the border."""

    # The graph of one patch, with the nodes of that of the volume.
    labelled: LabelledGraph
    # The size of the volume.
    whole: tuple[int, ...]
    # What a tile reads before and after its own positions, where the volume does not end.
    halo: Halo
    # Of each value, positions of the volume from one of its own to the next.
    scales: dict[Value, Scales]
    # For each axis, where patches begin: at a position of each value, windows included.
    multiples: tuple[int, ...]

    def region(self, tile: Sequence[Span]) -> tuple[Span, ...]:
        """Return the patch of a tile: all have the same size, also at the border of the volume."""
        each = zip(self.halo.around(tile, self.whole), self.labelled.size, self.whole, self.multiples, strict=True)
        starts = [min(start // own * own, length - positions) for (start, _), positions, length, own in each]
        return tuple((start, start + positions) for start, positions in zip(starts, self.labelled.size, strict=True))

    def first(self, value: Value, axis: int, region: Sequence[Span], length: int) -> Fraction:
        """Return where a patch begins in a value that has a length along an axis."""
        return region[axis][0] / self.scales[value].get(axis, Fraction(self.whole[axis], length))

    def part(self, value: Value, layout: Layout, region: Sequence[Span]) -> Box:
        """Return where the value of a patch lies in that of the whole, of which each dimension is one piece."""
        shape, box = self.labelled.graph.info(value).shape, []
        for (piece,), length in zip(layout, shape, strict=True):
            start = 0 if piece.axis is None else int(self.first(value, piece.axis, region, piece.length))
            box.append(((start, start + length),))
        return tuple(box)

    def boxes(self, values: Collection[Value]) -> dict[Value, Box]:
        """Return the whole boxes of values on a patch, of those that depend on the volume."""
        return {value: whole_box(self.labelled.layouts[value]) for value in values if value not in self.labelled.kept}


def find_attention(labelled: LabelledGraph) -> tuple[int, ...]:
    """Return the nodes that see the whole volume also on patches."""
    return tuple(index for index in labelled.reductions if labelled.graph.nodes[index].op == "layer")


# ---- what is not the whole's, moved ----------------------------------------------------------------------------------
def refuse_moved(
    whole: LabelledGraph,
    patch: Patch,
    tile: Sequence[int],
    find_wanted: Callable[[Sequence[Span]], Iterable[Mapping[Value, Box]]],
) -> None:
    """Refuse a network of which a constant, or what a position reads, is another on a patch than on the whole.

    `find_wanted` returns what each pass computes of a tile.
    """
    cut = label_graph(patch.labelled.graph, patch.labelled.size, whole.cut, halo=patch.labelled.halo)
    # What has a period is seen by the first three.
    for core, _ in iterate_diagonal(whole.size, tile, 3):
        _Moved(whole, patch, cut).compare(core, find_wanted(core))


@dataclass
class _Moved:
    """A patch and the whole: what positions of the one compute, and those of the other in the same place."""

    whole: LabelledGraph
    patch: Patch
    # The graph on the patch, cut along the same axes.
    cut: LabelledGraph
    # Of each value that was found, how many of its positions along each axis are before the patch.
    places: dict[Value, dict[int, int]] = field(default_factory=dict)

    def compare(self, tile: Sequence[Span], wanted: Iterable[Mapping[Value, Box]]) -> None:
        """Find the places of all that a tile is computed from, apart from statistics; refuse a value without one."""
        whole, region = self.whole, self.patch.region(tile)
        starts = {axis: start for axis, (start, _) in enumerate(region)}
        self.places |= dict.fromkeys(whole.graph.inputs, starts)
        needs = [pair for each in wanted for pair in trace(whole, each, whole.graph.inputs)[1]]
        for value, box in sorted(needs):
            if value in whole.known:
                continue
            places = [self.places[value]] if value in self.places else self._find_places(value, region)
            found = next((place for place in places if self._is_same(value, place, box)), None)
            if found is None:
                node, size = whole.graph.nodes[value.node], " × ".join(map(str, self.patch.labelled.size))
                text = f"{node.op} in {node.path} has other constants, or reads other positions, on a patch of {size}"
                fix = 'fix: Tiles(…, statistics="whole")'
                raise refusal(GraphError, f"{text} than on the whole volume; {fix}.")
            self.places[value] = found

    def _find_places(self, value: Value, region: Sequence[Span]) -> Iterator[dict[int, int]]:
        """Iterate over where a patch may begin in a value: what is inside may be flipped."""
        own, there = (lengths_along(each.layouts[value]) for each in (self.whole, self.cut))
        graph, options = self.whole.graph, []
        nodes = find_attention(self.whole)
        attention = [each for index in nodes for each in (Value(index), graph.nodes[index].inputs[0])]
        for axis, length in own.items() if own.keys() == there.keys() else ():
            first = self.patch.first(value, axis, region, length)
            places = [first, length - there[axis] - first]
            places = places[:1] if value in (graph.output, *attention) else places
            options.append([int(place) for place in places if place.denominator == 1])
        yield from (dict(zip(own, chosen, strict=True)) for chosen in itertools.product(*options))

    def _move(self, value: Value, box: Box, place: Mapping[int, int]) -> Box:
        """Return a box of the whole as one of the patch."""

        def move(piece: Piece, span: Span) -> Span:
            first = 0 if piece.axis is None else place[piece.axis]
            return span[0] - first, span[1] - first

        pairs = zip(self.whole.layouts[value], box, strict=True)
        return tuple(tuple(map(move, dim, spans)) for dim, spans in pairs)

    def _is_same(self, value: Value, place: Mapping[int, int], box: Box) -> bool:
        """Whether a box, and single positions in it, are computed from the same numbers on the patch, and alike."""
        whole, patch = self.whole, self.cut
        node, other = (each.graph.nodes[value.node] for each in (whole, patch))
        is_alike = (node.args, node.kwargs) == (other.args, other.kwargs) and node.op not in READING_RULES
        for own in (box, *_single_positions(whole.layouts[value], box)):
            moved = self._move(value, own, place)
            ends = zip(itertools.chain(*moved), itertools.chain(*patch.layouts[value]), strict=True)
            if any(start < 0 or stop > piece.length for (start, stop), piece in ends):
                return False
            needs, there = find_needs(whole, value, own), find_needs(patch, value, moved)
            if not all(self._reads_same(*each, other) for each, (_, other) in zip(needs, there, strict=True)):
                return False
            is_run = own is not box and not is_alike and value.node not in whole.reductions
            if is_run and not self._computes_same(value, own, moved, needs):
                return False
        return True

    def _reads_same(self, value: Value, box: Box, there: Box) -> bool:
        whole, patch = self.whole, self.cut
        if not is_read(whole, value, box) or not is_read(patch, value, there):
            return is_read(whole, value, box) == is_read(patch, value, there)
        if value in whole.known:
            return _are_equal(_compute_known(whole, value, box), _compute_known(patch, value, there))
        return self._move(value, box, self.places[value]) == there

    def _computes_same(self, value: Value, box: Box, moved: Box, needs: Sequence[tuple[Value, Box]]) -> bool:
        """Whether an operation gives the same result of any numbers."""
        whole, random, tensors = self.whole, torch.Generator().manual_seed(0), list[Any]()
        for source, read in needs:
            if not is_read(whole, source, read):
                tensors.append(None)
            elif source in whole.known:
                tensors.append(_compute_known(whole, source, read))
            else:  # of integers, which may be places, the first
                tensors.append(torch.rand(box_shape(read), generator=random).to(whole.graph.info(source).dtype))
        one, other = (
            frame.rules[value.node].run(frame.calls[value.node], value.output, own, tensors)
            for frame, own in ((whole, box), (self.cut, moved))
        )
        return _are_equal(one, other, max(whole.graph.info(value).shape))


def _single_positions(layout: Layout, box: Box) -> Iterator[Box]:
    """Iterate over the first, the middle and the last position of a box along the axes of the volume."""

    def take(piece: Piece, span: Span, share: int) -> Span:
        place = span[0] + (span[1] - 1 - span[0]) * share // 2
        return span if piece.axis is None else (place, place + 1)

    for share in range(3):
        pairs = zip(layout, box, strict=True)
        yield tuple(tuple(take(*each, share) for each in zip(dim, spans, strict=True)) for dim, spans in pairs)


def _compute_known(labelled: LabelledGraph, value: Value, box: Box) -> Tensor:
    """Return a box of a value that does not depend on the volume."""
    if value in labelled.kept:
        return take_box(run_whole(labelled.graph, [], value), labelled.layouts[value], box)
    return compute(labelled, {value: box}, (), lambda source, own: torch.empty(0), {})[value]


def _are_equal(one: Tensor, other: Tensor, length: int = 1) -> bool:
    """Whether numbers are equal but for rounding of places up to a length; those on meta have none."""
    if one.shape != other.shape or one.is_meta or one.data_ptr() == other.data_ptr():
        return one.shape == other.shape
    eps = torch.finfo(torch.promote_types(one.dtype, torch.float32)).eps
    one, other = (each.to(torch.promote_types(each.dtype, torch.float64)) for each in (one, other))
    largest = float(one.abs().nan_to_num(posinf=0.0).max()) if one.numel() else 0.0
    return torch.allclose(one, other, 0.0, _ROUNDING * eps * length * largest, equal_nan=True)


# ---- tiles -----------------------------------------------------------------------------------------------------------
def compute_patch(
    whole: LabelledGraph,
    patch: Patch,
    tile: Sequence[Span],
    wanted: Collection[Value],
    read: Read,
    parts: Mapping[int, Parts],
) -> tuple[dict[Value, Tensor], dict[Value, Box]]:
    """Compute values on a tile's patch; return also the boxes that these are in the whole."""
    region = patch.region(tile)

    def move(value: Value, box: Box) -> Box:
        """Return where a box of a value on the patch lies in the whole; each dimension is one piece."""
        part = patch.part(value, whole.layouts[value], region)
        return tuple(
            ((first + start, first + stop),) for ((first, _),), ((start, stop),) in zip(part, box, strict=True)
        )

    def reduce(index: int) -> Reduction:
        reduction = whole.reductions[index]

        def finish(call: OperationCall, output: int, box: Box, tensors: Sequence[Tensor], own: Parts) -> Tensor:
            return reduction.finish(whole.calls[index], output, move(Value(index, output), box), tensors, own)

        return reduction._replace(finish=finish)

    graph = copy.copy(patch.labelled)
    graph.reductions = {index: reduce(index) for index in find_attention(whole)}
    boxes, inputs = patch.boxes(wanted), graph.graph.inputs
    known = compute(graph, boxes, inputs, lambda value, box: read(value, move(value, box)), parts)
    return known, {value: patch.part(value, whole.layouts[value], region) for value in known}
