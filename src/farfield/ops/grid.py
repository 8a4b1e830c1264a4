"""Cells of a grid: which of them answer or ask, how they are gathered from a grid and scattered into one.

A grid is `(batch, channels, *sides)`; its cells are `(batch, channels, cells)`. A tile of a larger grid says where it
lies by a place, `(origin, sides)`: its first index on each axis, and the sides of the whole.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from farfield._checks import ShapeError

Place = tuple[tuple[int, ...], tuple[int, ...]]  # origin of a tile, sides of the whole


class Gathered(NamedTuple):
    """Cells of a grid and how real they are.

    Attributes:
        cells: `(b, c, n)`; 0 where nothing is real.
        real: `(b, 1, n)`; 1 where a cell is real, 0 where not. For axis sums the number of real cells summed.
    """

    cells: Tensor
    real: Tensor

    def merge(self, other: Gathered) -> Gathered:
        """Add the sums and counts of another tile (only axis sums add)."""
        return Gathered(self.cells + other.cells, self.real + other.real)


def never_asks(responses: Tensor, sides: Sequence[int], place: Place | None = None) -> Tensor:
    """Refuse to scatter: there is no cell of the grid that a pooled response belongs to."""
    raise ValueError("Operator: cells without a scatter only answer; fix: asks=ops.ALL or ops.AXES.")


class Cells(NamedTuple):
    """Which cells answer or ask.

    Attributes:
        gather: `(grid, mask, place) -> Gathered`.
        scatter: `(responses (b, c, n), sides, place) -> grid`; by default such cells only answer.
        side_by_side: True if tiles stand beside each other, False if they add up.
        normalize: `(responses, real, rank) -> responses`, before they are scattered; None leaves them as they are.
    """

    gather: Callable[..., Gathered]
    scatter: Callable[..., Tensor] = never_asks
    side_by_side: bool = True
    normalize: Callable[[Tensor, Tensor, int], Tensor] | None = None

    def normalized(self, responses: Tensor, real: Tensor, rank: int) -> Tensor:
        """The responses as they are scattered."""
        return responses if self.normalize is None else self.normalize(responses, real, rank)


def accumulation(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which sums over cells accumulate: float32 at least."""
    return torch.promote_types(dtype, torch.float32)


def hide(grid: Tensor, mask: Tensor | None) -> Tensor:
    """Read masked cells as 0, whatever they hold."""
    return grid if mask is None else torch.where(mask[:, None], grid, 0)


def real_cells(grid: Tensor, mask: Tensor | None) -> Tensor:
    """`(b, 1, *sides)`: 1 where a cell is real; without a mask one number, expanded."""
    dtype = accumulation(grid.dtype)
    if mask is None:
        return grid.new_ones((), dtype=dtype).expand(grid.shape[0], 1, *grid.shape[2:])
    return mask[:, None].to(dtype)


# ---- all cells -------------------------------------------------------------------------------------------------------
def flatten(grid: Tensor, mask: Tensor | None = None, place: Place | None = None) -> Gathered:
    """Gather every cell, by view (KAN §2.2, unfolding along the channel mode)."""
    cells = grid.flatten(2)
    if mask is None:
        one = grid.new_ones((), dtype=accumulation(grid.dtype))
        return Gathered(cells, one.expand(cells.shape[0], 1, cells.shape[2]))
    return Gathered(hide(grid, mask).flatten(2), real_cells(grid, mask).flatten(2))


def unflatten(responses: Tensor, sides: Sequence[int], place: Place | None = None) -> Tensor:
    """Scatter one response a cell back to a grid, by view."""
    return responses.unflatten(2, tuple(sides))


# ---- pooled cells ----------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Pool:
    """Gather windows of `size` cells a side, ceil mode: their largest or mean real cell, channel by channel."""

    size: int | tuple[int, ...]
    kind: str

    def __call__(self, grid: Tensor, mask: Tensor | None = None, place: Place | None = None) -> Gathered:
        """Pool a grid; a window of a tile must be one of the whole, so tiles start at multiples of `size`."""
        return pool(grid, mask, place, self.size, self.kind)


