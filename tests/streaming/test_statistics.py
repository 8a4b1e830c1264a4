"""Norms, means, maxima and pooling in tiles give what they give over the whole volume."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import reduce
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from farfield.streaming import Tiles, plan_whole, predict_whole
from farfield.streaming.rules.sums import merge_moments
from helpers.small_networks import SqueezeExcite
from helpers.streamed_nets import CONVOLUTIONS, attention, relative, settled

# Sums over positions take other orders; float32 has eps 1.2e-7.
TOLERANCE = 1e-5
TRANSPOSED = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}
SIZE = {1: (54,), 2: (44, 38), 3: (14, 18, 22)}


class Gate(nn.Module):
    """Each channel scaled by a function of what is reduced over all positions."""

    def __init__(self, reduced: Callable[[Tensor], Tensor], features: int = 4) -> None:
        super().__init__()
        self.reduced, self.linear = reduced, nn.Linear(features, 4)

    def forward(self, grid: Tensor) -> Tensor:
        gate = torch.sigmoid(self.linear(self.reduced(grid).flatten(1)))
        return grid * gate.view(*gate.shape, *[1] * (grid.dim() - 2))


class ResponseNorm(nn.Module):
    """Global response normalization, as in ConvNeXt V2 with channels first."""

    def forward(self, grid: Tensor) -> Tensor:
        size = grid.norm(p=2, dim=(2, 3), keepdim=True)
        return grid + grid * size / (size.mean(1, keepdim=True) + 1e-6)


class PooledBranch(nn.Module):
    """The image-level branch of ASPP: the mean of all positions, expanded to the grid's size."""

    def forward(self, grid: Tensor) -> Tensor:
        return grid + F.interpolate(F.adaptive_avg_pool2d(grid, 1), size=grid.shape[2:], mode="bilinear")


def net_with(*layers: nn.Module, spatial_dims: int = 2) -> nn.Module:
    """The layers between convolutions with strides, with scales and offsets far from one and zero."""
    return settled(
        nn.Sequential(
            CONVOLUTIONS[spatial_dims](1, 4, 3, padding=1),
            nn.ReLU(),
            *layers,
            CONVOLUTIONS[spatial_dims](4, 4, 3, stride=2, padding=1),
            TRANSPOSED[spatial_dims](4, 2, 2, stride=2),
        )
    )


def whole(net: nn.Module, grid: Tensor) -> Tensor:
    with torch.no_grad():
        return net(grid)


def volume(spatial_dims: int, samples: int = 2) -> Tensor:
    """Grids whose mean and deviation differ between tiles."""
    grid = torch.randn(samples, 1, *SIZE[spatial_dims], generator=torch.Generator().manual_seed(0))
    return 3 + grid * torch.linspace(0.5, 4, SIZE[spatial_dims][-1]) + torch.linspace(0, 9, SIZE[spatial_dims][-1])


class Pyramid(nn.Module):
    """Means of 3 × 3 regions, expanded to the grid's size."""

    def forward(self, grid: Tensor) -> Tensor:
        return grid + F.interpolate(F.adaptive_avg_pool2d(grid, 3), size=grid.shape[2:], mode="bilinear")


class Standardized(nn.Module):
    """The grid in units of its own deviation."""

    def forward(self, grid: Tensor) -> Tensor:
        return grid / grid.std((2, 3), keepdim=True)


LAYERS = {
    "group norm": lambda: nn.GroupNorm(2, 4),
    "instance norm": lambda: nn.InstanceNorm2d(4, affine=True),
    "batch norm without running statistics": lambda: nn.BatchNorm2d(4, track_running_stats=False),
    "layer norm of channels and positions": lambda: nn.LayerNorm([4, *SIZE[2]]),
    "layer norm of positions": lambda: nn.LayerNorm(SIZE[2]),
    "squeeze and excite": lambda: SqueezeExcite(4),
    "mean": lambda: Gate(lambda grid: grid.mean((2, 3), keepdim=True)),
    "torch.mean by name": lambda: Gate(lambda grid: torch.mean(grid, dim=[-1, -2])),
    "maximum": lambda: Gate(lambda grid: grid.amax((2, 3))),
    "response norm": ResponseNorm,
    "average pooling to 1": lambda: Gate(nn.AdaptiveAvgPool2d(1)),
    "average pooling to 3 × 5": lambda: Gate(nn.AdaptiveAvgPool2d((3, 5)), 60),
    "maximum pooling to 7": lambda: Gate(nn.AdaptiveMaxPool2d(7), 196),
    "mean of all positions, expanded": PooledBranch,
    "means of regions, expanded": Pyramid,
    "deviation": Standardized,
}


