"""Stacks of TIFF files with parts that are missing, cut or elsewhere, as training and prediction open them."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import tifffile

from farfield_papers.data.readers.tiff import open_stack
from farfield_papers.data.readers.volumes import list_stack_files, open_stack_volume
from helpers.ome_parts import (
    AWAY,
    ELSEWHERE,
    PLANES,
    assert_reads_below_its_folder_alone,
    write_few_planes,
    write_first_part,
    write_parts,
)

WAYS: dict[str, Callable[[Path], object]] = {
    "fit": lambda path: open_stack(path, 3),
    "predict": lambda path: open_stack_volume(path, 3, None, None),
}
each_way = pytest.mark.parametrize("way", WAYS)
WRITERS = {
    "compressed.tif": {"photometric": "minisblack", "compression": "zlib"},
    "imagej.tif": {"imagej": True, "metadata": {"axes": "ZYX"}},
    "compressed imagej.tif": {"imagej": True, "metadata": {"axes": "ZYX"}, "compression": "zlib"},
    "ome.ome.tif": {"photometric": "minisblack", "metadata": {"axes": "ZYX"}},
}


@each_way
@AWAY
def test_a_missing_file_of_several_is_named(what: str, way: str, tmp_path: Path) -> None:
    path = write_first_part(tmp_path, what)
    with pytest.raises(ValueError, match=r'2 of its 4 planes .*"m1\.ome\.tif"; fix: put'):
        WAYS[way](path)


@each_way
def test_a_description_of_more_planes_than_there_are(way: str, tmp_path: Path) -> None:
    path = write_few_planes(tmp_path)
    with pytest.raises(ValueError, match=r"2 of its 6 planes .*; fix: "):
        WAYS[way](path)


@each_way
@pytest.mark.parametrize("name", WRITERS)
def test_a_cut_file_is_named(name: str, way: str, tmp_path: Path) -> None:
    tifffile.imwrite(tmp_path / name, PLANES, **WRITERS[name])
    os.truncate(tmp_path / name, (tmp_path / name).stat().st_size // 2)
    with pytest.raises(ValueError, match=rf"{re.escape(name)}.*(ends after|are missing).*fix: write, copy or down"):
        WAYS[way](tmp_path / name)


@each_way
@ELSEWHERE
def test_only_files_below_the_folder_are_read(told: str, way: str, tmp_path: Path) -> None:
    assert_reads_below_its_folder_alone(WAYS[way], told, tmp_path)


def test_the_files_of_a_stack_are_all_its_parts(tmp_path: Path) -> None:
    write_parts(tmp_path)
    assert set(list_stack_files(tmp_path / "m1.ome.tif")) == {tmp_path / "m0.ome.tif", tmp_path / "m1.ome.tif"}


def test_the_image_that_is_read_of_several_is_told(tmp_path: Path) -> None:
    path = tmp_path / "scan.ome.tif"
    with tifffile.TiffWriter(path, ome=True) as file:
        file.write(PLANES[0, :4, :5], metadata={"axes": "YX", "Name": "thumbnail"})
        file.write(PLANES, metadata={"axes": "ZYX", "Name": "scan"}, photometric="minisblack")
    with pytest.warns(UserWarning, match=r"StackPairs: .* has 2 images, of which series 0 is read"):
        open_stack(path, 2)
