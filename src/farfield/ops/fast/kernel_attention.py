"""Attention within a grid in one call: on small grids the calls between its parts take longer than the parts.

It hangs on what a row is made of, by the table below, and never on the row's name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from farfield.ops.call import Call
from farfield.ops.fast import kernels
from farfield.ops.fast.autograd import few as scalars
from farfield.ops.fast.axes import outer_sum
from farfield.ops.fast.kernel_sums import few
from farfield.ops.function import accelerate, are_free, of_shapes, shapes_alone
from farfield.ops.grid import ALL, AXES, NORMALIZED_AXES, along_axes
from farfield.ops.modes import autocasts, has_tangent, is_itself
from farfield.ops.projection import Projection, project, split_heads
from farfield.ops.summary import SMALL, attend_heads
from farfield.ops.table import Operator, one, one_and_key, position, queries, query_and_one, softmax_of_products, weight

Run = Callable[[Operator, Tensor, Tensor | None, int, float], Tensor | None]


def of_means(row: Operator, grid: Tensor, matrix: Tensor | None, heads: int, scale: float) -> Tensor | None:
    """Attend from axis means to axis means (KAN 13-18)."""
    if grid.dim() < 4 or matrix is not None or not kernels.fit(grid):
        return None
    if are_free([grid]) and not has_tangent(grid):
        return cast(
            Tensor, torch.ops.farfield.axis_attention(grid, heads, scale, row.queries_from.normalize is not None)
        )
    if sum(grid.shape[2:]) > SMALL * grid.shape[1] // heads:
        return None
    response = _attend_positions(_axis_means(grid), heads, scale, grid.numel() // SMALL)[0]
    counts = torch.cat([grid.new_full((1, 1, side), 1 / side) for side in grid.shape[2:]], -1)
    return outer_sum(row.queries_from.normalized(response, counts, grid.dim() - 2), grid.shape[2:])


def plain_means(grid: Tensor) -> Tensor:
    """Means along each axis."""
    counts = [grid.new_full((side,), grid[0, 0].numel() // side) for side in grid.shape[2:]]
    return along_axes(grid) / torch.cat(counts)


def read_means(grid: Tensor) -> Tensor:
    """The same by a kernel."""
    return cast(Tensor, torch.ops.farfield.axis_means(grid))


def spread_means(arguments: Sequence[Any], kept: Any, upon: Sequence[Tensor], *_: Any) -> tuple[Tensor]:
    """The gradient of the means."""
    return (cast(Tensor, torch.ops.farfield.outer_sum(upon[0].contiguous(), arguments[0].shape[2:], True, True)),)


def plain_positions(positions: Tensor, heads: int, scale: float, limit: int) -> Tensor:
    """Softmax attention of positions `(b, c, n)` to each other."""
    each = split_heads(positions, heads)
    return (each @ (scale * each.mT @ each).softmax(-1).mT).flatten(1, 2)


def attend_positions(positions: Tensor, heads: int, scale: float, limit: int) -> tuple[Tensor, Tensor | None]:
    """The same by a kernel, and its matrix, if that has at most `limit` numbers."""
    response, weights = torch.ops.farfield.position_attention(positions, heads, scale)
    return response, weights if weights.numel() <= limit else None


def gradients_of_positions(
    arguments: Sequence[Any], kept: Sequence[Tensor | None], upon: Sequence[Tensor], *_: Any
) -> tuple[Tensor, None, None, None]:
    """The gradient of `attend_positions`."""
    (positions, heads, scale, _), (weights,) = arguments, kept
    found = torch.ops.farfield.position_attention_backward(positions, weights, heads, scale, upon[0].contiguous())
    return found, None, None, None


_axis_means = accelerate(
    plain_means, read_means, spread_means, save=shapes_alone, restore=of_shapes, kernels_run=kernels.run
)
_attend_positions = accelerate(
    plain_positions, attend_positions, gradients_of_positions, kept=1, kernels_run=kernels.run
)


def of_scores(row: Operator, grid: Tensor, matrix: Tensor | None, heads: int, scale: float) -> Tensor | None:
    """Attend by scores (SAN 4, SAN 5)."""
    if matrix is None or not few(heads, grid.shape[1]) or not kernels.fit(grid, matrix):
        return None
    if are_free([grid, matrix]) and not (has_tangent(grid) or has_tangent(matrix)):
        return cast(Tensor, torch.ops.farfield.score_attention(grid, matrix, row.basis is one_and_key)[0])
    # A grid that wants no gradient is not to be given one, which the parts know.
    wanted = not is_itself(grid) or (grid.requires_grad and scalars(heads, grid))
    return cast(Tensor, _attend_scores(row, grid, matrix)[0]) if wanted else None


def plain_scores(row: Operator, grid: Tensor, matrix: Tensor) -> Tensor:
    """The equation of attention by scores."""
    (positions, valid), scores = row.keys_from.gather(grid), Projection(matrix)
    score = split_heads(project(positions, scores), len(matrix))
    responses = attend_heads(row, score, score, split_heads(positions, len(matrix)), valid[:, None], True)
    return row.queries_from.scatter(responses.flatten(1, 2), grid.shape[2:])


def attend_scores(row: Operator, grid: Tensor, matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The same by a kernel, its scores and two sums."""
    return cast(Any, torch.ops.farfield.score_attention(grid, matrix, row.basis is one_and_key, True))


def gradients_of_scores(
    arguments: Sequence[Any], kept: Sequence[Tensor], upon: Sequence[Tensor], *_: Any
) -> tuple[None, Tensor, Tensor]:
    """The gradients of grid and vector."""
    (row, grid, matrix), (grad,) = arguments, upon
    both = row.basis is one_and_key
    return None, *torch.ops.farfield.score_attention_backward(grid, matrix, both, *kept, grad.contiguous())


_attend_scores = accelerate(plain_scores, attend_scores, gradients_of_scores, kept=2, kernels_run=kernels.run)


# What weighs positions, coefficients, what sums are divided by, who answers and who asks.
CALLS: dict[tuple[object, ...], Run] = {
    (None, softmax_of_products, weight, AXES, AXES): of_means,
    (None, softmax_of_products, weight, AXES, NORMALIZED_AXES): of_means,
    (one_and_key, query_and_one, position, ALL, ALL): of_scores,
    (one, queries, position, ALL, ALL): of_scores,
}


def attend(call: Call, grid: Tensor) -> Tensor | None:
    """Attend within a grid that nothing masks, maps or norms, if one call does it.

    Args:
        call: The operator; queries and keys may be scores.
        grid: `(b, c, *n)`.

    Returns:
        The responses, or None if no kernel gives them.
    """
    row = call.operator
    run = CALLS.get((row.basis, row.coefficients, row.per, row.keys_from, row.queries_from))
    return None if run is None or autocasts(grid) else run(row, grid, call.query.matrix, call.heads, call.scale)
