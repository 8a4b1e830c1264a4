"""Projected rows and sums over positions in one pass: the positions are read from memory once.

Each function is a form of one in `autograd`, for a basis and coefficients that are 1 or the projected rows themselves.
The two tables below list the functions of operators, never their names, that this holds for.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from farfield.ops.fast import kernels
from farfield.ops.fast.stacking import RowPlan
from farfield.ops.modes import casts
from farfield.ops.table import Operator, one, one_and_key, queries, query_and_one

# Basis -> number of keys per head beside the weight of 1.
BASES: dict[Callable[..., object] | None, int] = {one: 0, one_and_key: 1}
# Coefficients -> whether a coefficient of 1 follows that of the one query per head.
COEFFICIENTS: dict[Callable[..., Tensor], bool] = {queries: False, query_and_one: True}
# With more rows than these, MACs and not reads of memory take the time, and a matrix product is faster.
ROWS = 4


def are_few(rows: int, channels: int) -> bool:
    """Whether projecting this number of rows takes about as long as reading the positions from memory."""
    return 0 < rows <= ROWS and 8 * rows <= channels


def sum_kernel_runs(plan: RowPlan, positions: Tensor, matrix: Tensor | None, bias: Tensor | None) -> bool:
    """Whether `project_and_sum` may run."""
    basis = plan.operator.basis
    if basis not in BASES or matrix is None or plan.keys != plan.heads * BASES[basis]:
        return False
    return are_few(len(matrix), positions.shape[1]) and not casts(positions) and kernels.fit(positions, matrix, bias)


def project_and_sum(
    plan: RowPlan, positions: Tensor, valid: Tensor, matrix: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Project and sum as `autograd.project_and_sum` does, in one pass over the positions.

    Returns:
        The rows `(b, rows, n)`, the values `(b, h, r, c)` and the weights `(b, h, r, 1)`.
    """
    batch, heads = positions.shape[0], plan.heads
    offset = None if bias is None else bias.float()[:, None].expand(batch, -1, positions.shape[2]).contiguous()
    rows, sums = kernels.call("project_and_sum", positions, expand_batch(matrix.float(), batch), offset, None)
    values, products = (part[:, :, None] for part in (sums[:, :1], sums[:, 1 : 1 + plan.keys]))
    if not plan.shared:  # each head's values are channels of its own
        values = values.unflatten(3, (heads, -1)).permute(0, 3, 1, 2, 4).flatten(2, 3)
        if plan.keys:
            products = products.unflatten(3, (heads, -1)).diagonal(0, 1, 3).permute(0, 3, 1, 2)
    weights = valid.sum(-1, keepdim=True).expand(-1, heads, -1, -1)
    keys, rows = rows[:, : plan.keys, None], rows.to(positions.dtype)
    if not plan.keys:
        return rows, values.expand(-1, heads, -1, -1), weights
    scores = (keys * valid).sum(-1, keepdim=True)
    return rows, torch.cat([values.expand(-1, heads, -1, -1), products], 2), torch.cat([weights, scores], 2)


def gradients_of_rows(
    plan: RowPlan,
    positions: Tensor,
    valid: Tensor,
    grad_queries: Tensor | None,
    grad_values: Tensor,
    grad_weights: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return the gradient of the rows, as `autograd.join_rows` does, and the sum over positions of gradient ⊗ position.

    Returns:
        The gradient of the rows, `(b, rows, n)`, and that of the matrix, `(rows, c)`.
    """
    matrix = grad_values[:, :, 1]  # (b, h, c)
    if not plan.shared:
        matrix = torch.diag_embed(matrix.transpose(1, 2)).permute(0, 3, 2, 1).flatten(2)
    offset = (grad_weights[:, :, 1] * valid[:, 0]).contiguous()  # (b, h, n)
    if grad_queries is not None and plan.same:
        offset = offset + grad_queries.flatten(1, 2)
    elif grad_queries is not None:
        matrix = F.pad(matrix, (0, 0, 0, plan.queries))
        offset = torch.cat([offset, grad_queries.flatten(1, 2)], 1)
    rows, sums = kernels.call("project_and_sum", positions, matrix.contiguous(), offset, None)
    return rows.to(positions.dtype), sums[:, 1:].sum(0)


def response_kernel_runs(operator: Operator, grad_output: Tensor, query: Tensor, slots: Tensor) -> bool:
    """Whether `gradients_of_response` may run."""
    if operator.coefficients not in COEFFICIENTS or query.shape[2] != 1:
        return False
    if not are_few(query.shape[1] // slots.shape[1], grad_output.shape[2]):
        return False
    positions = grad_output.flatten(0, 1)
    return not casts(grad_output) and query.is_contiguous() and kernels.fit(positions, query, slots)


def gradients_of_response(
    operator: Operator, grad_output: Tensor, query: Tensor, slots: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradients of queries and slots; the gradient of the responses is read once for both.

    Args:
        operator: The operator.
        grad_output: `(b, g, p, m)`, the gradient of the responses.
        query: `(b, h, 1, m)`.
        slots: `(b, g, s, p)`: for each head one for its query and, for some operators, one with a coefficient of 1. A
            last one with a coefficient of 1 may be the bias.

    Returns:
        `(b, h, 1, m)` and `(b, g, s, p)`.
    """
    batch, groups, count, channels = slots.shape
    step, rows = 1 + COEFFICIENTS[operator.coefficients], query.shape[1] // groups
    matrix = slots.flatten(0, 1)[:, : rows * step : step].float().contiguous()
    grad_query, sums = kernels.call(
        "project_and_sum",
        grad_output.flatten(0, 1),
        matrix,
        None,
        query.reshape(-1, rows, grad_output.shape[3]).float(),
    )
    places = [1 + slot // step if slot < rows * step and slot % step == 0 else 0 for slot in range(count)]
    grad_slots = sums[:, places].view(batch, groups, count, channels)
    return grad_query.view(query.shape).to(query.dtype), grad_slots.to(slots.dtype)


def expand_batch(matrix: Tensor, batch: int) -> Tensor:
    """Return the matrix once for each sample."""
    return matrix.expand(batch, -1, -1).contiguous()
