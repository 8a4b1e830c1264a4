"""Summaries of tiles as they merge, in double precision: so many tiles as there are, no rounding adds up."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import torch
from torch import Tensor

from farfield.nn.attention import GridAttention
from farfield.ops.grid import Gathered
from farfield.ops.slots import Summary
from farfield.ops.summary import merge_all
from farfield.ops.table import keys, products, queries


def streamed(attention: GridAttention) -> GridAttention:
    """The attention with the order of products whose summary is small: V (KᵀQ), `dot`, as (V Kᵀ) Q, its equal."""
    row = attention.operator
    if row.basis is not None or row.coefficients is not products:
        return attention
    twin = copy.copy(attention)
    twin.operator = dataclasses.replace(row, basis=keys, coefficients=queries)
    return twin


def is_grid(attention: GridAttention) -> bool:
    """Whether the summary is the grid itself, so that it does not stay small."""
    row = streamed(attention).operator
    return not row.merges_by_adding


class Merged:
    """What the tiles of one attention have said so far.

    Args:
        attention: Which.
        name: Its path, for errors.
    """

    def __init__(self, attention: GridAttention, name: str) -> None:
        self.attention, self.name = streamed(attention), name
        self.parts: list[Summary] = []
        self.query_sums: Gathered | None = None
        self.dtypes: list[torch.dtype | None] = []
        self.masked = False

    def add(self, grid: Tensor, mask: Tensor | None, origin: tuple[int, ...], size: tuple[int, ...]) -> None:
        """Add the own positions of a tile.

        Raises:
            ValueError: If they are not finite: one such position would reach every other.
        """
        self.hear(self.attention.summarize(grid, mask=mask, origin=origin, size=size), origin)
        self.masked = self.masked or mask is not None

    def ask(self, grid: Tensor, mask: Tensor | None, origin: tuple[int, ...], size: tuple[int, ...]) -> None:
        """Add the asking positions of a tile, where sums of them ask."""
        if self.attention.operator.queries_from.side_by_side:
            return
        found = self.attention.gather_queries(grid, mask=mask, origin=origin, size=size)
        found = Gathered(*(part.cpu().double() for part in found))
        self.query_sums = found if self.query_sums is None else self.query_sums.merge(found)

    def hear(self, summary: Summary, origin: tuple[int, ...]) -> None:
        """Merge the summary of a tile."""
        if not (summary.values.isfinite().all() and summary.weights.isfinite().all()):
            raise ValueError(
                f"{self.name}: what it reads is not finite in the tile at {origin}, and attention would spread that to "
                f"every position; fix: numpy.nan_to_num, or a mask of the valid positions."
            )
        tensors = [part for part in summary if isinstance(part, Tensor)]
        self.dtypes = [part.dtype if isinstance(part, Tensor) else None for part in summary]
        if summary.side_by_side:  # joined once, at the end
            self.parts.append(mapped(summary, "cpu", [tensor.dtype for tensor in tensors]))
            return
        wide = mapped(summary, "cpu", [torch.float64] * len(tensors))
        self.parts = [self.parts[0].merge(wide)] if self.parts else [wide]

    def whole(self, device: torch.device) -> tuple[Summary, Gathered | None]:
        """The summary of the whole and, where sums ask, those; in the dtypes a summary has."""
        dtypes = [dtype for dtype in self.dtypes if dtype is not None]
        summary = mapped(merge_all(self.parts), device, dtypes)
        # Without masks every slot has a position, now that all tiles are there.
        summary = summary._replace(complete=not self.masked)
        if self.query_sums is None:
            return summary, None
        return summary, Gathered(*(part.to(device, summary.count.dtype) for part in self.query_sums))

    def state(self) -> dict[str, Any]:
        """What has to be kept to go on from here."""
        query_sums = None if self.query_sums is None else tuple(self.query_sums)
        parts = [tuple(part) for part in self.parts]
        return {"parts": parts, "asked": query_sums, "dtypes": self.dtypes, "masked": self.masked}

    def load(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self.parts, self.dtypes, self.masked = (
            [Summary(*part) for part in state["parts"]],
            state["dtypes"],
            state["masked"],
        )
        self.query_sums = None if state["asked"] is None else Gathered(*state["asked"])


def mapped(summary: Summary, device: torch.device | str, dtypes: list[torch.dtype]) -> Summary:
    """A summary on another device, its tensors in these dtypes."""
    remaining = iter(dtypes)
    tensors = {name: part for name, part in summary._asdict().items() if isinstance(part, Tensor)}
    moved: dict[str, Any] = {name: part.to(device, next(remaining)) for name, part in tensors.items()}
    return summary._replace(**moved)


def summary_bytes(summary: Summary, query_sums: Gathered | None) -> int:
    """Bytes of a summary."""
    tensors = [part for part in (*summary, *(query_sums or ())) if isinstance(part, Tensor)]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
