"""The table of reductions over dimensions: sums, means, extremes, moments, softmax.

Each row has three functions: what a tile gives, how two of these merge, and what a position reads from the merged.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from farfield.streaming.rules.rule import (
    Along,
    Core,
    Dims,
    OperationCall,
    Parts,
    Reduction,
    Rule,
    Summarize,
    aligned,
    all_but,
    given_dims,
    named,
    pull_sums,
    take_output,
    widen,
)
from farfield.streaming.spans import Box, Piece, is_cut, length_of, positions_of

# The largest mean, in deviations, whose square leaves the variance its digits in float32.
FAR = 100


def along_kept(call: OperationCall) -> Along:
    """The dimensions of the first operand, of length 1 where they are reduced."""
    places, layout = all_but(call, given_dims(call)), call.operands[0].layout
    return [((Piece(1),) if at is None else own, at) for own, at in zip(layout, places, strict=True)]


def _numbers(call: OperationCall, tensors: Sequence[Tensor]) -> Tensor:
    """The numbers that are summed: torch converts them before."""
    return tensors[0].to(call.kwargs.get("dtype") or call.operands[0].dtype)


def _changed(change: Callable[[Tensor], Tensor], summarize: Summarize) -> Summarize:
    """Summarize numbers that are changed before."""
    return lambda call, core, tensors: summarize(call, core, [change(_numbers(call, tensors))])


# ---- sums and extremes -----------------------------------------------------------------------------------------------
def _sum_up(call: OperationCall, core: Core, tensors: Sequence[Tensor]) -> Parts:
    numbers = _numbers(call, tensors)
    return (numbers.sum(given_dims(call), True, dtype=widen(numbers.dtype)),)


def _count_nonzero(call: OperationCall, core: Core, tensors: Sequence[Tensor]) -> Parts:
    return (_numbers(call, tensors).ne(0).sum(given_dims(call), True),)


def add_parts(first: Parts, second: Parts) -> Parts:
    return tuple(map(torch.add, first, second))


def _average(call: OperationCall, output: int, box: Box, tensors: Sequence[Tensor], parts: Parts) -> Tensor:
    return parts[0] / math.prod(length_of(call.operands[0].layout[dim]) for dim in given_dims(call))


def _multiply_up(call: OperationCall, core: Core, tensors: Sequence[Tensor]) -> Parts:
    result = _numbers(call, tensors)
    result = result.to(widen(result.dtype))
    for dim in given_dims(call):
        result = result.prod(dim, keepdim=True)
    return (result,)


def _multiply_parts(first: Parts, second: Parts) -> Parts:
    return (first[0] * second[0],)


def _find_largest(call: OperationCall, core: Core, tensors: Sequence[Tensor]) -> Parts:
    return (tensors[0].amax(given_dims(call), True),)


def _find_smallest(call: OperationCall, core: Core, tensors: Sequence[Tensor]) -> Parts:
    return (tensors[0].amin(given_dims(call), True),)


def _find_both(call: OperationCall, core: Core, tensors: Sequence[Tensor]) -> Parts:
    return *_find_smallest(call, core, tensors), *_find_largest(call, core, tensors)


def _take_largest(first: Parts, second: Parts) -> Parts:
    return (torch.maximum(first[0], second[0]),)


def _take_smallest(first: Parts, second: Parts) -> Parts:
    return (torch.minimum(first[0], second[0]),)


def _take_both(first: Parts, second: Parts) -> Parts:
    return torch.minimum(first[0], second[0]), torch.maximum(first[1], second[1])


def _sum_powers(call: OperationCall, core: Core, tensors: Sequence[Tensor]) -> Parts:
    """Of a vector norm of some order, the sum of powers."""
    powers = _numbers(call, tensors).abs().double() ** float(call.args[1])
    return (powers.sum(given_dims(call), True),)


def _take_root(call: OperationCall, output: int, box: Box, tensors: Sequence[Tensor], parts: Parts) -> Tensor:
    # The gradient of a norm that is 0 is 0, and not that of the root.
    is_zero = parts[0] == 0
    return (parts[0].masked_fill(is_zero, 1.0) ** (1 / float(call.args[1]))).masked_fill(is_zero, 0.0)


def _count_ties(summarize: Summarize, call: OperationCall, core: Core, tensors: Sequence[Tensor]) -> Parts:
    """Return an extreme and how many positions have it."""
    (best,) = summarize(call, core, tensors)
    numbers = tensors[0].abs() if "norm" in call.op else tensors[0]
    return best, (numbers == best).sum(given_dims(call), True, dtype=best.dtype)


def _merge_ties(merge: Callable[[Parts, Parts], Parts], first: Parts, second: Parts) -> Parts:
    (best,) = merge(first[:1], second[:1])
    return best, sum(count.where(own == best, 0) for own, count in (first, second))


def _pull_ties(own: Parts, merged: Parts, grads: Parts) -> tuple[Parts, Parts]:
    """Return the share of a tile's positions in those of all that have the extreme."""
    share = (own[1] / merged[1]).where(own[0] == merged[0], 0)
    return (None if grads[0] is None else grads[0] * share, None), grads


