"""Self-attention in one call of a kernel: on small grids, calling each of its operations takes longer than the work.

The table below maps the functions of an operator, never its name, to a kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from farfield.ops.call import Call, by_head
from farfield.ops.fast import kernels
from farfield.ops.fast.autograd import are_small
from farfield.ops.fast.kernel_sums import are_few, expand_batch
from farfield.ops.function import accelerate, shapes_alone
from farfield.ops.grid import ALL, AXES, NORMALIZED_AXES, add_axes, along_axes, in_channels_last
from farfield.ops.modes import are_free, casts, full_precision, is_itself
from farfield.ops.projection import Projection, project, split_heads
from farfield.ops.summary import SMALL, attend_heads
from farfield.ops.table import Operator, one, one_and_key, position, queries, query_and_one, softmax_of_products, weight

Run = Callable[[Operator, Tensor, Tensor | None, int, float], Tensor | None]


class MeansPlan(NamedTuple):
    """How the means along the axes of a grid respond to each other, and become a grid again.

    Attributes:
        operator: The operator.
        size: The grid's spatial size.
        heads: Number of heads.
        scale: Factor of the products.
        dtype: The grid's dtype; the means are of float32.
        wide: Whether the grid is in channels-last format.
        most: Most numbers of a matrix of weights that is kept for the backward pass.
    """

    operator: Operator
    size: tuple[int, ...]
    heads: int
    scale: float
    dtype: torch.dtype
    wide: bool
    most: int


def run_means(operator: Operator, grid: Tensor, matrix: Tensor | None, heads: int, scale: float) -> Tensor | None:
    """Attend from axis means to axis means (KAN Eq. 13-18); None if no kernel does it faster."""
    if grid.dim() < 4 or matrix is not None or not kernels.fit(grid):
        return None
    if are_free(grid):
        return cast(Tensor, kernels.call("axis_attention", grid, heads, scale, counts_once(operator)))
    if sum(grid.shape[2:]) > SMALL * grid.shape[1] // heads:
        return None
    wide = in_channels_last(grid)
    plan = MeansPlan(operator, tuple(grid.shape[2:]), heads, scale, grid.dtype, wide, grid.numel() // SMALL)
    return cast(Tensor, _respond_from_means(plan, _axis_means(grid, wide))[0])


def counts_once(operator: Operator) -> bool:
    """Whether the mean of the responses counts once and not once per axis (KAN Eq. 13)."""
    return operator.queries_from.normalize is not None


def plain_means(grid: Tensor, wide: bool) -> Tensor:
    """Compute the means along each axis by their equation."""
    sums = along_axes(grid)
    return sums / torch.cat([sums.new_full((length,), grid[0, 0].numel() // length) for length in grid.shape[2:]])


def kernel_means(grid: Tensor, wide: bool) -> Tensor:
    """Compute `plain_means` by a kernel."""
    return cast(Tensor, kernels.call("axis_means", grid))


def spread_means(arguments: Sequence[Any], kept: Any, grad_outputs: Sequence[Tensor], *_: Any) -> tuple[Tensor, None]:
    """Return the gradient of the means."""
    (grid, wide), (grad,) = arguments, grad_outputs
    grad = grad.to(grid.dtype)
    grad_means = grad.mT.contiguous().mT if wide else grad.contiguous()
    return cast(Tensor, kernels.call("outer_sum", grad_means, grid.shape[2:], True, True)), None


def plain_responses(plan: MeansPlan, means: Tensor) -> Tensor:
    """Compute the softmax attention of means `(b, c, Σ size)` to each other, made a grid, by its equation."""
    each = split_heads(means, plan.heads)
    responses = (each @ (plan.scale * each.mT @ each).softmax(-1).mT).flatten(1, 2)
    counts = torch.cat([responses.new_full((1, 1, length), 1 / length) for length in plan.size], -1)
    normalized = plan.operator.queries_from.normalized(responses, counts, len(plan.size))
    return add_axes(normalized.to(plan.dtype), plan.size)


def kernel_responses(plan: MeansPlan, means: Tensor) -> tuple[Tensor, Tensor]:
    """Compute `plain_responses` by a kernel; return also the matrix of weights, or none of it (`plan.most`)."""
    operator, size, heads, scale, dtype, wide, most = plan
    once = counts_once(operator)
    return cast(Any, kernels.call("axis_responses", means, size, heads, scale, once, dtype, wide, most))


def gradients_of_responses(
    arguments: Sequence[Any], kept: Sequence[Tensor], grad_outputs: Sequence[Tensor], *_: Any
) -> tuple[None, Tensor]:
    """Return the gradient of the means."""
    (plan, means), (weights,), (grad,) = arguments, kept, grad_outputs
    grad, once = grad if kernels.fits(grad) else grad.contiguous(), counts_once(plan.operator)
    return None, kernels.call("axis_responses_backward", means, weights, plan.heads, plan.scale, once, grad)


_axis_means = accelerate(plain_means, kernel_means, spread_means, save=shapes_alone, kernels_run=kernels.run)
_respond_from_means = accelerate(
    plain_responses, kernel_responses, gradients_of_responses, kept=1, kernels_run=kernels.run
)


def run_scores(operator: Operator, grid: Tensor, matrix: Tensor | None, heads: int, scale: float) -> Tensor | None:
    """Attend by scores (SAN Eq. 4, SAN Eq. 5); None if no kernel does it faster."""
    if matrix is None or not are_few(heads, grid.shape[1]) or not kernels.fit(grid, matrix):
        return None
    if are_free(grid, matrix):
        return cast(Tensor, kernels.call("score_attention", grid, matrix.float(), operator.basis is one_and_key)[0])
    # The one call always computes the grid's gradient; where that is not required, the separate steps skip it.
    wanted = not is_itself(grid) or (grid.requires_grad and are_small(heads, grid))
    return cast(Tensor, _attend_scores(operator, grid, matrix)[0]) if wanted else None


def plain_scores(operator: Operator, grid: Tensor, matrix: Tensor) -> Tensor:
    """Attend by scores, by the equation."""
    (positions, valid), scores = operator.keys_from.gather(grid), Projection(matrix)
    score = split_heads(project(positions, scores), len(matrix))
    responses = attend_heads(operator, score, score, split_heads(positions, len(matrix)), valid[:, None], True)
    return operator.queries_from.scatter(responses.flatten(1, 2), grid.shape[2:])


def attend_scores(operator: Operator, grid: Tensor, matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `plain_scores` by a kernel; return also its scores and its sums over positions."""
    return cast(Any, kernels.call("score_attention", grid, matrix.float(), operator.basis is one_and_key, True))


