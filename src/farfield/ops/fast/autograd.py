"""Projecting, summarizing and responding with little memory: only positions and small tensors are kept for backward.

Autograd by itself keeps every tensor between the positions and the responses, and adds up three gradients of the size
of the positions: one for keys, one for queries and one for values. Here the forward pass is `project`, `summarize` and
`respond` and nothing else. The backward pass projects keys and queries again unless they are only a few numbers per
position, and computes the gradient of the positions once:

    ∂positions = ∂valuesᵀ · basis(keys) + matrixᵀ · ∂rows,     rows = matrix · positions = [keys ; queries]
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from farfield.ops.fast import kernels
from farfield.ops.fast.gradients import gradients_of_rows, project_again, split_gradients
from farfield.ops.fast.steps import ResponsePlan, RowPlan, are_small, multiply_slots, prepare_slots, stack_projections
from farfield.ops.function import accelerate
from farfield.ops.grid import in_channels_last
from farfield.ops.modes import full_precision
from farfield.ops.projection import Projection, project, split_heads
from farfield.ops.slots import Summary
from farfield.ops.summary import WIDENED, sum_over_positions, summarize

# Of positions and values that are kept as they are.
_NO_SOURCE = (None, None, None)


# ---- the equations ---------------------------------------------------------------------------------------------------
def _plain_sums(plan: RowPlan, positions: Tensor, values: Tensor, valid: Tensor, *rest: Any) -> tuple[Any, ...]:
    """Return the queries of positions `(b, c, n)`, and the values, weights, count and peak of their summary."""
    return _sum_rows(plan, values, valid, project(positions, stack_projections(*_pair_projections(rest))))


def _pair_projections(parts: Sequence[Tensor | None]) -> tuple[Projection, Projection]:
    matrix, bias, other_matrix, other_bias, *_ = parts
    return Projection(matrix, bias), Projection(other_matrix, other_bias)


def _sum_rows(plan: RowPlan, values: Tensor, valid: Tensor, rows: Tensor) -> tuple[Any, ...]:
    """Return the same as `_plain_sums`, from rows that are already projected."""
    heads = plan.heads
    key = split_heads(rows[:, : plan.keys], heads) if plan.keys else valid.expand(-1, heads, -1, -1)
    value = values[:, None] if plan.shared else split_heads(values, heads)
    summary = summarize(plan.operator, key, value, valid, plan.complete)
    query = rows[:, rows.shape[1] - plan.queries :].unflatten(1, (heads, -1)) if plan.queries else None
    return query, *summary[:3], summary.peak


# ---- the same with a backward pass that keeps the positions ----------------------------------------------------------
def project_and_summarize(
    plan: RowPlan, positions: Tensor, values: Tensor, valid: Tensor, parts: tuple[Projection, Projection, Projection]
) -> tuple[Tensor | None, Summary]:
    """Return the queries `(b, h, d, n)` of positions, or None, and the summary, with parts of key, query and value."""
    key, query, value = parts
    # Of large tensors, the positions alone are kept for the backward pass, or what they were made of.
    sources = *(key.source or _NO_SOURCE), *(value.source or _NO_SOURCE)
    queries, sums, weights, count, peak, _ = _project_and_sum(
        plan, positions, values, valid, key.matrix, key.bias, query.matrix, query.bias, *sources
    )
    return queries, Summary(sums, weights, count, None, peak, False, plan.complete)


def respond_from(
    plan: ResponsePlan,
    positions: Tensor,
    projection: Projection,
    query: Tensor,
    summary: Summary,
    matrix: Tensor | None,
    bias: Tensor | None,
) -> Tensor:
    """Return `(b, 1, p, m)` with a matrix `(h, p, c)` of responses, else `(b, h, c, m)`, as positions lie in memory."""
    # Kept for the backward pass are the positions, the summary, and queries of few channels.
    parts = (summary.values, summary.weights, summary.count, summary.peak)
    source = projection.source or (positions, None, None)
    return cast(Tensor, _respond(plan, *source, projection.matrix, projection.bias, query, *parts, matrix, bias))


def _save_sources(arguments: Sequence[Any]) -> Sequence[Any]:
    """Return the arguments of `_plain_sums` that are kept: no positions or values that a source makes again."""
    plan, positions, values, *rest = arguments
    return plan, positions if rest[-5] is None else None, values if rest[-2] is None else None, *rest


def _restore_sources(arguments: Sequence[Any], precision: Any) -> Sequence[Any]:
    """Return the arguments of `_plain_sums`, with positions and values that were not kept."""
    plan, positions, values, valid, *rest = arguments
    with precision():
        positions = project_again(*rest[-6:-3]) if positions is None else positions
        if values is None:
            values = project_again(*rest[-3:])
            values = values if plan.complete else torch.where(valid[:, 0] > 0, values, 0)
    return plan, positions, values, valid, *rest


def _project_and_keep(plan: RowPlan, positions: Tensor, values: Tensor, valid: Tensor, *rest: Any) -> tuple[Any, ...]:
    """Return the same as `_plain_sums`, and the projected rows `(b, rows, n)` if they are small."""
    stacked = stack_projections(*_pair_projections(rest))
    if plan.kernel is None:
        rows = project(positions, stacked)
        *outputs, rows = *_sum_rows(plan, values, valid, rows), rows
    else:
        *outputs, rows = plan.kernel.run(plan, positions, values, valid, *stacked[:2])
    small = stacked.matrix is not None and rows is not None and are_small(rows.shape[1], positions)
    return *outputs, rows if small else None


def _gradients_of_sums(
    arguments: Sequence[Any],
    kept: Sequence[Tensor | None],
    grad_outputs: Sequence[Any],
    wanted: Sequence[bool],
    precision: Any,
) -> Iterator[Tensor | None]:
    """Return the gradients of `_plain_sums`; keys that were not kept are projected again."""
    (plan, positions, values, valid, *projections), (_, peak, rows) = arguments, kept
    grad_queries, grad_values, grad_weights = grad_outputs
    projection, other = _pair_projections(projections)
    stacked, grad_rows, grad_matrix = stack_projections(projection, other), None, None
    grads_of_outputs = (grad_queries, grad_values, grad_weights)
    kernel = plan.kernel
    if kernel is not None and kernel.derive is not None and kernels.why_not(*grads_of_outputs, ordered=False) is None:
        *grads, grad_matrix, grad_bias = kernel.derive(
            plan, positions, values, valid, stacked, peak, wanted[1], grads_of_outputs
        )
        grads_of_projections = split_gradients(Projection(grad_matrix, grad_bias), projection, other)
        return iter((None, *grads, None, *grads_of_projections, *_NO_SOURCE, *_NO_SOURCE))
    key = valid.expand(-1, plan.heads, -1, -1)
    if plan.keys:
        with precision():
            rows = project(positions, projection) if rows is None else rows[:, : plan.keys]
        key = _leaf(split_heads(rows, plan.heads).to(grad_values.dtype))
    with torch.enable_grad():
        basis, own = cast(Any, plan.operator.basis)(key, valid)
    if own is not None:  # the sums are relative to the peak of all blocks
        grad_values, grad_weights = grad_values * torch.exp(own - peak), grad_weights * torch.exp(own - peak)
    with full_precision(positions):
        if plan.keys and kernel is not None and kernel.derive is None:
            grad_rows, grad_matrix = gradients_of_rows(plan, positions, valid, grad_queries, grad_values, grad_weights)
        else:
            grad_basis = _gradient_of_basis(plan, values, valid, grad_values, grad_weights)
            grad_rows = _join_rows(plan, _gradient(basis, key, grad_basis), grad_queries, positions)
        grads = None, None
        if wanted[1] or plan.apart:
            grads = _gradients_of_positions(plan, positions, values, grad_values, basis, stacked.matrix, grad_rows)
        of_projection = _gradients_of_projection(positions, *stacked[:2], grad_rows, grad_matrix)
    grads_of_projections = split_gradients(Projection(*of_projection), projection, other)
    return iter((None, *grads, None, *grads_of_projections, *_NO_SOURCE, *_NO_SOURCE))


def _leaf(tensor: Tensor) -> Tensor:
    """Detach a tensor, as a leaf that requires a gradient."""
    return tensor.detach().requires_grad_()


def _gradient(output: Tensor, by: Tensor, grad_output: Tensor) -> Tensor:
    """Return the gradient with respect to `by`; 0 if `output` does not depend on it."""
    if not output.requires_grad or not by.requires_grad:
        return torch.zeros_like(by)
    (grad,) = torch.autograd.grad(output, by, grad_output)
    return grad


def _gradient_of_basis(
    plan: RowPlan, positions: Tensor, valid: Tensor, grad_values: Tensor, grad_weights: Tensor
) -> Tensor:
    """Return `(b, h, r, n)`: a weight of the basis contributes to the values and to the weight of its slot."""
    if not plan.complete:
        grad_weights = grad_weights * valid
    if plan.shared:
        products = _multiply_widened(grad_values.flatten(1, 2), positions).unflatten(1, grad_values.shape[1:3])
        return products + grad_weights
    return _multiply_widened(grad_values, split_heads(positions, plan.heads)) + grad_weights


def _multiply_widened(matrix: Tensor, positions: Tensor) -> Tensor:
    """Return `matrix · positions` in the matrix's dtype, without a wider copy of all positions at once."""
    if matrix.dtype == positions.dtype:
        return matrix @ positions
    return torch.cat([matrix @ piece.to(matrix.dtype) for piece in positions.split(WIDENED, -1)], -1)


