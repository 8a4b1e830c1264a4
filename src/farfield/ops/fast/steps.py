"""Kernels of the two steps of operators with a basis: summing positions into slots, and combining slots to responses.

A block of positions is read once, in a cache. Each function is a form of one in `autograd`; `table` says for which
operators, by the functions of an operator and never its name.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from farfield.ops.fast import kernels
from farfield.ops.fast.combination import combine
from farfield.ops.grid import in_channels_last
from farfield.ops.modes import are_free
from farfield.ops.projection import Projection
from farfield.ops.slots import Summary
from farfield.ops.table import Operator, exponentials, one_and_key, query_and_one, softmax_over_channels

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
    kernel: kernels.Kernel | None = None  # projects and sums; None if torch does


class ResponsePlan(NamedTuple):
    """How queries respond to slots: the operator, and the kernels that may run, in order."""

    operator: Operator
    kernels: tuple[kernels.Kernel, ...] = ()


_Sums = tuple[Tensor | None, Tensor, Tensor, Tensor, Tensor | None, Tensor | None]


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
    if matrix is not None:
        summary = summary.project_values(matrix)
    slots = (summary.values / operator.per(query, summary)).to(query.dtype)
    if matrix is not None:
        slots = slots.flatten(1, 2)[:, None]
    if bias is None:
        return slots
    last = bias.to(slots.dtype).unflatten(0, (slots.shape[1], 1, -1)).expand(slots.shape[0], -1, -1, -1)
    return torch.cat([slots, last], 2)


def respond_by(
    plan: ResponsePlan, positions: Tensor, query: Tensor, summary: Summary, matrix: Tensor | None, bias: Tensor | None
) -> Tensor:
    """Respond as `autograd.respond_from` does, by a kernel if one runs, else by a product of torch."""
    slots = project_slots(plan.operator, query, summary, matrix, bias)
    # A kernel would read beyond coefficients that are not as many as the slots; one more slot is the bias.
    fits = slots.shape[2] - query.shape[1] * query.shape[2] // slots.shape[1] in (0, 1)
    for kernel in plan.kernels if fits else ():
        if kernel.names and kernel.why_not(plan.operator, query, slots) is None:
            return cast(Tensor, kernel.run(plan.operator, query, slots, in_channels_last(positions)))
    return combine(slots, plan.operator.coefficients(query, summary), positions)


# ---- scores: few rows, whose weights are 1 or the rows themselves ----------------------------------------------------
def are_few(rows: int, channels: int) -> bool:
    """Whether projecting this number of rows takes about as long as reading the positions from memory."""
    return 0 < rows <= _ROWS and 8 * rows <= channels


def are_small(rows: int, positions: Tensor) -> bool:
    """Whether projected rows are so small beside the positions that they are kept and not recomputed."""
    return 32 * rows <= positions.shape[1]


def why_not_scores(plan: RowPlan, positions: Tensor, *projections: Tensor | None) -> str | None:
    """Return why `sum_scores` does not run, or None."""
    matrices = [each for each in projections[::2] if each is not None]
    if not matrices or plan.keys != plan.heads * (plan.operator.basis is one_and_key):
        return "keys are not scores"
    if not are_few(sum(map(len, matrices)), positions.shape[1]):
        return kernels.MANY_SCORES
    return kernels.why_not(positions, *projections, multiplied=positions)


def sum_scores(plan: RowPlan, positions: Tensor, valid: Tensor, matrix: Tensor, bias: Tensor | None) -> _Sums:
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


def gradients_of_scores(operator: Operator, grad_output: Tensor, query: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
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
    return grad_query.view(query.shape).to(query.dtype), grad_slots.to(slots.dtype)


def expand_batch(matrix: Tensor, batch: int) -> Tensor:
    """Return the matrix once for each sample."""
    return matrix.expand(batch, -1, -1).contiguous()


# ---- keys and their exponentials, queries and their softmax ----------------------------------------------------------
def why_not_multiplied(plan: object, positions: Tensor, *others: Tensor | None) -> str | None:
    """Return why kernels do not multiply positions `(b, c, n)`, or queries `(b, h, d, n)`, in float32, or None."""
    if text := kernels.why_not(positions, *others, ordered=False, multiplied=positions):
        return text
    if positions.dtype != torch.float32 and positions.dtype in kernels.multiplied_by_processor():
        return f"the processor multiplies {positions.dtype}, with which torch is faster"
    if 1 not in positions.stride()[-2:]:
        return f"strides {positions.stride()}, neither channels nor positions contiguous"
    return None


def project(positions: Tensor, matrix: Tensor | None, bias: Tensor | None) -> Tensor | None:
    """Return `matrix · positions + bias`, `(b, rows, n)`; None if no kernel does it, or a derivative is wanted."""
    if matrix is None or not are_free(positions, matrix, bias) or why_not_multiplied(None, positions, matrix, bias):
        return None
    options = (None, 0, len(matrix), 1, False)
    rows = kernels.call("project_and_summarize", positions, _floats(matrix), _floats(bias), *options)[0]
    return cast(Tensor, rows)


def sum_slots(plan: RowPlan, positions: Tensor, valid: Tensor, matrix: Tensor | None, bias: Tensor | None) -> _Sums:
    """Project and sum as `autograd` does by torch's products; the rows are not returned."""
    weighs_exponentials, groups = plan.operator.basis is exponentials, 1 if plan.shared else plan.heads
    projected = 0 if matrix is None else plan.queries
    options = (plan.keys, projected, groups, weighs_exponentials)
    rows, *sums = kernels.call(
        "project_and_summarize",
        positions,
        _floats(matrix),
        _floats(bias),
        None if plan.complete else _floats(valid[:, 0, 0]),
        *options,
    )
    rows = positions if matrix is None else rows
    values, weights, peak = (part.unflatten(1, (plan.heads, -1)) for part in sums)
    query = rows.unflatten(1, (plan.heads, -1)) if plan.queries else None
    peak = peak[..., None] if weighs_exponentials else None
    return query, values, weights[..., None], valid.sum(-1, keepdim=True), peak, None


