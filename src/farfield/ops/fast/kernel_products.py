"""Operators with a basis of keys or their exponentials, by kernels: a block of positions is read once, in a cache.

Each function is a form of one in `autograd`. The two tables below list the functions of operators, never their names,
that the kernels compute.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor

from farfield.ops.fast import kernels
from farfield.ops.fast.stacking import RowPlan
from farfield.ops.modes import are_free, casts
from farfield.ops.projection import split_heads
from farfield.ops.table import Operator, exponentials, keys, queries, softmax_over_channels

# Basis -> whether the weights are exponentials of the keys.
BASES: dict[Callable[..., object] | None, bool] = {keys: False, exponentials: True}
# Coefficients -> whether they are a softmax of the queries.
COEFFICIENTS: dict[Callable[..., Tensor], bool] = {queries: False, softmax_over_channels: True}


def fits_in_either_order(positions: Tensor) -> bool:
    """Whether a kernel takes positions `(b, c, n)`: plain numbers with channels or positions contiguous."""
    return kernels.is_readable(positions) and (positions.stride(2) == 1 or positions.stride(1) == 1)


def multiplies_faster(positions: Tensor) -> bool:
    """Whether products of positions by a kernel are faster than torch's; a kernel multiplies in float32."""
    return positions.dtype == torch.float32 or positions.dtype not in kernels.multiplied_by_processor()


def sums_run(
    plan: RowPlan, positions: Tensor, matrix: Tensor | None, bias: Tensor | None, *grads: Tensor | None
) -> bool:
    """Whether `summarize` may run, or `gradients_of_sums` with these gradients; within its autocast."""
    if plan.operator.basis not in BASES or not kernels.fit(matrix, bias):
        return False
    plain = all(kernels.is_readable(grad) for grad in grads if grad is not None)
    return plain and fits_in_either_order(positions) and not casts(positions) and multiplies_faster(positions)


def project(positions: Tensor, matrix: Tensor | None, bias: Tensor | None) -> Tensor | None:
    """Return `matrix · positions + bias`, `(b, rows, n)`; None if no kernel does it, or a derivative is wanted."""
    if matrix is None or not kernels.fit(matrix, bias) or not fits_in_either_order(positions):
        return None
    if casts(positions) or not multiplies_faster(positions) or not are_free(positions, matrix, bias):
        return None
    options = (None, 0, len(matrix), 1, False)
    rows = kernels.call("project_and_summarize", positions, floats(matrix), floats(bias), *options)[0]
    return cast(Tensor, rows)


def summarize(
    plan: RowPlan, positions: Tensor, valid: Tensor, matrix: Tensor | None, bias: Tensor | None
) -> tuple[Tensor | None, Tensor, Tensor, Tensor, Tensor | None]:
    """Project and summarize as `autograd.project_and_sum` does.

    Returns:
        The queries `(b, h, d, n)` or None, the values `(b, h, r, c)`, the weights `(b, h, r, 1)`, the number of valid
        positions `(b, 1, 1, 1)`, and the peak `(b, h, r, 1)` or None.
    """
    weighs_exponentials = BASES[plan.operator.basis]
    groups = 1 if plan.shared else plan.heads
    projected = 0 if matrix is None else plan.queries
    options = (plan.keys, projected, groups, weighs_exponentials)
    rows, values, weights, peak = kernels.call(
        "project_and_summarize", positions, floats(matrix), floats(bias), flat(plan, valid), *options
    )
    rows = positions if matrix is None else rows
    values, weights, peak = (split_heads(part, plan.heads) for part in (values, weights[..., None], peak[..., None]))
    query = split_heads(rows, plan.heads) if plan.queries else None
    return query, values, weights, valid.sum(-1, keepdim=True), peak if weighs_exponentials else None


def floats(tensor: Tensor | None) -> Tensor | None:
    """Return a small tensor in float32, which kernels compute in, and contiguous."""
    return None if tensor is None else tensor.float().contiguous()


def flat(plan: RowPlan, valid: Tensor) -> Tensor | None:
    """Return which positions are valid, `(b, n)`; None if all are."""
    return None if plan.complete else floats(valid[:, 0, 0])


def gradients_of_sums(
    plan: RowPlan,
    positions: Tensor,
    valid: Tensor,
    matrix: Tensor | None,
    bias: Tensor | None,
    peak: Tensor | None,
    wanted: bool,
    grads: tuple[Tensor | None, Tensor, Tensor],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return the gradients of positions (if wanted), matrix and bias (if there are these).

    `grads` are those of queries, values and weights.
    """
    grad_queries, grad_values, grad_weights = grads
    grad_positions, grad_matrix, grad_bias = kernels.call(
        "project_and_summarize_backward",
        positions,
        floats(matrix),
        floats(bias),
        flat(plan, valid),
        None if peak is None else floats(peak.flatten(1)),
        floats(grad_values.flatten(1, 2)),
        floats(grad_weights.flatten(1)),
        None if grad_queries is None else in_either_order(grad_queries.flatten(1, 2)),
        plan.same,
        wanted,
    )
    grad_matrix = None if matrix is None else grad_matrix.to(matrix.dtype)
    return grad_positions if wanted else None, grad_matrix, None if bias is None else grad_bias.to(bias.dtype)


def responses_run(operator: Operator, query: Tensor, slots: Tensor) -> bool:
    """Whether `combine` and `gradients_of_response` may run; a bias is one slot more than there are coefficients."""
    if operator.coefficients not in COEFFICIENTS or not kernels.fit(slots) or casts(query):
        return False
    rows = query.shape[1] * query.shape[2] // slots.shape[1]
    return kernels.is_readable(query) and multiplies_faster(query) and slots.shape[2] in (rows, rows + 1)


def combine(operator: Operator, query: Tensor, slots: Tensor, wide: bool) -> Tensor:
    """Combine slots `(b, g, s, p)` by the coefficients of queries `(b, h, d, m)`: `(b, g, p, m)`.

    Args:
        operator: The operator.
        query: The queries.
        slots: The slots; `g` is 1 where the heads' responses are added up.
        wide: Whether the channels of the responses are contiguous in memory.
    """
    rows, softmax = in_either_order(query.flatten(1, 2)), COEFFICIENTS[operator.coefficients]
    response = kernels.call("combine_slots", rows, floats(slots), query.shape[1], softmax, wide)
    return cast(Tensor, response.unflatten(1, (slots.shape[1], -1)))


def gradients_of_response(
    operator: Operator, grad_output: Tensor, query: Tensor, slots: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradients of queries `(b, h, d, m)` and slots `(b, g, s, p)`."""
    rows, softmax = in_either_order(query.flatten(1, 2)), COEFFICIENTS[operator.coefficients]
    grad_rows, grad_slots = kernels.call(
        "combine_slots_backward",
        rows,
        floats(slots),
        in_either_order(grad_output.flatten(1, 2)),
        query.shape[1],
        softmax,
    )
    return split_heads(grad_rows, query.shape[1]), grad_slots.to(slots.dtype)


def in_either_order(positions: Tensor) -> Tensor:
    """Return positions whose channels or positions are contiguous, copied if they are not."""
    # `contiguous` would return a single position of a slice, which counts as contiguous whatever its strides.
    return positions if fits_in_either_order(positions) else positions.clone(memory_format=torch.contiguous_format)
