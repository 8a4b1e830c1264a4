"""Attention from grid to grid, composed once: gather, project, summarize, norm, respond, project, scatter.

    attend(call, q, k, v) == respond_grid(call, q, summarize_grid(call, k))        where k is v

The equations are `summary.summarize` and `summary.respond` with the functions of `table.OPERATORS`. `choose_fast` is
the one place that decides whether `fast`, which computes the same in less time or memory, is used.
"""

from __future__ import annotations

import os
from functools import partial

from torch import Tensor

from farfield.ops.call import Call, by_head, project_keys, project_queries, run_values
from farfield.ops.fast.dispatch import FAST, FastSteps, Target
from farfield.ops.grid import Gathered, Place, in_layout_of, laid_out_for
from farfield.ops.modes import is_recorded
from farfield.ops.projection import split_heads
from farfield.ops.slots import Summary
from farfield.ops.summary import respond, summarize

SWITCH = "FARFIELD_FAST"


def choose_fast() -> FastSteps | None:
    """Return the fast steps; None if FARFIELD_FAST=0 switches them off, or while torch compiles, exports or traces."""
    return None if os.environ.get(SWITCH) == "0" or is_recorded() else FAST


# ---- the three steps -------------------------------------------------------------------------------------------------
def attend(
    call: Call,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Tensor | None = None,
    query_mask: Tensor | None = None,
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
        target: The grid that the responses are added to, with an output projection only; see `Target`.

    Returns:
        `(b, out, *m)` in the query grid's dtype and memory format; with a target, the target's grid and the responses.
    """
    fast = choose_fast()
    itself = query is key and query_mask is mask
    if fast is not None:
        whole = itself and value is key and mask is None
        response = fast.attend(call, query, target) if whole else None
        if response is not None:
            return response
        # The responses of a target are products of slots, of which the other order has more.
        call = fast.prepare(call if target is not None else fast.reorder(call, query, key, value))
    keys, queries = call.operator.keys_from, call.operator.queries_from
    gathered = keys.gather(key, mask, None)
    values = gathered.positions if value is key else keys.gather(value, mask, None).positions
    query_positions = gathered if itself and queries.gather == keys.gather else queries.gather(query, query_mask, None)
    projected, summary = summarize_positions(fast, call, gathered, values, mask is None, query_positions is gathered)
    return respond_positions(fast, call, query, query_positions, projected, summary, target=target)


def summarize_grid(call: Call, grid: Tensor, *, mask: Tensor | None = None, place: Place | None = None) -> Summary:
    """Summarize the keys and values of a grid or of a tile.

    Args:
        call: The operator with its projections.
        grid: `(b, c, *n)`.
        mask: `(b, *n)`, True where a position is valid; None if all are.
        place: The origin of a tile and the size of the whole grid; None for a whole grid.

    Returns:
        The summary; the summaries of all tiles merge, in any order, into that of the whole.
    """
    fast = choose_fast()
    call = call if fast is None else fast.prepare(call)
    gathered = call.operator.keys_from.gather(grid, mask, place)
    return summarize_positions(fast, call, gathered, gathered.positions, mask is None and place is None)[1]


def respond_grid(
    call: Call,
    grid: Tensor,
    summary: Summary,
    *,
    mask: Tensor | None = None,
    place: Place | None = None,
    query_sums: Gathered | None = None,
) -> Tensor:
    """Respond to a summary at every position of a grid or of a tile.

    Args:
        call: The operator with its projections.
        grid: The query grid, `(b, c, *m)`.
        summary: The summary of keys and values.
        mask: `(b, *m)`, True where a position is valid; others are read as 0. None if all are valid.
        place: The origin of a tile and the size of the whole grid; None for a whole grid.
        query_sums: The query sums of the whole grid, for a tile of an operator whose queries are sums over the grid.

    Returns:
        The responses, `(b, out, *m)`.
    """
    fast = choose_fast()
    call = call if fast is None else fast.prepare(call)
    query_positions = call.operator.queries_from.gather(grid, mask, None) if query_sums is None else query_sums
    return respond_positions(fast, call, grid, query_positions, None, summary, place)


# ---- shared by the steps ---------------------------------------------------------------------------------------------
def summarize_positions(
    fast: FastSteps | None, call: Call, gathered: Gathered, values: Tensor, complete: bool, itself_queries: bool = False
) -> tuple[Tensor | None, Summary]:
    """Project keys, summarize, and project the values of the slots.

    With `itself_queries`, the queries come from the same positions, and a fast step may project them too.

    Returns:
        The queries `(b, h, d, n)`, None if they are not projected, and the summary.
    """
    result = None if fast is None else fast.summarize(call, gathered, values, complete, itself_queries)
    if result is None:
        values = run_values(call, values, gathered.valid)
        key, shared = project_keys(call, gathered), call.value.matrix is not None
        itself_key = call.operator.reads_keys and call.key.matrix is None and call.runs.key is None
        same = values is gathered.positions and itself_key and not shared
        # Every head summarizes all channels where values are projected later.
        value = key if same else values[:, None] if shared else split_heads(values, call.heads)
        result = None, summarize(call.operator, key, value, gathered.valid[:, None], complete)
    projected, summary = result
    if call.value.matrix is None:
        return projected, summary
    bias = None if call.value.bias is None else call.value.bias.unflatten(0, (call.heads, -1))
    return projected, summary.project_values(call.value.by_head(call.heads), bias)


def respond_positions(
    fast: FastSteps | None,
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
        scale, bias = 1.0, project_shift(call, shift)
    if target is not None:
        if fast is not None and queries.side_by_side:
            return fast.add_responses(call, query, summary, target(bias, None))
        target, bias = partial(target, bias), None
    spatial_dims, of_axes = grid.dim() - 2, None if queries.side_by_side else bias
    bias = bias if queries.side_by_side else None
    responses = project_responses(fast, call, query_positions, query, summary, scale, bias)
    responses = queries.normalized(responses, query_positions.valid, spatial_dims)
    if of_axes is not None:  # each position adds up one response per axis
        responses = responses + (of_axes / spatial_dims)[:, None].to(responses.dtype)
    responses = queries.scatter(laid_out_for(grid, responses.to(grid.dtype)), grid.shape[2:], place)
    if call.runs.output is not None:
        responses = call.runs.output(responses.flatten(2)).unflatten(2, grid.shape[2:]).to(grid.dtype)
    responses = in_layout_of(grid, responses)
    return responses if target is None else target(responses)


def project_responses(
    fast: FastSteps | None,
    call: Call,
    query_positions: Gathered,
    query: Tensor,
    summary: Summary,
    scale: float,
    bias: Tensor | None,
) -> Tensor:
    """Return responses `(b, out, m)` after the output projection, which acts on the slots where that is cheaper."""
    matrix, slots = call.output.matrix, summary.values.shape[2]
    if matrix is None:
        return respond_projected(fast, call, query_positions, query, summary, scale, None, bias)
    width = summary.values.shape[1] * summary.values.shape[3]
    work = call.work(query.shape[3], slots, query.shape[1] * query.shape[2], width)
    if work.folds_output(slots, basis=call.operator.basis is not None):
        return respond_projected(fast, call, query_positions, query, summary, scale, by_head(call, query.dtype), bias)
    responses = respond_projected(fast, call, query_positions, query, summary, scale, None, None)
    responses = matrix.to(responses.dtype) @ responses
    return responses if bias is None else responses + bias[:, None].to(responses.dtype)


def respond_projected(
    fast: FastSteps | None,
    call: Call,
    query_positions: Gathered,
    query: Tensor,
    summary: Summary,
    scale: float,
    matrix: Tensor | None,
    bias: Tensor | None,
) -> Tensor:
    """Return responses `(b, out, m)`: the heads concatenated or, with a matrix `(h, out, c)`, projected and added up.

    The matrix projects the slots.
    """
    responses = None if fast is None else fast.respond(call, query_positions, query, summary, matrix, bias)
    if responses is not None:
        return responses
    if matrix is None:
        responses = respond(call.operator, query, summary, scale).flatten(1, 2)
    else:
        responses = respond(call.operator, query, summary.project_values(matrix), scale).sum(1)
    return responses if bias is None else responses + bias[:, None].to(responses.dtype)


def project_shift(call: Call, shift: Tensor | None) -> Tensor | None:
    """Return the bias of the responses: that of the output projection, plus the projected shift of the norm."""
    matrix, bias = call.output
    if shift is None or matrix is None:
        return bias if shift is None else shift
    shift = matrix @ shift.to(matrix.dtype)
    return shift if bias is None else bias + shift
