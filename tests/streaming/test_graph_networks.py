"""Ordinary networks whose parts do what halos and levels that are found by experiment get wrong: exact on the graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from helpers.grids import ENGINE_ROWS
from helpers.recorded import run_in_tiles
from helpers.streamed_nets import Blocks, Branches, Hourglass, NormUNet, relative, settled


def c(inputs: int, outputs: int, kernel: int = 3, dilation: int = 1) -> nn.Conv2d:
    """A convolution that keeps the size."""
    return nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2 * dilation, dilation=dilation)


class Written(nn.Module):
    """A forward that is one function of the input and of some layers."""

    def __init__(self, function: Callable[..., Tensor], *layers: nn.Module) -> None:
        super().__init__()
        self.function, self.layers = function, nn.ModuleList(layers)

    def forward(self, grid: Tensor) -> Tensor:
        return self.function(grid, *self.layers)


def labels(grid: Tensor, first: nn.Module, last: nn.Module) -> Tensor:
    hot = F.one_hot(first(grid).argmax(1), 4).permute(0, 3, 1, 2).to(grid.dtype)
    return last(hot * hot.mean((2, 3), keepdim=True))


def suppressed(grid: Tensor, layer: nn.Module) -> Tensor:
    scores = layer(grid)
    return torch.where(F.max_pool2d(scores, 5, 1, 2) == scores, scores, 0)


def unpooled(grid: Tensor, layer: nn.Module) -> Tensor:
    pooled, places = F.max_pool2d(layer(grid), 2, return_indices=True)
    return F.max_unpool2d(pooled, places, 2, output_size=grid.shape[2:])


def with_border(grid: Tensor, layer: nn.Module) -> Tensor:
    inner = grid.clone()
    inner[:, :, :2], inner[:, :, :, -1] = 0, 1
    return layer(inner)


def with_coordinates(grid: Tensor, layer: nn.Module) -> Tensor:
    rows, columns = torch.linspace(-1, 1, grid.shape[2]), torch.arange(grid.shape[3]) / grid.shape[3]
    places = torch.meshgrid(rows, columns, indexing="ij")
    return layer(torch.cat([grid, *(each.to(grid).expand(1, 1, -1, -1) for each in places)], 1))


def response_norm(grid: Tensor) -> Tensor:
    last = grid.permute(0, 2, 3, 1)
    size = last.norm(p=2, dim=(1, 2), keepdim=True)
    return (last * (size / (size.mean(-1, keepdim=True) + 1e-6))).permute(0, 3, 1, 2)


def style(grid: Tensor, layer: nn.Module) -> Tensor:
    features = layer(grid)
    vector = F.avg_pool2d(features, features.shape[2:])
    return features * vector / vector.square().sum(1, keepdim=True).sqrt()


def resized(grid: Tensor, layer: nn.Module) -> Tensor:
    low = F.interpolate(layer(grid), scale_factor=0.5, mode="bilinear", align_corners=True)
    return F.interpolate(low, size=grid.shape[2:], mode="bilinear", align_corners=True)


def shifted(grid: Tensor) -> Tensor:
    return F.pad(grid[:, :, 1:] - grid[:, :, :-1], (0, 0, 0, 1)) + torch.roll(grid, (3, -5), (2, 3))


def by_statistics(grid: Tensor, layer: nn.Module) -> Tensor:
    spread = grid.var((2, 3), keepdim=True) + grid.amin((2, 3), keepdim=True) + grid.sum((2, 3), keepdim=True)
    return torch.where(grid.std((2, 3), keepdim=True) > 0.5, layer(grid), -grid) / (1 + spread.abs())


def flattened(grid: Tensor) -> Tensor:
    return grid * grid.flatten(2).mean(2)[..., None, None]


def attended(grid: Tensor, *layers: nn.Module) -> Tensor:
    query, key, value = (layer(grid).flatten(2) for layer in layers)
    return ((query.mT @ key).softmax(-1) @ value.mT).mT.reshape(grid.shape)


def thresholds(grid: Tensor, layer: nn.Module) -> Tensor:
    above = (grid > grid.mean((2, 3), keepdim=True)).to(grid.dtype)
    return layer(grid) * above.mean((2, 3), keepdim=True) * (grid > 0).to(grid.dtype).mean((2, 3), keepdim=True)


def read_as_view(grid: Tensor, layer: nn.Module) -> Tensor:
    """The numbers before ReLU, which has an operation that overwrites them, are read once more."""
    result = layer(grid)
    seen = result.transpose(2, 3)
    return torch.relu(result) + 2 * seen.transpose(2, 3)


NETWORKS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "a number to the power of a tensor": (lambda: Written(lambda grid, layer: 2.0 ** layer(grid).tanh(), c(1, 1)), 1),
    "numbers read again through a view": (lambda: Written(read_as_view, c(1, 1)), 1),
    "dilation after a norm": (
        lambda: nn.Sequential(c(1, 4, 7), nn.ReLU(), c(4, 4), nn.InstanceNorm2d(4), c(4, 1, 3, 3)),
        1,
    ),
    "dilation 18": (lambda: c(1, 1, 3, 18), 1),
    "order of passes": (lambda: Written(thresholds, c(1, 1)), 1),
    "labels": (lambda: Written(labels, c(1, 4), c(4, 1)), 1),
    "gate": (lambda: Written(lambda grid, layer: torch.where(grid > 0.5, layer(grid), 0), c(1, 1)), 1),
    "nan_to_num": (lambda: Written(lambda grid, layer: torch.nan_to_num(layer(grid).log(), -9.0), c(1, 1)), 1),
    "suppression by maxima": (lambda: Written(suppressed, c(1, 1)), 1),
    "unpooling": (lambda: Written(unpooled, c(1, 2)), 1),
    "differences and shifts": (lambda: Written(shifted), 1),
    "statistics in conditions": (lambda: Written(by_statistics, c(1, 1)), 1),
    "border": (lambda: Written(with_border, c(1, 1)), 1),
    "layer norm of all": (lambda: Written(lambda grid, layer: layer(F.layer_norm(grid, grid.shape[1:])), c(1, 1)), 1),
    "branch on the size": (
        lambda: Written(
            lambda grid, layer: layer(grid) / (grid.shape[2] * grid.shape[3]) if len(grid) else grid, c(1, 1)
        ),
        1,
    ),
    "coordinates": (lambda: Written(with_coordinates, c(3, 1)), 1),
    "align_corners": (lambda: Written(resized, c(1, 2)), 1),
    "style vector": (lambda: Written(style, c(1, 4)), 1),
    "flattened mean": (lambda: Written(flattened), 3),
    "sums in turn": (lambda: Written(lambda grid: grid * grid.amax(3).sum(2)[..., None, None]), 3),
    "global response norm": (lambda: Written(response_norm), 3),
    "softmax attention": (lambda: Written(attended, c(3, 3), c(3, 3), c(3, 3)), 3),
    "two strides": (
        lambda: nn.Sequential(
            nn.Conv2d(1, 4, 3, stride=2, padding=1), nn.ConvTranspose2d(4, 1, 3, 2, padding=1, output_padding=1)
        ),
        1,
    ),
    "circular": (lambda: nn.Conv2d(1, 1, 5, padding=2, padding_mode="circular"), 1),
    "frames as samples": (
        lambda: Written(lambda grid, layer: layer(grid.flatten(0, 1)[:, None])[None, :, 0], c(1, 1)),
        5,
    ),
}
VALUES: dict[str, Callable[[Tensor], Tensor]] = {
    "normal": lambda normal: normal,
    "skewed": lambda normal: torch.exp(2 * normal),
    "bytes": lambda normal: (normal * 60 + 100).clamp(0, 255).round(),
}


def assert_exact(net: nn.Module, volume: Tensor, tile: tuple[int, ...], store: bool, terms: int = 1) -> None:
    """Assert that tiles are as near to float64 as the untiled network, but for a factor of 4.

    `terms`: Length of float32 sums that kernels take in another order for other numbers of rows: their roundings.
    """
    got = run_in_tiles(net, volume, tile, store=store).output
    with torch.no_grad():
        whole, exact = net(volume), net.to(torch.float64)(volume.double())
    net.to(torch.float32)
    # One rounding of the largest number at least, where the untiled network happens to be exact.
    assert relative(got, exact) <= 4 * max(relative(whole, exact), terms * torch.finfo(torch.float32).eps)


@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize("name", NETWORKS)
def test_ordinary_networks(name: str, values: str) -> None:
    torch.manual_seed(0)
    make, channels = NETWORKS[name]
    net, volume = make().eval(), VALUES[values](torch.randn(1, channels, 68, 50))
    terms = 68 * 50 if name == "softmax attention" else 1
    for store in (False, True):
        assert_exact(net, volume, (16, 24), store, terms)


class Table(nn.Module):
    """Operations on the volume, on a parameter, and on views of both."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(1, 3, 68, 50))

    def forward(self, grid: Tensor) -> Tensor:
        both = torch.relu(grid.transpose(1, 1)) + torch.tanh(self.table.expand(1, 3, 68, 50))
        return both + torch.relu(torch.relu(self.table)) + torch.sigmoid(grid)