def pool(grid: Tensor, mask: Tensor | None, place: Place | None, size: int | tuple[int, ...], kind: str) -> Gathered:
    """See `Pool`."""
    rank = grid.dim() - 2
    sizes = (size,) * rank if isinstance(size, int) else tuple(size)
    if len(sizes) != rank:
        raise ShapeError(f"softmax_pooled: a pooling size of {sizes} does not fit a grid of rank {rank}.")
    if place is not None and any(start % step for start, step in zip(place[0], sizes, strict=True)):
        name = "even indices" if set(sizes) == {2} else f"multiples of {sizes}"
        raise ShapeError(f"softmax_pooled: a tile must start at {name}, got origin={place[0]}; fix: shift the tiles.")
    real = real_cells(grid, mask)
    if kind == "mean":
        cells, real = windows(hide(grid, mask).to(real.dtype), sizes, 0).sum(-1), windows(real, sizes, 0).sum(-1)
        return Gathered((cells / real.clamp_min(1)).to(grid.dtype).flatten(2), (real > 0).to(real.dtype).flatten(2))
    cells = grid if mask is None else grid.masked_fill(~mask[:, None], -torch.inf)
    cells, real = windows(cells, sizes, -torch.inf).amax(-1), windows(real, sizes, 0).amax(-1)
    return Gathered(torch.where(real > 0, cells, 0).flatten(2), real.flatten(2))


def windows(grid: Tensor, sizes: tuple[int, ...], fill: float) -> Tensor:
    """`(b, c, *ceil(sides / sizes), window)`: the cells of each window side by side, padded by `fill`."""
    rank = len(sizes)
    pad = [extent for side, size in zip(grid.shape[2:], sizes, strict=True) for extent in (-side % size, 0)]
    grid = F.pad(grid, pad[::-1], value=fill)
    for axis, size in enumerate(sizes):
        grid = grid.unflatten(2 + 2 * axis, (-1, size))
    return grid.permute(0, 1, *range(2, 2 + 2 * rank, 2), *range(3, 3 + 2 * rank, 2)).flatten(2 + rank)


# ---- axes ------------------------------------------------------------------------------------------------------------
def axis_sums(grid: Tensor, mask: Tensor | None = None, place: Place | None = None) -> Gathered:
    """Gather, for each index of each axis, the sum over all other axes and the number of cells in it (KAN 14-15)."""
    return Gathered(along_axes(hide(grid, mask), place), real_counts(grid, mask, place))


def along_axes(grid: Tensor, place: Place | None = None) -> Tensor:
    """`(b, c, Σ sides)`: sums over all axes but one, the axes in the grid's order."""
    axes = range(2, grid.dim())
    others = [[other for other in axes if other != axis] for axis in axes]
    dtype = accumulation(grid.dtype)
    sums = [grid.sum(rest, dtype=dtype) if rest else grid.to(dtype) for rest in others]
    return torch.cat(at_place(sums, place), -1)


