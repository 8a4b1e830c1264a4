"""Networks that take several grids of one size: an image and another, a mask, or a guide."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from farfield.streaming import MeanOverFlips, Tiles, plan_whole, predict_whole
from farfield.volumes import ImageMetadata, Volume, open_volume
from helpers.streamed_nets import attention, relative, settled


class Guided(nn.Module):
    """An image and a guide of two channels, which meet in attention and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.guide = nn.Conv2d(1, 6, 3, padding=1), nn.Conv2d(2, 6, 5, padding=2)
        self.attention, self.norm, self.last = attention("siamese"), nn.InstanceNorm2d(6), nn.Conv2d(6, 1, 3, padding=1)

    def forward(self, image: Tensor, guide: Tensor) -> Tensor:
        both = self.attention(self.image(image) * self.guide(guide).sigmoid())
        return self.last(self.norm(both)) + image


class Late(nn.Module):
    """The guide is used only after the norm, so the first pass does not need it."""

    def __init__(self) -> None:
        super().__init__()
        layers = [
            layer
            for inputs in (1, 6, 6, 6)
            for layer in (nn.Conv2d(inputs, 6, 3, padding=1), nn.InstanceNorm2d(6), nn.ReLU())
        ]
        self.image, self.last = nn.Sequential(*layers), nn.Conv2d(8, 1, 3, padding=1)

    def forward(self, image: Tensor, guide: Tensor) -> Tensor:
        return self.last(torch.cat([self.image(image), guide], 1))


GENERATOR = np.random.default_rng(0)
IMAGE = GENERATOR.standard_normal((30, 26)).astype("float32")
GUIDE = GENERATOR.standard_normal((2, 30, 26)).astype("float32")


def whole(net: nn.Module, image: np.ndarray, guide: np.ndarray) -> Tensor:
    with torch.no_grad():
        return net(torch.from_numpy(image)[None, None].float(), torch.from_numpy(guide)[None].float())[0]


@pytest.mark.parametrize("leading", [(), (1,), (1, 1)])
def test_tiles_give_what_the_whole_gives(leading: tuple[int, ...]) -> None:
    net = settled(Guided())
    got = predict_whole(net, (IMAGE.reshape(*leading, 30, 26), GUIDE), tile=8, quiet=True)
    # The result has the axes of the first.
    assert got.shape == (*leading, 30, 26)
    assert relative(got.reshape(1, 30, 26), whole(net, IMAGE, GUIDE)) < 1e-5
    # The order is that of the arguments.
    assert relative(predict_whole(net, (IMAGE, GUIDE[::-1].copy()), tile=8, quiet=True), got.reshape(30, 26)) > 1e-3


def test_other_dtypes_and_tensors() -> None:
    net, mask = settled(Guided()), GUIDE > 0
    got = predict_whole(net, (torch.from_numpy(IMAGE).double(), mask), tile=8, quiet=True)
    assert isinstance(got, Tensor)
    assert relative(got[None], whole(net, IMAGE, mask)) < 1e-5


def test_stored_grids_and_padding(tmp_path: Path) -> None:
    net = settled(Late())
    tiles = Tiles(8, disk=10**8)
    plan = plan_whole(net, (IMAGE.shape, GUIDE.shape), tile=tiles)
    assert plan.on_disk
    assert plan.disk_bytes > 0
    assert plan.channels == (1, 2)
    assert relative(predict_whole(net, (IMAGE, GUIDE), tile=tiles, quiet=True)[None], whole(net, IMAGE, GUIDE)) < 1e-5
    strided = settled(
        nn.Sequential(First(Guided()), nn.Conv2d(1, 4, 2, stride=2), nn.ConvTranspose2d(4, 1, 2, stride=2))
    )
    odd = predict_whole(Both(strided).eval(), (IMAGE[:29], GUIDE[:, :29]), tile=8, pad="replicate", quiet=True)
    padded = [
        np.pad(each, [*[(0, 0)] * (each.ndim - 2), (0, 1), (0, 0)], "edge") for each in (IMAGE[:29], GUIDE[:, :29])
    ]
    assert relative(odd[None], whole(Both(strided), *padded)[:, :29]) < 1e-5


class First(nn.Module):
    """A network of two inputs on one grid that has both as channels."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, grid: Tensor) -> Tensor:
        return self.network(grid[:, :1], grid[:, 1:])


class Both(nn.Module):
    """A network of one input on two grids."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, image: Tensor, guide: Tensor) -> Tensor:
        return self.network(torch.cat([image, guide], 1))


def test_means_over_flips() -> None:
    flipped = MeanOverFlips(settled(Guided()), (0, 1)).eval()
    want = torch.stack(
        [
            whole(flipped.network, *[np.flip(each, axes).copy() for each in (IMAGE, GUIDE)]).flip(
                [axis % 3 for axis in axes]
            )
            for axes in ((), (-1,), (-2,), (-1, -2))
        ]
    ).mean(0)
    assert relative(whole(flipped, IMAGE, GUIDE), want) < 1e-5
    assert relative(predict_whole(flipped, (IMAGE, GUIDE), tile=8, quiet=True)[None], want) < 1e-5