def gradients_of_scores(
    arguments: Sequence[Any], kept: Sequence[Tensor], grad_outputs: Sequence[Tensor], *_: Any
) -> tuple[None, Tensor, Tensor]:
    """Return the gradients of the grid and of the score matrix."""
    (operator, grid, matrix), (grad,) = arguments, grad_outputs
    grad = grad if kernels.fits(grad) else grad.contiguous()
    grad_grid, grad_matrix = kernels.call(
        "score_attention_backward", grid, matrix.float(), operator.basis is one_and_key, *kept, grad
    )
    return None, grad_grid, grad_matrix.to(matrix.dtype)


_attend_scores = accelerate(plain_scores, attend_scores, gradients_of_scores, kept=2, kernels_run=kernels.run)


# Basis, coefficients, divisor of the sums, where keys come from and where queries come from -> kernel.
CALLS: dict[tuple[object, ...], Run] = {
    (None, softmax_of_products, weight, AXES, AXES): run_means,
    (None, softmax_of_products, weight, AXES, NORMALIZED_AXES): run_means,
    (one_and_key, query_and_one, position, ALL, ALL): run_scores,
    (one, queries, position, ALL, ALL): run_scores,
}


def attend(call: Call, grid: Tensor) -> Tensor | None:
    """Attend within a grid in one call, if a kernel can; nothing is masked, projected or normed.

    Args:
        call: The operator; its queries and keys may be scores.
        grid: `(b, c, *n)`.

    Returns:
        The responses, `(b, c, *n)`, or None if there is no kernel for them or it would not be faster.
    """
    run = None if casts(grid) else run_of(call.operator)
    return None if run is None else run(call.operator, grid, call.query.matrix, call.heads, call.scale)


