"""TIFF images of several files, with planes that are not there, or with several images: nothing is read as zeros."""

from __future__ import annotations

import os
import re
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tifffile
import zarr
from PIL import Image
from torch import nn

from farfield.streaming import predict_whole
from farfield.volumes import open_volume
from helpers.ome_parts import (
    AWAY,
    ELSEWHERE,
    PLANES,
    assert_reads_below_its_folder_alone,
    write_few_planes,
    write_first_part,
    write_parts,
)
from helpers.streamed_nets import settled


# ---- planes that are not there ---------------------------------------------------------------------------------------
def test_an_image_of_several_files_is_read(tmp_path: Path) -> None:
    write_parts(tmp_path, ("m0.ome.tif", "below/m1.ome.tif"))
    np.testing.assert_array_equal(open_volume(write_parts(tmp_path / "flat"))[:], PLANES)
    np.testing.assert_array_equal(open_volume(tmp_path / "m0.ome.tif")[:], PLANES)


@AWAY
def test_a_missing_file_of_several_is_named(what: str, tmp_path: Path) -> None:
    path = write_first_part(tmp_path, what)
    with pytest.raises(ValueError, match=r'2 of its 4 planes .*"m1\.ome\.tif"; fix: put'):
        open_volume(path)
    (tmp_path / "elsewhere").mkdir()
    write_parts(tmp_path / "elsewhere")
    shutil.copy(tmp_path / "elsewhere" / "m1.ome.tif", tmp_path)  # the fix
    np.testing.assert_array_equal(open_volume(path)[:], PLANES)


def test_a_description_of_more_planes_than_there_are(tmp_path: Path) -> None:
    path = write_few_planes(tmp_path)
    with pytest.raises(ValueError, match=r"2 of its 6 planes .*; fix: "):
        open_volume(path)


def write_pages(path: Path) -> None:
    with tifffile.TiffWriter(path) as file:
        for plane in PLANES:
            file.write(plane, compression="zlib", metadata=None, contiguous=False)


def write_with_pillow(path: Path) -> None:
    first, *others = [Image.fromarray(plane) for plane in PLANES]
    first.save(path, save_all=True, append_images=others)


def writer(**options: object) -> Callable[[Path], None]:
    return lambda path: tifffile.imwrite(path, PLANES, **options)


GREY = {"photometric": "minisblack"}
WRITERS: dict[str, Callable[[Path], None]] = {
    "plain.tif": writer(**GREY),
    "compressed.tif": writer(**GREY, compression="zlib"),
    "tiles.tif": writer(**GREY, compression="zlib", tile=(16, 16)),
    "strips.tif": writer(**GREY, compression="zlib", rowsperstrip=2),
    "big.tif": writer(**GREY, compression="zlib", bigtiff=True),
    "imagej.tif": writer(imagej=True, metadata={"axes": "ZYX"}),
    "compressed imagej.tif": writer(imagej=True, metadata={"axes": "ZYX"}, compression="zlib"),
    "ome.ome.tif": writer(**GREY, metadata={"axes": "ZYX"}),
    "compressed.ome.tif": writer(**GREY, metadata={"axes": "ZYX"}, compression="zlib"),
    "pages.tif": write_pages,
    "pillow.tif": write_with_pillow,
}


@pytest.mark.parametrize("name", WRITERS)
def test_a_file_that_was_cut_anywhere_is_no_smaller_stack(name: str, tmp_path: Path) -> None:
    WRITERS[name](tmp_path / name)
    content = (tmp_path / name).read_bytes()
    np.testing.assert_array_equal(np.asarray(open_volume(tmp_path / name)[:]), PLANES)
    cut, refused = tmp_path / f"cut-{name}", 0
    # Around 16 every byte of a directory's entries and offsets is last once; a prime step meets the rest.
    for length in range(9, len(content), 7):
        cut.write_bytes(content[:length])
        try:
            found = np.asarray(open_volume(cut)[:])
        except (ValueError, KeyError):
            refused += 1
            continue
        # What describes the file, at its end, may be gone; its numbers may not.
        np.testing.assert_array_equal(found, PLANES)
    assert refused > len(content) // 7 * PLANES.size // len(content) * 3 // 4


