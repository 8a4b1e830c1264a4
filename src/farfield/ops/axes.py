"""Means along the axes of a grid, and the outer sum of one vector per axis."""

from __future__ import annotations

from collections.abc import Sequence

from jaxtyping import Bool, Float
from torch import Tensor

from farfield._checks import check_grid, check_mask, shape_error
from farfield._refusals import door
from farfield.ops.engine import is_fast
from farfield.ops.fast import axes
from farfield.ops.grid import AXES


@door("axis_means")
def axis_means(grid: Float[Tensor, "b c *n"], *, mask: Bool[Tensor, " b *n"] | None = None) -> Float[Tensor, "b c s"]:
    """Average a grid over all axes but one, for each axis in turn.

    For one axis, entry i is the mean of X over all positions whose index on that axis is i; the axes are concatenated.

    These are KAN's lateral and horizontal means [L | H], for any number of spatial dims: the marginals that a Kronecker
    operator attends to in place of all positions. A grid of one spatial dim is its own axis mean.

    Args:
        grid: `(b, c, *n)`.
        mask: `(b, *n)`, True where a position is valid; means run over those, and are 0 at an index without one.

    Returns:
        `(b, c, Σ n)`, in the grid's dtype.

    Raises:
        ShapeError: If the grid has no spatial dim or an empty dimension, or the mask does not fit it.
        TypeError: If the grid is not floating point or the mask not boolean.
        ValueError: If the mask is on another device.

    Cost:
        b·c·N additions per axis, no MACs.

    Reference: KAN Eq. 14, KAN Eq. 15.

    Example:
        >>> import torch
        >>> from farfield import ops
        >>> ops.axis_means(torch.randn(2, 8, 16, 32, 32)).shape
        torch.Size([2, 8, 80])
    """
    check_grid("grid", grid)
    check_mask("mask", mask, "grid", grid)
    sums, counts = axes.gather(grid, mask) if is_fast() else AXES.gather(grid, mask, None)
    return (sums / counts.clamp_min(1)).to(grid.dtype)


@door("outer_sum")
def outer_sum(vectors: Float[Tensor, "b c s"], size: Sequence[int]) -> Float[Tensor, "b c *size"]:
    """Add the vectors of all axes into a grid.

    `Y[:, :, y, x] = L[:, :, y] + H[:, :, x]` for two spatial dims; in general one term per axis.

    Args:
        vectors: `(b, c, Σ size)`, the axes concatenated in the order of `size`.
        size: Spatial size of the grid.

    Returns:
        `(b, c, *size)`.

    Raises:
        ShapeError: If the vectors are not `(b, c, Σ size)`, or are empty.
        TypeError: If they are not floating point.

    Cost:
        (len(size) - 1)·b·c·N additions, no MACs.

    Reference: KAN Eq. 18 (Eq. 17 swaps the lengths of the two blocks; this is the consistent reading).

    Example:
        >>> import torch
        >>> from farfield import ops
        >>> ops.outer_sum(torch.tensor([[[1.0, 2.0, 10.0, 20.0, 30.0]]]), (2, 3))
        tensor([[[[11., 21., 31.],
                  [12., 22., 32.]]]])
    """
    check_grid("vectors", vectors)
    if vectors.dim() != 3 or vectors.shape[2] != sum(size):
        fix = f"concatenate one vector per axis, {sum(size)} numbers for size {tuple(size)}."
        raise shape_error("vectors must be (batch, channels, sum of size).", fix, vectors=vectors)
    return axes.outer_sum(vectors, size) if is_fast() else AXES.scatter(vectors, size)
