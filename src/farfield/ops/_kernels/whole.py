"""Attention within a grid in one call: on small grids the calls between its parts take longer than the parts.

It hangs on what a row is made of, by the table below, and never on the row's name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor

from farfield.ops._kernels import library
from farfield.ops._kernels.sums import few
from farfield.ops.grid import ALL, AXES
from farfield.ops.summary import autocasts
from farfield.ops.table import Operator, cell, one, one_and_key, queries, query_and_one, softmax_of_products, weight

Call = Callable[[Tensor, Tensor | None, int, float], Tensor | None]


def of_means(grid: Tensor, matrix: Tensor | None, heads: int, scale: float) -> Tensor | None:
    """Attend from axis means to axis means (KAN 14-18)."""
    if grid.dim() < 4 or matrix is not None:
        return None
    return cast(Tensor, torch.ops.farfield.axis_attention(grid, heads, scale))


def of_scores(grid: Tensor, matrix: Tensor | None, both: bool) -> Tensor | None:
    """Attend by scores (SAN 4, SAN 5)."""
    if matrix is None or not few(len(matrix), grid.shape[1]) or not library.runs(matrix):
        return None
    return cast(Tensor, torch.ops.farfield.score_attention(grid, matrix, both))


# What weighs cells, coefficients, what sums are divided by, who answers and who asks.
CALLS: dict[tuple[object, ...], Call] = {
    (None, softmax_of_products, weight, AXES, AXES): of_means,
    (one_and_key, query_and_one, cell, ALL, ALL): lambda grid, matrix, heads, scale: of_scores(grid, matrix, True),
    (one, queries, cell, ALL, ALL): lambda grid, matrix, heads, scale: of_scores(grid, matrix, False),
}


def attention(row: Operator, grid: Tensor, matrix: Tensor | None, heads: int, scale: float) -> Tensor | None:
    """Attend within a grid that nothing masks, maps or norms, if one call does it.

    Args:
        row: The operator.
        grid: `(b, c, *n)`.
        matrix: `(heads, c)`, which reads scores, for rows that have them.
        heads: How many.
        scale: Of products.

    Returns:
        The responses, or None if no kernel gives them.
    """
    call = CALLS.get((row.basis, row.coefficients, row.per, row.answers, row.asks))
    if call is None or autocasts(grid) or not library.runs(grid):
        return None
    return call(grid, matrix, heads, scale)
