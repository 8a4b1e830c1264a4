"""Which rows are read from positions before these are summed."""

from __future__ import annotations

from typing import NamedTuple

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
        complete: Whether all cells are real.
    """

    row: Operator
    heads: int
    keys: int
    queries: int
    same: bool
    shared: bool
    complete: bool