def with_ties(row: Reduction) -> Reduction:
    """Return a row of extremes that also counts the positions that have each, over which torch divides a gradient."""
    if row.merge not in (_take_largest, _take_smallest):
        return row
    summarize, merge = partial(_count_ties, row.summarize), partial(_merge_ties, row.merge)
    return row._replace(summarize=summarize, merge=merge, start=(*row.start, 0), pull=_pull_ties)


# ---- extremes and their places ---------------------------------------------------------------------------------------
def _find_peaks(call: OperationCall, core: Core, tensors: Sequence[Tensor]) -> Parts:
    """Find the largest, or smallest, numbers and their places in the flattened whole."""
    (tensor, *_), dims, layout = tensors, given_dims(call), call.operands[0].layout
    box, lengths = core(layout), [piece.length for dim in dims for piece in layout[dim]]
    places = positions_of(lengths, [span for dim in dims for span in box[dim]])
    rest = [dim for dim in range(tensor.dim()) if dim not in dims]
    moved = tensor.permute(*rest, *dims).flatten(len(rest)) if dims else tensor[..., None]
    best, at = (moved.min if "min" in call.op else moved.max)(-1)
    shape = [1 if dim in dims else length for dim, length in enumerate(tensor.shape)]
    return best.reshape(shape), places.to(at.device)[at].reshape(shape)


def merge_peaks(first: Parts, second: Parts) -> Parts:
    """Take the larger of two numbers and its place; of equal ones, or of two NaN, the first."""
    return _take_better(second[0] > first[0], first, second)


def _merge_lows(first: Parts, second: Parts) -> Parts:
    return _take_better(second[0] < first[0], first, second)


def _take_better(is_better: Tensor, first: Parts, second: Parts) -> Parts:
    (value, index), (other, other_index) = first, second
    both = value.isnan() & other.isnan()
    better = is_better | (other.isnan() & ~value.isnan()) | (((other == value) | both) & (other_index < index))
    return torch.where(better, other, value), torch.where(better, other_index, index)


def _pull_peaks(own: Parts, merged: Parts, grads: Parts) -> tuple[Parts, Parts]:
    """Return the gradient of what is found in this tile."""
    return (None if grads[0] is None else grads[0].where(own[1] == merged[1], 0), None), grads


def _take_second(call: OperationCall, output: int, box: Box, tensors: Sequence[Tensor], parts: Parts) -> Tensor:
    """Return the place of an extreme, or the mean of moments."""
    return parts[1]


