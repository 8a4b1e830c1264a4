"""Fixes that refusals of training on whole volumes name are followed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from farfield import WholeNetwork
from farfield.nn import GridAttention
from farfield.streaming import Tiles
from helpers.followed import Row, each, follow
from helpers.several_processes import alone

pytestmark = pytest.mark.unchecked("arguments of other types reach the functions")

GRID = torch.rand(1, 1, 24, 20)


def network() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.InstanceNorm2d(2))


def train(net: nn.Module, *given: Any, tile: Any = 8) -> Tensor:
    result = WholeNetwork(net, tile=tile)(*given)
    result.square().sum().backward()
    return result


def attention(*, is_constant: bool) -> nn.Module:
    net = nn.Sequential(GridAttention(1, "kronecker_kv", coefficient_norm=True))
    net[0].train(not is_constant)
    return net


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


class Written(nn.Module):
    """A network that writes to what it computes, in one of several ways."""

    def __init__(self, write: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.write = network(), write

    def forward(self, grid: Tensor) -> Tensor:
        return self.write(self.layer(grid))


def double(grid: Tensor) -> Tensor:
    with torch.no_grad():
        return grid.mul_(2)


def fill(part: Tensor, grid: Tensor) -> Tensor:
    part[:, 0] = 1
    return grid * part


class Own(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, grid: Tensor) -> Tensor:
        return grid.round()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def train_alone(wrap: Callable[[nn.Module], nn.Module]) -> None:
    """Train in a process group of one process."""
    with alone():
        wrap(network())(GRID).square().sum().backward()


def shard(net: nn.Module) -> nn.Module:
    return fully_shard(net, mesh=torch.distributed.init_device_mesh("cpu", (1,)))


def train_beside_another(norm: nn.Module) -> None:
    """Train as one of two processes."""
    with mock.patch.multiple(torch.distributed, is_initialized=lambda: True, get_world_size=lambda: 2):
        train(nn.Sequential(network(), norm), GRID)


ROWS = [
    Row(
        "streaming/training/whole.py",
        lambda: WholeNetwork(network(), 8, nn.MSELoss),
        "MSELoss()",
        lambda: WholeNetwork(network(), 8, nn.MSELoss()),
    ),
    Row(
        "streaming/training/whole.py",
        lambda: WholeNetwork(WholeNetwork(network(), 8), 8),
        ".network",
        lambda: WholeNetwork(WholeNetwork(network(), 8).network, 8),
    ),
    Row(
        "streaming/training/whole.py",
        lambda: train(network(), GRID[:0]),
        "leave that volume out",
        lambda: train(network(), GRID),
    ),
    Row(
        "streaming/gradients.py",
        lambda: train(Written(double), GRID),
        "value + (other - value).detach()",
        lambda: train(Written(lambda value: value + (2 * value - value).detach()), GRID),
    ),
    Row(
        "streaming/gradients.py",
        lambda: train(Written(lambda grid: fill(grid.detach(), grid)), GRID),
        "tensor.detach().clone()",
        lambda: train(Written(lambda grid: fill(grid.detach().clone(), grid)), GRID),
    ),
    Row(
        "streaming/gradients.py",
        lambda: train(Written(lambda grid: Own.apply(grid)), GRID),
        "value + (other - value).detach()",
        lambda: train(Written(lambda value: value + (value.round() - value).detach()), GRID),
    ),
    Row(
        "streaming/training/whole.py",
        lambda: train_alone(lambda net: WholeNetwork(shard(net), tile=8)),
        "DistributedDataParallel(WholeNetwork(network))",
        lambda: train_alone(lambda net: DistributedDataParallel(WholeNetwork(net, tile=8))),
    ),
    Row(
        "streaming/training/whole.py",
        lambda: train_beside_another(nn.SyncBatchNorm(2)),
        "BatchNorm",
        lambda: train_beside_another(nn.BatchNorm2d(2)),
    ),
    Row(
        "streaming/training/whole.py",
        lambda: train_beside_another(nn.SyncBatchNorm(2)),
        "module.eval()",
        lambda: train_beside_another(nn.SyncBatchNorm(2).eval()),
    ),
    Row(
        "streaming/training/whole.py",
        lambda: train(attention(is_constant=False), GRID),
        "network.0.eval()",
        lambda: train(attention(is_constant=True), GRID),
    ),
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
