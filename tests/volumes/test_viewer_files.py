"""Files of outputs as the programs that show them read them, each by the library of its format."""

from __future__ import annotations

import itertools
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
import torch
import zarr
from torch import nn

from farfield.streaming import Part, predict_whole
from farfield.volumes import ImageMetadata, Volume, file_formats, open_volume
from farfield.volumes.ome_zarr import halve, pyramid_factors
from helpers.stopping import StopError
from helpers.streamed_nets import settled

MICROMETERS = dict.fromkeys("ZYX", "micrometer")


class Same(nn.Module):
    """Numbers of a volume as they are, in another dtype."""

    def __init__(self, dtype: torch.dtype, dims: int = 2, channels: int = 1) -> None:
        super().__init__()
        self.layer, self.dtype = (nn.Conv2d, nn.Conv3d)[dims - 2](channels, channels, 1, bias=False), dtype
        with torch.no_grad():
            self.layer.weight.copy_(torch.eye(channels).reshape(self.layer.weight.shape))

    def forward(self, grid: torch.Tensor) -> torch.Tensor:
        grid = self.layer(grid)
        return grid > 0.5 if self.dtype == torch.bool else grid.to(self.dtype)


def slide_of(*shape: int, axes: str = "YX", most: int = 200, channels: tuple[str, ...] = ()) -> Volume:
    numbers = np.random.default_rng(0).integers(0, most, shape).astype("float32")
    spacing = {letter: 0.5 for letter in axes if letter in "ZYX"}
    return Volume(numbers, ImageMetadata(axes, spacing, dict.fromkeys(spacing, "micrometer"), {}, channels))


# ---- TIFF ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.bool], ids=str)
def test_an_ome_tiff_has_tiles_and_levels(dtype: torch.dtype, tmp_path: Path) -> None:
    slide, out = slide_of(3, 1100, 701, axes="CYX", most=3, channels=("A", "B", "C")), tmp_path / "slide.ome.tif"
    written = predict_whole(Same(dtype, channels=3).eval(), slide, tile=(300, 701), out=out, quiet=True)
    numbers = np.asarray(slide)
    expected = (numbers > 0.5).astype("uint8") if dtype == torch.bool else numbers.astype(written.dtype)
    np.testing.assert_array_equal(np.asarray(written), expected)
    with tifffile.TiffFile(out) as file:
        page, [series] = file.pages[0], file.series
        assert (page.is_tiled, page.tile, page.compression.name) == (True, (512, 512), "ADOBE_DEFLATE")
        assert (page.photometric.name, page.dtype, file.is_ome, file.is_bigtiff) == (
            "MINISBLACK",
            expected.dtype,
            True,
            False,
        )
        assert (series.axes, len(page.subifds)) == ("CYX", len(series.levels) - 1)
        assert [level.shape for level in series.levels] == [(3, 1100, 701), (3, 550, 351), (3, 275, 176), (3, 138, 88)]
        for level, finer in zip(series.levels[1:], series.levels, strict=False):
            want = halve(finer.asarray(), (1, 2, 2), average=dtype == torch.float32)
            np.testing.assert_array_equal(level.asarray(), want)
    opened = open_volume(out, level=1).metadata
    assert (opened.channels, opened.spacing) == (("A", "B", "C"), {"Y": 1.0, "X": 1.0})


def test_planes_of_a_stack_have_their_own_levels(tmp_path: Path) -> None:
    stack, out = slide_of(9, 300, 40, axes="ZYX"), tmp_path / "stack.ome.tif"
    predict_whole(Same(torch.uint8, 3).eval(), stack, tile=(4, 64, 40), out=out, quiet=True)
    with tifffile.TiffFile(out) as file:
        assert [level.shape for level in file.series[0].levels] == [(9, 300, 40), (9, 150, 20)]
        np.testing.assert_array_equal(file.series[0].levels[1].asarray(), np.asarray(stack)[:, ::2, ::2])


