"""Checks of the arguments of blocks, with errors that name the fix."""

from __future__ import annotations

from torch import Tensor

from farfield._checks import shape_error
from farfield._refusals import refusal
from farfield.nn.spatial_dims import layers

# The names of the axes in error texts, by the number of spatial dims.
_SIZES = {1: "length", 2: "height, width", 3: "depth, height, width"}


def check_block(*, expansion: int, stride: int, spatial_dims: int, smallest: int) -> None:
    """Raise ValueError for an expansion or stride that is too small, or spatial dims that are not 1 to 3."""
    layers(spatial_dims)
    if expansion < smallest:
        why = "" if smallest == 1 else ": the local path has (expansion - 1) times the channels"
        raise refusal(ValueError, f"expansion must be {smallest} at least{why}, got {expansion=}.")
    if stride < 1:
        raise refusal(ValueError, f"stride must be 1 at least, got {stride=}.")


def check_response_start(response_start: object) -> None:
    """Raise ValueError for a start of the responses' norm that is neither "zero" nor "one"."""
    if response_start not in ("zero", "one"):
        raise refusal(ValueError, f'response_start must be "zero" or "one", got {response_start!r:.60}; fix: "zero".')


def check_channels(grid: Tensor, channels: int, spatial_dims: int | None = None) -> None:
    """Raise ShapeError for a grid of other channels, or another number of spatial dims, than a block was built for."""
    if grid.dim() < 3 or grid.shape[1] != channels or (spatial_dims is not None and grid.dim() != spatial_dims + 2):
        size = "*size" if spatial_dims is None else _SIZES[spatial_dims]
        expected = f"(batch, {channels}, {size})"
        if spatial_dims is not None and grid.dim() == spatial_dims + 1 and grid.shape[0] == channels:
            fix = "add the batch, grid[None]."
        elif grid.dim() < 3 or (spatial_dims is not None and grid.dim() - 2 not in _SIZES):
            fix = f"reshape the grid to {expected}."
        else:
            fix = f"a block for this grid: channels={grid.shape[1]}"
            fix += "." if spatial_dims is None else f", spatial_dims={grid.dim() - 2}."
        raise shape_error(f"the grid must be {expected}.", fix, grid=grid)
