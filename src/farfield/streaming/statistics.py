"""Functions of torch that need the whole grid, as statistics of tiles that merge: norms, means, maxima and pooling.

Each entry of `FUNCTIONS` takes the arguments of its function of torch, and returns a `Statistic` of the call, or None
for a call that needs no other positions. Variances merge by Chan, Golub and LeVeque's formula in float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

# A summary is a few tensors whose shapes do not depend on the tile.
Parts = tuple[Tensor, ...]


class TilePlace(NamedTuple):
    """Where a tile lies.

    Attributes:
        origin: The tile's first index on each spatial axis of the whole grid.
        size: Size of the whole grid.
    """

    origin: tuple[int, ...]
    size: tuple[int, ...]


class Statistic(NamedTuple):
    """How one call of a function runs in tiles.

    Attributes:
        grid: The grid that the function was called with.
        shape: Shape of its result.
        keeps_size: Whether the result is a grid of the same size, of which a tile gets its part; otherwise every tile
            gets all of it.
        summarize: (own positions of a tile, their place) -> summary.
        merge: (summary, summary) -> summary of both.
        apply: (tile, merged summary, place) -> result for the tile.
    """

    grid: Tensor
    shape: tuple[int, ...]
    keeps_size: bool
    summarize: Callable[[Tensor, TilePlace], Parts]
    merge: Callable[[Parts, Parts], Parts]
    apply: Callable[[Tensor, Parts, TilePlace], Tensor]

    def placeholder(self, grid: Tensor) -> Tensor:
        """Return a result that has this shape and in which no position depends on another.

        A result that is a grid of the same size is a positionwise function of the grid. Any other has a fixed number
        for each element, all different, so that a later layer which depends on the grid's size is noticed.
        """
        if self.keeps_size:
            return mix_channels(grid).expand(self.shape).clone()
        fixed = torch.linspace(0.5, 1.5, math.prod(self.shape[1:]), device=grid.device, dtype=grid.dtype)
        return fixed.reshape(1, *self.shape[1:]).expand(grid.shape[0], *self.shape[1:]).clone()


def mix_channels(grid: Tensor) -> Tensor:
    """Return a sum of a grid's channels, `(batch, 1, *size)`, that is not 0 where their mean is, as after a norm."""
    weights = torch.linspace(0.5, 1.5, grid.shape[1], device=grid.device, dtype=grid.dtype)
    return (grid * weights.view(-1, *[1] * (grid.dim() - 2))).mean(1, keepdim=True)


def add(first: Parts, second: Parts) -> Parts:
    """Merge sums."""
    return tuple(one + other for one, other in zip(first, second, strict=True))


def larger(first: Parts, second: Parts) -> Parts:
    """Merge maxima."""
    return tuple(torch.maximum(one, other) for one, other in zip(first, second, strict=True))


def merge_moments(first: Parts, second: Parts) -> Parts:
    """Merge (count, mean, sum of squared deviations): δ = m₂ - m₁, m = m₁ + δ n₂/n, M = M₁ + M₂ + δ² n₁ n₂/n."""
    (count, mean, squares), (other_count, other_mean, other_squares) = first, second
    total = count + other_count
    difference = other_mean - mean
    share = other_count / total
    return total, mean + difference * share, squares + other_squares + difference**2 * count * share


