"""Positions that are read, summarized and responded to, keeping little for the backward pass: the positions and small things.

Autograd by itself keeps every array between the positions and the responses, and adds up one gradient of the positions' size
for keys, one for queries and one for values. Here the forward pass is `read`, `summarize` and `respond` and nothing
else; the backward pass reads keys and queries again where they are no mere scalars a position, and writes the gradient of
the positions once, as one product:

    ∂positions = [∂valuesᵀ | matrixᵀ] · [basis(keys) ; ∂rows],     rows = matrix · positions = [keys ; queries]
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from farfield.ops.fast import kernel_sums, kernels
from farfield.ops.fast.rows import RowPlan, stacked, unstacked
from farfield.ops.function import accelerate
from farfield.ops.grid import in_channels_last
from farfield.ops.modes import full_precision
from farfield.ops.projection import Projection, project, split_heads
from farfield.ops.slots import Summary
from farfield.ops.summary import WIDENED, sum_over_positions, summarize
from farfield.ops.table import Operator
from farfield.ops.work import is_a_slot


def few(rows: int, positions: Tensor) -> bool:
    """Whether rows read from positions are scalars beside them, which are kept and not read again."""
    return 32 * rows <= positions.shape[1]


# ---- the equations ---------------------------------------------------------------------------------------------------
def read_and_sum(plan: RowPlan, positions: Tensor, valid: Tensor, *readings: Tensor | None) -> tuple[Any, ...]:
    """Queries of the positions `(b, c, n)`, and their summary's values, weights, count and peak.

    `readings`: matrix and bias of the keys, then those of the queries, where these are others.
    """
    return summed(plan, positions, valid, project(positions, stacked(*maps_of(readings))))


def maps_of(readings: Sequence[Tensor | None]) -> tuple[Projection, Projection]:
    """The projections of keys and of queries."""
    return Projection(*readings[:2]), Projection(*readings[2:])


def summed(plan: RowPlan, positions: Tensor, valid: Tensor, rows: Tensor) -> tuple[Any, ...]:
    """The same of positions that are read."""
    heads = plan.heads
    key = split_heads(rows[:, : plan.keys], heads) if plan.keys else valid.expand(-1, heads, -1, -1)
    value = positions[:, None] if plan.shared else split_heads(positions, heads)
    summary = summarize(plan.row, key, value, valid, plan.complete)
    return queries_of(plan, rows), *summary[:3], summary.peak


def queries_of(plan: RowPlan, rows: Tensor) -> Tensor | None:
    """The queries among the rows."""
    return split_heads(rows[:, rows.shape[1] - plan.queries :], plan.heads) if plan.queries else None


def combine(slots: Tensor, coefficients: Tensor, like: Tensor) -> Tensor:
    """`(b, g, p, m)`: slots `(b, g, s, p)` combined by coefficients `(b, h, r, m)`, in the memory order of `like`."""
    found = coefficients.flatten(1, 2).unflatten(1, (slots.shape[1], -1))
    batch, wide = slots.shape[:2], channels_last(like)
    slots, found = slots.flatten(0, 1), found.flatten(0, 1)
    if found.shape[1] < slots.shape[1] and not is_a_slot(found.shape[1], slots.shape[2]):
        last, slots = slots[:, -1:], slots[:, :-1]
        response = torch.baddbmm(last, found.mT, slots).mT if wide else torch.baddbmm(last.mT, slots.mT, found)
    else:
        found = with_ones(found, slots.shape[1])
        response = torch.bmm(found.mT, slots).mT if wide else torch.bmm(slots.mT, found)
    return response.unflatten(0, batch)


def add_product(out: Tensor, slots: Tensor, coefficients: Tensor) -> Tensor:
    """A grid `(b, d, *n)` plus slots `(b, r, d)` combined by coefficients `(b, r, n)`, in the grid's memory format."""
    positions, slots, coefficients = out.flatten(2), slots.to(out.dtype), coefficients.to(out.dtype)
    if in_channels_last(out):
        return torch.baddbmm(positions.mT, coefficients.mT, slots).mT.unflatten(2, out.shape[2:])
    return torch.baddbmm(positions, slots.mT, coefficients).unflatten(2, out.shape[2:])


def arranged(coefficients: Tensor, slots: Tensor) -> Tensor:
    """Coefficients `(b, g, s, m)`: side by side those of heads that add up; 1 of a last slot that all take once."""
    return with_ones(coefficients.flatten(1, 2).unflatten(1, (slots.shape[1], -1)), slots.shape[2])


