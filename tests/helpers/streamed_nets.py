"""Small networks with attention in several places, for the tests of streaming."""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from farfield.nn import GridAttention
from farfield.ops import OPERATORS
from helpers.seeding import seeded_generator
from helpers.small_networks import Block

CONVOLUTIONS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
NORMS = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}
POOLS = {1: nn.MaxPool1d, 2: nn.MaxPool2d, 3: nn.MaxPool3d}


def attention(row: str, channels: int = 6, **options: object) -> GridAttention:
    """An attention with every map, so that biases and folding take part."""
    project = OPERATORS[row].projections("qkvo")
    return GridAttention(channels, row, heads=2, project=project, **{"residual": True, **options})


class Hourglass(nn.Module):
    """Convolution, pooling, attention at half the sides, upsampling, concatenation, two attentions in sequence."""

    def __init__(self, row: str, rank: int, *, width: int = 6) -> None:
        super().__init__()
        convolution = CONVOLUTIONS[rank]
        self.first = convolution(1, width, 3, padding=1)
        self.norm, self.pool = NORMS[rank](width), POOLS[rank](2)
        self.bottom = attention(row, width)
        self.join = convolution(2 * width, width, 3, padding=1)
        self.one, self.two = attention(row, width), attention(row, width)
        self.last = convolution(width, 1, 3, padding=1)

    def forward(self, grid: Tensor) -> Tensor:
        near = torch.relu(self.norm(self.first(grid)))
        far = F.interpolate(self.bottom(self.pool(near)), scale_factor=2.0)
        joined = torch.relu(self.join(torch.cat([near, far], 1)))
        return grid + self.last(self.two(self.one(joined)))


class Branches(nn.Module):
    """Two attentions that hear of neither other, a third that hears of both, called twice; strides of 2 and 3."""

    def __init__(self, row: str) -> None:
        super().__init__()
        self.down = nn.Conv2d(1, 6, 5, stride=(3, 2), padding=2)
        self.left, self.right, self.both = attention(row), attention(row), attention(row)
        self.up = nn.ConvTranspose2d(6, 2, (3, 2), stride=(3, 2))

    def forward(self, grid: Tensor) -> Tensor:
        low = self.down(grid)
        return self.up(self.both(self.both(self.left(low) + self.right(low).tanh())))


class Blocks(nn.Sequential):
    """Blocks whose last convolution acts on the slots of attention, normed, at stride 1 and 2."""

    def __init__(self, row: str) -> None:
        super().__init__(
            nn.Conv2d(1, 8, 3, padding=1),
            Block(8, 8, row),
            Block(8, 12, row, stride=2),
            nn.ConvTranspose2d(12, 1, 4, stride=2, padding=1),
        )


class NearSighted(nn.Module):
    """Convolutions of volumes, of which one is at half the sides: a position hears of those around it alone."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = (nn.Conv3d(each, 4, 3, padding=1) for each in (1, 4, 4))
        self.pool, self.up, self.head = nn.MaxPool3d(2), nn.Upsample(scale_factor=2), nn.Conv3d(4, 1, 1)

    def forward(self, grid: Tensor) -> Tensor:
        near = torch.relu(self.first(grid))
        return self.head(self.last(near + self.up(self.middle(self.pool(near)))))


class NormUNet(nn.Module):
    """A U-Net with two instance norms at each level of each side, 4 * levels - 2 in all, in series."""

    def __init__(self, spatial_dims: int, levels: int, width: int = 4) -> None:
        super().__init__()
        self.dims, widths = spatial_dims, [width + 2 * level for level in range(levels)]
        self.down = nn.ModuleList(map(self.double, [1, *widths[:-1]], widths))
        up = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)[spatial_dims - 1]
        self.up = nn.ModuleList(up(deep, own, 2, stride=2) for own, deep in itertools.pairwise(widths))
        self.join = nn.ModuleList(self.double(2 * own, own) for own in widths[:-1])
        self.pool, self.last = POOLS[spatial_dims](2), CONVOLUTIONS[spatial_dims](width, 2, 1)

    def double(self, channels: int, out_channels: int) -> nn.Sequential:
        norm = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)[self.dims - 1]
        layers: list[nn.Module] = []
        for inputs in (channels, out_channels):
            convolution = CONVOLUTIONS[self.dims](inputs, out_channels, 3, padding=1)
            layers += [convolution, norm(out_channels, affine=True), nn.LeakyReLU(0.1, inplace=True)]
        return nn.Sequential(*layers)

    def forward(self, grid: Tensor) -> Tensor:
        levels = [self.down[0](grid)]
        for down in self.down[1:]:
            levels.append(down(self.pool(levels[-1])))
        grid = levels.pop()
        for up, join in zip(reversed(self.up), reversed(self.join), strict=True):
            grid = join(torch.cat([levels.pop(), up(grid)], 1))
        return self.last(grid)


def settled(net: nn.Module, seed: int = 0) -> nn.Module:
    """Random weights that keep numbers near one, random running statistics, eval mode."""
    generator = seeded_generator(seed)
    for parameter in net.parameters():
        fan = parameter[0].numel() if parameter.dim() > 1 else 4
        with torch.no_grad():
            parameter.copy_(
                torch.randn(parameter.shape, generator=generator) / fan**0.5 / (1 if parameter.dim() > 1 else 2)
            )
    for name, buffer in net.named_buffers():
        if "running" in name:
            with torch.no_grad():
                buffer.copy_(0.5 + torch.rand(buffer.shape, generator=generator))
    return net.eval()


def relative(got: object, want: object) -> float:
    """Largest difference over the largest number; 0 where all numbers are 0."""
    got, want = (torch.as_tensor(each).double() for each in (got, want))
    assert got.shape == want.shape, f"{tuple(got.shape)} is not {tuple(want.shape)}"
    return float((got - want).abs().max() / want.abs().max().clamp(min=torch.finfo(torch.float64).tiny))
