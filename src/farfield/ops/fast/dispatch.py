"""Faster steps of attention, in less time or memory than the equations take; `engine` composes them.

Less is kept for the backward pass, products are taken in the cheaper order, a grid is read and written once, and
compiled kernels run where they are built. While torch compiles, exports or traces, none of these steps runs: the
cheaper order depends on the sizes, and a graph is for all sizes.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, cast

from torch import Tensor

from farfield.ops.call import Call, by_head
from farfield.ops.fast import kernel_attention, kernels
from farfield.ops.fast.autograd import project_and_summarize, respond_from
from farfield.ops.fast.axes import outer_sum, sum_axes
from farfield.ops.fast.combination import add_product
from farfield.ops.fast.order import cheaper_order, has_orders
from farfield.ops.grid import (
    Gathered,
    Place,
    Positions,
    add_axes,
    axis_sums,
    in_layout_of,
    laid_out_for,
    valid_counts,
)
from farfield.ops.slots import Summary

# What projected responses are added to: a function of their bias and of their grid `(b, out, *m)`, each perhaps None,
# to a grid that contains both. Where the responses are None, they are added to what it returns, perhaps in place.
Target = Callable[[Tensor | None, Tensor | None], Tensor]


class FastSteps(NamedTuple):
    """Faster steps in place of the equations; where a step returns None, the equations run.

    Attributes:
        attend: Self-attention as a whole, `(call, grid, target) -> grid` or None; see `Target`.
        reorder: `(call, query, key, value) -> call`, with an operator that has the same responses for fewer MACs.
        prepare: `(call) -> call`, with an operator that gathers and scatters in less time.
        summarize: `(call, gathered, values, complete, itself) -> (queries or None, summary)` or None; with `itself` the
            queries come from the same positions and may be projected too.
        respond: `(call, query_positions, query, summary, matrix, bias) -> responses (b, out, m)` or None.
        add_responses: `(call, query, summary, out) -> out`, with the projected responses added; the operator has a
            basis and queries at all positions.
    """

    attend: Callable[[Call, Tensor, Target | None], Tensor | None]
    reorder: Callable[[Call, Tensor, Tensor, Tensor], Call]
    prepare: Callable[[Call], Call]
    summarize: Callable[[Call, Gathered, Tensor, bool, bool], tuple[Tensor | None, Summary] | None]
    respond: Callable[[Call, Gathered, Tensor, Summary, Tensor | None, Tensor | None], Tensor | None]
    add_responses: Callable[[Call, Tensor, Summary, Tensor], Tensor]


def attend(call: Call, grid: Tensor, target: Target | None) -> Tensor | None:
    """Attend by a kernel: in one call where nothing is projected or normed; else in a few, in inference."""
    if call.runs_projections or not kernels.run():
        return None
    if call.is_operator_alone:
        return kernel_attention.attend(call, grid)
    bias, size = call.output.bias, grid.shape[2:]
    vectors = kernel_attention.attend_means(call, grid)
    if vectors is not None:
        if target is None and bias is not None:
            vectors = vectors + (bias / len(size))[:, None].to(vectors.dtype)  # each position adds up one per axis
        responses = in_layout_of(grid, outer_sum(laid_out_for(grid, vectors.to(grid.dtype)), size))
        return responses if target is None else target(bias, responses)
    few = None if target is None else kernel_attention.slots_of_scores(call, grid)
    return None if few is None or target is None else add_product(target(bias, None), *few)


def reorder(call: Call, query: Tensor, key: Tensor, value: Tensor) -> Call:
    """Return a call that takes V (KᵀQ) where that is cheaper than (V Kᵀ) Q."""
    if not has_orders(call.operator):
        return call
    work = call.work(math.prod(query.shape[2:]), math.prod(key.shape[2:]), query.shape[1], value.shape[1])
    return call._replace(operator=cheaper_order(call.operator, work))


def prepare(call: Call) -> Call:
    """Return a call whose operator reads and writes a grid once to gather and scatter along axes."""
    operator = call.operator
    if operator.keys_from.gather is not axis_sums and operator.queries_from.gather is not axis_sums:
        return call
    operator = dataclasses.replace(
        operator, keys_from=once(operator.keys_from), queries_from=once(operator.queries_from)
    )
    return call._replace(operator=operator)


def once(positions: Positions) -> Positions:
    """Return the same positions, with sums along axes that read a whole grid once and outer sums that write it once."""
    gather = gather_axes if positions.gather is axis_sums else positions.gather
    return positions._replace(
        gather=gather, scatter=scatter_axes if positions.scatter is add_axes else positions.scatter
    )


def gather_axes(grid: Tensor, mask: Tensor | None = None, place: Place | None = None) -> Gathered:
    """Gather as `grid.axis_sums` does."""
    if place is not None:
        return axis_sums(grid, mask, place)
    return Gathered(sum_axes(grid, mask), valid_counts(grid, mask))


def scatter_axes(responses: Tensor, size: Sequence[int], place: Place | None = None) -> Tensor:
    """Scatter as `grid.add_axes` does."""
    return outer_sum(responses, size) if place is None else add_axes(responses, size, place)


def summarize(
    call: Call, gathered: Gathered, values: Tensor, complete: bool, itself: bool
) -> tuple[Tensor | None, Summary] | None:
    """Project and summarize, with queries if `itself`; of large tensors, only the positions are kept for backward."""
    operator, (positions, valid) = call.operator, gathered
    if (
        call.runs_projections
        or values is not positions
        or operator.basis is None
        or not operator.keys_from.side_by_side
    ):
        return None
    query = call.query if itself and (call.key.matrix is None) == (call.query.matrix is None) else None
    options = {"shared": call.value.matrix is not None, "complete": complete}
    return project_and_summarize(operator, call.heads, positions, valid[:, None], call.key, query, **options)


def respond_once(
    call: Call, query_positions: Gathered, query: Tensor, summary: Summary, matrix: Tensor | None, bias: Tensor | None
) -> Tensor | None:
    """Respond; of large tensors, only the positions are kept for backward. The bias is one slot more."""
    operator = call.operator
    if call.runs_projections or operator.basis is None or not operator.queries_from.side_by_side:
        return None
    return respond_from(operator, query_positions.positions, call.query, query, summary, matrix, bias).flatten(1, 2)


def add_responses(call: Call, query: Tensor, summary: Summary, out: Tensor) -> Tensor:
    """Add projected responses as one product with the slots."""
    operator, matrix = call.operator, cast(Tensor, call.output.matrix)
    summary = summary.project_values(by_head(call, matrix.dtype))
    slots = (summary.values / operator.per(query, summary)).flatten(1, 2)
    return add_product(out, slots, operator.coefficients(query, summary).flatten(1, 2))


FAST = FastSteps(attend, reorder, prepare, summarize, respond_once, add_responses)
