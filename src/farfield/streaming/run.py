"""Run parts of a labelled graph: which region of each value is needed, and the values themselves."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from torch import Tensor

from farfield.streaming.graph import Value
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


def is_read(labelled: LabelledGraph, value: Value, box: Box) -> bool:
    """Whether a box has a position; `()` is nothing of a value that has dimensions."""
    return not is_empty(box) and (box != () or labelled.layouts[value] == ())


def find_regions(labelled: LabelledGraph, wanted: Mapping[Value, Box], given: Collection[Value]) -> dict[Value, Region]:
    """Return the region of each value that is computed or read for some boxes.

    Args:
        labelled: The graph.
        wanted: Value -> box.
        given: The values that are read and not computed: volumes and stored values.
    """
    regions = {value: region_of(box) for value, box in wanted.items()}
    for index in reversed(labelled.order):
        for output in range(len(labelled.graph.nodes[index].outputs)):
            value = Value(index, output)
            if value not in regions or value in given:
                continue
            for box in boxes_of(regions[value]):
                for source, needed in find_needs(labelled, index, output, box):
                    if source not in labelled.known and is_read(labelled, source, needed):
                        regions[source] = add_box(regions.get(source), needed)
    return regions


def compute(
    labelled: LabelledGraph,
    wanted: Mapping[Value, Box],
    given: Collection[Value],
    read: Read,
    parts: Mapping[int, Parts],
) -> dict[Value, Tensor]:
    """Compute boxes of values; each is freed after its last use.

    Args:
        labelled: The graph.
        wanted: Value -> box.
        given: The values that `read` reads.
        read: Reads a box of a volume or of a stored value.
        parts: Node -> the merged parts of a reduction.
    """
    regions = find_regions(labelled, wanted, given)
    known: dict[Value, Tensor] = {}
    users: Counter[Value] = Counter()
    for value in regions:
        if value not in given:
            users.update(set(labelled.graph.nodes[value.node].inputs))
    for index in labelled.order:
        inputs = set(labelled.graph.nodes[index].inputs)
        for output in range(len(labelled.graph.nodes[index].outputs)):
            value = Value(index, output)
            if value not in regions:
                continue
            region = regions[value]
            if value in given:
                known[value] = join_boxes([read(value, box) for box in boxes_of(region)], region)
                continue
            results = [run_box(labelled, value, box, known, regions, parts) for box in boxes_of(region)]
            known[value] = join_boxes(results, region)
            del results
            for source in inputs:
                users[source] -= 1
                if not users[source] and source not in wanted:
                    known.pop(source, None)
    return {value: read_box(known[value], regions[value], box) for value, box in wanted.items()}


def run_box(
    labelled: LabelledGraph,
    value: Value,
    box: Box,
    known: Mapping[Value, Tensor],
    regions: Mapping[Value, Region],
    parts: Mapping[int, Parts],
) -> Tensor:
    """Run a node for a box of one of its outputs."""
    index, output = value
    call, reduction = labelled.calls[index], labelled.reductions.get(index)

    def fetch(source: Value, needed: Box) -> Any:
        if not is_read(labelled, source, needed):
            return None
        constant = labelled.constants.get(source)
        if constant is not None:
            return read_box(constant, region_of(whole_box(labelled.layouts[source])), needed)
        return read_box(known[source], regions[source], needed)

    tensors = [fetch(*pair) for pair in find_needs(labelled, index, output, box)]
    if reduction is None:
        return labelled.rules[index].run(call, output, box, tensors)
    return reduction.finish(call, output, box, tensors, parts[index])


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
    labelled: LabelledGraph,
    index: int,
    boxes: Mapping[Value, Box],
    read: Read,
    tile: Sequence[Span],
) -> Parts:
    """Return the parts of a tile, from its own part of each operand, which `read` returns."""
    reduction, inputs = labelled.reductions[index], labelled.graph.nodes[index].inputs
    tensors: list[Any] = [None] * len(inputs)
    for each in reduction.operands:
        value, constant = inputs[each], labelled.constants.get(inputs[each])
        whole = region_of(whole_box(labelled.layouts[value]))
        box = boxes[value]
        tensors[each] = read(value, box) if constant is None else read_box(constant, whole, box)
    return reduction.summarize(lambda layout: reduction.whole_windows(layout, labelled.core(layout, tile)), tensors)


def count_bytes(
    labelled: LabelledGraph, regions: Mapping[Value, Region], given: Collection[Value], wanted: Collection[Value]
) -> int:
    """Return the most bytes that values on their regions take at once while `compute` runs."""
    users: Counter[Value] = Counter()
    for value in regions:
        if value not in given:
            users.update(set(labelled.graph.nodes[value.node].inputs))
    sizes = {
        value: count_positions(region) * labelled.graph.info(value).dtype.itemsize for value, region in regions.items()
    }
    live, peak, alive = 0, 0, set[Value]()
    for value in sorted(regions):
        live, peak = live + sizes[value], max(peak, live + sizes[value])
        alive.add(value)
        if value in given:
            continue
        peak = max(peak, live + scratch_bytes(labelled, value, regions[value]))
        for source in set(labelled.graph.nodes[value.node].inputs):
            users[source] -= 1
            if not users[source] and source in alive and source not in wanted:
                alive.remove(source)
                live -= sizes[source]
    return peak


def scratch_bytes(labelled: LabelledGraph, value: Value, region: Region) -> int:
    """Return the bytes that a node takes beside its operands and its output while it runs."""
    if value.node in labelled.reductions or value.node not in labelled.rules:
        return 0
    rule, call = labelled.rules[value.node], labelled.calls[value.node]
    numbers = max((rule.scratch(call, value.output, box) for box in boxes_of(region)), default=0)
    return numbers * labelled.graph.info(value).dtype.itemsize


def summary_scratch(labelled: LabelledGraph, index: int, boxes: Mapping[Value, Box]) -> int:
    """Return the bytes that a reduction takes beside its operands while a tile is summarized."""
    sizes = [math.prod(box_shape(box)) * labelled.graph.info(value).dtype.itemsize for value, box in boxes.items()]
    return labelled.reductions[index].copies * sum(sizes)