def _join_rows(plan: RowPlan, grad_keys: Tensor, grad_queries: Tensor | None, positions: Tensor) -> Tensor | None:
    """Return gradients of all rows `(b, rows, n)`: keys first, queries last; added where the same rows are both."""
    rows = grad_keys.flatten(1, 2).to(positions.dtype) if plan.keys else None
    if grad_queries is None:
        return rows
    queries = grad_queries.flatten(1, 2).to(positions.dtype)
    if rows is None:
        return queries
    return rows + queries if plan.same else torch.cat([rows, queries], 1)


def _gradients_of_positions(
    plan: RowPlan,
    positions: Tensor,
    values: Tensor,
    grad_values: Tensor,
    basis: Tensor,
    matrix: Tensor | None,
    grad_rows: Tensor | None,
) -> tuple[Tensor | None, Tensor | None]:
    """Return `(b, c, n)`: the contributions of keys and queries, and that of values, or the sum of them and None."""
    if matrix is not None and grad_rows is not None:
        matrix = matrix.view(-1, *matrix.shape[-2:])  # (1, rows, c) or (h, r, d)
        grads = split_heads(grad_rows, len(matrix))
        grad_rows = _multiply_groups(matrix.expand(len(positions), -1, -1, -1), grads, positions)
    left, right = (part.flatten(1, 2)[:, None] if plan.shared else part for part in (grad_values, basis))
    of_values = _multiply_groups(left, right, values)
    if plan.apart:
        return grad_rows, of_values
    return of_values if grad_rows is None else of_values + grad_rows, None