def with_ones(coefficients: Tensor, slots: int) -> Tensor:
    """Coefficients `(…, r, m)` of as many slots: 1 of a last one there is no coefficient for."""
    return coefficients if coefficients.shape[-2] == slots else F.pad(coefficients, (0, 0, 0, 1), value=1.0)


def channels_last(positions: Tensor) -> bool:
    """Whether the channels of positions `(…, c, n)` lie side by side in memory."""
    return positions.stride(-2) == 1 and positions.stride(-1) != 1


# ---- the same with a backward pass that keeps the positions --------------------------------------------------------------
def read_and_summarize(
    row: Operator,
    heads: int,
    positions: Tensor,
    valid: Tensor,
    key: Projection,
    query: Projection | None,
    *,
    shared: bool,
    complete: bool,
) -> tuple[Tensor | None, Summary]:
    """Read positions that answer, and ask too, and summarize them.

    Args:
        row: The operator, which has a basis.
        heads: How many.
        positions: `(b, c, n)`.
        valid: `(b, 1, 1, n)`, 1 where a position is valid.
        key: How keys are read.
        query: How queries are read; None if these positions do not ask.
        shared: Whether every head hears all channels, as it does where the values are mapped later.
        complete: Whether all positions are valid.

    Returns:
        The queries `(b, h, d, n)`, None if these positions do not ask, and the summary.

    Cost:
        b·n·c·(rows read + h·r) MACs forward, and thrice that backward; kept for backward are the positions.
    """
    key_projection = key if row.reads_keys else None
    keys, queries = (
        0 if one is None else positions.shape[1] if one.matrix is None else len(one.matrix)
        for one in (key_projection, query)
    )
    plan = RowPlan(row, heads, keys, queries, key is query, shared, complete)
    query_projection = None if key_projection is query else query  # what is the same is read once
    maps = (*(key_projection or Projection()), *(query_projection or Projection()))
    query_rows, values, weights, count, peak, _ = _read_and_sum(plan, positions, valid, *maps)
    return query_rows, Summary(values, weights, count, None, peak, False, complete)


