"""Numbers that a file states to be none: left out, and never taken for numbers without a word."""

from __future__ import annotations

import dataclasses
import pickle
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
import torch
from torch import Tensor, nn

from farfield.streaming import Tiles, plan_whole, predict_whole
from farfield.volumes import ImageMetadata, Volume, open_volume
from helpers.streamed_nets import settled

WORLD = [
    (33550, "d", 3, (10.0, 10.0, 0.0), True),
    (33922, "d", 6, (0, 0, 0, 5e5, 5e6, 0), True),
    (34735, "H", 8, (1, 1, 0, 1, 3072, 0, 1, 32633), True),
]
SCENE = np.random.default_rng(0).random((3, 40, 48)).astype("float32")
# Positions that hold something.
MEASURED = np.s_[:, :, :28]


def write(path: Path, numbers: np.ndarray, nodata: str, world: bool = True) -> Path:
    options: dict[str, Any] = {"planarconfig": "separate"} if numbers.ndim == 3 else {}
    tags = WORLD * world + [(42113, "s", 0, nodata, True)]
    tifffile.imwrite(path, numbers, photometric="minisblack", extratags=tags, metadata=None, **options)
    return path


def filled(nodata: float, channels: Any = slice(None)) -> np.ndarray:
    """The scene, with a number that is none at the positions that are not measured."""
    numbers = SCENE.copy()
    numbers[channels, :, 28:] = nodata
    return numbers


@pytest.fixture
def net() -> nn.Module:
    """Its norm sees what its last layer does."""
    return settled(nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.InstanceNorm2d(4), nn.Conv2d(4, 2, 1)))


