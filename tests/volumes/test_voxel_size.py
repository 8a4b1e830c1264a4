"""Voxel size, units and channels of microscopes: read as others write them, and written as others read them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
import torch
import zarr
from hypothesis import given
from hypothesis import strategies as some
from torch import nn

from farfield._checks import ShapeError
from farfield.streaming import predict_whole, respond_whole
from farfield.volumes import ImageMetadata, Volume, open_volume
from farfield.volumes.image_metadata import UNITS, parse_unit
from helpers.streamed_nets import attention, settled

SIZE = (5, 20, 18)
SPACING = {"Z": 0.3, "Y": 0.1083, "X": 0.1}
MICROMETERS = dict.fromkeys("ZYX", "micrometer")
SUFFIXES = (".tif", ".ome.tif", ".zarr", ".ome.zarr")


def stack_of(*shape: int, dtype: str = "uint8") -> np.ndarray:
    return np.random.default_rng(0).integers(0, 200, shape).astype(dtype)


def convolution(channels: int, out: int | None = None, dims: int = 3, **options: Any) -> nn.Module:
    kind = (nn.Conv2d, nn.Conv3d)[dims - 2]
    return settled(nn.Sequential(kind(channels, out or channels, 3, **{"padding": 1, **options})))


def write_imagej(path: Path, stack: np.ndarray, axes: str = "ZYX", **described: Any) -> None:
    resolution = (1 / SPACING["X"], 1 / SPACING["Y"])
    described = {"axes": axes, "spacing": SPACING["Z"], "unit": "um", **described}
    tifffile.imwrite(path, stack, imagej=True, resolution=resolution, metadata=described)


def write_ome(path: Path, stack: np.ndarray, axes: str = "ZYX", **options: Any) -> None:
    described = {f"PhysicalSize{letter}": SPACING[letter] for letter in "ZYX"}
    units = {f"PhysicalSize{letter}Unit": "µm" for letter in "ZYX"}
    tifffile.imwrite(path, stack, ome=True, metadata={"axes": axes, **described, **units}, **options)


def assert_spacing(metadata: ImageMetadata, expected: dict[str, float] = SPACING) -> None:
    # A TIFF file of ImageJ has a fraction of two 32-bit numbers.
    assert dict(metadata.spacing) == pytest.approx(expected, rel=1e-8)


# ---- reading ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("compression", [None, "zlib"])
@pytest.mark.parametrize("write", [write_imagej, write_ome])
def test_voxel_size_of_tiff_is_read(write: Any, compression: str | None, tmp_path: Path) -> None:
    stack = stack_of(*SIZE)
    if write is write_ome:
        write(tmp_path / "a.tif", stack, compression=compression)
    else:
        write(tmp_path / "a.tif", stack)
    volume = open_volume(tmp_path / "a.tif")
    np.testing.assert_array_equal(volume[:], stack)
    assert volume.metadata.axes == "ZYX"
    assert volume.metadata.units == MICROMETERS
    assert_spacing(volume.metadata)


def test_channels_come_first_and_keep_their_names(tmp_path: Path) -> None:
    stack = stack_of(5, 3, 20, 18)
    write_imagej(tmp_path / "a.tif", stack, "ZCYX", Labels=["DAPI", "GFP", "RFP"] * 5)
    every = open_volume(tmp_path / "a.tif")
    assert (every.metadata.axes, every.metadata.channels) == ("CZYX", ("DAPI", "GFP", "RFP"))
    np.testing.assert_array_equal(every[:], stack.transpose(1, 0, 2, 3))
    one = open_volume(tmp_path / "a.tif", channel=1)
    assert np.array_equal(open_volume(tmp_path / "a.tif", channel=np.int64(1)), one)
    assert np.array_equal(open_volume(tmp_path / "a.tif", channel=np.array([1])), one)
    assert (one.metadata.axes, one.metadata.channels, one.shape) == ("ZYX", ("GFP",), SIZE)
    np.testing.assert_array_equal(one[1:4, 3], stack[1:4, 1, 3])
    two = open_volume(tmp_path / "a.tif", channel=[2, 0])
    assert (two.metadata.axes, two.metadata.channels, two.shape) == ("CZYX", ("RFP", "DAPI"), (2, *SIZE))
    np.testing.assert_array_equal(two[:, 2, ..., 4:9], stack[2, [2, 0], :, 4:9])
    assert_spacing(two.metadata)


def test_units_of_ome_are_converted_to_names(tmp_path: Path) -> None:
    described = {"PhysicalSizeZ": 300.0, "PhysicalSizeZUnit": "nm", "PhysicalSizeX": 0.1, "TimeIncrement": 2.5}
    tifffile.imwrite(tmp_path / "a.ome.tif", stack_of(2, 5, 8, 9), metadata={"axes": "TZYX", **described})
    volume = open_volume(tmp_path / "a.ome.tif")
    assert volume.shape == (2, 1, 5, 8, 9)
    assert volume.metadata.axes == "TCZYX"
    assert volume.metadata.spacing == {"T": 2.5, "Z": 300.0, "X": 0.1}
    assert volume.metadata.units == {"T": "second", "Z": "nanometer", "X": "micrometer"}


@pytest.mark.parametrize(
    "described",
    [{"unit": "pixel"}, {"unit": ""}, {"unit": "um", "spacing": 0.0}],
)
def test_what_is_no_voxel_size_is_none(described: dict[str, Any], tmp_path: Path) -> None:
    write_imagej(tmp_path / "a.tif", stack_of(*SIZE), **described)
    assert "Z" not in open_volume(tmp_path / "a.tif").metadata.spacing


def test_resolution_of_a_printed_page_is_no_voxel_size(tmp_path: Path) -> None:
    tifffile.imwrite(tmp_path / "a.tif", stack_of(20, 18), resolution=(72, 72), resolutionunit="INCH")
    assert not open_volume(tmp_path / "a.tif").metadata.spacing


def test_damaged_ome_is_an_image_without_voxel_size(tmp_path: Path) -> None:
    write_ome(tmp_path / "a.ome.tif", stack_of(*SIZE))
    damaged = (tmp_path / "a.ome.tif").read_bytes().replace(b'PhysicalSizeX="0.1"', b'PhysicalSizeX="-11"')
    (tmp_path / "a.ome.tif").write_bytes(damaged)
    assert set(open_volume(tmp_path / "a.ome.tif").metadata.spacing) == {"Z", "Y"}


@pytest.mark.parametrize("unit", UNITS)
def test_units_have_one_name_for_each_spelling(unit: str) -> None:
    spellings = (unit, f"{unit}s", UNITS[unit].symbol, *UNITS[unit].others)
    assert {parse_unit(spelling) for spelling in spellings} == {unit}
    assert parse_unit("pixel") is None


@pytest.mark.parametrize(
    ("name", "options", "text"),
    [
        ("none.tif", {}, r'open_volume: there is no ".*none.tif"; fix: the path of a file'),
        ("a.png", {}, r"is of no format that is read, such as .tif, .zarr or .npy; fix: open it by its own library"),
        ("a.tif", {"channel": 3}, r'".*a.tif" has 2 channels, got channel=3; fix: a number from 0 to 1'),
        ("a.tif", {"channel": []}, r"has 2 channels, got channel=\[\]; fix: a number from 0 to 1"),
        ("a.npy", {"channel": 1}, r"has 1 channels, got channel=1"),
        ("a.tif", {"level": 1}, r'".*a.tif" has no levels, got level=1; fix: level=0'),
        ("damaged.tif", {}, r'cannot read ".*damaged.tif": '),
        (
            "group.zarr",
            {},
            r'is a group of zarr that is no image; fix: one of its parts, ".*group.zarr/inner" for example',
        ),
        ("group.zarr/inner", {"level": 1}, r"has no levels, got level=1; fix: level=0"),
        ("empty", {}, r'cannot read ".*empty": it has no zarr array'),
        ("a.tif", {"series": 3}, r'".*a.tif" has 1 series, got series=3; fix: series=0'),
        ("planes", {}, r'cannot read ".*planes": "1.tif": '),
    ],
)
def test_files_that_cannot_be_opened(name: str, options: dict[str, Any], text: str, tmp_path: Path) -> None:
    write_imagej(tmp_path / "a.tif", stack_of(5, 2, 8, 9), "ZCYX")
    (tmp_path / "a.png").touch()
    np.save(tmp_path / "a.npy", stack_of(2, 8, 9))
    (tmp_path / "damaged.tif").write_bytes(b"II*\0 and no more")
    zarr.create_group(str(tmp_path / "group.zarr")).create_array("inner", shape=(4, 4), dtype="uint8")
    (tmp_path / "empty").mkdir()
    (tmp_path / "planes").mkdir()
    (tmp_path / "planes" / "1.tif").touch()
    with pytest.raises((ValueError, FileNotFoundError), match=text):
        open_volume(tmp_path / name, **options)


@pytest.mark.parametrize(("given", "fix"), [(np.zeros((4, 4, 4)), "predict_whole takes it as it is"), (3, "a string")])
def test_what_is_no_path_cannot_be_opened(given: Any, fix: str) -> None:
    with pytest.raises(TypeError, match=rf"^open_volume: path .*, got \w+; fix: {fix}"):
        open_volume(given)


# ---- from input to output --------------------------------------------------------------------------------------------
@pytest.mark.parametrize("source", [".tif", ".ome.tif", ".ome.zarr"])
@pytest.mark.parametrize("suffix", SUFFIXES)
def test_voxel_size_survives(source: str, suffix: str, tmp_path: Path) -> None:
    stack, path = stack_of(2, *SIZE), tmp_path / f"in{source}"
    volume = Volume(stack, ImageMetadata("CZYX", SPACING, MICROMETERS, {}, ("DAPI", "GFP")))
    net = convolution(2)
    identity = settled(nn.Sequential(nn.Conv3d(2, 2, 1)))
    with torch.no_grad():
        identity[0].weight.copy_(torch.eye(2)[..., None, None, None])
        identity[0].bias.zero_()
    predict_whole(identity, volume, tile=(4, 9, 8), out=path, quiet=True)
    opened = open_volume(path)
    np.testing.assert_array_equal(np.asarray(opened[:]), stack)
    written = predict_whole(net, opened, tile=(4, 9, 8), out=tmp_path / f"out{suffix}", quiet=True)
    np.testing.assert_array_equal(written[:], predict_whole(net, stack, tile=(4, 9, 8), quiet=True))
    again = open_volume(tmp_path / f"out{suffix}").metadata
    assert (again.axes, again.channels, again.units) == ("CZYX", ("DAPI", "GFP"), MICROMETERS)
    assert_spacing(again)


def test_imagej_reads_what_is_written(tmp_path: Path) -> None:
    volume = Volume(stack_of(2, *SIZE), ImageMetadata("CZYX", SPACING, MICROMETERS, {}, ("DAPI", "GFP")))
    got = predict_whole(convolution(2), volume, tile=8, out=tmp_path / "out.tif", quiet=True)
    with tifffile.TiffFile(tmp_path / "out.tif") as file:
        described, page = file.imagej_metadata, file.pages[0]
        assert (file.series[0].axes, file.series[0].shape) == ("ZCYX", (5, 2, 20, 18))
        assert (described["unit"], described["spacing"]) == ("micron", SPACING["Z"])
        assert (described["channels"], described["slices"], described["Labels"]) == (2, 5, ["DAPI", "GFP"] * 5)
        across, down = page.tags.valueof("XResolution"), page.tags.valueof("YResolution")
        assert (across[1] / across[0], down[1] / down[0]) == pytest.approx((0.1, 0.1083), rel=1e-8)
        np.testing.assert_array_equal(file.asarray(), got[:].transpose(1, 0, 2, 3))


def test_ome_has_what_imagej_cannot_hold(tmp_path: Path) -> None:
    units = {"Z": "nanometer", "Y": "micrometer", "X": "micrometer"}
    volume = Volume(stack_of(*SIZE, dtype="float64"), ImageMetadata("ZYX", {**SPACING, "Z": 300.0}, units))
    predict_whole(convolution(1).double(), volume, tile=8, out=tmp_path / "out.tif", quiet=True)
    with tifffile.TiffFile(tmp_path / "out.tif") as file:
        assert (file.is_ome, file.series[0].dtype) == (True, "float64")
        pixels = tifffile.xml2dict(file.ome_metadata)["OME"]["Image"]["Pixels"]
    assert (pixels["PhysicalSizeZ"], pixels["PhysicalSizeZUnit"], pixels["PhysicalSizeXUnit"]) == (300, "nm", "µm")


def test_units_that_differ_are_one_in_imagej(tmp_path: Path) -> None:
    units = {"Z": "nanometer", "Y": "micrometer", "X": "micrometer"}
    volume = Volume(stack_of(*SIZE), ImageMetadata("ZYX", {**SPACING, "Z": 300.0}, units))
    predict_whole(convolution(1), volume, tile=8, out=tmp_path / "out.tif", quiet=True)
    with tifffile.TiffFile(tmp_path / "out.tif") as file:
        assert file.imagej_metadata["spacing"] == pytest.approx(0.3)
    assert_spacing(open_volume(tmp_path / "out.tif").metadata)


def test_a_stack_without_voxel_size_is_written_as_before(tmp_path: Path) -> None:
    predict_whole(convolution(1), stack_of(*SIZE), tile=8, out=tmp_path / "out.tif", quiet=True)
    with tifffile.TiffFile(tmp_path / "out.tif") as file:
        assert (file.is_imagej, file.is_ome, file.series[0].axes) == (False, False, "ZYX")
    predict_whole(convolution(1), stack_of(*SIZE), tile=8, out=tmp_path / "out.zarr", quiet=True)
    assert not zarr.open_array(str(tmp_path / "out.zarr"), mode="r").attrs


@pytest.mark.parametrize(("stride", "factor"), [(2, 2.0), (None, 0.5)])
def test_voxel_size_follows_the_size_of_the_output(stride: int | None, factor: float, tmp_path: Path) -> None:
    layer: nn.Module = nn.Conv2d(1, 1, 2, stride=2) if stride else nn.ConvTranspose2d(1, 1, 2, stride=2)
    spacing = {"Y": 0.2, "X": 0.1}
    image = Volume(stack_of(20, 18), ImageMetadata("YX", spacing, {"Y": "micrometer", "X": "micrometer"}))
    predict_whole(settled(nn.Sequential(layer)), image, tile=8, out=tmp_path / "out.tif", quiet=True)
    expected = {letter: length * factor for letter, length in spacing.items()}
    assert_spacing(open_volume(tmp_path / "out.tif").metadata, expected)


def test_names_of_channels_are_left_out_where_channels_are_others(tmp_path: Path) -> None:
    volume = Volume(stack_of(2, *SIZE), ImageMetadata("CZYX", SPACING, MICROMETERS, {}, ("DAPI", "GFP")))
    predict_whole(convolution(2, 3), volume, tile=8, out=tmp_path / "out.ome.tif", quiet=True)
    assert open_volume(tmp_path / "out.ome.tif").metadata.channels == ()
    predict_whole(convolution(2), volume, tile=8, reduce="argmax", out=tmp_path / "labels.tif", quiet=True)
    labels = open_volume(tmp_path / "labels.tif")
    assert (labels.metadata.axes, labels.metadata.channels, labels.dtype) == ("ZYX", (), np.uint8)
    assert_spacing(labels.metadata)


def test_times_are_samples(tmp_path: Path) -> None:
    write_imagej(tmp_path / "in.tif", stack_of(3, *SIZE), "TZYX", finterval=1.5)
    volume = open_volume(tmp_path / "in.tif")
    assert (volume.shape, volume.metadata.axes) == ((3, 1, *SIZE), "TCZYX")
    predict_whole(convolution(1), volume, tile=8, out=tmp_path / "out.tif", quiet=True)
    again = open_volume(tmp_path / "out.tif")
    assert (again.shape, again.metadata.axes, again.metadata.units["T"]) == ((3, 1, *SIZE), "TCZYX", "second")
    assert_spacing(again.metadata, {**SPACING, "T": 1.5})


def test_a_layer_carries_it_too(tmp_path: Path) -> None:
    grid = np.random.default_rng(0).random((6, 12, 14), "float32")
    volume = Volume(grid, ImageMetadata("CYX", {"Y": 0.2, "X": 0.1}, {"Y": "micrometer", "X": "micrometer"}))
    respond_whole(settled(attention("siamese")), volume, tile=(6, 7), out=tmp_path / "out.ome.tif", quiet=True)
    assert_spacing(open_volume(tmp_path / "out.ome.tif").metadata, {"Y": 0.2, "X": 0.1})


@pytest.mark.parametrize("tile", [None, 4, (3, 5)])
@pytest.mark.parametrize("axes", ["YXC", "YCX", "ZYXC", "ZCYX"])
def test_a_layer_finds_channels_by_their_letter(axes: str, tile: Any) -> None:
    # As many rows as channels, so that their number does not tell them.
    lengths, layer = {"Z": 3, "C": 6, "Y": 6, "X": 8}, settled(attention("siamese"))
    # A plane before channels is a sample, and so is what a tile leaves.
    samples = "Z" if axes == "ZCYX" or ("Z" in axes and isinstance(tile, tuple)) else ""
    space = [letter for letter in "ZYX" if letter in axes and letter not in samples]
    order = [axes.index(letter) for letter in (*samples, "C", *space)]
    generator = np.random.default_rng(0)
    grid, context = (generator.random([lengths[each] for each in axes], "float32") for _ in range(2))
    valid = generator.random([lengths[letter] for letter in reversed((*samples, *space))]) > 0.3
    call = {"tile": tile or tuple(lengths[letter] for letter in space), "quiet": True}
    mask = Volume(valid, ImageMetadata("".join(reversed((*samples, *space)))))
    given = {"grid": Volume(grid, ImageMetadata(axes)), "context": Volume(context, ImageMetadata(axes)), "mask": mask}
    found = respond_whole(layer, **given, context_mask=mask, tile=tile, quiet=True)
    same = {"grid": grid.transpose(order), "context": context.transpose(order), "mask": valid.T}
    if isinstance(tile, int):
        call["tile"] = (tile,) * len(space)
    np.testing.assert_allclose(found, respond_whole(layer, **same, context_mask=valid.T, **call), atol=1e-5)


@pytest.mark.parametrize("axes", ["CYX", "YXC"])
def test_letters_of_channels_of_another_number_are_refused(axes: str) -> None:
    shape = [{"C": 4, "Y": 6, "X": 6}[letter] for letter in axes]
    with pytest.raises(ShapeError, match=r"respond_whole: grid .* 6 channels, got 4"):
        respond_whole(settled(attention("siamese")), Volume(np.ones(shape), ImageMetadata(axes)), quiet=True)


@pytest.mark.parametrize(
    ("name", "dtype", "text"),
    [
        (
            "out.ome.tif",
            torch.int64,
            r"predict_whole: .* cannot be written: OME-TIFF has no int64; fix: \"out.zarr\"",
        ),
    ],
)
def test_what_a_format_cannot_hold_is_refused_before_anything_runs(
    name: str, dtype: torch.dtype, text: str, tmp_path: Path
) -> None:
    with pytest.raises(TypeError, match=text):
        predict_whole(convolution(1), stack_of(*SIZE), tile=8, reduce=lambda grid: grid.to(dtype), out=tmp_path / name)
    assert list(tmp_path.iterdir()) == []


def test_an_output_does_not_replace_the_file_of_its_volume(tmp_path: Path) -> None:
    write_imagej(tmp_path / "a.tif", stack_of(5, 2, 8, 9), "ZCYX")
    volume = open_volume(tmp_path / "a.tif", channel=1)
    with pytest.raises(ValueError, match=r'out and the volume are both in ".*a.tif"'):
        predict_whole(convolution(1), volume, tile=4, out=tmp_path / "a.tif", overwrite=True, quiet=True)


lengths = some.floats(1e-4, 1e4)


@given(lengths, lengths, lengths, some.sampled_from(["micrometer", "nanometer", "millimeter"]))
def test_any_voxel_size_survives_ome(z: float, y: float, x: float, unit: str) -> None:
    from farfield.volumes.tiff_metadata import describe_ome, read_ome

    metadata = ImageMetadata("ZYX", {"Z": z, "Y": y, "X": x}, dict.fromkeys("ZYX", unit))
    options = describe_ome(metadata, SIZE, "uint8")
    xml = tifffile.OmeXml(UUID=options["UUID"])
    xml.addimage("uint8", SIZE, (*SIZE[:1], 1, 1, *SIZE[1:], 1), **options)
    assert read_ome(tifffile.xml2dict(xml.tostring())["OME"]["Image"], "ZYX") == metadata