# ---- moments ---------------------------------------------------------------------------------------------------------
class _Moments(torch.autograd.Function):
    """Moments, whose gradient is a multiple of the tensor and a number: d(m, M) = dm / n + 2 dM (x - m)."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, dims: Sequence[int]) -> Parts:
        count, mean, squares = find_moments(tensor, dims)
        ctx.save_for_backward(tensor, count, mean)
        return count, mean, squares

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        tensor, count, mean = ctx.saved_tensors
        scale = 2 * grads[2]
        return (tensor * scale.to(tensor)).add_((grads[1] / count - scale * mean).to(tensor)), None


def find_moments(tensor: Tensor, dims: Sequence[int], mask: Tensor | None = None) -> Parts:
    """Return count, mean and sum of squared deviations, of the positions where a mask is True."""
    if tensor.requires_grad and torch.is_grad_enabled() and mask is None and not tensor.is_complex():
        return cast(Parts, _Moments.apply(tensor, dims))
    if mask is not None and not mask.all():
        return _find_valid_moments(tensor, list(dims), mask)
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


def _find_valid_moments(tensor: Tensor, dims: list[int], mask: Tensor) -> Parts:
    wide = tensor.to(torch.promote_types(tensor.dtype, torch.float32))
    repeated = math.prod(tensor.shape[dim] for dim in dims if mask.shape[dim] == 1)
    count = mask.sum(dims, True, dtype=torch.float64) * repeated
    mean = wide.where(mask, 0).sum(dims, True, dtype=widen(wide.dtype)) / count.clamp(min=1)
    near = mean.to(wide)
    squares = (wide - near).where(mask, 0).abs().square().sum(dims, True, dtype=torch.float64)
    return count.expand_as(mean).contiguous(), mean, squares - count * (mean - near).abs() ** 2


def _find_own_moments(call: OperationCall, core: Core, tensors: Sequence[Tensor]) -> Parts:
    mask = tensors[-1] if "mask" in call.kwargs else None
    return find_moments(_numbers(call, tensors), given_dims(call), mask)


def merge_moments(first: Parts, second: Parts) -> Parts:
    """Merge (count, mean, sum of squared deviations): δ = m₂ - m₁, m = m₁ + δ n₂/n, M = M₁ + M₂ + δ² n₁ n₂/n."""
    (count, mean, squares), (other_count, other_mean, other_squares) = first, second
    total = count + other_count
    difference, share = other_mean - mean, other_count / total.clamp(min=1)
    return total, mean + difference * share, squares + other_squares + difference.abs() ** 2 * count * share


def _pull_moments(own: Parts, merged: Parts, grads: Parts) -> tuple[Parts, Parts]:
    """Return dm_i = dm n_i/n + 2 dM n_i (m_i - m), and dM_i = dM."""
    (count, mean, _), (total, center, _), (_, of_mean, of_squares) = own, merged, grads
    means = [] if of_mean is None else [of_mean * count / total.clamp(min=1)]
    means += [] if of_squares is None else [2 * of_squares * count * (mean - center)]
    return (None, sum(means) if means else None, of_squares), grads


def _find_variance(call: OperationCall, output: int, box: Box, tensors: Sequence[Tensor], parts: Parts) -> Tensor:
    """Return the variance with the correction of the call, or its root, or the mean beside it."""
    if output:
        return parts[1]
    given = call.kwargs["correction"]
    left = parts[0] - (1 if given is None else float(given))
    # Where a mask leaves nothing, the variance is 0, and without one as torch's.
    result = parts[2] / left.clamp(min=torch.finfo(left.dtype).tiny if "mask" in call.kwargs else 0)
    return result.sqrt() if "std" in call.op else result


# ---- softmax ---------------------------------------------------------------------------------------------------------
def _sum_exponentials(call: OperationCall, core: Core, tensors: Sequence[Tensor]) -> Parts:
    """Return the largest number, of complex ones by their real part, and the sum of exp(number - largest)."""
    numbers, dims = _numbers(call, tensors), given_dims(call)
    wide = numbers.to(torch.promote_types(numbers.dtype, torch.float32))
    # It cancels later, and has no gradient.
    peak = wide.detach().real.amax(dims, True)
    return peak, (wide - _finite(peak)).exp().sum(dims, True, dtype=widen(wide.dtype))


def _merge_exponentials(first: Parts, second: Parts) -> Parts:
    peak = torch.maximum(first[0], second[0])
    return peak, sum(
        part[1] * (_finite(part[0]) - _finite(peak)).exp().where(part[1] != 0, 0.0) for part in (first, second)
    )


def _pull_exponentials(own: Parts, merged: Parts, grads: Parts) -> tuple[Parts, Parts]:
    """Return ds_i = ds exp(p_i - p)."""
    factor = (_finite(own[0]) - _finite(merged[0])).exp()
    return (None, None if grads[1] is None else grads[1] * factor), grads


def _finite(peak: Tensor) -> Tensor:
    """Return what is subtracted before exponentials: 0 where all is -inf."""
    return peak.masked_fill(peak == -math.inf, 0.0)


def _add_logarithm(call: OperationCall, output: int, box: Box, tensors: Sequence[Tensor], parts: Parts) -> Tensor:
    return parts[0] + parts[1].log()


def _divide_exponentials(call: OperationCall, output: int, box: Box, tensors: Sequence[Tensor], parts: Parts) -> Tensor:
    wide = tensors[0].to(torch.promote_types(tensors[0].dtype, torch.float32))
    shifted = wide - parts[0].to(wide)
    if "log" in call.op:
        return shifted - parts[1].log().to(wide)
    result = shifted.exp() / parts[1].to(wide)
    # Where all is -inf, attention of torch gives 0.
    return result.masked_fill(parts[0] == -math.inf, 0.0) if "safe" in call.op else result


# ---- the table -------------------------------------------------------------------------------------------------------
SUM = Reduction(_sum_up, add_parts, take_output, along_kept, pull=pull_sums)
_MEAN = SUM._replace(finish=_average)
_NONZERO = Reduction(_count_nonzero, add_parts, take_output, along_kept)
_LARGEST = Reduction(_find_largest, _take_largest, take_output, along_kept, (-math.inf,))
_SMALLEST = Reduction(_find_smallest, _take_smallest, take_output, along_kept, (math.inf,))
PEAKS = Reduction(_find_peaks, merge_peaks, take_output, along_kept, (-math.inf, math.inf), pull=_pull_peaks)
_LOWS = PEAKS._replace(merge=_merge_lows, start=(math.inf, math.inf))
MOMENTS = Reduction(_find_own_moments, merge_moments, _find_variance, along_kept, (0, 0, 0), pull=_pull_moments)
_EXPONENTIALS = Reduction(
    _sum_exponentials, _merge_exponentials, _add_logarithm, along_kept, (-math.inf, 0), pull=_pull_exponentials
)
_SOFTMAX = _EXPONENTIALS._replace(finish=_divide_exponentials, reads=lambda call, box: [box])


def add_mask(call: OperationCall, row: Reduction) -> Reduction:
    """Return a row that summarizes the mask of a call, its last operand, too."""
    return row._replace(operands=(0, len(call.operands) - 1)) if "mask" in call.kwargs else row


def _mean_row(call: OperationCall) -> Reduction:
    return add_mask(call, MOMENTS._replace(finish=_take_second)) if "mask" in call.kwargs else _MEAN


def _norm_row(call: OperationCall) -> Reduction:
    """The row of a vector norm of some order."""
    order = float(call.args[1])
    if math.isinf(order):
        row = _LARGEST if order > 0 else _SMALLEST
        return row._replace(summarize=_changed(torch.abs, row.summarize))
    return SUM._replace(summarize=_sum_powers, finish=_take_root) if order else _NONZERO


REDUCTIONS: dict[str, Reduction | Callable[[OperationCall], Reduction]] = {
    "sum.dim_IntList sum.default": SUM,
    "nansum": SUM._replace(summarize=_changed(lambda numbers: numbers.nan_to_num(0.0, math.inf, -math.inf), _sum_up)),
    "mean.dim mean.default": _mean_row,
    "prod.dim_int prod.default": Reduction(_multiply_up, _multiply_parts, take_output, along_kept, (1,)),
    "count_nonzero.dim_IntList count_nonzero.default": _NONZERO,
    "amax max": _LARGEST,
    "amin min": _SMALLEST,
    "aminmax": Reduction(_find_both, _take_both, take_output, along_kept, (math.inf, -math.inf)),
    "any.dims any.dim any.default": _LARGEST._replace(summarize=_changed(Tensor.bool, _find_largest)),
    "all.dims all.dim all.default": _SMALLEST._replace(summarize=_changed(Tensor.bool, _find_smallest)),
    "linalg_vector_norm norm.ScalarOpt_dim": _norm_row,
    "argmax": PEAKS._replace(finish=_take_second),
    "argmin": _LOWS._replace(finish=_take_second),
    "max.dim": PEAKS,
    "min.dim": _LOWS,
    "var.correction std.correction var_mean.correction std_mean.correction": lambda call: add_mask(call, MOMENTS),
    "logsumexp": _EXPONENTIALS,
    "_softmax _log_softmax _safe_softmax": _SOFTMAX,
}


def _dims_of(call: OperationCall) -> Dims:
    return [all_but(call, given_dims(call))] * len(call.operands)


def _reduced(find: Reduction | Callable[[OperationCall], Reduction]) -> Rule:
    """Return the rule of a row of the table."""

    def reduce(call: OperationCall) -> Reduction | None:
        layout = call.operands[0].layout
        if not any(is_cut(layout[dim]) for dim in given_dims(call)):
            return None
        return find if isinstance(find, Reduction) else find(call)

    def run(call: OperationCall, output: int, box: Box, tensors: Sequence[Tensor]) -> Tensor:
        row = find if isinstance(find, Reduction) else find(call)
        return row.run_alone(call, output, box, tensors) if "mask" in call.kwargs else call.run(output, tensors)

    is_whole = find is _SOFTMAX  # its output has all positions
    rule = aligned(_dims_of, run, gathers=not is_whole)._replace(reduce=reduce)
    return rule._replace(label=lambda call: [call.operands[0].layout]) if is_whole else rule


SUM_RULES: dict[str, Rule] = {
    **{name: rule for names, find in REDUCTIONS.items() for name, rule in named(_reduced(find), names).items()},
    **named(aligned(_dims_of), "median.dim nanmedian.dim mode kthvalue"),
}