def _floats(tensor: Tensor | None) -> Tensor | None:
    """Return a small tensor in float32, which kernels compute in, and contiguous."""
    return None if tensor is None else tensor.float().contiguous()


def gradients_of_slots(
    plan: RowPlan,
    positions: Tensor,
    valid: Tensor,
    matrix: Tensor | None,
    bias: Tensor | None,
    peak: Tensor | None,
    wanted: bool,
    grads: tuple[Tensor | None, Tensor, Tensor],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return the gradients of positions (if wanted), matrix and bias, from those of queries, values, weights."""
    grad_queries, grad_values, grad_weights = grads
    grad_positions, grad_matrix, grad_bias = kernels.call(
        "project_and_summarize_backward",
        positions,
        _floats(matrix),
        _floats(bias),
        None if plan.complete else _floats(valid[:, 0, 0]),
        None if peak is None else _floats(peak.flatten(1)),
        _floats(grad_values.flatten(1, 2)),
        _floats(grad_weights.flatten(1)),
        None if grad_queries is None else _in_either_order(grad_queries.flatten(1, 2)),
        plan.same,
        wanted,
    )
    grad_matrix = None if matrix is None else grad_matrix.to(matrix.dtype)
    return grad_positions if wanted else None, grad_matrix, None if bias is None else grad_bias.to(bias.dtype)


def combine_slots(operator: Operator, query: Tensor, slots: Tensor, wide: bool) -> Tensor:
    """Combine slots `(b, g, s, p)` by queries `(b, h, d, m)`: `(b, g, p, m)`, with contiguous channels if `wide`."""
    rows, softmax = query.flatten(1, 2), operator.coefficients is softmax_over_channels
    response = kernels.call("combine_slots", rows, _floats(slots), query.shape[1], softmax, wide)
    return cast(Tensor, response.unflatten(1, (slots.shape[1], -1)))


def gradients_of_combination(
    operator: Operator, grad_output: Tensor, query: Tensor, slots: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradients of queries `(b, h, d, m)` and slots `(b, g, s, p)`."""
    rows, softmax = query.flatten(1, 2), operator.coefficients is softmax_over_channels
    grad_rows, grad_slots = kernels.call(
        "combine_slots_backward",
        rows,
        _floats(slots),
        _in_either_order(grad_output.flatten(1, 2)),
        query.shape[1],
        softmax,
    )
    return grad_rows.unflatten(1, (query.shape[1], -1)), grad_slots.to(slots.dtype)


def _in_either_order(positions: Tensor) -> Tensor:
    """Return positions whose channels or positions are contiguous, copied if they are not."""
    # `contiguous` would return a single position of a slice, which counts as contiguous whatever its strides.
    return positions if 1 in positions.stride()[1:] else positions.clone(memory_format=torch.contiguous_format)
