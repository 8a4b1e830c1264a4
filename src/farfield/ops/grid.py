"""Positions of a grid: how queries, keys and values are gathered from a grid and responses scattered into one.

A grid is `(batch, channels, *size)`; its positions are `(batch, channels, positions)`. The place of a tile in a larger
grid is `(origin, size)`: its first index on each axis, and the size of the whole.
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

from farfield._checks import ShapeError, check_positions
from farfield._refusals import refusal
from farfield.ops.modes import can_be_read, is_recorded_for_tiles

Place = tuple[tuple[int, ...], tuple[int, ...]]  # origin of a tile, size of the whole


class Gathered(NamedTuple):
    """Positions of a grid, and which of them are valid.

    Attributes:
        positions: `(b, c, n)`; 0 where a position is masked.
        valid: `(b, 1, n)`; 1 where a position is valid, else 0. For axis sums the number of valid positions in each.
            Where positions have weights, these and the sums of these.
    """

    positions: Tensor
    valid: Tensor

    def merge(self, other: Gathered) -> Gathered:
        """Add the sums and counts of another tile; for axis sums only."""
        return Gathered(self.positions + other.positions, self.valid + other.valid)


def refuse_scatter(responses: Tensor, size: Sequence[int], place: Place | None = None) -> Tensor:
    """Raise ValueError: for such positions, as pooled ones, no function puts responses into a grid."""
    raise ValueError(
        "Operator: queries cannot come from positions without a scatter function, such as pooled ones; "
        "fix: queries_from=ops.ALL or ops.AXES."
    )


class Positions(NamedTuple):
    """Where queries, or keys and values, come from.

    Attributes:
        gather: `(grid, mask, place) -> Gathered`; where keys have weights it is given them too, as a fourth argument.
        scatter: `(responses (b, c, n), size, place) -> grid`; the default raises an error: only keys come from there.
        side_by_side: True if the positions of tiles are concatenated, False if they are added.
        normalize: `(responses, valid, spatial_dims) -> responses`, applied before the scatter; None changes nothing.
    """

    gather: Callable[..., Gathered]
    scatter: Callable[..., Tensor] = refuse_scatter
    side_by_side: bool = True
    normalize: Callable[[Tensor, Tensor, int], Tensor] | None = None

    def normalized(self, responses: Tensor, valid: Tensor, spatial_dims: int) -> Tensor:
        """Apply `normalize` to responses before they are scattered."""
        return responses if self.normalize is None else self.normalize(responses, valid, spatial_dims)


def accumulation(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which sums over positions accumulate: float32 or wider."""
    return torch.promote_types(dtype, torch.float32)


def hide(grid: Tensor, mask: Tensor | None, weight: Tensor | None = None) -> Tensor:
    """Set masked positions to 0, whatever they hold, and multiply others with their weights."""
    shown = grid if mask is None else torch.where(mask[:, None], grid, 0)
    return shown if weight is None else shown * weight[:, None]


def nonzero(sums: Tensor) -> Tensor:
    """Return sums as divisors: 1 where one is 0, as so is what is divided by it."""
    return torch.where(sums == 0, 1, sums)


def check_weight(name: str, weight: Tensor | None, owner: str, grid: Tensor) -> None:
    """Refuse weights that are not real numbers from 0, one for each position of the grid they belong to."""
    if weight is None:
        return
    if not isinstance(weight, Tensor) or weight.is_complex():
        kind = weight.dtype if isinstance(weight, Tensor) else type(weight).__name__
        fix = f"{name}.abs()" if isinstance(weight, Tensor) else f"torch.as_tensor({name})"
        raise refusal(TypeError, f"{name} must be a tensor of real numbers, got {kind}; fix: {fix}.")
    check_positions(name, weight, owner, grid)
    if can_be_read(weight) and not bool(((weight >= 0) & weight.isfinite()).all()):
        fix = f"{name}.nan_to_num(0, 0, 0).clamp_min(0), where 0 masks a position."
        numbers = f"{float(weight.min()):.4g} to {float(weight.max()):.4g}"
        raise refusal(ValueError, f"{name} must be finite and not negative, got {numbers}; fix: {fix}")


def measure(mask: Tensor | None, weight: Tensor, grid: Tensor) -> tuple[Tensor, Tensor]:
    """Return the valid positions of a grid and their weights: a weight of 0 masks, and a masked position weighs 0."""
    weight = weight.to(accumulation(grid.dtype))
    valid = weight > 0 if mask is None else mask & (weight > 0)
    return valid, torch.where(valid, weight, 0)


def _valid_positions(grid: Tensor, mask: Tensor | None) -> Tensor:
    """Return `(b, 1, *size)`, 1 where a position is valid; without a mask it is one number, expanded."""
    dtype = accumulation(grid.dtype)
    if mask is not None:
        return mask[:, None].to(dtype)
    if is_recorded_for_tiles():
        # Computed from the grid, so that the graph knows of which positions it is; 1 of any number, NaN included.
        return grid[:, :1].to(dtype) ** 0
    return grid.new_ones((), dtype=dtype).expand(grid.shape[0], 1, *grid.shape[2:])


