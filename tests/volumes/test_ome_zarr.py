"""OME-Zarr: written for `ome-zarr` to read and its validator to accept, read as `ome-zarr` writes it."""

from __future__ import annotations

import itertools
import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from hypothesis import given
from hypothesis import strategies as some
from torch import nn

from farfield.streaming import predict_whole
from farfield.volumes import ImageMetadata, Volume, ome_zarr, open_volume, sink
from farfield.volumes.ome_zarr import halve, pyramid_factors
from helpers.stopping import StopError
from helpers.streamed_nets import settled

REASON = "ome-zarr is not installed, which the extra dev has"
UNITS = dict.fromkeys("ZYX", "micrometer")
KNOWN = ImageMetadata("CZYX", {"Z": 0.5, "Y": 0.2, "X": 0.1}, UNITS, {}, ("DAPI", "GFP"))


@pytest.fixture(autouse=True)
def small_images_have_levels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ome_zarr, "SMALLEST", 8)


def volume_of(*size: int, metadata: ImageMetadata = KNOWN) -> Volume:
    return Volume(np.random.default_rng(0).random(size, "float32"), metadata)


def convolution(channels: int = 2, dims: int = 3) -> nn.Module:
    kind = (nn.Conv2d, nn.Conv3d)[dims - 2]
    return settled(nn.Sequential(kind(channels, channels, 3, padding=1)))


