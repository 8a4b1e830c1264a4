"""A depthwise convolution of the values beside an attention."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from farfield._checks import ShapeError, check_grid, check_mask, check_whole, shape_error
from farfield._refusals import door, refusal
from farfield.nn.bare import read_projection
from farfield.nn.initialization import DrawnByItself
from farfield.nn.spatial_dims import layers
from farfield.ops.grid import hide
from farfield.ops.projection import IDENTITY, Projection, project


class LocalBranch(nn.Module):
    """Add a depthwise convolution of the values to an attention, which sees what is near.

    `response = attention(X) + O (depthwise(V X + b))`, V and b the attention's own value projection, O the matrix of
    its output projection; each is left out where the attention has none.

    A summary of few slots blurs what is near, and the weights of linear attention have a low rank; the convolution
    gives back differences between neighbours. It acts on the values before the output projection, as in FLatten; InLine
    makes the kernel anew for each sample, from its mean. Its parameters start at 0, so that at first the module
    computes what the attention does: the identity for a `GridAttention` that is. With the convolution a module has a
    number of spatial dims, and a halo of half the kernel where it runs in tiles.

    Args:
        attention: A `GridAttention`, or any module from a grid to a grid of its size; `attention.value` and
            `attention.output`, if there are such modules, are linear in the channels of each position. It is called
            with `mask=` where there is a mask.
        channels: Channels of the values: of the grid where they are not projected.
        kernel: The size of the convolution's kernel, odd: one number, or one for each axis.
        spatial_dims: 1, 2 or 3.

    Raises:
        ShapeError: If the channels are not those of the values of a `GridAttention`.
        TypeError: If the attention is no module.
        ValueError: If the kernel is not odd, or spatial_dims are not 1, 2 or 3.

    Cost:
        For N positions and c channels, N·c·kernel^spatial_dims MACs beside the attention's, and N·c² for each
        projection that it has: here they act on positions, and not on slots.

    Reference: Han et al. 2023 (FLatten, arXiv 2308.00442), Han et al. 2024 (InLine, arXiv 2412.06590).

    Example:
        >>> import torch
        >>> from farfield.nn import GridAttention, LocalBranch
        >>> attention = GridAttention(16, "inline", heads=2, project="qkvo", residual=True)
        >>> module, image = LocalBranch(attention, 16, kernel=3, spatial_dims=2), torch.randn(2, 16, 14, 14)
        >>> torch.equal(module(image), image)
        True
    """

    _is_hf_initialized = DrawnByItself()

    def __init__(self, attention: nn.Module, channels: int, kernel: int | Sequence[int], spatial_dims: int) -> None:
        super().__init__()
        with door("LocalBranch"):
            convolution: Any = layers(spatial_dims).convolution
            size = _check_kernel(kernel, spatial_dims)
            _check_attention(attention, channels)
        self.attention = attention
        padding = tuple(length // 2 for length in size)
        self.depthwise: nn.Conv1d | nn.Conv2d | nn.Conv3d = convolution(
            channels, channels, size, padding=padding, groups=channels
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the convolution to 0, so that the module computes what the attention does."""
        for parameter in self.depthwise.parameters():
            nn.init.zeros_(parameter)

    def forward(
        self, grid: Float[Tensor, "b c *m"], *, mask: Bool[Tensor, " b *m"] | None = None
    ) -> Float[Tensor, "b p *m"]:
        """Attend from every position of the grid to the grid, and convolve the values.

        Args:
            grid: The grid, of as many spatial dims as the convolution has.
            mask: True where a position is valid; others may hold anything, are read as 0 and change no response at a
                valid position.

        Returns:
            `(b, p, *m)`, as the attention returns it.

        Raises:
            ShapeError: If the grid has other spatial dims, or the mask does not fit it; or as the attention.
            TypeError: If the grid is not floating-point, or the mask not boolean.
        """
        with door("LocalBranch"):
            self._check_grid(grid, mask)
        response = self.attention(grid) if mask is None else self.attention(grid, mask=mask)
        # The bias of the value projection is at valid positions alone.
        values = hide(self._project("value", hide(grid, mask)), mask)
        return response + self._project("output", self.depthwise(values), bias=False)

    def _project(self, name: str, grid: Tensor, *, bias: bool = True) -> Tensor:
        """Run a projection of the attention on each position of a grid; the identity if it has none of this name."""
        projection = read_projection(getattr(self.attention, name, None), grid)
        if projection is IDENTITY:
            return grid
        positions = grid.flatten(2)
        if projection.run is None:
            projected = project(positions, projection if bias else Projection(projection.matrix))
        else:
            projected = projection.run(positions)
            projected = projected if bias else projected - projection.run(torch.zeros_like(positions[:, :, :1]))
        return projected.unflatten(2, grid.shape[2:])

    def _check_grid(self, grid: Tensor, mask: Tensor | None) -> None:
        check_grid("grid", grid)
        spatial_dims = len(self.depthwise.kernel_size)
        if grid.dim() != spatial_dims + 2:
            fix = f"LocalBranch(…, spatial_dims={grid.dim() - 2}) for this grid."
            raise shape_error(f"the convolution has {spatial_dims} spatial dims.", fix, grid=grid)
        check_mask("mask", mask, "grid", grid)


def _check_kernel(kernel: int | Sequence[int], spatial_dims: int) -> tuple[int, ...]:
    """Return the size of a kernel along each axis; refuse an even one, whose middle is between two positions."""
    size = tuple(kernel) if isinstance(kernel, Iterable) else (kernel,) * spatial_dims
    for length in size:
        check_whole("kernel", length, 1)
    if len(size) != spatial_dims or not all(length % 2 for length in size):
        odd = tuple(length + 1 - length % 2 for length in size)
        fix = odd[0] if len(size) != spatial_dims or len(set(odd)) == 1 else odd
        raise refusal(
            ValueError, f"kernel must be odd, one number or one an axis of {spatial_dims}, got {kernel}; fix: {fix}."
        )
    return size


def _check_attention(attention: nn.Module, channels: int) -> None:
    """Refuse what is no module, and channels that are not those of its values."""
    check_whole("channels", channels, 1)
    if not isinstance(attention, nn.Module):
        raise refusal(
            TypeError,
            f"attention must be a module, got {type(attention).__name__}; "
            f'fix: GridAttention({channels}, "inline"), for example.',
        )
    own = getattr(attention, "value_channels", channels)
    if own != channels:
        raise refusal(
            ShapeError, f"channels must be those of the attention's values, {own}, got {channels}; fix: channels={own}."
        )
