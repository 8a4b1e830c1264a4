"""Kernels of the two steps of operators with a basis: summing positions into slots, and combining slots to responses.

A block of positions is read once, in a cache. Each function is a form of one in `autograd`; `table` says for which
operators, by the functions of an operator and never its name.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, cast

import torch
from torch import Tensor

from farfield.ops.fast import kernels
from farfield.ops.fast.combination import combine
from farfield.ops.grid import in_channels_last
from farfield.ops.modes import are_free
from farfield.ops.projection import Projection
from farfield.ops.slots import Summary
from farfield.ops.table import (
    MALA_EPSILON,
    Features,
    Operator,
    Quotient,
    centred,
    elu_plus_one,
    exponentials,
    identity,
    keys,
    magnitude_aware,
    queries,
    query_and_one,
    relu,
    softmax_over_channels,
    softmax_pair,
)

# Features of keys and queries that kernels compute, as `Map` of cpu/products.h numbers them.
_MAPS: dict[object, int] = {
    identity: 0,
    keys: 0,
    queries: 0,
    centred: 0,
    exponentials: 1,
    softmax_over_channels: 2,
    relu: 3,
    elu_plus_one: 4,
    magnitude_aware: 4,
    softmax_pair: kernels.PAIR,
}
# What kernels multiply them with, as `Factor` numbers it: 0 for nothing.
_OF_SUM, _OF_MAGNITUDE = 1, 2


class RowPlan(NamedTuple):
    """The rows (channels of keys and queries) that are projected from positions, and how they are summarized."""

    operator: Operator
    heads: int
    keys: int  # rows that are keys; they come first
    queries: int  # rows that are queries; they come last
    same: bool  # whether the same rows are both
    shared: bool  # whether every head summarizes all channels
    complete: bool  # whether all positions are valid
    apart: bool  # whether the values are not the positions
    kernel: kernels.Kernel | None = None  # projects and sums; None if torch does


class ResponsePlan(NamedTuple):
    """How queries respond to slots: the operator, and the kernels that may run, in order."""

    operator: Operator
    kernels: tuple[kernels.Kernel, ...] = ()


Sums = tuple[Tensor | None, Tensor, Tensor, Tensor, Tensor | None, Tensor | None]


# ---- projections -----------------------------------------------------------------------------------------------------
def stack_projections(key: Projection, query: Projection) -> Projection:
    """Return one projection for keys and queries, so that positions are read once; either may be the identity."""
    if key.matrix is None or query.matrix is None:
        return query if key.matrix is None else key
    biases = [
        one.matrix.new_zeros(len(one.matrix)) if one.bias is None else one.bias
        for one in (key, query)
        if one.matrix is not None
    ]
    return Projection(torch.cat([key.matrix, query.matrix]), torch.cat(biases))


def are_stacked(key: Projection, query: Projection) -> bool:
    """Whether keys and queries of the same positions are projected at once."""
    dims = {0 if one.matrix is None else one.matrix.dim() for one in (key, query)}
    return key is query or (len(dims) == 1 and 3 not in dims)


def split_gradients(grads: Projection, key: Projection, query: Projection) -> Iterator[Tensor | None]:
    """Split the gradients of `stack_projections` into those of its matrices and biases, in order."""
    start = 0
    for one in (key, query):
        end = start if one.matrix is None else start + len(one.matrix)
        for part, grad in zip(one[:2], grads[:2], strict=True):
            yield None if part is None or grad is None else grad[start:end]
        start = end


def select_queries(plan: RowPlan, rows: Tensor) -> Tensor | None:
    """Return the queries `(b, h, d, n)` among the rows."""
    return rows[:, rows.shape[1] - plan.queries :].unflatten(1, (plan.heads, -1)) if plan.queries else None


def project_slots(
    operator: Operator, query: Tensor, summary: Summary, matrix: Tensor | None, bias: Tensor | None
) -> Tensor:
    """Return slots `(b, g, s, p)`, divided and projected; g is 1 where heads add up. A bias is a last slot."""
    slots = _divide_slots(operator, query, summary, matrix).to(query.dtype)
    return _join_slots(slots, None, matrix is not None, bias)


def _divide_slots(operator: Operator, query: Tensor, summary: Summary, matrix: Tensor | None) -> Tensor:
    """Return slots `(b, h, s, p)`, divided and projected."""
    summary = summary if matrix is None else summary.project_values(matrix)
    return summary.values / operator.per(query, summary)


def _join_slots(slots: Tensor, last: Tensor | None, add_up: bool, bias: Tensor | None) -> Tensor:
    """Return slots `(b, g, s, p)` of heads that perhaps add up; a bias, and `last` `(b, h, 1, p)`, are a last slot."""
    if add_up:
        slots = slots.flatten(1, 2)[:, None]
        last = None if last is None else last.sum(1, keepdim=True)
    if bias is not None:
        bias = bias.to(slots.dtype).unflatten(0, (slots.shape[1], 1, -1)).expand(slots.shape[0], -1, -1, -1)
        last = bias if last is None else last + bias
    return slots if last is None else torch.cat([slots, last], 2)


def prepare_slots(
    operator: Operator, query: Tensor, summary: Summary, matrix: Tensor | None, bias: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Return the slots `(b, g, s, p)` that kernels combine, and the sums `(b, features)` of `Coefficients`, or None."""
    slots, last, sums, kind = _divide_slots(operator, query, summary, matrix), None, None, operator.coefficients
    if isinstance(kind, Quotient):
        sums = kind.scaled(summary.weights).flatten(1)
    elif kind in (centred, magnitude_aware):
        scale = query.shape[2] ** -0.5
        means = scale * summary.weights[:, :, :-1] / summary.count.clamp_min(1)
        if kind is centred:  # qᵀ (s V) + (1 - qᵀ u) v̄ = qᵀ (s V - u v̄) + v̄
            last = slots[:, :, -1:]
            slots = scale * slots[:, :, :-1] - means * last
        else:
            sums = means.flatten(1)
    return _join_slots(slots, last, matrix is not None, bias), sums