def expected_levels(finest: np.ndarray, factors: list[tuple[int, ...]], average: bool) -> list[np.ndarray]:
    """Each position of a level from its own neighbours in the level before it, one by one."""
    levels = [np.asarray(finest)]
    for factor in factors:
        before = levels[-1]
        level = np.empty([-(-length // each) for length, each in zip(before.shape, factor, strict=True)], before.dtype)
        for index in np.ndindex(level.shape):
            start = [place * each for place, each in zip(index, factor, strict=True)]
            part = before[tuple(slice(first, first + each) for first, each in zip(start, factor, strict=True))]
            level[index] = part.mean(dtype=np.float64) if average else before[tuple(start)]
        levels.append(level)
    return levels


# ---- by ome-zarr -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("labels", [False, True])
def test_ome_zarr_opens_and_validates_it(labels: bool, tmp_path: Path) -> None:
    io = pytest.importorskip("ome_zarr.io", reason=REASON)
    from ome_zarr.reader import Reader
    from ome_zarr_models import open_ome_zarr
    from ome_zarr_models.v05 import Image

    volume, path = volume_of(2, 9, 37, 41), tmp_path / "out.ome.zarr"
    reduce = "argmax" if labels else None
    written = predict_whole(convolution(), volume, tile=(4, 16, 12), reduce=reduce, out=path, quiet=True)
    [image] = [node for node in Reader(io.parse_url(path))() if "coordinateTransformations" in node.metadata]
    assert [axis["name"] for axis in image.metadata["axes"]] == list("czyx")
    assert {axis.get("unit") for axis in image.metadata["axes"] if axis["type"] == "space"} == {"micrometer"}
    [finest, second, *_] = image.metadata["coordinateTransformations"]
    assert finest[0]["scale"][-3:] == [0.5, 0.2, 0.1]
    # x is the finest, and y less than twice as far apart.
    assert second[0]["scale"][-3:] == [0.5, 0.2, 0.2]
    if not labels:
        assert image.metadata["channel_names"] == ["DAPI", "GFP"]
        assert second[1]["translation"] == [0, 0, 0, 0.05]
    levels = expected_levels(written[:], pyramid_factors(written.shape, KNOWN), not labels)
    assert len(levels) > 2
    for level, expected in zip(image.data, levels, strict=True):
        np.testing.assert_allclose(np.asarray(level), expected, rtol=2e-7)
    # A warning of the validator is an error of the tests.
    assert isinstance(open_ome_zarr(str(path)), Image)


@pytest.mark.parametrize("version", ["0.4", "0.5"])
def test_what_ome_zarr_writes_is_read(version: str, tmp_path: Path) -> None:
    writer = pytest.importorskip("ome_zarr.writer", reason=REASON)
    from ome_zarr.format import format_from_version

    stack = np.random.default_rng(0).integers(0, 99, (1, 2, 6, 20, 30)).astype("uint16")
    kind, scale = {"t": "time", "c": "channel"}, [1.0, 1.0, 0.5, 0.2, 0.1]
    axes = [{"name": name, "type": kind.get(name, "space")} for name in "tczyx"]
    for axis in axes[2:]:
        axis["unit"] = "micrometer"
    steps = [[{"type": "scale", "scale": scale}], [{"type": "scale", "scale": [*scale[:3], 0.4, 0.2]}]]
    options = {"fmt": format_from_version(version), "axes": axes, "coordinate_transformations": steps}
    group = zarr.open_group(str(tmp_path / "in.zarr"), mode="w", zarr_format=2 if version == "0.4" else 3)
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
        writer.write_multiscale([stack, stack[..., ::2, ::2]], group, **options)
    volume = open_volume(tmp_path / "in.zarr", channel=1)
    assert volume.metadata == ImageMetadata("ZYX", {"Z": 0.5, "Y": 0.2, "X": 0.1}, UNITS)
    np.testing.assert_array_equal(volume[2:4, ..., 7], stack[0, 1, 2:4, :, 7])
    coarse = open_volume(tmp_path / "in.zarr", level=1)
    assert (coarse.shape, coarse.metadata.spacing["X"]) == ((2, 6, 10, 15), 0.2)
    np.testing.assert_array_equal(coarse[:], stack[0, ..., ::2, ::2])
    net = convolution(1)
    got = predict_whole(net, volume, tile=8, out=tmp_path / "out.ome.zarr", quiet=True)
    np.testing.assert_array_equal(got[:], predict_whole(net, stack[0, 1], tile=8, quiet=True))
    assert open_volume(tmp_path / "out.ome.zarr").metadata == volume.metadata


# ---- levels ----------------------------------------------------------------------------------------------------------
@given(
    some.tuples(*[some.integers(1, 12)] * 3),
    some.lists(some.tuples(*[some.integers(1, 9)] * 3), min_size=1, max_size=3),
    some.booleans(),
    some.randoms(use_true_random=False),
)
def test_levels_do_not_depend_on_the_boxes(
    size: tuple[int, ...], tiles: list[tuple[int, ...]], average: bool, random: Any
) -> None:
    dtype = "float32" if average else "uint8"
    finest = np.random.default_rng(0).integers(0, 200, size).astype(dtype)
    factors = [(2, 2, 2), (1, 2, 2)]
    expected = expected_levels(finest, factors, average)
    for tile in tiles:
        levels = [np.zeros_like(level) for level in expected]
        levels[0][:] = finest
        for finer, coarser, factor in zip(levels, levels[1:], factors, strict=False):
            ends = zip(coarser.shape, tile, strict=True)
            starts = list(itertools.product(*(range(0, length, step) for length, step in ends)))
            random.shuffle(starts)
            for start in starts:
                index = tuple(slice(first, first + each) for first, each in zip(start, tile, strict=True))
                ome_zarr.fill(finer, coarser, index, factor)
        for level, wanted in zip(levels, expected, strict=True):
            np.testing.assert_array_equal(level, wanted)


def test_axes_are_halved_until_voxels_are_cubes() -> None:
    metadata = ImageMetadata("ZYX", {"Z": 0.9, "Y": 0.3, "X": 0.3})
    assert pyramid_factors((60, 70, 30), metadata) == [(1, 2, 2), (2, 2, 2), (2, 2, 2), (2, 2, 2)]
    assert pyramid_factors((60, 70, 30), ImageMetadata("ZYX")) == [(2, 2, 2)] * 4
    assert pyramid_factors((8, 8, 8), metadata) == []


def test_means_of_large_numbers_do_not_overflow() -> None:
    largest = np.full((2, 2), np.finfo("float32").max, "float32")
    assert halve(largest, (2, 2), average=True) == largest[0, 0]


# ---- files -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("axes", "dims", "text"),
    [("X", 1, "it holds images of two or three axes of space"), (None, 3, 'it has no place for the axes "ITZYX"')],
)
def test_axes_that_it_cannot_hold(axes: str | None, dims: int, text: str, tmp_path: Path) -> None:
    if axes:
        net, volume, tile = settled(nn.Sequential(nn.Conv1d(1, 1, 3, padding=1))), np.ones(9, "float32"), (4,)
        with pytest.raises(TypeError, match=f'predict_whole: ".*" .*OME-Zarr .*: {text}'):
            predict_whole(net, volume, tile=tile, out=tmp_path / "out.ome.zarr", quiet=True)
    else:
        assert ome_zarr.refuse_axes(ImageMetadata("ITZYX")) == text


def test_an_image_is_replaced_only_if_it_is_nothing_else(tmp_path: Path) -> None:
    path, volume = tmp_path / "out.ome.zarr", volume_of(2, 5, 20, 18)
    first = predict_whole(convolution(), volume, tile=8, out=path, quiet=True)[:]
    with pytest.raises(FileExistsError, match=r'".*out.ome.zarr" exists; fix: .*overwrite=True'):
        predict_whole(convolution(), volume, tile=8, out=path, quiet=True)
    predict_whole(convolution(), volume, tile=8, out=path, overwrite=True, quiet=True)
    np.testing.assert_array_equal(open_volume(path)[:], first)
    (path / "labels").mkdir()
    with pytest.raises(FileExistsError, match=r"folder .*zarr"):
        predict_whole(convolution(), volume, tile=8, out=path, overwrite=True, quiet=True)
    assert [each.name for each in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize("chunks", range(1, 5))
def test_levels_of_a_call_that_was_killed_are_made_again(
    chunks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    volume, out = volume_of(6, 20, 18, metadata=ImageMetadata("ZYX")), tmp_path / "a.ome.zarr"
    write, count = sink.write_level, itertools.count()

    def stopped(path: Path, spec: Any, level: int, place: int) -> None:
        if next(count) == chunks:
            raise StopError
        write(path, spec, level, place)

    with monkeypatch.context() as patch:
        patch.setattr(sink, "write_level", stopped)
        with pytest.raises(StopError):
            predict_whole(convolution(1), volume, tile=(4, 8, 8), out=out, quiet=True)
    # A chunk that was written is gone, as after a crash of the machine.
    shutil.rmtree(next((out.with_name("a.ome.zarr.unfinished") / out.name / "1").rglob("c")))
    predict_whole(convolution(1), volume, tile=(4, 8, 8), out=out, quiet=True)
    group = zarr.open_group(str(out), mode="r")
    factors = ome_zarr.pyramid_factors(volume.shape, volume.metadata)
    levels = [np.asarray(group[str(level)][:]) for level in range(len(factors) + 1)]
    for level, expected in zip(levels, expected_levels(levels[0], factors, True), strict=True):
        np.testing.assert_array_equal(level, expected)


def test_names_of_channels_have_the_range_of_their_values(tmp_path: Path) -> None:
    path = tmp_path / "out.ome.zarr"
    predict_whole(convolution(), volume_of(2, 5, 20, 18), tile=8, out=path, quiet=True)
    omero = json.loads((path / "zarr.json").read_text())["attributes"]["ome"]["omero"]
    group = zarr.open_group(str(path), mode="r")
    last = np.asarray(group[max(group.array_keys())][:])
    assert [channel["label"] for channel in omero["channels"]] == ["DAPI", "GFP"]
    for channel, values in zip(omero["channels"], last, strict=True):
        assert (channel["window"]["min"], channel["window"]["max"]) == (float(values.min()), float(values.max()))


@pytest.mark.parametrize("inside", ["nothing", "a group"])
def test_a_level_that_is_no_array_is_refused(inside: str, tmp_path: Path) -> None:
    axes = [{"name": name, "type": "space"} for name in "yx"]
    datasets = [{"path": "0", "coordinateTransformations": [{"type": "scale", "scale": [1.0, 1.0]}]}]
    image = zarr.create_group(tmp_path / "a.ome.zarr")
    image.attrs["ome"] = {"version": "0.5", "multiscales": [{"axes": axes, "datasets": datasets}]}
    if inside == "a group":
        image.create_group("0")
    with pytest.raises(ValueError, match=r'names "0" as its level 0, .*; fix: write or download'):
        open_volume(tmp_path / "a.ome.zarr")


def test_where_a_volume_lies_is_kept(tmp_path: Path) -> None:
    metadata = ImageMetadata("YX", {"Y": 0.2, "X": 0.2}, {"Y": "micrometer", "X": "micrometer"}, {"Y": 7.0, "X": -3.0})
    image = volume_of(20, 18, metadata=metadata)
    predict_whole(convolution(1, 2), image, tile=8, out=tmp_path / "out.ome.zarr", quiet=True)
    assert open_volume(tmp_path / "out.ome.zarr").metadata == metadata
    coarse = open_volume(tmp_path / "out.ome.zarr", level=1).metadata
    assert coarse.origin == pytest.approx({"Y": 7.1, "X": -2.9})
