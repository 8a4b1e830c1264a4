"""How cells are read as keys and queries: by a linear map of their channels, or as they are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from farfield.ops.summary import split_heads


class Reading(NamedTuple):
    """The linear map by which cells are read as keys or queries; as they are, if there is none.

    Attributes:
        matrix: `(h·d, c)`.
        bias: `(h·d,)`.
    """

    matrix: Tensor | None = None
    bias: Tensor | None = None


def by_head(vector: Tensor, heads: int) -> Tensor:
    """A vector `(c,)`, c/heads numbers a head, as a map to one score a head, `(heads, c)`."""
    if heads == 1:
        return vector[None]
    return (torch.eye(heads, dtype=vector.dtype, device=vector.device)[:, :, None] * vector.view(heads, -1)).flatten(1)


def read(reading: Reading, cells: Tensor, heads: int) -> Tensor:
    """Read cells `(b, c, n)` as keys or queries `(b, h, d, n)`."""
    return split_heads(rows_of(cells, *reading), heads)


def rows_of(cells: Tensor, matrix: Tensor | None, bias: Tensor | None) -> Tensor:
    """`(b, h·d, n)`: the cells through a map, or as they are."""
    if matrix is None:
        return cells
    # Expanded, or matmul would fold samples and cells into one dimension, by a copy of the cells.
    matrix = matrix.to(cells.dtype).expand(cells.shape[0], -1, -1)  # sums of half precision are float32
    return matrix @ cells if bias is None else torch.baddbmm(bias[:, None], matrix, cells)


def stacked(key: Reading, query: Reading) -> Reading:
    """Return one map for keys and queries, so that the cells are read once for both; one of them may be no map."""
    if key.matrix is None or query.matrix is None:
        return query if key.matrix is None else key
    biases = [
        one.matrix.new_zeros(len(one.matrix)) if one.bias is None else one.bias
        for one in (key, query)
        if one.matrix is not None
    ]
    return Reading(torch.cat([key.matrix, query.matrix]), torch.cat(biases))


def unstacked(found: Reading, key: Reading, query: Reading) -> Iterator[Tensor | None]:
    """Gradients of `stacked`, of its matrices and biases in order."""
    start = 0
    for one in (key, query):
        end = start if one.matrix is None else start + len(one.matrix)
        for part, grad in zip(one, found, strict=True):
            yield None if part is None or grad is None else grad[start:end]
        start = end
