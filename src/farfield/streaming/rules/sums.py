"""Rules of sums over dimensions: means, extremes, moments, norms of vectors.

Over an axis that is cut, each tile gives parts, and all parts merge.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from farfield.streaming.rules.pooling import larger_peaks
from farfield.streaming.rules.rule import (
    OperationCall,
    Parts,
    Reduction,
    Rule,
    RuleError,
    add,
    positions_of,
    reduce_arrays,
)
from farfield.streaming.spans import Box, Layout, Piece, box_shape, is_cut, length_of, whole_dim

# The largest mean, in deviations, whose square leaves the variance its digits in float32.
FAR = 100


# ---- reductions ------------------------------------------------------------------------------------------------------
def reduced_dims(call: OperationCall, place: int | None) -> list[int]:
    """The dimensions that are reduced, an argument by place, or `dim` by name; all by default."""
    count = len(call.operands[0].layout)
    dims = call.kwargs.get("dim") if place is None else call.args[place]
    dims = [dims] if isinstance(dims, int) else list(dims or [])
    return sorted(dim % count for dim in dims) or list(range(count))


def keeps(call: OperationCall) -> bool:
    """Whether reduced dimensions stay, with length 1."""
    return len(call.shape) == len(call.operands[0].layout)


def kept_layout(call: OperationCall, dims: Sequence[int]) -> Layout:
    """The layout of the operand with length 1 in the place of reduced dimensions."""
    return tuple((Piece(1),) if dim in dims else own for dim, own in enumerate(call.operands[0].layout))


def label_reduction(find: Callable[[OperationCall], Sequence[int]]) -> Callable[[OperationCall], Sequence[Layout]]:
    """Return the labelling: reduced dimensions have length 1 or go."""

    def label(call: OperationCall) -> list[Layout]:
        dims, layout = find(call), call.operands[0].layout
        kept = kept_layout(call, dims)
        if not keeps(call):
            kept = tuple(own for dim, own in enumerate(layout) if dim not in dims)
        return [kept] * len(call.infos)

    return label


def keepdim_box(call: OperationCall, dims: Sequence[int], box: Box) -> Box:
    """Return a box of the output as one in which reduced dimensions have length 1."""
    if keeps(call):
        return box
    rest = iter(box)
    return tuple(((0, 1),) if dim in dims else next(rest) for dim in range(len(call.operands[0].layout)))


class Summing(NamedTuple):
    """How a reduction sums: from a part of the grid to parts, and from all parts to the result.

    Attributes:
        start: As of `Reduction`.
        summarize: `(tensor, dims)` -> parts, with dimensions kept.
        merge: As of `Reduction`.
        finish: `(call, parts, count)` -> the result; `count` is the number of positions reduced.
    """

    start: tuple[float, ...]
    summarize: Callable[[Tensor, Sequence[int]], Parts]
    merge: Callable[[Parts, Parts], Parts]
    finish: Callable[[OperationCall, Parts, int], Any]


def larger(first: Parts, second: Parts) -> Parts:
    """Take the larger."""
    return tuple(torch.maximum(one, other) for one, other in zip(first, second, strict=True))


def smaller(first: Parts, second: Parts) -> Parts:
    """Take the smaller."""
    return tuple(torch.minimum(one, other) for one, other in zip(first, second, strict=True))


def merge_moments(first: Parts, second: Parts) -> Parts:
    """Merge (count, mean, sum of squared deviations): δ = m₂ - m₁, m = m₁ + δ n₂/n, M = M₁ + M₂ + δ² n₁ n₂/n."""
    (count, mean, squares), (other_count, other_mean, other_squares) = first, second
    total = count + other_count
    difference, share = other_mean - mean, other_count / total.clamp(min=1)
    return total, mean + difference * share, squares + other_squares + difference**2 * count * share


def moments(tensor: Tensor, dims: Sequence[int]) -> Parts:
    """Return count, mean and sum of squared deviations."""
    wide = tensor.to(torch.promote_types(tensor.dtype, torch.float32))
    pair = moments_of_rows(wide, dims) if wide.is_cpu and wide.dtype == torch.float32 and wide.numel() else None
    if pair is None:
        pair = [each.double() for each in torch.var_mean(wide, list(dims), correction=0, keepdim=True)]
    variance, mean = pair
    count = torch.full_like(mean, wide.numel() // max(mean.numel(), 1))
    return count, mean, variance * count


def moments_of_rows(tensor: Tensor, dims: Sequence[int]) -> list[Tensor] | None:
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


def total(tensor: Tensor, dims: Sequence[int]) -> Parts:
    """Return the sum."""
    return (tensor.sum(list(dims), keepdim=True, dtype=torch.float64),)


def variance(call: OperationCall, parts: Parts) -> Tensor:
    """Return the variance, with the correction of the call."""
    count, _, squares = parts
    given = call.kwargs["correction"]
    return squares / (count - (1 if given is None else float(given))).clamp(min=0)


def extreme(tensor: Tensor, dims: Sequence[int], sign: int) -> Parts:
    """Return the maximum, with `sign=-1` the minimum."""
    return ((tensor.amax if sign > 0 else tensor.amin)(list(dims), True).double(),)


def both_extremes(tensor: Tensor, dims: Sequence[int]) -> Parts:
    """Return minus the minimum, and the maximum."""
    return -extreme(tensor, dims, -1)[0], extreme(tensor, dims, 1)[0]


def product(tensor: Tensor, dims: Sequence[int]) -> Parts:
    """Return the product."""
    result = tensor.double()
    for dim in dims:
        result = result.prod(dim, keepdim=True)
    return (result,)


def multiply(first: Parts, second: Parts) -> Parts:
    """Multiply products."""
    return (first[0] * second[0],)


def holds(tensor: Tensor) -> Tensor:
    """Return 1 where a number is not 0."""
    return tensor.ne(0).double()


# Exponentials over the whole: the largest number, and the sum of exp(number - largest).
def exponentials(tensor: Tensor, dims: Sequence[int]) -> Parts:
    """Return the largest number and the sum of exponentials."""
    wide = tensor.to(torch.promote_types(tensor.dtype, torch.float32))
    peak = wide.amax(list(dims), True)
    return peak.double(), (wide - finite(peak)).exp().sum(list(dims), True, dtype=torch.float64)


def finite(peak: Tensor) -> Tensor:
    """Return what is subtracted before exponentials: 0 where all is -inf."""
    return peak.masked_fill(peak == -math.inf, 0.0)


def merge_exponentials(first: Parts, second: Parts) -> Parts:
    """Merge (peak, sum): the sums of the larger peak."""
    peak = torch.maximum(first[0], second[0])
    return peak, sum(
        part[1] * (finite(part[0]) - finite(peak)).exp().where(part[1] != 0, 0.0) for part in (first, second)
    )


def power_sum(tensor: Tensor, dims: Sequence[int], order: float) -> Parts:
    """Return the sum of powers of absolute values, or the largest or smallest of them."""
    size = tensor.abs()
    if math.isinf(order):
        return extreme(size, dims, 1 if order > 0 else -1)
    return total(holds(size) if order == 0 else size.double() ** order, dims)


def plain(call: OperationCall, parts: Parts, count: int) -> Tensor:
    """The part itself."""
    return parts[0]


SUM = Summing((0.0,), total, add, plain)
LARGEST = Summing((-math.inf,), lambda x, dims: extreme(x, dims, 1), larger, plain)
SMALLEST = Summing((math.inf,), lambda x, dims: extreme(x, dims, -1), smaller, plain)
PRODUCT = Summing((1.0,), product, multiply, plain)
NAN_SUM = Summing((0.0,), lambda x, dims: total(x.nan_to_num(0.0, math.inf, -math.inf), dims), add, plain)
COUNT = Summing((0.0,), lambda x, dims: total(holds(x), dims), add, plain)
ANY = Summing((0.0,), lambda x, dims: extreme(holds(x), dims, 1), larger, plain)
ALL = Summing((1.0,), lambda x, dims: extreme(holds(x), dims, -1), smaller, plain)
MEAN = Summing((0.0,), total, add, lambda call, parts, count: parts[0] / count)
EXPONENTIALS = Summing((-math.inf, 0.0), exponentials, merge_exponentials, lambda c, p, n: p[0] + p[1].log())

# Name of an operation -> where its dimensions stand among its arguments, and how it sums.
SUMS: dict[str, tuple[int | None, Summing]] = {
    "sum.dim_IntList": (1, SUM),
    "sum.default": (None, SUM),
    "nansum.default": (1, NAN_SUM),
    "mean.dim": (1, MEAN),
    "mean.default": (None, MEAN),
    "prod.dim_int": (1, PRODUCT),
    "prod.default": (None, PRODUCT),
    "count_nonzero.dim_IntList": (1, COUNT),
    "count_nonzero.default": (1, COUNT),
    "amax.default": (1, LARGEST),
    "amin.default": (1, SMALLEST),
    "max.default": (None, LARGEST),
    "min.default": (None, SMALLEST),
    "aminmax.default": (None, Summing((-math.inf,) * 2, both_extremes, larger, lambda c, p, n: (-p[0], p[1]))),
    "logsumexp.default": (1, EXPONENTIALS),
    "var.correction": (1, Summing((0.0,) * 3, moments, merge_moments, lambda c, p, n: variance(c, p))),
    "std.correction": (1, Summing((0.0,) * 3, moments, merge_moments, lambda c, p, n: variance(c, p).sqrt())),
    "var_mean.correction": (1, Summing((0.0,) * 3, moments, merge_moments, lambda c, p, n: (variance(c, p), p[1]))),
    "std_mean.correction": (
        1,
        Summing((0.0,) * 3, moments, merge_moments, lambda c, p, n: (variance(c, p).sqrt(), p[1])),
    ),
    **{f"any.{kind}": (place, ANY) for kind, place in (("dims", 1), ("dim", 1), ("default", None))},
    **{f"all.{kind}": (place, ALL) for kind, place in (("dims", 1), ("dim", 1), ("default", None))},
}


def norm_sums(call: OperationCall) -> Summing:
    """How a vector norm of some order sums."""
    order = float(call.args[1])
    if math.isinf(order):
        return (
            LARGEST._replace(summarize=lambda x, dims: power_sum(x, dims, order))
            if order > 0
            else SMALLEST._replace(summarize=lambda x, dims: power_sum(x, dims, order))
        )
    root = 1.0 if order == 0 else 1 / order
    return Summing((0.0,), lambda x, dims: power_sum(x, dims, order), add, lambda c, p, n: p[0] ** root)


def constantly(sums: Summing | None) -> Callable[[OperationCall], Summing | None]:
    """Return the function that finds the same sums for each call."""
    return lambda call: sums


def summed(place: int | None, find_sums: Callable[[OperationCall], Summing | None]) -> Rule:
    """Return the rule of a reduction; without sums it is refused along an axis that is cut."""

    def needs(call: OperationCall, output: int, box: Box) -> list[Box]:
        dims = reduced_dims(call, place)
        full, layout = keepdim_box(call, dims, box), call.operands[0].layout
        return [tuple(whole_dim(own) if dim in dims else full[dim] for dim, own in enumerate(layout))]

    def reduce(call: OperationCall) -> Reduction | None:
        dims, layout = reduced_dims(call, place), call.operands[0].layout
        if not any(is_cut(layout[dim]) for dim in dims):
            return None
        sums = find_sums(call)
        if sums is None:
            raise RuleError("it works along an axis that is cut")
        count = math.prod(length_of(layout[dim]) for dim in dims)

        def finish(own: OperationCall, output: int, box: Box, tensors: Sequence[Tensor], parts: Parts) -> Tensor:
            result = sums.finish(own, parts, count)
            result = result[output] if isinstance(result, tuple) else result
            return result.to(own.infos[output].dtype).reshape(box_shape(box))

        return reduce_arrays(
            operands=(0,),
            layouts=(kept_layout(call, dims),) * len(sums.start),
            start=sums.start,
            summarize=lambda core, tensors: sums.summarize(tensors[0], dims),
            merge=sums.merge,
            finish=finish,
            needs=lambda box: [keepdim_box(call, dims, box)] * len(sums.start),
        )

    return Rule(label_reduction(lambda call: reduced_dims(call, place)), needs, run_call, reduce)


def run_call(call: OperationCall, output: int, box: Box, tensors: Sequence[Tensor]) -> Tensor:
    """Run the operation on what was read."""
    return call.run(output, tensors)


# ---- where the largest is --------------------------------------------------------------------------------------------
def find_peaks(tensor: Tensor, dims: Sequence[int], layout: Layout, box: Box, sign: int) -> Parts:
    """Return the largest numbers, with `sign=-1` minus the smallest, and where they are in the flattened whole."""
    rest = [dim for dim in range(tensor.dim()) if dim not in dims]
    moved = tensor.permute(*rest, *dims).flatten(len(rest)) if dims else tensor[..., None]
    best, at = (moved.max if sign > 0 else moved.min)(-1)
    places = torch.zeros(1, dtype=torch.long)
    for dim in dims:
        own = positions_of(layout[dim], box[dim])
        places = (places[:, None] * length_of(layout[dim]) + own).flatten()
    shape = [1 if dim in dims else length for dim, length in enumerate(tensor.shape)]
    return (best.double() * sign).reshape(shape), places.to(at.device)[at].double().reshape(shape)


def peaked(place: int, sign: int, *, index_only: bool) -> Rule:
    """Return the rule of argmax, of max along a dimension, or with `sign=-1` of the minima."""
    plain_rule = summed(place, constantly(None))

    def reduce(call: OperationCall) -> Reduction | None:
        dims, layout = reduced_dims(call, place), call.operands[0].layout
        if not any(is_cut(layout[dim]) for dim in dims):
            return None

        def finish(own: OperationCall, output: int, box: Box, tensors: Sequence[Tensor], parts: Parts) -> Tensor:
            result = parts[1] if index_only or output else parts[0] * sign
            return result.to(own.infos[output].dtype).reshape(box_shape(box))

        return reduce_arrays(
            operands=(0,),
            layouts=(kept_layout(call, dims),) * 2,
            start=(-math.inf, math.inf),
            summarize=lambda core, tensors: find_peaks(tensors[0], dims, layout, core(layout), sign),
            merge=larger_peaks,
            finish=finish,
            needs=lambda box: [keepdim_box(call, dims, box)] * 2,
        )

    return plain_rule._replace(reduce=reduce)


def refused(place: int) -> Rule:
    """Return the rule of a reduction that does not merge."""
    return summed(place, constantly(None))


SUM_RULES: dict[str, Rule] = {
    **{f"aten.{name}": summed(place, constantly(sums)) for name, (place, sums) in SUMS.items()},
    "aten.linalg_vector_norm.default": summed(2, norm_sums),
    "aten.argmax.default": peaked(1, 1, index_only=True),
    "aten.argmin.default": peaked(1, -1, index_only=True),
    "aten.max.dim": peaked(1, 1, index_only=False),
    "aten.min.dim": peaked(1, -1, index_only=False),
    **{f"aten.{name}.dim": refused(1) for name in ("median", "nanmedian")},
    **{f"aten.{name}.default": refused(place) for name, place in (("mode", 1), ("kthvalue", 2))},
}