def test_a_file_has_the_voxel_size_of_the_first(tmp_path: Path) -> None:
    first = Volume(IMAGE, ImageMetadata("YX", {"Y": 0.1, "X": 0.2}, {"Y": "micrometer", "X": "micrometer"}))
    predict_whole(settled(Guided()), (first, GUIDE), tile=8, out=tmp_path / "out.ome.zarr", quiet=True)
    assert open_volume(tmp_path / "out.ome.zarr").metadata.spacing == {"Y": 0.1, "X": 0.2}


def test_a_killed_call_resumes_and_other_inputs_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    net, out = settled(Guided()), tmp_path / "out.npy"

    class Broken:
        shape, dtype = GUIDE.shape, GUIDE.dtype

        def __init__(self) -> None:
            self.left = 12

        def __getitem__(self, index: Any) -> np.ndarray:
            self.left -= 1
            if not self.left:
                raise InterruptedError
            return GUIDE[index]

    with pytest.raises(InterruptedError):
        predict_whole(net, (IMAGE, Broken()), tile=8, out=out, quiet=True)
    with pytest.raises(ValueError, match="the input 1 has changed in tile 0"):
        predict_whole(net, (IMAGE, GUIDE + 1), tile=8, out=out, quiet=True)
    written = predict_whole(net, (IMAGE, GUIDE), tile=8, out=out, quiet=True)
    np.testing.assert_array_equal(written, predict_whole(net, (IMAGE, GUIDE), tile=8, quiet=True))


def test_an_output_that_shares_memory_with_any_input_is_refused() -> None:
    with pytest.raises(ValueError, match=r"out .*input 1 .*memory"):
        predict_whole(settled(Guided()), (IMAGE, GUIDE), tile=8, out=GUIDE[0], quiet=True)


class Holding(nn.Module):
    """What the texts of errors advise: a module that has the other input."""

    def __init__(self, network: nn.Module, other: Tensor) -> None:
        super().__init__()
        self.network, self.other = network, other

    def forward(self, grid: Tensor) -> Tensor:
        return self.network(grid, self.other)


class Conditioned(nn.Conv2d):
    def forward(self, grid: Tensor, scale: Tensor) -> Tensor:
        return super().forward(grid) * scale[:, None, None]


REFUSED = [
    (
        TypeError,
        IMAGE,
        r"Guided\.forward\(image.*, guide.*\) .* does not take 1 input: .*; fix: a tuple .* \(image, guide\)",
    ),
    (TypeError, (IMAGE,) * 3, "does not take 3 inputs: too many positional arguments"),
    (
        TypeError,
        [IMAGE, GUIDE],
        r"predict_whole: volume must be an array, or a tuple of arrays .* got list; fix: numpy\.asarray",
    ),
    (TypeError, {"image": IMAGE, "guide": GUIDE}, "got dict; fix"),
    (TypeError, (), "got tuple; fix"),
    (TypeError, (IMAGE, "guide.tif"), "input 1 must be an array, .* got str; fix: open it first"),
    (
        ValueError,
        (IMAGE, GUIDE[:, ::2]),
        r"(?s)one batch and one size\.\n  input 0  \(30, 26\)\n  input 1  \(2, 15, 26\)",
    ),
    (ValueError, (IMAGE, GUIDE[0]), "(?s)does not take a grid .*in the order of its arguments; these have 1, 1"),
    (ValueError, (IMAGE, GUIDE[0, 0]), r"input 1 of shape \(26,\) is no grid of 2 spatial dims; fix: a module around"),
]


@pytest.mark.parametrize(("kind", "volumes", "text"), REFUSED)
def test_other_inputs_are_refused(kind: type[Exception], volumes: Any, text: str) -> None:
    with pytest.raises(kind, match=text):
        predict_whole(settled(Guided()), volumes, tile=8, quiet=True)


def test_what_is_no_grid_stands_in_a_module_around_the_network() -> None:
    net, scale = settled(Conditioned(1, 3, 3, padding=1)), torch.tensor([1.0, 2.0, 3.0])
    with pytest.raises(ValueError, match=re.escape("input 1 of shape (3,) is no grid of 2 spatial dims")):
        predict_whole(net, (IMAGE, scale.numpy()), tile=8, quiet=True)
    got = predict_whole(Holding(net, scale).eval(), IMAGE, tile=8, quiet=True)
    with torch.no_grad():
        assert relative(got, net(torch.from_numpy(IMAGE)[None, None], scale)[0]) < 1e-5


def test_shapes_of_a_plan() -> None:
    with pytest.raises(TypeError, match=r"plan_whole: shape .*got a volume .*\(30, 26\)"):
        plan_whole(settled(Guided()), (IMAGE, GUIDE), tile=8)
    assert plan_whole(settled(Guided()), [IMAGE.shape, GUIDE.shape], tile=8).channels == (1, 2)