# ---- norms -----------------------------------------------------------------------------------------------------------
def normalization(
    grid: Tensor, dims: tuple[int, ...], groups: int, eps: float, scale: Callable[[Tensor, TilePlace], tuple[Any, Any]]
) -> Statistic:
    """Return the statistic of (x - mean) / sqrt(variance + eps) * weight + bias.

    Args:
        grid: The grid.
        dims: Axes over which mean and variance are taken, of the grid as (batch, groups, channels a group, *size).
        groups: Number of groups of channels.
        eps: Added to the variance.
        scale: (tile, place) -> weight and bias of the tile, which broadcast against it; None for none.
    """

    def split(tile: Tensor) -> Tensor:
        return tile.unflatten(1, (groups, -1))

    def summarize(tile: Tensor, place: TilePlace) -> Parts:
        wide = split(tile).to(torch.promote_types(tile.dtype, torch.float32))
        variance, mean = (part.double() for part in torch.var_mean(wide, dims, correction=0, keepdim=True))
        count = torch.full_like(mean, wide.numel() // mean.numel())
        return count, mean, variance * count

    def apply(tile: Tensor, parts: Parts, place: TilePlace) -> Tensor:
        count, mean, squares = parts
        inverse = (squares / count + eps).rsqrt()
        wide = split(tile).to(torch.promote_types(tile.dtype, torch.float32))
        result = torch.addcmul((-mean * inverse).to(wide), wide, inverse.to(wide)).flatten(1, 2)
        weight, bias = scale(tile, place)
        if weight is not None:
            result = result * weight
        return (result if bias is None else result + bias).to(tile.dtype)

    return Statistic(grid, tuple(grid.shape), True, summarize, merge_moments, apply)


def by_channel(*parameters: Tensor | None) -> Callable[[Tensor, TilePlace], tuple[Any, Any]]:
    """Return the function that gives the parameters of all channels, which are the same for all tiles."""

    def scale(tile: Tensor, place: TilePlace) -> tuple[Any, Any]:
        ones = (1,) * (tile.dim() - 2)
        weight, bias = (None if each is None else each.view(-1, *ones) for each in parameters)
        return weight, bias

    return scale


def group_norm(
    input: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Statistic | None:
    """`torch.nn.functional.group_norm`."""
    if input.dim() < 3:
        return None
    return normalization(input, tuple(range(2, input.dim() + 1)), num_groups, eps, by_channel(weight, bias))


def instance_norm(
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Statistic | None:
    """`torch.nn.functional.instance_norm`; local with running statistics."""
    if not use_input_stats or input.dim() < 3:
        return None
    return normalization(input, tuple(range(2, input.dim() + 1)), input.shape[1], eps, by_channel(weight, bias))


def batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Statistic | None:
    """`torch.nn.functional.batch_norm`; local with running statistics."""
    if not training or input.dim() < 3:
        return None
    return normalization(input, (0, *range(2, input.dim() + 1)), input.shape[1], eps, by_channel(weight, bias))


def layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Statistic | None:
    """`torch.nn.functional.layer_norm` over all spatial axes, with or without channels; over one axis it is local."""
    axes = len(normalized_shape)
    if axes < 2 or axes not in (input.dim() - 1, input.dim() - 2):
        return None

    def scale(tile: Tensor, place: TilePlace) -> tuple[Any, Any]:
        ends = zip(place.origin, tile.shape[2:], strict=True)
        own: tuple[Any, ...] = (..., *(slice(start, start + length) for start, length in ends))
        return (None if weight is None else weight[own]), (None if bias is None else bias[own])

    groups = 1 if axes == input.dim() - 1 else input.shape[1]
    return normalization(input, tuple(range(2, input.dim() + 1)), groups, eps, scale)


# ---- means, maxima and pooling ---------------------------------------------------------------------------------------
def covers_grid(input: Tensor, dim: Any) -> bool:
    """Whether `dim` is all spatial axes of a grid of two or more; of three axes the last may be the channels."""
    if not isinstance(dim, tuple | list) or input.dim() < 4:
        return False
    return sorted(axis % input.dim() for axis in dim) == list(range(2, input.dim()))


def reduction(
    input: Tensor,
    keepdim: bool,
    summarize: Callable[[Tensor], Tensor],
    merge: Callable[[Parts, Parts], Parts],
    finish: Callable[[Tensor, int], Tensor],
) -> Statistic:
    """Return the statistic of a function of all positions of a channel.

    Args:
        input: The grid.
        keepdim: Whether the result has axes of length 1 in place of the spatial ones.
        summarize: Tile -> its summary, one number a sample and channel.
        merge: Merges two summaries.
        finish: (merged summary, number of positions) -> result.
    """
    shape = (*input.shape[:2], *([1] * (input.dim() - 2) if keepdim else []))

    def apply(tile: Tensor, parts: Parts, place: TilePlace) -> Tensor:
        return finish(parts[0], math.prod(place.size)).to(tile.dtype).reshape(*tile.shape[:2], *shape[2:])

    return Statistic(input, shape, False, lambda tile, place: (summarize(tile),), merge, apply)


def mean(input: Tensor, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Any:
    """`torch.mean` over all spatial axes."""
    if not covers_grid(input, dim) or dtype is not None:
        return None
    return reduction(
        input,
        keepdim,
        lambda tile: tile.flatten(2).sum(2, dtype=torch.float64),
        add,
        lambda total, count: total / count,
    )


def maximum(input: Tensor, dim: Any = (), keepdim: bool = False) -> Statistic | None:
    """`torch.amax` over all spatial axes."""
    if not covers_grid(input, dim):
        return None
    return reduction(input, keepdim, lambda tile: tile.flatten(2).amax(2), larger, lambda top, _: top)


def norm(
    input: Tensor, p: Any = "fro", dim: Any = None, keepdim: bool = False, dtype: torch.dtype | None = None
) -> Statistic | None:
    """`Tensor.norm` of order 2 over all spatial axes, as global response normalization has it."""
    if not covers_grid(input, dim) or p not in (2, "fro", None) or dtype is not None:
        return None
    return reduction(
        input, keepdim, lambda tile: tile.flatten(2).double().square().sum(2), add, lambda total, _: total.sqrt()
    )


def bins(length: int, count: int) -> list[tuple[int, int]]:
    """Return torch's windows of adaptive pooling along an axis: ⌊i·length/count⌋ to ⌈(i + 1)·length/count⌉."""
    return [(index * length // count, -(-(index + 1) * length // count)) for index in range(count)]


def pooling(
    input: Tensor, output_size: Any, reduce: Callable[[Tensor], Tensor], merge: Callable[[Parts, Parts], Parts]
) -> Statistic | None:
    """Return the statistic of pooling to a fixed size.

    Args:
        input: The grid.
        output_size: Size of the result: one number, or one per spatial dim.
        reduce: Box of positions `(batch, channels, positions)` -> one number a sample and channel; of an empty box, the
            value that changes nothing when it is merged.
        merge: Merges two summaries.
    """
    dims = input.dim() - 2
    size = (output_size,) * dims if isinstance(output_size, int) else tuple(output_size)
    if None in size:  # an axis that keeps its length
        return None

    def windows(place: TilePlace) -> list[list[tuple[int, int]]]:
        return [bins(length, count) for length, count in zip(place.size, size, strict=True)]

    def summarize(tile: Tensor, place: TilePlace) -> Parts:
        result = tile
        for axis, (spans, first) in enumerate(zip(windows(place), place.origin, strict=True), start=2):
            length = result.shape[axis]
            own = [[min(max(end - first, 0), length) for end in span] for span in spans]
            boxes = [reduce(result.narrow(axis, start, stop - start).movedim(axis, -1)) for start, stop in own]
            result = torch.stack(boxes, axis)
        return (result,)

    def apply(tile: Tensor, parts: Parts, place: TilePlace) -> Tensor:
        result = parts[0]
        if merge is add:
            for axis, spans in enumerate(windows(place)):
                lengths = torch.tensor([stop - start for start, stop in spans], dtype=result.dtype, device=tile.device)
                result = result / lengths.view(-1, *[1] * (dims - 1 - axis))
        return result.to(tile.dtype)

    return Statistic(input, (*input.shape[:2], *size), False, summarize, merge, apply)


def adaptive_average(input: Tensor, output_size: Any) -> Statistic | None:
    """`torch.nn.functional.adaptive_avg_pool1d` to `3d`."""
    return pooling(input, output_size, lambda box: box.sum(-1, dtype=torch.float64), add)


def adaptive_maximum(input: Tensor, output_size: Any, return_indices: bool = False) -> Statistic | None:
    """`torch.nn.functional.adaptive_max_pool1d` to `3d`, without indices."""
    if return_indices:
        return None

    def reduce(box: Tensor) -> Tensor:
        return box.amax(-1) if box.shape[-1] else box.new_full(box.shape[:-1], -torch.inf)

    return pooling(input, output_size, reduce, larger)


# Norms that keep the grid's size, which may be called on a flattened grid.
NORMS = (F.group_norm, F.instance_norm, F.batch_norm)

FUNCTIONS: dict[Any, Callable[..., Statistic | None]] = {
    F.group_norm: group_norm,
    F.instance_norm: instance_norm,
    F.batch_norm: batch_norm,
    F.layer_norm: layer_norm,
    torch.mean: mean,
    Tensor.mean: mean,
    torch.amax: maximum,
    Tensor.amax: maximum,
    torch.norm: norm,
    Tensor.norm: norm,
    F.adaptive_avg_pool1d: adaptive_average,
    F.adaptive_avg_pool2d: adaptive_average,
    F.adaptive_avg_pool3d: adaptive_average,
    F.adaptive_max_pool1d: adaptive_maximum,
    F.adaptive_max_pool2d: adaptive_maximum,
    F.adaptive_max_pool3d: adaptive_maximum,
}
