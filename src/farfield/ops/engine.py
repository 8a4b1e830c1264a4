"""Attention from grid to grid, composed once: gather, project, summarize, norm, respond, project, scatter.

    attend(call, q, k, v) == respond_grid(call, q, summarize_grid(call, k))        where k is v

The equations are `summary.summarize` and `summary.respond` with the functions of `table.OPERATORS`. What stands in
`fast` gives the same in less time or memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple, Protocol, cast

from torch import Tensor

from farfield.ops._kernels import whole as kernels
from farfield.ops.grid import Gathered, Place, in_layout_of, laid_out_for
from farfield.ops.order import Work, cheaper_order
from farfield.ops.projection import Projection, project, split_heads
from farfield.ops.recompute import add_product, read_and_summarize, respond_from
from farfield.ops.summary import Summary, full_precision, respond, summarize
from farfield.ops.table import Operator

IDENTITY = Projection()


class Norm(Protocol):
    """Batch norm of coefficients or of responses, folded into what the response is made from."""

    @property
    def bias(self) -> Tensor | None:
        """What the responses are shifted by, if they are."""
        ...

    def __call__(
        self, query: Tensor, asked: Tensor, summary: Summary, row: Operator | None = None
    ) -> tuple[Tensor, Summary, Tensor | None]:
        """Return the queries, the summary, and a shift `(channels,)` of the responses or None."""
        ...


class Call(NamedTuple):
    """An operator with the projections around it.

    Attributes:
        operator: The operator.
        heads: Channels of queries, keys and values are split into this many groups in order.
        scale: Of the products, for a softmax of them.
        query: Projection of the query grid.
        key: Projection of the key grid.
        value: Projection of the value grid, which acts on the summary.
        output: Projection of the responses, which acts on the summary where that is cheaper.
        norm: Of coefficients or responses.
    """

    operator: Operator
    heads: int = 1
    scale: float = 1.0
    query: Projection = IDENTITY
    key: Projection = IDENTITY
    value: Projection = IDENTITY
    output: Projection = IDENTITY
    norm: Norm | None = None

    @property
    def is_bare(self) -> bool:
        """Whether nothing is projected or normed; queries and keys may be scores."""
        maps = (self.value.matrix, self.output.matrix, self.norm)
        same = self.query is self.key and (self.query.matrix is None or self.operator.score is not None)
        return same and all(part is None for part in maps)

    def work(self, queries: int, keys: int, channels: int, width: int) -> Work:
        """What is multiplied for one sample of so many positions, of channels in and of values."""
        inner = channels if self.query.matrix is None else len(self.query.matrix)
        value, output = self.value.matrix, self.output.matrix
        biased = self.output.bias is not None or (self.norm is not None and self.norm.bias is not None)
        mapped, out = 0 if value is None else value.shape[1], 0 if output is None else len(output)
        return Work(queries, keys, inner, width if value is None else len(value), self.heads, mapped, out, biased)


# ---- the three steps -------------------------------------------------------------------------------------------------
def attend(
    call: Call,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Tensor | None = None,
    query_mask: Tensor | None = None,
) -> Tensor:
    """Attend from one grid to others; self-attention gathers and projects its input once.

    Args:
        call: The operator with its projections.
        query: The query grid, `(b, c, *m)`.
        key: The key grid, `(b, c, *n)`.
        value: The value grid, `(b, p, *n)`; a projection of values reads it where it is the key grid.
        mask: `(b, *n)`, True where a key is valid.
        query_mask: `(b, *m)`, True where a query is valid; others are read as 0.

    Returns:
        `(b, out, *m)` in the query grid's dtype and memory format.
    """
    itself = query is key and query_mask is mask
    if itself and value is key and mask is None and call.is_bare:
        whole = kernels.attention(call.operator, query, call.query.matrix, call.heads, call.scale)
        if whole is not None:
            return whole
    sizes = math.prod(query.shape[2:]), math.prod(key.shape[2:]), query.shape[1], value.shape[1]
    call = call._replace(operator=cheaper_order(call.operator, call.work(*sizes)))
    keys, queries = call.operator.answers, call.operator.asks
    gathered = keys.gather(key, mask)
    values = gathered.cells if value is key else keys.gather(value, mask).cells
    asking = gathered if itself and queries.gather == keys.gather else queries.gather(query, query_mask)
    projected, summary = summarize_positions(call, gathered, values, mask is None, asking is gathered)
    return respond_positions(call, query, asking, projected, summary)


def summarize_grid(call: Call, grid: Tensor, *, mask: Tensor | None = None, place: Place | None = None) -> Summary:
    """Summarize the keys and values of a grid, or of a tile of one.

    Args:
        call: The operator with its projections.
        grid: `(b, c, *n)`.
        mask: `(b, *n)`, True where a position is valid.
        place: Of a tile: its origin, and the size of the whole.

    Returns:
        The summary; those of tiles merge, in any order, to that of the whole.
    """
    gathered = call.operator.answers.gather(grid, mask, place)
    return summarize_positions(call, gathered, gathered.cells, mask is None and place is None)[1]


def respond_grid(
    call: Call,
    grid: Tensor,
    summary: Summary,
    *,
    mask: Tensor | None = None,
    place: Place | None = None,
    query_sums: Gathered | None = None,
    target: Callable[[Tensor | None], Tensor] | None = None,
) -> Tensor:
    """Let every position of a grid, or of a tile of one, respond to a summary.

    Args:
        call: The operator with its projections.
        grid: The query grid, `(b, c, *m)`.
        summary: Of keys and values.
        mask: `(b, *m)`, True where a position is valid; others are read as 0.
        place: Of a tile: its origin, and the size of the whole.
        query_sums: Of a tile, for operators whose queries are sums over the grid: those of the whole.
        target: Makes, with the bias that is to be added, the grid `(b, out, *m)` that projected responses are added to.

    Returns:
        `(b, out, *m)`.
    """
    asking = call.operator.asks.gather(grid, mask) if query_sums is None else query_sums
    return respond_positions(call, grid, asking, None, summary, place, target)


# ---- what they share -------------------------------------------------------------------------------------------------
def summarize_positions(
    call: Call, gathered: Gathered, values: Tensor, complete: bool, asks: bool = False
) -> tuple[Tensor | None, Summary]:
    """Project keys, summarize and project the slots' values; where the same positions ask, project their queries too.

    Args:
        call: The operator with its projections.
        gathered: Positions of the key grid.
        values: Those of the value grid, `(b, c, n)`.
        complete: Whether no position is masked and none is missing.
        asks: Whether these positions are the queries as well.

    Returns:
        The queries `(b, h, d, n)` or None, and the summary.
    """
    operator, heads, (cells, real) = call.operator, call.heads, gathered
    shared = call.value.matrix is not None  # every head summarizes all channels where values are projected later
    if values is cells and operator.basis is not None and operator.answers.side_by_side:
        query = call.query if asks and (call.key.matrix is None) == (call.query.matrix is None) else None
        options = {"shared": shared, "complete": complete}
        projected, summary = read_and_summarize(operator, heads, cells, real[:, None], call.key, query, **options)
    else:
        key = project_keys(call, gathered)
        plain = values is cells and operator.reads_keys and call.key.matrix is None and not shared
        value = key if plain else values[:, None] if shared else split_heads(values, heads)
        projected, summary = None, summarize(operator, key, value, real[:, None], complete)
    return projected, summary.map_values(call.value.by_head(heads), split_bias(call)) if shared else summary


def split_bias(call: Call) -> Tensor | None:
    """The bias of the values, `(h, c)`."""
    return None if call.value.bias is None else call.value.bias.unflatten(0, (call.heads, -1))


def respond_positions(
    call: Call,
    grid: Tensor,
    asking: Gathered,
    query: Tensor | None,
    summary: Summary,
    place: Place | None = None,
    target: Callable[[Tensor | None], Tensor] | None = None,
) -> Tensor:
    """Norm, respond, project the responses and scatter them into a grid like the query grid."""
    queries, rank, scale, shift = call.operator.asks, grid.dim() - 2, call.scale, None
    query = project_queries(call, asking) if query is None else query
    if call.norm is not None:
        query = query if scale == 1 else query * scale
        query, summary, shift = call.norm(query, asking.real, summary, call.operator)
        scale = 1.0
    if target is not None:
        return add_responses(call, grid, asking, query, summary, scale, target(bias_of(call, shift)))
    # Normalized, the axes' responses count what they have in common once: of a bias each has all.
    axes = 1 if queries.side_by_side or queries.normalize is not None else rank
    responses = project_responses(call, asking, query, summary, scale, bias_of(call, shift), axes)
    responses = queries.normalized(responses, asking.real, rank)
    responses = laid_out_for(grid, responses.to(grid.dtype))
    return in_layout_of(grid, queries.scatter(responses, grid.shape[2:], place))


def project_keys(call: Call, gathered: Gathered) -> Tensor:
    """Keys `(b, h, d, n)` of gathered positions, or their scores; of sums, sums."""
    (cells, real), (matrix, bias) = gathered, call.key
    if not call.operator.reads_keys:
        return real[:, None].expand(-1, call.heads, -1, -1)
    if call.operator.answers.side_by_side or bias is None:
        return split_heads(project(cells, call.key), call.heads)
    return split_heads(project(cells, Projection(matrix)) + bias[:, None].to(cells.dtype) * real, call.heads)


def project_queries(call: Call, gathered: Gathered) -> Tensor:
    """Queries `(b, h, d, m)` of gathered positions, or their scores; of sums, means, and 0 where nothing is valid."""
    (cells, real), (matrix, bias) = gathered, call.query
    if call.operator.asks.side_by_side:
        return split_heads(project(cells, call.query), call.heads)
    rows = project(cells / real.clamp_min(1), Projection(matrix))
    rows = rows if bias is None else rows + bias[:, None].to(cells.dtype) * (real > 0)
    return split_heads(rows, call.heads)


def bias_of(call: Call, shift: Tensor | None) -> Tensor | None:
    """What is added to the projected responses: the output's bias and the shift of their norm, projected."""
    matrix, bias = call.output
    if shift is None or matrix is None:
        return bias if shift is None else shift
    shift = matrix @ shift.to(matrix.dtype)
    return shift if bias is None else bias + shift


