"""Parts of PSMNet: convolutions with norms, residual blocks, hourglasses, and the initialization of weights."""

from __future__ import annotations

import math

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from farfield.nn.spatial_dims import layers


class BasicBlock(nn.Module):
    """`shortcut(x) + norm(convolve(relu(norm(convolve(x)))))`: a residual block without a ReLU after the sum."""

    def __init__(self, before: int, after: int, stride: int, dilation: int) -> None:
        super().__init__()
        # The first convolution has the stride, both have the dilation.
        self.first = nn.Sequential(*conv_norm_relu(before, after, stride=stride, dilation=dilation))
        self.second = nn.Sequential(*_conv_norm(after, after, dilation=dilation))
        same = before == after and stride == 1
        self.shortcut = nn.Identity() if same else nn.Sequential(*_conv_norm(before, after, kernel=1, stride=stride))

    def forward(self, grid: Float[Tensor, "b c h w"]) -> Float[Tensor, "b d y x"]:
        """Return the sum of shortcut and convolutions."""
        return self.shortcut(grid) + self.second(self.first(grid))


class Hourglass(nn.Module):
    """Halve the size twice and double it twice, with twice the channels; grids of earlier hourglasses are added."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        inside = 2 * channels
        self.down = nn.Sequential(
            *conv_norm_relu(channels, inside, spatial_dims=3, stride=2), *_conv_norm(inside, inside, spatial_dims=3)
        )
        self.bottom = nn.Sequential(
            *conv_norm_relu(inside, inside, spatial_dims=3, stride=2), *conv_norm_relu(inside, inside, spatial_dims=3)
        )
        self.up = nn.Sequential(*_transposed_norm(inside, inside))
        self.out = nn.Sequential(*_transposed_norm(inside, channels))

    def forward(self, grid: Tensor, way_down: Tensor | None, way_up: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return the result, and the grids at half the size on the way down and on the way up.

        Of `(b, c, i, h, w)`, i is the disparity. `way_down` is the first hourglass's grid on the way down, which is
        added on the way up; `way_up` is the previous one's on the way up, which is added on the way down.
        """
        down = self.down(grid)
        down = F.relu(down if way_up is None else down + way_up)
        up = F.relu(self.up(self.bottom(down)) + (down if way_down is None else way_down))
        return self.out(up), down, up


def _conv_norm(
    before: int, after: int, *, spatial_dims: int = 2, kernel: int = 3, stride: int = 1, dilation: int = 1
) -> list[nn.Module]:
    kinds, padding = layers(spatial_dims), dilation * (kernel // 2)
    convolution = kinds.convolution(before, after, kernel, stride, padding, dilation, bias=False)
    return [convolution, kinds.batch_norm(after)]


def conv_norm_relu(
    before: int, after: int, *, spatial_dims: int = 2, kernel: int = 3, stride: int = 1, dilation: int = 1
) -> list[nn.Module]:
    """Build a convolution without bias, its batch norm and ReLU."""
    parts = _conv_norm(before, after, spatial_dims=spatial_dims, kernel=kernel, stride=stride, dilation=dilation)
    return [*parts, nn.ReLU(inplace=True)]


def _transposed_norm(before: int, after: int) -> list[nn.Module]:
    # It doubles the size.
    transposed = nn.ConvTranspose3d(before, after, 3, stride=2, padding=1, output_padding=1, bias=False)
    return [transposed, nn.BatchNorm3d(after)]


def residual(channels: int) -> nn.Sequential:
    """Build two 3-D convolutions with their batch norms, whose result is added to their input."""
    return nn.Sequential(
        *conv_norm_relu(channels, channels, spatial_dims=3), *_conv_norm(channels, channels, spatial_dims=3)
    )


def classifier(channels: int) -> nn.Sequential:
    """Build the layers that compute one score for each position of a volume."""
    return nn.Sequential(
        *conv_norm_relu(channels, channels, spatial_dims=3), nn.Conv3d(channels, 1, 3, padding=1, bias=False)
    )


def draw_kernels(net: nn.Module) -> nn.Module:
    """Draw convolutions from N(0, 2 / (kernel positions · output channels)); transposed ones keep torch's values."""
    for module in net.modules():
        if isinstance(module, _ConvNd) and not isinstance(module, _ConvTransposeNd):
            nn.init.normal_(module.weight, std=math.sqrt(2 / (math.prod(module.kernel_size) * module.out_channels)))
    return net
