"""Fixes that refusals of folders and files of data name are followed."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from farfield_papers.data.augment import build_training_transform
from farfield_papers.data.classify import ImageFolders
from farfield_papers.data.detect import CocoFolders
from farfield_papers.data.masked_lm import TextFolder
from farfield_papers.data.restore import StackPairs
from farfield_papers.data.segment import VOCFolders
from farfield_papers.data.stereo import StereoFrames
from helpers.followed import Row, each, follow, written
from papers_helpers import made_frames, made_images, made_masks, made_objects, made_stacks, made_texts
from papers_helpers.quiet import TASK_MARKS

pytestmark = [pytest.mark.unchecked("arguments of other types reach the functions"), *TASK_MARKS]

ROOT = Path("data")


def set_up(kind: Any, root: Path | None = ROOT, stage: str = "fit", **options: Any) -> object:
    """Read the folder of a data module, as the first epoch does."""
    module = kind(None if root is None else str(root), **options)
    module.prepare_data()
    module.setup(stage)
    return module


def made(make: Any, *args: Any, **options: Any) -> Path:
    """The folder of data that is made anew."""
    shutil.rmtree(ROOT, ignore_errors=True)
    return make(ROOT, *args, **options)


def images() -> Path:
    return made(made_images.make_root, 6, 2)


def without(path: str, folder: Path) -> Path:
    """A folder from which something is removed."""
    shutil.rmtree(folder / path) if (folder / path).is_dir() else (folder / path).unlink()
    return folder


def stacks(side: int = 8) -> Any:
    return set_up(StackPairs, made(made_stacks.make_root), patch=(4, side, side), patches_per_stack=4)


def voc(**options: Any) -> Path:
    return made(made_masks.make_voc, {"train": 2, "val": 1}, **options)


def coloured() -> Path:
    """A folder of which a mask has colours."""
    Image.fromarray(np.zeros((48, 64, 3), "uint8")).save(voc() / "SegmentationClass" / "train_0.png")
    return ROOT


def categories(changed: bool) -> Path:
    root = made(made_objects.make_coco, {"train": 1, "val": 1})
    if changed:
        content = made_objects.read_annotations(root, "val")
        made_objects.write_annotations(
            root, "val", content | {"categories": [{"id": 7, "name": "ball"}, *content["categories"][1:]]}
        )
    return root


def frames() -> Path:
    return made(made_frames.make_sceneflow, ["TRAIN/A/0000", "TRAIN/A/0001", "TEST/A/0000"])


def pairs() -> Path:
    """Pairs in folders left, right and disparity."""
    shutil.rmtree(ROOT, ignore_errors=True)
    for name in ("1", "2"):
        left, right, disparity = made_frames.made_pair(0)
        made_frames.write_image(ROOT / "left" / f"{name}.png", left)
        made_frames.write_image(ROOT / "right" / f"{name}.png", right)
        made_frames.write_pfm(ROOT / "disparity" / f"{name}.pfm", disparity)
    return ROOT


def array(path: str, size: tuple[int, ...]) -> Path:
    np.save(path, np.ones(size, "uint8"))
    return Path(path)


def texts(parts: dict[str, int] | None) -> Path:
    return made(made_texts.make_texts, parts)


def tokenizer(folder: str) -> str:
    """A folder that a tokenizer's save_pretrained wrote."""
    module: Any = TextFolder(str(texts(None)), vocabulary=60)
    module.setup("fit")
    module.tokenizer.save_pretrained(folder)
    return folder


def restored(path: Path, **options: Any) -> object:
    """The first stack that is restored."""
    module: Any = set_up(StackPairs, None, "predict", predict=str(path), **options)
    return next(iter(module.predict_dataloader()))


