"""Plan passes over tiles from the graph alone: levels, stored values, halos, memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from farfield.streaming.geometry import cores
from farfield.streaming.labels import LabelledGraph
from farfield.streaming.operations import Value
from farfield.streaming.run import count_bytes, count_macs, find_regions, owns, summarized_boxes
from farfield.streaming.spans import Box, Span, is_empty


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
        tiles: Own positions of each tile.
        cut: The axes that are cut.
        stages: The passes.
        stored: Stored value -> the last pass that reads it.
    """

    labelled: LabelledGraph
    tiles: list[tuple[Span, ...]]
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
        wanted = {
            value: box
            for boxes in summarized.values()
            for value, box in boxes.items()
            if value not in labelled.constants
        }
        for value in (*each.writes, *([labelled.graph.output] if each.last else [])):
            layout = labelled.layouts[value]
            box = labelled.core(layout, tile)
            if owns(layout, tile, self.cut) and not is_empty(box):
                wanted[value] = box
        return {index: boxes for index, boxes in summarized.items() if boxes}, wanted

    def work(self, stage: int) -> tuple[float, int]:
        """Return the MACs of a pass, and the most bytes of a tile, from a tile in the middle."""
        tile = self.tiles[len(self.tiles) // 2]
        _, wanted = self.wanted(stage, tile)
        given = self.given(stage)
        regions = find_regions(self.labelled, wanted, given)
        share = math.prod(stop - start for start, stop in tile) / math.prod(self.labelled.size)
        macs = count_macs(self.labelled, regions, given) / share
        return macs, count_bytes(self.labelled, regions, given, wanted)

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


def make_graph_plan(labelled: LabelledGraph, tile: Sequence[int], *, store: bool) -> GraphPlan:
    """Plan the passes of a graph.

    Args:
        labelled: The graph.
        tile: Size of the tiles.
        store: Whether values are stored between passes.
    """
    size = labelled.size
    cut = tuple(axis for axis, (own, length) in enumerate(zip(tile, size, strict=True)) if own < length)
    plan = GraphPlan(labelled, cores(size, tile), cut)
    levels, graph = labelled.levels, labelled.graph
    count = levels[graph.output.node] + 1
    chosen = find_stored(labelled) if store else set(labelled.gathered)
    for stage in range(count):
        reductions = tuple(index for index in labelled.reductions if levels[index] == stage + 1)
        writes = tuple(sorted(value for value in chosen if levels[value.node] == stage))
        plan.stages.append(GraphPass(reductions, writes, stage == count - 1))
    plan.stored = dict.fromkeys(chosen, -1)
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
        if value in seen or value in labelled.constants:
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
            if later and source not in labelled.constants and labelled.layouts[source]:
                stored.add(cheapest_source(labelled, source))
    return {value for value in stored if value not in graph.inputs}


def cheapest_source(labelled: LabelledGraph, value: Value) -> Value:
    """Return the value from which this one follows without MACs, and which has no more bytes."""
    graph = labelled.graph
    while True:
        node = graph.nodes[value.node]
        sources = [source for source in node.inputs if source not in labelled.constants]
        grids = {source for source in sources if graph.info(source).bytes * 8 > graph.info(value).bytes}
        if node.macs or len(grids) != 1 or value in labelled.gathered:
            return value
        (source,) = grids
        if graph.info(source).bytes > graph.info(value).bytes or source.node not in labelled.calls:
            return value
        value = source
