"""Scans along axes that are cut: cumulative sums, products and sums of exponentials."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from farfield.streaming import predict_whole
from helpers.drawn_networks import Layer
from helpers.recorded import run_in_tiles
from helpers.streamed_nets import CONVOLUTIONS, relative

SCANS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "sums": Tensor.cumsum,
    "products": lambda grid, dim: (1 + 0.1 * grid.tanh()).cumprod(dim),
    "exponentials": Tensor.logcumsumexp,
    "sums from the end": lambda grid, dim: grid.flip(dim).cumsum(dim).flip(dim),
    "means": lambda grid, dim: grid.cumsum(dim) / torch.ones_like(grid).cumsum(dim),
}


def skewed(*shape: int, seed: int = 0) -> Tensor:
    """Numbers of which few are large, in float64."""
    draw = torch.Generator().manual_seed(seed)
    return torch.rand(shape, generator=draw, dtype=torch.float64) ** 6 * 3 - 0.1


def apart(net: nn.Module, volume: Tensor, tile: list[int], **options: object) -> float:
    """The largest difference of tiles from the untiled network, relative to the largest number."""
    with torch.no_grad():
        return relative(run_in_tiles(net.eval(), volume, tile, **options).output, net(volume))


@pytest.mark.parametrize("name", SCANS)
@pytest.mark.parametrize("dim", [2, 3, -1])
@pytest.mark.parametrize("store", [False, True])
def test_a_scan_along_a_cut_axis_is_that_of_the_whole(name: str, dim: int, store: bool) -> None:
    net = nn.Sequential(
        nn.Conv2d(2, 3, 3, padding=1), Layer(partial(SCANS[name], dim=dim)), nn.Conv2d(3, 2, 5, padding=2)
    ).double()
    assert apart(net, skewed(2, 2, 37, 29), [8, 10], store=store) < 1e-12


def test_scans_along_both_axes() -> None:
    net = nn.Sequential(nn.Conv2d(1, 2, 3), Layer(lambda grid: grid.cumsum(2).cumsum(3)), nn.Conv2d(2, 1, 3))
    assert apart(net.double(), skewed(1, 1, 41, 35), [12, 7], store=True) < 1e-12
