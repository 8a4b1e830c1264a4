"""Folders of planes: one stack without gaps, by the numbers in their names, or refused with what is there."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import tifffile

from farfield.volumes import open_volume


def make(folder: Path, names: Sequence[str]) -> Path:
    """A folder of planes, of which each has the number that its name has last, modulo 256."""
    folder.mkdir(exist_ok=True)
    for name in names:
        tifffile.imwrite(folder / name, np.full((4, 5), int((re.findall(r"\d+", name) or [0])[-1]) % 256, "uint8"))
    return folder


def planes_of(path: Path | str) -> list[int]:
    return [int(each) for each in open_volume(path)[:, 0, 0]]


STACKS = {
    "alone": ["plane.tif"],
    "with zeros": ["p_007.tif", "p_008.tif", "p_009.tif", "p_010.tif"],
    "without zeros": ["p9.tif", "p10.tif", "p11.tif"],
    "of a series": ["2024-06-01_t03_z1.tif", "2024-06-01_t03_z2.tif"],
    "across a hundred": [f"p{index:02d}.tif" for index in range(98, 102)],
}


@pytest.mark.parametrize("kind", STACKS)
def test_names_that_differ_in_one_number_are_a_stack(kind: str, tmp_path: Path) -> None:
    names = STACKS[kind]
    assert planes_of(make(tmp_path / "planes", names[::-1])) == [
        int((re.findall(r"\d+", name) or [0])[-1]) for name in names
    ]


GAPS = {
    "one missing": ([f"slice_{index:04d}.tif" for index in range(10) if index != 6], "slice_0006.tif"),
    "two missing": (["a1.tif", "a4.tif"], "a2.tif"),
    "every second": (["a2.tif", "a4.tif", "a6.tif"], "a3.tif"),
    "far away": (["a1.tif", "a999999999999.tif"], "a2.tif"),
    "twice": (["a1.tif", "a01.tif", "a2.tif"], "two names have one number"),
}


@pytest.mark.parametrize("kind", GAPS)
def test_a_stack_with_a_gap_is_refused(kind: str, tmp_path: Path) -> None:
    names, told = GAPS[kind]
    with pytest.raises(ValueError, match=re.escape(told)) as caught:
        open_volume(make(tmp_path / "planes", names))
    assert "; fix: " in str(caught.value)


def test_the_plane_that_is_named_closes_the_gap(tmp_path: Path) -> None:
    folder = make(tmp_path / "planes", [f"slice_{index:02d}.tif" for index in range(12) if index != 9])
    with pytest.raises(ValueError, match="missing") as caught:
        open_volume(folder)
    missing = re.findall(r'"(slice_\d+\.tif)" is missing', str(caught.value))
    assert planes_of(make(folder, missing)) == list(range(12))


# Names, and those of the stacks among them.
MIXED = {
    "two channels": [["mask_1.tif", "mask_2.tif"], ["raw_1.tif", "raw_2.tif", "raw_3.tif"]],
    "times of planes": [[f"t{time}_z{plane}.tif" for plane in range(3)] for time in range(2)],
    "one name within another": [["img_01.tif", "img_02.tif"], ["img_01_mask.tif", "img_02_mask.tif"]],
    "two formats": [["a1.tif", "a2.tif"], ["a1.tiff", "a2.tiff"]],
}


@pytest.mark.parametrize("kind", MIXED)
def test_several_stacks_are_listed_and_a_pattern_opens_one(kind: str, tmp_path: Path) -> None:
    stacks = MIXED[kind]
    folder = make(tmp_path / "planes", [name for names in stacks for name in names])
    with pytest.raises(ValueError, match="its planes are those of 2 stacks") as caught:
        open_volume(folder)
    fix = re.findall(r'; fix: open_volume\("(.*)"\)', str(caught.value))[0]
    own = [name for name in stacks if sorted(each.name for each in folder.glob(Path(fix).name)) == sorted(name)]
    assert len(own) == 1
    assert len(open_volume(fix)) == len(own[0])
    assert len(re.findall(r'"[^"/]*\*[^"/]*"', str(caught.value))) == 2


def test_patterns(tmp_path: Path) -> None:
    folder = make(tmp_path / "planes", [f"{name}_{index}.tif" for name in ("raw", "mask") for index in range(3)])
    assert planes_of(f"{folder}/raw_*.tif") == [0, 1, 2]
    assert planes_of(folder / "raw_[12].tif") == [1, 2]
    with pytest.raises(FileNotFoundError, match="there is no"):
        open_volume(folder / "row_*.tif")
    with pytest.raises(ValueError, match="2 stacks"):
        open_volume(folder / "*_1*.tif")
    # A file whose name is no pattern, though it looks like one.
    tifffile.imwrite(tmp_path / "a[1].tif", np.zeros((4, 5), "uint8"))
    assert open_volume(tmp_path / "a[1].tif").shape == (4, 5)


def test_names_without_a_stack_are_listed(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r'"left\.tif", "right\.tif"; fix: '):
        open_volume(make(tmp_path / "planes", ["left.tif", "right.tif"]))
