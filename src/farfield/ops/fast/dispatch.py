"""The one place that chooses how attention is computed: by the equations, or by what gives the same in less.

`PLAIN` are the equations. `FAST` keeps less for the backward pass, takes the cheaper order of products (a recorded
graph is of one order, or it would be compiled anew for other sizes), writes each grid once, and runs compiled kernels
where they are built. `FARFIELD_FAST=0` switches all of it off.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from typing import NamedTuple, cast

from torch import Tensor

from farfield.ops.call import Call, by_head, project_keys
from farfield.ops.fast import kernel_attention
from farfield.ops.fast.autograd import add_product, read_and_summarize, respond_from
from farfield.ops.fast.axes import outer_sum, sum_axes
from farfield.ops.fast.order import cheaper_order, has_orders
from farfield.ops.grid import Cells, Gathered, Place, add_axes, axis_sums, real_counts
from farfield.ops.modes import full_precision, is_recorded
from farfield.ops.projection import split_heads
from farfield.ops.slots import Summary
from farfield.ops.summary import respond, summarize

SWITCH = "FARFIELD_FAST"


class Steps(NamedTuple):
    """The functions that attention is composed of.

    Attributes:
        attend: Self-attention as a whole, `(call, grid) -> grid` or None; None in its place leaves it to the others.
        reorder: `(call, query, key, value) -> call`, with an operator of the same responses.
        gather: `(cells, grid, mask, place) -> Gathered`.
        summarize: `(call, gathered, values, complete, asks) -> (queries or None, summary)`.
        respond: `(call, asking, query, summary, scale, matrix, bias) -> responses (b, out, m)`.
        add_responses: `(call, grid, asking, query, summary, scale, out) -> out`, plus the projected responses.
        scatter: `(cells, responses, size, place) -> grid`.
    """

    attend: Callable[[Call, Tensor], Tensor | None] | None
    reorder: Callable[[Call, Tensor, Tensor, Tensor], Call]
    gather: Callable[[Cells, Tensor, Tensor | None, Place | None], Gathered]
    summarize: Callable[[Call, Gathered, Tensor, bool, bool], tuple[Tensor | None, Summary]]
    respond: Callable[[Call, Gathered, Tensor, Summary, float, Tensor | None, Tensor | None], Tensor]
    add_responses: Callable[[Call, Tensor, Gathered, Tensor, Summary, float, Tensor], Tensor]
    scatter: Callable[[Cells, Tensor, Sequence[int], Place | None], Tensor]


def choose_steps() -> Steps:
    """`PLAIN` while what runs becomes a graph, which takes torch's own operations, or if `FAST` is switched off."""
    return PLAIN if is_recorded() or os.environ.get(SWITCH) == "0" else FAST


# ---- the equations ---------------------------------------------------------------------------------------------------
def keep_order(call: Call, query: Tensor, key: Tensor, value: Tensor) -> Call:
    """The operator's own order of products."""
    return call


def gather(cells: Cells, grid: Tensor, mask: Tensor | None, place: Place | None) -> Gathered:
    """Gather positions of a grid."""
    return cells.gather(grid, mask, place)


def scatter(cells: Cells, responses: Tensor, size: Sequence[int], place: Place | None) -> Tensor:
    """Scatter responses into a grid."""
    return cells.scatter(responses, size, place)


def plain_summarize(
    call: Call, gathered: Gathered, values: Tensor, complete: bool, asks: bool
) -> tuple[Tensor | None, Summary]:
    """Project the keys and summarize; every head summarizes all channels where values are projected later."""
    key, shared = project_keys(call, gathered), call.value.matrix is not None
    same = values is gathered.cells and call.operator.reads_keys and call.key.matrix is None and not shared
    value = key if same else values[:, None] if shared else split_heads(values, call.heads)
    return None, summarize(call.operator, key, value, gathered.real[:, None], complete)


def plain_respond(
    call: Call,
    asking: Gathered,
    query: Tensor,
    summary: Summary,
    scale: float,
    matrix: Tensor | None,
    bias: Tensor | None,
) -> Tensor:
    """Respond; heads stand side by side, or are projected, by a matrix that acts on the slots, and added up."""
    if matrix is None:
        responses = respond(call.operator, query, summary, scale).flatten(1, 2)
    else:
        responses = respond(call.operator, query, summary.map_values(matrix), scale).sum(1)
    return responses if bias is None else responses + bias[:, None].to(responses.dtype)


