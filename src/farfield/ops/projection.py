"""Linear maps of the channels of a grid: how its positions are projected to queries, keys, values and outputs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor


class Projection(NamedTuple):
    """A linear map of channels; the identity, if it has no matrix.

    Attributes:
        matrix: `(out, in)`; `out` are the heads' channels side by side.
        bias: `(out,)`.
    """

    matrix: Tensor | None = None
    bias: Tensor | None = None

    def by_head(self, heads: int) -> Tensor:
        """The matrix of each head's output channels, `(h, out/h, in)`."""
        return self.matrix.unflatten(0, (heads, -1))  # type: ignore[union-attr]  # asked of maps alone


def score_matrix(vector: Tensor, heads: int) -> Tensor:
    """A vector `(c,)`, c/heads numbers a head, as a map to one score a head, `(heads, c)`."""
    if heads == 1:
        return vector[None]
    return (torch.eye(heads, dtype=vector.dtype, device=vector.device)[:, :, None] * vector.view(heads, -1)).flatten(1)


def split_heads(cells: Tensor, heads: int) -> Tensor:
    """`(b, c, n)` to `(b, h, c/h, n)`, by view."""
    return cells[:, None] if heads == 1 else cells.unflatten(1, (heads, -1))


def project(cells: Tensor, projection: Projection) -> Tensor:
    """`(b, out, n)`: positions `(b, in, n)` through a map, or as they are."""
    matrix, bias = projection
    if matrix is None:
        return cells
    # Expanded, or matmul would fold samples and positions into one dimension, by a copy of them.
    matrix = matrix.to(cells.dtype).expand(cells.shape[0], -1, -1)  # sums of half precision are float32
    return matrix @ cells if bias is None else torch.baddbmm(bias[:, None].to(cells.dtype), matrix, cells)


def stacked(key: Projection, query: Projection) -> Projection:
    """Return one map for keys and queries, so that positions are read once for both; one of them may be no map."""
    if key.matrix is None or query.matrix is None:
        return query if key.matrix is None else key
    biases = [
        one.matrix.new_zeros(len(one.matrix)) if one.bias is None else one.bias
        for one in (key, query)
        if one.matrix is not None
    ]
    return Projection(torch.cat([key.matrix, query.matrix]), torch.cat(biases))


def unstacked(found: Projection, key: Projection, query: Projection) -> Iterator[Tensor | None]:
    """Gradients of `stacked`, of its matrices and biases in order."""
    start = 0
    for one in (key, query):
        end = start if one.matrix is None else start + len(one.matrix)
        for part, grad in zip(one, found, strict=True):
            yield None if part is None or grad is None else grad[start:end]
        start = end
