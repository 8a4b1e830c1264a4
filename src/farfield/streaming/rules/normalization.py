"""Rules of norms: their moments over the whole merge."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from farfield.streaming.graph import find_operation
from farfield.streaming.rules.rule import (
    OperationCall,
    Parts,
    Reduction,
    Rule,
    RuleError,
    aligned_box,
    positions_of,
    reduce_arrays,
    single,
    take_aligned,
    take_dims,
)
from farfield.streaming.rules.sums import merge_moments, moments
from farfield.streaming.spans import Box, Layout, Piece, is_cut, length_of, whole_box, whole_dim


# ---- norms -----------------------------------------------------------------------------------------------------------
class NormArguments(NamedTuple):
    """What a norm is over.

    Attributes:
        dims: Reduced dimensions of the grid, with the channels split into groups.
        groups: Number of groups of channels; None where channels are not split.
        eps: Added to the variance.
        weight: Which operand is the weight, or None.
        bias: Which operand is the bias, or None.
        by_channel: Whether weight and bias are of channels; otherwise of the last dimensions.
    """

    dims: tuple[int, ...]
    groups: int | None
    eps: float
    weight: int | None
    bias: int | None
    by_channel: bool


def norm_arguments(call: OperationCall) -> NormArguments:
    """Read the arguments of a norm of torch."""
    count, args = len(call.operands[0].layout), call.args
    places = iter(range(1, len(call.operands)))
    if "group_norm" in call.op:
        weight, bias = (None if each is None else next(places) for each in args[1:3])
        return NormArguments(tuple(range(2, count + 1)), args[6], args[7], weight, bias, True)
    if "layer_norm" in call.op:
        weight, bias = (None if each is None else next(places) for each in args[2:4])
        dims = tuple(range(count - len(args[1]), count))
        return NormArguments(dims, None, args[4], weight, bias, False)
    weight, bias = (None if each is None else next(places) for each in args[1:3])
    return NormArguments((0, *range(2, count)), None, args[-1], weight, bias, True)


def is_eval(call: OperationCall) -> bool:
    """Whether batch norm takes its running statistics."""
    return "batch_norm" in call.op and not call.args[5]


def norm_dims(call: OperationCall) -> list[int]:
    """The dimensions of the grid that a norm reduces, channels among them where they are in groups."""
    if is_eval(call):
        return []
    given = norm_arguments(call)
    return [1, *range(2, len(call.operands[0].layout))] if given.groups is not None else list(given.dims)


def label_norm(call: OperationCall) -> list[Layout]:
    """The layout of the grid; statistics are not followed."""
    return [call.operands[0].layout, *[()] * (len(call.infos) - 1)]


def needs_norm(call: OperationCall, output: int, box: Box) -> list[Box]:
    """All that the norm reduces, which is not cut; weights whole."""
    if output:
        raise RuleError("its statistics are read")
    dims = norm_dims(call)
    first = tuple(whole_dim(own) if dim in dims else box[dim] for dim, own in enumerate(call.operands[0].layout))
    return [first, *(whole_box(operand.layout) for operand in call.operands[1:])]


def run_norm(call: OperationCall, output: int, box: Box, tensors: Sequence[Tensor]) -> Tensor:
    """Run the norm on what is not cut."""
    args, kwargs = call.bind(tensors)
    if "group_norm" in call.op:
        grid = args[0]
        args = (*args[:3], grid.shape[0], grid.shape[1], math.prod(grid.shape[2:]), *args[6:])
    if "batch_norm" in call.op:
        # An instance norm is one whose channels are those of all samples.
        places = positions_of(call.layouts[0][1], box[1])
        args = (args[0], *(None if each is None else each[places.to(each.device)] for each in args[1:5]), *args[5:])
    result = find_operation(call.op)(*args, **kwargs)[0]
    return take_dims(result, norm_dims(call), call.layouts[0], box)


def reduce_norm(call: OperationCall) -> Reduction | None:
    """Sum moments over the whole."""
    layout = call.operands[0].layout
    if not any(is_cut(layout[dim]) for dim in norm_dims(call)):
        return None
    given = norm_arguments(call)
    split = layout
    if given.groups is not None:
        channels = length_of(layout[1]) // given.groups
        if is_cut(layout[1]):
            raise RuleError("its groups of channels run along an axis that is cut")
        split = (layout[0], (Piece(given.groups),), (Piece(channels),), *layout[2:])
    kept = tuple((Piece(1),) if dim in given.dims else own for dim, own in enumerate(split))

    def group(tensor: Tensor) -> Tensor:
        return tensor if given.groups is None else tensor.unflatten(1, (given.groups, -1))

    def needs(box: Box) -> list[Box]:
        own = box if given.groups is None else (box[0], ((0, given.groups),), ((0, 1),), *box[2:])
        return [tuple(((0, 1),) if dim in given.dims else own[dim] for dim in range(len(own)))] * 3

    def factor_of(tensor: Tensor, box: Box, dims: int) -> Tensor:
        """Return a number for each channel, in the shape of the grid."""
        start, stop = single(box[1]) if given.groups is None else (0, len(tensor))
        shape = [-1] if given.groups is None else [given.groups, -1]
        return tensor[start:stop].double().view(*shape, *[1] * (dims - 1 - len(shape)))

    def finish(own: OperationCall, output: int, box: Box, tensors: Sequence[Tensor], parts: Parts) -> Tensor:
        count, mean, squares = parts
        scale = (squares / count + given.eps).rsqrt()
        shift = -mean * scale
        grid = group(tensors[0].to(torch.promote_types(tensors[0].dtype, torch.float32)))
        if given.by_channel:
            weight = 1.0 if given.weight is None else factor_of(tensors[given.weight], box, grid.dim())
            bias = 0.0 if given.bias is None else factor_of(tensors[given.bias], box, grid.dim())
            scale, shift = scale * weight, shift * weight + bias
        result = torch.addcmul(shift.to(grid), grid, scale.to(grid))
        result = result if given.groups is None else result.flatten(1, 2)
        for place, combine in () if given.by_channel else ((given.weight, torch.mul), (given.bias, torch.add)):
            if place is not None:
                factor = take_aligned(tensors[place], own.operands[place].layout, own.layouts[0], box)
                result = combine(result, factor)
        return take_dims(result.to(own.dtype), () if given.groups is None else (1,), layout, box)

    return reduce_arrays(
        operands=(0,),
        layouts=(kept,) * 3,
        start=(0.0,) * 3,
        summarize=lambda core, tensors: moments(group(tensors[0]), given.dims),
        merge=merge_moments,
        finish=finish,
        needs=needs,
        reads=needs_whole_norm,
    )


def needs_whole_norm(call: OperationCall, box: Box) -> list[Box]:
    """What the result of a norm over the whole needs: the box, all channels of groups, weights of the box."""
    groups = "group_norm" in call.op
    boxes: list[Box] = [(box[0], whole_dim(call.operands[0].layout[1]), *box[2:]) if groups else box]
    for operand in call.operands[1:]:
        whole = range(len(box)) if "layer" not in call.op else ()
        boxes.append(aligned_box(operand.layout, call.layouts[0], box, whole))
    return boxes


NORM_RULES: dict[str, Rule] = {
    f"aten.native_{name}_norm.default": Rule(label_norm, needs_norm, run_norm, reduce_norm)
    for name in ("group", "layer", "batch")
}