def run_of(operator: Operator) -> Run | None:
    """Return the kernel for an operator, or None."""
    parts = (operator.basis, operator.coefficients, operator.per, operator.keys_from, operator.queries_from)
    return CALLS.get(parts)


def attend_means(call: Call, grid: Tensor) -> Tensor | None:
    """Attend from axis means to axis means with projected values and responses, in inference; queries are the means.

    Args:
        call: The operator, whose norm may multiply the queries of each head with a factor.
        grid: `(b, c, *n)`.

    Returns:
        The vectors `(b, out, Σ n)` of the axes, in the memory order of the grid, without the bias of the output
        projection; None if there is no kernel for them.
    """
    operator, (matrix, bias), last = call.operator, call.value, call.output.matrix
    if run_of(operator) is not run_means or grid.dim() < 4 or casts(grid):
        return None
    if call.query.matrix is not None or call.key.matrix is not None or not kernels.fit(grid):
        return None
    factors = grid.new_ones(call.heads, dtype=torch.float32) if call.norm is None else call.norm.factors()
    given = (grid, matrix, bias, last, factors)
    if factors is None or not are_free(*given):
        return None
    with full_precision(grid):
        means = values = kernels.call("axis_means", grid)
        if matrix is not None:
            values = torch.bmm(matrix.float().expand(len(grid), -1, -1), means)
            values = values if bias is None else values.add_(bias.float()[:, None])
        factors = (call.scale * factors).float()
        vectors = kernels.call("attend_means", means, values, factors, grid.shape[2:], counts_once(operator))
        if last is None:
            return cast(Tensor, vectors)
        last = last.float().expand(len(grid), -1, -1)
        return torch.bmm(vectors.mT, last.mT).mT if in_channels_last(grid) else torch.bmm(last, vectors)


def slots_of_scores(call: Call, grid: Tensor) -> tuple[Tensor, Tensor] | None:
    """Summarize a grid by scores (SAN Eq. 4, SAN Eq. 5) to slots of projected responses, in inference.

    The response to a position with the scores s is Σ_h s_h W_h x̄, plus, for some operators, Σ_h W_h mean(s_h x), with
    W_h the product of head h's matrices of output and value.

    Args:
        call: The operator; queries and keys are scores.
        grid: `(b, c, *n)`.

    Returns:
        Slots `(b, r, out)` and coefficients `(b, r, n)`, without the bias of the output projection; None if there is no
        kernel for them.
    """
    operator, scores, (matrix, bias), last = call.operator, call.query.matrix, call.value, call.output.matrix
    if run_of(operator) is not run_scores or call.query is not call.key or call.norm is not None or casts(grid):
        return None
    if scores is None or matrix is None or last is None or call.query.bias is not None or bias is not None:
        return None
    if not (are_few(call.heads, grid.shape[1]) and kernels.fit(grid, scores) and are_free(grid, scores, matrix, last)):
        return None
    with full_precision(grid):
        positions, score = grid.flatten(2), expand_batch(scores.float(), len(grid))
        rows, sums = kernels.call("project_and_sum", positions, score, None, None)
        means = sums / positions.shape[2]  # of x, and of s_h x for each head
        heads = torch.bmm(by_head(call, torch.float32), call.value.by_head(call.heads).float())  # W_h, (h, out, c)
        slots = torch.bmm(means[:, 0].expand(call.heads, -1, -1), heads.mT).transpose(0, 1)
        if operator.basis is not one_and_key:
            return slots, rows
        own = torch.bmm(means[:, 1:].transpose(0, 1), heads.mT).sum(0)
        return torch.cat([own[:, None], slots], 1), F.pad(rows, (0, 0, 1, 0), value=1.0)
