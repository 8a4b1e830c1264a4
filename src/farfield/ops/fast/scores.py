"""Kernels of operators whose keys and queries are scores: few rows, with weights of 1 or the rows themselves.

They read positions once, from memory; see `steps`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from farfield.ops.fast import kernels
from farfield.ops.fast.steps import RowPlan, Sums, select_queries
from farfield.ops.table import Operator, one_and_key, query_and_one

# With more rows than these, MACs and not reads of memory take the time, and a matrix product is faster.
_ROWS = 4


def are_few(rows: int, channels: int) -> bool:
    """Whether projecting this number of rows takes about as long as reading the positions from memory."""
    return 0 < rows <= _ROWS and 8 * rows <= channels


def are_small(rows: int, positions: Tensor) -> bool:
    """Whether projected rows are so small beside the positions that they are kept and not recomputed."""
    return 32 * rows <= positions.shape[1]


def why_not_scores(plan: RowPlan, positions: Tensor, values: Tensor, *projections: Tensor | None) -> str | None:
    """Return why `sum_scores` does not run, or None."""
    if plan.apart:
        return "keys and values are not of the same positions"
    matrices = [each for each in projections[::2] if each is not None]
    if not matrices or plan.keys != plan.heads * (plan.operator.basis is one_and_key):
        return "keys are not scores"
    if not are_few(sum(map(len, matrices)), positions.shape[1]):
        return kernels.MANY_SCORES
    return kernels.why_not(positions, *projections, multiplied=positions)


def sum_scores(
    plan: RowPlan, positions: Tensor, values: Tensor, valid: Tensor, matrix: Tensor, bias: Tensor | None
) -> Sums:
    """Project and sum as `autograd` does by torch's products, in one pass over the positions; return the rows too."""
    batch, heads = positions.shape[0], plan.heads
    offset = None if bias is None else bias.float()[:, None].expand(batch, -1, positions.shape[2]).contiguous()
    rows, sums = kernels.call("project_and_sum", positions, expand_batch(matrix.float(), batch), offset, None)
    values, products = (part[:, :, None] for part in (sums[:, :1], sums[:, 1 : 1 + plan.keys]))
    if not plan.shared:  # each head's values are channels of its own
        values = values.unflatten(3, (heads, -1)).permute(0, 3, 1, 2, 4).flatten(2, 3)
        if plan.keys:
            products = products.unflatten(3, (heads, -1)).diagonal(0, 1, 3).permute(0, 3, 1, 2)
    values, count = values.expand(-1, heads, -1, -1), valid.sum(-1, keepdim=True)
    weights = count.expand(-1, heads, -1, -1)
    keys, rows = rows[:, : plan.keys, None], rows.to(positions.dtype)
    if plan.keys:
        values = torch.cat([values, products], 2)
        weights = torch.cat([weights, (keys * valid).sum(-1, keepdim=True)], 2)
    return select_queries(plan, rows), values, weights, count, None, rows


def gradients_of_rows(
    plan: RowPlan,
    positions: Tensor,
    valid: Tensor,
    grad_queries: Tensor | None,
    grad_values: Tensor,
    grad_weights: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return the gradient of the rows, `(b, rows, n)`, and that of the matrix, `(rows, c)`."""
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


def why_not_score_gradients(operator: Operator, query: Tensor, slots: Tensor, grad_output: Tensor) -> str | None:
    """Return why `gradients_of_scores` does not run, or None; responses themselves are a product of torch."""
    if query.shape[2] != 1:
        return "queries are not scores"
    if not are_few(query.shape[1] // slots.shape[1], grad_output.shape[2]):
        return kernels.MANY_SCORES
    return kernels.why_not(grad_output.flatten(0, 1), query, slots, multiplied=grad_output)


def gradients_of_scores(
    operator: Operator, grad_output: Tensor, query: Tensor, slots: Tensor, no_sums: None
) -> tuple[Tensor, Tensor, None]:
    """Return the gradients of scores `(b, h, 1, m)` and slots; that of the responses is read once for both."""
    # A head's slots: one for its query and, for some operators, one with a coefficient of 1; the last may be the bias.
    batch, groups, count, channels = slots.shape
    step, rows = 1 + (operator.coefficients is query_and_one), query.shape[1] // groups
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
    return grad_query.view(query.shape).to(query.dtype), grad_slots.to(slots.dtype), None


def expand_batch(matrix: Tensor, batch: int) -> Tensor:
    return matrix.expand(batch, -1, -1).contiguous()