@pytest.mark.parametrize("name", LAYERS)
def test_tiles_give_what_the_whole_gives(name: str) -> None:
    net, grid = net_with(LAYERS[name]()), volume(2)
    assert len(plan_whole(net, grid.shape, tile=(10, 14)).passes) == 2
    assert relative(predict_whole(net, grid, tile=(10, 14), quiet=True), whole(net, grid)) < TOLERANCE


@pytest.mark.parametrize("spatial_dims", [1, 2, 3])
def test_norms_in_sequence_and_beside_attention(spatial_dims: int) -> None:
    instance = {1: nn.InstanceNorm1d, 2: nn.InstanceNorm2d, 3: nn.InstanceNorm3d}[spatial_dims]
    layers = [instance(4), attention("kronecker_qkv", 4), CONVOLUTIONS[spatial_dims](4, 4, 3, padding=1)]
    net, grid = net_with(*layers, nn.GroupNorm(1, 4), spatial_dims=spatial_dims), volume(spatial_dims)
    assert [each.summarizes for each in plan_whole(net, grid.shape, tile=8).passes] == [("2",), ("3",), ("5",), ()]
    assert relative(predict_whole(net, grid, tile=8, quiet=True), whole(net, grid)) < TOLERANCE


def test_independent_tiles_differ() -> None:
    net, grid = net_with(nn.InstanceNorm2d(4)), volume(2)
    want = whole(net, grid)
    alone = torch.cat([whole(net, part) for part in grid.split(22, 2)], 2)
    assert relative(alone, want) > 0.01


def test_norms_that_share_a_pass() -> None:
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norms = nn.Conv2d(1, 4, 1), nn.ModuleList(nn.GroupNorm(2, 4) for _ in range(3))

        def forward(self, grid: Tensor) -> Tensor:
            grid = self.first(grid)
            return self.norms[2](self.norms[0](grid) + self.norms[1](grid).sigmoid())

    net, grid = settled(Branches()), volume(2)
    passes = plan_whole(net, grid.shape, tile=16).passes
    assert [each.summarizes for each in passes] == [("norms.0", "norms.1"), ("norms.2",), ()]
    assert relative(predict_whole(net, grid, tile=16, quiet=True), whole(net, grid)) < TOLERANCE


def test_a_small_deviation_of_large_numbers() -> None:
    # Of numbers near 10⁴ with a deviation of 1, sums of squares in float32 would lose all digits of the variance.
    net, grid = settled(nn.Sequential(nn.Conv2d(1, 1, 1), nn.InstanceNorm2d(1))), 1e4 + volume(2)
    nn.init.ones_(net[0].weight)
    exact = whole(net.double(), grid.double())
    whole_error = relative(whole(net.float(), grid), exact)
    assert relative(predict_whole(net, grid, tile=9, quiet=True), exact) <= 2 * whole_error + 1e-6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_dtypes(dtype: torch.dtype) -> None:
    net, grid = net_with(nn.GroupNorm(2, 4), SqueezeExcite(4)).to(dtype), volume(2).to(dtype)
    got, rounded = predict_whole(net, grid, tile=16, quiet=True), whole(net, grid)
    exact = whole(net.double(), grid.double())
    # Layers round to the dtype in tiles as in the whole; sums of n positions in another order differ by n·eps at most.
    sums = grid[0].numel() * torch.finfo(torch.float64).eps
    assert relative(got, exact) <= 2 * relative(rounded, exact) + torch.finfo(dtype).eps + sums


class Centred(nn.Module):
    """A user's layer: the grid without its mean, by the methods that run in tiles."""

    def forward(self, grid: Tensor) -> Tensor:
        return self.respond(grid, *self.summarize(grid))

    def summarize(self, tile: Tensor) -> tuple[Tensor, Tensor]:
        count = tile[0, 0].numel()
        return tile.flatten(2).double().sum(2), torch.full((1, 1), count, dtype=torch.float64)

    def respond(self, tile: Tensor, total: Tensor, count: Tensor) -> Tensor:
        return tile - (total / count).to(tile.dtype)[:, :, None, None]


class CentredByMethod(Centred):
    """The same, with one tensor of sums."""

    def forward(self, grid: Tensor) -> Tensor:
        return self.respond(grid, self.summarize(grid))

    def summarize(self, tile: Tensor) -> Tensor:  # type: ignore[override]
        total, count = super().summarize(tile)
        return torch.stack([total, count.expand_as(total)])

    def respond(self, tile: Tensor, sums: Tensor) -> Tensor:  # type: ignore[override]
        return super().respond(tile, *sums)


