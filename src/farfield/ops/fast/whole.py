"""Self-attention by kernels as a whole: on small grids, calling each of its steps takes longer than the work.

`table` says for which operators, by the functions of an operator and never its name. Each function takes a call, a grid
`(b, c, *n)` without a mask, and a target or None; see `Target`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from farfield.ops.fast import kernels
from farfield.ops.fast.axes import write_sum
from farfield.ops.fast.steps import add_product, are_few, are_small
from farfield.ops.function import accelerate, shapes_alone
from farfield.ops.grid import add_axes, along_axes, in_channels_last, in_layout_of, lay_out, valid_counts
from farfield.ops.modes import are_free, full_precision, is_itself
from farfield.ops.projection import Call, Projection, by_head, project, split_heads
from farfield.ops.slots import one_and_key
from farfield.ops.summary import SMALL, attend_heads
from farfield.ops.table import Operator

# What projected responses are added to: a function of their bias and of their grid `(b, out, *m)`, each perhaps None,
# to a grid that contains both. Where the responses are None, they are added to what it returns, perhaps in place.
Target = Callable[[Tensor | None, Tensor | None], Tensor]


# ---- means along the axes to means along the axes (KAN Eq. 13-18) ----------------------------------------------------
def _why_not_means(call: Call, grid: Tensor) -> str | None:
    """Return why queries and keys are not the means along the axes themselves, or None."""
    if grid.dim() < 4:
        return "one spatial dim"
    # An operator alone may have a score, which is a matrix.
    projected = call.query.matrix is not None or call.key.matrix is not None
    return "queries or keys are projected" if projected else None


def why_not_bare_means(call: Call, grid: Tensor) -> str | None:
    """Return why `attend_means` does not run, or None."""
    if text := _why_not_means(call, grid):
        return text
    return None if are_free(grid) else kernels.DERIVATIVE


def attend_means(call: Call, grid: Tensor, target: Target | None) -> Tensor:
    return cast(Tensor, kernels.call("axis_attention", grid, call.heads, call.scale, _counts_once(call.operator)))


def why_not_means_in_training(call: Call, grid: Tensor) -> str | None:
    """Return why `learn_means` does not run, or None."""
    if text := _why_not_means(call, grid):
        return text
    few = sum(grid.shape[2:]) <= SMALL * grid.shape[1] // call.heads
    return None if few else "a matrix of coefficients that is large beside the channels"


def learn_means(call: Call, grid: Tensor, target: Target | None) -> Tensor:
    """Attend in two calls, each with a gradient."""
    wide, most = in_channels_last(grid), grid.numel() // SMALL
    plan = _MeansPlan(call.operator, tuple(grid.shape[2:]), call.heads, call.scale, grid.dtype, wide, most)
    return cast(Tensor, _respond_from_means(plan, _axis_means(grid, wide))[0])


def why_not_projected_means(call: Call, grid: Tensor) -> str | None:
    """Return why `attend_projected_means` does not run, or None; queries and keys are the means themselves."""
    if text := _why_not_means(call, grid):
        return text
    if call.norm is not None and not call.norm.is_factor:
        return "a norm with the statistics of the batch, or that is not bare"
    factor = None if call.norm is None else call.norm.weight
    return None if are_free(grid, *call.value, *call.output, factor) else kernels.DERIVATIVE


def attend_projected_means(call: Call, grid: Tensor, target: Target | None) -> Tensor:
    """Attend with projected values and responses in a few calls, in inference."""
    (matrix, bias, *_), last, size = call.value, call.output, grid.shape[2:]
    factors = grid.new_ones(call.heads, dtype=torch.float32) if call.norm is None else call.norm.factors()
    wide = in_channels_last(grid)
    with full_precision(grid):
        means = values = kernels.call("axis_means", grid)
        if matrix is not None:
            values = torch.bmm(matrix.float().expand(len(grid), -1, -1), means)
            values = values if bias is None else values.add_(bias.float()[:, None])
        vectors = kernels.call(
            "attend_means", means, values, (call.scale * factors).float(), size, _counts_once(call.operator)
        )
        if last.matrix is not None:
            each = last.matrix.float().expand(len(grid), -1, -1)
            vectors = torch.bmm(vectors.mT, each.mT).mT if wide else torch.bmm(each, vectors)
    if target is None and last.bias is not None:
        vectors = vectors + (last.bias / len(size))[:, None].to(vectors.dtype)  # each position adds up one per axis
    responses = in_layout_of(grid, write_sum(lay_out(vectors.to(grid.dtype), wide), size, False))
    return responses if target is None else target(last.bias, responses)


class _MeansPlan(NamedTuple):
    """How the means along the axes of a grid respond to each other, and become a grid again."""

    operator: Operator
    size: tuple[int, ...]
    heads: int
    scale: float  # of the products
    dtype: torch.dtype  # of the grid; the means are of float32
    wide: bool  # whether the grid is in channels-last format
    most: int  # numbers at most of a matrix of weights that is kept for the backward pass


def _counts_once(operator: Operator) -> bool:
    """Whether the mean of the responses counts once and not once per axis (KAN Eq. 13)."""
    return operator.queries_from.normalize is not None


def _plain_means(grid: Tensor, wide: bool) -> Tensor:
    return along_axes(grid) / valid_counts(grid)


def _kernel_means(grid: Tensor, wide: bool) -> Tensor:
    return cast(Tensor, kernels.call("axis_means", grid))


def _spread_means(arguments: Sequence[Any], kept: Any, grad_outputs: Sequence[Tensor], *_: Any) -> tuple[Tensor, None]:
    (grid, wide), (grad,) = arguments, grad_outputs
    grad_means = lay_out(grad.to(grid.dtype), wide)
    return cast(Tensor, kernels.call("outer_sum", grad_means, grid.shape[2:], True, True)), None


def _plain_responses(plan: _MeansPlan, means: Tensor) -> Tensor:
    """Compute the softmax attention of means `(b, c, Σ size)` to each other, made a grid, by its equation."""
    each = split_heads(means, plan.heads)
    responses = (each @ (plan.scale * each.mT @ each).softmax(-1).mT).flatten(1, 2)
    counts = torch.cat([responses.new_full((1, 1, length), 1 / length) for length in plan.size], -1)
    normalized = plan.operator.queries_from.normalized(responses, counts, len(plan.size))
    return add_axes(normalized.to(plan.dtype), plan.size)


def _kernel_responses(plan: _MeansPlan, means: Tensor) -> tuple[Tensor, Tensor]:
    """Compute `_plain_responses` by a kernel; return also the matrix of weights, or none of it (`plan.most`)."""
    operator, size, heads, scale, dtype, wide, most = plan
    once = _counts_once(operator)
    return cast(Any, kernels.call("axis_responses", means, size, heads, scale, once, dtype, wide, most))


def _gradients_of_responses(
    arguments: Sequence[Any], kept: Sequence[Tensor], grad_outputs: Sequence[Tensor], *_: Any
) -> tuple[None, Tensor]:
    (plan, means), (weights,), (grad,) = arguments, kept, grad_outputs
    grad, once = grad.contiguous() if kernels.why_not(grad) else grad, _counts_once(plan.operator)
    return None, kernels.call("axis_responses_backward", means, weights, plan.heads, plan.scale, once, grad)


_axis_means = accelerate(_plain_means, _kernel_means, _spread_means, save=shapes_alone, kernels_run=kernels.run)
_respond_from_means = accelerate(
    _plain_responses, _kernel_responses, _gradients_of_responses, kept=1, kernels_run=kernels.run
)


# ---- scores (SAN Eq. 4, SAN Eq. 5) -----------------------------------------------------------------------------------
def why_not_bare_scores(call: Call, grid: Tensor) -> str | None:
    """Return why `attend_scores` does not run, or None."""
    if text := _why_not_one_score_a_head(call, grid):
        return text
    return kernels.why_not(call.query.matrix) if are_free(grid, call.query.matrix) else kernels.DERIVATIVE


def _why_not_one_score_a_head(call: Call, grid: Tensor) -> str | None:
    """Return why queries are no scores that a kernel computes from the grid, a head's by one row of a matrix."""
    if not are_few(call.heads, grid.shape[1]):
        return kernels.MANY_SCORES
    # Latents may be several for a head, and their keys may have a bias.
    if call.query.matrix is None or len(call.query.matrix) != call.heads or call.query.bias is not None:
        return "queries are not one score a head, without a bias"
    return None


