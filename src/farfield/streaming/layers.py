"""Layers of farfield and of the user that need the whole grid: summarized and responded to in tiles.

Summaries merge in float64, so that rounding does not add up over many tiles.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from farfield.nn import GridAttention
from farfield.ops.grid import ALL, Gathered, Pool
from farfield.ops.slots import Summary
from farfield.ops.table import OPERATORS
from farfield.streaming.rules.rule import (
    Core,
    OperationCall,
    Parts,
    Reduction,
    Rule,
    RuleError,
    pull_sums,
    take_dims,
    widen,
)
from farfield.streaming.rules.sums import add_parts
from farfield.streaming.spans import Box, Layout, Piece, is_cut, whole_dim

# The share of the free memory that a summary which is its grid may take.
SUMMARY_SHARE = 1 / 2


# ---- attention -------------------------------------------------------------------------------------------------------
def make_streamable(attention: GridAttention) -> GridAttention:
    """Return an attention with the same responses, and with a small summary if `attention` is `dot`."""
    operator = attention.operator.in_linear_order()
    if operator is attention.operator:
        return attention
    twin = copy.copy(attention)
    twin.operator = operator
    return twin


def find_dependence(attention: GridAttention) -> str:
    """Return why an operator of the user has other responses in tiles: parts and the whole of some grid differ."""
    weight = next(attention.parameters(), torch.empty(0))
    if attention.operator in OPERATORS.values() or weight.is_meta:
        return ""
    operator = attention.operator.in_linear_order()
    twin, count = copy.copy(attention), 1000
    # Its functions get positions side by side, wherever these come from.
    twin.operator = replace(operator, keys_from=ALL, queries_from=ALL)
    grid = torch.arange(float(count * twin.channels), device=weight.device).sin().to(weight.dtype)
    grid = grid.view(1, twin.channels, count)
    parts = [(part, (383 * index,), (count,)) for index, part in enumerate(grid.split(383, 2))]
    with torch.no_grad():
        want = twin.respond(grid, twin.summarize(grid))
        # In another order, as tiles of several axes.
        summaries = [twin.summarize(part, origin=origin, size=size) for part, origin, size in reversed(parts)]
        merged = functools.reduce(Summary.merge, summaries)
        got = torch.cat([twin.respond(part, merged, origin=origin, size=size) for part, origin, size in parts], 2)
    # Half of the digits, as of an operation in a check.
    is_other = float((got - want).abs().max()) > math.sqrt(torch.finfo(want.dtype).eps) * float(want.abs().max())
    # Of sums along axes, a tile has its part alone.
    return (is_other or (operator.basis is not None and not operator.keys_from.side_by_side)) * (
        "a function of its operator depends on other positions, their number or their place, of which a tile has its "
        "own; fix: functions of one position alone, keys_from=ALL, and what depends on the place added to the grid"
    )


def has_grid_summary(attention: GridAttention) -> bool:
    """Whether a summary has a slot for each key, and so grows with the grid: softmax and softmax_pooled."""
    return not make_streamable(attention).operator.merges_by_adding


def summary_bytes(summary: Summary) -> int:
    return sum(part.nbytes for part in summary if isinstance(part, Tensor))


def summarize_attention(
    attention: GridAttention, grid: Tensor, *, of_keys: bool = True, of_queries: bool = True, **place: Any
) -> Parts:
    """Return the summary of a tile's keys and values, and the sums that queries come from, if these are of the grid."""
    summary, sums = None, None
    dtypes: tuple[torch.dtype, ...] = ()
    if of_keys:
        summary = attention.summarize(grid, **place)
        dtypes = tuple(part.dtype for part in summary if isinstance(part, Tensor))
        # Keys and values side by side are not added up.
        summary = _convert(summary, "cpu", dtypes if summary.side_by_side else [torch.float64] * len(dtypes))
    if of_queries and not attention.operator.queries_from.side_by_side:
        sums = Gathered(*(part.cpu().double() for part in attention.gather_queries(grid, **place)))
    return summary, sums, dtypes


