"""Run parts of a labelled graph: compute a box of each wanted value, and summarize a tile."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from farfield.ops.modes import full_precision
from farfield.streaming.graph import Value, find_operation, map_values
from farfield.streaming.labels import LabelledGraph, is_read, last_uses, trace
from farfield.streaming.rules import POINTWISE
from farfield.streaming.rules.rule import OperationCall, Parts
from farfield.streaming.spans import Box, Span, box_shape, boxes_of, join_boxes, read_box, take_box

# (value, box) -> the numbers of a volume or of a stored value
Read = Callable[[Value, Box], Tensor]


def compute(
    labelled: LabelledGraph,
    wanted: Mapping[Value, Box],
    given: Collection[Value],
    read: Read,
    # Merged, of the reductions that results depend on; of scans, the states before, in whose place those behind come.
    parts: Mapping[int, Any],
) -> dict[Value, Tensor]:
    """Compute a box of each wanted value; `given` ones are read, and each is freed after its last use."""
    regions, needs = trace(labelled, wanted, given)
    freed = last_uses(labelled.graph, regions, given, wanted)
    known: dict[Value, Tensor] = {}
    # Values whose memory was made here, and is not that of a volume, a parameter, or a merged sum.
    owned: set[Value] = set()

    def may_overwrite(value: Value, call: OperationCall, tensors: Sequence[Tensor | None]) -> bool:
        first, own = labelled.graph.nodes[value.node].inputs[0], tensors[0]
        if own is None or own is not known.get(first) or first not in owned or first not in freed.get(value, ()):
            return False
        same = (call.operands[0].shape, own.dtype) == (call.shape, call.dtype)
        others = (each for each in (*known.values(), *tensors) if each is not own)
        return same and len(list(boxes_of(regions[value]))) == 1 and not _shares_memory(own, others)

    def run(value: Value, box: Box) -> Tensor:
        call, reduction = labelled.calls[value.node], labelled.reductions.get(value.node)
        tensors: list[Any] = []
        for source, own in needs[value, box]:
            if not is_read(labelled, source, own):
                tensors.append(None)
            elif source in labelled.kept:
                tensors.append(take_box(labelled.constants[source], labelled.layouts[source], own))
            else:
                tensors.append(read_box(known[source], regions[source], own))
        held = tensors
        with _precision_of(call.op):
            if reduction is not None:
                held = list(tensors)
                map_values(parts[value.node], Tensor, held.append)
                result = reduction.respond(call, value.output, box, tensors, parts[value.node])
            elif value.node in labelled.scans:
                carried = parts[value.node]
                result, carried[:] = labelled.scans[value.node].step(call, box, tensors, [*carried] or None)
            else:
                rule = labelled.rules[value.node]
                name = _find_in_place(call.op) if rule is POINTWISE and not torch.is_grad_enabled() else None
                if name and may_overwrite(value, call, tensors):
                    call, held = call._replace(op=name), []
                result = rule.run(call, value.output, box, tensors)
        # A module of the user may return what it keeps.
        if call.op != "layer" and not _shares_memory(result, held):
            owned.add(value)
        return result

    def look_up(value: Value, box: Box) -> Tensor:
        numbers = read(value, box)
        if numbers.shape != box_shape(box):
            raise LookupError(f"the box {box} of {value} was read as numbers of shape {tuple(numbers.shape)}")
        return numbers

    for value in sorted(regions):
        make = look_up if value in given else run
        known[value] = join_boxes([make(value, box) for box in boxes_of(regions[value])], regions[value])
        for source in freed.get(value, ()):
            known.pop(source, None)
    return {value: read_box(known[value], regions[value], box) for value, box in wanted.items()}


def _precision_of(op: str) -> AbstractContextManager[None]:
    """Return a context without autocast, which the graph has as conversions; a layer runs as in the network."""
    return nullcontext() if op == "layer" else full_precision(torch.empty(0))


@functools.cache
def _find_in_place(op: str) -> str | None:
    """Return the operation of torch that writes the result to its first operand; None if there is none."""
    namespace, name, overload = op.split(".")
    packet = getattr(getattr(torch.ops, namespace), f"{name}_", None)
    if packet is None or overload not in packet.overloads():
        return None
    # `pow.Scalar` raises a number to a tensor, `pow_.Scalar` a tensor to a number.
    kinds, own = (
        [(argument.name, str(argument.type)) for argument in each._schema.arguments]
        for each in (find_operation(op), getattr(packet, overload))
    )
    return f"{namespace}.{name}_.{overload}" if kinds == own and kinds[0] == ("self", "Tensor") else None


def _shares_memory(tensor: Tensor, others: Iterable[Tensor | None]) -> bool:
    own = tensor.untyped_storage().data_ptr()
    return any(each is not None and each.untyped_storage().data_ptr() == own for each in others)


def summarize_tile(
    labelled: LabelledGraph, index: int, boxes: Mapping[Value, Box], read: Read, tile: Sequence[Span]
) -> Parts:
    """Return the parts of a tile, from its own part of each operand, which `read` returns."""
    reduction, inputs = labelled.reductions[index], labelled.graph.nodes[index].inputs
    tensors: list[Any] = [None] * len(inputs)
    for each in reduction.operands:
        value = inputs[each]
        if value in labelled.kept:
            tensors[each] = take_box(labelled.constants[value], labelled.layouts[value], boxes[value])
        else:
            tensors[each] = read(value, boxes[value])
    with _precision_of(labelled.graph.nodes[index].op):
        return reduction.run_tile(
            labelled.calls[index],
            lambda layout: reduction.whole_windows(layout, labelled.core(layout, tile)),
            tensors,
        )
