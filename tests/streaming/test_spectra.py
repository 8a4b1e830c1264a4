"""Fourier layers that keep a few modes along axes that are cut: as untiled, to the rounding of float64."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fft, nn

from farfield import WholeNetwork
from farfield.streaming import Tiles, plan_whole, predict_whole
from farfield.streaming.labels import GraphError
from farfield.streaming.places import RecordedNetwork
from helpers.drawn_networks import Layer
from helpers.recorded import record_network, run_in_tiles
from helpers.spectral_nets import KINDS, Operator
from helpers.stopping import stopping
from helpers.streamed_nets import relative
from helpers.trained_nets import differentiate, farthest

TOLERANCE = 1e-10
SIZES, MODES = {1: (37,), 2: (22, 17), 3: (9, 10, 8)}, {1: (5,), 2: (4, 5), 3: (3, 2, 3)}
TILES = {1: (8,), 2: (8, 5), 3: (4, 5, 3)}


def skewed(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """Numbers whose mean and extremes lie far from what most of them are."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype).exp()


def made(kind: str, dims: int, seed: int = 0, **options: Any) -> nn.Module:
    torch.manual_seed(seed)
    return Operator(kind, MODES[dims], **options).double().eval()


def run(net: nn.Module, volume: Tensor) -> Tensor:
    with torch.no_grad():
        return net(volume)


@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_operators_are_as_untiled(kind: str, dims: int) -> None:
    net, volume = made(kind, dims, norm=True), skewed(2, 1, *SIZES[dims])
    assert relative(predict_whole(net, volume, tile=TILES[dims], quiet=True), run(net, volume)) < TOLERANCE


class _Highest(nn.Module):
    """Keeps the highest waves, of which that of an even length in the middle has no pair."""

    def forward(self, grid: Tensor) -> Tensor:
        modes = fft.rfft(grid)
        kept = torch.zeros_like(modes)
        kept[..., -3:] = 2 * modes[..., -3:]
        return fft.irfft(kept, n=grid.shape[-1])


@pytest.mark.parametrize("length", [24, 25])
def test_the_highest_waves_are_as_untiled(length: int) -> None:
    volume = skewed(2, 1, length)
    got = predict_whole(_Highest().eval(), volume, tile=(7,), quiet=True)
    assert relative(got, run(_Highest(), volume)) < TOLERANCE


@settings(max_examples=40)
@given(st.data())
def test_drawn_operators_are_as_untiled(data: st.DataObject) -> None:
    dims, kind = data.draw(st.integers(1, 3)), data.draw(st.sampled_from([*KINDS]))
    norm = data.draw(st.sampled_from([None, "forward", "backward", "ortho"]))
    padding, seed = data.draw(st.sampled_from([0, 0, 1, 4])), data.draw(st.integers(0, 99))
    net = made(kind, dims, seed, layers=data.draw(st.integers(1, 2)), padding=padding, norm=data.draw(st.booleans()))
    for layer in net.spectral:
        layer.norm = norm
    size = [data.draw(st.integers(12, 17)) for _ in range(dims)]
    tile = [data.draw(st.integers(3, length)) for length in size]
    volume = skewed(1, 1, *size, seed=seed)
    got = run_in_tiles(net, volume, tile, store=data.draw(st.booleans()), seed=seed).output
    assert relative(got, run(net, volume)) < TOLERANCE


@pytest.mark.parametrize("tile", [(8, None), (None, 5)])
@pytest.mark.parametrize("kind", KINDS)
def test_some_axes_are_whole(kind: str, tile: tuple[int | None, ...]) -> None:
    net, volume = made(kind, 2), skewed(1, 1, *SIZES[2])
    assert relative(predict_whole(net, volume, tile=tile, quiet=True), run(net, volume)) < TOLERANCE


def test_in_float32_it_is_as_near_to_float64_as_untiled() -> None:
    net, volume = made("Corners", 2), skewed(1, 1, 90, 70)
    want = run(net, volume)
    narrow, volume = net.float(), volume.float()
    own = relative(run(narrow, volume), want)
    assert relative(predict_whole(narrow, volume, tile=16, quiet=True), want) < 2 * own