def real_counts(grid: Tensor, mask: Tensor | None = None, place: Place | None = None) -> Tensor:
    """`(b, 1, Σ sides)`: how many valid positions each index of each axis has."""
    if mask is not None:
        return along_axes(real_cells(grid, mask), place)
    sides = tuple(grid.shape[2:])
    cells, dtype = math.prod(sides), accumulation(grid.dtype)
    counts = [grid.new_full((grid.shape[0], 1, side), cells // side, dtype=dtype) for side in sides]
    return torch.cat(at_place(counts, place), -1)


def at_place(parts: list[Tensor], place: Place | None) -> list[Tensor]:
    """A tile's axes inside those of the whole, zeros around them."""
    if place is None:
        return parts
    return [
        F.pad(part, (start, side - start - part.shape[-1])) for part, start, side in zip(parts, *place, strict=True)
    ]


def add_axes(responses: Tensor, sides: Sequence[int], place: Place | None = None) -> Tensor:
    """Scatter one response an index into a grid by outer sum (KAN 18); a tile takes its part of the axes."""
    if place is None:
        return add_parts(list(responses.split_with_sizes(list(sides), -1)))
    parts = responses.split_with_sizes(list(place[1]), -1)
    return add_parts([part.narrow(-1, start, side) for part, start, side in zip(parts, place[0], sides, strict=True)])


def add_parts(parts: list[Tensor]) -> Tensor:
    """Outer sum of one vector an axis, `(b, c, side)` each."""
    ones = (1,) * len(parts)
    shapes = [(*ones[:axis], part.shape[-1], *ones[axis + 1 :]) for axis, part in enumerate(parts)]
    terms = [part.view(*part.shape[:2], *shape) for part, shape in zip(parts, shapes, strict=True)]
    return functools.reduce(torch.add, terms)


def count_mean_once(responses: Tensor, real: Tensor, rank: int) -> Tensor:
    """Take from the vectors of all axes what their outer sum has of its mean more than once (KAN 13).

    The outer sum of n axes' vectors has the mean over positions n·m, m being the mean of the vectors by the counts of
    their positions. With (n - 1)/n · m less in each, it has m, and the implied rows sum to 1.

    Args:
        responses: `(b, c, Σ sides)`.
        real: `(b, 1, Σ sides)`, how many valid positions each index has.
        rank: Number of axes.
    """
    if rank == 1:
        return responses
    dtype = real.dtype
    mean = (responses.to(dtype) * real).sum(-1, keepdim=True) / real.sum(-1, keepdim=True).clamp_min(1)
    return responses - ((rank - 1) / rank * mean).to(responses.dtype)


ALL = Cells(flatten, unflatten)
AXES = Cells(axis_sums, add_axes, side_by_side=False)
NORMALIZED_AXES = AXES._replace(normalize=count_mean_once)


def pooled(size: int | tuple[int, ...] = 2, kind: str = "max") -> Cells:
    """Return answering cells that are pooled first (Wang et al. 2018), for a row of one's own.

    Ceil mode: a side of 7 pooled by 2 has 4 windows. Masked cells take no part; a window without a real cell is none.

    Args:
        size: Cells a side in a window, its stride too; one number, or one a side.
        kind: "max" or "mean".

    Returns:
        The `answers` of an `Operator`.

    Raises:
        LookupError: If `kind` is neither.

    Cost:
        One read of the grid.

    Reference: KAN Table 2.

    Example:
        >>> import dataclasses
        >>> from farfield.ops import OPERATORS, pooled
        >>> video = dataclasses.replace(OPERATORS["softmax_pooled"], answers=pooled((1, 2, 2)))
    """
    if kind not in ("max", "mean"):
        raise LookupError(f'pooled: no kind "{kind}"; it has max, mean.')
    return Cells(Pool(size, kind))


POOLED = pooled()


# ---- memory formats -------------------------------------------------------------------------------------------------
def in_channels_last(grid: Tensor) -> bool:
    """Whether the channels of a cell lie side by side in memory."""
    return not grid.is_contiguous() and grid.stride(1) == 1


def laid_out_for(grid: Tensor, cells: Tensor) -> Tensor:
    """Responses `(b, c, n)` in memory as the asking grid's cells are, so that scattering them writes in its order."""
    return cells.mT.contiguous().mT if in_channels_last(grid) else cells.contiguous()


def in_layout_of(grid: Tensor, response: Tensor) -> Tensor:
    """The response in the asking grid's memory format (channels last or contiguous); copied only if it is not so."""
    if in_channels_last(grid):
        return response.movedim(1, -1).contiguous().movedim(-1, 1)
    return response.contiguous()
