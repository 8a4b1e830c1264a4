"""Plan passes over tiles from the graph alone: levels, stored values, halos, memory."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from farfield.streaming.geometry import Halo, axis_spans, cores, cut_axes
from farfield.streaming.graph import Value
from farfield.streaming.labels import LabelledGraph
from farfield.streaming.run import count_bytes, find_regions, owns, summarized_boxes, summary_scratch
from farfield.streaming.spans import Box, Layout, Region, Span, count_positions, hull, is_empty

# Tiles at each end of an axis whose cost is counted one by one.
ENDS = 2


class PassCost(NamedTuple):
    """What a pass costs.

    Attributes:
        macs: Its MACs.
        bytes: The most bytes that the values of a tile take at once.
        halo: What a tile reads of the volume before and after its own positions.
    """

    macs: float
    bytes: int
    halo: Halo


@dataclass
class GraphPass:
    """One pass over all tiles.

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
        tiles: Own positions of each tile, the last axis fastest.
        spans: For each axis, the own positions of the tiles along it.
        cut: The axes that are cut.
        stages: The passes.
        stored: Stored value -> the last pass that reads it.
    """

    labelled: LabelledGraph
    tiles: list[tuple[Span, ...]]
    spans: list[list[Span]]
    cut: tuple[int, ...]
    stages: list[GraphPass] = field(default_factory=list)
    stored: dict[Value, int] = field(default_factory=dict)

    def given(self, stage: int) -> set[Value]:
        """Return the values that a pass reads: volumes, and what earlier passes stored."""
        level = self.level_of
        return {*self.labelled.graph.inputs, *(value for value in self.stored if level(value) < stage)}

    def level_of(self, value: Value) -> int:
        """Return the first pass that can compute a value."""
        return self.labelled.levels[value.node]

    def wanted(self, stage: int, tile: Sequence[Span]) -> tuple[dict[int, dict[Value, Box]], dict[Value, Box]]:
        """Return what a pass summarizes of a tile, for each reduction, and all boxes that it computes."""
        labelled, each = self.labelled, self.stages[stage]
        summarized = {index: summarized_boxes(labelled, index, tile, self.cut) for index in each.reductions}
        wanted: dict[Value, Box] = {}
        read = [pair for boxes in summarized.values() for pair in boxes.items()]
        pairs = [(value, box) for value, box in read if value not in labelled.known]
        for value in (*each.writes, *([labelled.graph.output] if each.last else [])):
            box = self.own_box(value, tile)
            pairs += [] if box is None else [(value, box)]
        for value, box in pairs:
            wanted[value] = hull(wanted.get(value, box), box)
        return {index: boxes for index, boxes in summarized.items() if boxes}, wanted

    def own_box(self, value: Value, tile: Sequence[Span]) -> Box | None:
        """Return a tile's own part of a value; None if it has none."""
        layout = self.labelled.layouts[value]
        box = self.labelled.core(layout, tile)
        return None if is_empty(box) or not owns(layout, tile, self.cut) else box

    def cost(self, stage: int) -> PassCost:
        """Return the cost of a pass.

        What a tile reads along an axis follows from its place along that axis alone, so a diagonal of tiles tells all.
        """
        places = [sample_places(spans) for spans in self.spans]
        macs: dict[Value, dict[int, list[float]]] = {}
        given, peak, before, after = self.given(stage), 0, [0] * len(places), [0] * len(places)
        for step in range(max(map(len, places))):
            chosen = [own[min(step, len(own) - 1)] for own in places]
            tile = tuple(spans[place] for spans, (place, _) in zip(self.spans, chosen, strict=True))
            summarized, wanted = self.wanted(stage, tile)
            regions = find_regions(self.labelled, wanted, given)
            left = sum(
                count_positions(regions[value]) * self.labelled.graph.info(value).dtype.itemsize for value in wanted
            )
            scratch = (summary_scratch(self.labelled, index, boxes) for index, boxes in summarized.items())
            peak = max(peak, count_bytes(self.labelled, regions, given, wanted), left + max(scratch, default=0))
            for value, region in regions.items():
                if value in self.labelled.graph.inputs:
                    widen_halo(before, after, self.labelled.layouts[value], region, tile)
                if value in given or not self.labelled.graph.nodes[value.node].macs:
                    continue
                extents = extents_of(self.labelled.layouts[value], region)
                own = macs.setdefault(value, {axis: [] for axis in (*range(len(places)), -1)})
                own[-1] = [extents.get(-1, 1.0)]
                for axis, (each, (_, weight)) in enumerate(zip(places, chosen, strict=True)):
                    if step < len(each):
                        own[axis].append(weight * extents.get(axis, 1.0))
        return PassCost(
            sum(
                self.labelled.graph.nodes[value.node].macs
                * math.prod(map(sum, own.values()))
                / max(1, math.prod(self.labelled.graph.info(value).shape))
                for value, own in macs.items()
            ),
            peak,
            Halo(tuple(before), tuple(after)),
        )

    @property
    def bytes_stored(self) -> int:
        """The most bytes of stored values at once."""
        return max(
            (
                sum(
                    self.labelled.graph.info(value).bytes
                    for value, last in self.stored.items()
                    if self.level_of(value) <= stage <= last
                )
                for stage in range(len(self.stages))
            ),
            default=0,
        )