@pytest.mark.parametrize(("width", "kind"), [(4096, "imagej"), (4097, "ome")])
def test_a_wide_image_is_none_of_imagej(width: int, kind: str, tmp_path: Path) -> None:
    predict_whole(Same(torch.uint8).eval(), slide_of(16, width), tile=(16, 1024), out=tmp_path / "a.tif", quiet=True)
    with tifffile.TiffFile(tmp_path / "a.tif") as file:
        assert (file.is_imagej, file.is_ome, file.pages[0].is_tiled) == (
            kind == "imagej",
            kind == "ome",
            kind == "ome",
        )


def test_a_tiff_file_that_was_killed_while_it_was_written_is_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slide, out, write = slide_of(600, 700), tmp_path / "slide.ome.tif", tifffile.TiffWriter.write

    def stopped(*arguments: Any, **options: Any) -> None:
        write(*arguments, **options)
        raise StopError

    with monkeypatch.context() as patch:
        patch.setattr(tifffile.TiffWriter, "write", stopped)
        with pytest.raises(StopError):
            predict_whole(Same(torch.uint8).eval(), slide, tile=256, out=out, quiet=True)
    assert not out.exists()
    predict_whole(Same(torch.uint8).eval(), slide, tile=256, out=out, quiet=True)
    with tifffile.TiffFile(out) as file:
        assert len(file.series[0].levels) == 1 + len(pyramid_factors((600, 700), slide.metadata))
        np.testing.assert_array_equal(file.asarray(), np.asarray(slide))
    assert list(tmp_path.iterdir()) == [out]


# ---- GeoTIFF ---------------------------------------------------------------------------------------------------------
def scene_of(path: Path, bands: int, names: tuple[str, ...] = ()) -> Volume:
    """A GeoTIFF as GDAL writes it: names of bands are in tag 42112."""
    numbers = np.random.default_rng(0).random((bands, 700, 600)).astype("float32")
    tags: list[Any] = [
        (33550, "d", 3, (10.0, 10.0, 0.0), True),
        (33922, "d", 6, (0, 0, 0, 5e5, 5e6, 0), True),
        (34735, "H", 8, (1, 1, 0, 1, 3072, 0, 1, 32633), True),
    ]
    if names:
        items = [
            f'<Item name="DESCRIPTION" sample="{band}" role="description">{name}</Item>'
            for band, name in enumerate(names)
        ]
        tags.append((42112, "s", 0, f"<GDALMetadata>{''.join(items)}</GDALMetadata>", True))
    options: Any = {"photometric": "minisblack", "extratags": tags, "metadata": None, "planarconfig": "separate"}
    tifffile.imwrite(path, numbers if bands > 1 else numbers[0], **options)
    return open_volume(path)


def valid_left(columns: int) -> np.ndarray:
    return np.broadcast_to(np.arange(600) < columns, (700, 600))


def test_a_geotiff_has_bands_with_names_and_overviews(tmp_path: Path) -> None:
    rasterio = pytest.importorskip("rasterio", reason='needs the extra "geo"')
    names = ("B02", "B03", "B04", "B08", "B11")
    scene, out = scene_of(tmp_path / "in.tif", 5, names), tmp_path / "out.tif"
    assert scene.metadata.channels == names
    net = Same(torch.float32, channels=5).eval()
    written = predict_whole(net, scene, tile=256, mask=valid_left(400), out=out, quiet=True)
    expected = np.where(valid_left(400), np.asarray(scene), np.nan)
    np.testing.assert_array_equal(np.asarray(written), expected)
    with rasterio.open(tmp_path / "in.tif") as before, rasterio.open(out) as after:
        assert (after.count, after.descriptions, after.overviews(5)) == (5, names, [2])
        assert np.isnan(after.nodata)
        assert (after.crs, after.transform) == (before.crs, before.transform)
        assert (after.tags(ns="IMAGE_STRUCTURE")["LAYOUT"], after.block_shapes[0]) == ("COG", (512, 512))
        np.testing.assert_array_equal(after.read(), expected)
        coarse = after.read(1, out_shape=(350, 300))
        np.testing.assert_allclose(coarse[0, 0], expected[0, :2, :2].mean(), rtol=1e-6)
    assert open_volume(out).metadata.channels == names
    assert sorted(tmp_path.iterdir()) == [tmp_path / "in.tif", out]


