"""Merge the summaries of tiles in float64, so that rounding does not add up over many tiles."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any, Protocol

import torch
from torch import Tensor

from farfield.nn.attention import GridAttention
from farfield.ops.grid import Gathered
from farfield.ops.slots import Summary
from farfield.ops.summary import merge_all
from farfield.ops.table import keys, products, queries

# The share of the free memory that a summary which is its grid may take.
SUMMARY_SHARE = 1 / 2


def make_streamable(attention: GridAttention) -> GridAttention:
    """Return an attention with the same responses, and with a small summary if `attention` is `dot`.

    `dot` is V (KᵀQ), and its summary is the grid; its copy computes (V Kᵀ) Q, which is equal. Any other attention is
    returned itself.
    """
    operator = attention.operator
    if operator.basis is not None or operator.coefficients is not products:
        return attention
    twin = copy.copy(attention)
    twin.operator = dataclasses.replace(operator, basis=keys, coefficients=queries)
    return twin


def has_grid_summary(attention: GridAttention) -> bool:
    """Whether a summary has a slot for each key, and so grows with the grid: softmax and softmax_pooled."""
    operator = make_streamable(attention).operator
    return not operator.merges_by_adding


class Resumable(Protocol):
    """Something with a state that is saved after each tile."""

    def state(self) -> dict[str, Any]:
        """Return the state that `load` resumes from."""
        ...

    def load(self, state: dict[str, Any]) -> None:
        """Resume from a saved state."""
        ...


def not_finite(name: str, origin: tuple[int, ...]) -> ValueError:
    """Return the error for a summary that is not finite."""
    return ValueError(
        f"{name}: its input is not finite in the tile at {origin} of the volume, and would spread NaN to every "
        f"position; fix: numpy.nan_to_num(…, posinf=0, neginf=0) of the volume, or, in respond_whole, a mask of the "
        f"valid positions."
    )


class MergedSummary:
    """The merged summary of the tiles of one attention.

    Args:
        attention: The attention.
        name: What errors begin with: the path of the attention in its network, or the function that was called.
    """

    def __init__(self, attention: GridAttention, name: str) -> None:
        self.attention, self.name = make_streamable(attention), name
        self.parts: list[Summary] = []
        self.query_sums: Gathered | None = None
        self.dtypes: list[torch.dtype | None] = []
        self.masked = False

    def add(self, grid: Tensor, mask: Tensor | None, origin: tuple[int, ...], size: tuple[int, ...]) -> None:
        """Merge the summary of a tile's own positions.

        Args:
            grid: The tile's own positions, without halo.
            mask: Which of them are valid.
            origin: The tile's first index on each axis of the whole grid.
            size: Size of the whole grid.

        Raises:
            ValueError: If the summary is not finite: one such position would reach all others.
        """
        self.merge(self.attention.summarize(grid, mask=mask, origin=origin, size=size), origin)
        self.masked = self.masked or mask is not None

    def add_query_sums(self, grid: Tensor, mask: Tensor | None, origin: tuple[int, ...], size: tuple[int, ...]) -> None:
        """Add the sums that queries come from, over a tile's own positions; do nothing if queries are no sums."""
        if self.attention.operator.queries_from.side_by_side:
            return
        sums = self.attention.gather_queries(grid, mask=mask, origin=origin, size=size)
        sums = Gathered(*(part.cpu().double() for part in sums))
        self.query_sums = sums if self.query_sums is None else self.query_sums.merge(sums)

    def merge(self, summary: Summary, origin: tuple[int, ...]) -> None:
        """Merge the summary of the tile at `origin`.

        Raises:
            ValueError: If the summary is not finite.
        """
        if not (summary.values.isfinite().all() and summary.weights.isfinite().all()):
            raise not_finite(self.name, origin)
        tensors = [part for part in summary if isinstance(part, Tensor)]
        self.dtypes = [part.dtype if isinstance(part, Tensor) else None for part in summary]
        if summary.side_by_side:  # concatenated once, at the end
            self.parts.append(convert_summary(summary, "cpu", [tensor.dtype for tensor in tensors]))
            return
        wide = convert_summary(summary, "cpu", [torch.float64] * len(tensors))
        self.parts = [self.parts[0].merge(wide)] if self.parts else [wide]

    def whole(self, device: torch.device) -> tuple[Summary, Gathered | None]:
        """Return the merged summary, in the dtypes of the tiles' summaries, and the merged query sums or None."""
        dtypes = [dtype for dtype in self.dtypes if dtype is not None]
        summary = convert_summary(merge_all(self.parts), device, dtypes)
        # Without masks every slot has a valid position once all tiles are merged.
        summary = summary._replace(complete=not self.masked)
        if self.query_sums is None:
            return summary, None
        return summary, Gathered(*(part.to(device, summary.count.dtype) for part in self.query_sums))

    def state(self) -> dict[str, Any]:
        """Return the state that `load` resumes from."""
        query_sums = None if self.query_sums is None else tuple(self.query_sums)
        parts = [tuple(part) for part in self.parts]
        return {"parts": parts, "query_sums": query_sums, "dtypes": self.dtypes, "masked": self.masked}

    def load(self, state: dict[str, Any]) -> None:
        """Resume from a saved state."""
        self.parts, self.dtypes, self.masked = (
            [Summary(*part) for part in state["parts"]],
            state["dtypes"],
            state["masked"],
        )
        self.query_sums = None if state["query_sums"] is None else Gathered(*state["query_sums"])


def convert_summary(summary: Summary, device: torch.device | str, dtypes: list[torch.dtype]) -> Summary:
    """Move a summary to a device and convert its tensors to `dtypes`, which are in the order of its fields."""
    remaining = iter(dtypes)
    tensors = {name: part for name, part in summary._asdict().items() if isinstance(part, Tensor)}
    moved: dict[str, Any] = {name: part.to(device, next(remaining)) for name, part in tensors.items()}
    return summary._replace(**moved)


def summary_bytes(summary: Summary, query_sums: Gathered | None) -> int:
    """Return the bytes of the tensors of a summary, and of query sums if there are any."""
    tensors = [part for part in (*summary, *(query_sums or ())) if isinstance(part, Tensor)]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