def plain_add_responses(
    call: Call, grid: Tensor, asking: Gathered, query: Tensor, summary: Summary, scale: float, out: Tensor
) -> Tensor:
    """Respond, project, scatter and add."""
    responses = plain_respond(call, asking, query, summary, scale, by_head(call, query.dtype), None)
    responses = call.operator.asks.normalized(responses, asking.real, grid.dim() - 2)
    return out + call.operator.asks.scatter(responses.to(out.dtype), grid.shape[2:], None)


# ---- the same in less ------------------------------------------------------------------------------------------------
def fast_attend(call: Call, grid: Tensor) -> Tensor | None:
    """Attend in one call of a kernel, where there is one and nothing is projected or normed."""
    return kernel_attention.attend(call, grid) if call.is_bare else None


def reorder(call: Call, query: Tensor, key: Tensor, value: Tensor) -> Call:
    """V (KᵀQ) where that is cheaper than (V Kᵀ) Q."""
    if not has_orders(call.operator):
        return call
    work = call.work(math.prod(query.shape[2:]), math.prod(key.shape[2:]), query.shape[1], value.shape[1])
    return call._replace(operator=cheaper_order(call.operator, work))


def fast_gather(cells: Cells, grid: Tensor, mask: Tensor | None, place: Place | None) -> Gathered:
    """Gather; sums along axes of a whole grid read it once."""
    if cells.gather is not axis_sums or place is not None:
        return cells.gather(grid, mask, place)
    return Gathered(sum_axes(grid, mask), real_counts(grid, mask))


def fast_scatter(cells: Cells, responses: Tensor, size: Sequence[int], place: Place | None) -> Tensor:
    """Scatter; the gradient of an outer sum reads what is upon it once."""
    if cells.scatter is not add_axes or place is not None:
        return cells.scatter(responses, size, place)
    return outer_sum(responses, size)


def fast_summarize(
    call: Call, gathered: Gathered, values: Tensor, complete: bool, asks: bool
) -> tuple[Tensor | None, Summary]:
    """Project and summarize, keeping the positions alone for the backward pass, and their queries where they ask."""
    operator, (cells, real) = call.operator, gathered
    if values is not cells or operator.basis is None or not operator.answers.side_by_side:
        return plain_summarize(call, gathered, values, complete, asks)
    query = call.query if asks and (call.key.matrix is None) == (call.query.matrix is None) else None
    options = {"shared": call.value.matrix is not None, "complete": complete}
    return read_and_summarize(operator, call.heads, cells, real[:, None], call.key, query, **options)


def fast_respond(
    call: Call,
    asking: Gathered,
    query: Tensor,
    summary: Summary,
    scale: float,
    matrix: Tensor | None,
    bias: Tensor | None,
) -> Tensor:
    """Respond, keeping the positions alone for the backward pass; the bias is one slot more."""
    operator = call.operator
    if operator.basis is None or not operator.asks.side_by_side:
        return plain_respond(call, asking, query, summary, scale, matrix, bias)
    return respond_from(operator, asking.cells, call.query, query, summary, matrix, bias).flatten(1, 2)


def fast_add_responses(
    call: Call, grid: Tensor, asking: Gathered, query: Tensor, summary: Summary, scale: float, out: Tensor
) -> Tensor:
    """Add projected responses: in one product with the slots, or one vector an axis, in place."""
    operator, matrix = call.operator, cast(Tensor, call.output.matrix)
    if operator.asks.side_by_side:
        summary = summary.map_values(by_head(call, matrix.dtype))
        slots = (summary.values / operator.per(query, summary)).flatten(1, 2)
        return add_product(out, slots, operator.coefficients(query, summary).flatten(1, 2))
    responses = respond(operator, query, summary, scale).flatten(1, 2)
    responses = operator.asks.normalized(responses, asking.real, grid.dim() - 2)
    with full_precision(out):
        vectors, size = matrix.to(responses.dtype) @ responses, grid.shape[2:]
        for axis, vector in enumerate(vectors.split(list(size), -1)):
            out.add_(vector.unflatten(-1, [length if other == axis else 1 for other, length in enumerate(size)]))
    return out


PLAIN = Steps(None, keep_order, gather, plain_summarize, plain_respond, plain_add_responses, scatter)
FAST = Steps(fast_attend, reorder, fast_gather, fast_summarize, fast_respond, fast_add_responses, fast_scatter)
