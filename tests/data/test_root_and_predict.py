"""Data modules with root, predict or both: what each checks, and what their errors say."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from farfield.data.classify import ImageFolders
from farfield.data.detect import CocoFolders
from farfield.data.readers.images import FolderError, check_classes
from farfield.data.segment import VOCFolders
from farfield.data.stereo import StereoFrames
from helpers import made_frames, made_images, made_masks, made_objects


def make_stereo(root: Path) -> Path:
    """Scene Flow's folders, with scenes to train on and tests."""
    return made_frames.make_sceneflow(root, ("TRAIN/A/0", "TEST/A/0"))


# Module, the folder it trains on, the pattern of an image in it, and the folder to predict.
KINDS: dict[str, tuple[Any, Callable[[Path], Path], str]] = {
    "classify": (ImageFolders, made_images.make_root, "train/red/0.jpg"),
    "detect": (CocoFolders, made_objects.make_coco, "train/train_0.png"),
    "segment": (VOCFolders, made_masks.make_voc, "JPEGImages/train_0.jpg"),
    "stereo": (StereoFrames, make_stereo, "frames_cleanpass/TRAIN/A/0/right/0000.png"),
}
kinds = pytest.mark.parametrize("kind", KINDS)


def images_to_predict(kind: str, folder: Path) -> Path:
    """A folder with one image, or one pair."""
    for name in ("left/1.png", "right/1.png") if kind == "stereo" else ("1.png",):
        made_frames.write_image(folder / name, made_frames.made_pair(0)[0])
    return folder


@kinds
def test_training_with_predict_alone_asks_for_root(kind: str, tmp_path: Path) -> None:
    module, _, _ = KINDS[kind]
    data = module(predict=str(images_to_predict(kind, tmp_path)), workers=0)
    data.prepare_data()
    with pytest.raises(FolderError, match=rf"^{module.__name__}: .* need root, and only predict is given; fix: .*root"):
        data.setup("fit")


@kinds
def test_both_folders_are_checked_before_a_run(kind: str, tmp_path: Path) -> None:
    module, make, image = KINDS[kind]
    root, images = make(tmp_path / "root"), images_to_predict(kind, tmp_path / "images")
    data = module(str(root), predict=str(images), workers=0)
    data.prepare_data()
    assert (root / image).is_file()
    (root / image).write_bytes(b"no image")
    with pytest.raises(FolderError, match=Path(image).name):
        data.prepare_data()


@kinds
def test_a_recipe_whose_root_is_elsewhere_predicts(kind: str, tmp_path: Path) -> None:
    module, _, _ = KINDS[kind]
    data = module(str(tmp_path / "nowhere"), predict=str(images_to_predict(kind, tmp_path / "images")), workers=0)
    data.prepare_data()
    data.setup("predict")
    assert len(data.parts["predict"]) == 1


def test_an_unreadable_frame_names_its_own_module(tmp_path: Path) -> None:
    root = make_stereo(tmp_path)
    data = StereoFrames(str(root), workers=0, crop=(16, 32))
    data.setup("fit")
    (root / KINDS["stereo"][2]).write_bytes(b"no image")
    with pytest.raises(FolderError, match=r"^StereoFrames: cannot read .*0000\.png"):
        data.parts["train"][0]


def test_classes_in_another_order() -> None:
    check_classes("the data", ["a", "b"], ["a", "b"], "the checkpoint")
    with pytest.raises(FolderError, match="the data has the classes of the checkpoint in another order: b, a, where"):
        check_classes("the data", ["b", "a"], ["a", "b"], "the checkpoint")
