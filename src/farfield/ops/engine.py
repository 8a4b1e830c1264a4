"""Attention from grid to grid, composed once: gather, project, summarize, norm, respond, project, scatter.

    attend(call, q, k, v) == respond_grid(call, q, summarize_grid(call, k))        where k is v

The equations are `summary.summarize` and `summary.respond` with the functions of `table.OPERATORS`. What computes the
same in less time or memory stands in `fast`, whose table of kernels says what runs when; `is_fast` switches it off.
"""

from __future__ import annotations

import math
import os
from functools import partial
from typing import cast

import torch
from torch import Tensor

from farfield.ops.fast import axes, table
from farfield.ops.fast.steps import add_responses
from farfield.ops.fast.whole import Target
from farfield.ops.grid import Gathered, Place, Positions, add_axes, axis_sums, in_channels_last, in_layout_of, lay_out
from farfield.ops.modes import is_recorded, is_recorded_for_tiles
from farfield.ops.projection import (
    Call,
    LinearRun,
    Projection,
    by_head,
    project_keys,
    project_queries,
    run_part,
    split_heads,
)
from farfield.ops.slots import Summary
from farfield.ops.summary import respond, summarize
from farfield.ops.work import is_quadratic_cheaper

SWITCH = "FARFIELD_FAST"


def is_fast() -> bool:
    """Whether `fast` is used: not if switched off, nor in graphs, which are for all sizes and of torch's operations."""
    return os.environ.get(SWITCH) != "0" and not is_recorded()


# ---- the three steps -------------------------------------------------------------------------------------------------
def attend(
    call: Call,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Tensor | None = None,
    query_mask: Tensor | None = None,
    weight: Tensor | None = None,
    target: Target | None = None,
) -> Tensor:
    """Attend from the query grid to the key grid; self-attention gathers and projects its input once.

    Args:
        call: The operator with its projections.
        query: The query grid, `(b, c, *m)`.
        key: The key grid, `(b, c, *n)`.
        value: The value grid, `(b, p, *n)`; it may be the key grid.
        mask: `(b, *n)`, True where a key is valid; None if all are.
        query_mask: `(b, *m)`, True where a query is valid; others are read as 0. None if all are valid.
        weight: `(b, *n)`, the weights of keys, 0 where the mask is False (`grid.measure`); None if all weigh alike.
        target: The grid that the responses are added to, with an output projection only; see `Target`.

    Returns:
        `(b, out, *m)` in the query grid's dtype and memory format; with a target, the target's grid and the responses.
    """
    fast, itself = is_fast(), query is key and query_mask is mask
    if fast and itself and value is key and mask is None:
        kernel = table.choose(call, query, target)
        if kernel is not None:
            response: Tensor = kernel.run(call, query, target)
            return response
    # The responses of a target are products of slots, of which the quadratic order has more.
    if fast and target is None and call.operator.has_orders:
        positions = math.prod(query.shape[2:]), math.prod(key.shape[2:])
        if is_quadratic_cheaper(call.count_work(*positions, query.shape[1], value.shape[1])):
            call = call._replace(operator=call.operator.in_quadratic_order())
    if is_recorded_for_tiles():
        call = call._replace(operator=call.operator.in_linear_order())
    keys, queries = call.operator.keys_from, call.operator.queries_from
    gathered = _gather(fast, keys, key, mask, weight=weight)
    counts = None if weight is None else _gather(fast, keys, weight[:, None], mask).valid
    values = gathered.positions if value is key else _gather(fast, keys, value, mask, weight=weight).positions
    same = itself and queries.gather == keys.gather
    query_positions = gathered if same else _gather(fast, queries, query, query_mask)
    key_part, gathered = run_part(call.key, gathered, keys.side_by_side)
    if same and call.query is call.key:
        query_part, query_positions = key_part, gathered
    else:
        query_part, query_positions = run_part(call.query, query_positions, queries.side_by_side)
    call, same = call._replace(query=query_part, key=key_part), query_positions is gathered
    projected, summary = _summarize_positions(fast, call, gathered, values, mask is None, same, counts)
    return _respond_positions(fast, call, query, query_positions, projected, summary, target=target)


def summarize_grid(
    call: Call, grid: Tensor, *, mask: Tensor | None = None, weight: Tensor | None = None, place: Place | None = None
) -> Summary:
    """Summarize the keys and values of a grid, or of a tile at a `place`, whose summaries merge in any order."""
    fast = is_fast()
    gathered = _gather(fast, call.operator.keys_from, grid, mask, place, weight)
    counts = None if weight is None else _gather(fast, call.operator.keys_from, weight[:, None], mask, place).valid
    key, keys = run_part(call.key, gathered, call.operator.keys_from.side_by_side)
    complete = mask is None and place is None
    return _summarize_positions(fast, call._replace(key=key), keys, gathered.positions, complete, counts=counts)[1]


def respond_grid(
    call: Call,
    grid: Tensor,
    summary: Summary,
    *,
    mask: Tensor | None = None,
    place: Place | None = None,
    query_sums: Gathered | None = None,
) -> Tensor:
    """Respond `(b, out, *m)` at every position of a grid, or of a tile; with queries that are sums by `query_sums`."""
    fast = is_fast()
    query_positions = _gather(fast, call.operator.queries_from, grid, mask) if query_sums is None else query_sums
    query, query_positions = run_part(call.query, query_positions, call.operator.queries_from.side_by_side)
    return _respond_positions(fast, call._replace(query=query), grid, query_positions, None, summary, place)


# ---- shared by the steps ---------------------------------------------------------------------------------------------
def _gather(
    fast: bool,
    where: Positions,
    grid: Tensor,
    mask: Tensor | None,
    place: Place | None = None,
    weight: Tensor | None = None,
) -> Gathered:
    if fast and where.gather is axis_sums and place is None:
        return axes.gather(grid, mask, weight)
    return where.gather(grid, mask, place) if weight is None else where.gather(grid, mask, place, weight)


