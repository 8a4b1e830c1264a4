"""Axes of volumes: letters tell them, the first convolution, or what the network takes; exported programs."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from farfield.streaming import plan_whole, predict_whole
from farfield.volumes import ImageMetadata, Volume
from helpers.streamed_nets import relative, settled

ROUNDING = 1e-5


class Unfolded(nn.Module):
    """Six bands at three times, as 18 channels: times are an axis of the first convolution alone."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.back = nn.Conv3d(6, 8, (1, 4, 4), (1, 4, 4)), nn.ConvTranspose2d(24, 2, 4, 4)

    def forward(self, grid: Tensor) -> Tensor:
        batch, _, height, width = grid.shape
        inner = self.embed(grid.view(batch, 3, 6, height, width).transpose(1, 2)).transpose(1, 2)
        return self.back(inner.reshape(batch, 24, height // 4, width // 4))


class Spectra(nn.Module):
    """Bands that a convolution along them reads first, and then one over the plane."""

    def __init__(self) -> None:
        super().__init__()
        self.bands, self.plane = nn.Conv3d(1, 2, (3, 3, 3), padding=(0, 1, 1)), nn.Conv2d(2 * 5, 2, 3, padding=1)

    def forward(self, grid: Tensor) -> Tensor:
        assert grid.dim() == 4
        return self.plane(self.bands(grid[:, None]).flatten(1, 2))


class Folded(nn.Module):
    """Times that are samples of the first convolution, and then one axis of three."""

    def __init__(self) -> None:
        super().__init__()
        self.plane, self.space = nn.Conv2d(3, 4, 3, padding=1), nn.Conv3d(4, 2, 3, padding=1)

    def forward(self, grid: Tensor) -> Tensor:
        batch, channels, times, height, width = grid.shape
        planes = self.plane(grid.transpose(1, 2).reshape(batch * times, channels, height, width))
        return self.space(planes.view(batch, times, 4, height, width).transpose(1, 2))


class Centred(nn.Module):
    """Planes without the mean of their video, by the same convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.plane = nn.Conv2d(3, 4, 3, padding=1)

    def forward(self, grid: Tensor) -> Tensor:
        planes = (grid - grid.mean((2, 3, 4), keepdim=True)).transpose(1, 2)
        return self.plane(planes.flatten(0, 1)).unflatten(0, planes.shape[:2]).transpose(1, 2)


def volume(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).random(shape, "float32")


def whole(net: nn.Module, grid: np.ndarray) -> Tensor:
    with torch.no_grad():
        return net(torch.from_numpy(grid)[None])[0]


LETTERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], str]] = {
    "channels of a 3-D convolution": (Unfolded, (18, 32, 40), "CYX"),
    "channels that a convolution runs along": (Spectra, (7, 24, 28), "CYX"),
    "times that are folded": (Folded, (3, 5, 24, 28), "CTYX"),
    "times in front": (Folded, (5, 3, 24, 28), "TCYX"),
    "planes of a 2-D network": (lambda: nn.Conv2d(3, 2, 3, padding=1), (4, 3, 24, 28), "ZCYX"),
    "planes of ImageJ": (lambda: nn.Conv3d(1, 2, 3, padding=1), (6, 24, 28), "CYX"),
}


@pytest.mark.parametrize("name", LETTERS)
def test_letters_tell_the_axes(name: str) -> None:
    make, shape, letters = LETTERS[name]
    net, given = settled(make()), volume(*shape)
    got = predict_whole(net, Volume(given, ImageMetadata(letters)), tile=12, quiet=True)
    if name == "planes of a 2-D network":
        want = torch.stack([whole(net, plane) for plane in given])
    elif name == "planes of ImageJ":
        want = whole(net, given[None])
    else:
        want = whole(net, given if letters[0] == "C" else given.swapaxes(0, 1))
    assert relative(torch.as_tensor(got), want) < ROUNDING


# Network, shape of an array, tile, what of it is given if the fix is followed, and how that is.
READ: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], Any, Callable[[np.ndarray], np.ndarray]]] = {
    "channels of a 3-D convolution": (Unfolded, (18, 32, 40), 16, lambda given: given),
    "the same, without a tile": (Unfolded, (18, 32, 40), None, lambda given: given),
    "times that are folded": (Folded, (3, 5, 24, 28), 12, lambda given: given),
    "sums over an axis that is not there": (Centred, (3, 5, 24, 28), 12, lambda given: given),
    "times in front of channels": (
        lambda: nn.Conv3d(3, 2, 3, padding=1),
        (5, 3, 24, 28),
        12,
        lambda given: given.swapaxes(0, 1),
    ),
    "channels last": (
        lambda: nn.Conv2d(3, 2, 3, padding=1),
        (24, 28, 3),
        (12, 12),
        lambda given: np.moveaxis(given, -1, 0),
    ),
    "channels last of a stack": (
        lambda: nn.Conv3d(3, 2, 3, padding=1),
        (8, 24, 28, 3),
        12,
        lambda given: np.moveaxis(given, -1, 0),
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("name", READ)
def test_the_reading_that_runs_is_named_and_can_be_followed(name: str) -> None:
    make, shape, tile, want = READ[name]
    net, given = settled(make()), volume(*shape)
    with pytest.raises(ValueError, match=r"predict_whole: \w+ .*\n  fix: .*, if these are its axes") as raised:
        predict_whole(net, given, tile=tile, quiet=True)
    with pytest.raises(ValueError, match="plan_whole: ") as planned:
        plan_whole(net, shape, tile=tile)
    assert str(planned.value).partition(": ")[2] == str(raised.value).partition(": ")[2]
    fix = str(raised.value).partition("fix: ")[2].removesuffix(", if these are its axes.")
    followed = re.fullmatch(r"(?P<volume>numpy\..*?\))?(, )?(tile=(?P<tile>\(.*\)))?", fix)
    assert followed is not None, fix
    array = eval(followed["volume"] or "volume", {"numpy": np, "volume": given})
    got = predict_whole(net, array, tile=eval(followed["tile"] or repr(tile)), quiet=True)
    assert relative(torch.as_tensor(got), whole(net, want(given))) < ROUNDING


@pytest.mark.long
def test_where_nothing_runs_the_channels_are_named() -> None:
    net = nn.Conv2d(4, 1, 3).eval()
    with pytest.raises(ValueError, match=r"(?s)Conv2d does not take a grid of size .*fix: a volume of 4 channels"):
        predict_whole(net, volume(2, 24, 28), tile=8, quiet=True)


# ---- exported programs -----------------------------------------------------------------------------------------------
class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.batch = nn.Conv2d(1, 4, 3, padding=1), nn.InstanceNorm2d(4), nn.BatchNorm2d(4)

    def forward(self, grid: Tensor) -> Tensor:
        return self.norm(self.batch(self.first(grid)).relu())


def export(*, any_size: bool = True, training: bool = False) -> tuple[nn.Module, Any]:
    net, sizes = settled(Small()), dict.fromkeys((2, 3), torch.export.Dim.AUTO)
    example = torch.zeros(1, 1, 40, 48)
    return net, torch.export.export(net.train(training), (example,), dynamic_shapes=(sizes,) if any_size else None)


@pytest.mark.parametrize("any_size", [True, False])
def test_an_exported_program_runs(any_size: bool) -> None:
    (net, program), image = export(any_size=any_size), volume(1, 1, 40, 48)
    got = predict_whole(program.module(), image, tile=16, quiet=True)
    assert relative(torch.as_tensor(got)[0], whole(net, image[0])) < ROUNDING
    within = nn.Sequential(nn.Conv2d(1, 1, 1), program.module(), nn.Conv2d(4, 1, 1))
    for layer in (within[0], within[2]):
        layer.eval()
    within.training = False
    got = predict_whole(within, image, tile=16, quiet=True)
    assert relative(torch.as_tensor(got)[0], whole(within, image[0])) < ROUNDING


def test_what_is_no_module_yet_is_refused_and_the_fix_works() -> None:
    _, program = export()
    with pytest.raises(TypeError, match=r"got ExportedProgram; fix: .*model\.module\(\)") as raised:
        predict_whole(program, volume(1, 1, 40, 48), tile=16, quiet=True)
    assert "builder" not in str(raised.value)
    predict_whole(program.module(), volume(1, 1, 30, 52), tile=16, quiet=True)


@pytest.mark.long
def test_programs_of_one_size_and_of_training_are_refused_for_what_they_are() -> None:
    _, program = export(any_size=False)
    with pytest.raises(ValueError, match=r"does not take a grid of size \(30, 52\).*\n  fix: .*torch\.export\.export"):
        predict_whole(program.module(), volume(1, 1, 30, 52), tile=16, quiet=True)
    _, program = export(training=True)
    with pytest.raises(ValueError, match=r"in training mode|writes to") as raised:
        predict_whole(program.module(), volume(1, 1, 40, 48), tile=16, quiet=True)
    assert "model.eval()" not in str(raised.value)