def merge_attention(first: Parts, second: Parts) -> Parts:
    """Merge what tiles gave of keys and queries, each if it is there; saved parts are plain lists."""
    merged = [
        (one or other) if one is None or other is None else kind(*one).merge(kind(*other))
        for kind, one, other in zip((Summary, Gathered), first, second, strict=False)
    ]
    return *merged, first[2] or second[2]


def _pull_attention(own: Parts, merged: Parts, grads: Parts) -> tuple[Parts, Parts]:
    """Return the gradient of a tile's slots: of those that lie side by side its own, of others with its own peak."""
    summary, of_slots = own[0], grads[0]
    if summary is None:
        return grads, grads
    slots = [(name, getattr(of_slots, name)) for name in ("values", "weights", "keys")]
    rest = mine = {name: each for name, each in slots if isinstance(each, Tensor)}
    if summary.side_by_side:
        count = summary.values.shape[2]
        mine = {name: each[:, :, :count] for name, each in rest.items()}
        rest = {name: each[:, :, count:] for name, each in rest.items()}
    elif summary.peak is not None:
        factor = torch.exp(summary.peak - Summary(*merged[0]).peak)
        mine = {name: each * factor if name != "keys" else each for name, each in rest.items()}
    none: Any = Summary(*[None] * len(of_slots))  # type: ignore[arg-type]
    return (none._replace(**mine), *grads[1:]), (none._replace(**rest), *grads[1:])


def finish_attention(parts: Parts, device: torch.device, complete: bool) -> tuple[Summary, Gathered | None]:
    """Return the merged summary in the dtypes of the tiles', `complete` without masks; and the query sums, or None."""
    summary, sums, dtypes = parts
    whole = _convert(Summary(*summary), device, dtypes)._replace(complete=complete)
    return whole, None if sums is None else Gathered(*(part.to(device, whole.count.dtype) for part in sums))


def _convert(summary: Summary, device: torch.device | str, dtypes: Sequence[torch.dtype]) -> Summary:
    """Move a summary to a device and convert its tensors to `dtypes`, which are in the order of its fields."""
    rest = iter(dtypes)
    fields = summary._asdict().items()
    moved: Any = {name: part.to(device, next(rest)) for name, part in fields if isinstance(part, Tensor)}
    return summary._replace(**moved)


# ---- the rule --------------------------------------------------------------------------------------------------------
def _label(call: OperationCall) -> list[Layout]:
    """Batch and spatial dimensions are those of the grid."""
    layout = call.operands[0].layout
    return [(layout[0], (Piece(call.shape[1]),), *layout[2:])]


def _needs(call: OperationCall, output: int, box: Box) -> list[Box]:
    """All of the samples of the box, of the grid and of the mask."""
    return _reads(call, (*box[:2], *map(whole_dim, call.operands[0].layout[2:])))


def _reads(call: OperationCall, box: Box) -> list[Box]:
    """The box of the grid, all its channels, and of the mask."""
    grid = (box[0], whole_dim(call.operands[0].layout[1]), *box[2:])
    return [grid, *[(box[0], *box[2:])] * (len(call.operands) - 1)]


def _run(call: OperationCall, output: int, box: Box, tensors: Sequence[Tensor]) -> Tensor:
    """Run the layer on samples that are there as a whole, and take the box."""
    module, mask = call.args[0].module, {"mask": tensors[1]} if len(tensors) > 1 else {}
    if mask and not isinstance(module, GridAttention):
        result = module.respond(tensors[0], *_sum_valid(module, tensors))
    else:
        result = module(tensors[0], **mask)
    return take_dims(result, range(1, len(box)), call.layouts[0], box)