@pytest.mark.parametrize("columns", [70, 300])
def test_labels_of_a_geotiff_say_where_nothing_is(columns: int, tmp_path: Path) -> None:
    rasterio = pytest.importorskip("rasterio", reason='needs the extra "geo"')
    scene, out, valid = scene_of(tmp_path / "in.tif", 3), tmp_path / "labels.tif", valid_left(columns)
    net = Same(torch.float32, channels=3).eval()
    # Some tiles have no valid position, and are skipped.
    predict_whole(net, scene, tile=128, mask=valid, reduce="argmax", out=out, quiet=True)
    with rasterio.open(out) as file:
        labels = file.read(1)
        assert (file.nodata, file.dtypes) == (255, ("uint8",))
        np.testing.assert_array_equal(file.read_masks(1) > 0, valid)
        np.testing.assert_array_equal(file.read(1, out_shape=(350, 300)), labels[::2, ::2])
    np.testing.assert_array_equal(labels[valid], np.asarray(scene).argmax(0)[valid])
    assert open_volume(out).metadata.nodata == 255


def test_a_geotiff_without_rasterio_is_refused_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scene = scene_of(tmp_path / "in.tif", 1)
    monkeypatch.setitem(sys.modules, "rasterio", None)
    with pytest.raises(TypeError, match=r'out.tif" cannot be written: .*rasterio.*geo.*; fix: "out.zarr"'):
        predict_whole(Same(torch.uint8).eval(), scene, tile=128, out=tmp_path / "out.tif", quiet=True)
    assert list(tmp_path.iterdir()) == [tmp_path / "in.tif"]


# ---- labels in OME-Zarr ----------------------------------------------------------------------------------------------
def image_of(path: Path, version: str) -> Volume:
    """An image that ome-zarr has written, with levels of its own."""
    writer = pytest.importorskip("ome_zarr.writer", reason="ome-zarr is not installed, which the extra dev has")
    from ome_zarr.format import format_from_version

    stack = np.random.default_rng(0).integers(0, 200, (3, 12, 60, 50)).astype("uint16")
    axes: list[dict[str, str]] = [{"name": "c", "type": "channel"}]
    axes += [{"name": name, "type": "space", "unit": "micrometer"} for name in "zyx"]
    steps = [[{"type": "scale", "scale": [1.0, 0.5, 0.1 * factor, 0.1 * factor]}] for factor in (1, 4)]
    group = zarr.open_group(str(path), mode="w", zarr_format=2 if version == "0.4" else 3)
    options = {"fmt": format_from_version(version), "axes": axes, "coordinate_transformations": steps}
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
        writer.write_multiscale([stack, stack[..., ::4, ::4]], group, **options)
    return open_volume(path)


def label(image: Volume, out: Path, **options: Any) -> Any:
    net = Same(torch.float32, 3, channels=3).eval()
    return predict_whole(net, image, tile=(6, 32, 32), reduce="argmax", out=out, quiet=True, **options)


@pytest.mark.parametrize("version", ["0.4", "0.5"])
def test_labels_inside_an_image(version: str, tmp_path: Path) -> None:
    path = tmp_path / "image.ome.zarr"
    image = image_of(path, version)
    labels = np.asarray(image).argmax(0)[None]
    for name in ("nuclei", "cells"):
        np.testing.assert_array_equal(label(image, path / "labels" / name)[:], labels)
    from ome_zarr.io import parse_url
    from ome_zarr.reader import Reader
    from ome_zarr_models import v04, v05

    module: Any = v04 if version == "0.4" else v05
    kind = {"zarr_format": 2 if version == "0.4" else 3}
    described = module.ImageLabel.from_zarr(zarr.open_group(str(path / "labels/nuclei"), mode="r", **kind)).attributes
    described = getattr(described, "ome", described)
    assert (described.image_label.source.image, len(described.multiscales[0].datasets)) == ("../../", 2)
    listed = module.Labels.from_zarr(zarr.open_group(str(path / "labels"), mode="r", **kind)).attributes
    assert sorted(getattr(listed, "ome", listed).labels) == ["cells", "nuclei"]
    nodes = {node.zarr.basename(): node for node in Reader(parse_url(path))()}
    assert nodes["nuclei"].metadata["coordinateTransformations"][1][0]["scale"][1:] == [0.5, 0.4, 0.4]
    for own, factor in zip(nodes["nuclei"].data, (1, 4), strict=True):
        np.testing.assert_array_equal(np.asarray(own), labels[..., ::factor, ::factor])
    opened = open_volume(path / "labels" / "cells").metadata
    assert (opened.axes, opened.spacing) == ("ZYX", {"Z": 0.5, "Y": 0.1, "X": 0.1})
    np.testing.assert_array_equal(np.asarray(open_volume(path)), np.asarray(image))