def _summarize_positions(
    fast: bool,
    call: Call,
    gathered: Gathered,
    values: Tensor,
    complete: bool,
    itself_queries: bool = False,
    counts: Tensor | None = None,
) -> tuple[Tensor | None, Summary]:
    """Return the queries `(b, h, d, n)` if they are projected too, as `itself_queries` may be, and the summary.

    Where keys have weights, `counts` is what `valid` is without.
    """
    part, side_by_side = call.value, call.operator.keys_from.side_by_side
    # With many latents, projecting the sums takes more MACs than projecting the values.
    if call.operator.slots and part.matrix is not None and call.count_work(0, 0, 0, 0).projects_values_first:
        part = Projection(run=LinearRun(part.matrix, part.bias))
    if part.run is not None:
        part, (values, valid) = run_part(part, Gathered(values, gathered.valid), side_by_side)
        call, values = call._replace(value=part), values if complete else torch.where(valid > 0, values, 0)
    result = None
    if fast and counts is None:  # kernels read of a mask only whether a key is valid
        result = table.summarize(call, gathered, values, complete, itself_queries)
    if result is None:
        key, shared = project_keys(call, gathered), call.value.matrix is not None
        itself_key = call.operator.reads_keys and call.key.matrix is None
        same = values is gathered.positions and itself_key and not shared
        # Every head summarizes all channels where values are projected later.
        value = key if same else values[:, None] if shared else split_heads(values, call.heads)
        as_keys = itself_queries and call.query is call.key and side_by_side
        queries = key if as_keys and call.operator.reads_keys else None
        measure = gathered.valid[:, None]
        valid, weights = (measure, None) if counts is None else (counts[:, None], measure)
        result = queries, summarize(call.operator, key, value, valid, complete, weights)
    projected, summary = result
    if call.value.matrix is None:
        return projected, summary
    bias = None if call.value.bias is None else call.value.bias.unflatten(0, (call.heads, -1))
    return projected, summary.project_values(call.value.matrix.unflatten(0, (call.heads, -1)), bias)


def _respond_positions(
    fast: bool,
    call: Call,
    grid: Tensor,
    query_positions: Gathered,
    query: Tensor | None,
    summary: Summary,
    place: Place | None = None,
    target: Target | None = None,
) -> Tensor:
    """Normalize, respond, project the responses and scatter them into a grid of the query grid's size."""
    queries, scale, bias = call.operator.queries_from, call.scale, call.output.bias
    query = project_queries(call, query_positions) if query is None else query
    if call.norm is not None:
        query = query if scale == 1 else query * scale
        query, summary, shift = call.norm(query, query_positions.valid, summary, call.operator)
        scale, bias = 1.0, _project_shift(call, shift)
    if target is not None:
        if fast and queries.side_by_side:
            return add_responses(call, query, summary, target(bias, None))
        target, bias = partial(target, bias), None
    spatial_dims, of_axes = grid.dim() - 2, None if queries.side_by_side else bias
    bias = bias if queries.side_by_side else None
    responses = _project_responses(fast, call, query_positions, query, summary, scale, bias)
    if queries.normalize is not None:
        responses = queries.normalize(responses, query_positions.valid, spatial_dims)
    if of_axes is not None:  # each position adds up one response per axis
        responses = responses + (of_axes / spatial_dims)[:, None].to(responses.dtype)
    responses = responses.to(grid.dtype)
    if not queries.side_by_side:  # what is written more than once is first brought into the order of the grid
        responses = lay_out(responses, in_channels_last(grid))
    if fast and queries.scatter is add_axes and place is None:
        responses = axes.outer_sum(responses, grid.shape[2:])
    else:
        responses = queries.scatter(responses, grid.shape[2:], place)
    if call.output.run is not None:
        responses = call.output.run(responses.flatten(2)).unflatten(2, grid.shape[2:]).to(grid.dtype)
    responses = in_layout_of(grid, responses)
    return responses if target is None else target(responses)


def _project_responses(
    fast: bool,
    call: Call,
    query_positions: Gathered,
    query: Tensor,
    summary: Summary,
    scale: float,
    bias: Tensor | None,
) -> Tensor:
    """Return responses `(b, out, m)`; the output projection, if any, acts on the slots where that is cheaper."""
    last, slots, by_slots = call.output.matrix, summary.values.shape[2], None
    if last is not None:
        width = summary.values.shape[1] * summary.values.shape[3]
        work = call.count_work(query.shape[3], slots, query.shape[1] * query.shape[2], width)
        if work.folds_output(slots, basis=call.operator.basis is not None):
            last, by_slots = None, by_head(call, query.dtype)
    own = bias if last is None else None
    responses = table.respond(call, query_positions, query, summary, by_slots, own) if fast else None
    if responses is None and by_slots is None:
        responses = respond(call.operator, query, summary, scale).flatten(1, 2)
    elif responses is None:
        responses = respond(call.operator, query, summary.project_values(cast(Tensor, by_slots)), scale).sum(1)
    elif last is None:  # they have the bias
        return responses
    if last is not None:
        responses = last.to(responses.dtype) @ responses
    return responses if bias is None else responses + bias[:, None].to(responses.dtype)


def _project_shift(call: Call, shift: Tensor | None) -> Tensor | None:
    """Return the bias of the responses: that of the output projection, plus the projected shift of the norm."""
    matrix, bias, *_ = call.output
    if shift is None or matrix is None:
        return bias if shift is None else shift
    shift = matrix @ shift.to(matrix.dtype)
    return shift if bias is None else bias + shift
