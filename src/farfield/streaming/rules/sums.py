"""Rules of sums over dimensions: means, extremes, moments, norms, softmax.

Over an axis that is cut, each tile gives parts, and all parts merge.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from farfield.streaming.graph import find_operation
from farfield.streaming.rules.rule import (
    ADDED,
    FIX,
    LOWS,
    PEAKS,
    Core,
    Dims,
    Merging,
    OperationCall,
    Parts,
    Reduction,
    Rule,
    RuleError,
    aligned,
    all_but,
    boxes_along,
    each_by,
    given_dims,
    named,
    reduce_arrays,
    take_along,
    take_dims,
    widen,
)
from farfield.streaming.spans import Box, Layout, Piece, box_shape, is_cut, length_of, positions_of

# The largest mean, in deviations, whose square leaves the variance its digits in float32.
FAR = 100


def merge_moments(first: Parts, second: Parts) -> Parts:
    """Merge (count, mean, sum of squared deviations): δ = m₂ - m₁, m = m₁ + δ n₂/n, M = M₁ + M₂ + δ² n₁ n₂/n."""
    (count, mean, squares), (other_count, other_mean, other_squares) = first, second
    total = count + other_count
    difference, share = other_mean - mean, other_count / total.clamp(min=1)
    return total, mean + difference * share, squares + other_squares + difference.abs() ** 2 * count * share


def _merge_exponentials(first: Parts, second: Parts) -> Parts:
    peak = torch.maximum(first[0], second[0])
    return peak, sum(
        part[1] * (_finite(part[0]) - _finite(peak)).exp().where(part[1] != 0, 0.0) for part in (first, second)
    )


def _finite(peak: Tensor) -> Tensor:
    """Return what is subtracted before exponentials: 0 where all is -inf."""
    return peak.masked_fill(peak == -math.inf, 0.0)


LARGEST, SMALLEST = Merging((-math.inf,), each_by(torch.maximum)), Merging((math.inf,), each_by(torch.minimum))
MOMENTS, EXPONENTIALS = Merging((0,) * 3, merge_moments), Merging((-math.inf, 0), _merge_exponentials)


def find_moments(tensor: Tensor, dims: Sequence[int]) -> Parts:
    """Return count, mean and sum of squared deviations."""
    wide = tensor.to(torch.promote_types(tensor.dtype, torch.float32))
    pair = _moments_of_rows(wide, dims) if wide.is_cpu and wide.dtype == torch.float32 and wide.numel() else None
    if pair is None:
        pair = torch.var_mean(wide, list(dims), correction=0, keepdim=True)
    variance, mean = (each.to(widen(each.dtype)) for each in pair)
    count = torch.full_like(variance, wide.numel() // max(mean.numel(), 1))
    return count, mean, variance * count


def _moments_of_rows(tensor: Tensor, dims: Sequence[int]) -> tuple[Tensor, Tensor] | None:
    """Return variance and mean by torch's group norm, which is 16 times as fast on a CPU as `torch.var_mean`."""
    reduced = {dim % tensor.dim() for dim in dims}
    kept = [dim for dim in range(tensor.dim()) if dim not in reduced]
    rows = tensor.permute(*kept, *sorted(reduced)).reshape(math.prod(tensor.shape[dim] for dim in kept), -1)
    count, length = rows.shape
    _, mean, inverse = torch.native_group_norm(rows[None], None, None, 1, count, length, count, 0.0)
    variance, mean = inverse.double().pow(-2), mean.double()
    if (mean.square() > FAR**2 * variance).any():  # the square of the mean would hide the variance
        return None
    shape = [1 if dim in reduced else own for dim, own in enumerate(tensor.shape)]
    return variance.view(shape), mean.view(shape)


def _sum_up(tensor: Tensor, dims: Sequence[int]) -> Parts:
    return (tensor.sum(list(dims), keepdim=True, dtype=widen(tensor.dtype)),)


def _find_largest(tensor: Tensor, dims: Sequence[int]) -> Parts:
    return (tensor.amax(list(dims), True),)


def _find_smallest(tensor: Tensor, dims: Sequence[int]) -> Parts:
    return (tensor.amin(list(dims), True),)


def _multiply_up(tensor: Tensor, dims: Sequence[int]) -> Parts:
    result = tensor.to(widen(tensor.dtype))
    for dim in dims:
        result = result.prod(dim, keepdim=True)
    return (result,)


def _sum_exponentials(tensor: Tensor, dims: Sequence[int]) -> Parts:
    """Return the largest number, of complex ones by their real part, and the sum of exp(number - largest)."""
    wide = tensor.to(torch.promote_types(tensor.dtype, torch.float32))
    peak = wide.real.amax(list(dims), True)
    return peak, (wide - _finite(peak)).exp().sum(list(dims), True, dtype=widen(wide.dtype))