def project_responses(
    call: Call, asking: Gathered, query: Tensor, summary: Summary, scale: float, bias: Tensor | None, axes: int
) -> Tensor:
    """Responses `(b, out, m)` after the output's projection, which acts on the slots where that is cheaper.

    `axes`: how many responses are added up at each position; the bias is added once.
    """
    operator, (matrix, _) = call.operator, call.output
    slots, width = summary.values.shape[2], summary.values.shape[1] * summary.values.shape[3]
    work = call.work(query.shape[3], slots, query.shape[1] * query.shape[2], width)
    split = None
    if matrix is not None and work.folds_output(slots, basis=operator.basis is not None):
        split = matrix.to(query.dtype).unflatten(1, (call.heads, -1)).transpose(0, 1)  # (h, out, c)
    inner = bias if matrix is None or split is not None else None
    if operator.basis is not None and operator.asks.side_by_side:
        responses = respond_from(operator, asking.cells, call.query, query, summary, split, inner).flatten(1, 2)
    else:
        summary = summary if split is None else summary.map_values(split)
        responses = respond(operator, query, summary, scale)
        responses = responses.flatten(1, 2) if split is None else responses.sum(1)
        responses = responses if inner is None else responses + inner[:, None].to(responses.dtype) / axes
    if matrix is None or split is not None:
        return responses
    responses = matrix.to(query.dtype) @ responses
    return responses if bias is None else responses + bias[:, None].to(responses.dtype) / axes


def add_responses(
    call: Call, grid: Tensor, asking: Gathered, query: Tensor, summary: Summary, scale: float, out: Tensor
) -> Tensor:
    """Add projected responses to a grid, in place where they are one vector an axis."""
    operator, matrix = call.operator, cast(Tensor, call.output.matrix)
    if operator.asks.side_by_side:
        summary = summary.map_values(matrix.unflatten(1, (call.heads, -1)).transpose(0, 1))
        slots = (summary.values / operator.per(query, summary)).flatten(1, 2)
        return add_product(out, slots, operator.coefficients(query, summary).flatten(1, 2))
    responses = respond(operator, query, summary, scale).flatten(1, 2)
    responses = operator.asks.normalized(responses, asking.real, grid.dim() - 2)
    with full_precision(out):
        add_axes_to(out, matrix.to(responses.dtype) @ responses)
    return out


def add_axes_to(out: Tensor, vectors: Tensor) -> None:
    """Add one vector an axis, `(b, d, Σ size)`, to all positions of a grid in place (KAN 18)."""
    size = out.shape[2:]
    for axis, vector in enumerate(vectors.split(list(size), -1)):
        out.add_(vector.unflatten(-1, [length if other == axis else 1 for other, length in enumerate(size)]))