def attend_scores(call: Call, grid: Tensor, target: Target | None) -> Tensor:
    matrix = cast(Tensor, call.query.matrix).float()
    return cast(Tensor, kernels.call("score_attention", grid, matrix, _weighs_keys(call.operator))[0])


def why_not_scores_in_training(call: Call, grid: Tensor) -> str | None:
    """Return why `learn_scores` does not run, or None."""
    if text := _why_not_one_score_a_head(call, grid):
        return text
    # The one call always computes the grid's gradient; where that is not required, the separate steps skip it.
    if is_itself(grid) and not (grid.requires_grad and are_small(call.heads, grid)):
        return "no gradient of the grid is wanted, or its scores are not small beside it"
    return kernels.why_not(call.query.matrix)


def learn_scores(call: Call, grid: Tensor, target: Target | None) -> Tensor:
    return cast(Tensor, _attend_scores(call.operator, grid, call.query.matrix)[0])


def why_not_projected_scores(call: Call, grid: Tensor) -> str | None:
    """Return why `add_scores` does not run, or None."""
    if text := _why_not_one_score_a_head(call, grid):
        return text
    if call.query is not call.key or call.norm is not None:
        return "queries and keys differ, or have a norm"
    if call.value.matrix is None or call.value.bias is not None or call.output.matrix is None:
        return "values or responses are not projected, or values have a bias"
    matrices = call.query.matrix, call.value.matrix, call.output.matrix
    return kernels.why_not(call.query.matrix) if are_free(grid, *matrices) else kernels.DERIVATIVE