def respond_by(
    plan: ResponsePlan, positions: Tensor, query: Tensor, summary: Summary, matrix: Tensor | None, bias: Tensor | None
) -> Tensor:
    """Respond as `autograd.respond_from` does, by a kernel if one runs, else by a product of torch."""
    operator = plan.operator
    for kernel in fitting_kernels(plan, query, summary):
        if kernel.names and kernel.why_not(operator, query, summary.values) is None:
            slots, sums = prepare_slots(operator, query, summary, matrix, bias)
            return cast(Tensor, kernel.run(operator, query, slots, sums, in_channels_last(positions)))
    slots = project_slots(operator, query, summary, matrix, bias)
    return combine(slots, operator.coefficients(query, summary), positions, bias is not None)


def fitting_kernels(plan: ResponsePlan, query: Tensor, summary: Summary) -> tuple[kernels.Kernel, ...]:
    """Return the kernels of a plan if there are as many slots as coefficients, beyond which they would read."""
    fits = plan.kernels and summary.values.shape[2] == _count_coefficients(plan.operator, query.shape[2])
    return plan.kernels if fits else ()


def _count_coefficients(operator: Operator, channels: int) -> int:
    """Return the coefficients of a query with so many channels, of operators whose features kernels compute."""
    kind = operator.coefficients
    doubled = kind is query_and_one or _map_of(kind) == kernels.PAIR
    return channels * (1 + doubled) + (kind in (centred, magnitude_aware))


def _map_of(function: object) -> int | None:
    """Return the number of the features of a basis or of coefficients; None if kernels do not compute them."""
    return _MAPS.get(function.map if isinstance(function, Features | Quotient) else function)


# ---- features of keys and of queries ---------------------------------------------------------------------------------
def why_not_multiplied(plan: object, positions: Tensor, *others: Tensor | None) -> str | None:
    """Return why kernels do not multiply positions `(b, c, n)`, or queries `(b, h, d, n)`, in float32, or None."""
    if text := kernels.why_not(positions, *others, ordered=False, multiplied=positions):
        return text
    if positions.dtype != torch.float32 and positions.dtype in kernels.multiplied_by_processor():
        return f"the processor multiplies {positions.dtype}, with which torch is faster"
    if 1 not in positions.stride()[-2:]:
        return f"strides {positions.stride()}, neither channels nor positions contiguous"
    return None


def why_not_slots(plan: RowPlan, positions: Tensor, values: Tensor, *projections: Tensor | None) -> str | None:
    """Return why `sum_slots` does not run, or None."""
    # The equations give a basis ones, one a head, where the operator says that it does not read keys.
    if not plan.keys:
        return "no keys are read"
    return why_not_multiplied(plan, positions, *projections) or why_not_multiplied(plan, values)


def project(positions: Tensor, matrix: Tensor | None, bias: Tensor | None) -> Tensor | None:
    """Return `matrix · positions + bias`, `(b, rows, n)`; None if no kernel does it, or a derivative is wanted."""
    if matrix is None or not are_free(positions, matrix, bias) or why_not_multiplied(None, positions, matrix, bias):
        return None
    options = (None, 0, matrix.shape[:-1].numel(), 1, 1, _MAPS[identity], False)
    rows = kernels.call("project_and_summarize", positions, None, _floats(matrix), _floats(bias), *options)[0]
    return cast(Tensor, rows)