def test_no_operation_writes_to_the_volume_or_to_parameters() -> None:
    torch.manual_seed(0)
    net, volume = Table().eval(), torch.randn(1, 3, 68, 50)
    kept, table = volume.clone(), net.table.detach().clone()
    with torch.no_grad():
        whole = net(volume)
    for store in (False, True):
        assert relative(run_in_tiles(net, volume, (16, 24), store=store).output, whole) < 1e-6
    assert torch.equal(volume, kept)
    assert torch.equal(net.table, table)


HOSTS: dict[str, tuple[Callable[[str], Any], tuple[int, ...], tuple[int, ...]]] = {
    "hourglass": (lambda row: Hourglass(row, 2), (1, 1, 40, 36), (16, 16)),
    "branches": (Branches, (1, 1, 36, 40), (12, 16)),
    "blocks": (Blocks, (1, 1, 36, 40), (16, 12)),
    "volume": (lambda row: Hourglass(row, 3), (1, 1, 16, 12, 20), (8, 12, 8)),
}


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("row", ENGINE_ROWS)
def test_every_operator(row: str, host: str) -> None:
    make, shape, tile = HOSTS[host]
    assert_exact(settled(make(row)), torch.randn(shape), tile, store=True)


def test_norms_in_series() -> None:
    net = settled(NormUNet(2, 3))
    tiled = run_in_tiles(net, torch.randn(1, 1, 64, 48), (16, 16), store=True)
    assert max(tiled.labelled.levels.values()) == 10
    assert_exact(net, torch.randn(1, 1, 64, 48), (16, 16), store=True)