class _Summing(NamedTuple):
    """How a reduction sums: from a part of the grid to parts, and from all parts to the result."""

    merging: Merging
    # (tensor, dims) -> parts, with dimensions kept
    summarize: Callable[[Tensor, Sequence[int]], Parts]
    # (call, parts, number of positions reduced) -> the result
    finish: Callable[[OperationCall, Parts, int], Any] = lambda call, parts, count: parts[0]


def _finish_moments(call: OperationCall, parts: Parts, count: int) -> Any:
    """Return the variance with the correction of the call, or its root, and the mean beside it."""
    given = call.kwargs["correction"]
    result = parts[2] / (parts[0] - (1 if given is None else float(given))).clamp(min=0)
    result = result.sqrt() if "std" in call.op else result
    return (result, parts[1]) if "_mean" in call.op else result


def _sums_of_norm(call: OperationCall) -> _Summing:
    """How a vector norm of some order sums: powers, their largest or smallest."""
    order = float(call.args[1])
    if math.isinf(order):
        extreme = (LARGEST, _find_largest) if order > 0 else (SMALLEST, _find_smallest)
        return _Summing(extreme[0], lambda x, dims: extreme[1](x.abs(), dims))
    if order == 0:
        return COUNT
    return _Summing(
        ADDED, lambda x, dims: _sum_up(x.abs().double() ** order, dims), lambda c, p, n: p[0] ** (1 / order)
    )


COUNT = _Summing(ADDED, lambda x, dims: _sum_up(x.ne(0), dims))


def _reduce_dims(
    call: OperationCall,
    merging: Merging,
    summarize: Callable[[Core, Tensor], Parts],
    finish: Callable[[OperationCall, Sequence[Tensor], Parts], Any],
    reads: Callable[[OperationCall, Box], list[Box]] | None = None,
) -> Reduction | None:
    """Return the reduction over dimensions, if one is cut: its parts have length 1 there, and labels elsewhere."""
    places, layout = all_but(call, given_dims(call)), call.operands[0].layout
    if not any(place is None and is_cut(own) for own, place in zip(layout, places, strict=True)):
        return None
    kept = tuple((Piece(1),) if place is None else own for own, place in zip(layout, places, strict=True))

    def finish_box(own: OperationCall, output: int, box: Box, tensors: Sequence[Tensor], parts: Parts) -> Tensor:
        result = finish(own, tensors, parts)
        result = result[output] if isinstance(result, tuple) else result
        return result.to(own.infos[output].dtype).reshape(box_shape(box))

    return reduce_arrays(
        (0,), kept, merging, lambda core, x: summarize(core, x[0]), finish_box, places=places, reads=reads
    )


def _kept(call: OperationCall) -> Dims:
    return [all_but(call, given_dims(call))]


def _summed(find: _Summing | Callable[[OperationCall], _Summing]) -> Rule:
    """Return the rule of a reduction from how it sums."""

    def reduce(call: OperationCall) -> Reduction | None:
        dims, summing = given_dims(call), find if isinstance(find, _Summing) else find(call)
        count = math.prod(length_of(call.operands[0].layout[dim]) for dim in dims)
        # torch converts numbers before it sums them.
        dtype = call.kwargs.get("dtype") or call.operands[0].dtype
        return _reduce_dims(
            call,
            summing.merging,
            lambda core, tensor: summing.summarize(tensor.to(dtype), dims),
            lambda own, tensors, parts: summing.finish(own, parts, count),
        )

    return aligned(_kept, gathers=True)._replace(reduce=reduce)


def _reduce_peaks(call: OperationCall) -> Reduction | None:
    """Find the largest, or smallest, numbers and their places."""
    dims, layout, least = given_dims(call), call.operands[0].layout, "min" in call.op

    def summarize(core: Core, tensor: Tensor) -> Parts:
        box = core(layout)
        lengths = [piece.length for dim in dims for piece in layout[dim]]
        places = positions_of(lengths, [span for dim in dims for span in box[dim]])
        rest = [dim for dim in range(tensor.dim()) if dim not in dims]
        moved = tensor.permute(*rest, *dims).flatten(len(rest)) if dims else tensor[..., None]
        best, at = (moved.min if least else moved.max)(-1)
        shape = [1 if dim in dims else length for dim, length in enumerate(tensor.shape)]
        return best.reshape(shape), places.to(at.device)[at].reshape(shape)

    def finish(own: OperationCall, tensors: Sequence[Tensor], parts: Parts) -> Any:
        return parts[1] if "arg" in own.op else parts

    return _reduce_dims(call, LOWS if least else PEAKS, summarize, finish)


def _reduce_softmax(call: OperationCall) -> Reduction | None:
    dims = given_dims(call)

    def finish(own: OperationCall, tensors: Sequence[Tensor], parts: Parts) -> Tensor:
        wide = tensors[0].to(torch.promote_types(tensors[0].dtype, torch.float32))
        shifted = wide - parts[0].to(wide)
        if "log" in own.op:
            return shifted - parts[1].log().to(wide)
        result = shifted.exp() / parts[1].to(wide)
        # Where all is -inf, attention of torch gives 0.
        return result.masked_fill(parts[0] == -math.inf, 0.0) if "safe" in own.op else result

    return _reduce_dims(
        call, EXPONENTIALS, lambda core, tensor: _sum_exponentials(tensor, dims), finish, lambda own, box: [box]
    )


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