def _multiply_groups(left: Tensor, right: Tensor, like: Tensor) -> Tensor:
    """Return `(b, c, n)`, leftᵀ · right of groups `(b, g, r, c / g)` and `(b, g, r, n)`, one in the order of `like`."""
    left, right = left.to(like.dtype), right.to(like.dtype)
    grad = (right.mT @ left).mT if left.shape[1] == 1 and in_channels_last(like) else left.mT @ right
    return grad.flatten(1, 2)


def _gradients_of_projection(
    positions: Tensor,
    matrix: Tensor | None,
    bias: Tensor | None,
    grad_rows: Tensor | None,
    grad_matrix: Tensor | None,
) -> tuple[Tensor | None, Tensor | None]:
    """Return `(rows, c)`, which is `grad_matrix` if that is given, and `(rows,)`: sums over positions and samples."""
    if matrix is None or grad_rows is None:
        return None, None
    if grad_matrix is None:
        heads = len(matrix) if matrix.dim() == 3 else 1
        grad_matrix = sum_over_positions(split_heads(grad_rows, heads), split_heads(positions, heads)).sum(0)
    grad = grad_matrix.view(matrix.shape).to(matrix.dtype)
    return grad, None if bias is None else grad_rows.sum((0, 2), dtype=grad.dtype).to(bias.dtype)


def _respond_to(plan: ResponsePlan, positions: Tensor, *arguments: Any) -> Tensor:
    """Respond as `respond_from` does, to the parts of a summary."""
    return multiply_slots(plan, positions, arguments[4], _build_summary(arguments[5:9]), *arguments[9:])


