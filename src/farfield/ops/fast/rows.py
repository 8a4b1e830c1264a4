"""Which rows are read from positions before these are summed, and by which map."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from farfield.ops.projection import Projection
from farfield.ops.table import Operator


class RowPlan(NamedTuple):
    """What `read_and_summarize` does with the rows it reads.

    Attributes:
        row: The operator.
        heads: How many.
        keys: How many rows are keys, the first.
        queries: How many are queries, the last.
        same: Whether the same rows are both.
        shared: Whether every head hears all channels.
        complete: Whether all positions are valid.
    """

    row: Operator
    heads: int
    keys: int
    queries: int
    same: bool
    shared: bool
    complete: bool


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