def _dims_of_norm(call: OperationCall) -> Dims:
    """What runs together where the norm is over what is not cut: that is read whole, as weights of it are."""
    dims = [None if dim in find_norm(call).dims else dim for dim in range(len(call.shape))]
    return [dims, *([1] if "batch_norm" in call.op else [None] * len(each.layout) for each in call.operands[1:])]


def _dims_of_result(call: OperationCall) -> list[Sequence[int | None]]:
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
    norm, layout, split = find_norm(call), call.operands[0].layout, call.operands[0].layout
    if not any(is_cut(layout[dim]) for dim in norm.dims):
        return None
    dims, places = norm.dims, [*_dims_of_result(call)[0]]
    if norm.group is not None:
        if is_cut(layout[1]) and 1 in dims:
            raise RuleError(f"its groups of channels run along an axis that is cut; {FIX}")
        groups = layout[1] if norm.group == 1 else (Piece(length_of(layout[1]) // norm.group),)
        split, places = (layout[0], groups, (Piece(norm.group),), *layout[2:]), [*places[:2], None, *places[2:]]
        dims = [dim + (dim > 0) for dim in dims]
    kept = tuple((Piece(1),) if dim in dims else own for dim, own in enumerate(split))

    def regroup(tensor: Tensor) -> Tensor:
        return tensor if norm.group is None else tensor.unflatten(1, (-1, norm.group))

    def finish(own: OperationCall, output: int, box: Box, tensors: Sequence[Tensor], parts: Parts) -> Tensor:
        along = _dims_of_result(own)
        args, _ = own.bind(take_along(own, along, 0, box, tensors))
        weight, bias = args[1:3] if norm.group is not None else args[2:4]
        count, mean, squares = parts
        scale = (squares / count + norm.eps).rsqrt()
        grid = regroup(args[0].to(torch.promote_types(args[0].dtype, torch.float32)))
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
        return take_dims(result.to(own.dtype), [dim for dim, at in enumerate(along[0]) if at is None], layout, box)

    return reduce_arrays(
        (0,),
        kept,
        MOMENTS,
        lambda core, tensors: find_moments(regroup(tensors[0]), dims),
        finish,
        places=[None if dim in dims else place for dim, place in enumerate(places)],
        reads=lambda own, box: boxes_along(own, _dims_of_result(own), 0, box),
    )


# How operations sum.
_SUMS: dict[str, _Summing | Callable[[OperationCall], _Summing]] = {
    "sum.dim_IntList sum.default": _Summing(ADDED, _sum_up),
    "nansum": _Summing(ADDED, lambda x, dims: _sum_up(x.nan_to_num(0.0, math.inf, -math.inf), dims)),
    "mean.dim mean.default": _Summing(ADDED, _sum_up, lambda call, parts, count: parts[0] / count),
    "prod.dim_int prod.default": _Summing(Merging((1,), each_by(torch.mul)), _multiply_up),
    "count_nonzero.dim_IntList count_nonzero.default": COUNT,
    "amax max": _Summing(LARGEST, _find_largest),
    "amin min": _Summing(SMALLEST, _find_smallest),
    "aminmax": _Summing(
        Merging((math.inf, -math.inf), lambda one, other: (one[0].minimum(other[0]), one[1].maximum(other[1]))),
        lambda x, dims: (*_find_smallest(x, dims), *_find_largest(x, dims)),
        lambda call, parts, count: parts,
    ),
    "logsumexp": _Summing(EXPONENTIALS, _sum_exponentials, lambda call, parts, n: parts[0] + parts[1].log()),
    "var.correction std.correction var_mean.correction std_mean.correction": _Summing(
        MOMENTS, find_moments, _finish_moments
    ),
    "any.dims any.dim any.default": _Summing(LARGEST, lambda x, dims: _find_largest(x.ne(0), dims)),
    "all.dims all.dim all.default": _Summing(SMALLEST, lambda x, dims: _find_smallest(x.ne(0), dims)),
    "linalg_vector_norm norm.ScalarOpt_dim": _sums_of_norm,
}
SUM_RULES: dict[str, Rule] = {
    **{name: rule for names, find in _SUMS.items() for name, rule in named(_summed(find), names).items()},
    **named(aligned(_kept, gathers=True)._replace(reduce=_reduce_peaks), "argmax argmin max.dim min.dim"),
    **named(aligned(_kept), "median.dim nanmedian.dim mode kthvalue"),
    **named(
        aligned(_kept)._replace(label=lambda call: [call.operands[0].layout], reduce=_reduce_softmax),
        "_softmax _log_softmax _safe_softmax",
    ),
    **named(
        aligned(_dims_of_norm, _run_norm)._replace(label=_label_norm, reduce=_reduce_norm),
        "native_group_norm native_layer_norm native_batch_norm",
    ),
}