def _save_query(arguments: Sequence[Any]) -> Sequence[Any]:
    """Return the arguments of `_respond_to` that are kept: the positions, and the queries only if they are small."""
    plan, positions, *projections = arguments[:6]
    query, *parts = arguments[6:]
    small = are_small(math.prod(query.shape[1:3]), positions)
    return plan, positions, *projections, query if small else (query.shape[1], query.dtype), *parts


def _restore_query(arguments: Sequence[Any], precision: Any) -> Sequence[Any]:
    """Return the arguments of `_respond_to`, with the queries projected again if they were not kept."""
    plan, positions, *projections = arguments[:6]
    query, *parts = arguments[6:]
    if isinstance(query, tuple):
        heads, dtype = query
        with precision():
            made = project_again(project_again(positions, *projections[:2]), *projections[2:])
            query = split_heads(made, heads).to(dtype)
    return plan, positions, *projections, query, *parts


def _gradients_of_response(
    arguments: Sequence[Any], kept: Any, grad_outputs: Sequence[Tensor], wanted: Sequence[bool], precision: Any
) -> Iterator[Tensor | None]:
    """Return gradients of `_respond_to` for the query, the summary, and the projection and bias of the responses."""
    (plan, *_), (query, *parts), (grad_output,) = arguments[:6], arguments[6:], grad_outputs
    query, rest = _leaf(query), [None if part is None else _leaf(part) for part in parts]
    summary = _build_summary(rest[:4])
    if plan.kernels:
        with torch.enable_grad():
            slots, sums = prepare_slots(plan.operator, query, summary, *rest[4:], by_kernel=True)
        with precision():
            lines = (line for line in plan.kernels if line.why_not(plan, query, slots, grad_output) is None)
            kernel = next(lines, None)
        if kernel is not None:
            grads = cast(Any, kernel.derive)(plan, grad_output, query, slots, sums)
            grads = {output: grad for output, grad in zip((query, slots, sums), grads, strict=True) if grad is not None}
            return iter((*(None,) * 6, *_gradients([query, *rest], grads)))
    with torch.enable_grad():
        coefficients = plan.operator.coefficients(query, summary)
        slots, _ = prepare_slots(plan.operator, query, summary, *rest[4:], by_kernel=False)
    with full_precision(grad_output):
        # Under autocast the product, and so its gradient, is of lower precision than its factors.
        factors = coefficients.flatten(1, 2).unflatten(1, (slots.shape[1], -1)).to(grad_output.dtype)
        if factors.shape[2] != slots.shape[2]:  # the last slot is a bias
            factors = F.pad(factors, (0, 0, 0, 1), value=1.0)
        grad_slots = sum_over_positions(factors, grad_output).to(slots.dtype)
        inner = slots.to(grad_output.dtype) @ grad_output
        inner = inner[:, :, : math.prod(coefficients.shape[1:3]) // slots.shape[1]]
        grad_coefficients = inner.reshape(coefficients.shape).to(coefficients.dtype)
        grads = _gradients([query, *rest], {coefficients: grad_coefficients, slots: grad_slots})
    return iter((*(None,) * 6, *grads))


def _gradients(inputs: list[Tensor | None], grad_outputs: dict[Tensor, Tensor]) -> Iterator[Tensor | None]:
    """Return vector-Jacobian products for the inputs that are not None; None where no output depends on the input."""
    known = [tensor for tensor in inputs if tensor is not None]
    outputs = {output: grad for output, grad in grad_outputs.items() if output.requires_grad}
    grads = iter(torch.autograd.grad(list(outputs), known, list(outputs.values()), allow_unused=True))
    return (None if tensor is None else next(grads) for tensor in inputs)


def _build_summary(parts: Any) -> Summary:
    """Return a summary of values, weights, count and peak, which coefficients may depend on."""
    values, weights, count, peak = parts
    return Summary(values, weights, count, None, peak)


_project_and_sum = accelerate(
    _plain_sums,
    _project_and_keep,
    _gradients_of_sums,
    constants=2,
    kept=1,
    save=_save_sources,
    restore=_restore_sources,
    kernels_run=kernels.run,
)
_respond = accelerate(
    _respond_to,
    lambda plan, positions, *arguments: plan.run(
        plan, positions, arguments[4], _build_summary(arguments[5:9]), *arguments[9:]
    ),
    _gradients_of_response,
    save=_save_query,
    restore=_restore_query,
    kernels_run=kernels.run,
)