def whole(net: nn.Module, numbers: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        return net(torch.from_numpy(numbers)[None])[0].numpy()


STATED: dict[str, tuple[str, str, float | None]] = {
    "an integer": ("float32", "-9999", -9999.0),
    "with spaces": ("float32", " -9999 ", -9999.0),
    "the lowest of float32": ("float32", "-3.40282346638528859812e+38", float(np.finfo("float32").min)),
    "rounded to float32": ("float32", "-3.4028235e+38", float(np.finfo("float32").min)),
    "infinite": ("float32", "-inf", -np.inf),
    "of bytes": ("uint8", "0", 0.0),
    "of 16 bits": ("int16", "-32768", -32768.0),
    "none that bytes have": ("uint8", "-9999", None),
    "no whole number": ("uint8", "0.5", None),
    "NaN of bytes": ("uint8", "nan", None),
    "no number": ("float32", "none", None),
}


@pytest.mark.parametrize("world", [True, False], ids=["GeoTIFF", "plain TIFF"])
@pytest.mark.parametrize("kind", STATED)
def test_the_number_is_read(kind: str, world: bool, tmp_path: Path) -> None:
    dtype, text, expected = STATED[kind]
    volume = open_volume(write(tmp_path / "a.tif", np.zeros((20, 24), dtype), text, world))
    assert volume.metadata.nodata == expected
    assert bool(volume.metadata.georeference) == world
    assert volume.crop(np.s_[2:9, ::2]).metadata.nodata == expected
    assert pickle.loads(pickle.dumps(volume)).metadata.nodata == expected


def test_a_file_that_states_none_has_none(tmp_path: Path) -> None:
    tifffile.imwrite(tmp_path / "a.tif", SCENE[0], photometric="minisblack")
    assert open_volume(tmp_path / "a.tif").metadata.nodata is None


@pytest.mark.parametrize("channels", [slice(None), slice(1, 2)], ids=["all channels", "one channel"])
@pytest.mark.parametrize("nodata", [-9999.0, np.nan, -np.inf, 0.0])
def test_positions_without_a_number_are_left_out(
    nodata: float, channels: slice, net: nn.Module, tmp_path: Path
) -> None:
    volume = open_volume(write(tmp_path / "a.tif", filled(nodata, channels), str(nodata)))
    with pytest.warns(UserWarning, match="is no number") as told:
        found = predict_whole(net, volume, tile=16, quiet=True)
    assert f"{nodata:g}" in str(told[0].message)
    assert told[0].filename == __file__
    np.testing.assert_allclose(found[MEASURED][..., :27], whole(net, SCENE[MEASURED])[..., :27], atol=1e-5)
    assert not found[:, :, 28:].any()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        np.testing.assert_array_equal(predict_whole(net, volume, mask="nodata", tile=16, quiet=True), found)


@pytest.mark.parametrize("suffix", [".ome.tif", ".zarr", ".ome.zarr", ".npy"])
def test_other_outputs_do_not_state_it(suffix: str, net: nn.Module, tmp_path: Path) -> None:
    volume, out = open_volume(write(tmp_path / "a.tif", filled(-9999), "-9999")), tmp_path / f"out{suffix}"
    predict_whole(net, volume, tile=16, mask="nodata", out=out, quiet=True)
    assert open_volume(out).metadata.nodata is None


def test_it_is_a_number_where_the_caller_says_so(net: nn.Module, tmp_path: Path) -> None:
    volume = open_volume(write(tmp_path / "a.tif", filled(-1), "-1"))
    volume = Volume(volume.array, dataclasses.replace(volume.metadata, nodata=None))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = predict_whole(net, volume, tile=16, quiet=True)
    np.testing.assert_allclose(found, whole(net, filled(-1)), atol=1e-5)


def test_a_volume_of_which_nothing_is_stated_has_no_such_mask(net: nn.Module) -> None:
    for volume in (SCENE, Volume(SCENE, ImageMetadata("CYX"))):
        with pytest.raises(ValueError, match=r'predict_whole: mask="nodata" needs .*; fix: '):
            predict_whole(net, volume, mask="nodata", tile=16, quiet=True)


class Two(nn.Module):
    """Of two inputs."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, one: Tensor, other: Tensor) -> Tensor:
        return self.net(one + other)


def test_each_of_several_inputs_leaves_out_its_own(net: nn.Module, tmp_path: Path) -> None:
    one = open_volume(write(tmp_path / "a.tif", filled(-9999), "-9999"))
    two = filled(-1)
    two[:, :7] = -1
    other = open_volume(write(tmp_path / "b.tif", two, "-1"))
    found = predict_whole(Two(net).eval(), (one, other), mask="nodata", tile=16, quiet=True)
    expected = whole(net, 2 * SCENE[:, 7:, :28])
    np.testing.assert_allclose(found[:, 8:, :27], expected[:, 1:, :27], atol=1e-5)
    assert not found[:, :7].any()


@pytest.mark.filterwarnings("ignore:.*is no number")
def test_what_cannot_leave_positions_out_is_refused(net: nn.Module, tmp_path: Path) -> None:
    volume = open_volume(write(tmp_path / "a.tif", filled(-9999), "-9999"))
    with pytest.raises(ValueError, match="mask"):
        predict_whole(net, volume, tile=Tiles(16, statistics="tile"), quiet=True)


def test_a_plan_takes_it_too(net: nn.Module, tmp_path: Path) -> None:
    volume = open_volume(write(tmp_path / "a.tif", filled(-9999), "-9999"))
    found = predict_whole(net, volume, tile=16, mask="nodata", quiet=True)
    plan = plan_whole(net, volume.shape, tile=16)
    np.testing.assert_array_equal(predict_whole(net, volume, plan=plan, mask="nodata", quiet=True), found)


@pytest.mark.parametrize("classes", [3, 255, 256, 300])
def test_labels_state_a_number_that_is_no_class(classes: int, tmp_path: Path) -> None:
    net = settled(nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.InstanceNorm2d(4), nn.Conv2d(4, classes, 1)))
    volume = open_volume(write(tmp_path / "a.tif", filled(-9999), "-9999"))
    options: dict[str, Any] = {"tile": 16, "mask": "nodata", "reduce": "argmax", "quiet": True}
    plain = predict_whole(net, volume, **options)
    predict_whole(net, volume, out=tmp_path / "out.tif", **options)
    again, number = open_volume(tmp_path / "out.tif"), {3: 255, 255: 255, 256: None, 300: 32767}[classes]
    assert again.metadata.nodata == number
    np.testing.assert_array_equal(again[:, :28], plain[0, :, :28])
    assert (again[:, 28:] == (number or 0)).all()
    predict_whole(net, volume, out=tmp_path / "out.zarr", **options)
    assert open_volume(tmp_path / "out.zarr").metadata.nodata is None
    np.testing.assert_array_equal(np.asarray(open_volume(tmp_path / "out.zarr")), plain[0])
