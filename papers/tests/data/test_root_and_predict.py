"""Data modules with root, predict or both: what each checks, and what their errors say."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from farfield_papers.data.classify import ImageFolders
from farfield_papers.data.detect import CocoFolders
from farfield_papers.data.readers.images import FolderError, check_classes
from farfield_papers.data.segment import VOCFolders
from farfield_papers.data.stereo import StereoFrames
from papers_helpers import made_frames, made_images, made_masks, made_objects


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


# ---- the folder of the data ------------------------------------------------------------------------------------------
def train(module: Any, root: Path | str) -> None:
    """Check the data and list what is trained on."""
    data = module(str(root), workers=0)
    data.prepare_data()
    data.setup("fit")
    assert len(data.parts["train"])


def advised(text: str) -> str:
    """The first folder that an error advises as root."""
    return re.search(r"\n  fix: --data\.root (\S+?)[.,](?:\s|$)", text)[1]


@kinds
def test_a_root_that_is_misspelt_names_the_one_beside_it(kind: str, tmp_path: Path) -> None:
    module, make, _ = KINDS[kind]
    make(tmp_path / "photos")
    wrong = tmp_path / "photso"
    with pytest.raises(FolderError) as raised:
        train(module, wrong)
    assert str(raised.value) == (
        f"{module.__name__}: there is no folder {wrong}.\n  fix: --data.root {tmp_path / 'photos'}."
    )
    train(module, advised(str(raised.value)))


@kinds
def test_a_root_in_no_folder_names_what_there_is(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module, make, _ = KINDS[kind]
    make(tmp_path / "photos")
    for wrong in (tmp_path / "data" / "photos", tmp_path / "zzz"):
        with pytest.raises(FolderError) as raised:
            train(module, wrong)
        assert str(raised.value).endswith(f"  fix: --data.root with a folder that exists; {tmp_path} has photos.")
    train(module, tmp_path / "photos")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FolderError, match=r"there is no folder photo\.\n  fix: ") as raised:
        train(module, "photo")
    train(module, advised(str(raised.value)))


@pytest.mark.parametrize(("kind", "file"), [("detect", "annotations/instances_train.json"), ("segment", "classes.txt")])
def test_a_file_as_root_names_the_folder_around_it(kind: str, file: str, tmp_path: Path) -> None:
    module, make, _ = KINDS[kind]
    root = make(tmp_path / "photos")
    with pytest.raises(FolderError, match=rf"^{module.__name__}: \S+{file} is a file, not a folder\.\n") as raised:
        train(module, root / file)
    assert advised(str(raised.value)) == str(root)
    train(module, advised(str(raised.value)))


@kinds
def test_an_archive_as_root_has_to_be_unpacked(kind: str, tmp_path: Path) -> None:
    module, make, _ = KINDS[kind]
    archive = shutil.make_archive(str(tmp_path / "photos"), "zip", make(tmp_path / "made"))
    with pytest.raises(
        FolderError, match=r"is a file, not a folder\.\n  fix: .* an archive has to be unpacked first\.$"
    ):
        train(module, archive)
    shutil.unpack_archive(archive, tmp_path / "unpacked")
    train(module, tmp_path / "unpacked")


@pytest.mark.parametrize(
    ("kind", "level", "held", "expected"),
    [
        ("classify", "..", "photos", "train"),
        ("detect", "..", "photos", "annotations"),
        ("segment", "..", "photos", "ImageSets"),
        ("detect", "annotations", "no folders", "annotations"),
        ("segment", "ImageSets", "Segmentation", "ImageSets"),
        ("segment", "ImageSets/Segmentation", "no folders", "ImageSets"),
    ],
)
def test_a_root_of_another_level(kind: str, level: str, held: str, expected: str, tmp_path: Path) -> None:
    module, make, _ = KINDS[kind]
    root = make(tmp_path / "data" / "photos")
    wrong = (root / level).resolve()
    with pytest.raises(FolderError) as raised:
        train(module, wrong)
    assert str(raised.value) == (
        f"{module.__name__}: {wrong} is not the folder of the data: it has {held}, and not {expected}.\n"
        f"  fix: --data.root {root}, which has {expected}."
    )
    train(module, advised(str(raised.value)))


def test_a_folder_of_classes_may_be_called_train(tmp_path: Path) -> None:
    train(ImageFolders, made_images.make_root(tmp_path) / "train")
