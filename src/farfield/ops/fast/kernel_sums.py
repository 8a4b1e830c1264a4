"""Rows read from positions and sums over the positions, together: the positions come from memory once.

Each function is a form of one in `recompute`, for bases whose slots are 1 and rows that were read, and coefficients
that are too. It hangs on the functions of a row, by the two tables below, and never on the row's name.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from farfield.ops.fast import kernels
from farfield.ops.fast.rows import RowPlan
from farfield.ops.modes import autocasts
from farfield.ops.table import Operator, one, one_and_key, queries, query_and_one

# Basis -> what weighs the positions: 1, or 1 and one key a head.
BASES: dict[Callable[..., object] | None, int] = {one: 0, one_and_key: 1}
# Coefficients -> whether one of 1 follows that of one query a head.
COEFFICIENTS: dict[Callable[..., Tensor], bool] = {queries: False, query_and_one: True}
# More rows than these are a matter of MACs and not of memory, and a matrix product is better at them.
ROWS = 4


def few(rows: int, channels: int) -> bool:
    """Whether reading so many rows takes as long as reading the positions."""
    return 0 < rows <= ROWS and 8 * rows <= channels


def sums_run(plan: RowPlan, positions: Tensor, matrix: Tensor | None, bias: Tensor | None) -> bool:
    """Whether `read_and_sum` may run."""
    if plan.row.basis not in BASES or matrix is None or plan.keys != plan.heads * BASES[plan.row.basis]:
        return False
    return few(len(matrix), positions.shape[1]) and not autocasts(positions) and kernels.fit(positions, matrix, bias)


def read_and_sum(
    plan: RowPlan, positions: Tensor, valid: Tensor, matrix: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Do what `recompute.rows_of` and `recompute.summed` do, in one pass over the positions.

    Returns:
        The rows `(b, rows, n)`, the values `(b, h, r, c)` and the weights `(b, h, r, 1)`.
    """
    batch, heads = positions.shape[0], plan.heads
    offset = None if bias is None else bias[:, None].expand(batch, -1, positions.shape[2]).contiguous()
    rows, sums = torch.ops.farfield.read_and_sum(positions, expanded(matrix, batch), offset, None)
    values, products = (part[:, :, None] for part in (sums[:, :1], sums[:, 1 : 1 + plan.keys]))
    if not plan.shared:  # each head's values are channels of its own
        values = values.unflatten(3, (heads, -1)).permute(0, 3, 1, 2, 4).flatten(2, 3)
        if plan.keys:
            products = products.unflatten(3, (heads, -1)).diagonal(0, 1, 3).permute(0, 3, 1, 2)
    weights = valid.sum(-1, keepdim=True).expand(-1, heads, -1, -1)
    if not plan.keys:
        return rows, values.expand(-1, heads, -1, -1), weights
    keys = (rows[:, : plan.keys, None] * valid).sum(-1, keepdim=True)
    return rows, torch.cat([values.expand(-1, heads, -1, -1), products], 2), torch.cat([weights, keys], 2)


def gradients_of_rows(
    plan: RowPlan, positions: Tensor, valid: Tensor, queries: Tensor | None, values: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor]:
    """Find what `recompute.gradient_of_basis` and `joined` say of the rows, and the sum of rows ⊗ positions.

    Returns:
        The gradient of the rows, `(b, rows, n)`, and that of the matrix, `(rows, c)`.
    """
    upon = values[:, :, 1]  # (b, h, c)
    if not plan.shared:
        upon = torch.diag_embed(upon.transpose(1, 2)).permute(0, 3, 2, 1).flatten(2)
    offset = (weights[:, :, 1] * valid[:, 0]).contiguous()  # (b, h, n)
    if queries is not None and plan.same:
        offset = offset + queries.flatten(1, 2)
    elif queries is not None:
        upon = F.pad(upon, (0, 0, 0, plan.queries))
        offset = torch.cat([offset, queries.flatten(1, 2)], 1)
    rows, sums = torch.ops.farfield.read_and_sum(positions, upon.contiguous(), offset, None)
    return rows, sums[:, 1:].sum(0)


def answers_run(row: Operator, upon: Tensor, query: Tensor, slots: Tensor) -> bool:
    """Whether `gradients_of_response` may run."""
    if row.coefficients not in COEFFICIENTS or query.shape[2] != 1:
        return False
    if not few(query.shape[1] // slots.shape[1], upon.shape[2]):
        return False
    return not autocasts(upon) and kernels.fit(upon, query, slots)


def gradients_of_response(row: Operator, upon: Tensor, query: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
    """Find the gradients of queries and slots, reading `upon`, `(b, g, p, m)`, once for both.

    Args:
        row: The operator.
        upon: The gradient of the responses.
        query: `(b, h, 1, m)`.
        slots: `(b, g, s, p)`: of each head one for its query, and one that is taken once; perhaps one more of these.

    Returns:
        `(b, h, 1, m)` and `(b, g, s, p)`.
    """
    batch, groups, count, channels = slots.shape
    step, rows = 1 + COEFFICIENTS[row.coefficients], query.shape[1] // groups
    matrix = slots.flatten(0, 1)[:, : rows * step : step].contiguous()
    found, sums = torch.ops.farfield.read_and_sum(
        upon.flatten(0, 1), matrix, None, query.reshape(-1, rows, upon.shape[3])
    )
    places = [1 + slot // step if slot < rows * step and slot % step == 0 else 0 for slot in range(count)]
    return found.view(query.shape), sums[:, places].view(batch, groups, count, channels)


def expanded(matrix: Tensor, batch: int) -> Tensor:
    """One matrix for each sample."""
    return matrix.expand(batch, -1, -1).contiguous()
