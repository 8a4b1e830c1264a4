"""Norms: a row of the table of reductions, whose parts are moments and of which a position reads scale and offset."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from farfield.streaming.graph import find_operation
from farfield.streaming.rules.rule import (
    FIX,
    Along,
    Core,
    Dims,
    OperationCall,
    Parts,
    Reduction,
    Rule,
    RuleError,
    aligned,
    boxes_along,
    named,
    take_along,
    take_dims,
)
from farfield.streaming.rules.sums import MOMENTS, add_mask, find_moments
from farfield.streaming.spans import Box, Layout, Piece, is_cut, length_of


class _Norm(NamedTuple):
    # Dimensions of the grid over which it runs; of channels, a group.
    dims: Sequence[int]
    # Channels of a group; None where channels are no groups.
    group: int | None
    eps: float


def find_norm(call: OperationCall) -> _Norm:
    """Return over what a norm of torch runs."""
    count, args = len(call.operands[0].layout), call.args
    if "group_norm" in call.op:
        return _Norm(range(1, count), call.shape[1] // args[6], args[7])
    if "layer_norm" in call.op:
        return _Norm(range(count - len(args[1]), count), None, args[4])
    # Batch norm takes its running statistics where it is not in training.
    return _Norm((0, *range(2, count)) if args[5] else (), 1, args[-1])


# ---- where nothing that it runs over is cut --------------------------------------------------------------------------
def _dims_of_norm(call: OperationCall) -> Dims:
    """What it runs over is read whole, as weights of it are."""
    grid = [None if dim in find_norm(call).dims else dim for dim in range(len(call.shape))]
    others = ([1] if "batch_norm" in call.op else [None] * len(each.layout) for each in call.operands[1:])
    dims: Dims = [grid, *others]
    return [*dims[:-1], grid] if "mask" in call.kwargs else dims


def _run(call: OperationCall, output: int, box: Box, tensors: Sequence[Tensor]) -> Tensor:
    if "mask" in call.kwargs:
        return NORM.run_alone(call, output, box, tensors)
    args, kwargs = call.bind(tensors)
    if "group_norm" in call.op:
        grid = args[0]
        args = (*args[:3], grid.shape[0], grid.shape[1], math.prod(grid.shape[2:]), *args[6:])
    return find_operation(call.op)(*args, **kwargs)[0]


def _label(call: OperationCall) -> list[Layout]:
    """The layout of the grid; statistics are not followed."""
    return [call.operands[0].layout, *[()] * (len(call.infos) - 1)]


# ---- the row ---------------------------------------------------------------------------------------------------------
def _split_groups(norm: _Norm, tensor: Tensor) -> Tensor:
    """Return a grid with channels as groups and channels of a group; a mask has one."""
    return tensor if norm.group is None else tensor.unflatten(1, (-1, min(norm.group, tensor.shape[1])))


def _dims_of_groups(norm: _Norm) -> list[int]:
    return [dim if norm.group is None else dim + (dim > 0) for dim in norm.dims]


def _find_moments(call: OperationCall, core: Core, tensors: Sequence[Tensor]) -> Parts:
    norm = find_norm(call)
    mask = _split_groups(norm, tensors[-1]) if "mask" in call.kwargs else None
    return find_moments(_split_groups(norm, tensors[0]), _dims_of_groups(norm), mask)


def _along(call: OperationCall) -> Along:
    norm, layout = find_norm(call), call.operands[0].layout
    pairs: Along = [(own, at) for own, at in zip(layout, _dims_of_result(call)[0], strict=True)]
    if norm.group is not None:
        groups = layout[1] if norm.group == 1 else (Piece(length_of(layout[1]) // norm.group),)
        pairs[1:2] = [(groups, pairs[1][1]), ((Piece(norm.group),), None)]
    reduced = _dims_of_groups(norm)
    return [((Piece(1),), None) if dim in reduced else pair for dim, pair in enumerate(pairs)]


def _dims_of_result(call: OperationCall) -> list[Sequence[int | None]]:
    """What runs together where the moments are known: all but channels in groups, and their weights."""
    count, masks = len(call.operands[0].layout), int("mask" in call.kwargs)
    operands = call.operands[: len(call.operands) - masks]
    channel = None if "group_norm" in call.op else 1
    dims: list[Sequence[int | None]] = [[0, channel, *range(2, count)], *[[channel]] * (len(operands) - 1)]
    if "layer_norm" in call.op:
        dims = [range(count - len(each.layout), count) for each in operands]
    return [*dims, *[()] * masks]


def _read(call: OperationCall, box: Box) -> list[Box]:
    return boxes_along(call, _dims_of_result(call), 0, box)


def _normalize(call: OperationCall, output: int, box: Box, tensors: Sequence[Tensor], parts: Parts) -> Tensor:
    """Return grid * scale + offset: weight / deviation, and bias - mean * scale."""
    norm, along = find_norm(call), _dims_of_result(call)
    args, _ = call.bind(take_along(call, along, 0, box, tensors))
    weight, bias = args[1:3] if norm.group is not None else args[2:4]
    count, mean, squares = parts
    scale = (squares / count.clamp(min=1) + norm.eps).rsqrt()
    grid = _split_groups(norm, args[0].to(torch.promote_types(args[0].dtype, torch.float32)))
    if norm.group is None:
        result = (grid * scale.to(grid)).add_((-mean * scale).to(grid))
        result = result if weight is None else result * weight
        result = result if bias is None else result + bias
    else:
        shape = [1, -1, norm.group, *[1] * (args[0].dim() - 2)]
        scale = scale if weight is None else scale * weight.double().view(shape)
        shift = (0.0 if bias is None else bias.double().view(shape)) - mean * scale
        # `torch.addcmul` takes twice as long where both scale and shift are one number a channel.
        result = (grid * scale.to(grid)).add_(shift.to(grid)).flatten(1, 2)
    whole = [dim for dim, at in enumerate(along[0]) if at is None]
    return take_dims(result.to(call.dtype), whole, call.layouts[0], box)


NORM = Reduction(_find_moments, MOMENTS.merge, _normalize, _along, MOMENTS.start, reads=_read, pull=MOMENTS.pull)


def _reduce(call: OperationCall) -> Reduction | None:
    norm, layout = find_norm(call), call.operands[0].layout
    if not any(is_cut(layout[dim]) for dim in norm.dims):
        return None
    if norm.group is not None and is_cut(layout[1]) and 1 in norm.dims:
        raise RuleError(f"its groups of channels run along an axis that is cut; {FIX}")
    return add_mask(call, NORM)


NORM_RULES: dict[str, Rule] = named(
    aligned(_dims_of_norm, _run)._replace(label=_label, reduce=_reduce),
    "native_group_norm native_layer_norm native_batch_norm",
)
