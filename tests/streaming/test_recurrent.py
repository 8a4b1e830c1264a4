"""Recurrent layers along axes that are cut: tiles of a line pass on their states, as untiled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from farfield import WholeNetwork
from farfield.streaming import Tiles, plan_whole, predict_whole
from farfield.streaming.graph import Value
from farfield.streaming.labels import GraphError
from helpers.recorded import run_in_tiles
from helpers.recurrent_nets import KINDS, Along, codec, dual_path
from helpers.stopping import recording_tasks, stopping
from helpers.streamed_nets import relative

TOLERANCE = 1e-10
pytestmark = pytest.mark.filterwarnings("ignore:LSTM with projections")


def skewed(*shape: int, seed: int = 0) -> Tensor:
    """Numbers whose mean and extremes lie far from what most of them are."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).exp()


def made(net: nn.Module, seed: int = 0) -> nn.Module:
    generator = torch.Generator().manual_seed(seed)
    for parameter in net.parameters():
        nn.init.normal_(parameter, std=0.4, generator=generator)
    return net.double().eval()


def run(net: nn.Module, volume: Tensor) -> Tensor:
    with torch.no_grad():
        return net(volume)


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_codec_is_as_untiled(kind: str, bidirectional: bool, batch_first: bool) -> None:
    options = {"num_layers": 2, "bidirectional": bidirectional, "batch_first": batch_first}
    net, volume = made(codec(Along(4, kind, **options))), skewed(2, 1, 210)
    assert relative(predict_whole(net, volume, tile=32, quiet=True), run(net, volume)) < TOLERANCE


@settings(max_examples=30)
@given(st.data())
def test_drawn_layers_are_as_untiled(data: st.DataObject) -> None:
    dims, seed = data.draw(st.integers(1, 2)), data.draw(st.integers(0, 99))
    layers: list[nn.Module] = []
    for _ in range(data.draw(st.integers(1, 2))):
        kind, axis = data.draw(st.sampled_from([*KINDS])), data.draw(st.integers(0, dims - 1))
        options: dict[str, Any] = {
            "num_layers": data.draw(st.integers(1, 3)),
            "bias": data.draw(st.booleans()),
            "batch_first": data.draw(st.booleans()),
            "bidirectional": data.draw(st.booleans()),
        }
        if kind == "LSTM":
            options["proj_size"] = data.draw(st.sampled_from([0, 0, 2]))
        if kind == "RNN":
            options["nonlinearity"] = data.draw(st.sampled_from(["tanh", "relu"]))
        layers.append(Along(3, kind, axis, **options))
    convolution = {1: nn.Conv1d, 2: nn.Conv2d}[dims]
    stride = data.draw(st.integers(1, 2))
    first = convolution(1, 3, 3, stride=stride, padding=data.draw(st.integers(0, 1)))
    net = made(nn.Sequential(first, *layers, convolution(3, 2, 3, padding=1)), seed)
    size = [data.draw(st.integers(8, 25)) for _ in range(dims)]
    tile = [stride * data.draw(st.integers(2, length)) for length in size]
    volume = skewed(1, 1, *size, seed=seed)
    got = run_in_tiles(net, volume, tile, store=data.draw(st.booleans()), seed=seed).output
    assert relative(got, run(net, volume)) < TOLERANCE


@pytest.mark.parametrize("tile", [8, (None, 8), (6, None), (24, 30)])
def test_both_axes_of_a_spectrogram(tile: Any) -> None:
    net, volume = made(dual_path()), skewed(2, 1, 22, 29)
    assert relative(predict_whole(net, volume, tile=tile, quiet=True), run(net, volume)) < TOLERANCE


