"""The rows (channels of keys and queries) that are projected from positions, and their projection."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from farfield.ops.projection import Projection
from farfield.ops.table import Operator


class RowPlan(NamedTuple):
    """The rows that `project_and_summarize` projects, and how it summarizes.

    Attributes:
        operator: The operator.
        heads: Number of heads.
        keys: Number of rows that are keys; they come first.
        queries: Number of rows that are queries; they come last.
        same: Whether the same rows are both keys and queries.
        shared: Whether every head summarizes all channels.
        complete: Whether all positions are valid.
    """

    operator: Operator
    heads: int
    keys: int
    queries: int
    same: bool
    shared: bool
    complete: bool


def stack_projections(key: Projection, query: Projection) -> Projection:
    """Return one projection for keys and queries, so that positions are read once; either may be the identity."""
    if key.matrix is None or query.matrix is None:
        return query if key.matrix is None else key
    biases = [
        one.matrix.new_zeros(len(one.matrix)) if one.bias is None else one.bias
        for one in (key, query)
        if one.matrix is not None
    ]
    return Projection(torch.cat([key.matrix, query.matrix]), torch.cat(biases))


def split_gradients(grads: Projection, key: Projection, query: Projection) -> Iterator[Tensor | None]:
    """Split the gradients of `stack_projections` into those of its matrices and biases, in order."""
    start = 0
    for one in (key, query):
        end = start if one.matrix is None else start + len(one.matrix)
        for part, grad in zip(one, grads, strict=True):
            yield None if part is None or grad is None else grad[start:end]
        start = end