def respond_from(
    row: Operator,
    positions: Tensor,
    reading: Projection,
    query: Tensor,
    summary: Summary,
    matrix: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """Respond to a summary: `ops.respond`, with a map of the responses that acts on the slots, and a bias.

    Args:
        row: The operator, which has a basis.
        positions: `(b, c, m)`, the asking positions.
        reading: How queries are read from them.
        query: `(b, h, d, m)`, what was read.
        summary: Of the answering positions.
        matrix: `(h, p, c)`, a map of each head's responses, which then add up; None if they stand side by side.
        bias: `(p,)`, of the responses, or `(h·c,)` without a map.

    Returns:
        `(b, 1, p, m)` with a map, else `(b, h, c, m)`, in the memory order of the positions.

    Cost:
        b·m·h·r·p MACs forward, and twice that backward; kept for backward are the positions and the summary.
    """
    parts = (summary.values, summary.weights, summary.count, summary.peak)
    return cast(Tensor, _respond(row, positions, *reading, query, *parts, matrix, bias))


def slots_of(row: Operator, query: Tensor, summary: Summary, matrix: Tensor | None, bias: Tensor | None) -> Tensor:
    """Slots `(b, g, s, p)` that positions combine: divided, mapped; of heads that add up side by side, and then g is 1.

    A bias is one more slot than there are coefficients, one that all positions take once.
    """
    if matrix is not None:
        summary = summary.map_values(matrix)
    slots = (summary.values / row.per(query, summary)).to(query.dtype)
    if matrix is not None:
        slots = slots.flatten(1, 2)[:, None]
    if bias is None:
        return slots
    last = bias.to(slots.dtype).unflatten(0, (slots.shape[1], 1, -1)).expand(slots.shape[0], -1, -1, -1)
    return torch.cat([slots, last], 2)


def rows_and_sums(plan: RowPlan, positions: Tensor, valid: Tensor, *readings: Tensor | None) -> tuple[Any, ...]:
    """`read_and_sum`, and the rows that were read `(b, rows, n)` where they are few."""
    matrix, bias = stacked(*maps_of(readings))
    if matrix is not None and kernel_sums.sums_run(plan, positions, matrix, bias):
        rows, values, weights = kernel_sums.read_and_sum(plan, positions, valid, matrix, bias)
        found = (queries_of(plan, rows), values, weights, valid.sum(-1, keepdim=True), None)
    else:
        rows = project(positions, Projection(matrix, bias))
        found = summed(plan, positions, valid, rows)
    return *found, rows if matrix is not None and few(rows.shape[1], positions) else None


def gradients_of_sums(
    arguments: Sequence[Any], kept: Sequence[Tensor | None], upon: Sequence[Any], wanted: Sequence[bool], precision: Any
) -> Iterator[Tensor | None]:
    """Gradients of `read_and_sum`: keys are read again where they were not few."""
    (plan, positions, valid, *readings), (_, peak, rows), (queries, values, weights) = arguments, kept, upon
    reading, other = maps_of(readings)
    key = valid.expand(-1, plan.heads, -1, -1)
    if plan.keys:
        with precision():
            rows = project(positions, reading) if rows is None else rows[:, : plan.keys]
        key = leaf(split_heads(rows, plan.heads).to(values.dtype))
    with torch.enable_grad():
        basis, own = cast(Any, plan.row.basis)(key, valid)
    if own is not None:  # the sums are relative to the peak of all blocks
        values, weights = values * torch.exp(own - peak), weights * torch.exp(own - peak)
    with full_precision(positions):
        (matrix, bias), upon_rows, grad_matrix = stacked(reading, other), None, None
        if plan.keys and kernel_sums.sums_run(plan, positions, matrix, bias):
            upon_rows, grad_matrix = kernel_sums.gradients_of_rows(plan, positions, valid, queries, values, weights)
        else:
            grad_basis = gradient_of_basis(plan, positions, valid, values, weights)
            upon_rows = joined(plan, gradient(basis, key, grad_basis), queries, positions)
        grad_positions = gradient_of_positions(plan, positions, values, basis, matrix, upon_rows) if wanted[1] else None
        found = gradients_of_reading(positions, matrix, bias, upon_rows, grad_matrix)
    return iter((None, grad_positions, None, *unstacked(Projection(*found), reading, other)))


def leaf(tensor: Tensor) -> Tensor:
    """A tensor to differentiate by, cut from its past."""
    return tensor.detach().requires_grad_()


def gradient(output: Tensor, by: Tensor, upon: Tensor) -> Tensor:
    """The gradient of a function of positions; 0 where it does not depend on them."""
    if not output.requires_grad or not by.requires_grad:
        return torch.zeros_like(by)
    (found,) = torch.autograd.grad(output, by, upon)
    return found


def gradient_of_basis(plan: RowPlan, positions: Tensor, valid: Tensor, values: Tensor, weights: Tensor) -> Tensor:
    """`(b, h, r, n)`: each weight's share in the values and in the weights of its slot."""
    if not plan.complete:
        weights = weights * valid
    if plan.shared:
        return across(values.flatten(1, 2), positions).unflatten(1, values.shape[1:3]) + weights
    return across(values, split_heads(positions, plan.heads)) + weights


def across(matrix: Tensor, positions: Tensor) -> Tensor:
    """Product `matrix · positions` in the matrix's dtype; no copy is made of the positions in one that is wider than theirs."""
    if matrix.dtype == positions.dtype:
        return matrix @ positions
    return torch.cat([matrix @ piece.to(matrix.dtype) for piece in positions.split(WIDENED, -1)], -1)


def joined(plan: RowPlan, keys: Tensor, queries: Tensor | None, positions: Tensor) -> Tensor | None:
    """Gradients of all rows read `(b, rows, n)`: keys first, queries last, added where both are the same."""
    rows = keys.flatten(1, 2).to(positions.dtype) if plan.keys else None
    if queries is None:
        return rows
    queries = queries.flatten(1, 2).to(positions.dtype)
    if rows is None:
        return queries
    return rows + queries if plan.same else torch.cat([rows, queries], 1)


def gradient_of_positions(
    plan: RowPlan, positions: Tensor, values: Tensor, basis: Tensor, matrix: Tensor | None, rows: Tensor | None
) -> Tensor:
    """`(b, c, n)`: what values, keys and queries say of the positions, as one product."""
    values, basis = values.to(positions.dtype), basis.to(positions.dtype)
    if not plan.shared:  # each head's values are channels of its own
        heads = torch.eye(plan.heads, dtype=positions.dtype, device=positions.device)[:, None, :, None]
        values = (values[:, :, :, None] * heads).flatten(3)  # (b, h, r, c)
    left, right = values.flatten(1, 2), basis.flatten(1, 2)
    if matrix is not None and rows is not None:
        left = torch.cat([left, matrix.to(left.dtype).expand(left.shape[0], -1, -1)], 1)
        right = torch.cat([right, rows], 1)
    found = (right.mT @ left).mT if channels_last(positions) else left.mT @ right
    return found if matrix is not None or rows is None else found + rows


def gradients_of_reading(
    positions: Tensor, matrix: Tensor | None, bias: Tensor | None, rows: Tensor | None, found: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """`(rows, c)` and `(rows,)`, summed over all positions of all samples; the first may be found already."""
    if matrix is None or rows is None:
        return None, None
    found = (sum_over_positions(rows, positions).sum(0) if found is None else found).to(matrix.dtype)
    return found, None if bias is None else rows.sum((0, 2), dtype=found.dtype).to(bias.dtype)


def respond_to(
    row: Operator,
    positions: Tensor,
    matrix: Tensor | None,
    bias: Tensor | None,
    query: Tensor,
    *parts: Tensor | None,
) -> Tensor:
    """`respond_from`, of parts."""
    coefficients, slots = factors(row, query, *parts)
    return combine(slots, coefficients, positions)


def without_query(arguments: Sequence[Any]) -> Sequence[Any]:
    """The arguments of `respond_to` that are kept: the positions that the query was read from, and it where it is small."""
    row, positions, matrix, bias, query, *parts = arguments
    small = few(math.prod(query.shape[1:3]), positions)
    return row, positions, matrix, bias, query if small else (query.shape[1], query.dtype), *parts


def with_query(arguments: Sequence[Any], precision: Any) -> Sequence[Any]:
    """The arguments of `respond_to`, the query read again."""
    row, positions, matrix, bias, query, *parts = arguments
    if isinstance(query, tuple):
        heads, dtype = query
        with precision():
            query = split_heads(project(positions, Projection(matrix, bias)), heads).to(dtype)
    return row, positions, matrix, bias, query, *parts


def gradients_of_response(
    arguments: Sequence[Any], kept: Any, upon: Sequence[Tensor], wanted: Sequence[bool], precision: Any
) -> Iterator[Tensor | None]:
    """Gradients of `respond_to` for the query, the summary, and the map and the bias of the responses."""
    (row, _, _, _, query, *parts), (grad,) = arguments, upon
    query, rest = leaf(query), [None if part is None else leaf(part) for part in parts]
    with torch.enable_grad():
        coefficients, slots = factors(row, query, *rest)
    if kernel_sums.answers_run(row, grad, query, slots):
        grads = kernel_sums.gradients_of_response(row, grad, query, slots)
        return iter((None, None, None, None, *gradients([query, *rest], {query: grads[0], slots: grads[1]})))
    with full_precision(grad):
        # Under autocast the product, and so what is upon it, is of lower precision than its factors.
        taken = arranged(coefficients, slots).to(grad.dtype)
        grad_slots = sum_over_positions(taken, grad).to(slots.dtype)
        inner = (slots.to(grad.dtype) @ grad)[:, :, : math.prod(coefficients.shape[1:3]) // slots.shape[1]]
        inner = inner.reshape(coefficients.shape).to(coefficients.dtype)
        found = gradients([query, *rest], {coefficients: inner, slots: grad_slots})
    return iter((None, None, None, None, *found))


def factors(row: Operator, query: Tensor, *parts: Tensor | None) -> tuple[Tensor, Tensor]:
    """Coefficients and slots, whose product the responses are, of `_Respond`'s inputs."""
    summary = summary_of(parts[:4])
    return row.coefficients(query, summary), slots_of(row, query, summary, *parts[4:])


def gradients(inner: list[Tensor | None], upon: dict[Tensor, Tensor]) -> Iterator[Tensor | None]:
    """Gradients of what is not None, of outputs with what is upon each; None where nothing depends on it."""
    known = [tensor for tensor in inner if tensor is not None]
    outputs = {output: grad for output, grad in upon.items() if output.requires_grad}
    found = iter(torch.autograd.grad(list(outputs), known, list(outputs.values()), allow_unused=True))
    return (None if tensor is None else next(found) for tensor in inner)


def summary_of(parts: Any) -> Summary:
    """A summary where coefficients look: values, weights, count and peak."""
    values, weights, count, peak = parts
    return Summary(values, weights, count, None, peak)


_read_and_sum = accelerate(read_and_sum, rows_and_sums, gradients_of_sums, constants=2, kept=1, kernels_run=kernels.run)
_respond = accelerate(respond_to, respond_to, gradients_of_response, save=without_query, restore=with_query)