@pytest.mark.parametrize("version", ["0.4", "0.5"])
def test_labels_are_replaced_and_resumed(version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "image.ome.zarr"
    image, out = image_of(path, version), path / "labels" / "nuclei"
    label(image, out)
    with pytest.raises(FileExistsError, match=r"nuclei\" exists; fix: .*overwrite=True"):
        label(image, out)

    def stopped(*arguments: Any) -> None:
        raise StopError

    # Killed between the move and the entry in the list.
    (path / "labels" / ("zarr.json" if version == "0.5" else ".zattrs")).unlink()
    with monkeypatch.context() as patch:
        patch.setattr(file_formats, "LABELS", file_formats.LABELS._replace(enter=stopped))
        with pytest.raises(StopError):
            label(image, out, overwrite=True)
    label(image, out, overwrite=True)
    assert "nuclei" in str(dict(zarr.open_group(str(path / "labels"), mode="r").attrs))
    assert [each.name for each in (path / "labels").iterdir() if each.is_dir()] == ["nuclei"]


@pytest.mark.parametrize(("name", "passes"), [("image.ome.zarr/labels/nuclei", 2), ("labels.ome.tif", 1)])
def test_parts_write_labels(name: str, passes: int, tmp_path: Path) -> None:
    image = image_of(tmp_path / "image.ome.zarr", "0.5")
    for only, index in itertools.product(range(1, passes + 1), (2, 1)):
        assert label(image, tmp_path / name, part=Part(index, 2, only=only)) is None
    label(image, tmp_path / name, part=Part.parse("reduce"))
    np.testing.assert_array_equal(np.asarray(open_volume(tmp_path / name)), np.asarray(image).argmax(0))


def test_what_are_no_labels_is_refused_first(tmp_path: Path) -> None:
    path = tmp_path / "image.ome.zarr"
    image = image_of(path, "0.5")
    with pytest.raises(TypeError, match=r'nuclei" cannot be written: labels are whole numbers, .* float32; fix: '):
        predict_whole(Same(torch.float32, 3, 3).eval(), image, tile=8, out=path / "labels" / "nuclei", quiet=True)
    assert list((path / "labels").iterdir()) == []


# ---- NIfTI -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("suffix", [".nii", ".nii.gz"])
@pytest.mark.parametrize("labels", [True, False])
def test_a_nifti_has_the_matrix_of_its_input(suffix: str, labels: bool, tmp_path: Path) -> None:
    nibabel = pytest.importorskip("nibabel", reason='needs the extra "nifti"')
    affine = np.array([[0.7, 0.1, 0, -31.3], [-0.2, 0.9, 0.05, 12.7], [0, 0.1, 2.3, 101.1], [0, 0, 0, 1]])
    head = nibabel.Nifti1Image(np.random.default_rng(0).random((20, 20, 20), "float32"), affine)
    head.header.set_xyzt_units("mm")
    nibabel.save(head, tmp_path / f"head{suffix}")
    volume, out = open_volume(tmp_path / f"head{suffix}"), tmp_path / f"out{suffix}"
    net = settled(nn.Sequential(nn.Conv3d(1, 3, 3, padding=1)))
    reduce = "argmax" if labels else None
    written = predict_whole(net, volume, tile=8, reduce=reduce, out=out, quiet=True)
    found, expected = nibabel.load(out), predict_whole(net, volume, tile=8, reduce=reduce, quiet=True)
    np.testing.assert_array_equal(np.asarray(written), expected)
    np.testing.assert_allclose(found.affine, head.affine, rtol=1e-7)
    assert (found.header.get_xyzt_units()[0], found.get_data_dtype()) == ("mm", np.dtype("uint8" if labels else "f4"))
    # Channels are the fifth axis.
    assert found.shape == ((20, 20, 20) if labels else (20, 20, 20, 1, 3))
    np.testing.assert_array_equal(np.squeeze(np.asarray(found.dataobj)).T, np.squeeze(expected))
    again = open_volume(out)
    np.testing.assert_array_equal(np.asarray(again).squeeze(), np.squeeze(expected))
    np.testing.assert_allclose(again.metadata.matrix("XYZ"), volume.metadata.matrix("XYZ"), rtol=1e-7)


def test_a_nifti_of_another_volume_has_its_voxel_size(tmp_path: Path) -> None:
    nibabel = pytest.importorskip("nibabel", reason='needs the extra "nifti"')
    units = dict.fromkeys("ZYX", "nanometer")
    known = ImageMetadata("ZYX", {"Z": 40.0, "Y": 8.0, "X": 4.0}, units, {"Z": 400.0})
    volume = Volume(np.random.default_rng(0).random((6, 12, 14), "float32"), known)
    predict_whole(Same(torch.bool, 3).eval(), volume, tile=6, out=tmp_path / "out.nii.gz", quiet=True)
    found = nibabel.load(tmp_path / "out.nii.gz")
    matrix = np.diag([0.004, 0.008, 0.04, 1])
    matrix[2, 3] = 0.4
    np.testing.assert_allclose(found.affine, matrix, rtol=1e-6)
    assert (found.header.get_xyzt_units()[0], found.get_data_dtype(), found.shape) == ("micron", "uint8", (14, 12, 6))
    np.testing.assert_array_equal(np.asarray(found.dataobj).T, np.asarray(volume) > 0.5)


@pytest.mark.parametrize(
    ("name", "dtype", "text"),
    [
        ("out.nii.gz", torch.float16, r'NIfTI has no float16; fix: "out.zarr"'),
        ("out.mrc", torch.uint8, r"must end in one of \.npy, \.zarr, \.tif, \.tiff, \.nii, \.nii\.gz; fix: .*out.zarr"),
        ("out.h5::labels", torch.uint8, r'must end in one of .*; fix: ".*out\.zarr"'),
    ],
)
def test_what_is_not_written_is_refused_first(name: str, dtype: torch.dtype, text: str, tmp_path: Path) -> None:
    with pytest.raises((TypeError, ValueError), match=text):
        predict_whole(Same(dtype, 3).eval(), slide_of(6, 8, 8, axes="ZYX"), tile=4, out=tmp_path / name, quiet=True)
    assert list(tmp_path.iterdir()) == []


def test_ome_zarr_has_the_place_of_a_nifti(tmp_path: Path) -> None:
    nibabel = pytest.importorskip("nibabel", reason='needs the extra "nifti"')
    for name, affine in (("straight", np.diag([1.0, 1, 2, 1])), ("turned", np.diag([-1.0, 1, 2, 1]))):
        affine[:3, 3] = -10, -20, -30
        head = nibabel.Nifti1Image(np.random.default_rng(0).random((20, 22, 24), "float32"), affine)
        head.header.set_xyzt_units("mm")
        nibabel.save(head, tmp_path / f"{name}.nii")
        volume, out = open_volume(tmp_path / f"{name}.nii"), tmp_path / f"{name}.ome.zarr"
        predict_whole(Same(torch.float32, 3).eval(), volume, tile=12, out=out, quiet=True)
    assert open_volume(tmp_path / "straight.ome.zarr").metadata.origin == {"X": -10.0, "Y": -20.0, "Z": -30.0}
    assert open_volume(tmp_path / "turned.ome.zarr").metadata.origin == {}
