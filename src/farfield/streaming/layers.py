"""Layers of farfield and of the user that need the whole grid: one node each, summarized and responded to in tiles."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from farfield.nn import GridAttention
from farfield.ops.grid import Gathered, Pool
from farfield.ops.slots import Summary
from farfield.streaming.operations import RecordingError
from farfield.streaming.record import Recorder
from farfield.streaming.rules.rule import Core, OperationCall, Parts, Reduction, Rule, RuleError, take_dims
from farfield.streaming.spans import Box, Layout, Piece, is_cut, whole_dim
from farfield.streaming.summaries import convert_summary, has_grid_summary, make_streamable, summary_bytes


@dataclass
class RecordedLayer:
    """A layer that needs the whole grid.

    Attributes:
        path: Its path in the network.
        module: The layer; None in a plan that was saved and not bound to a network yet.
        summing: Its MACs while the whole grid is summarized; the others are those of responses.
        summary_bytes: The bytes of its summary, if that has a slot for each key.
    """

    path: str
    module: Any = None
    summing: int = 0
    summary_bytes: int = 0

    def __getstate__(self) -> dict[str, Any]:
        """Save all but the layer, which is that of the network that the plan runs."""
        return vars(self) | {"module": None}


def is_summarizing(module: nn.Module) -> bool:
    """Whether a module of the user runs in tiles by its methods `summarize` and `respond`."""
    return callable(getattr(module, "summarize", None)) and callable(getattr(module, "respond", None))


def is_layer(module: nn.Module) -> bool:
    """Whether a module is recorded as one node."""
    return isinstance(module, GridAttention) or is_summarizing(module)


@contextmanager
def layers_recorded(recorder: Recorder, fake: nn.Module, real: nn.Module) -> Iterator[None]:
    """Record each layer that needs the whole grid as one node while `fake`, a copy of `real`, runs.

    A block that folds its attention into its other layers calls it where it has hooks, so each gets one.
    """
    with ExitStack() as stack:
        for path, module in fake.named_modules():
            if not is_layer(module):
                continue
            layer = RecordedLayer(path, real.get_submodule(path))
            stack.callback(vars(module).pop, "forward", None)
            stack.enter_context(module.register_forward_pre_hook(lambda *_: None))
            vars(module)["forward"] = partial(record_layer, recorder, layer, type(module).forward, module)
        yield


def record_layer(
    recorder: Recorder,
    layer: RecordedLayer,
    forward: Any,
    module: Any,
    grid: Tensor,
    context: Tensor | None = None,
    *,
    mask: Tensor | None = None,
    context_mask: Tensor | None = None,
) -> Tensor:
    """Record a call of a layer, and return a tensor of its result's shape.

    Raises:
        RecordingError: If it attends to a context.
    """
    if context is not None or context_mask is not None:
        raise RecordingError(f"{layer.path} attends to a context; only self-attention runs in tiles")
    values = [recorder.value_now(grid), *([] if mask is None else [recorder.value_now(mask)])]
    options = {} if mask is None else {"mask": mask}
    with recorder.counted() as macs:
        result = forward(module, grid, **options)
    with recorder.counted() as summing:
        attention: Any = make_streamable(module) if isinstance(module, GridAttention) else module
        summary = attention.summarize(grid, **options)
    layer.summing = min(sum(summing), sum(macs))
    if isinstance(module, GridAttention) and has_grid_summary(module):
        layer.summary_bytes = summary_bytes(summary, None)
    return recorder.returned(
        "layer", (layer, *values), sum(macs), lambda: grid.new_empty(result.shape, dtype=result.dtype)
    )


# ---- the rule --------------------------------------------------------------------------------------------------------
def label_layer(call: OperationCall) -> list[Layout]:
    """Batch and spatial dimensions are those of the grid."""
    layout = call.operands[0].layout
    return [(layout[0], (Piece(call.shape[1]),), *layout[2:])]


def needs_layer(call: OperationCall, output: int, box: Box) -> list[Box]:
    """All of the samples of the box, of the grid and of the mask."""
    return reads_layer(call, (*box[:2], *map(whole_dim, call.operands[0].layout[2:])))


def reads_layer(call: OperationCall, box: Box) -> list[Box]:
    """The box of the grid, all its channels, and of the mask."""
    grid = (box[0], whole_dim(call.operands[0].layout[1]), *box[2:])
    return [grid, *[(box[0], *box[2:])] * (len(call.operands) - 1)]


def run_layer(call: OperationCall, output: int, box: Box, tensors: Sequence[Tensor]) -> Tensor:
    """Run the layer on samples that are there as a whole, and take the box."""
    mask = {"mask": tensors[1]} if len(tensors) > 1 else {}
    return take_dims(call.args[0].module(tensors[0], **mask), range(1, len(box)), call.layouts[0], box)


def place_of(box: Box) -> tuple[int, ...]:
    """Return the first position of a box along each spatial axis."""
    return tuple(spans[0][0] for spans in box[2:])


def reduce_layer(call: OperationCall) -> Reduction | None:
    """Summarize tile by tile where a spatial axis is cut."""
    layout = call.operands[0].layout
    if not any(map(is_cut, layout[2:])):
        return None
    if any(len(dim) > 1 for dim in layout[2:]) or is_cut(layout[0]):
        raise RuleError("it attends to a grid whose axes are not those of the volume")
    module, operands = call.args[0].module, tuple(range(len(call.operands)))
    if not isinstance(module, GridAttention):
        return reduce_module(call, module)
    attention, size = make_streamable(module), call.shape[2:]

    def summarize(core: Core, tensors: Sequence[Tensor]) -> Parts:
        origin, mask = place_of(core(layout)), tensors[1] if len(tensors) > 1 else None
        summary = attention.summarize(tensors[0], mask=mask, origin=origin, size=size)
        sums = None
        if not attention.operator.queries_from.side_by_side:
            sums = attention.gather_queries(tensors[0], mask=mask, origin=origin, size=size)
        return summary, sums, dtypes_of(summary)

    def finish(own: OperationCall, output: int, box: Box, tensors: Sequence[Tensor], parts: Parts) -> Tensor:
        summary, sums, dtypes = parts
        whole = convert_summary(summary, tensors[0].device, dtypes)._replace(complete=len(operands) == 1)
        if sums is not None:
            sums = Gathered(*(part.to(tensors[0].device, whole.count.dtype) for part in sums))
        mask = tensors[1] if len(tensors) > 1 else None
        result = attention.respond(tensors[0], whole, mask=mask, origin=place_of(box), size=size, query_sums=sums)
        return take_dims(result, [1], own.layouts[0], box)

    pool = attention.operator.keys_from.gather
    windows = pool.windows(len(size)) if isinstance(pool, Pool) else ()
    return Reduction(operands, summarize, merge_attention, finish, reads_layer, windows=windows)


def dtypes_of(summary: Summary) -> list[torch.dtype]:
    """Return the dtypes of the tensors of a summary."""
    return [part.dtype for part in summary if isinstance(part, Tensor)]


def widen(summary: Summary) -> Summary:
    """Return a summary in float64 on the CPU; keys and values side by side stay as they are."""
    dtypes = dtypes_of(summary)
    return convert_summary(summary, "cpu", dtypes if summary.side_by_side else [torch.float64] * len(dtypes))


def merge_attention(first: Parts, second: Parts) -> Parts:
    """Merge summaries, and sums that queries come from."""
    summary = widen(first[0]).merge(widen(second[0]))
    sums = None
    if first[1] is not None:
        one, other = (Gathered(*(part.cpu().double() for part in each[1])) for each in (first, second))
        sums = one.merge(other)
    return summary, sums, first[2]


def reduce_module(call: OperationCall, module: Any) -> Reduction:
    """Return the reduction of a module of the user: its sums merge by adding."""

    def summarize(core: Core, tensors: Sequence[Tensor]) -> Parts:
        sums = module.summarize(tensors[0])
        return tuple(each.double() for each in (sums if isinstance(sums, tuple | list) else (sums,)))

    def merge(first: Parts, second: Parts) -> Parts:
        return tuple(one + other for one, other in zip(first, second, strict=True))

    def finish(own: OperationCall, output: int, box: Box, tensors: Sequence[Tensor], parts: Parts) -> Tensor:
        return take_dims(module.respond(tensors[0], *parts).to(own.dtype), [1], own.layouts[0], box)

    return Reduction((0,), summarize, merge, finish, reads_layer)


LAYER = Rule(label_layer, needs_layer, run_layer, reduce_layer)


def are_numbers(parts: Any) -> bool:
    """Whether parts have no NaN, and, where they are the summary of an attention, no infinite number."""
    if isinstance(parts, Summary):
        return bool(parts.values.isfinite().all() and parts.weights.isfinite().all())
    if isinstance(parts, Tensor):
        return not parts.isnan().any()
    return all(map(are_numbers, parts)) if isinstance(parts, tuple | list) else True


# ---- saving ----------------------------------------------------------------------------------------------------------
def pack_parts(parts: Any) -> Any:
    """Return parts as lists, dicts, tensors and plain values."""
    if isinstance(parts, Summary):
        return {"summary": [pack_parts(each) for each in parts]}
    if isinstance(parts, Gathered):
        return {"gathered": [pack_parts(each) for each in parts]}
    return [pack_parts(each) for each in parts] if isinstance(parts, tuple | list) else parts


def unpack_parts(packed: Any) -> Any:
    """Return the parts that `pack_parts` packed."""
    if isinstance(packed, list):
        return tuple(map(unpack_parts, packed))
    if not isinstance(packed, dict):
        return packed
    ((kind, fields),) = packed.items()
    return (Summary if kind == "summary" else Gathered)(*map(unpack_parts, fields))