@pytest.mark.parametrize("name", ["compressed.tif", "imagej.tif", "compressed imagej.tif", "ome.ome.tif"])
def test_a_cut_file_is_named_by_all(name: str, tmp_path: Path) -> None:
    WRITERS[name](tmp_path / name)
    os.truncate(tmp_path / name, (tmp_path / name).stat().st_size // 2)
    with pytest.raises(ValueError, match=rf"{re.escape(name)}.*(ends after|are missing).*fix: write, copy or down"):
        open_volume(tmp_path / name)


# ---- names that lead elsewhere ---------------------------------------------------------------------------------------
@ELSEWHERE
def test_only_files_below_the_folder_are_read(told: str, tmp_path: Path) -> None:
    assert_reads_below_its_folder_alone(open_volume, told, tmp_path)


# ---- outputs ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["m0.ome.tif", "m1.ome.tif"])
@pytest.mark.parametrize("linked", [False, True], ids=["itself", "a hard link"])
def test_no_file_of_several_is_replaced(name: str, linked: bool, tmp_path: Path) -> None:
    volume = open_volume(write_parts(tmp_path))
    net, out = settled(nn.Sequential(nn.Conv3d(1, 1, 3, padding=1))), tmp_path / name
    if linked:
        out = tmp_path / "link.ome.tif"
        os.link(tmp_path / name, out)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(ValueError, match=rf'predict_whole: out and the volume are both in ".*{name}"'):
        predict_whole(net, volume, tile=4, out=out, overwrite=True, quiet=True)
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


# ---- several images --------------------------------------------------------------------------------------------------
def test_the_image_that_is_read_of_several_is_told(tmp_path: Path) -> None:
    path, thumbnail = tmp_path / "scan.ome.tif", PLANES[0, :4, :5]
    with tifffile.TiffWriter(path, ome=True) as file:
        file.write(thumbnail, metadata={"axes": "YX", "Name": "thumbnail", "PhysicalSizeX": 8.0})
        file.write(PLANES, metadata={"axes": "ZYX", "Name": "scan", "PhysicalSizeX": 0.5}, photometric="minisblack")
    with pytest.warns(
        UserWarning, match=r'has 2 images, of which series 0 is read\.\n.*"thumbnail" YX \(4, 5\)'
    ) as told:
        np.testing.assert_array_equal(open_volume(path)[:], thumbnail)
    assert 'series 1  "scan" ZYX (4, 9, 11)' in str(told[0].message)
    assert told[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        np.testing.assert_array_equal(open_volume(path, series=0)[:], thumbnail)
        scan = open_volume(path, series=1)
    np.testing.assert_array_equal(scan[:], PLANES)
    assert scan.metadata.spacing == {"X": 0.5}
    with pytest.raises(ValueError, match=r"has 2 series, got series=2; fix: 0 to 1\."):
        open_volume(path, series=2)


def test_plain_pages_of_two_sizes_are_two_images(tmp_path: Path) -> None:
    with tifffile.TiffWriter(tmp_path / "a.tif") as file:
        for plane in (PLANES[0, :4, :5], *PLANES):
            file.write(plane, compression="zlib", metadata=None)
    with pytest.warns(UserWarning, match="has 2 images"):
        assert open_volume(tmp_path / "a.tif").shape == (4, 5)
    np.testing.assert_array_equal(open_volume(tmp_path / "a.tif", series=1)[:], PLANES)


def test_images_of_one_zarr_group(tmp_path: Path) -> None:
    axes = [{"name": name, "type": "space"} for name in "zyx"]
    step = [{"type": "scale", "scale": [1.0, 1.0, 1.0]}]
    entries = [
        {"name": name, "axes": axes, "datasets": [{"path": name, "coordinateTransformations": step}]} for name in "ab"
    ]
    group = zarr.create_group(str(tmp_path / "a.zarr"), attributes={"ome": {"version": "0.5", "multiscales": entries}})
    group.create_array("a", data=PLANES[:2])
    group.create_array("b", data=PLANES)
    with pytest.warns(UserWarning, match="has 2 images, of which series 0 is read"):
        assert open_volume(tmp_path / "a.zarr").shape == (2, 9, 11)
    np.testing.assert_array_equal(open_volume(tmp_path / "a.zarr", series=1)[:], PLANES)
    np.save(tmp_path / "a.npy", PLANES)
    with pytest.raises(ValueError, match=r"has 1 series, got series=1; fix: series=0\."):
        open_volume(tmp_path / "a.npy", series=1)
