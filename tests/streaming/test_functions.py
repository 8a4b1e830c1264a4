"""Functions of torch that are recorded as others: against torch's own, in tiles, whatever they are given."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from farfield.streaming import predict_whole
from farfield.streaming.functions import run_recorded
from farfield.streaming.graph import Graph, Info, Writer
from farfield.streaming.labels import GraphError
from farfield.streaming.places import RecordedNetwork
from farfield.streaming.rewrites import as_attention
from helpers.drawn_networks import Layer
from helpers.recorded import record_network, run_in_tiles

SHAPE = (1, 4, 23, 17)


def of_rows(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return the function on rows as sequences `(rows, columns, channels)`."""

    def run(grid: Tensor, *modules: nn.Module) -> Tensor:
        batch, channels, height, width = grid.shape
        rows = function(grid.permute(0, 2, 3, 1).reshape(batch * height, width, channels), *modules)
        return rows.reshape(batch, height, width, -1).permute(0, 3, 1, 2)

    return run


class OwnNorm(torch.autograd.Function):
    """A norm over channels whose forward keeps something for its backward."""

    @staticmethod
    def forward(ctx: Any, grid: Tensor, weight: float) -> Tensor:  # type: ignore[override]
        scaled = grid - grid.mean(1, keepdim=True)
        ctx.save_for_backward(scaled)
        return scaled.mul_(weight)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise NotImplementedError