def test_states_that_a_network_computes_begin_a_scan() -> None:
    class Begun(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.rnn = nn.Conv1d(1, 3, 1), nn.GRU(3, 3, batch_first=True)

        def forward(self, grid: Tensor) -> Tensor:
            grid = self.first(grid)
            return self.rnn(grid.mT, grid.mean(2)[None])[0].mT

    net, volume = made(Begun()), skewed(2, 1, 50)
    assert relative(predict_whole(net, volume, tile=8, quiet=True), run(net, volume)) < TOLERANCE


# ---- plans -----------------------------------------------------------------------------------------------------------
def test_an_hour_of_audio_takes_constant_memory() -> None:
    net = codec(Along(4, num_layers=2)).eval()
    # What is free now would decide what is stored.
    tile = Tiles(2**16, memory=2**33)
    minute, hour = (plan_whole(net, (1, 24_000 * seconds), tile=tile) for seconds in (60, 3600))
    assert len(minute.passes) == len(hour.passes) == 3
    assert hour.tile_bytes == minute.tile_bytes
    assert hour.recomputed < 1.01
    # Where both directions are scanned, one of them runs once more for its states.
    both = plan_whole(codec(Along(4, bidirectional=True)).eval(), (1, 24_000 * 60), tile=tile)
    assert 1.01 < both.recomputed < 1.5


def test_one_tile_runs_at_once() -> None:
    assert plan_whole(codec(Along(4)).eval(), (1, 2**16), tile=2**10).workers == 1


# ---- any order -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("tasks", [5, 12, 16])
def test_a_prediction_that_was_stopped_goes_on_to_the_same_bytes(
    tasks: int, bidirectional: bool, tmp_path: Path
) -> None:
    net, volume = made(codec(Along(4, bidirectional=bidirectional))), skewed(1, 210).numpy()
    want, tile = predict_whole(net, volume, tile=32, quiet=True), Tiles(32, disk=10**7)
    with stopping(tasks):
        predict_whole(net, volume, tile=tile, out=tmp_path / "out.npy", quiet=True)
    with recording_tasks() as seen:
        got = predict_whole(net, volume, tile=tile, out=tmp_path / "out.npy", quiet=True)
    assert np.array_equal(got, want)
    # Tiles that were finished run again for their states alone.
    assert len(seen) == 3 * 7 - (tasks - 1)


def test_several_tiles_at_once_have_the_same_bytes() -> None:
    net, volume = made(dual_path()), skewed(1, 22, 29).numpy()
    want = predict_whole(net, volume, tile=8, quiet=True)
    assert np.array_equal(predict_whole(net, volume, tile=Tiles(8, workers=3), quiet=True), want)


# ---- refusals --------------------------------------------------------------------------------------------------------
class Last(nn.Module):
    """The state behind the last step, added everywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.rnn = nn.Conv1d(1, 3, 1), nn.GRU(3, 3, batch_first=True)

    def forward(self, grid: Tensor) -> Tensor:
        grid = self.first(grid)
        return grid + self.rnn(grid.mT)[1].permute(1, 2, 0)


def test_the_last_state_is_refused() -> None:
    net, volume = made(Last()), skewed(1, 1, 50)
    with pytest.raises(GraphError, match=r"it reads output 1 of farfield_streaming\.recurrent.*; fix: tile with None"):
        predict_whole(net, volume, tile=8, quiet=True)
    assert relative(predict_whole(net, volume, tile=(None,), quiet=True), run(net, volume)) < TOLERANCE


def test_a_mask_is_refused() -> None:
    with pytest.raises(GraphError, match=r"recurrent.default in 4.rnn: each of its positions needs all others"):
        predict_whole(made(codec(Along(4))), skewed(1, 1, 64), tile=16, quiet=True, mask=np.arange(64) < 40)


def test_statistics_of_a_tile_are_refused() -> None:
    with pytest.raises(GraphError, match=r"needs all positions of the volume .*statistics=\"whole\""):
        predict_whole(made(codec(Along(4))), skewed(1, 1, 64), tile=Tiles(16, statistics="tile"), quiet=True)


def test_training_is_refused_along_an_axis_that_is_cut() -> None:
    net, volume = made(codec(Along(4))), skewed(1, 1, 64)
    with pytest.raises(GraphError, match=r"has no gradient along an axis that is cut; fix: tile with None"):
        WholeNetwork(net, 16)(volume)


def test_all_operations_of_a_scan_are_one_value_a_layer_and_direction() -> None:
    plan = plan_whole(codec(Along(4, num_layers=2, bidirectional=True)).eval(), (1, 256), tile=32)
    scans = plan.labelled.scans
    assert [scan.back for _, scan in sorted(scans.items())] == [False, True] * 2
    assert all(Value(index) in plan.stored for index in scans)