def _reduce(call: OperationCall) -> Reduction | None:
    """Summarize tile by tile where a spatial axis is cut."""
    layout = call.operands[0].layout
    if not any(map(is_cut, layout[2:])):
        return None
    if any(len(dim) > 1 for dim in layout[2:]) or is_cut(layout[0]):
        raise RuleError("it attends to a grid whose axes are not those of the volume")
    module, operands = call.args[0].module, tuple(range(len(call.operands)))
    if not isinstance(module, GridAttention):
        return _SUMS._replace(operands=operands)
    if problem := find_dependence(module):
        raise RuleError(problem)
    pool = make_streamable(module).operator.keys_from.gather
    windows = pool.windows(len(call.shape) - 2) if isinstance(pool, Pool) else ()
    return _ATTENTION._replace(operands=operands, windows=windows)


def _place_of(call: OperationCall, box: Box, tensors: Sequence[Tensor]) -> dict[str, Any]:
    """Return where a tile lies in the whole, and its mask, as `GridAttention` takes them."""
    mask = tensors[1] if len(tensors) > 1 else None
    return {"mask": mask, "origin": tuple(spans[0][0] for spans in box[2:]), "size": call.shape[2:]}


def _summarize(call: OperationCall, core: Core, tensors: Sequence[Tensor]) -> Parts:
    place = _place_of(call, core(call.operands[0].layout), tensors)
    return summarize_attention(make_streamable(call.args[0].module), tensors[0], **place)


def _respond(call: OperationCall, output: int, box: Box, tensors: Sequence[Tensor], parts: Parts) -> Tensor:
    summary, sums = finish_attention(parts, tensors[0].device, complete=len(tensors) == 1)
    attention, place = make_streamable(call.args[0].module), _place_of(call, box, tensors)
    return take_dims(attention.respond(tensors[0], summary, **place, query_sums=sums), [1], call.layouts[0], box)


_ATTENTION = Reduction(_summarize, merge_attention, _respond, reads=_reads, pull=_pull_attention)


def _sum_valid(module: Any, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return the sums of a module of the user, of the positions where a mask that all samples have is True."""
    grid, *masks = tensors
    if masks and not masks[0].all():
        # Sums that add up over any tiles do not depend on which positions lie side by side.
        valid = grid.flatten(2)[:, :, masks[0][0].flatten()]
        grid = valid.unflatten(2, (-1, *[1] * (grid.dim() - 3)))
    sums = module.summarize(grid)
    return sums if isinstance(sums, tuple | list) else (sums,)


def _summarize_module(call: OperationCall, core: Core, tensors: Sequence[Tensor]) -> Parts:
    return tuple(each.to(widen(each.dtype)) for each in _sum_valid(call.args[0].module, tensors))


def _respond_module(call: OperationCall, output: int, box: Box, tensors: Sequence[Tensor], parts: Parts) -> Tensor:
    return take_dims(call.args[0].module.respond(tensors[0], *parts), [1], call.layouts[0], box)


# Sums of a module of the user merge by adding.
_SUMS = Reduction(_summarize_module, add_parts, _respond_module, reads=_reads, pull=pull_sums)


LAYER = Rule(_label, _needs, _run, _reduce)


# ---- numbers that are not finite -------------------------------------------------------------------------------------
def are_numbers(parts: Any) -> bool:
    """Whether parts have no NaN, and, where they are the summary of an attention, no infinite number."""
    if isinstance(parts, Summary):
        return bool(parts.values.isfinite().all() and parts.weights.isfinite().all())
    if isinstance(parts, Tensor):
        return not parts.isnan().any()
    return all(map(are_numbers, parts)) if isinstance(parts, tuple | list) else True


def not_finite(
    name: str, origin: tuple[int, ...], volume: str = "volume", fix: str = "a network in float32 where that is finite"
) -> ValueError:
    """Return the error for a layer, named with the called function, whose input would spread NaN to every position."""
    return ValueError(
        f"{name}: its input is not finite in the tile at {origin} of the {volume}, and would spread NaN to every "
        f"position; fix: numpy.nan_to_num({volume}, posinf=0, neginf=0), or {fix}."
    )
