"""An operator with the projections around it, and what they make of gathered positions."""

from __future__ import annotations

from typing import NamedTuple, Protocol, cast

import torch
from torch import Tensor

from farfield.ops.grid import Gathered
from farfield.ops.projection import IDENTITY, Projection, project, split_heads
from farfield.ops.slots import Summary
from farfield.ops.table import Operator
from farfield.ops.work import Work


class Norm(Protocol):
    """Batch norm of coefficients or of responses, folded into what the response is made from."""

    @property
    def bias(self) -> Tensor | None:
        """What the responses are shifted by, if they are."""
        ...

    def __call__(
        self, query: Tensor, query_valid: Tensor, summary: Summary, row: Operator | None = None
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


def by_head(call: Call, dtype: torch.dtype) -> Tensor:
    """The output's matrix by the channels of each head that it reads, `(h, out, c)`."""
    return cast(Tensor, call.output.matrix).to(dtype).unflatten(1, (call.heads, -1)).transpose(0, 1)


def project_keys(call: Call, gathered: Gathered) -> Tensor:
    """Keys `(b, h, d, n)` of gathered positions, or their scores; of sums, sums."""
    (positions, valid), (matrix, bias) = gathered, call.key
    if not call.operator.reads_keys:
        return valid[:, None].expand(-1, call.heads, -1, -1)
    if call.operator.keys_from.side_by_side or bias is None:
        return split_heads(project(positions, call.key), call.heads)
    return split_heads(project(positions, Projection(matrix)) + bias[:, None].to(positions.dtype) * valid, call.heads)


def project_queries(call: Call, gathered: Gathered) -> Tensor:
    """Queries `(b, h, d, m)` of gathered positions, or their scores; of sums, means, and 0 where nothing is valid."""
    (positions, valid), (matrix, bias) = gathered, call.query
    if call.operator.queries_from.side_by_side:
        return split_heads(project(positions, call.query), call.heads)
    rows = project(positions / valid.clamp_min(1), Projection(matrix))
    rows = rows if bias is None else rows + bias[:, None].to(positions.dtype) * (valid > 0)
    return split_heads(rows, call.heads)