def sample_places(spans: Sequence[Span]) -> list[tuple[int, int]]:
    """Return the places of some tiles along an axis, and of how many each has the cost: those at both ends differ."""
    count = len(spans)
    if count <= 2 * ENDS + 1:
        return [(place, 1) for place in range(count)]
    ends = [(place, 1) for place in range(ENDS)]
    return [*ends, (count // 2, count - 2 * ENDS), *((count - 1 - place, 1) for place, _ in reversed(ends))]


def extents_of(layout: Layout, region: Region) -> dict[int, float]:
    """Return the number of positions of a region along each axis that is cut, and of all others together as -1."""
    extents: dict[int, float] = {}
    for dim, spans in zip(layout, region, strict=True):
        for piece, own in zip(dim, spans, strict=True):
            axis = -1 if piece.axis is None else piece.axis
            extents[axis] = extents.get(axis, 1.0) * sum(stop - start for start, stop in own)
    return extents


def widen_halo(before: list[int], after: list[int], layout: Layout, region: Region, tile: Sequence[Span]) -> None:
    """Widen a halo so that a tile reads a region of the volume."""
    for (piece, *_), (spans, *_) in zip(layout, region, strict=True):
        if piece.axis is not None and spans:
            start, stop = tile[piece.axis]
            before[piece.axis] = max(before[piece.axis], start - spans[0][0])
            after[piece.axis] = max(after[piece.axis], spans[-1][1] - stop)


def make_graph_plan(labelled: LabelledGraph, tile: Sequence[int], chosen: Collection[Value]) -> GraphPlan:
    """Plan the passes of a graph.

    Args:
        labelled: The graph.
        tile: Size of the tiles.
        chosen: The values that are stored between passes, those that later passes read.
    """
    size = labelled.size
    plan = GraphPlan(labelled, cores(size, tile), axis_spans(size, tile), cut_axes(size, tile))
    levels, graph = labelled.levels, labelled.graph
    count = levels[graph.output.node] + 1
    for stage in range(count):
        reductions = tuple(index for index in labelled.reductions if levels[index] == stage + 1)
        writes = tuple(sorted(value for value in chosen if levels[value.node] == stage))
        plan.stages.append(GraphPass(reductions, writes, stage == count - 1))
    plan.stored = dict.fromkeys(sorted(chosen), -1)
    for stage in range(count):
        plan.stored.update(dict.fromkeys(find_read(plan, stage), stage))
    unused = {value for value, last in plan.stored.items() if last < 0}
    plan.stored = {value: last for value, last in plan.stored.items() if value not in unused}
    for each in plan.stages:
        each.writes = tuple(value for value in each.writes if value not in unused)
    return plan


def find_read(plan: GraphPlan, stage: int) -> set[Value]:
    """Return the stored values that a pass may read, whatever the tile: all that what it computes depends on."""
    labelled, each = plan.labelled, plan.stages[stage]
    nodes, given = labelled.graph.nodes, plan.given(stage)
    summarized = {
        nodes[index].inputs[place] for index in each.reductions for place in labelled.reductions[index].operands
    }
    waiting = [*summarized, *each.writes, *([labelled.graph.output] if each.last else [])]
    read, seen = set[Value](), set[Value]()
    while waiting:
        value = waiting.pop()
        if value in seen or value in labelled.known:
            continue
        seen.add(value)
        if value in given:
            read.add(value)
            continue
        reduction = labelled.reductions.get(value.node)
        if reduction is None or reduction.reads is not None:
            waiting += nodes[value.node].inputs
    return read & plan.stored.keys()


def find_stored(labelled: LabelledGraph) -> set[Value]:
    """Return the values to store so that each operation with MACs runs in one pass alone."""
    levels, graph = labelled.levels, labelled.graph
    stored = set(labelled.gathered)
    for index in labelled.order:
        for source in graph.nodes[index].inputs:
            later = levels[source.node] < levels[index]
            if later and source not in labelled.known and labelled.layouts[source]:
                stored.add(cheapest_source(labelled, source))
    return {value for value in stored if value not in graph.inputs}


def cheapest_source(labelled: LabelledGraph, value: Value) -> Value:
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


def fit_stored(labelled: LabelledGraph, tile: Sequence[int], allowed: int) -> set[Value]:
    """Return the values to store that take at most so many bytes at once: those that save most MACs a byte.

    Values of which one position needs all along an axis are stored in any case.
    """
    chosen = find_stored(labelled)
    while make_graph_plan(labelled, tile, chosen).bytes_stored > allowed:
        optional = chosen - labelled.gathered
        if not optional:
            return chosen
        saved = {value: macs_to(labelled, value, chosen) / labelled.graph.info(value).bytes for value in optional}
        chosen.remove(min(optional, key=saved.__getitem__))
    return chosen


def macs_to(labelled: LabelledGraph, value: Value, stored: Collection[Value]) -> int:
    """Return the MACs that lead to a value from other stored values and from the volume."""
    graph, waiting, seen = labelled.graph, [value.node], set[int]()
    while waiting:
        index = waiting.pop()
        if index in seen:
            continue
        seen.add(index)
        waiting += [source.node for source in graph.nodes[index].inputs if source not in stored]
    return sum(graph.nodes[index].macs for index in seen)
