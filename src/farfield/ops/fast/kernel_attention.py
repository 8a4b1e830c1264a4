"""Self-attention in one call of a kernel: on small grids, calling each of its operations takes longer than the work.

The table below maps the functions of an operator, never its name, to a kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from farfield.ops.call import Call
from farfield.ops.fast import kernels
from farfield.ops.fast.autograd import are_small
from farfield.ops.fast.axes import outer_sum
from farfield.ops.fast.kernel_sums import are_few
from farfield.ops.function import accelerate, are_free, shapes_alone
from farfield.ops.grid import ALL, AXES, NORMALIZED_AXES, along_axes, in_channels_last, laid_out_for
from farfield.ops.modes import casts, is_itself
from farfield.ops.projection import Projection, project, split_heads
from farfield.ops.summary import SMALL, attend_heads
from farfield.ops.table import Operator, one, one_and_key, position, queries, query_and_one, softmax_of_products, weight

Run = Callable[[Operator, Tensor, Tensor | None, int, float], Tensor | None]


def run_means(operator: Operator, grid: Tensor, matrix: Tensor | None, heads: int, scale: float) -> Tensor | None:
    """Attend from axis means to axis means (KAN Eq. 13-18); None if no kernel does it faster."""
    if grid.dim() < 4 or matrix is not None or not kernels.fit(grid):
        return None
    if are_free(grid):
        return cast(
            Tensor, torch.ops.farfield.axis_attention(grid, heads, scale, operator.queries_from.normalize is not None)
        )
    if sum(grid.shape[2:]) > SMALL * grid.shape[1] // heads:
        return None
    means = _axis_means(grid, in_channels_last(grid))
    response = _attend_positions(means, heads, scale, grid.numel() // SMALL)[0]
    counts = torch.cat([response.new_full((1, 1, length), 1 / length) for length in grid.shape[2:]], -1)
    response = operator.queries_from.normalized(response, counts, grid.dim() - 2)
    return outer_sum(laid_out_for(grid, response.to(grid.dtype)), grid.shape[2:])


def plain_means(grid: Tensor, wide: bool) -> Tensor:
    """Compute the means along each axis by their equation."""
    sums = along_axes(grid)
    return sums / torch.cat([sums.new_full((length,), grid[0, 0].numel() // length) for length in grid.shape[2:]])


def kernel_means(grid: Tensor, wide: bool) -> Tensor:
    """Compute `plain_means` by a kernel."""
    return cast(Tensor, torch.ops.farfield.axis_means(grid))


def spread_means(arguments: Sequence[Any], kept: Any, grad_outputs: Sequence[Tensor], *_: Any) -> tuple[Tensor, None]:
    """Return the gradient of the means."""
    (grid, wide), (grad,) = arguments, grad_outputs
    grad = grad.to(grid.dtype)
    grad_means = grad.mT.contiguous().mT if wide else grad.contiguous()
    return cast(Tensor, torch.ops.farfield.outer_sum(grad_means, grid.shape[2:], True, True)), None


def plain_positions(positions: Tensor, heads: int, scale: float, limit: int) -> Tensor:
    """Compute the softmax attention of positions `(b, c, n)` to each other by its equation."""
    each = split_heads(positions, heads)
    return (each @ (scale * each.mT @ each).softmax(-1).mT).flatten(1, 2)


def attend_positions(positions: Tensor, heads: int, scale: float, limit: int) -> tuple[Tensor, Tensor | None]:
    """Compute `plain_positions` by a kernel; return also the matrix of weights if it has at most `limit` numbers."""
    response, weights = torch.ops.farfield.position_attention(positions, heads, scale)
    return response, weights if weights.numel() <= limit else None


def gradients_of_positions(
    arguments: Sequence[Any], kept: Sequence[Tensor | None], grad_outputs: Sequence[Tensor], *_: Any
) -> tuple[Tensor, None, None, None]:
    """Return the gradient of `attend_positions`."""
    (positions, heads, scale, _), (weights,), (grad_output,) = arguments, kept, grad_outputs
    grad = torch.ops.farfield.position_attention_backward(positions, weights, heads, scale, grad_output.contiguous())
    return grad, None, None, None


_axis_means = accelerate(plain_means, kernel_means, spread_means, save=shapes_alone, kernels_run=kernels.run)
_attend_positions = accelerate(
    plain_positions, attend_positions, gradients_of_positions, kept=1, kernels_run=kernels.run
)


def run_scores(operator: Operator, grid: Tensor, matrix: Tensor | None, heads: int, scale: float) -> Tensor | None:
    """Attend by scores (SAN Eq. 4, SAN Eq. 5); None if no kernel does it faster."""
    if matrix is None or not are_few(heads, grid.shape[1]) or not kernels.fit(grid, matrix):
        return None
    if are_free(grid, matrix):
        return cast(Tensor, torch.ops.farfield.score_attention(grid, matrix.float(), operator.basis is one_and_key)[0])
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
    return cast(Any, torch.ops.farfield.score_attention(grid, matrix.float(), operator.basis is one_and_key, True))


def gradients_of_scores(
    arguments: Sequence[Any], kept: Sequence[Tensor], grad_outputs: Sequence[Tensor], *_: Any
) -> tuple[None, Tensor, Tensor]:
    """Return the gradients of the grid and of the score matrix."""
    (operator, grid, matrix), (grad,) = arguments, grad_outputs
    grad = grad if kernels.fits(grad) else grad.contiguous()
    grad_grid, grad_matrix = torch.ops.farfield.score_attention_backward(
        grid, matrix.float(), operator.basis is one_and_key, *kept, grad
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
    operator = call.operator
    parts = (operator.basis, operator.coefficients, operator.per, operator.keys_from, operator.queries_from)
    run = CALLS.get(parts)
    return None if run is None or casts(grid) else run(operator, grid, call.query.matrix, call.heads, call.scale)
