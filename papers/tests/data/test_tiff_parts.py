"""Stacks of TIFF files with parts that are missing, cut or elsewhere, as training and prediction open them."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import tifffile

from farfield_papers.data.readers.tiff import open_stack
from farfield_papers.data.readers.volumes import list_stack_files, open_stack_volume
from helpers.ome_parts import PLANES, write_parts

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
@pytest.mark.parametrize("what", ["missing", "renamed", "moved away"])
def test_a_missing_file_of_several_is_named(what: str, way: str, tmp_path: Path) -> None:
    path, other = write_parts(tmp_path), tmp_path / "m1.ome.tif"
    if what == "missing":
        other.unlink()
    else:
        other.rename(tmp_path / "m2.ome.tif" if what == "renamed" else tmp_path.parent / "m1.ome.tif")
    with pytest.raises(ValueError, match=r'2 of its 4 planes .*"m1\.ome\.tif"; fix: put'):
        WAYS[way](path)


@each_way
def test_a_description_of_more_planes_than_there_are(way: str, tmp_path: Path) -> None:
    xml = tifffile.OmeXml()
    xml.addimage("uint8", (6, 9, 11), (6, 1, 1, 9, 11, 1), axes="ZYX")
    told = xml.tostring()
    tifffile.imwrite(tmp_path / "few.ome.tif", PLANES, photometric="minisblack", description=told, metadata=None)
    with pytest.raises(ValueError, match=r"2 of its 6 planes .*; fix: "):
        WAYS[way](tmp_path / "few.ome.tif")


@each_way
@pytest.mark.parametrize("name", WRITERS)
def test_a_cut_file_is_named(name: str, way: str, tmp_path: Path) -> None:
    tifffile.imwrite(tmp_path / name, PLANES, **WRITERS[name])
    os.truncate(tmp_path / name, (tmp_path / name).stat().st_size // 2)
    with pytest.raises(ValueError, match=rf"{re.escape(name)}.*(ends after|are missing).*fix: write, copy or down"):
        WAYS[way](tmp_path / name)


@each_way
@pytest.mark.parametrize("told", ["../secret.ome.tif", "{folder}/secret.ome.tif", r"..\secret.ome.tif", "C:secret.tif"])
def test_only_files_below_the_folder_are_read(
    told: str, way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "given"
    write_parts(folder)
    told = told.format(folder=tmp_path)
    path = write_parts(folder, told=told)
    shutil.copy(folder / "m1.ome.tif", tmp_path / "secret.ome.tif")
    files: list[str] = []
    start = tifffile.TiffFile.__init__

    def noted(self: tifffile.TiffFile, file: object, *given: object, **options: object) -> None:
        files.append(str(file))
        start(self, file, *given, **options)

    monkeypatch.setattr(tifffile.TiffFile, "__init__", noted)
    with pytest.raises(ValueError, match=rf'it has "{re.escape(told)}" .*parts.*in its folder'):
        WAYS[way](path)
    assert set(files) == {str(path)}


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