@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_of_the_untiled_network(kind: str, dims: int) -> None:
    net, volume = made(kind, dims, layers=1, norm=True).train(), skewed(2, 1, *SIZES[dims])
    target = skewed(*volume.shape, seed=1)
    got = differentiate(net, lambda own, grid: WholeNetwork(own, TILES[dims], F.mse_loss)(grid, target), volume)
    distance, where = farthest(got, differentiate(net, lambda own, grid: F.mse_loss(own(grid), target), volume))
    assert distance < TOLERANCE, where


# ---- plans -----------------------------------------------------------------------------------------------------------
def test_what_is_summed_does_not_grow_with_the_volume() -> None:
    net = made("Corners", 3, layers=1)
    for size in (64, 512):
        plan = plan_whole(net, (1, size, size, size), tile=32)
        (index,) = plan.labelled.reductions
        assert plan.labelled.graph.nodes[index].outputs[0].shape == (1, 3, 2 * 3, 2 * 2, 3)
        assert max(each.bytes for each in plan.passes) < 40 * 2**20
        assert all(plan.halo.before) <= 1


def test_the_output_stands_where_the_volume_does() -> None:
    recorded = RecordedNetwork(record_network(made("Corners", 2).float(), (1, 1, *SIZES[2])), SIZES[2])
    assert recorded.strides == (1, 1)
    assert not recorded.places.doubts
    assert all(place.scale == 1 and place.offset == 0 for place in recorded.places.of[recorded.graph.output].values())


# ---- stopped, and in parts -------------------------------------------------------------------------------------------
@pytest.mark.parametrize("tasks", [3, 16, 25])
def test_a_prediction_that_was_stopped_goes_on_to_the_same_bytes(tasks: int, tmp_path: Path) -> None:
    net, volume = made("Corners", 2), skewed(1, *SIZES[2]).numpy()
    want = predict_whole(net, volume, tile=8, quiet=True)
    with stopping(tasks):
        predict_whole(net, volume, tile=8, out=tmp_path / "out.npy", quiet=True)
    got = predict_whole(net, volume, tile=8, out=tmp_path / "out.npy", quiet=True)
    assert np.array_equal(got, want)


# ---- refusals --------------------------------------------------------------------------------------------------------
def gated(grid: Tensor) -> Tensor:
    """All modes, each times a number of its own."""
    waves = fft.rfft2(grid)
    return fft.irfft2(waves * torch.linspace(0, 1, waves.shape[-1]), s=grid.shape[-2:])


def filtered(grid: Tensor) -> Tensor:
    """All modes along the second axis, of the first few along the other one."""
    waves = fft.rfft2(grid, dim=(3, 2))[:, :, :5]
    return fft.irfft2(waves * torch.linspace(0, 1, waves.shape[-1]), s=grid.shape[:1:-1], dim=(3, 2))


@pytest.mark.parametrize("function", [gated, filtered])
def test_whole_spectra_are_refused_and_run_along_whole_axes(function: Callable[[Tensor], Tensor]) -> None:
    net, volume = nn.Sequential(nn.Conv2d(1, 3, 3, padding=1), Layer(function)).double().eval(), skewed(1, 1, 22, 17)
    with pytest.raises(GraphError, match=r"in 1: .* an axis that is cut.*; fix: tile with None for that axis"):
        predict_whole(net, volume, tile=8, quiet=True)
    for tile in ((None, None), *[(8, None)] * (function is filtered)):
        assert relative(predict_whole(net, volume, tile=tile, quiet=True), run(net, volume)) < TOLERANCE


def test_slices_may_have_all_modes_together() -> None:
    net, volume = made("Corners", 2), skewed(1, 1, 7, 40)
    assert relative(predict_whole(net, volume, tile=3, quiet=True), run(net, volume)) < TOLERANCE


def test_a_mask_is_refused() -> None:
    net, volume = made("Corners", 2), skewed(1, 1, *SIZES[2])
    with pytest.raises(GraphError, match=r"modes in spectral.0: it is not known how it leaves positions out"):
        predict_whole(net, volume, tile=8, quiet=True, mask=np.arange(17) < np.full((22, 1), 9))


def test_modes_of_a_tile_alone_are_refused() -> None:
    with pytest.raises(GraphError, match=r"in spectral.0 .* on a patch of 22 .*statistics=\"whole\""):
        predict_whole(made("Padded", 1), skewed(1, 1, 60), tile=Tiles(20, statistics="tile"), quiet=True)
