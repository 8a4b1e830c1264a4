"""Kernels of the backward pass of the two steps: gradients of sums into slots, and of slots combined to responses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from farfield.ops.fast import kernels
from farfield.ops.fast.steps import (
    MAPS,
    ResponsePlan,
    RowPlan,
    are_few,
    floats,
    in_either_order,
    why_not_multiplied,
)
from farfield.ops.modes import are_free
from farfield.ops.projection import Projection, project
from farfield.ops.slots import Features, identity, query_and_one


# ---- of keys and values that are summed into slots -------------------------------------------------------------------
def project_again(positions: Tensor, matrix: Tensor | None, bias: Tensor | None) -> Tensor:
    """Return `matrix · positions + bias`, `(b, rows, n)`, by a kernel if one does it and no derivative is wanted."""
    if matrix is None or not are_free(positions, matrix, bias) or why_not_multiplied(None, positions, matrix, bias):
        return project(positions, Projection(matrix, bias))
    options = (None, 0, matrix.shape[:-1].numel(), 1, 1, MAPS[identity], False)
    rows = kernels.call("project_and_summarize", positions, None, floats(matrix), floats(bias), *options)[0]
    return cast(Tensor, rows)


def split_gradients(grads: Projection, key: Projection, query: Projection) -> Iterator[Tensor | None]:
    """Split the gradients of `stack_projections` into those of its matrices and biases, in order."""
    start = 0
    for one in (key, query):
        end = start if one.matrix is None else start + len(one.matrix)
        for part, grad in zip(one[:2], grads[:2], strict=True):
            yield None if part is None or grad is None else grad[start:end]
        start = end


def gradients_of_slots(
    plan: RowPlan,
    positions: Tensor,
    values: Tensor,
    valid: Tensor,
    projection: Projection,
    peak: Tensor | None,
    wanted: bool,
    grads: tuple[Tensor | None, Tensor, Tensor],
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """Return the gradients of positions, values, matrix and bias, from those of queries, slots and weights."""
    matrix, bias, *_ = projection
    grad_queries, grad_values, grad_weights = grads
    basis, grad_totals = plan.operator.basis, None
    number, has_one = (basis.map, basis.one) if isinstance(basis, Features) else (basis, False)
    if has_one:
        last = grad_values[:, :, -1]  # (b, h, c)
        grad_totals = floats(last.sum(1) if plan.shared else last.flatten(1))
        grad_values, grad_weights = grad_values[:, :, :-1], grad_weights[:, :, :-1]
    grad_positions, of_values, grad_matrix, grad_bias = kernels.call(
        "project_and_summarize_backward",
        positions,
        values if plan.apart else None,
        floats(matrix),
        floats(bias),
        None if plan.complete else floats(valid[:, 0, 0]),
        None if peak is None else floats(peak.flatten(1)),
        floats(grad_values.flatten(1, 2)),
        floats(grad_weights.flatten(1)),
        grad_totals,
        None if grad_queries is None else in_either_order(grad_queries.flatten(1, 2)),
        plan.keys,
        plan.heads,
        MAPS[number],
        plan.same,
        wanted,
    )
    grad_matrix = None if matrix is None else grad_matrix.view(matrix.shape).to(matrix.dtype)
    grad_bias = None if bias is None else grad_bias.to(bias.dtype)
    return grad_positions if wanted else None, of_values if plan.apart else None, grad_matrix, grad_bias


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


# ---- of queries and slots that are combined to responses -----------------------------------------------------------
def gradients_of_combination(
    plan: ResponsePlan, grad_output: Tensor, query: Tensor, slots: Tensor, sums: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the gradients of queries `(b, h, d, m)`, of slots `(b, g, s, p)`, and of the sums if there are some."""
    grad_rows, grad_slots, grad_sums = kernels.call(
        "combine_slots_backward",
        in_either_order(query.flatten(1, 2)),
        floats(slots),
        floats(sums),
        in_either_order(grad_output.flatten(1, 2)),
        query.shape[1],
        *plan.coefficients[:3],
    )
    grad_query = grad_rows.unflatten(1, (query.shape[1], -1))
    return grad_query, grad_slots.to(slots.dtype), None if sums is None else grad_sums.to(sums.dtype)


def why_not_score_gradients(plan: object, query: Tensor, slots: Tensor, grad_output: Tensor) -> str | None:
    """Return why `gradients_of_scores` does not run, or None; responses themselves are a product of torch."""
    if query.shape[2] != 1:
        return "queries are not scores"
    if not are_few(query.shape[1] // slots.shape[1], grad_output.shape[2]):
        return kernels.MANY_SCORES
    return kernels.why_not(grad_output.flatten(0, 1), query, slots, multiplied=grad_output)


def gradients_of_scores(
    plan: ResponsePlan, grad_output: Tensor, query: Tensor, slots: Tensor, no_sums: None
) -> tuple[Tensor, Tensor, None]:
    """Return the gradients of scores `(b, h, 1, m)` and slots; that of the responses is read once for both."""
    # A head's slots: one for its query and, for some operators, one with a coefficient of 1; the last may be the bias.
    batch, groups, count, channels = slots.shape
    step, rows = 1 + (plan.operator.coefficients is query_and_one), query.shape[1] // groups
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
