"""Plan passes over tiles from the graph alone: levels, stored values, halos, memory."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property
from typing import NamedTuple

from farfield.streaming.arguments import axis_spans, cores, cut_axes
from farfield.streaming.graph import Node, Value
from farfield.streaming.labels import LabelledGraph, count_bytes, find_regions, summarized_boxes
from farfield.streaming.spans import Box, Layout, Region, Span, hull, is_empty, region_of, whole_box

# Tiles at each end of an axis whose cost is counted one by one.
_ENDS = 2


class Halo(NamedTuple):
    """Positions that a tile reads before and after its own positions, one number per spatial dim each."""

    before: tuple[int, ...]
    after: tuple[int, ...]

    def around(self, core: Sequence[Span], whole: Sequence[int]) -> tuple[Span, ...]:
        """Return the region that a tile reads: its own positions and the halo, cut at the border of the volume."""
        return tuple(
            (max(0, start - before), min(length, stop + after))
            for (start, stop), before, after, length in zip(core, *self, whole, strict=True)
        )


def join_halos(halos: Iterable[Halo]) -> Halo:
    """Return the largest of some halos, per axis and direction."""
    return Halo(*(tuple(map(max, zip(*ends, strict=True))) for ends in zip(*halos, strict=True)))


def _halo_of(region: Region, tile: Sequence[Span]) -> Halo:
    pairs = list(zip(tile, (dim[0] for dim in region[-len(tile) :]), strict=True))
    return Halo(
        tuple(max(0, start - spans[0][0]) for (start, _), spans in pairs),
        tuple(max(0, spans[-1][1] - stop) for (_, stop), spans in pairs),
    )


class PlannedPass(NamedTuple):
    summarizes: tuple[str, ...]  # paths of the layers that need the whole grid and are summarized
    stores: tuple[str, ...]  # paths of the layers whose results are stored for later passes
    halo: Halo  # positions of the volume that a tile reads before and after its own
    macs: float  # for one sample, or for all of them where a layer mixes samples
    bytes: int  # the most that the values of a tile take at once


class _GraphPass(NamedTuple):
    """What one pass over all tiles summarizes, by node, and stores; the last one writes the output."""

    reductions: tuple[int, ...]
    writes: tuple[Value, ...]
    last: bool


@dataclass
class GraphPlan:
    """How a graph runs over the tiles of a volume."""

    labelled: LabelledGraph
    tile: tuple[int, ...]
    # Stored value -> the last pass that reads it.
    stored: dict[Value, int]
    # Where the output does not stand for padding: what tiles write begins there, in whole chunks. Empty: everywhere.
    kept: tuple[Span, ...] = field(default=(), kw_only=True)

    @cached_property
    def tiles(self) -> list[tuple[Span, ...]]:
        """Own positions of each tile, the last axis fastest."""
        return cores(self.labelled.size, self.tile)

    @property
    def cut(self) -> tuple[int, ...]:
        """The axes that are cut."""
        return cut_axes(self.labelled.size, self.tile)

    @property
    def reductions(self) -> Collection[int]:
        """The nodes that passes summarize."""
        return self.labelled.reductions

    @cached_property
    def stages(self) -> list[_GraphPass]:
        levels, last = self.labelled.levels, self.level_of(self.labelled.graph.output)
        return [
            _GraphPass(
                tuple(index for index in self.reductions if levels[index] == stage + 1),
                tuple(value for value in self.stored if levels[value.node] == stage),
                stage == last,
            )
            for stage in range(last + 1)
        ]

    @cached_property
    def passes(self) -> tuple[PlannedPass, ...]:
        nodes = self.labelled.graph.nodes
        return tuple(
            PlannedPass(
                tuple(dict.fromkeys(nodes[index].path for index in each.reductions)),
                tuple(dict.fromkeys(nodes[value.node].path for value in each.writes)),
                *self._cost(stage),
            )
            for stage, each in enumerate(self.stages)
        )

    def level_of(self, value: Value) -> int:
        """Return the first pass that can compute a value."""
        return self.labelled.levels[value.node]

    def given(self, stage: int) -> set[Value]:
        """Return the values that a pass reads: volumes, and what earlier passes stored."""
        return {*self.labelled.graph.inputs, *(value for value in self.stored if self.level_of(value) < stage)}

    def ends(self, stage: int) -> list[Value]:
        """Return the values that a pass computes to store and write them."""
        each = self.stages[stage]
        return [*each.writes, *([self.labelled.graph.output] if each.last else [])]

    def summarized(self, stage: int) -> list[Value]:
        nodes, reductions = self.labelled.graph.nodes, self.labelled.reductions
        return [
            nodes[index].inputs[each] for index in self.stages[stage].reductions for each in reductions[index].operands
        ]

    def wanted(self, stage: int, tile: Sequence[Span]) -> tuple[dict[int, dict[Value, Box]], dict[Value, Box]]:
        """Return what a pass summarizes of a tile, for each reduction, and all boxes that it computes."""
        every = {index: summarized_boxes(self.labelled, index, tile) for index in self.stages[stage].reductions}
        summarized = {index: boxes for index, boxes in every.items() if boxes}
        pairs = [pair for boxes in summarized.values() for pair in boxes.items() if pair[0] not in self.labelled.known]
        pairs += [(value, box) for value in self.ends(stage) if (box := self.own_box(value, tile)) is not None]
        wanted: dict[Value, Box] = {}
        for value, box in pairs:
            wanted[value] = hull(wanted.get(value, box), box)
        return summarized, wanted

    def own_box(self, value: Value, tile: Sequence[Span]) -> Box | None:
        """Return a tile's own part of a value; None if it has none."""
        layout = self.labelled.layouts[value]
        box = self.labelled.core(layout, tile)
        if self.kept and value == self.labelled.graph.output:
            box = self._move_to_kept(layout, box)
        return None if is_empty(box) or not self.labelled.owns(layout, tile) else box

    def _move_to_kept(self, layout: Layout, box: Box) -> Box:
        """Return what a tile writes of the output: its own part, moved by the padding before it."""
        moved = []
        for (piece,), ((start, stop),), (low, high) in zip(layout[2:], box[2:], self.kept, strict=True):
            first = min(high, low + start)
            moved.append(((first, high if stop == piece.length else max(first, min(high, low + stop))),))
        return (*box[:2], *moved)

    def _cost(self, stage: int) -> tuple[Halo, float, int]:
        """Return the halo, the MACs and the bytes of a pass."""
        # What a tile reads along an axis follows from its place along it alone, so a diagonal of tiles tells all.
        labelled, graph, given = self.labelled, self.labelled.graph, self.given(stage)
        halos, peak = [Halo(*[(0,) * len(self.tile)] * 2)], 0
        # Of each value, how many positions run along each axis in all tiles, and along no axis, None.
        counts: dict[Value, Counter[int | None]] = {}
        for tile, weights in _diagonal(axis_spans(self.labelled.size, self.tile)):
            summarized, wanted = self.wanted(stage, tile)
            regions = find_regions(labelled, wanted, given)
            left = sum(labelled.bytes_on(value, regions[value]) for value in wanted)
            # Beside what was computed, a summary takes as much as its operands.
            copies = [sum(map(labelled.bytes_on, own, map(region_of, own.values()))) for own in summarized.values()]
            peak = max(peak, count_bytes(labelled, regions, given, wanted), left + max(copies, default=0))
            for value, region in regions.items():
                if value in graph.inputs:
                    halos.append(_halo_of(region, tile))
                elif value not in given and _running_macs(labelled, value.node):
                    _add_positions(counts.setdefault(value, Counter()), labelled.layouts[value], region, weights)
        summing = sum(_summing_macs(graph.nodes[index]) for index in self.stages[stage].reductions)
        running = sum(
            _running_macs(labelled, value.node) * math.prod(own.values()) / max(1, math.prod(graph.info(value).shape))
            for value, own in counts.items()
        )
        return join_halos(halos), summing + running, peak

    @property
    def bytes_stored(self) -> int:
        """The most bytes of stored values at once."""
        info = self.labelled.graph.info
        stored = [(info(value).bytes, self.level_of(value), last) for value, last in self.stored.items()]
        stages = range(len(self.stages))
        return max(sum(size for size, first, last in stored if first <= stage <= last) for stage in stages)


