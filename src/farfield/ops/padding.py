"""Grids of different sizes in one batch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from farfield._checks import ShapeError, check_same_kind, shape_error
from farfield._refusals import door, refusal


@door("pad_grids")
def pad_grids(grids: Sequence[Float[Tensor, "c ..."]]) -> tuple[Float[Tensor, "b c *n"], Bool[Tensor, " b *n"]]:
    """Make one batch of grids of different sizes, and the mask of their valid positions.

    With the mask as `mask` and `query_mask`, every operator's responses are those of each grid alone, up to rounding.

    Args:
        grids: Grids `(c, *size)` with the same number of spatial dims, channels, dtype and device.

    Returns:
        The batch `(b, c, *largest size)`, with zeros after the end of each grid, and the mask `(b, *largest size)`,
        True where a position is valid.

    Raises:
        ShapeError: If there are no grids, one is empty or has no spatial dim, or their numbers of spatial dims or
            channels differ.
        TypeError: If one is not floating point, or their dtypes differ.
        ValueError: If their devices differ.

    Cost:
        One copy.

    Example:
        >>> import torch
        >>> from farfield import pad_grids
        >>> batch, mask = pad_grids([torch.ones(8, 3, 5), torch.ones(8, 4, 2)])
        >>> batch.shape, mask.sum((1, 2))
        (torch.Size([2, 8, 4, 5]), tensor([15,  8]))
    """
    grids = list(grids)
    if not grids:
        raise refusal(ShapeError, "it needs one grid at least, got none.")
    named = {f"grids[{index}]": grid for index, grid in enumerate(grids)}
    for name, grid in named.items():
        _check_sample(name, grid)
        if grid.dim() != grids[0].dim() or grid.shape[0] != grids[0].shape[0]:
            fix = "give all grids the same number of spatial dims and channels."
            raise shape_error(f"{name} does not fit grids[0].", fix, **{"grids[0]": grids[0], name: grid})
    check_same_kind(**named)
    size = [max(grid.shape[axis] for grid in grids) for axis in range(1, grids[0].dim())]
    batch = grids[0].new_zeros(len(grids), grids[0].shape[0], *size)
    mask = torch.zeros(len(grids), *size, dtype=torch.bool, device=batch.device)
    for index, grid in enumerate(grids):
        behind = [extent for side, whole in zip(grid.shape[1:], size, strict=True) for extent in (whole - side, 0)]
        batch[index] = F.pad(grid, behind[::-1])
        mask[index] = F.pad(mask.new_ones(grid.shape[1:]), behind[::-1])
    return batch, mask


def _check_sample(name: str, grid: Tensor) -> None:
    """Refuse anything but a floating-point grid `(channels, *size)` with channels and positions."""
    if not isinstance(grid, Tensor):
        raise refusal(
            TypeError,
            f"{name} must be a tensor (channels, *size), got {type(grid).__name__}; fix: torch.as_tensor({name}).",
        )
    if grid.dim() < 2:
        fix = f"add dims: {name}[:, None] if it has channels, {name}[None] if it has positions."
        raise shape_error(f"{name} must be (channels, *size) with a spatial dim.", fix, **{name: grid})
    if not grid.is_floating_point():
        raise refusal(TypeError, f"{name} must be floating point, got {grid.dtype}; fix: {name}.float().")
    if 0 in grid.shape:
        raise shape_error(f"{name} has an empty dimension.", "leave empty grids out.", **{name: grid})
