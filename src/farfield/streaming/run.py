"""Run parts of a labelled graph: compute a box of each wanted value, and summarize a tile."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from torch import Tensor

from farfield.streaming.graph import Value
from farfield.streaming.labels import LabelledGraph, is_read, last_uses, trace
from farfield.streaming.rules.rule import Parts
from farfield.streaming.spans import Box, Span, boxes_of, join_boxes, read_box, region_of, whole_box

# (value, box) -> the numbers of a volume or of a stored value
Read = Callable[[Value, Box], Tensor]


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
    regions, needs = trace(labelled, wanted, given)
    freed = last_uses(labelled.graph, regions, given, wanted)
    known: dict[Value, Tensor] = {}

    def run(value: Value, box: Box) -> Tensor:
        call, reduction = labelled.calls[value.node], labelled.reductions.get(value.node)
        tensors: list[Any] = []
        for source, own in needs[value, box]:
            if not is_read(labelled, source, own):
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
