"""Rules of sums over dimensions: means, extremes, moments, norms of vectors, softmax.

Over an axis that is cut, each tile gives parts, and all parts merge.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from farfield.streaming.rules.rule import (
    ADDED,
    Core,
    Dims,
    Merging,
    OperationCall,
    Parts,
    Reduction,
    Rule,
    aligned,
    all_but,
    each_by,
    given_dims,
    named,
    positions_of,
    reduce_arrays,
)
from farfield.streaming.spans import Box, Piece, box_shape, is_cut, length_of

# The largest mean, in deviations, whose square leaves the variance its digits in float32.
FAR = 100


# ---- how numbers merge -----------------------------------------------------------------------------------------------
def merge_moments(first: Parts, second: Parts) -> Parts:
    """Merge (count, mean, sum of squared deviations): δ = m₂ - m₁, m = m₁ + δ n₂/n, M = M₁ + M₂ + δ² n₁ n₂/n."""
    (count, mean, squares), (other_count, other_mean, other_squares) = first, second
    total = count + other_count
    difference, share = other_mean - mean, other_count / total.clamp(min=1)
    return total, mean + difference * share, squares + other_squares + difference**2 * count * share


def _merge_exponentials(first: Parts, second: Parts) -> Parts:
    peak = torch.maximum(first[0], second[0])
    return peak, sum(
        part[1] * (_finite(part[0]) - _finite(peak)).exp().where(part[1] != 0, 0.0) for part in (first, second)
    )


def _finite(peak: Tensor) -> Tensor:
    """Return what is subtracted before exponentials: 0 where all is -inf."""
    return peak.masked_fill(peak == -math.inf, 0.0)


def _larger_peaks(first: Parts, second: Parts) -> Parts:
    """Take the larger of two maxima and its position; of equal ones, or of two NaN, the first."""
    (value, index), (other, other_index) = first, second
    both = value.isnan() & other.isnan()
    later = other_index < index
    better = (other > value) | (other.isnan() & ~value.isnan()) | (((other == value) | both) & later)
    return torch.where(better, other, value), torch.where(better, other_index, index)


LARGEST, SMALLEST = Merging((-math.inf,), each_by(torch.maximum)), Merging((math.inf,), each_by(torch.minimum))
MOMENTS, EXPONENTIALS = Merging((0.0,) * 3, merge_moments), Merging((-math.inf, 0.0), _merge_exponentials)
# The largest number and its place.
PEAKS = Merging((-math.inf, math.inf), _larger_peaks)


# ---- what a tile gives -----------------------------------------------------------------------------------------------
def moments(tensor: Tensor, dims: Sequence[int]) -> Parts:
    """Return count, mean and sum of squared deviations."""
    wide = tensor.to(torch.promote_types(tensor.dtype, torch.float32))
    pair = _moments_of_rows(wide, dims) if wide.is_cpu and wide.dtype == torch.float32 and wide.numel() else None
    if pair is None:
        pair = [each.double() for each in torch.var_mean(wide, list(dims), correction=0, keepdim=True)]
    variance, mean = pair
    count = torch.full_like(mean, wide.numel() // max(mean.numel(), 1))
    return count, mean, variance * count


def _moments_of_rows(tensor: Tensor, dims: Sequence[int]) -> list[Tensor] | None:
    """Return variance and mean by torch's group norm, which is 16 times as fast on a CPU as `torch.var_mean`.

    None where a mean is far above the deviation, and its square would hide the variance.
    """
    reduced = {dim % tensor.dim() for dim in dims}
    kept = [dim for dim in range(tensor.dim()) if dim not in reduced]
    rows = tensor.permute(*kept, *sorted(reduced)).reshape(math.prod(tensor.shape[dim] for dim in kept), -1)
    count, length = rows.shape
    _, mean, inverse = torch.native_group_norm(rows[None], None, None, 1, count, length, count, 0.0)
    variance, mean = inverse.double().pow(-2), mean.double()
    if (mean.square() > FAR**2 * variance).any():
        return None
    shape = [1 if dim in reduced else own for dim, own in enumerate(tensor.shape)]
    return [variance.view(shape), mean.view(shape)]


def _sum_up(tensor: Tensor, dims: Sequence[int]) -> Parts:
    return (tensor.sum(list(dims), keepdim=True, dtype=torch.float64),)


def _find_largest(tensor: Tensor, dims: Sequence[int]) -> Parts:
    return (tensor.amax(list(dims), True).double(),)


def _find_smallest(tensor: Tensor, dims: Sequence[int]) -> Parts:
    return (tensor.amin(list(dims), True).double(),)


def _multiply_up(tensor: Tensor, dims: Sequence[int]) -> Parts:
    result = tensor.double()
    for dim in dims:
        result = result.prod(dim, keepdim=True)
    return (result,)


def _holds(tensor: Tensor) -> Tensor:
    return tensor.ne(0).double()


def _sum_exponentials(tensor: Tensor, dims: Sequence[int]) -> Parts:
    """Return the largest number, and the sum of exp(number - largest)."""
    wide = tensor.to(torch.promote_types(tensor.dtype, torch.float32))
    peak = wide.amax(list(dims), True)
    return peak.double(), (wide - _finite(peak)).exp().sum(list(dims), True, dtype=torch.float64)


# ---- reductions ------------------------------------------------------------------------------------------------------
class _Summing(NamedTuple):
    """How a reduction sums: from a part of the grid to parts, and from all parts to the result.

    Attributes:
        merging: How parts merge.
        summarize: `(tensor, dims)` -> parts, with dimensions kept.
        finish: `(call, parts, count)` -> the result; `count` is the number of positions reduced.
    """

    merging: Merging
    summarize: Callable[[Tensor, Sequence[int]], Parts]
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


SUM = _Summing(ADDED, _sum_up)
COUNT = _Summing(ADDED, lambda x, dims: _sum_up(_holds(x), dims))
ANY = _Summing(LARGEST, lambda x, dims: _find_largest(_holds(x), dims))
ALL = _Summing(Merging((1.0,), each_by(torch.minimum)), lambda x, dims: _find_smallest(_holds(x), dims))
EXTREMES = _Summing(
    Merging((-math.inf,) * 2, each_by(torch.maximum)),
    lambda x, dims: (-_find_smallest(x, dims)[0], _find_largest(x, dims)[0]),
    lambda call, parts, count: (-parts[0], parts[1]),
)


def _reduce_dims(
    call: OperationCall,
    merging: Merging,
    summarize: Callable[[Core, Tensor], Parts],
    finish: Callable[[OperationCall, Sequence[Tensor], Parts], Any],
    reads: Callable[[OperationCall, Box], list[Box]] | None = None,
) -> Reduction | None:
    """Return the reduction over dimensions, if one is cut: its parts have length 1 there, and labels elsewhere."""
    (dims,), layout = _kept(call), call.operands[0].layout
    if not any(place is None and is_cut(own) for own, place in zip(layout, dims, strict=True)):
        return None
    kept = tuple((Piece(1),) if place is None else own for own, place in zip(layout, dims, strict=True))

    def part_box(box: Box) -> Box:
        return tuple(((0, 1),) if place is None else box[place] for place in dims)

    def finish_box(own: OperationCall, output: int, box: Box, tensors: Sequence[Tensor], parts: Parts) -> Tensor:
        result = finish(own, tensors, parts)
        result = result[output] if isinstance(result, tuple) else result
        return result.to(own.infos[output].dtype).reshape(box_shape(box))

    return reduce_arrays((0,), kept, merging, lambda core, x: summarize(core, x[0]), finish_box, part_box, reads)


def _kept(call: OperationCall) -> Dims:
    return [all_but(call, given_dims(call))]


def _summed(find: Callable[[OperationCall], _Summing]) -> Rule:
    """Return the rule of a reduction from how it sums."""

    def reduce(call: OperationCall) -> Reduction | None:
        dims, summing = given_dims(call), find(call)
        count = math.prod(length_of(call.operands[0].layout[dim]) for dim in dims)
        return _reduce_dims(
            call,
            summing.merging,
            lambda core, tensor: summing.summarize(tensor, dims),
            lambda own, tensors, parts: summing.finish(own, parts, count),
        )

    return aligned(_kept, gathers=True)._replace(reduce=reduce)


def _always(summing: _Summing) -> Callable[[OperationCall], _Summing]:
    return lambda call: summing


def _reduce_peaks(call: OperationCall) -> Reduction | None:
    """Find the largest numbers and their places, of minima minus the smallest."""
    dims, layout, sign = given_dims(call), call.operands[0].layout, -1 if "min" in call.op else 1

    def summarize(core: Core, tensor: Tensor) -> Parts:
        box, places = core(layout), torch.zeros(1, dtype=torch.long)
        for dim in dims:
            own = positions_of(layout[dim], box[dim])
            places = (places[:, None] * length_of(layout[dim]) + own).flatten()
        rest = [dim for dim in range(tensor.dim()) if dim not in dims]
        moved = tensor.permute(*rest, *dims).flatten(len(rest)) if dims else tensor[..., None]
        best, at = (moved.max if sign > 0 else moved.min)(-1)
        shape = [1 if dim in dims else length for dim, length in enumerate(tensor.shape)]
        return (best.double() * sign).reshape(shape), places.to(at.device)[at].double().reshape(shape)

    def finish(own: OperationCall, tensors: Sequence[Tensor], parts: Parts) -> Any:
        return parts[1] if "arg" in own.op else (parts[0] * sign, parts[1])

    return _reduce_dims(call, PEAKS, summarize, finish)


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


# How operations sum.
SUMS: dict[str, _Summing] = {
    "sum.dim_IntList sum.default": SUM,
    "nansum": _Summing(ADDED, lambda x, dims: _sum_up(x.nan_to_num(0.0, math.inf, -math.inf), dims)),
    "mean.dim mean.default": _Summing(ADDED, _sum_up, lambda call, parts, count: parts[0] / count),
    "prod.dim_int prod.default": _Summing(Merging((1.0,), each_by(torch.mul)), _multiply_up),
    "count_nonzero.dim_IntList count_nonzero.default": COUNT,
    "amax max": _Summing(LARGEST, _find_largest),
    "amin min": _Summing(SMALLEST, _find_smallest),
    "aminmax": EXTREMES,
    "logsumexp": _Summing(EXPONENTIALS, _sum_exponentials, lambda call, parts, n: parts[0] + parts[1].log()),
    "var.correction std.correction var_mean.correction std_mean.correction": _Summing(
        MOMENTS, moments, _finish_moments
    ),
    "any.dims any.dim any.default": ANY,
    "all.dims all.dim all.default": ALL,
}
SUM_RULES: dict[str, Rule] = {
    name: rule for names, summing in SUMS.items() for name, rule in named(_summed(_always(summing)), names).items()
}
SUM_RULES |= {
    **named(_summed(_sums_of_norm), "linalg_vector_norm"),
    **named(aligned(_kept, gathers=True)._replace(reduce=_reduce_peaks), "argmax argmin max.dim min.dim"),
    **named(aligned(_kept), "median.dim nanmedian.dim mode kthvalue"),
    **named(
        aligned(_kept)._replace(label=lambda call: [call.operands[0].layout], reduce=_reduce_softmax),
        "_softmax _log_softmax _safe_softmax",
    ),
}
