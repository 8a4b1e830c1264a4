"""Rules of norms: their moments over the whole merge."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from farfield.streaming.graph import find_operation
from farfield.streaming.rules.rule import (
    FIX,
    Dims,
    OperationCall,
    Parts,
    Reduction,
    Rule,
    RuleError,
    aligned,
    boxes_along,
    named,
    reduce_arrays,
    take_along,
    take_dims,
)
from farfield.streaming.rules.sums import MOMENTS, moments
from farfield.streaming.spans import Box, Layout, Piece, is_cut, length_of


class _NormArguments(NamedTuple):
    # Reduced dimensions of the grid, with the channels split into groups.
    dims: tuple[int, ...]
    # Number of groups of channels; None where channels are not split.
    groups: int | None
    eps: float
    # Which operands they are.
    weight: int | None
    bias: int | None


def _norm_arguments(call: OperationCall) -> _NormArguments:
    count, args, places = len(call.operands[0].layout), call.args, iter(range(1, len(call.operands)))
    given = args[2:4] if "layer_norm" in call.op else args[1:3]
    weight, bias = (None if each is None else next(places) for each in given)
    if "group_norm" in call.op:
        return _NormArguments(tuple(range(2, count + 1)), args[6], args[7], weight, bias)
    if "layer_norm" in call.op:
        return _NormArguments(tuple(range(count - len(args[1]), count)), None, args[4], weight, bias)
    # Batch norm takes its running statistics where it is not in training.
    return _NormArguments((0, *range(2, count)) if args[5] else (), None, args[-1], weight, bias)


def _dims_of_norm(call: OperationCall) -> Dims:
    """What runs together where the norm is over what is not cut: that is read whole, as weights of it are."""
    given, count = _norm_arguments(call), len(call.operands[0].layout)
    reduced = given.dims if given.groups is None else range(1, count)
    weights = ([1] if "batch_norm" in call.op else [None] * len(each.layout) for each in call.operands[1:])
    return [[None if dim in reduced else dim for dim in range(count)], *weights]


def _dims_of_result(call: OperationCall) -> Dims:
    """What runs together where the moments are known: all but channels in groups, and their weights."""
    count = len(call.operands[0].layout)
    if "layer_norm" in call.op:
        return [range(count - len(each.layout), count) for each in call.operands]
    channel = None if "group_norm" in call.op else 1
    return [[0, channel, *range(2, count)], *[[channel]] * (len(call.operands) - 1)]


def _label_norm(call: OperationCall) -> list[Layout]:
    """The layout of the grid; statistics are not followed."""
    return [call.operands[0].layout, *[()] * (len(call.infos) - 1)]


def _run_norm(call: OperationCall, output: int, box: Box, tensors: Sequence[Tensor]) -> Tensor:
    args, kwargs = call.bind(tensors)
    if "group_norm" in call.op:
        grid = args[0]
        args = (*args[:3], grid.shape[0], grid.shape[1], math.prod(grid.shape[2:]), *args[6:])
    return find_operation(call.op)(*args, **kwargs)[0]


def _reduce_norm(call: OperationCall) -> Reduction | None:
    given, layout = _norm_arguments(call), call.operands[0].layout
    if not any(place is None and is_cut(dim) for dim, place in zip(layout, _dims_of_norm(call)[0], strict=True)):
        return None
    groups, split = given.groups, layout
    if groups is not None:
        if is_cut(layout[1]):
            raise RuleError(f"its groups of channels run along an axis that is cut; {FIX}")
        split = (layout[0], (Piece(groups),), (Piece(length_of(layout[1]) // groups),), *layout[2:])
    kept = tuple((Piece(1),) if dim in given.dims else own for dim, own in enumerate(split))

    def group(tensor: Tensor) -> Tensor:
        return tensor if groups is None else tensor.unflatten(1, (groups, -1))

    def part_box(box: Box) -> Box:
        own = box if groups is None else (box[0], ((0, groups),), ((0, 1),), *box[2:])
        return tuple(((0, 1),) if dim in given.dims else each for dim, each in enumerate(own))

    def finish(own: OperationCall, output: int, box: Box, tensors: Sequence[Tensor], parts: Parts) -> Tensor:
        tensors = take_along(own, _dims_of_result(own), 0, box, tensors)
        weight, bias = (None if place is None else tensors[place] for place in (given.weight, given.bias))
        count, mean, squares = parts
        scale = (squares / count + given.eps).rsqrt()
        shift = -mean * scale
        grid = group(tensors[0].to(torch.promote_types(tensors[0].dtype, torch.float32)))
        by_channel = "layer_norm" not in own.op
        if by_channel:
            shape = [1, *([-1] if groups is None else [groups, -1]), *[1] * (tensors[0].dim() - 2)]
            scale = scale if weight is None else scale * weight.double().view(shape)
            shift = -mean * scale if bias is None else bias.double().view(shape) - mean * scale
        result = torch.addcmul(shift.to(grid), grid, scale.to(grid))
        if not by_channel:
            result = result if weight is None else result * weight
            result = result if bias is None else result + bias
        result = (result if groups is None else result.flatten(1, 2)).to(own.dtype)
        return result if groups is None else take_dims(result, (1,), layout, box)

    return reduce_arrays(
        (0,),
        kept,
        MOMENTS,
        lambda core, tensors: moments(group(tensors[0]), given.dims),
        finish,
        part_box,
        lambda own, box: boxes_along(own, _dims_of_result(own), 0, box),
    )


NORM_RULES: dict[str, Rule] = named(
    aligned(_dims_of_norm, _run_norm)._replace(label=_label_norm, reduce=_reduce_norm),
    "native_group_norm native_layer_norm native_batch_norm",
)