def _summing_macs(node: Node) -> int:
    """Return the MACs of a reduction while it is summarized: all, but of a layer, which also responds."""
    return node.args[0].summing if node.op == "layer" else node.macs


def _running_macs(labelled: LabelledGraph, index: int) -> int:
    node = labelled.graph.nodes[index]
    return node.macs - _summing_macs(node) if index in labelled.reductions else node.macs


def _diagonal(spans: Sequence[Sequence[Span]]) -> Iterator[tuple[tuple[Span, ...], list[int]]]:
    """Iterate over tiles that stand for all, and along each axis for how many: those at both ends of an axis differ."""
    axes = [[(span, 1) for span in own] for own in spans]
    for own in axes:
        count = len(own)
        if count > 2 * _ENDS:
            own[_ENDS:-_ENDS] = [(own[count // 2][0], count - 2 * _ENDS)]
    for step in range(max(map(len, axes))):
        # An axis of fewer tiles stays at its last, which is counted already.
        pairs = [own[step] if step < len(own) else (own[-1][0], 0) for own in axes]
        yield tuple(span for span, _ in pairs), [weight for _, weight in pairs]


def _add_positions(counts: Counter[int | None], layout: Layout, region: Region, weights: Sequence[int]) -> None:
    """Add the positions of a region along each axis, so often; those along no axis, None, are the same in all tiles."""
    extents: dict[int | None, int] = dict.fromkeys([*range(len(weights)), None], 1)
    for piece, spans in zip(itertools.chain(*layout), itertools.chain(*region), strict=True):
        extents[piece.axis] *= sum(stop - start for start, stop in spans)
    counts.setdefault(None, extents.pop(None))
    counts.update({axis: extents[axis] * weight for axis, weight in enumerate(weights)})


@dataclass
class PatchPlan(GraphPlan):
    """How a graph runs on patches; its passes summarize attention alone, and store nothing."""

    # The graph of one patch, with the same nodes.
    patch: LabelledGraph
    # What a tile reads before and after its own positions, where the volume does not end.
    halo: Halo
    # Positions of the volume from one of a value to the next, along each axis.
    scales: dict[Value, dict[int, Fraction]]

    @property
    def reductions(self) -> list[int]:
        """The nodes that see the whole: attention."""
        return [index for index in self.labelled.reductions if self.labelled.graph.nodes[index].op == "layer"]

    @cached_property
    def multiples(self) -> tuple[int, ...]:
        """For each axis, where patches begin: at a position of each value, windows included."""
        along = [[own[axis].numerator for own in self.scales.values() if axis in own] for axis in range(len(self.tile))]
        return tuple(math.lcm(*own) for own in along)

    def region(self, tile: Sequence[Span]) -> tuple[Span, ...]:
        """Return the patch of a tile: all have the same size, also at the border of the volume."""
        lengths, spans = self.labelled.size, self.halo.around(tile, self.labelled.size)
        each = zip(spans, self.patch.size, lengths, self.multiples, strict=True)
        starts = (min(start // own * own, length - positions) for (start, _), positions, length, own in each)
        return tuple((start, start + positions) for start, positions in zip(starts, self.patch.size, strict=True))

    def first(self, value: Value, axis: int, region: Sequence[Span], length: int) -> Fraction:
        """Return where a patch begins in a value that has a length along an axis."""
        return region[axis][0] / self.scales[value].get(axis, Fraction(self.labelled.size[axis], length))

    def part(self, value: Value, region: Sequence[Span]) -> Box:
        """Return where the value of a patch lies in that of the whole, of which each dimension is one piece."""
        shape, box = self.patch.graph.info(value).shape, []
        for (piece,), length in zip(self.labelled.layouts[value], shape, strict=True):
            start = 0 if piece.axis is None else int(self.first(value, piece.axis, region, piece.length))
            box.append(((start, start + length),))
        return tuple(box)

    def patch_boxes(self, values: Collection[Value]) -> dict[Value, Box]:
        """Return the whole boxes of values on a patch, of those that depend on the volume."""
        return {value: whole_box(self.patch.layouts[value]) for value in values if value not in self.patch.known}

    def _cost(self, stage: int) -> tuple[Halo, float, int]:
        graph, reductions = self.patch.graph, self.stages[stage].reductions
        wanted = self.patch_boxes([*self.summarized(stage), *self.ends(stage)])
        regions = find_regions(self.patch, wanted, graph.inputs)
        macs = sum(_summing_macs(graph.nodes[index]) for index in reductions)
        for index in {value.node for value in regions}:
            macs += graph.nodes[index].macs - (_summing_macs(graph.nodes[index]) if index in self.reductions else 0)
        peak = count_bytes(self.patch, regions, graph.inputs, wanted)
        return self.halo, float(macs * len(self.tiles)), peak


@dataclass
class RegionCheck:
    """A check on a region, which runs as if it were the volume."""

    # The passes over its tiles, of which there are at least two.
    plan: GraphPlan
    # Of the untiled network in two precisions, and of the tiles.
    macs: float
    # Of the network's parameters and buffers in float64, and of what a convolution unfolds; grids take less.
    bytes: int

    @property
    def size(self) -> tuple[int, ...]:
        """The size of the region."""
        return self.plan.labelled.size


def make_graph_plan(labelled: LabelledGraph, tile: Sequence[int], chosen: Collection[Value]) -> GraphPlan:
    """Plan the passes of a graph; of the chosen values those are stored that a later pass reads."""
    last = labelled.levels[labelled.graph.output.node]
    plan = GraphPlan(labelled, tuple(map(min, tile, labelled.size)), dict.fromkeys(sorted(chosen), last))
    read: dict[Value, int] = {}
    for stage in range(len(plan.stages)):
        given = plan.given(stage)
        reached = _reach(labelled, [*plan.summarized(stage), *plan.ends(stage)], given)
        read |= dict.fromkeys(reached & given & plan.stored.keys(), stage)
    return replace(plan, stored=dict(sorted(read.items())))


def _reach(labelled: LabelledGraph, ends: Sequence[Value], given: Collection[Value]) -> set[Value]:
    """Return the values that a pass computes or reads for its ends: none beyond what is given or was summarized."""
    waiting, reached = list(ends), set[Value]()
    while waiting:
        value = waiting.pop()
        if value in reached or value in labelled.known:
            continue
        reached.add(value)
        reduction = labelled.reductions.get(value.node)
        if value not in given and (reduction is None or reduction.reads is not None):
            waiting += labelled.graph.nodes[value.node].inputs
    return reached


def find_stored(labelled: LabelledGraph) -> set[Value]:
    """Return the values to store so that each operation with MACs runs in one pass alone."""
    levels, graph = labelled.levels, labelled.graph
    stored = set(labelled.gathered)
    for index in labelled.order:
        for source in graph.nodes[index].inputs:
            later = levels[source.node] < levels[index]
            if later and source not in labelled.known and labelled.layouts[source]:
                stored.add(_cheapest_source(labelled, source))
    return {value for value in stored if value not in graph.inputs}


def _cheapest_source(labelled: LabelledGraph, value: Value) -> Value:
    """Return the value from which this one follows without MACs, and which has no more bytes."""
    graph = labelled.graph
    while True:
        node = graph.nodes[value.node]
        sources = [source for source in node.inputs if source not in labelled.known]
        grids = {source for source in sources if graph.info(source).bytes * 8 > graph.info(value).bytes}
        if node.macs or len(grids) != 1 or value in labelled.gathered:
            return value
        (source,) = grids
        if graph.info(source).bytes > graph.info(value).bytes or source.node not in labelled.calls:
            return value
        value = source


def fit_stored(labelled: LabelledGraph, allowed: int) -> set[Value]:
    """Return the values to store in so many bytes: those that save most MACs a byte, and all that are gathered."""

    def fits(values: Collection[Value]) -> bool:
        return make_graph_plan(labelled, labelled.size, values).bytes_stored <= allowed

    def saved_by(value: Value) -> float:
        nodes = {each.node for each in _reach(labelled, [value], chosen - {value})}
        return sum(_running_macs(labelled, node) for node in nodes) / labelled.graph.info(value).bytes

    chosen, removed = find_stored(labelled), list[Value]()
    while not fits(chosen) and chosen != labelled.gathered:
        removed.append(min(sorted(chosen - labelled.gathered), key=saved_by))
        chosen.remove(removed[-1])
    # What was removed early may fit beside the rest after what was removed later.
    for value in reversed(removed):
        if fits({*chosen, value}):
            chosen.add(value)
    return chosen
