"""Projections of the channels of a grid to queries, keys, values and outputs, and an operator with those around it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol, cast

import torch
from torch import Tensor

from farfield.ops.grid import Gathered, nonzero
from farfield.ops.slots import Summary
from farfield.ops.table import Operator
from farfield.ops.work import Work, is_composed

Run = Callable[[Tensor], Tensor]  # positions (b, in, n) -> (b, out, n)


class Projection(NamedTuple):
    """A linear map of channels; the identity if it has neither a matrix nor a function."""

    matrix: Tensor | None = None  # `(out, in)`, `out` being the channels of all heads in order; or by head, `(h, r, d)`
    bias: Tensor | None = None  # `(out,)`
    run: Run | None = None  # on positions, before the matrix: of a module that no matrix defines, or to save MACs
    source: tuple[Tensor, Tensor, Tensor | None] | None = None  # what `LinearRun` made these positions of, and how


@dataclass(frozen=True)
class LinearRun:
    """A projection that runs on positions, so that no gradient needs what it made: that is made again."""

    matrix: Tensor
    bias: Tensor | None

    def __call__(self, positions: Tensor) -> Tensor:
        """Project positions `(b, in, n)` to `(b, out, n)`."""
        return project(positions, Projection(self.matrix, self.bias))


IDENTITY = Projection()


def map_heads(
    operator: Operator, query: Projection, key: Projection, learned: Mapping[str, Tensor], heads: int
) -> tuple[Projection, Projection]:
    """Compose projections of queries and keys with what an operator with a score multiplies them with, head by head.

    `learned` holds the tensors of `operator.parameter_shapes`; a weight of ones `(c,)` if it learns none.
    """
    of_queries, of_keys = head_matrices(operator, learned, heads)
    if operator.score == "latents" and query.matrix is None and query.run is None:
        query = key  # queries are made as keys are, unless they have a projection of their own
    same = query is key and of_queries is of_keys
    mapped = _compose_by_head(query, of_queries)
    return mapped, mapped if same else _compose_by_head(key, of_keys)


def head_matrices(operator: Operator, learned: Mapping[str, Tensor], heads: int) -> tuple[Tensor, Tensor]:
    """Return the matrices `(h, r, d)` that queries and keys are multiplied with, from what the operator learns."""
    if operator.score == "maps":
        return learned["query_map"], learned["key_map"]
    matrices = learned["latents"] if operator.score == "latents" else learned["weight"].view(heads, 1, -1)
    return matrices, matrices


def _compose_by_head(projection: Projection, matrices: Tensor) -> Projection:
    """Compose a projection with a matrix per head, `(h, r, d)`, to h·r channels: M(Wx + b) = (MW)x + Mb."""
    (heads, rows, depth), (matrix, bias, run, _) = matrices.shape, projection
    if matrix is None and heads == 1:
        return Projection(matrices[0], None, run)
    if matrix is None and rows == 1:  # along the diagonal of one: kernels of scores read positions once, for all heads
        ones = torch.eye(len(matrices), dtype=matrices.dtype, device=matrices.device)[:, None, :, None]
        return Projection((ones * matrices[:, :, None]).flatten(2).flatten(0, 1), None, run)
    if matrix is None:
        return Projection(matrices, None, run)
    if not is_composed(heads, rows, heads * depth, matrix.shape[1]):
        return Projection(matrices, None, LinearRun(matrix, bias))
    matrix = (matrices @ matrix.to(matrices.dtype).unflatten(0, (heads, -1))).flatten(0, 1)
    if bias is not None:
        bias = (matrices @ bias.to(matrices.dtype).view(heads, -1, 1)).flatten()
    return Projection(matrix, bias)


def split_heads(positions: Tensor, heads: int) -> Tensor:
    """View `(b, c, n)` as `(b, h, c/h, n)`."""
    return positions[:, None] if heads == 1 else positions.unflatten(1, (heads, -1))


def project(positions: Tensor, projection: Projection) -> Tensor:
    """Project positions `(b, in, n)` to `(b, out, n)` by the matrix; the identity returns them unchanged."""
    matrix, bias, *_ = projection
    if matrix is None:
        return positions
    if matrix.dim() == 3:
        return (matrix.to(positions.dtype) @ split_heads(positions, len(matrix))).flatten(1, 2)
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
    value: Projection = IDENTITY  # acts on the summary, or on positions where that is cheaper
    output: Projection = IDENTITY  # acts on the summary where that is cheaper
    norm: _FoldedNorm | None = None  # of coefficients or responses

    def count_work(self, queries: int, keys: int, channels: int, width: int) -> Work:
        """Return the sizes of one sample; channels and width are those of queries and values before projections."""
        query, value, output = self.query.matrix, self.value.matrix, self.output.matrix
        inner = channels if query is None else query.shape[:-1].numel()
        biased = self.output.bias is not None or (self.norm is not None and self.norm.bias is not None)
        width, projected = (width, 0) if value is None else value.shape
        out = 0 if output is None else len(output)
        return Work(queries, keys, inner, width, self.heads, projected, out, biased, self.operator.slots)


def by_head(call: Call, dtype: torch.dtype) -> Tensor:
    """Split the matrix of the output projection by the input channels of each head: `(h, out, c)`."""
    return cast(Tensor, call.output.matrix).to(dtype).unflatten(1, (call.heads, -1)).transpose(0, 1)


def run_part(projection: Projection, gathered: Gathered, side_by_side: bool) -> tuple[Projection, Gathered]:
    """Run what comes before a matrix on positions, on the means of those that are sums; return the rest, and these."""
    (matrix, bias, run, _), (positions, valid) = projection, gathered
    if run is None:
        return projection, gathered
    made = run(positions) if side_by_side else run(positions / nonzero(valid)) * valid
    source = (positions, run.matrix, run.bias) if isinstance(run, LinearRun) else None
    return Projection(matrix, bias, None, source), Gathered(made, valid)


def project_keys(call: Call, gathered: Gathered) -> Tensor:
    """Project gathered positions to keys `(b, h, d, n)`; d is 1 for scores."""
    side_by_side = call.operator.keys_from.side_by_side
    if not call.operator.reads_keys:  # any keys do
        return gathered.valid[:, None].expand(-1, call.heads, -1, -1)
    (matrix, bias, *_), (positions, valid) = run_part(call.key, gathered, side_by_side)
    if side_by_side or bias is None:
        return split_heads(project(positions, call.key), call.heads)
    # Sums of positions give sums of keys, each with as many biases as positions.
    return split_heads(project(positions, Projection(matrix)) + bias[:, None].to(positions.dtype) * valid, call.heads)


def project_queries(call: Call, gathered: Gathered) -> Tensor:
    """Project gathered positions to queries `(b, h, d, m)`, of the means of those that are sums; d is 1 for scores."""
    side_by_side = call.operator.queries_from.side_by_side
    (matrix, bias, *_), (positions, valid) = run_part(call.query, gathered, side_by_side)
    if side_by_side:
        return split_heads(project(positions, call.query), call.heads)
    queries = project(positions / valid.clamp_min(1), Projection(matrix))  # 0 for a sum without a valid position
    queries = queries if bias is None else queries + bias[:, None].to(positions.dtype) * (valid > 0)
    return split_heads(queries, call.heads)