def sum_slots(
    plan: RowPlan, positions: Tensor, values: Tensor, valid: Tensor, matrix: Tensor | None, bias: Tensor | None
) -> Sums:
    """Project and sum as `autograd` does by torch's products; the rows are not returned."""
    basis, heads = plan.operator.basis, plan.heads
    projected, groups, has_one = 0 if matrix is None else plan.queries, 1 if plan.shared else heads, _has_one(basis)
    rows, *sums, totals = kernels.call(
        "project_and_summarize",
        positions,
        values if plan.apart else None,
        _floats(matrix),
        _floats(bias),
        None if plan.complete else _floats(valid[:, 0, 0]),
        plan.keys,
        projected,
        heads,
        groups,
        _map_of(basis),
        has_one,
    )
    rows = positions if matrix is None else rows
    values, weights, peak = (part.unflatten(1, (heads, -1)) for part in sums)
    weights, count = weights[..., None], valid.sum(-1, keepdim=True)
    if has_one:
        last = totals[:, None].expand(-1, heads, -1) if plan.shared else totals.unflatten(1, (heads, -1))
        values = torch.cat([values, last[:, :, None]], 2)
        weights = torch.cat([weights, count.expand(-1, heads, -1, -1)], 2)
    query = rows.unflatten(1, (heads, -1)) if plan.queries else None
    return query, values, weights, count, peak[..., None] if basis is exponentials else None, None


def _has_one(basis: object) -> bool:
    """Whether the last slot of a basis has the weight 1."""
    return isinstance(basis, Features) and basis.one


def _floats(tensor: Tensor | None) -> Tensor | None:
    """Return a small tensor in float32, which kernels compute in, and contiguous."""
    return None if tensor is None else tensor.float().contiguous()


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
    if _has_one(basis):
        last = grad_values[:, :, -1]  # (b, h, c)
        grad_totals = _floats(last.sum(1) if plan.shared else last.flatten(1))
        grad_values, grad_weights = grad_values[:, :, :-1], grad_weights[:, :, :-1]
    grad_positions, of_values, grad_matrix, grad_bias = kernels.call(
        "project_and_summarize_backward",
        positions,
        values if plan.apart else None,
        _floats(matrix),
        _floats(bias),
        None if plan.complete else _floats(valid[:, 0, 0]),
        None if peak is None else _floats(peak.flatten(1)),
        _floats(grad_values.flatten(1, 2)),
        _floats(grad_weights.flatten(1)),
        grad_totals,
        None if grad_queries is None else _in_either_order(grad_queries.flatten(1, 2)),
        plan.keys,
        plan.heads,
        _map_of(basis),
        plan.same,
        wanted,
    )
    grad_matrix = None if matrix is None else grad_matrix.view(matrix.shape).to(matrix.dtype)
    grad_bias = None if bias is None else grad_bias.to(bias.dtype)
    return grad_positions if wanted else None, of_values if plan.apart else None, grad_matrix, grad_bias


def combine_slots(operator: Operator, query: Tensor, slots: Tensor, sums: Tensor | None, wide: bool) -> Tensor:
    """Combine slots `(b, g, s, p)` by queries `(b, h, d, m)`: `(b, g, p, m)`, with contiguous channels if `wide`."""
    options = _coefficients_of(operator, query)
    rows = _in_either_order(query.flatten(1, 2))
    response = kernels.call("combine_slots", rows, _floats(slots), _floats(sums), *options, wide)
    return cast(Tensor, response.unflatten(1, (slots.shape[1], -1)))


def gradients_of_combination(
    operator: Operator, grad_output: Tensor, query: Tensor, slots: Tensor, sums: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the gradients of queries `(b, h, d, m)`, of slots `(b, g, s, p)`, and of the sums if there are some."""
    grad_rows, grad_slots, grad_sums = kernels.call(
        "combine_slots_backward",
        _in_either_order(query.flatten(1, 2)),
        _floats(slots),
        _floats(sums),
        _in_either_order(grad_output.flatten(1, 2)),
        *_coefficients_of(operator, query),
    )
    grad_query = grad_rows.unflatten(1, (query.shape[1], -1))
    return grad_query, grad_slots.to(slots.dtype), None if sums is None else grad_sums.to(sums.dtype)


def _coefficients_of(operator: Operator, query: Tensor) -> tuple[int, int | None, int, float]:
    """Return the heads, the numbers of features and of their factor, and what is added to its divisor."""
    kind, heads = operator.coefficients, query.shape[1]
    if isinstance(kind, Quotient):
        return heads, _map_of(kind), _OF_SUM, kind.epsilon
    if kind is magnitude_aware:
        return heads, _map_of(kind), _OF_MAGNITUDE, MALA_EPSILON
    return heads, _map_of(kind), 0, 0.0


def _in_either_order(positions: Tensor) -> Tensor:
    """Return positions whose channels or positions are contiguous, copied if they are not."""
    # `contiguous` would return a single position of a slice, which counts as contiguous whatever its strides.
    return positions if 1 in positions.stride()[1:] else positions.clone(memory_format=torch.contiguous_format)