ROWS = [
    Row(
        "data/augment.py",
        lambda: build_training_transform("papr", 32),
        "paper",
        lambda: build_training_transform("paper", 32),
    ),
    Row(
        "data/base.py",
        lambda: set_up(ImageFolders, images().parent / "dataa"),
        "--data.root",
        lambda: set_up(ImageFolders, ROOT),
    ),
    Row(
        "data/classify.py",
        lambda: set_up(ImageFolders, images(), subset=900),
        "a subset of 18 at most",
        lambda: set_up(ImageFolders, images(), subset=18),
    ),
    Row(
        "data/readers/images.py",
        lambda: set_up(ImageFolders, without("train/red", without("train/blue", images()))),
        "classifying needs two",
        lambda: set_up(ImageFolders, without("train/red", without("val/red", images()))),
    ),
    Row(
        "data/readers/images.py",
        lambda: set_up(ImageFolders, without("val/red", images())),
        "use the same classes in both",
        lambda: set_up(ImageFolders, without("train/red", without("val/red", images()))),
    ),
    Row(
        "data/detect.py",
        lambda: set_up(CocoFolders, categories(changed=True)),
        "list the same ids and names in all splits",
        lambda: set_up(CocoFolders, categories(changed=False)),
    ),
    Row(
        "data/readers/coco.py",
        lambda: set_up(CocoFolders, categories(changed=False), splits=("train", "valid", "test")),
        "name the splits that exist, --data.splits",
        lambda: set_up(CocoFolders, categories(changed=False), splits=("train", "val", "test")),
    ),
    Row(
        "data/segment.py",
        lambda: VOCFolders(str(ROOT), scales=(2, 1)),
        "the smaller first",
        lambda: VOCFolders(str(ROOT), scales=(1, 2)),
    ),
    Row(
        "data/readers/images.py",
        lambda: set_up(VOCFolders, coloured()),
        "palette or grey PNG files",
        lambda: set_up(VOCFolders, voc()),
    ),
    Row(
        "data/readers/masks.py",
        lambda: set_up(VOCFolders, voc(), train="trainval"),
        "write that list",
        lambda: [voc(), written("data/ImageSets/Segmentation/trainval.txt", "train_0"), set_up(VOCFolders, ROOT)],
    ),
    Row(
        "data/stereo.py",
        lambda: set_up(StereoFrames, frames(), held_out=["Piano"]),
        "names of folders in the paths of left images",
        lambda: set_up(StereoFrames, frames(), held_out=["0001"]),
    ),
    Row(
        "data/readers/stereo.py",
        lambda: set_up(StereoFrames, images()),
        "left/1.png, right/1.png and disparity/1.pfm for each pair",
        lambda: set_up(StereoFrames, pairs(), held_out=["1"]),
    ),
    Row(
        "data/stereo.py",
        lambda: set_up(StereoFrames, pairs()),
        """--data.held_out '["1"]'""",
        lambda: set_up(StereoFrames, pairs(), held_out=["1"]),
    ),
    Row(
        "data/patches.py",
        lambda: stacks(64),
        "--data.patch",
        lambda: stacks(8),
    ),
    Row(
        "data/restore.py",
        lambda: set_up(StackPairs, without("train", made(made_stacks.make_root)), patch=(4, 8, 8)),
        "data/train/low/a.tif and data/train/GT/a.tif",
        lambda: stacks(8),
    ),
    Row(
        "data/readers/tiff.py",
        lambda: restored(made_stacks.write(Path("flat.tif"), np.ones((20, 20), "uint8"))),
        '--data.patch "[64,64]"',
        lambda: restored(made_stacks.write(Path("flat.tif"), np.ones((20, 20), "uint8")), patch=[64, 64]),
    ),
    Row(
        "data/readers/volumes.py",
        lambda: restored(array("several.npy", (2, 3, 20, 20))),
        "--data.axes CZYX and --data.channel 0",
        lambda: restored(array("several.npy", (2, 3, 20, 20)), axes="CZYX", channel=0),
    ),
    Row(
        "data/masked_lm.py",
        lambda: set_up(TextFolder, None, "predict", predict=str(written("blanks.txt", ""))),
        "lines of text with [MASK]",
        lambda: set_up(TextFolder, None, "predict", predict=str(written("blanks.txt", "the [MASK] ."))),
        needs="transformers",
    ),
    Row(
        "data/readers/text.py",
        lambda: set_up(TextFolder, texts({"train": 40, "val": 0})),
        "fix: ",
        lambda: set_up(TextFolder, texts({"train": 40, "val": 20})),
        needs="transformers",
    ),
    Row(
        "data/tokenizer.py",
        lambda: TextFolder(str(texts(None)), tokenizer="words").tokenizer,
        "a folder that save_pretrained wrote",
        lambda: TextFolder(str(texts(None)), tokenizer=tokenizer("words")).tokenizer,
        needs="transformers",
    ),
]


@each(ROWS)
def test_a_fix_can_be_followed(row: Row) -> None:
    follow(row)
