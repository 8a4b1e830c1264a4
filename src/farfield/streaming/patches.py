"""Patches of the volume, on which norms, means and pooling see what a tile reads, and only attention the whole volume.

All else is as in the untiled network: constants and what positions read are compared with those of the whole.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from farfield._refusals import refusal
from farfield.streaming.arguments import axis_spans, round_up
from farfield.streaming.graph import Value, run_whole
from farfield.streaming.labels import GraphError, LabelledGraph, find_needs, is_read, label_graph, trace
from farfield.streaming.places import find_places
from farfield.streaming.plan import Halo, PatchPlan, join_halos, make_graph_plan
from farfield.streaming.recording import Recording, find_scales
from farfield.streaming.rules.reading import READING_RULES
from farfield.streaming.rules.rule import OperationCall, Parts, Reduction
from farfield.streaming.run import Read, compute
from farfield.streaming.spans import Box, Layout, Piece, Span, box_shape, lengths_along, read_box, region_of, whole_box

# Rounding of places and of what follows from them, in units in the last place of numbers up to their length.
_ROUNDING = 8


def make_patch_plan(
    labelled: LabelledGraph, tile: Sequence[int], record: Callable[[tuple[int, ...]], Recording]
) -> PatchPlan:
    """Plan how a network, which `record` records on the size of a patch, runs on patches; or raise GraphError."""
    nodes = labelled.graph.nodes
    if labelled.gathered:
        path = nodes[min(labelled.gathered).node].path
        raise GraphError(f"{path} needs all positions of the volume for each of its own")
    # All reductions but attention are those of a tile, and need no pass.
    levels: dict[int, int] = {}
    for index in labelled.order:
        before = max((levels[value.node] for value in nodes[index].inputs), default=0)
        levels[index] = before + (index in labelled.reductions and nodes[index].op == "layer")
    whole = make_graph_plan(replace(labelled, levels=levels), tile, [])
    halo = join_halos(each.halo for each in whole.passes)
    plan = PatchPlan(whole.labelled, whole.tile, {}, labelled, halo, find_scales(find_places(labelled)))
    halo = Halo(*(tuple(map(round_up, side, plan.multiples)) for side in halo))
    # A patch has the remainder of the volume's size, so that the last starts at a multiple; so do tiles that do not.
    size = tuple(
        min(length, round_up(own, multiple) + (own % multiple and multiple) + before + after + length % multiple)
        for length, own, before, after, multiple in zip(labelled.size, whole.tile, *halo, plan.multiples, strict=True)
    )
    patch = record(size).label([])
    if [node.op for node in nodes] != [node.op for node in patch.graph.nodes]:
        raise GraphError("it runs other operations on a patch than on the whole volume")
    plan = replace(plan, patch=patch, halo=halo)
    refuse_moved(plan)
    return plan


# ---- what is not the whole's, moved ----------------------------------------------------------------------------------
def refuse_moved(plan: PatchPlan) -> None:
    """Refuse a network of which a constant, or what a position reads, is another on a patch than on the whole."""
    cut = label_graph(plan.patch.graph, plan.patch.size, plan.labelled.cut, halo=plan.patch.halo)
    spans = axis_spans(plan.labelled.size, plan.tile)
    # What has a period is seen by the first three.
    axes = [[*dict.fromkeys([*own[:3], own[len(own) // 2], *own[-2:]])] for own in spans]
    for step in range(max(map(len, axes))):
        _Moved(plan, cut).compare(tuple(own[min(step, len(own) - 1)] for own in axes))


@dataclass
class _Moved:
    """A patch and the whole: what positions of the one compute, and those of the other in the same place."""

    plan: PatchPlan
    # The graph on the patch, cut along the same axes.
    patch: LabelledGraph
    # Of each value that was found, how many of its positions along each axis are before the patch.
    places: dict[Value, dict[int, int]] = field(default_factory=dict)

    def compare(self, tile: Sequence[Span]) -> None:
        """Find the places of all that a tile is computed from, apart from statistics; refuse a value without one."""
        whole, region = self.plan.labelled, self.plan.region(tile)
        starts = {axis: start for axis, (start, _) in enumerate(region)}
        self.places |= dict.fromkeys(whole.graph.inputs, starts)
        wanted = (self.plan.wanted(stage, tile)[1] for stage in range(len(self.plan.stages)))
        needs = [pair for each in wanted for pair in trace(whole, each, whole.graph.inputs)[1]]
        for value, box in sorted(needs):
            if value in whole.known:
                continue
            places = [self.places[value]] if value in self.places else self._find_places(value, region)
            found = next((place for place in places if self._is_same(value, place, box)), None)
            if found is None:
                node, size = whole.graph.nodes[value.node], " × ".join(map(str, self.patch.size))
                text = f"{node.op} in {node.path} has other constants, or reads other positions, on a patch of {size}"
                fix = 'fix: Tiles(…, statistics="whole")'
                raise refusal(GraphError, f"{text} than on the whole volume; {fix}.")
            self.places[value] = found

    def _find_places(self, value: Value, region: Sequence[Span]) -> Iterator[dict[int, int]]:
        """Iterate over where a patch may begin in a value: what is inside may be flipped."""
        own, there = (lengths_along(each.layouts[value]) for each in (self.plan.labelled, self.patch))
        graph, options = self.plan.labelled.graph, []
        attention = [each for index in self.plan.reductions for each in (Value(index), graph.nodes[index].inputs[0])]
        for axis, length in own.items() if own.keys() == there.keys() else ():
            first = self.plan.first(value, axis, region, length)
            places = [first, length - there[axis] - first]
            places = places[:1] if value in (graph.output, *attention) else places
            options.append([int(place) for place in places if place.denominator == 1])
        yield from (dict(zip(own, chosen, strict=True)) for chosen in itertools.product(*options))

    def _move(self, value: Value, box: Box, place: Mapping[int, int]) -> Box:
        """Return a box of the whole as one of the patch."""

        def move(piece: Piece, span: Span) -> Span:
            first = 0 if piece.axis is None else place[piece.axis]
            return span[0] - first, span[1] - first

        pairs = zip(self.plan.labelled.layouts[value], box, strict=True)
        return tuple(tuple(map(move, dim, spans)) for dim, spans in pairs)

    def _is_same(self, value: Value, place: Mapping[int, int], box: Box) -> bool:
        """Whether a box, and single positions in it, are computed from the same numbers on the patch, and alike."""
        whole, patch = self.plan.labelled, self.patch
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
        whole, patch = self.plan.labelled, self.patch
        if not is_read(whole, value, box) or not is_read(patch, value, there):
            return is_read(whole, value, box) == is_read(patch, value, there)
        if value in whole.known:
            return _are_equal(_compute_known(whole, value, box), _compute_known(patch, value, there))
        return self._move(value, box, self.places[value]) == there

    def _computes_same(self, value: Value, box: Box, moved: Box, needs: Sequence[tuple[Value, Box]]) -> bool:
        """Whether an operation gives the same result of any numbers."""
        whole, random, tensors = self.plan.labelled, torch.Generator().manual_seed(0), list[Any]()
        for source, read in needs:
            if not is_read(whole, source, read):
                tensors.append(None)
            elif source in whole.known:
                tensors.append(_compute_known(whole, source, read))
            else:  # of integers, which may be places, the first
                tensors.append(torch.rand(box_shape(read), generator=random).to(whole.graph.info(source).dtype))
        one, other = (
            frame.rules[value.node].run(frame.calls[value.node], value.output, own, tensors)
            for frame, own in ((whole, box), (self.patch, moved))
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
        return read_box(run_whole(labelled.graph, [], value), region_of(whole_box(labelled.layouts[value])), box)
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
    plan: PatchPlan, tile: Sequence[Span], wanted: Collection[Value], read: Read, parts: Mapping[int, Parts]
) -> tuple[dict[Value, Tensor], dict[Value, Box]]:
    """Compute values on a tile's patch; return also the boxes that these are in the whole."""
    labelled, region = plan.labelled, plan.region(tile)

    def move(value: Value, box: Box) -> Box:
        """Return where a box of a value on the patch lies in the whole; each dimension is one piece."""
        return tuple(
            ((first + start, first + stop),)
            for ((first, _),), ((start, stop),) in zip(plan.part(value, region), box, strict=True)
        )

    def reduce(index: int) -> Reduction:
        whole = labelled.reductions[index]

        def finish(call: OperationCall, output: int, box: Box, tensors: Sequence[Tensor], own: Parts) -> Tensor:
            return whole.finish(labelled.calls[index], output, move(Value(index, output), box), tensors, own)

        return whole._replace(finish=finish)

    patch = copy.copy(plan.patch)
    patch.reductions = {index: reduce(index) for index in plan.reductions}
    boxes, inputs = plan.patch_boxes(wanted), patch.graph.inputs
    known = compute(patch, boxes, inputs, lambda value, box: read(value, move(value, box)), parts)
    return known, {value: plan.part(value, region) for value in known}
