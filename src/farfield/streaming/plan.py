"""Plan passes over tiles from the graph alone: levels, stored values, halos, memory."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from farfield.streaming.graph import Node, Value
from farfield.streaming.labels import LabelledGraph
from farfield.streaming.run import count_bytes, find_regions, owns, summarized_boxes, summary_scratch
from farfield.streaming.spans import Box, Layout, Region, Span, count_positions, hull, is_empty

# Tiles at each end of an axis whose cost is counted one by one.
ENDS = 2


# ---- tiles -----------------------------------------------------------------------------------------------------------
class Halo(NamedTuple):
    """Positions that a tile reads before and after its own positions, one number per spatial dim each."""

    before: tuple[int, ...]
    after: tuple[int, ...]

    def join(self, other: Halo) -> Halo:
        """Return the larger of two halos, per axis and direction."""
        before, after = (tuple(map(max, *pair)) for pair in zip(self, other, strict=True))
        return Halo(before, after)

    def around(self, core: Sequence[Span], whole: Sequence[int]) -> tuple[Span, ...]:
        """Return the region that a tile reads: its own positions and the halo, cut at the border of the volume."""
        return tuple(
            (max(0, start - before), min(length, stop + after))
            for (start, stop), before, after, length in zip(core, *self, whole, strict=True)
        )


def axis_spans(size: Sequence[int], tile: Sequence[int]) -> list[list[Span]]:
    """Return for each axis the own positions of the tiles along it."""
    return [
        [(start, min(start + positions, length)) for start in range(0, length, positions)]
        for length, positions in zip(size, tile, strict=True)
    ]


def cores(size: Sequence[int], tile: Sequence[int]) -> list[tuple[Span, ...]]:
    """Return the own positions of each tile, the last axis fastest; every position of the volume is in one tile."""
    return list(itertools.product(*axis_spans(size, tile)))


def cut_axes(size: Sequence[int], tile: Sequence[int]) -> tuple[int, ...]:
    """Return the axes along which tiles are shorter than the volume."""
    return tuple(axis for axis, (length, own) in enumerate(zip(size, tile, strict=True)) if own < length)


def round_up(number: int, multiple: int) -> int:
    """Round a number up to the next multiple of `multiple`."""
    return -(-number // multiple) * multiple


def round_up_tile(tile: int | Sequence[int | None], size: Sequence[int], multiples: Sequence[int]) -> tuple[int, ...]:
    """Return the size of requested tiles, rounded up to multiples; axes of which none is requested are not cut."""
    requested = (tile,) * len(size) if isinstance(tile, int) else tile
    return tuple(
        length if own is None else min(length, round_up(own, multiple))
        for own, length, multiple in zip(requested, size, multiples, strict=True)
    )


# ---- passes ----------------------------------------------------------------------------------------------------------
class PlannedPass(NamedTuple):
    """A pass over all tiles.

    Attributes:
        summarizes: Paths of the layers that need the whole grid and are summarized.
        stores: Paths of the layers whose results are stored for later passes.
        halo: Positions of the volume that a tile reads before and after its own.
        macs: MACs for one sample, or for all of them where a layer mixes samples.
        bytes: The most bytes that the values of a tile take at once.
    """

    summarizes: tuple[str, ...]
    stores: tuple[str, ...]
    halo: Halo
    macs: float
    bytes: int


class GraphPass(NamedTuple):
    """One pass over all tiles, by nodes of the graph.

    Attributes:
        reductions: The nodes that it summarizes.
        writes: The values that it stores.
        last: Whether it writes the output.
    """

    reductions: tuple[int, ...]
    writes: tuple[Value, ...]
    last: bool


@dataclass
class GraphPlan:
    """How a graph runs over the tiles of a volume.

    Attributes:
        labelled: The graph.
        tile: Size of the tiles.
        stages: The passes.
        stored: Stored value -> the last pass that reads it.
    """

    labelled: LabelledGraph
    tile: tuple[int, ...]
    stages: list[GraphPass]
    stored: dict[Value, int]

    @cached_property
    def spans(self) -> list[list[Span]]:
        """For each axis, the own positions of the tiles along it."""
        return axis_spans(self.labelled.size, self.tile)

    @cached_property
    def tiles(self) -> list[tuple[Span, ...]]:
        """Own positions of each tile, the last axis fastest."""
        return cores(self.labelled.size, self.tile)

    @cached_property
    def cut(self) -> tuple[int, ...]:
        """The axes that are cut."""
        return cut_axes(self.labelled.size, self.tile)

    def given(self, stage: int) -> set[Value]:
        """Return the values that a pass reads: volumes, and what earlier passes stored."""
        return {*self.labelled.graph.inputs, *(value for value in self.stored if self.level_of(value) < stage)}

    def level_of(self, value: Value) -> int:
        """Return the first pass that can compute a value."""
        return self.labelled.levels[value.node]

    def ends(self, stage: int) -> list[Value]:
        """Return the values that a pass computes beside what it summarizes."""
        each = self.stages[stage]
        return [*each.writes, *([self.labelled.graph.output] if each.last else [])]

    def wanted(self, stage: int, tile: Sequence[Span]) -> tuple[dict[int, dict[Value, Box]], dict[Value, Box]]:
        """Return what a pass summarizes of a tile, for each reduction, and all boxes that it computes."""
        labelled = self.labelled
        summarized = {
            index: summarized_boxes(labelled, index, tile, self.cut) for index in self.stages[stage].reductions
        }
        wanted: dict[Value, Box] = {}
        read = [pair for boxes in summarized.values() for pair in boxes.items()]
        pairs = [(value, box) for value, box in read if value not in labelled.known]
        boxes_of_ends = [(value, self.own_box(value, tile)) for value in self.ends(stage)]
        for value, box in [*pairs, *((value, box) for value, box in boxes_of_ends if box is not None)]:
            wanted[value] = hull(wanted.get(value, box), box)
        return {index: boxes for index, boxes in summarized.items() if boxes}, wanted

    def own_box(self, value: Value, tile: Sequence[Span]) -> Box | None:
        """Return a tile's own part of a value; None if it has none."""
        layout = self.labelled.layouts[value]
        box = self.labelled.core(layout, tile)
        return None if is_empty(box) or not owns(layout, tile, self.cut) else box

    def describe(self, stage: int, halo: Halo, macs: float, peak: int) -> PlannedPass:
        """Return a pass by the names of layers, with what it costs."""
        nodes, each = self.labelled.graph.nodes, self.stages[stage]
        summarizes = dict.fromkeys(nodes[index].path for index in each.reductions)
        stores = dict.fromkeys(nodes[value.node].path for value in each.writes)
        return PlannedPass(tuple(summarizes), tuple(stores), halo, macs, peak)

    def cost(self, stage: int) -> PlannedPass:
        """Return a pass with its cost.

        What a tile reads along an axis follows from its place along that axis alone, so a diagonal of tiles tells all.
        """
        labelled, graph = self.labelled, self.labelled.graph
        places = [_sample_places(spans) for spans in self.spans]
        given, peak, before, after = self.given(stage), 0, [0] * len(places), [0] * len(places)
        # Of each value how many positions of it run, along each axis in all tiles, and along all others together.
        counts: dict[Value, list[float]] = {}
        for step in range(max(map(len, places))):
            chosen = [own[min(step, len(own) - 1)] for own in places]
            tile = tuple(spans[place] for spans, (place, _) in zip(self.spans, chosen, strict=True))
            summarized, wanted = self.wanted(stage, tile)
            regions = find_regions(labelled, wanted, given)
            left = sum(count_positions(regions[value]) * graph.info(value).dtype.itemsize for value in wanted)
            scratch = (summary_scratch(labelled, index, boxes) for index, boxes in summarized.items())
            peak = max(peak, count_bytes(labelled, regions, given, wanted), left + max(scratch, default=0))
            for value, region in regions.items():
                if value in graph.inputs:
                    _widen_halo(before, after, labelled.layouts[value], region, tile)
                if value in given or not _running_macs(labelled, value.node):
                    continue
                extents = _extents_of(labelled.layouts[value], region, len(places))
                own_counts = counts.setdefault(value, [0.0] * len(places) + extents[-1:])
                for axis, (each, (_, weight)) in enumerate(zip(places, chosen, strict=True)):
                    if step < len(each):
                        own_counts[axis] += weight * extents[axis]
        summing = sum(summing_macs(graph.nodes[index]) for index in self.stages[stage].reductions)
        running = sum(
            _running_macs(labelled, value.node) * math.prod(own_counts) / max(1, math.prod(graph.info(value).shape))
            for value, own_counts in counts.items()
        )
        return self.describe(stage, Halo(tuple(before), tuple(after)), summing + running, peak)

    @property
    def bytes_stored(self) -> int:
        """The most bytes of stored values at once."""
        info = self.labelled.graph.info
        live = (
            sum(info(value).bytes for value, last in self.stored.items() if self.level_of(value) <= stage <= last)
            for stage in range(len(self.stages))
        )
        return max(live, default=0)


