"""Fixes that refusals of training on whole volumes name are followed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from farfield import WholeNetwork
from farfield.streaming import Tiles
from helpers.followed import Row, each, follow

pytestmark = pytest.mark.unchecked("arguments of other types reach the functions")

GRID = torch.rand(1, 1, 24, 20)


def network() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.InstanceNorm2d(2))


def train(net: nn.Module, *given: Any, tile: Any = 8) -> Tensor:
    result = WholeNetwork(net, tile=tile)(*given)
    result.square().sum().backward()
    return result


class Labelled(nn.Module):
    """A network that returns a text beside nothing, or a grid."""

    def __init__(self, text: str | None) -> None:
        super().__init__()
        self.layer, self.text = network(), text

    def forward(self, grid: Tensor) -> Any:
        result = self.layer(grid)
        return result if self.text is None else self.text


class Product(nn.Module):
    """A product over all positions."""

    def __init__(self, is_within: bool) -> None:
        super().__init__()
        self.layer, self.is_within = network(), is_within

    def forward(self, grid: Tensor) -> Tensor:
        result = self.layer(grid)
        return result.prod(3).prod(2) if self.is_within else result


ROWS = [
    Row(
        "streaming/training/whole.py",
        lambda: train(network(), GRID, tile=Tiles(8, statistics="tile")),
        'statistics="whole"',
        lambda: train(network(), GRID, tile=Tiles(8, statistics="whole")),
    ),
    Row("streaming/training/whole.py", lambda: train(network()), "whole(volume)", lambda: train(network(), GRID)),
    Row(
        "streaming/training/whole.py",
        lambda: train(network(), "volume.npy"),
        "a tensor",
        lambda: train(network(), GRID),
    ),
    Row(
        "streaming/training/whole.py",
        lambda: train(network(), GRID[0]),
        "volume[None]",
        lambda: train(network(), GRID[0][None]),
    ),
    Row(
        "streaming/training/whole.py",
        lambda: train(torch.compile(network()), GRID),
        "WholeNetwork of the module without torch.compile",
        lambda: train(network(), GRID),
    ),
    Row(
        "streaming/training/planning.py",
        lambda: train(Labelled("text"), GRID),
        "a tensor, or a tuple, list or dict of tensors",
        lambda: train(Labelled(None), GRID),
    ),
    Row(
        "streaming/training/planning.py",
        lambda: train(Product(is_within=True), GRID),
        "it behind WholeNetwork, and not within",
        lambda: WholeNetwork(Product(is_within=False), tile=8)(GRID).prod(3).prod(2).sum().backward(),
    ),
]


@each(ROWS)
def test_a_fix_can_be_followed(row: Row) -> None:
    follow(row)
