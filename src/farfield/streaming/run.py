"""Run parts of a labelled graph: which region of each value is needed, and the values themselves."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from torch import Tensor

from farfield.streaming.graph import Graph, Value
from farfield.streaming.labels import LabelledGraph
from farfield.streaming.rules.rule import Parts
from farfield.streaming.spans import (
    Box,
    Layout,
    Region,
    Span,
    add_box,
    axes_of,
    box_shape,
    boxes_of,
    count_positions,
    is_empty,
    join_boxes,
    read_box,
    region_of,
    whole_box,
)

# (value, box) -> the numbers of a volume or of a stored value
Read = Callable[[Value, Box], Tensor]
# A box of a value -> the boxes of the operands that it is computed from.
Needs = dict[tuple[Value, Box], list[tuple[Value, Box]]]


def find_needs(labelled: LabelledGraph, index: int, output: int, box: Box) -> list[tuple[Value, Box]]:
    """Return the boxes of values that a node needs for a box of one of its outputs; empty ones are not read."""
    call, reduction = labelled.calls[index], labelled.reductions.get(index)
    if reduction is None:
        boxes = labelled.rules[index].needs(call, output, box)
    elif reduction.reads is None:
        return []
    else:
        boxes = reduction.reads(call, box)
    return list(zip(labelled.graph.nodes[index].inputs, boxes, strict=True))


def find_regions(labelled: LabelledGraph, wanted: Mapping[Value, Box], given: Collection[Value]) -> dict[Value, Region]:
    """Return the region of each value that is computed, or read if it is `given`, for some boxes of values."""
    return _trace(labelled, wanted, given)[0]


def _trace(
    labelled: LabelledGraph, wanted: Mapping[Value, Box], given: Collection[Value]
) -> tuple[dict[Value, Region], Needs]:
    regions, needs = {value: region_of(box) for value, box in wanted.items()}, Needs()
    for index in reversed(labelled.order):
        for output in range(len(labelled.graph.nodes[index].outputs)):
            value = Value(index, output)
            if value not in regions or value in given:
                continue
            for box in boxes_of(regions[value]):
                own = needs[value, box] = find_needs(labelled, index, output, box)
                for source, needed in own:
                    if source not in labelled.known and _is_read(labelled, source, needed):
                        regions[source] = add_box(regions.get(source), needed)
    return regions, needs


def _is_read(labelled: LabelledGraph, value: Value, box: Box) -> bool:
    """Whether a box has a position; `()` is nothing of a value that has dimensions."""
    return not is_empty(box) and (box != () or labelled.layouts[value] == ())


def compute(
    labelled: LabelledGraph,
    wanted: Mapping[Value, Box],
    given: Collection[Value],
    read: Read,
    parts: Mapping[int, Parts],
) -> dict[Value, Tensor]:
    """Compute a box of each wanted value; `given` ones are read, and each is freed after its last use.

    `parts` are the merged parts of the reductions that results depend on.
    """
    regions, needs = _trace(labelled, wanted, given)
    freed = _last_uses(labelled.graph, regions, given, wanted)
    known: dict[Value, Tensor] = {}

    def run(value: Value, box: Box) -> Tensor:
        call, reduction = labelled.calls[value.node], labelled.reductions.get(value.node)
        tensors: list[Any] = []
        for source, own in needs[value, box]:
            if not _is_read(labelled, source, own):
                tensors.append(None)
            elif source in labelled.known:
                tensors.append(_read_constant(labelled, source, own))
            else:
                tensors.append(read_box(known[source], regions[source], own))
        if reduction is None:
            return labelled.rules[value.node].run(call, value.output, box, tensors)
        return reduction.finish(call, value.output, box, tensors, parts[value.node])

    for value in sorted(regions):
        make = read if value in given else run
        known[value] = join_boxes([make(value, box) for box in boxes_of(regions[value])], regions[value])
        for source in freed.get(value, ()):
            known.pop(source, None)
    return {value: read_box(known[value], regions[value], box) for value, box in wanted.items()}


def _read_constant(labelled: LabelledGraph, value: Value, box: Box) -> Tensor:
    return read_box(labelled.constants[value], region_of(whole_box(labelled.layouts[value])), box)


# ---- memory ----------------------------------------------------------------------------------------------------------
def _last_uses(
    graph: Graph, values: Collection[Value], given: Collection[Value], wanted: Collection[Value]
) -> dict[Value, set[Value]]:
    """Return for each value that is computed those that nothing uses after it; `wanted` ones are used at the end."""
    freed, later = dict[Value, set[Value]](), set(wanted)
    for value in sorted(values, reverse=True):
        if value not in given:
            freed[value] = set(graph.nodes[value.node].inputs) - later
            later |= freed[value]
    return freed


def count_bytes(
    labelled: LabelledGraph, regions: Mapping[Value, Region], given: Collection[Value], wanted: Collection[Value]
) -> int:
    """Return the most bytes that values on their regions take at once while `compute` runs, scratch included."""
    freed = _last_uses(labelled.graph, regions, given, wanted)
    widths = {value: labelled.graph.info(value).dtype.itemsize for value in regions}
    sizes = {value: count_positions(region) * widths[value] for value, region in regions.items()}
    live = peak = 0
    for value in sorted(regions):
        live, scratch = live + sizes[value], 0
        if value not in given and value.node in labelled.rules and value.node not in labelled.reductions:
            rule, call = labelled.rules[value.node], labelled.calls[value.node]
            scratch = max((rule.scratch(call, value.output, box) for box in boxes_of(regions[value])), default=0)
        peak = max(peak, live + scratch * widths[value])
        live -= sum(sizes.get(source, 0) for source in freed.get(value, ()))
    return peak


# ---- reductions ------------------------------------------------------------------------------------------------------
def owns(layout: Layout, tile: Sequence[Span], cut: Sequence[int]) -> bool:
    """Whether a tile has its own part of a value: along axes that the value does not run along, the first tile has."""
    there = set(axes_of(layout))
    return all(axis in there or tile[axis][0] == 0 for axis in cut)


def summarized_boxes(labelled: LabelledGraph, index: int, tile: Sequence[Span], cut: Sequence[int]) -> dict[Value, Box]:
    """Return the tile's own part of each operand that a reduction summarizes; nothing if it has none."""
    reduction, inputs = labelled.reductions[index], labelled.graph.nodes[index].inputs
    values = [inputs[each] for each in reduction.operands]
    if not owns(labelled.layouts[values[0]], tile, cut):
        return {}
    boxes = {
        value: reduction.whole_windows(labelled.layouts[value], labelled.core(labelled.layouts[value], tile))
        for value in values
    }
    return {} if any(map(is_empty, boxes.values())) else boxes


def summarize_tile(
    labelled: LabelledGraph, index: int, boxes: Mapping[Value, Box], read: Read, tile: Sequence[Span]
) -> Parts:
    """Return the parts of a tile, from its own part of each operand, which `read` returns."""
    reduction, inputs = labelled.reductions[index], labelled.graph.nodes[index].inputs
    tensors: list[Any] = [None] * len(inputs)
    for each in reduction.operands:
        value = inputs[each]
        box = boxes[value]
        tensors[each] = _read_constant(labelled, value, box) if value in labelled.known else read(value, box)
    return reduction.summarize(lambda layout: reduction.whole_windows(layout, labelled.core(layout, tile)), tensors)


def summary_scratch(labelled: LabelledGraph, index: int, boxes: Mapping[Value, Box]) -> int:
    """Return the bytes that a reduction takes beside its operands while a tile is summarized."""
    sizes = [math.prod(box_shape(box)) * labelled.graph.info(value).dtype.itemsize for value, box in boxes.items()]
    return sum(sizes)