def add_scores(call: Call, grid: Tensor, target: Target | None) -> Tensor:
    """Add projected responses to a target, in inference."""
    return add_product(cast(Target, target)(call.output.bias, None), *slots_of_scores(call, grid))


def slots_of_scores(call: Call, grid: Tensor) -> tuple[Tensor, Tensor]:
    """Return slots `(b, r, out)` of projected responses, and coefficients `(b, r, n)`, without the last bias."""
    # The response to a position with the scores s is Σ_h s_h W_h x̄, plus, for some operators, Σ_h W_h mean(s_h x),
    # with W_h the product of head h's matrices of output and value.
    with full_precision(grid):
        positions, matrix = grid.flatten(2), cast(Tensor, call.query.matrix).float()
        score = matrix.expand(len(grid), -1, -1).contiguous()
        rows, sums = kernels.call("project_and_sum", positions, score, None, None)
        means = sums / positions.shape[2]  # of x, and of s_h x for each head
        value = cast(Tensor, call.value.matrix).float().unflatten(0, (call.heads, -1))
        heads = torch.bmm(by_head(call, torch.float32), value)  # W_h, (h, out, c)
        slots = torch.bmm(means[:, 0].expand(call.heads, -1, -1), heads.mT).transpose(0, 1)
        if not _weighs_keys(call.operator):
            return slots, rows
        own = torch.bmm(means[:, 1:].transpose(0, 1), heads.mT).sum(0)
        return torch.cat([own[:, None], slots], 1), F.pad(rows, (0, 0, 1, 0), value=1.0)


def _weighs_keys(operator: Operator) -> bool:
    """Whether the slots are Σ_j v_j and Σ_j v_j (k_jᵀ w), and not the first alone."""
    return operator.basis is one_and_key


def _plain_scores(operator: Operator, grid: Tensor, matrix: Tensor) -> Tensor:
    (positions, valid), scores = operator.keys_from.gather(grid), Projection(matrix)
    score = split_heads(project(positions, scores), len(matrix))
    responses = attend_heads(operator, score, score, split_heads(positions, len(matrix)), valid[:, None], True)
    return operator.queries_from.scatter(responses.flatten(1, 2), grid.shape[2:])


def _score_kernel(operator: Operator, grid: Tensor, matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `_plain_scores` by a kernel; return also its scores and its sums over positions."""
    return cast(Any, kernels.call("score_attention", grid, matrix.float(), _weighs_keys(operator), True))


def _gradients_of_scores(
    arguments: Sequence[Any], kept: Sequence[Tensor], grad_outputs: Sequence[Tensor], *_: Any
) -> tuple[None, Tensor, Tensor]:
    (operator, grid, matrix), (grad,) = arguments, grad_outputs
    grad = grad.contiguous() if kernels.why_not(grad) else grad
    grad_grid, grad_matrix = kernels.call(
        "score_attention_backward", grid, matrix.float(), _weighs_keys(operator), *kept, grad
    )
    return None, grad_grid, grad_matrix.to(matrix.dtype)


_attend_scores = accelerate(_plain_scores, _score_kernel, _gradients_of_scores, kept=2, kernels_run=kernels.run)
