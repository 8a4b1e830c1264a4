"""The one place that chooses how attention is computed: by the equations, or by what gives the same in less.

`PLAIN` are the equations. `FAST` keeps less for the backward pass, takes the cheaper order of products, writes each
grid once, and runs compiled kernels where they are built. `FARFIELD_FAST=0` switches all of it off.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor

from farfield.ops.call import Call, project_keys
from farfield.ops.fast import kernel_attention
from farfield.ops.fast.autograd import add_product, read_and_summarize, respond_from
from farfield.ops.fast.axes import outer_sum, sum_axes
from farfield.ops.fast.order import Work, cheaper_order
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
        respond: `(call, asking, query, summary, scale, bias) -> responses (b, out, m)`, projected.
        add_responses: `(call, grid, asking, query, summary, scale, out) -> out`, plus the projected responses.
        scatter: `(cells, responses, size, place) -> grid`.
    """

    attend: Callable[[Call, Tensor], Tensor | None] | None
    reorder: Callable[[Call, Tensor, Tensor, Tensor], Call]
    gather: Callable[[Cells, Tensor, Tensor | None, Place | None], Gathered]
    summarize: Callable[[Call, Gathered, Tensor, bool, bool], tuple[Tensor | None, Summary]]
    respond: Callable[[Call, Gathered, Tensor, Summary, float, Tensor | None], Tensor]
    add_responses: Callable[[Call, Tensor, Gathered, Tensor, Summary, float, Tensor], Tensor]
    scatter: Callable[[Cells, Tensor, Sequence[int], Place | None], Tensor]


def choose_steps(*tensors: Tensor) -> Steps:
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
    call: Call, asking: Gathered, query: Tensor, summary: Summary, scale: float, bias: Tensor | None
) -> Tensor:
    """Respond, and project the responses of the heads side by side."""
    responses = respond(call.operator, query, summary, scale).flatten(1, 2)
    if call.output.matrix is not None:
        responses = call.output.matrix.to(responses.dtype) @ responses
    return responses if bias is None else responses + bias[:, None].to(responses.dtype)


def plain_add_responses(
    call: Call, grid: Tensor, asking: Gathered, query: Tensor, summary: Summary, scale: float, out: Tensor
) -> Tensor:
    """Respond, project, scatter and add."""
    responses = plain_respond(call, asking, query, summary, scale, None)
    responses = call.operator.asks.normalized(responses, asking.real, grid.dim() - 2)
    return out + call.operator.asks.scatter(responses.to(out.dtype), grid.shape[2:], None)


# ---- the same in less ------------------------------------------------------------------------------------------------
def fast_attend(call: Call, grid: Tensor) -> Tensor | None:
    """Attend in one call of a kernel, where there is one and nothing is projected or normed."""
    return kernel_attention.attend(call, grid) if call.is_bare else None


def reorder(call: Call, query: Tensor, key: Tensor, value: Tensor) -> Call:
    """V (KᵀQ) where that is cheaper than (V Kᵀ) Q."""
    queries, keys = math.prod(query.shape[2:]), math.prod(key.shape[2:])
    work = work_of(call, queries, keys, query.shape[1], value.shape[1])
    return call._replace(operator=cheaper_order(call.operator, work))


def work_of(call: Call, queries: int, keys: int, channels: int, width: int) -> Work:
    """What is multiplied for one sample of so many positions, of channels in and of values."""
    inner = channels if call.query.matrix is None else len(call.query.matrix)
    value, output = call.value.matrix, call.output.matrix
    biased = call.output.bias is not None or (call.norm is not None and call.norm.bias is not None)
    mapped, out = 0 if value is None else value.shape[1], 0 if output is None else len(output)
    return Work(queries, keys, inner, width if value is None else len(value), call.heads, mapped, out, biased)


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
    call: Call, asking: Gathered, query: Tensor, summary: Summary, scale: float, bias: Tensor | None
) -> Tensor:
    """Respond; the projection acts on the slots where that is cheaper, and the bias is one slot more."""
    operator, (matrix, _) = call.operator, call.output
    slots, split = summary.values.shape[2], None
    if matrix is not None:
        width = summary.values.shape[1] * summary.values.shape[3]
        work = work_of(call, query.shape[3], slots, query.shape[1] * query.shape[2], width)
        if work.folds_output(slots, basis=operator.basis is not None):
            split = by_head_in(call, query.dtype)
    inner = bias if matrix is None or split is not None else None
    if operator.basis is not None and operator.asks.side_by_side:
        responses = respond_from(operator, asking.cells, call.query, query, summary, split, inner).flatten(1, 2)
    else:
        summary = summary if split is None else summary.map_values(split)
        responses = respond(operator, query, summary, scale)
        responses = responses.flatten(1, 2) if split is None else responses.sum(1)
        responses = responses if inner is None else responses + inner[:, None].to(responses.dtype)
    if matrix is None or split is not None:
        return responses
    responses = matrix.to(query.dtype) @ responses
    return responses if bias is None else responses + bias[:, None].to(responses.dtype)


def by_head_in(call: Call, dtype: torch.dtype) -> Tensor:
    """The output's matrix by the channels of each head that it reads, `(h, out, c)`."""
    return cast(Tensor, call.output.matrix).to(dtype).unflatten(1, (call.heads, -1)).transpose(0, 1)


def fast_add_responses(
    call: Call, grid: Tensor, asking: Gathered, query: Tensor, summary: Summary, scale: float, out: Tensor
) -> Tensor:
    """Add projected responses in place: as one product with the slots, or as one vector an axis."""
    operator, matrix = call.operator, cast(Tensor, call.output.matrix)
    if operator.asks.side_by_side:
        summary = summary.map_values(by_head_in(call, matrix.dtype))
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
