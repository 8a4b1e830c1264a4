"""The mean over all flips of a volume, in one piece or in tiles."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from farfield._checks import ShapeError
from farfield.streaming.adapt import Outputs, one_grid


class MeanOverFlips(nn.Module):
    """A network whose output is its mean over all flips of the grid, each flipped back: test-time mirroring.

    `mean over all subsets f of the axes: f(network(f(grid)))`

    `streaming.predict_whole` runs it in tiles: flips are operations of its graph, so all share the passes, and a tile
    reads its mirrored region of each. Each flip has summaries of its own, and sizes may be odd.

    Args:
        network: From one grid `(batch, channels, *size)`, or several of one size, to one of floating-point numbers, or
            to several of one size in a dict, tuple or list, of which each has its mean.
        axes: Spatial axes that are flipped, from 0; all subsets of them, so n axes give 2^n flips.

    Raises:
        TypeError: If `axes` is no sequence of integers; in `forward`, if the network returns integers.
        ValueError: If an axis is below 0, or given twice.
        ShapeError: In `forward`, if the grid has no such axis.

    Cost:
        2^n times the MACs of the network.

    Example:
        >>> from farfield.streaming import MeanOverFlips, predict_whole
        >>> net = MeanOverFlips(nn.Conv2d(1, 3, 5, padding=2), axes=(0, 1)).eval()
        >>> image = torch.randn(1, 40, 50)
        >>> scores = predict_whole(net, image, tile=16, quiet=True)
        >>> torch.allclose(scores, net(image[None])[0], atol=1e-5)
        True
    """

    def __init__(self, network: nn.Module, axes: Sequence[int]) -> None:
        super().__init__()
        given: Any = axes
        if not isinstance(given, Sequence) or any(type(axis) is not int for axis in given):
            raise TypeError(f"MeanOverFlips: axes must be integers, got {axes!r}; fix: axes=(0, 1), for example.")
        if any(axis < 0 for axis in axes) or len(set(axes)) < len(axes):
            raise ValueError(
                f"MeanOverFlips: axes must be different numbers from 0, got {axes!r}; fix: axes=(0, 1), for example; "
                "0 is the first spatial axis."
            )
        self.network, self.axes = network, tuple(axes)

    @property
    def flips(self) -> list[tuple[int, ...]]:
        """All subsets of the axes; the first is empty."""
        return [flip for number in range(len(self.axes) + 1) for flip in itertools.combinations(self.axes, number)]

    def extra_repr(self) -> str:
        """Return the axes, as text."""
        return f"axes={self.axes}"

    def forward(self, *grids: Float[Tensor, "b _ *n"]) -> Any:
        """Return the mean over all flips of the network's inputs: a grid, or several as the network returns them."""
        check_axes("MeanOverFlips", self, grids[0].dim() - 2)
        first, outputs = self._run_flipped(grids, ())
        if not first.is_floating_point():
            raise TypeError(
                f"MeanOverFlips: {type(self.network).__name__} returns {first.dtype}, of which there is no mean over "
                'flips; fix: a network that returns scores, and reduce="argmax" where labels are wanted.'
            )
        # One flip at a time is in memory.
        total = first.to(torch.promote_types(first.dtype, torch.float32))
        for flip in self.flips[1:]:
            total = total + self._run_flipped(grids, flip)[0].to(total.dtype)
        return outputs.split((total / len(self.flips)).to(first.dtype), 1, True)

    def _run_flipped(self, grids: Sequence[Tensor], flip: Sequence[int]) -> tuple[Tensor, Outputs]:
        """Run the network on flipped grids; return its outputs as one grid, flipped back."""
        output = self.network(*(_flip_grid(grid, flip) for grid in grids))
        grid, outputs = one_grid("MeanOverFlips", self.network, grids[0].shape, output)
        return _flip_grid(grid, flip), outputs


def check_axes(caller: str, model: MeanOverFlips, spatial_dims: int) -> None:
    """Raise ShapeError if a grid of this many spatial dims has not all axes that are flipped."""
    if max(model.axes, default=-1) >= spatial_dims:
        raise ShapeError(
            f"{caller}: the network is flipped along the axes {model.axes}, and the grid has {spatial_dims} spatial "
            f"dims; fix: axes from 0 to {spatial_dims - 1}."
        )


def _flip_grid(grid: Tensor, axes: Sequence[int]) -> Tensor:
    return grid.flip([axis + 2 for axis in axes]) if axes else grid
