"""What `predict_whole` refuses, by name and with a fix."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from farfield import ShapeError
from farfield.streaming import Tiles, plan_whole, predict_whole
from farfield.streaming.labels import GraphError
from helpers.streamed_nets import Hourglass, attention, relative, settled


def net_with(layer: nn.Module) -> nn.Module:
    first, second = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 1, 1)
    return nn.Sequential(first, nn.Sequential(attention("siamese", 4), layer), second).eval()


def test_an_instance_norm_by_running_statistics_is_local() -> None:
    net, grid = net_with(nn.InstanceNorm2d(4, track_running_stats=True)), torch.randn(1, 1, 20, 20)
    with torch.no_grad():
        torch.testing.assert_close(predict_whole(net, grid, tile=8, quiet=True), net(grid))


class Gate(nn.Module):
    """A gate computed from the deviation of the whole grid."""

    def __init__(self) -> None:
        super().__init__()
        self.reduce = nn.Conv2d(4, 4, 1)

    def forward(self, grid: Tensor) -> Tensor:
        return grid * torch.sigmoid(self.reduce(grid.std((2, 3), keepdim=True)))


class Resized(nn.Module):
    """A grid of fixed size, resized to that of the input."""

    def forward(self, grid: Tensor) -> Tensor:
        return F.interpolate(F.adaptive_avg_pool2d(grid, 8), size=grid.shape[2:])


class Corners(nn.Module):
    def forward(self, grid: Tensor) -> Tensor:
        return F.interpolate(grid, scale_factor=2, mode="bilinear", align_corners=True)


class Ramp(nn.Module):
    def forward(self, grid: Tensor) -> Tensor:
        return grid + torch.linspace(0, 1, grid.shape[-1])


class Round(nn.Module):
    def forward(self, grid: Tensor) -> Tensor:
        return grid.roll(1, 3)


class Branching(nn.Module):
    """Other layers for a longer grid."""

    def __init__(self) -> None:
        super().__init__()
        self.short, self.long = nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, grid: Tensor) -> Tensor:
        return (self.long if max(grid.shape[2:]) > 30 else self.short)(grid)


@pytest.mark.parametrize(
    "layer",
    [
        nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True),
        nn.Conv2d(4, 4, 3, padding=1, padding_mode="circular"),
        Gate(),
        Resized(),
        Corners(),
        Ramp(),
        Round(),
        Branching(),
    ],
    ids=lambda layer: type(layer).__name__,
)
def test_steps_that_depend_on_the_size_or_on_all_positions_are_exact(layer: nn.Module) -> None:
    net, grid = net_with(layer), torch.randn(1, 1, 32, 36)
    plan = plan_whole(net, grid.shape, tile=8)
    assert len(plan.cores) == 20
    with torch.no_grad():
        assert relative(predict_whole(net, grid, plan=plan, quiet=True), net(grid)) < 1e-5


class Sorted(nn.Module):
    """Numbers sorted along an axis."""

    def forward(self, grid: Tensor) -> Tensor:
        return grid.sort(3).values


class Binned(nn.Module):
    """An operation for which there is no rule, of each position by itself."""

    def forward(self, grid: Tensor) -> Tensor:
        return torch.searchsorted(torch.linspace(-1, 1, 9), grid).float()


class Nothing(nn.Module):
    """The sum of no positions, which are viewed as one dimension."""

    def forward(self, grid: Tensor) -> Tensor:
        return grid + grid[:, :, :0].flatten(1).sum()


@pytest.mark.parametrize("function", [predict_whole, plan_whole])
@pytest.mark.parametrize(
    ("layer", "text"),
    [
        (Nothing(), r"view in 1\.1: its view splits 4 positions as no multiple of 0"),
        (Sorted(), r"aten\.sort\S* in 1\.1: it works along an axis that is cut"),
        (Binned(), r"aten\.searchsorted\S* in 1\.1: there is no rule for it; fix: tile=Tiles\(…, halo="),
    ],
)
def test_operations_that_do_not_run_in_tiles_are_refused_by_name(
    layer: nn.Module, text: str, function: Callable[..., Any]
) -> None:
    volume = torch.randn(1, 32, 32) if function is predict_whole else (1, 32, 32)
    with pytest.raises(GraphError, match=f"^{function.__name__}: Sequential does not run in tiles: {text}"):
        function(net_with(layer), volume, tile=8)


@pytest.mark.parametrize(
    ("layer", "tiles"), [(Sorted(), (8, None)), (Binned(), Tiles(8, halo=0)), (Binned(), Tiles(8, halo=3))]
)
def test_the_fixes_of_refusals_work(layer: nn.Module, tiles: Any) -> None:
    net, grid = net_with(layer), torch.randn(1, 1, 32, 32)
    assert len(plan_whole(net, grid.shape, tile=tiles).cores) > 1
    with torch.no_grad():
        assert relative(predict_whole(net, grid, tile=tiles, quiet=True), net(grid)) < 1e-5


def test_training_is_refused_by_name() -> None:
    net = settled(Hourglass("siamese", 2))
    for part in (net.norm, net):  # of a whole network in training, the norm too: it is why it matters
        part.train()
        with pytest.raises(ValueError, match=r'BatchNorm2d .*"norm" .*training; fix: model\.eval\(\)'):
            predict_whole(net, torch.randn(1, 8, 8), quiet=True)


class Pair(nn.Module):
    """A grid and a vector, which do not fit in one array."""

    def forward(self, grid: Tensor) -> dict[str, Tensor]:
        return {"out": grid, "mean": grid.mean((2, 3))}


class Worded(nn.Conv2d):
    """Text in place of a grid."""

    def forward(self, grid: Tensor) -> str:
        return str(super().forward(grid).shape)


@pytest.mark.long
def test_networks_that_do_not_return_a_grid() -> None:
    with pytest.raises(TypeError, match=r"returns dict, not one grid.*fix: a module around it"):
        predict_whole(Pair().eval(), torch.randn(1, 8, 8), tile=(4, 4), quiet=True)
    flat = nn.Sequential(nn.Conv2d(1, 4, 1), nn.Flatten()).eval()
    with pytest.raises(ValueError, match=r"its output \(1, 256\) is no grid.*fix: a module around it"):
        predict_whole(flat, torch.randn(1, 8, 8), tile=(4, 4), quiet=True)


@pytest.mark.long
def test_attention_to_a_context() -> None:
    class Across(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = attention("siamese")

        def forward(self, grid: Tensor) -> Tensor:
            return self.attention(grid, context=grid)

    with pytest.raises(ValueError, match=r"attention .*context.*self-attention"):
        predict_whole(Across().eval(), torch.randn(6, 8, 8), tile=(4, 4), quiet=True)


class Weighted(nn.Module):
    """A norm whose weights are computed from all positions."""

    def __init__(self, reduce: Callable[..., Tensor]) -> None:
        super().__init__()
        self.first, self.last, self.reduce = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 1, 3, padding=1), reduce

    def forward(self, grid: Tensor) -> Tensor:
        features = self.first(grid)
        return self.last(F.group_norm(features, 2, self.reduce(features, (0, 2, 3))))


@pytest.mark.parametrize("disk", [0, 10**9])
@pytest.mark.parametrize("reduce", [torch.mean, torch.amax])
def test_weights_of_norms_that_are_computed_from_all_positions(reduce: Callable[..., Tensor], disk: int) -> None:
    net, grid = Weighted(reduce).eval(), torch.randn(1, 1, 40, 50)
    with torch.no_grad():
        assert relative(predict_whole(net, grid, tile=Tiles(16, disk=disk), quiet=True), net(grid)) < 1e-5


@pytest.mark.parametrize("row", ["softmax", "softmax_pooled", "siamese"])
def test_summaries_that_are_the_grid_must_fit(row: str, monkeypatch: pytest.MonkeyPatch) -> None:
    net, grid = settled(Hourglass(row, 2)), torch.randn(1, 1, 40, 40)
    monkeypatch.setattr("farfield.streaming.choosing.free_bytes", lambda device: 5000)
    if row == "siamese":
        predict_whole(net, grid, tile=20, quiet=True)
        return
    with pytest.raises(ValueError, match=f"summary of {row} at .* .*5,000 bytes .*; fix: an"):
        predict_whole(net, grid, tile=20, quiet=True)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite(bad: float) -> None:
    net, grid = settled(Hourglass("siamese", 2)), np.zeros((40, 40), "float32")
    grid[30, 33] = bad
    with pytest.raises(ValueError, match=r"bottom: .*not finite .*\(20, 20\) .*nan_to_num"):
        predict_whole(net, grid, tile=20, quiet=True)


def test_saturated_and_constant_volumes() -> None:
    net = settled(Hourglass("factorized_gaussian", 2))
    for value in (0, 65535):
        grid = np.full((40, 40), value, "uint16")
        got = predict_whole(net, grid, tile=20, quiet=True)
        with torch.no_grad():
            want = net(torch.full((1, 1, 40, 40), float(value)))[0, 0]
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5 * float(want.abs().max()))


@pytest.mark.parametrize(
    ("volume", "options", "error", "text"),
    [
        ((8,), {}, ShapeError, r"a volume with 2 spatial dims is \(\*size\), .* got shape \(8,\)"),
        ((1, 1, 1, 8, 8), {}, ShapeError, r"a volume with 2 spatial dims is .* got shape \(1, 1, 1, 8, 8\)"),
        ((0, 8), {}, ShapeError, "the volume has an empty axis"),
        ((8, 8), {"tile": 0}, ShapeError, "tile must be at least 1, got 0; fix"),
        (
            (8, 8),
            {"tile": Tiles(4, halo=(1, 2, 3))},
            ShapeError,
            r"halo must be one number, or one for each of 2 spatial dims, got \(1, 2, 3\); fix",
        ),
        ((8, 8), {"tile": Tiles(4, halo=-1)}, ShapeError, "halo must be at least 0, got -1; fix"),
        ((8, 8), {"pad": "mirror"}, LookupError, 'no pad "mirror"'),
        ((3, 8, 8), {}, ValueError, r"Hourglass does not take a grid of size \(8, 8\)"),
        ((8, 8), {"out": np.zeros((8, 9))}, ShapeError, r"out must have shape \(8, 8\), got \(8, 9\)"),
        ((8, 8), {"out": 3}, TypeError, "out must be a path, an array that takes slices, or None, got int"),
    ],
    ids=range(10),
)
def test_bad_input(volume: tuple[int, ...], options: dict, error: type, text: str) -> None:
    net = settled(Hourglass("siamese", 2))
    with pytest.raises(error, match=f"predict_whole: {text}"):
        predict_whole(net, np.zeros(volume, "float32"), quiet=True, **options)


class Turned(nn.Module):
    """A grid whose first spatial axis becomes channels."""

    def forward(self, grid: Tensor) -> Tensor:
        return grid.transpose(1, 2)


@pytest.mark.unchecked("arguments of other types reach the functions")
@pytest.mark.parametrize(
    ("make", "shape", "options", "text"),
    [
        (
            lambda: 3,
            (8, 8),
            {},
            r"model must be a torch.nn.Module, got int; fix: the network comes first, {}\(model, …\)",
        ),
        (lambda: nn.Conv2d(1, 1, 3), (8, 8), {}, "Conv2d is in training"),
        (
            lambda: net_with(nn.MultiheadAttention(4, 1)),
            (8, 8),
            {},
            r"Sequential does not take a grid of size \(8, 8\): MultiheadAttention.forward\(\) missing",
        ),
        (lambda: nn.Conv2d(1, 1, 3).eval(), (8, 8), {"tile": "8"}, "tile must be an integer"),
        (lambda: nn.Conv2d(1, 1, 3).eval(), (8, 8), {"tile": Tiles(halo=1.5)}, "halo must be an integer"),
        (lambda: nn.Conv2d(1, 1, 3).eval(), (8, 8), {"pad": "mirror"}, 'no pad "mirror"'),
        (lambda: nn.Conv2d(1, 1, 3).eval(), (8,), {}, "a volume with 2 spatial dims is"),
        (
            lambda: nn.ReLU().eval(),
            (8, 8),
            {},
            "the number of spatial dims is unknown, because ReLU has no convolution",
        ),
        (
            lambda: nn.Conv2d(1, 1, 3).eval(),
            (8, 8, 8),
            {"tile": (4, 4, 4)},
            r"tile has 3 numbers, and the first convolution of Conv2d takes 2 spatial dims\.\n  fix: tile with 2",
        ),
        (lambda: nn.Conv2d(3, 1, 3).eval(), (2, 8, 8), {}, "Conv2d does not take a grid of size"),
        (lambda: Worded(1, 4, 1).eval(), (8, 8), {}, "Worded returns str, not one grid"),
        (lambda: net_with(Sorted()), (32, 32), {"tile": 8}, r"Sequential does not run in tiles: aten\.sort"),
        (
            lambda: net_with(nn.ReLU()),
            (32, 32),
            {"tile": Tiles(8, halo=(1, 2, 3))},
            "halo must be one number, or one for each",
        ),
        (
            lambda: nn.Sequential(nn.Conv2d(1, 1, 1), Turned()).eval(),
            (32, 32),
            {"tile": (8, 32)},
            r"Sequential does not run in tiles: its output \(1, 32, 1, 32\) is no grid .*",
        ),
        (lambda: settled(Hourglass("softmax", 2)), (40, 40), {"tile": 20}, "the summary of softmax at .* is its grid"),
        (
            lambda: nn.Sequential(nn.MaxPool2d(4), nn.Upsample(scale_factor=4), nn.Conv2d(1, 1, 6)).eval(),
            (5, 5),
            {"pad": "constant"},
            "the network returns",
        ),
    ],
    ids=range(16),
)
def test_checks_shared_with_the_plan_name_the_function_that_was_called(
    make: Any, shape: tuple[int, ...], options: dict[str, Any], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "summary" in text:
        monkeypatch.setattr("farfield.streaming.choosing.free_bytes", lambda device: 5000)
    texts = []
    for function, volume in ((predict_whole, np.zeros(shape, "float32")), (plan_whole, shape)):
        with pytest.raises((ValueError, TypeError, LookupError), match=f"^{function.__name__}: ") as raised:
            function(make(), volume, **options, **({"quiet": True} if function is predict_whole else {}))
        texts.append(raised.value.args)
        assert re.match(f"{function.__name__}: {text.replace('{}', function.__name__)}", str(raised.value))
        assert ("predict_whole" in str(raised.value)) == (function is predict_whole)
    first, second = texts
    assert [part.replace("predict_whole", "plan_whole") for part in first] == list(second)


def test_a_volume_of_no_numbers() -> None:
    with pytest.raises(TypeError, match=r"volume .*got complex64; fix: .*abs\(volume\)"):
        predict_whole(settled(Hourglass("siamese", 2)), np.zeros((8, 8), "complex64"), quiet=True)
