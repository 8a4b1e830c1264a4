"""Values between passes in half precision: what is rounded, how many bytes it takes, and what is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from tqdm import tqdm

from farfield.streaming import Tiles, plan_whole, predict_whole, use_progress_bar
from farfield.streaming.graph import Graph, Info

HALVES = ("float16", "bfloat16")


def network() -> nn.Sequential:
    torch.manual_seed(0)
    first = nn.Conv2d(1, 4, 3, padding=1), nn.InstanceNorm2d(4), nn.ReLU()
    second = nn.Conv2d(4, 4, 3, padding=1), nn.InstanceNorm2d(4), nn.ReLU()
    return nn.Sequential(*first, *second, nn.Conv2d(4, 2, 3, padding=1)).eval()


def volume() -> Tensor:
    return torch.rand(1, 48, 40, generator=torch.Generator().manual_seed(1))


def run_by_hand(own: nn.Sequential, grid: Tensor, dtype: torch.dtype) -> Tensor:
    """The network, whose norms know the numbers as they are, and read them rounded: passes end there."""
    with torch.no_grad():
        for layer in own:
            if isinstance(layer, nn.InstanceNorm2d):
                var, mean = torch.var_mean(grid, (2, 3), correction=0, keepdim=True)
                grid = (grid.to(dtype).float() - mean) / (var + layer.eps).sqrt()
            else:
                grid = layer(grid)
    return grid[0]


@pytest.mark.parametrize("disk", [0, 10**9])
@pytest.mark.parametrize("stored", HALVES)
def test_numbers_are_rounded_where_passes_end_and_nowhere_else(stored: str, disk: int) -> None:
    own, grid, dtype = network(), volume(), getattr(torch, stored)
    got = predict_whole(own, grid, tile=Tiles(16, disk=disk, stored=stored), quiet=True)
    assert got.dtype == torch.float32
    # A sum that rounds otherwise in float32 may turn the rounding of single numbers, and of few.
    apart = (got - run_by_hand(own, grid[None], dtype)).abs()
    assert float((apart < 1e-5).float().mean()) > 0.98
    assert float(apart.max()) < 4 * torch.finfo(dtype).eps
    assert float((got - run_by_hand(own, grid[None], torch.float32)).abs().median()) > 1e-5


@pytest.mark.parametrize("stored", HALVES)
def test_it_takes_half_the_bytes(stored: str, tmp_path: Path) -> None:
    sizes: dict[str | None, list[int]] = {None: [], stored: []}

    class Look(tqdm):
        def update(self, units: float = 1) -> None:
            own.append(sum(file.stat().st_size for file in tmp_path.glob("**/*.value")))

    for each, own in sizes.items():
        tiles = Tiles(16, disk=10**9, stored=each)
        with use_progress_bar(Look):
            predict_whole(network(), volume(), tile=tiles, out=tmp_path / f"{each}.npy", quiet=True)
        assert plan_whole(network(), volume().shape, tile=tiles).disk_bytes == max(own)
    assert max(sizes[None]) == 2 * max(sizes[stored])
    assert f"on disk as {stored} between passes" in str(plan_whole(network(), volume().shape, tile=tiles))


def test_what_is_no_wider_float_is_stored_as_it_is() -> None:
    graph = Graph(stored=torch.bfloat16)
    for dtype in (torch.int64, torch.bool, torch.float16, torch.complex64, torch.float64, torch.float32):
        value = graph.add("input", (), {}, [Info((2, 3), dtype)])
        is_wide = dtype in (torch.float64, torch.float32)
        assert graph.stored_info(value) == Info((2, 3), torch.bfloat16 if is_wide else dtype)


def test_an_unfinished_prediction_with_another_one_is_refused(tmp_path: Path) -> None:
    class Stop(tqdm):
        def update(self, units: float = 1) -> None:
            self.count = getattr(self, "count", 0) + 1
            if self.count == 12:
                raise KeyboardInterrupt

    call = {"out": tmp_path / "out.npy", "quiet": True}
    with use_progress_bar(Stop), pytest.raises(KeyboardInterrupt):
        predict_whole(network(), volume(), tile=Tiles(16, stored="float16"), **call)
    for other in (None, "bfloat16"):
        with pytest.raises(ValueError, match="another stored precision"):
            predict_whole(network(), volume(), tile=Tiles(16, stored=other), **call)
    got = predict_whole(network(), volume(), tile=Tiles(16, stored="float16"), **call)
    want = predict_whole(network(), volume(), tile=Tiles(16, stored="float16"), quiet=True)
    np.testing.assert_array_equal(got, want)


def test_numbers_that_float16_cannot_hold_are_refused_and_bfloat16_holds_them() -> None:
    own = network()
    own[0].weight.data *= 1e6
    with pytest.raises(ValueError, match=r'65504.*fix: .*stored="bfloat16"'):
        predict_whole(own, volume(), tile=Tiles(16, stored="float16", disk=10**9), quiet=True)
    assert predict_whole(own, volume(), tile=Tiles(16, stored="bfloat16", disk=10**9), quiet=True).isfinite().all()
    with pytest.raises(LookupError, match="bfloat16"):
        predict_whole(own, volume(), tile=Tiles(16, stored="float8"), quiet=True)
