"""Kernels of the two steps of operators with a basis: summing positions into slots, and combining slots to responses.

A block of positions is read once, in a cache; those of scores, which are few rows, read positions once, from memory.
`table` says for which operators, by the functions of an operator and never its name; the backward pass is `gradients`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from farfield.ops.fast import kernels
from farfield.ops.grid import in_channels_last
from farfield.ops.projection import Call, Projection, by_head
from farfield.ops.slots import (
    MALA_EPSILON,
    Features,
    Quotient,
    Summary,
    centred,
    elu_plus_one,
    exponentials,
    identity,
    keys,
    magnitude_aware,
    one_and_key,
    position,
    queries,
    query_and_one,
    relu,
    softmax_over_channels,
    softmax_pair,
)
from farfield.ops.table import Operator
from farfield.ops.work import is_a_slot

# Features of keys and queries that kernels compute, as `Map` of cpu/products.h numbers them.
MAPS: dict[object, int] = {
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
# With more rows than these, MACs and not reads of memory take the time, and a matrix product is faster.
_ROWS = 4


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


class Coefficients(NamedTuple):
    """How kernels compute the coefficients of a query, by the numbers of cpu/products.h, and how many there are."""

    map: int | None
    factor: int
    epsilon: float  # added to the divisor of the factor
    each: int  # of a channel
    others: int


class ResponsePlan(NamedTuple):
    """How queries respond to slots."""

    operator: Operator
    coefficients: Coefficients
    run: Callable[..., Tensor]  # `combine_slots` or `multiply_slots`
    kernels: tuple[kernels.Kernel, ...]  # whose gradients may run, in order


Sums = tuple[Tensor | None, Tensor, Tensor, Tensor, Tensor | None, Tensor | None]


# ---- positions to slots ----------------------------------------------------------------------------------------------
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
    scores = matrix.float().expand(batch, -1, -1).contiguous()
    rows, sums = kernels.call("project_and_sum", positions, scores, offset, None)
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
    query = rows[:, rows.shape[1] - plan.queries :].unflatten(1, (heads, -1)) if plan.queries else None
    return query, values, weights, count, None, rows


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


def sum_slots(
    plan: RowPlan, positions: Tensor, values: Tensor, valid: Tensor, matrix: Tensor | None, bias: Tensor | None
) -> Sums:
    """Project and sum as `autograd` does by torch's products; the rows are not returned."""
    basis, heads = plan.operator.basis, plan.heads
    number, has_one = (basis.map, basis.one) if isinstance(basis, Features) else (basis, False)
    rows, *sums, totals = kernels.call(
        "project_and_summarize",
        positions,
        values if plan.apart else None,
        floats(matrix),
        floats(bias),
        None if plan.complete else floats(valid[:, 0, 0]),
        plan.keys,
        0 if matrix is None else plan.queries,
        heads,
        1 if plan.shared else heads,
        MAPS[number],
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


def floats(tensor: Tensor | None) -> Tensor | None:
    """Return a small tensor in float32, which kernels compute in, and contiguous."""
    return None if tensor is None else tensor.float().contiguous()


# ---- slots to responses ----------------------------------------------------------------------------------------------
def coefficients_of(kind: object) -> Coefficients:
    """Return how kernels compute the coefficients of an operator."""
    number = MAPS.get(kind.map if isinstance(kind, Quotient) else kind)
    each = 2 if kind is query_and_one or number == kernels.PAIR else 1
    if isinstance(kind, Quotient):
        return Coefficients(number, _OF_SUM, kind.epsilon, each, 0)
    if kind is magnitude_aware:
        return Coefficients(number, _OF_MAGNITUDE, MALA_EPSILON, each, 1)
    return Coefficients(number, 0, 0.0, each, int(kind is centred))


def prepare_slots(
    operator: Operator,
    query: Tensor,
    summary: Summary,
    matrix: Tensor | None,
    bias: Tensor | None,
    *,
    by_kernel: bool,
) -> tuple[Tensor, Tensor | None]:
    """Return slots `(b, g, s, p)`, divided and projected; g is 1 where heads add up, and a bias is a last slot.

    For kernels, also the sums `(b, features)` of their `Coefficients` if they have some.
    """
    summary = summary if matrix is None else summary.project_values(matrix)
    slots, last, sums = summary.values / operator.per(query, summary), None, None
    kind = operator.coefficients
    if not by_kernel:
        slots = slots.to(query.dtype)
    elif isinstance(kind, Quotient):
        sums = kind.scaled(summary.weights).flatten(1)
    elif kind in (centred, magnitude_aware):
        scale = query.shape[2] ** -0.5
        means = scale * summary.weights[:, :, :-1] / position(query, summary)
        if kind is centred:  # qᵀ (s V) + (1 - qᵀ u) v̄ = qᵀ (s V - u v̄) + v̄
            last = slots[:, :, -1:]
            slots = scale * slots[:, :, :-1] - means * last
        else:
            sums = means.flatten(1)
    if matrix is not None:
        slots = slots.flatten(1, 2)[:, None]
        last = None if last is None else last.sum(1, keepdim=True)
    if bias is not None:
        bias = bias.to(slots.dtype).unflatten(0, (slots.shape[1], 1, -1)).expand(slots.shape[0], -1, -1, -1)
        last = bias if last is None else last + bias
    return slots if last is None else torch.cat([slots, last], 2), sums


def combine_slots(
    plan: ResponsePlan, positions: Tensor, query: Tensor, summary: Summary, matrix: Tensor | None, bias: Tensor | None
) -> Tensor:
    """Respond to queries `(b, h, d, m)` as `autograd.respond_from` does, by a kernel."""
    slots, sums = prepare_slots(plan.operator, query, summary, matrix, bias, by_kernel=True)
    options = query.shape[1], *plan.coefficients[:3], in_channels_last(positions)
    rows = in_either_order(query.flatten(1, 2))
    response = kernels.call("combine_slots", rows, floats(slots), floats(sums), *options)
    return cast(Tensor, response.unflatten(1, (slots.shape[1], -1)))


def multiply_slots(
    plan: ResponsePlan, positions: Tensor, query: Tensor, summary: Summary, matrix: Tensor | None, bias: Tensor | None
) -> Tensor:
    """Respond to queries `(b, h, d, m)` as `autograd.respond_from` does, by a product of torch."""
    coefficients = plan.operator.coefficients(query, summary)
    slots, _ = prepare_slots(plan.operator, query, summary, matrix, bias, by_kernel=False)
    batch, wide = slots.shape[:2], in_channels_last(positions)
    rows = coefficients.shape[1] * coefficients.shape[2] // batch[1]
    slots, factors = slots.flatten(0, 1), coefficients.reshape(batch.numel(), rows, coefficients.shape[3])
    if bias is not None and not is_a_slot(factors.shape[1], slots.shape[2]):
        last, slots = slots[:, -1:], slots[:, :-1]
        response = torch.baddbmm(last, factors.mT, slots).mT if wide else torch.baddbmm(last.mT, slots.mT, factors)
    else:
        factors = factors if bias is None else F.pad(factors, (0, 0, 0, 1), value=1.0)
        response = torch.bmm(factors.mT, slots).mT if wide else torch.bmm(slots.mT, factors)
    return response.view(*batch, *response.shape[1:])


def in_either_order(positions: Tensor) -> Tensor:
    """Return positions whose channels or positions are contiguous, copied if they are not."""
    # `contiguous` would return a single position of a slice, which counts as contiguous whatever its strides.
    return positions if 1 in positions.stride()[1:] else positions.clone(memory_format=torch.contiguous_format)


def add_product(out: Tensor, slots: Tensor, coefficients: Tensor) -> Tensor:
    """Add slots `(b, r, d)` combined by coefficients `(b, r, n)` to a grid `(b, d, *n)`, in its memory format."""
    positions, slots, coefficients = out.flatten(2), slots.to(out.dtype), coefficients.to(out.dtype)
    if in_channels_last(out):
        return torch.baddbmm(positions.mT, coefficients.mT, slots).mT.unflatten(2, out.shape[2:])
    return torch.baddbmm(positions, slots.mT, coefficients).unflatten(2, out.shape[2:])


def add_responses(call: Call, query: Tensor, summary: Summary, out: Tensor) -> Tensor:
    """Add projected responses to a grid, as one product with the slots; for an operator with a basis."""
    operator, matrix = call.operator, cast(Tensor, call.output.matrix)
    summary = summary.project_values(by_head(call, matrix.dtype))
    slots = (summary.values / operator.per(query, summary)).flatten(1, 2)
    return add_product(out, slots, operator.coefficients(query, summary).flatten(1, 2))
