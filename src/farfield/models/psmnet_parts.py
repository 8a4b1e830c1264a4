"""What PSMNet is built of: convolutions with their norms, residual blocks, hourglasses, and how weights are drawn."""

from __future__ import annotations

import math

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from farfield.nn.spatial_dims import layers


class BasicBlock(nn.Module):
    """`shortcut(x) + norm(convolve(relu(norm(convolve(x)))))`: a residual block without a ReLU after the sum.

    Args:
        before: Channels of the grid.
        after: Channels of the result.
        stride: Of the first convolution.
        dilation: Of both.
    """

    def __init__(self, before: int, after: int, stride: int, dilation: int) -> None:
        super().__init__()
        self.first = nn.Sequential(*activated(before, after, stride=stride, dilation=dilation))
        self.second = nn.Sequential(*convolved(after, after, dilation=dilation))
        same = before == after and stride == 1
        self.shortcut = nn.Identity() if same else nn.Sequential(*convolved(before, after, kernel=1, stride=stride))

    def forward(self, grid: Float[Tensor, "b c h w"]) -> Float[Tensor, "b d y x"]:
        """Return the sum."""
        return self.shortcut(grid) + self.second(self.first(grid))


class Hourglass(nn.Module):
    """Halve the sides twice and double them twice, joined by what an earlier hourglass had at half the sides.

    Args:
        channels: Of the grid; inside there are twice as many.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        inside = 2 * channels
        self.down = nn.Sequential(
            *activated(channels, inside, spatial_dims=3, stride=2), *convolved(inside, inside, spatial_dims=3)
        )
        self.bottom = nn.Sequential(
            *activated(inside, inside, spatial_dims=3, stride=2), *activated(inside, inside, spatial_dims=3)
        )
        self.up = nn.Sequential(*enlarged(inside, inside))
        self.out = nn.Sequential(*enlarged(inside, channels))

    def forward(self, grid: Tensor, way_down: Tensor | None, way_up: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return the result, and the grids at half the sides on the way down and up.

        Args:
            grid: `(b, c, i, h, w)`.
            way_down: Of the first hourglass, added on the way up; None for its own.
            way_up: Of the hourglass before, added on the way down; None for nothing.
        """
        down = self.down(grid)
        down = F.relu(down if way_up is None else down + way_up)
        up = F.relu(self.up(self.bottom(down)) + (down if way_down is None else way_down))
        return self.out(up), down, up


def convolved(
    before: int, after: int, *, spatial_dims: int = 2, kernel: int = 3, stride: int = 1, dilation: int = 1
) -> list[nn.Module]:
    """Build a convolution without bias, and its norm."""
    kinds, padding = layers("psmnet", spatial_dims), dilation * (kernel // 2)
    convolution = kinds.convolution(before, after, kernel, stride, padding, dilation, bias=False)
    return [convolution, kinds.batch_norm(after)]


def activated(
    before: int, after: int, *, spatial_dims: int = 2, kernel: int = 3, stride: int = 1, dilation: int = 1
) -> list[nn.Module]:
    """Build a convolution without bias, its norm, and ReLU."""
    parts = convolved(before, after, spatial_dims=spatial_dims, kernel=kernel, stride=stride, dilation=dilation)
    return [*parts, nn.ReLU(inplace=True)]


def enlarged(before: int, after: int) -> list[nn.Module]:
    """Build a transposed 3-D convolution that doubles the sides, and its norm."""
    transposed = nn.ConvTranspose3d(before, after, 3, stride=2, padding=1, output_padding=1, bias=False)
    return [transposed, nn.BatchNorm3d(after)]


def residual(channels: int) -> nn.Sequential:
    """Build what a residual block of 3-D convolutions adds."""
    return nn.Sequential(*activated(channels, channels, spatial_dims=3), *convolved(channels, channels, spatial_dims=3))


def classifier(channels: int) -> nn.Sequential:
    """Build what gives each position of a volume one score."""
    return nn.Sequential(
        *activated(channels, channels, spatial_dims=3), nn.Conv3d(channels, 1, 3, padding=1, bias=False)
    )


def initialize(net: nn.Module) -> nn.Module:
    """Draw convolutions from N(0, 2 / (positions of the kernel · output channels)); transposed ones keep torch's law."""
    for module in net.modules():
        if isinstance(module, _ConvNd) and not isinstance(module, _ConvTransposeNd):
            nn.init.normal_(module.weight, std=math.sqrt(2 / (math.prod(module.kernel_size) * module.out_channels)))
    return net