# ---- all positions ---------------------------------------------------------------------------------------------------
def flatten(
    grid: Tensor, mask: Tensor | None = None, place: Place | None = None, weight: Tensor | None = None
) -> Gathered:
    """Gather every position (KAN §2.2, unfolding along the channel mode); without a mask, as a view."""
    valid = _valid_positions(grid, mask) if weight is None else weight[:, None]
    return Gathered(hide(grid, mask).flatten(2), valid.flatten(2))


def unflatten(responses: Tensor, size: Sequence[int], place: Place | None = None) -> Tensor:
    """Scatter one response per position back to a grid, as a view."""
    return responses.unflatten(2, tuple(size))


# ---- pooled positions ------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Pool:
    """Pool windows of `size` in ceil mode: the maximum or the mean of their valid positions, channel by channel."""

    size: int | tuple[int, ...]
    kind: str

    def windows(self, spatial_dims: int) -> tuple[int, ...]:
        """Return the size of a window along each axis."""
        return (self.size,) * spatial_dims if isinstance(self.size, int) else self.size

    def __call__(
        self, grid: Tensor, mask: Tensor | None = None, place: Place | None = None, weight: Tensor | None = None
    ) -> Gathered:
        """Pool a grid; the windows of a tile must be windows of the whole, so tiles start at multiples of `size`."""
        spatial_dims = grid.dim() - 2
        sizes = self.windows(spatial_dims)
        if len(sizes) != spatial_dims:
            raise ShapeError(
                f"pooled: a window of {sizes} does not fit a grid of {spatial_dims} spatial dims; "
                f"fix: pooled({max(sizes)}), or a size of {spatial_dims} numbers."
            )
        if place is not None and any(start % step for start, step in zip(place[0], sizes, strict=True)):
            name = "even indices" if set(sizes) == {2} else f"multiples of {sizes}"
            raise ShapeError(f"pooled: a tile must start at {name}, got origin={place[0]}; fix: shift the tiles.")
        valid = _valid_positions(grid, mask)
        counts = windows(valid, sizes, 0).sum(-1)
        totals = counts if weight is None else windows(weight[:, None], sizes, 0).sum(-1)
        if self.kind == "mean":
            sums = windows(hide(grid, mask, weight).to(valid.dtype), sizes, 0).sum(-1)
            positions = (sums / nonzero(totals)).to(grid.dtype)
        else:
            positions = grid if mask is None else grid.masked_fill(~mask[:, None], -torch.inf)
            positions = torch.where(counts > 0, windows(positions, sizes, -torch.inf).amax(-1), 0)
        # A window counts for one position: it weighs what its valid ones do at the mean.
        return Gathered(positions.flatten(2), (totals / nonzero(counts)).flatten(2))


def windows(grid: Tensor, sizes: tuple[int, ...], fill: float) -> Tensor:
    """Return `(b, c, *ceil(size / sizes), window)`: the positions of each window, padded with `fill`."""
    spatial_dims = len(sizes)
    pad = [extent for length, size in zip(grid.shape[2:], sizes, strict=True) for extent in (-length % size, 0)]
    grid = F.pad(grid, pad[::-1], value=fill)
    for axis, size in enumerate(sizes):
        grid = grid.unflatten(2 + 2 * axis, (-1, size))
    return grid.permute(0, 1, *range(2, 2 + 2 * spatial_dims, 2), *range(3, 3 + 2 * spatial_dims, 2)).flatten(
        2 + spatial_dims
    )


# ---- axes ------------------------------------------------------------------------------------------------------------
def axis_sums(
    grid: Tensor, mask: Tensor | None = None, place: Place | None = None, weight: Tensor | None = None
) -> Gathered:
    """Gather the sums over all other axes and their numbers of valid positions, for each index of an axis (KAN 14)."""
    counts = valid_counts(grid, mask, place) if weight is None else along_axes(weight[:, None], place)
    return Gathered(along_axes(hide(grid, mask, weight), place), counts)


def along_axes(grid: Tensor, place: Place | None = None) -> Tensor:
    """Return `(b, c, Σ size)`: sums over all axes but one, the axes in the grid's order."""
    axes = range(2, grid.dim())
    others = [[other for other in axes if other != axis] for axis in axes]
    dtype = accumulation(grid.dtype)
    sums = [grid.sum(rest, dtype=dtype) if rest else grid.to(dtype) for rest in others]
    return torch.cat(_at_place(sums, place), -1)