class Doubled(torch.autograd.Function):
    """A function that writes to its input, and keeps its inputs in another step."""

    @staticmethod
    def forward(grid: Tensor) -> Tensor:  # type: ignore[override]
        return grid.mul_(2)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.mark_dirty(*inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return 2 * gradients[0]


# As `swish = Swish.apply` of a module of functions.
APPLIED = OwnNorm.apply


def project_a_table(grid: Tensor, first: nn.Module, second: nn.Module) -> Tensor:
    """Add what layers make of a table of positions, as of Swin V2."""
    table = torch.stack(torch.meshgrid(torch.linspace(-1, 1, 5), torch.linspace(-1, 1, 3), indexing="ij"), -1)[None].to(
        grid
    )
    return grid + second(first(table).relu_()).flatten(0, -2).mean(0)[:, None, None]


def write_to_parameters(grid: Tensor, own: nn.Module) -> Tensor:
    """Write to a copy of a weight, and through a view of it."""
    weight = own.weight.clone()
    weight[0].mul_(2)
    weight.view(-1)[1:3].fill_(0.5)
    return F.conv2d(grid, weight)


def share_keys(rows: Tensor) -> Tensor:
    """Attention of eight heads of queries that share two of keys; what follows reads some of them."""
    wide = torch.cat([rows * number for number in range(1, 9)], -1)
    query = wide.unflatten(-1, (8, 4)).transpose(1, 2).contiguous()
    key, value = query[:, :2].contiguous(), query[:, 2:4].contiguous()
    heads = F.scaled_dot_product_attention(query, key, value, enable_gqa=True)
    return heads[:, 1:3].transpose(1, 2).flatten(2)


NETWORKS: dict[str, tuple[Callable[..., Tensor], Callable[[], list[nn.Module]]]] = {
    "LSTM": (of_rows(lambda rows, own: own(rows)[0]), lambda: [nn.LSTM(4, 3, 2, batch_first=True, bidirectional=True)]),
    "LSTM of projections": (
        of_rows(lambda rows, own: own(rows)[0]),
        lambda: [nn.LSTM(4, 5, batch_first=True, proj_size=2)],
    ),
    "GRU": (of_rows(lambda rows, own: own(rows)[0]), lambda: [nn.GRU(4, 3, batch_first=True, bidirectional=True)]),
    "GRU, time first": (of_rows(lambda rows, own: own(rows.mT.movedim(2, 0))[0].movedim(0, 1)), lambda: [nn.GRU(4, 3)]),
    "the last state": (
        of_rows(lambda rows, own: rows + own(rows)[1].movedim(0, 1)),
        lambda: [nn.RNN(4, 4, bias=False, batch_first=True)],
    ),
    "RNN": (of_rows(lambda rows, own: own(rows)[0]), lambda: [nn.RNN(4, 3, 2, nonlinearity="relu", batch_first=True)]),
    "cells": (
        of_rows(lambda rows, gru, lstm: gru(rows.flatten(0, 1)) + lstm(rows.flatten(0, 1))[1]),
        lambda: [nn.GRUCell(4, 4), nn.LSTMCell(4, 4)],
    ),
    "RMS norm": (of_rows(lambda rows, own: own(rows)), lambda: [nn.RMSNorm(4)]),
    "own gradient": (lambda grid: APPLIED(grid, 3.0) + Doubled.apply(grid.clone()), list),
    "checkpoint": (
        lambda grid, own: checkpoint(own, grid, use_reentrant=True) + checkpoint(own, grid, use_reentrant=False),
        lambda: [nn.Conv2d(4, 4, 3, padding=1)],
    ),
    "a table": (project_a_table, lambda: [nn.Linear(2, 6), nn.Linear(6, 4, bias=False)]),
    "a weight": (write_to_parameters, lambda: [nn.Conv2d(4, 4, 1)]),
    "classes": (lambda grid: F.one_hot(grid.argmax(1), 4).movedim(-1, 1).to(grid), list),
    "numbers of a list": (lambda grid: grid * torch.tensor([[1.0, 2.0], [3.0, 4.0]]).tolist()[1][0], list),
    "a whole number": (lambda grid: torch.empty_like(grid, dtype=torch.int64).copy_(9 * grid).to(grid), list),
    "shared keys": (of_rows(share_keys), list),
    "learned queries": (
        of_rows(lambda rows, own, table: own(rows, *[table.weight.expand(len(rows), -1, -1)] * 2)[0]),
        lambda: [nn.MultiheadAttention(4, 2, batch_first=True), nn.Embedding(6, 4)],
    ),
}


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.filterwarnings("ignore:LSTM with projections")
@pytest.mark.parametrize("name", NETWORKS)
def test_networks_in_tiles(name: str) -> None:
    function, build = NETWORKS[name]
    torch.manual_seed(0)
    net, volume = Layer(function, *build()).double().eval(), torch.randn(SHAPE, dtype=torch.float64)
    for tile in ((7, 17), (23, 17)):
        with torch.no_grad():
            torch.testing.assert_close(run_in_tiles(net, volume, tile).output, net(volume), rtol=1e-12, atol=1e-12)


class Averaging(nn.Module):
    """Keeps an average of what it saw, by a new tensor or by a write."""

    def __init__(self, write: bool) -> None:
        super().__init__()
        self.write = write
        self.register_buffer("average", torch.zeros(()))

    def forward(self, grid: Tensor) -> Tensor:
        after = 0.9 * self.average + 0.1 * grid.mean()
        if self.write:
            self.average.copy_(after)
        else:
            self.average = after
        return grid


@pytest.mark.parametrize("write", [False, True])
def test_what_is_kept_of_the_volume_is_refused(write: bool) -> None:
    with pytest.raises(ValueError, match=r"0\.average .*computed from the volume"):
        record_network(nn.Sequential(Averaging(write)).eval(), SHAPE)


# ---- transforms of frames --------------------------------------------------------------------------------------------
FRAMES = st.fixed_dictionaries(
    {
        "n_fft": st.integers(4, 17),
        "hop_length": st.integers(1, 4),
        "normalized": st.booleans(),
        "center": st.booleans(),
        "window": st.booleans(),
    }
)


@settings(max_examples=50, deadline=None)
@given(FRAMES, st.sampled_from(["reflect", "constant", "replicate", "circular"]), st.sampled_from([None, True, False]))
def test_frames_have_the_transforms_of_torch(options: dict[str, Any], mode: str, onesided: bool | None) -> None:
    torch.manual_seed(0)
    signal, width = torch.randn(3, 40, dtype=torch.float64), options["n_fft"] - options["n_fft"] // 4
    window = torch.rand(width, dtype=torch.float64) if options["window"] else None
    given = options | {"window": window, "win_length": width, "pad_mode": mode, "onesided": onesided}
    for each in (signal, signal[0]):
        want = torch.stft(each, **given, return_complex=True)
        torch.testing.assert_close(run_recorded(torch.stft, each, **given, return_complex=True), want)


@settings(max_examples=50, deadline=None)
@given(FRAMES, st.sampled_from([None, 30, 47]))
def test_frames_are_added_up_as_by_torch(options: dict[str, Any], length: int | None) -> None:
    torch.manual_seed(0)
    signal, width = torch.randn(3, 40, dtype=torch.float64), options["n_fft"]
    window = torch.rand(width, dtype=torch.float64) + 0.1 if options["window"] else None
    assume(options["hop_length"] <= width // 2)
    spectra = torch.stft(signal, **(options | {"window": window}), return_complex=True)
    given = options | {"window": window, "length": length}
    for each in (spectra, spectra[0]):
        torch.testing.assert_close(run_recorded(torch.istft, each, **given), torch.istft(each, **given))


def test_frames_run_in_tiles_along_their_axis_too() -> None:
    def transform(rows: Tensor) -> Tensor:
        window = torch.hann_window(8, dtype=torch.float64)
        spectra = torch.stft(rows[..., 0], 8, 2, window=window, return_complex=True)
        return torch.istft(spectra * spectra.abs(), 8, 2, window=window, length=rows.shape[1])[..., None]

    net, volume = Layer(of_rows(transform)), torch.randn(SHAPE, dtype=torch.float64)
    for tile in ((5, 17), (9, 6)):
        torch.testing.assert_close(run_in_tiles(net, volume, tile).output, net(volume))


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(["bilinear", "bicubic"]), st.booleans(), st.lists(st.integers(2, 50), min_size=4, max_size=4))
def test_drawn_antialiased_resampling(mode: str, corners: bool, lengths: list[int]) -> None:
    torch.manual_seed(0)
    volume = torch.randn(1, 2, *lengths[:2], dtype=torch.float64)
    net = Layer(lambda grid: F.interpolate(grid, lengths[2:], mode=mode, align_corners=corners, antialias=True))
    tile = [max(2, length // 3) for length in lengths[:2]]
    torch.testing.assert_close(run_in_tiles(net, volume, tile).output, net(volume))


# ---- axes that can be cut, kernels of devices ------------------------------------------------------------------------
def roll_positions(grid: Tensor) -> Tensor:
    """Positions one after the other, of which the last ones come first."""
    return grid.flatten(2).roll(5, 2).unflatten(2, grid.shape[2:])


def test_axes_that_cannot_be_cut_together() -> None:
    recorded = RecordedNetwork(record_network(Layer(roll_positions), SHAPE), SHAPE[2:])
    assert recorded.cuttable == (0,)  # the longest
    with pytest.raises(GraphError, match=r"fix: tile=\(11, None\)"):
        recorded.label((0, 1))
    net, volume = Layer(roll_positions).eval(), torch.randn(SHAPE, dtype=torch.float64)
    torch.testing.assert_close(predict_whole(net, volume, tile=(11, None), quiet=True), net(volume))


def sort_and_search(grid: Tensor) -> Tensor:
    """What has no rule, behind what works along a whole axis."""
    return grid.sort(2)[0].sort(3)[0] + torch.searchsorted(torch.linspace(0, 1, 9), grid)


def test_where_no_axis_can_be_cut_it_runs_in_one_piece() -> None:
    recorded = RecordedNetwork(record_network(Layer(sort_and_search), SHAPE), SHAPE[2:])
    assert recorded.cuttable == ()
    net, volume = Layer(sort_and_search).eval(), torch.rand(SHAPE)
    torch.testing.assert_close(predict_whole(net, volume, tile=(None, None), quiet=True), net(volume))


ATTENTION = [
    name
    for name in dir(torch.ops.aten)
    if re.fullmatch("_scaled_dot_product_.*attention(_for_cpu)?(_overrideable)?", name)
]


@pytest.mark.parametrize("name", ["_scaled_dot_product_flash_attention", *ATTENTION])
def test_kernels_of_attention_are_recorded_alike(name: str) -> None:
    function, graph = getattr(torch.ops.aten, name).default, Graph()
    query, key, value = (graph.add("input", (place,), {}, [Info((1, 2, 5, 4), torch.float32)]) for place in range(3))
    given = {
        "query": query,
        "key": key,
        "value": value,
        "attn_mask": 4,
        "attn_bias": 4,
        "is_causal": False,
        "scale": 0.5,
    }
    arguments = function._schema.arguments
    args = [given.get(each.name, each.default_value) for each in arguments if not each.kwarg_only]
    kwargs = {each.name: given.get(each.name, each.default_value) for each in arguments if each.kwarg_only}
    mask = 4 if {"attn_mask", "attn_bias"} & {each.name for each in arguments} else None
    found = as_attention(Writer(graph, ""), function, args, kwargs)
    assert found == ("attend", [query, key, value, mask, False, 0.5], {})
