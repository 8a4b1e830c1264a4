"""The whole of any row on grids: gather, read, summarize, respond, scatter."""

from __future__ import annotations

import math
from typing import cast

from torch import Tensor

from farfield._checks import check_attention
from farfield.ops._kernels import whole as kernels
from farfield.ops.grid import in_layout_of, laid_out_for
from farfield.ops.order import Work, cheaper_order
from farfield.ops.reading import Reading, by_head, read
from farfield.ops.recompute import read_and_summarize, respond_from
from farfield.ops.summary import respond, split_heads, summarize
from farfield.ops.table import Operator


def attend(
    caller: str,
    row: Operator,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    heads: int,
    mask: Tensor | None,
    query_mask: Tensor | None = None,
    weight: Tensor | None = None,
    scale: float = 1.0,
) -> Tensor:
    """Attend from grid to grid; what is one tensor thrice is gathered and read once."""
    check_attention(caller, query, key, value, heads, mask, query_mask)
    reading = score_reading(row, query, heads, weight)
    if query is key and key is value and mask is None and query_mask is None:
        whole = kernels.attention(row, query, reading.matrix, heads, scale)
        if whole is not None:
            return whole
    asks, answers = math.prod(query.shape[2:]), math.prod(key.shape[2:])
    row = cheaper_order(row, Work(asks, answers, query.shape[1], value.shape[1], heads))
    answering = row.answers.gather(key, mask)
    values = answering.cells if value is key else row.answers.gather(value, mask).cells
    same = query is key and query_mask is mask and row.asks.gather == row.answers.gather
    asking, asked = answering if same else row.asks.gather(query, query_mask)
    real = answering.real[:, None]
    if not row.asks.side_by_side:
        asking = asking / asked.clamp_min(1)
    if same and value is key and row.basis is not None:
        options = {"shared": False, "complete": mask is None}
        found, summary = read_and_summarize(row, heads, asking, real, reading, reading, **options)
        q = cast(Tensor, found)
    else:
        k = read(reading, answering.cells, heads) if row.reads_keys else real.expand(-1, heads, -1, -1)
        q = read(reading, asking, heads)
        plain = values is answering.cells and row.reads_keys and reading.matrix is None
        summary = summarize(row, k, k if plain else split_heads(values, heads), real, mask is None)
    alone = row.basis is None  # each answering cell is a slot of its own
    response = respond(row, q, summary, scale) if alone else respond_from(row, asking, reading, q, summary)
    response = row.asks.normalized(response.flatten(1, 2), asked, query.dim() - 2)
    response = laid_out_for(query, response.to(query.dtype))
    return in_layout_of(query, row.asks.scatter(response, query.shape[2:], None))


def score_reading(row: Operator, query: Tensor, heads: int, weight: Tensor | None) -> Reading:
    """How keys and queries are read: as they are, or as one score a head (SAN 4: (a + b)ᵀ w = aᵀ w + bᵀ w)."""
    if row.score is None:
        return Reading()
    vector = query.new_ones(query.shape[1]) if weight is None else weight
    return Reading(by_head(vector.to(query.dtype), heads))
