"""An error names what was called: a data module, or a reader that was called by itself."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from farfield_papers.data.base import Loading
from farfield_papers.data.classify import ImageFolders, list_labelled_images, split_by_class
from farfield_papers.data.detect import CocoFolders
from farfield_papers.data.generate import RealImages
from farfield_papers.data.patches import Patches
from farfield_papers.data.readers import coco, masks, stereo
from farfield_papers.data.readers.images import FolderError
from farfield_papers.data.restore import StackPairs
from farfield_papers.data.segment import VOCFolders
from farfield_papers.data.stereo import StereoFrames
from papers_helpers import made_frames, made_images, made_masks, made_objects, made_stacks

pytestmark = pytest.mark.usefixtures("cache")

# Data module, its folder, a part, and the samples' files.
MODULES: dict[str, tuple[type[Loading], Callable[[Path], object], str, str]] = {
    "ImageFolders": (ImageFolders, made_images.make_root, "val", "val/*/*.jpg"),
    "RealImages": (RealImages, made_images.make_root, "val", "*/*/*.jpg"),
    "VOCFolders, images": (VOCFolders, made_masks.make_voc, "val", "JPEGImages/*.jpg"),
    "VOCFolders, masks": (VOCFolders, made_masks.make_voc, "train", "SegmentationClass/*.png"),
    "CocoFolders": (CocoFolders, lambda root: made_objects.make_coco(root / "coco"), "val", "coco/val/*.png"),
    "StackPairs": (StackPairs, made_stacks.make_root, "test", "test/*/*.tif"),
    "StereoFrames": (StereoFrames, lambda root: made_frames.make_kitti(root, 2015), "train", "**/*.png"),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "CocoFolders": {"splits": ("train", "val", "val")},
    "StackPairs": {"patch": (4, 8, 8)},
    "StereoFrames": {"held_out": ["000000_10"]},
}


@pytest.mark.parametrize("case", MODULES)
def test_a_sample_that_is_damaged_names_its_data_module(case: str, tmp_path: Path) -> None:
    build, make, part, files = MODULES[case]
    root = make(tmp_path)
    name = case.partition(",")[0]
    data = build(str(root), **OPTIONS.get(name, {}))  # type: ignore[call-arg]
    data.setup("test" if part == "test" else "fit")
    for path in tmp_path.glob(files):
        path.write_bytes(b"damaged")
    with pytest.raises(FolderError) as raised:
        data.parts[part][0]
    assert str(raised.value).startswith(f"{name}: cannot read ")


STACK = np.ones((4, 8, 8))
READERS: dict[str, Callable[[Path], object]] = {
    "Patches": lambda folder: Patches("made", STACK, STACK, (8, 8, 8), 1, seed=0),
    "check_files": lambda folder: coco.check_files(
        coco.Annotated(folder / "a.json", folder, [{"file_name": "a.png"}], {}, {})
    ),
    "check_frames": lambda folder: stereo.check_frames(
        [stereo.Frame(folder / "a.png", folder / "b.png", None, "a")], folder
    ),
    "check_pairs": lambda folder: masks.check_pairs([masks.Pair(folder / "a", folder / "a")], ["one"], folder),
    "list_frames": lambda folder: stereo.list_frames(folder),
    "list_labelled_images": lambda folder: list_labelled_images(folder),
    "read_annotated": lambda folder: coco.read_annotated(folder, "train"),
    "read_disparity": lambda folder: stereo.read_disparity(folder / "none.png"),
    "read_list": lambda folder: masks.read_list(folder / "none.txt"),
    "read_mask": lambda folder: masks.read_mask(folder / "none.png"),
    "read_pfm": lambda folder: stereo.read_pfm(folder / "none.pfm"),
    "split_by_class": lambda folder: split_by_class([0, 1], 0.5, seed=0),
}


@pytest.mark.parametrize("name", READERS)
def test_a_reader_that_is_called_by_itself_names_itself(name: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for each in ("a", "a.png", "b.png"):
        (tmp_path / each).write_bytes(b"damaged")
    with pytest.raises(FolderError) as raised:
        READERS[name](tmp_path / ("" if "check" in name else "empty"))
    assert str(raised.value).startswith(f"{name}: ")


def test_a_list_of_damaged_files_names_what_was_called_once(tmp_path: Path) -> None:
    root = made_masks.make_voc(tmp_path)
    next((root / "SegmentationClass").glob("*.png")).write_bytes(b"damaged")
    with pytest.raises(FolderError) as raised:
        VOCFolders(str(root)).prepare_data()
    assert str(raised.value).startswith("VOCFolders: ")
    assert "read_mask: " not in str(raised.value)


def test_the_folder_of_segmentation_is_known_or_refused(tmp_path: Path) -> None:
    assert VOCFolders(str(made_masks.make_voc(tmp_path))).folder == tmp_path
    with pytest.raises(FolderError, match=r"^VOCFolders: there is no folder .*none"):
        _ = VOCFolders(str(tmp_path / "none")).folder