def summing_macs(node: Node) -> int:
    """Return the MACs of a reduction while it is summarized: all, but of a layer, which also responds."""
    return node.args[0].summing if node.op == "layer" else node.macs


def _running_macs(labelled: LabelledGraph, index: int) -> int:
    """Return the MACs of a node while its output is computed."""
    node = labelled.graph.nodes[index]
    return node.macs - summing_macs(node) if index in labelled.reductions else node.macs


def _sample_places(spans: Sequence[Span]) -> list[tuple[int, int]]:
    """Return the places of some tiles along an axis, and of how many each has the cost: those at both ends differ."""
    count = len(spans)
    if count <= 2 * ENDS + 1:
        return [(place, 1) for place in range(count)]
    ends = [(place, 1) for place in range(ENDS)]
    return [*ends, (count // 2, count - 2 * ENDS), *((count - 1 - place, 1) for place, _ in reversed(ends))]


def _extents_of(layout: Layout, region: Region, axes: int) -> list[float]:
    """Return the number of positions of a region along each axis of the volume, and along all others together."""
    extents = [1.0] * (axes + 1)
    for dim, spans in zip(layout, region, strict=True):
        for piece, own in zip(dim, spans, strict=True):
            extents[axes if piece.axis is None else piece.axis] *= sum(stop - start for start, stop in own)
    return extents


def _widen_halo(before: list[int], after: list[int], layout: Layout, region: Region, tile: Sequence[Span]) -> None:
    """Widen a halo so that a tile reads a region of the volume."""
    for (piece, *_), (spans, *_) in zip(layout, region, strict=True):
        if piece.axis is not None and spans:
            start, stop = tile[piece.axis]
            before[piece.axis] = max(before[piece.axis], start - spans[0][0])
            after[piece.axis] = max(after[piece.axis], spans[-1][1] - stop)


def make_graph_plan(labelled: LabelledGraph, tile: Sequence[int], chosen: Collection[Value]) -> GraphPlan:
    """Plan the passes of a graph; of the chosen values those are stored that a later pass reads."""
    levels, last = labelled.levels, labelled.levels[labelled.graph.output.node]
    stages = [
        GraphPass(
            tuple(index for index in labelled.reductions if levels[index] == stage + 1),
            tuple(sorted(value for value in chosen if levels[value.node] == stage)),
            stage == last,
        )
        for stage in range(last + 1)
    ]
    plan = GraphPlan(labelled, tuple(map(min, tile, labelled.size)), stages, dict.fromkeys(chosen, last))
    read = {value: stage for stage in range(last + 1) for value in _find_read(plan, stage)}
    used = [each._replace(writes=tuple(value for value in each.writes if value in read)) for each in stages]
    return replace(plan, stages=used, stored={value: read[value] for value in sorted(read)})


def _find_read(plan: GraphPlan, stage: int) -> set[Value]:
    """Return the stored values that a pass may read, whatever the tile: all that what it computes depends on."""
    nodes, ends = plan.labelled.graph.nodes, plan.ends(stage)
    for index in plan.stages[stage].reductions:
        ends += [nodes[index].inputs[place] for place in plan.labelled.reductions[index].operands]
    given = plan.given(stage)
    return _reach(plan.labelled, ends, given) & given & plan.stored.keys()


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


# ---- what is stored --------------------------------------------------------------------------------------------------
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
    """Return the values to store that take at most so many bytes at once: those that save most MACs a byte.

    Values of which one position needs all along an axis are stored in any case.
    """

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
