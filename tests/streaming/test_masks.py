"""`predict_whole` with a mask gives what the network gives untiled whose sums leave the other positions out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from farfield.nn import GridAttention, SqueezeExcite
from farfield.streaming import MeanOverFlips, Tiles, freeze_statistics, plan_whole, predict_whole
from farfield.streaming.labels import GraphError
from farfield.volumes import open_volume
from helpers.masked_nets import coarse, run_masked
from helpers.streamed_nets import relative, settled

# Networks in float64.
TOLERANCE = 1e-12


def convolved(*layers: nn.Module) -> nn.Module:
    """Layers between convolutions, of which the first has a stride of 2."""
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, stride=2, padding=1), nn.ReLU(), *layers, nn.ConvTranspose2d(8, 2, 4, stride=2, padding=1)
    )


class Excited(nn.Module):
    """Channels scaled by the mean and the maximum of all positions."""

    def __init__(self, channels: int = 8) -> None:
        super().__init__()
        self.mean, self.peak = nn.AdaptiveAvgPool2d(1), nn.AdaptiveMaxPool2d(1)
        self.linear = nn.Conv2d(2 * channels, channels, 1)

    def forward(self, grid: Tensor) -> Tensor:
        return grid * self.linear(torch.cat([self.mean(grid), self.peak(grid)], 1)).sigmoid()


def monai_unet() -> nn.Module:
    nets = pytest.importorskip("monai.networks.nets")
    return nets.UNet(2, 1, 2, channels=(4, 8, 16), strides=(2, 2), num_res_units=1, norm="instance")


def basic_unet() -> nn.Module:
    nets = pytest.importorskip("monai.networks.nets")
    return nets.BasicUNet(2, 1, 2, features=(4, 4, 4, 4, 8, 4))


NETWORKS = {
    "monai UNet": monai_unet,
    "monai BasicUNet": basic_unet,
    "attention": lambda: convolved(GridAttention(8, "siamese"), nn.ReLU(), GridAttention(8, "factorized_gaussian")),
    "softmax": lambda: convolved(GridAttention(8, "softmax", heads=2)),
    "squeeze-excite": lambda: convolved(Excited(), nn.Conv2d(8, 8, 3, padding=1), Excited()),
    "group norm": lambda: convolved(nn.GroupNorm(2, 8), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.GroupNorm(4, 8)),
}
ODD, EVEN = (33, 45), (32, 48)


def make_mask(kind: str, size: tuple[int, ...]) -> np.ndarray:
    mask = np.zeros(size, bool)
    if kind == "blob":
        mask[4:17, 9:23] = True
        mask[10:14, 20:30] = True
    elif kind == "odd borders":
        mask[1:, 3:-1] = True
    elif kind == "single position":
        mask[21, 35] = True
    elif kind == "thin stripes":
        mask[::5] = True
    elif kind == "everything":
        mask[...] = True
    return mask


KINDS = ("blob", "odd borders", "single position", "thin stripes", "everything", "nothing")


def problem(name: str, size: tuple[int, ...]) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    net = settled(NETWORKS[name]()).double()
    for module in net.modules():
        if hasattr(module, "eps"):
            module.eps = 0.1  # one valid position has no variance: rounding would grow by 1/sqrt(eps) at each norm
    grid = 3 + torch.randn(1, 1, *size, dtype=torch.float64) * torch.linspace(0.5, 4, size[-1])
    return net, grid


def as_mask(mask: np.ndarray) -> Tensor:
    return torch.from_numpy(mask)[None, None]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", NETWORKS)
def test_network_whose_sums_leave_positions_out(name: str, kind: str) -> None:
    # BasicUNet has strides of 16.
    size = (96, 64) if name == "monai BasicUNet" else EVEN
    net, grid = problem(name, size)
    mask = make_mask(kind, size)
    want = run_masked(net, grid, as_mask(mask), 0.5) if mask.any() else torch.zeros(1, 2, *size)
    for tile in (None, Tiles(16, memory=0) if kind == "blob" and "monai" not in name else 16):
        got = predict_whole(net, grid, tile=tile, mask=mask, fill=0.5, quiet=True)
        assert relative(got, want) < TOLERANCE
        assert not got[:, :, ~torch.from_numpy(mask)].any()


class Written(nn.Module):
    """A layer as a function of a grid and of the mask that it sees, which is None where a network runs as it is."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(1, 6, 3, stride=2, padding=1), nn.Conv2d(6, 2, 3, padding=1)
        self.function, self.mask = function, None

    def forward(self, grid: Tensor) -> Tensor:
        grid = self.first(grid)
        valid = None if self.mask is None else coarse(self.mask, grid)
        return self.last(self.function(grid, valid))


def filled(grid: Tensor, mask: Tensor | None, number: float) -> Tensor:
    return grid if mask is None else grid.masked_fill(~mask, number)


def count_of(grid: Tensor, mask: Tensor | None) -> Any:
    return grid[0, 0].numel() if mask is None else mask.sum((2, 3), keepdim=True)