def valid_counts(grid: Tensor, mask: Tensor | None = None, place: Place | None = None) -> Tensor:
    """Return `(b, 1, Σ size)`: the number of valid positions at each index of each axis."""
    if mask is not None:
        return along_axes(_valid_positions(grid, mask), place)
    size = tuple(grid.shape[2:])
    positions, dtype = math.prod(size), accumulation(grid.dtype)
    counts = [grid.new_full((grid.shape[0], 1, length), positions // length, dtype=dtype) for length in size]
    return torch.cat(_at_place(counts, place), -1)


def _at_place(parts: list[Tensor], place: Place | None) -> list[Tensor]:
    """Pad the vectors of a tile's axes with zeros to the lengths of the whole grid's axes."""
    if place is None:
        return parts
    return [
        F.pad(part, (start, length - start - part.shape[-1])) for part, start, length in zip(parts, *place, strict=True)
    ]


def add_axes(responses: Tensor, size: Sequence[int], place: Place | None = None) -> Tensor:
    """Scatter one response per index of each axis by outer sum (KAN 18); a tile takes its part of the axes."""
    if place is None:
        return _add_parts(list(responses.split_with_sizes(list(size), -1)))
    parts = responses.split_with_sizes(list(place[1]), -1)
    return _add_parts(
        [part.narrow(-1, start, length) for part, start, length in zip(parts, place[0], size, strict=True)]
    )


def _add_parts(parts: list[Tensor]) -> Tensor:
    """Return the outer sum of one vector per axis, `(b, c, length)` each."""
    ones = (1,) * len(parts)
    shapes = [(*ones[:axis], part.shape[-1], *ones[axis + 1 :]) for axis, part in enumerate(parts)]
    terms = [part.view(*part.shape[:2], *shape) for part, shape in zip(parts, shapes, strict=True)]
    return functools.reduce(torch.add, terms)


def count_mean_once(responses: Tensor, valid: Tensor, spatial_dims: int) -> Tensor:
    """Shift the axes' vectors `(b, c, Σ size)`: their outer sum then has the mean once, not once per axis (KAN 13)."""
    if spatial_dims == 1:
        return responses
    # With m the mean of the vectors of all n axes, weighted by their valid positions `(b, 1, Σ size)`, the outer sum
    # has the mean n·m. After (n - 1)/n · m is subtracted from each vector, it is m, and the implied attention rows sum
    # to 1.
    dtype = valid.dtype
    mean = (responses.to(dtype) * valid).sum(-1, keepdim=True) / valid.sum(-1, keepdim=True).clamp_min(1)
    return responses - ((spatial_dims - 1) / spatial_dims * mean).to(responses.dtype)


ALL = Positions(flatten, unflatten)
AXES = Positions(axis_sums, add_axes, side_by_side=False)
NORMALIZED_AXES = AXES._replace(normalize=count_mean_once)


def pooled(size: int | tuple[int, ...] = 2, kind: str = "max") -> Positions:
    """Return the positions of keys and values that are pooled first (Wang et al. 2018), for a user's own operator.

    Ceil mode: an axis of size 7 pooled by 2 has 4 windows. Masked positions take no part, nor does a window without a
    valid position. Tiles must start at multiples of the window.

    Args:
        size: Size of a window and its stride; one number from 1, or one per axis.
        kind: "max" or "mean" of the valid positions, channel by channel.

    Returns:
        The `keys_from` of an `Operator`.

    Raises:
        LookupError: If `kind` is neither.
        ValueError: If a size is below 1.

    Cost:
        One read of the grid.

    Reference: KAN Table 2.

    Example:
        >>> import dataclasses
        >>> from farfield.ops import OPERATORS, pooled
        >>> video = dataclasses.replace(OPERATORS["softmax_pooled"], keys_from=pooled((1, 2, 2)))
    """
    if kind not in ("max", "mean"):
        raise LookupError(f'pooled: no kind "{kind}"; it has max, mean.')
    if min((size,) if isinstance(size, int) else size, default=0) < 1:
        raise ValueError(f"pooled: a window needs whole numbers from 1, got size={size!r}; fix: pooled(2).")
    return Positions(Pool(size if isinstance(size, int) else tuple(size), kind))


POOLED = pooled()


# ---- memory formats -------------------------------------------------------------------------------------------------
def in_channels_last(grid: Tensor) -> bool:
    return not grid.is_contiguous() and grid.stride(1) == 1


def lay_out(positions: Tensor, wide: bool) -> Tensor:
    """Lay out `(b, c, n)` as a grid is, `wide` if in channels last, so that scattering writes in the grid's order."""
    return positions.mT.contiguous().mT if wide else positions.contiguous()


def in_layout_of(grid: Tensor, response: Tensor) -> Tensor:
    """Return the response in the query grid's memory format (channels last or contiguous), copied only if needed."""
    if in_channels_last(grid):
        return response.movedim(1, -1).contiguous().movedim(-1, 1)
    return response.contiguous()
