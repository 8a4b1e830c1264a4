"""Small models that keep their grids in the ways that large ones do."""

from __future__ import annotations

from collections import OrderedDict
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from farfield.nn import GridAttention
from helpers.seeding import seeded_generator

identity = partial(GridAttention, operator="factorized_gaussian", inner_channels=4, project="qkvo", residual=True)


def felt(channels: int) -> GridAttention:
    """An addition that changes what it is given, so that its absence shows."""
    attention = identity(channels)
    nn.init.normal_(attention.output.weight, std=0.3)
    return attention


class Block(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv, self.norm, self.relu = (
            nn.Conv2d(channels, channels, 3, padding=1),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
        )

    def forward(self, grid: Tensor) -> Tensor:
        return self.relu(grid + self.relu(self.norm(self.conv(grid))))


class Net(nn.Module):
    """Convolutions: 8 channels at the stem, 12 in two blocks, 5 classes."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.stage = nn.Sequential(nn.Conv2d(8, 12, 3, 2, 1), Block(12), Block(12))
        self.head = nn.Linear(12, 5)
        self.unused = nn.Conv2d(8, 8, 1)

    def forward(self, image: Tensor) -> Tensor:
        return self.head(self.stage(self.stem(image)).mean((2, 3)))


class Pair(NamedTuple):
    fine: Tensor
    coarse: Tensor


class Levels(nn.Module):
    """Two grids of 8 channels as a tuple, a list, a dict or a named tuple."""

    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.conv, self.kind = nn.Conv2d(3, 8, 3, padding=1), kind

    def forward(self, image: Tensor) -> Any:
        fine = self.conv(image)
        coarse = fine[..., ::2, ::2]
        if self.kind in (dict, OrderedDict):
            return self.kind([("0", fine), ("pool", coarse)])
        return Pair(fine, coarse) if self.kind is Pair else self.kind((fine, coarse))


class Pyramid(nn.Module):
    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.levels = Levels(kind)

    def forward(self, image: Tensor) -> Tensor:
        levels = self.levels(image)
        return sum(level.mean((2, 3)) for level in (levels.values() if isinstance(levels, dict) else levels))


class TokenBlock(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(channels), nn.Linear(channels, channels)

    def forward(self, tokens: Tensor) -> Tensor:
        return tokens + self.linear(self.norm(tokens))


class Tokens(nn.Module):
    """Patches of 4 × 4 positions as 10 channels last: tokens, or a grid as in a Swin; of one size if it is fixed."""

    def __init__(self, *, fixed: int | None = None, flat: bool = True) -> None:
        super().__init__()
        self.patches, self.blocks = nn.Conv2d(3, 10, 4, 4), nn.Sequential(TokenBlock(10), TokenBlock(10))
        self.fixed, self.flat = fixed, flat

    def forward(self, image: Tensor) -> Tensor:
        if self.fixed is not None and image.shape[2:] != (self.fixed, self.fixed):
            raise ValueError(f"sides of {self.fixed}, please")
        grid = self.patches(image).movedim(1, -1)
        return self.blocks(grid.flatten(1, 2) if self.flat else grid).flatten(1, -2).mean(1)


image = torch.rand(2, 3, 12, 16, generator=seeded_generator(1))