def standardized(grid: Tensor, mask: Tensor | None) -> Tensor:
    if mask is None:
        deviation, mean = torch.std_mean(grid, (2, 3), keepdim=True)
        return (grid - mean) / deviation
    mean = filled(grid, mask, 0).sum((2, 3), keepdim=True) / count_of(grid, mask)
    squares = filled((grid - mean) ** 2, mask, 0).sum((2, 3), keepdim=True)
    return (grid - mean) / (squares / (count_of(grid, mask) - 1)).sqrt()


def attended(grid: Tensor, mask: Tensor | None) -> Tensor:
    query, key, value = grid.flatten(2).mT[:, None].chunk(3, -1)
    bias = None if mask is None else torch.zeros_like(mask, dtype=grid.dtype).masked_fill(~mask, -torch.inf).flatten(2)
    bias = None if bias is None else bias[:, :, None]
    result = F.scaled_dot_product_attention(query, key, value, bias)
    return torch.cat([result[:, 0].mT.unflatten(2, grid.shape[2:])] * 3, 1)


def pooled_by_attention(grid: Tensor, mask: Tensor | None) -> Tensor:
    weights = filled(grid[:, :1], mask, -torch.inf).flatten(2).softmax(-1)
    return grid + (grid.flatten(2) @ weights.mT)[..., None]


def correlated(grid: Tensor, mask: Tensor | None) -> Tensor:
    flat = filled(grid, mask, 0).flatten(2)
    return torch.einsum("bij,bjn->bin", flat @ flat.mT / 500, grid.flatten(2)).view_as(grid)


def averaged_rows(grid: Tensor, mask: Tensor | None) -> Tensor:
    """Along one axis alone: where a column has no valid position, the mean is 0."""
    if mask is None:
        return grid + grid.mean(2, True) * grid.amax(2, True)
    peak = filled(grid, mask, -torch.inf).amax(2, True)
    mean = filled(grid, mask, 0).sum(2, True) / mask.sum(2, keepdim=True).clamp(min=1)
    return grid + mean * peak.where(peak > -torch.inf, 0)


def averaged_regions(grid: Tensor, mask: Tensor | None) -> Tensor:
    if mask is None:
        pooled = F.adaptive_avg_pool2d(grid, 2)
    else:
        pooled = F.adaptive_avg_pool2d(filled(grid, mask, 0), 2)
        pooled = pooled / F.adaptive_avg_pool2d(mask.to(grid), 2).clamp(min=1e-300)
    return grid + F.interpolate(pooled, size=grid.shape[2:])


def extremes(grid: Tensor, mask: Tensor | None) -> Tensor:
    low, high = filled(grid, mask, torch.inf).amin((2, 3), True), filled(grid, mask, -torch.inf).amax((2, 3), True)
    norm = filled(grid, mask, 0).norm(p=2, dim=(2, 3), keepdim=True)
    return (grid - low) / (high - low + 1) + torch.logsumexp(filled(grid, mask, -torch.inf), (2, 3), True) / (norm + 1)


def of_flipped(grid: Tensor, mask: Tensor | None) -> Tensor:
    """Of a grid that is flipped along one axis, cut, and shifted by its own padding."""
    turned, valid = grid.flip(3)[:, :, 2:, 3:], None if mask is None else mask.flip(3)[:, :, 2:, 3:]
    return grid * standardized(turned, valid).sigmoid().amax((2, 3), True) if valid is None else (
        grid * filled(standardized(turned, valid).sigmoid(), valid, -torch.inf).amax((2, 3), True)
    )


def as_tokens(grid: Tensor, mask: Tensor | None) -> Tensor:
    """Of positions that are channels: 2 × 2 of them are one."""
    coarser = F.pixel_unshuffle(grid[:, :, :16, :22], 2)
    if mask is None:
        return grid + coarser.mean((2, 3)).unflatten(1, (-1, 4)).mean(2)[..., None, None]
    valid = (F.max_pool2d(mask[:, :, :16, :22].double(), 2) > 0).expand_as(coarser)
    mean = filled(coarser, valid, 0).sum((2, 3)) / valid.sum((2, 3))
    return grid + mean.unflatten(1, (-1, 4)).mean(2)[..., None, None]


FUNCTIONS = (
    standardized,
    attended,
    pooled_by_attention,
    correlated,
    averaged_rows,
    averaged_regions,
    extremes,
    of_flipped,
    as_tokens,
)


def written(function: Any) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return settled(Written(function)).double(), 1 + torch.randn(1, 1, *ODD, dtype=torch.float64)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_functions_of_torch(function: Any) -> None:
    net, grid = written(function)
    mask = make_mask("blob", ODD)
    net.mask = as_mask(mask)
    with torch.no_grad():
        want = net(grid.where(net.mask, 0))
        want = want.where(coarse(net.mask, want), 0)
    net.mask = None
    for tile in (None, 8, (None, 16), (16, None)):
        assert relative(predict_whole(net, grid, tile=tile, mask=mask, quiet=True), want) < TOLERANCE


@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_mask_of_all_positions_changes_nothing(function: Any) -> None:
    net, grid = written(function)
    with torch.no_grad():
        want = net(grid)
    assert relative(predict_whole(net, grid, tile=8, mask=np.ones(ODD, bool), quiet=True), want) < TOLERANCE
