"""Attention within a grid in one call: on small grids the calls between its parts take longer than the parts.

It hangs on what a row is made of, by the table below, and never on the row's name.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from farfield.ops.call import Call
from farfield.ops.fast import kernels
from farfield.ops.fast.autograd import few as scalars
from farfield.ops.fast.autograd import gradients, read_and_summarize, respond_from
from farfield.ops.fast.axes import outer_sum
from farfield.ops.fast.kernel_sums import few
from farfield.ops.grid import ALL, AXES, NORMALIZED_AXES
from farfield.ops.modes import keeps_all
from farfield.ops.projection import Projection, split_heads
from farfield.ops.slots import autocasts
from farfield.ops.summary import SMALL
from farfield.ops.table import Operator, cell, one, one_and_key, queries, query_and_one, softmax_of_products, weight

Run = Callable[[Operator, Tensor, Tensor | None, int, float], Tensor | None]


def of_means(row: Operator, grid: Tensor, matrix: Tensor | None, heads: int, scale: float) -> Tensor | None:
    """Attend from axis means to axis means (KAN 13-18)."""
    if grid.dim() < 4 or matrix is not None or not kernels.runs(grid.detach()):
        return None
    if keeps_all(grid):
        return cast(Tensor, torch.ops.farfield.axis_attention(grid, heads, scale, row.asks.normalize is not None))
    if sum(grid.shape[2:]) > SMALL * grid.shape[1] // heads:
        return None
    response = _AttendCells.apply(_AxisMeans.apply(grid), heads, scale, grid.numel() // SMALL)
    counts = torch.cat([grid.new_full((1, 1, side), 1 / side) for side in grid.shape[2:]], -1)
    return outer_sum(row.asks.normalized(response, counts, grid.dim() - 2), grid.shape[2:])


class _AxisMeans(torch.autograd.Function):
    """Means along each axis, keeping nothing."""

    @staticmethod
    def forward(ctx: Any, grid: Tensor) -> Tensor:
        ctx.sides = grid.shape[2:]
        return cast(Tensor, torch.ops.farfield.axis_means(grid))

    @staticmethod
    def backward(ctx: Any, upon: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return cast(Tensor, torch.ops.farfield.outer_sum(upon.contiguous(), ctx.sides, True, True))
        cells = math.prod(ctx.sides)
        counts = [upon.new_full((side,), cells // side) for side in ctx.sides]
        return outer_sum(upon / torch.cat(counts), ctx.sides)


class _AttendCells(torch.autograd.Function):
    """Softmax attention of cells `(b, c, n)` to each other, keeping them, and a matrix of at most `limit` numbers."""

    @staticmethod
    def forward(ctx: Any, cells: Tensor, heads: int, scale: float, limit: int) -> Tensor:
        ctx.heads, ctx.scale = heads, scale
        response, weights = torch.ops.farfield.cell_attention(cells, heads, scale)
        ctx.save_for_backward(cells, weights if weights.numel() <= limit else None)
        return cast(Tensor, response)

    @staticmethod
    def backward(ctx: Any, upon: Tensor) -> tuple[Tensor | None, ...]:
        (cells, weights), upon = ctx.saved_tensors, upon.contiguous()
        if not torch.is_grad_enabled():
            found = torch.ops.farfield.cell_attention_backward(cells, weights, ctx.heads, ctx.scale, upon)
            return found, None, None, None
        each = split_heads(cells, ctx.heads)  # to be differentiated in turn
        response = (each @ (ctx.scale * each.mT @ each).softmax(-1).mT).flatten(1, 2)
        return torch.autograd.grad(response, cells, upon, create_graph=True)[0], None, None, None


def of_scores(row: Operator, grid: Tensor, matrix: Tensor | None, heads: int, scale: float) -> Tensor | None:
    """Attend by scores (SAN 4, SAN 5)."""
    if matrix is None or not few(heads, grid.shape[1]) or not kernels.runs(grid.detach(), matrix.detach()):
        return None
    if keeps_all(grid, matrix):
        return cast(Tensor, torch.ops.farfield.score_attention(grid, matrix, row.basis is one_and_key)[0])
    # A grid that wants no gradient is not to be given one, which the parts know.
    return cast(Tensor, _Scores.apply(row, grid, matrix)) if grid.requires_grad and scalars(heads, grid) else None


class _Scores(torch.autograd.Function):
    """`of_scores`, keeping the grid, its scores and two sums."""

    @staticmethod
    def forward(ctx: Any, row: Operator, grid: Tensor, matrix: Tensor) -> Tensor:
        ctx.row = row
        response, scores, sums = torch.ops.farfield.score_attention(grid, matrix, row.basis is one_and_key, True)
        ctx.save_for_backward(grid, matrix, scores, sums)
        return cast(Tensor, response)

    @staticmethod
    def backward(ctx: Any, upon: Tensor) -> tuple[Tensor | None, ...]:
        grid, matrix, scores, sums = ctx.saved_tensors
        if torch.is_grad_enabled():  # to be differentiated in turn, as the equations can be
            wanted = [part if part.requires_grad else None for part in (grid, matrix)]
            return None, *gradients(wanted, {equation(ctx.row, grid, matrix): upon})
        both = ctx.row.basis is one_and_key
        upon = upon.contiguous()
        return None, *torch.ops.farfield.score_attention_backward(grid, matrix, both, scores, sums, upon)


def equation(row: Operator, grid: Tensor, matrix: Tensor) -> Tensor:
    """What `of_scores` computes, by parts that are differentiable twice."""
    reading, (cells, real) = Projection(matrix), row.answers.gather(grid)
    options = {"shared": False, "complete": True}
    query, summary = read_and_summarize(row, len(matrix), cells, real[:, None], reading, reading, **options)
    response = respond_from(row, cells, reading, cast(Tensor, query), summary)
    return row.asks.scatter(response.flatten(1, 2), grid.shape[2:])


# What weighs cells, coefficients, what sums are divided by, who answers and who asks.
CALLS: dict[tuple[object, ...], Run] = {
    (None, softmax_of_products, weight, AXES, AXES): of_means,
    (None, softmax_of_products, weight, AXES, NORMALIZED_AXES): of_means,
    (one_and_key, query_and_one, cell, ALL, ALL): of_scores,
    (one, queries, cell, ALL, ALL): of_scores,
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
    run = CALLS.get((row.basis, row.coefficients, row.per, row.answers, row.asks))
    return None if run is None or autocasts(grid) else run(row, grid, call.query.matrix, call.heads, call.scale)