class CentredWaves(Centred):
    """The same, by sums of complex numbers and a count in integers."""

    def summarize(self, tile: Tensor) -> tuple[Tensor, Tensor]:
        total, count = super().summarize(tile)
        return torch.complex(-total, total), count.long() + 2**60

    def respond(self, tile: Tensor, total: Tensor, count: Tensor) -> Tensor:
        assert count.dtype == torch.long
        return super().respond(tile, total.imag, count % 2**60)


@pytest.mark.parametrize("layer", [Centred, CentredByMethod, CentredWaves])
def test_a_layer_of_the_user(layer: type[nn.Module]) -> None:
    net, grid = net_with(layer()), volume(2)
    assert relative(predict_whole(net, grid, tile=16, quiet=True), whole(net, grid)) < TOLERANCE


def test_sums_of_a_users_layer_are_not_rounded_to_the_tiles() -> None:
    """70,000 positions are more than float16 counts: the count was infinite, and the mean 0."""
    net, grid = nn.Sequential(nn.Conv2d(2, 2, 1), Centred()).half().eval(), (torch.rand(2, 265, 265) + 1).half()
    got = predict_whole(net, grid, tile=128, quiet=True)
    with torch.no_grad():
        expected = net(grid[None])[0]
    assert got.dtype == torch.float16
    assert relative(got, expected) <= torch.finfo(torch.float16).eps


@pytest.mark.parametrize("layer", ["group norm", "maximum pooling to 7"])
def test_not_a_number_is_refused(layer: str) -> None:
    grid = volume(2)
    grid[1, 0, 30, 33] = torch.nan
    with pytest.raises(ValueError, match=r".*not finite .*\(\d+, \d+\).*nan_to_num"):
        predict_whole(net_with(LAYERS[layer]()), grid, tile=16, quiet=True)


# With values inside the network on disk, and without, where each pass starts from the volume.
@pytest.mark.parametrize(("disk", "kills"), [(None, 5), (1, 13)])
def test_a_killed_run_resumes_to_the_same_bytes(disk: int | None, kills: int, tmp_path: Path) -> None:
    tiles = Tiles(16, disk=disk)
    net, grid = net_with(nn.InstanceNorm2d(4), nn.Conv2d(4, 4, 3, padding=1), nn.GroupNorm(2, 4)), volume(2)
    whole_run = predict_whole(net, grid.numpy(), tile=tiles, out=tmp_path / "whole.npy", quiet=True)
    for kill in range(1, kills, 3):

        class Killed(np.ndarray):
            reads = 0

            def __getitem__(self, index: object) -> object:
                Killed.reads += 1
                if Killed.reads > 2 * kill:  # noqa: B023  # used at once
                    raise KeyboardInterrupt
                return np.asarray(super().__getitem__(index))

        path = tmp_path / f"killed-{kill}.npy"
        with pytest.raises(KeyboardInterrupt):
            predict_whole(net, grid.numpy().view(Killed), tile=tiles, out=path, quiet=True)
        resumed = predict_whole(net, grid.numpy(), tile=tiles, out=path, quiet=True)
        assert np.array_equal(resumed, whole_run)


# ---- the parts -------------------------------------------------------------------------------------------------------
@given(st.lists(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=6), min_size=2, max_size=6), st.floats(-1e6, 1e6))
@settings(max_examples=60, deadline=None)
def test_moments_merge_to_those_of_all(groups: list[list[float]], offset: float) -> None:
    parts = []
    for group in groups:
        numbers = torch.tensor(group, dtype=torch.float64) + offset
        variance, mean = torch.var_mean(numbers, correction=0)
        parts.append((torch.tensor(float(len(group)), dtype=torch.float64), mean, variance * len(group)))
    numbers = torch.tensor([*itertools.chain(*groups)], dtype=torch.float64) + offset
    count, mean, squares = reduce(merge_moments, parts)
    # A few rounding errors of numbers of this size, in sums of up to 36 of them.
    bound = 100 * torch.finfo(torch.float64).eps * float(numbers.abs().max())
    assert count == len(numbers)
    assert abs(mean - numbers.mean()) <= bound
    deviation = float((numbers - numbers.mean()).abs().max())
    assert abs(squares - (numbers - numbers.mean()).square().sum()) <= 100 * bound * (deviation + bound)
