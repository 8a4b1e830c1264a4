"""Projections of the channels of a grid to queries, keys, values and outputs, and an operator with those around it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol, cast

import torch
from torch import Tensor

from farfield.ops.grid import Gathered
from farfield.ops.slots import Summary
from farfield.ops.table import Operator

Run = Callable[[Tensor], Tensor]  # positions (b, in, n) -> (b, out, n)


class Projection(NamedTuple):
    """A linear map of channels; the identity if it has neither a matrix nor a function."""

    matrix: Tensor | None = None  # `(out, in)`; `out` holds the channels of all heads in order
    bias: Tensor | None = None  # `(out,)`
    run: Run | None = None  # on positions, before the matrix: of a module that no matrix defines


IDENTITY = Projection()


def map_heads(
    operator: Operator, query: Projection, key: Projection, learned: Mapping[str, Tensor], ones: Tensor, heads: int
) -> tuple[Projection, Projection]:
    """Compose projections of queries and keys with what the operator multiplies them with, head by head.

    `learned` holds the tensors of `operator.parameter_shapes`; `ones` is a vector `(c,)` for those that learn none.
    """
    if operator.score is None:
        return query, key
    of_queries, of_keys = operator.head_matrices(learned or {"weight": ones}, heads)
    if operator.score == "latents" and query.matrix is None and query.run is None:
        query = key  # queries are made as keys are, unless they have a projection of their own
    same = query is key and of_queries is of_keys
    mapped = _compose_by_head(query, of_queries)
    return mapped, mapped if same else _compose_by_head(key, of_keys)


def _compose_by_head(projection: Projection, matrices: Tensor) -> Projection:
    """Compose a projection with a matrix per head, `(h, r, d)`, to h·r channels: M(Wx + b) = (MW)x + Mb."""
    heads, (matrix, bias, run) = len(matrices), projection
    if matrix is None:
        return Projection(_join_heads(matrices), None, run)
    matrix = (matrices @ matrix.to(matrices.dtype).unflatten(0, (heads, -1))).flatten(0, 1)
    if bias is not None:
        bias = (matrices @ bias.to(matrices.dtype).view(heads, -1, 1)).flatten()
    return Projection(matrix, bias)


def _join_heads(matrices: Tensor) -> Tensor:
    """Return the matrix `(h·r, h·d)` with those of the heads, `(h, r, d)`, along its diagonal."""
    if len(matrices) == 1:
        return matrices[0]
    heads = torch.eye(len(matrices), dtype=matrices.dtype, device=matrices.device)[:, None, :, None]
    return (heads * matrices[:, :, None]).flatten(2).flatten(0, 1)


def split_heads(positions: Tensor, heads: int) -> Tensor:
    """View `(b, c, n)` as `(b, h, c/h, n)`."""
    return positions[:, None] if heads == 1 else positions.unflatten(1, (heads, -1))


def project(positions: Tensor, projection: Projection) -> Tensor:
    """Project positions `(b, in, n)` to `(b, out, n)` by the matrix; the identity returns them unchanged."""
    matrix, bias, _ = projection
    if matrix is None:
        return positions
    matrix = matrix.to(positions.dtype).expand(positions.shape[0], -1, -1)  # sums over half precision are float32
    if bias is None:
        return torch.bmm(matrix, positions)
    return torch.baddbmm(bias[:, None].to(positions.dtype), matrix, positions)


class _FoldedNorm(Protocol):
    """Batch norm of coefficients or of responses, folded into the queries and the summary."""

    @property
    def bias(self) -> Tensor | None:
        """The shift of the responses; None if they are not shifted."""

    @property
    def weight(self) -> Tensor:
        """The factors that are learned."""

    @property
    def is_factor(self) -> bool:
        """Whether the norm does no more than to multiply the queries of each head with a factor, `factors`."""

    def factors(self) -> Tensor:
        """Return these factors, `(heads,)`."""

    def __call__(
        self, query: Tensor, query_valid: Tensor, summary: Summary, operator: Operator | None = None
    ) -> tuple[Tensor, Summary, Tensor | None]:
        """Return the queries, the summary, and a shift `(channels,)` of the responses or None."""


class Call(NamedTuple):
    """An operator with the projections around it."""

    operator: Operator
    heads: int = 1  # channels of queries, keys and values are split into them in order
    scale: float = 1.0  # of the products of queries and keys, for operators with a softmax of them
    query: Projection = IDENTITY  # to queries, or to scores for operators with a score
    key: Projection = IDENTITY  # to keys, or to scores
    value: Projection = IDENTITY  # acts on the summary
    output: Projection = IDENTITY  # acts on the summary where that is cheaper
    norm: _FoldedNorm | None = None  # of coefficients or responses

    @property
    def is_operator_alone(self) -> bool:
        """Whether nothing is projected or normed; queries and keys may be scores."""
        same = self.query is self.key and (self.query.matrix is None or self.operator.score is not None)
        return same and self.value.matrix is None and self.output.matrix is None and self.norm is None


def by_head(call: Call, dtype: torch.dtype) -> Tensor:
    """Split the matrix of the output projection by the input channels of each head: `(h, out, c)`."""
    return cast(Tensor, call.output.matrix).to(dtype).unflatten(1, (call.heads, -1)).transpose(0, 1)


def _run_projection(run: Run, gathered: Gathered, side_by_side: bool) -> Gathered:
    """Run a projection on gathered positions; on the means of those that are sums, `side_by_side` False."""
    positions, valid = gathered
    return Gathered(run(positions) if side_by_side else run(positions / valid.clamp_min(1)) * valid, valid)


def run_values(call: Call, values: Tensor, valid: Tensor) -> Tensor:
    """Run the projection of values, which no matrix defines; masked positions stay 0."""
    side_by_side, run = call.operator.keys_from.side_by_side, cast(Run, call.value.run)
    return torch.where(valid > 0, _run_projection(run, Gathered(values, valid), side_by_side).positions, 0)


def project_keys(call: Call, gathered: Gathered) -> Tensor:
    """Project gathered positions to keys `(b, h, d, n)`; d is 1 for scores."""
    side_by_side, (matrix, bias, run) = call.operator.keys_from.side_by_side, call.key
    if not call.operator.reads_keys:  # any keys do
        return gathered.valid[:, None].expand(-1, call.heads, -1, -1)
    positions, valid = gathered if run is None else _run_projection(run, gathered, side_by_side)
    if side_by_side or bias is None:
        return split_heads(project(positions, call.key), call.heads)
    # Sums of positions give sums of keys, each with as many biases as positions.
    return split_heads(project(positions, Projection(matrix)) + bias[:, None].to(positions.dtype) * valid, call.heads)


def project_queries(call: Call, gathered: Gathered) -> Tensor:
    """Project gathered positions to queries `(b, h, d, m)`, of the means of those that are sums; d is 1 for scores."""
    side_by_side, (matrix, bias, run) = call.operator.queries_from.side_by_side, call.query
    positions, valid = gathered if run is None else _run_projection(run, gathered, side_by_side)
    if side_by_side:
        return split_heads(project(positions, call.query), call.heads)
    queries = project(positions / valid.clamp_min(1), Projection(matrix))  # 0 for a sum without a valid position
    queries = queries if bias is None else queries + bias[:, None].to(positions.dtype) * (valid > 0)
    return split_heads(queries, call.heads)
