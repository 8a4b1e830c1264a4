"""Splits are stratified, fixed and disjoint; batches are what a network is trained on."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some
from PIL import Image

from farfield_papers.data.augment import Augmentation, build_evaluation_transform, build_training_transform
from farfield_papers.data.classify import Digits, ImageFolders, draw_subset, split_by_class
from farfield_papers.data.readers.images import FolderError
from papers_helpers.made_images import make_folder, make_root

pytestmark = pytest.mark.usefixtures("cache")


def files(part: Any) -> set[str]:
    return {path for path, _ in part.entries}


def opened(root: Path, stage: str = "fit", **options: Any) -> ImageFolders:
    data = ImageFolders(str(root), **{"image_size": 32, "workers": 0, "batch_size": 6, **options})
    data.prepare_data()
    data.setup(stage)
    return data


@given(some.lists(some.integers(10, 40), min_size=2, max_size=5), some.integers(0, 9))
def test_a_split_is_stratified_fixed_and_disjoint(numbers: list[int], seed: int) -> None:
    labels = np.repeat(np.arange(len(numbers)), numbers)
    first, second = split_by_class(labels.tolist(), 0.2, seed)
    assert sorted([*first, *second]) == list(range(len(labels)))
    for name, number in enumerate(numbers):
        assert abs((labels[second] == name).sum() - number / 5) < 1.5
    assert all(map(np.array_equal, split_by_class(labels.tolist(), 0.2, seed), (first, second)))


def test_a_subset_has_the_number_requested_and_the_same_share_of_each_class() -> None:
    labels = [0] * 60 + [1] * 40
    kept = draw_subset(labels, 50, seed=1)
    assert len(set(kept)) == 50
    assert Counter(labels[index] for index in kept) == {0: 30, 1: 20}
    assert not np.array_equal(kept, draw_subset(labels, 50, seed=2))


def test_digits_hold_out_a_fifth_of_each_class_always_the_same() -> None:
    data, again = Digits(), Digits()
    for one in (data, again):
        one.setup("fit")
    train, val = data.parts["train"], data.parts["val"]
    assert (len(train), len(val)) == (1437, 360)  # type: ignore[arg-type]
    assert torch.equal(val.images, again.parts["val"].images)  # type: ignore[attr-defined]
    counts = Counter(val.labels)  # type: ignore[attr-defined]
    assert set(counts) == set(range(10))
    assert max(counts.values()) - min(counts.values()) <= 2
    # No held-out digit is trained on, nor one equal to it to the pixel.
    assert not {image.numpy().tobytes() for image in train.images} & {image.numpy().tobytes() for image in val.images}  # type: ignore[attr-defined]


def test_a_batch_of_digits_is_normalised_and_three_channels_of_32_pixels() -> None:
    data = Digits(batch_size=400)
    data.setup("fit")
    raw = next(iter(data.val_dataloader()))
    images, labels = data.on_after_batch_transfer(raw, 0)
    assert raw[0].dtype == torch.uint8
    assert images.shape == (360, 3, 32, 32)
    assert labels.shape == (360,)
    assert abs(images.mean()) < 0.1
    assert abs(images.std() - 1) < 0.15


def test_train_and_val_folders_are_used_as_they_are(tmp_path: Path) -> None:
    data = opened(make_root(tmp_path / "root"))
    assert (len(data.parts["train"]), len(data.parts["val"])) == (24, 12)  # type: ignore[arg-type]
    images, labels = next(iter(data.val_dataloader()))
    assert images.shape == (6, 3, 32, 32)
    assert labels.tolist() == [0, 0, 0, 0, 1, 1]


def test_one_folder_is_split_into_a_fixed_fifth_of_each_class(tmp_path: Path) -> None:
    root = make_folder(tmp_path / "root", 10)
    data = opened(root)
    train, val = files(data.parts["train"]), files(data.parts["val"])
    assert len(train) == 24
    assert len(train | val) == 30
    assert Counter(Path(file).parent.name for file in val) == {"blue": 2, "green": 2, "red": 2}
    assert files(opened(root).parts["val"]) == val
    assert files(opened(root, seed=1).parts["val"]) != val


def test_a_subset_leaves_validation_alone_and_does_not_follow_the_seed_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = make_root(tmp_path / "root")
    data = opened(root, subset=9)
    monkeypatch.setenv("PL_GLOBAL_SEED", "7")
    assert Counter(Path(file).parent.name for file in files(data.parts["train"])) == {"blue": 3, "green": 3, "red": 3}
    assert files(opened(root, subset=9).parts["train"]) == files(data.parts["train"])
    assert len(data.parts["val"]) == 12  # type: ignore[arg-type]


def test_evaluation_needs_no_training_images(tmp_path: Path) -> None:
    make_folder(tmp_path / "root" / "test", 3)
    data = opened(tmp_path / "root", "test")
    assert sum(len(labels) for _, labels in data.test_dataloader()) == 9


def test_a_folder_with_test_images_alone_is_predicted(tmp_path: Path) -> None:
    root = make_root(tmp_path)
    (root / "val").rename(root / "test")
    shutil.rmtree(root / "train")
    data = ImageFolders(str(root), image_size=32, workers=0)
    data.setup("predict")
    assert len(data.parts["predict"]) == len(list((root / "test").rglob("*.jpg")))


@pytest.mark.parametrize("name", ["nowhere", "one.jpg"])
def test_what_is_predicted_must_be_a_folder(tmp_path: Path, name: str) -> None:
    (tmp_path / "one.jpg").write_bytes(b"")
    data = ImageFolders(predict=str(tmp_path / name), image_size=32, workers=0)
    with pytest.raises(FolderError, match=rf"{name} is not a folder.\n  fix: the path of a folder with images"):
        data.setup("predict")


def test_any_folder_of_images_can_be_predicted_without_classes(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "new", 2)
    data = ImageFolders(predict=str(folder), image_size=32, workers=0)
    data.prepare_data()
    data.setup("predict")
    names = [name for _, batch in data.predict_dataloader() for name in batch]
    assert sorted(names) == sorted(str(path) for path in folder.rglob("*.jpg"))


def test_the_classes_of_a_checkpoint_must_be_those_of_the_folder(tmp_path: Path) -> None:
    data = opened(make_root(tmp_path / "root"))
    state = data.state_dict()
    data.load_state_dict(state)
    with pytest.raises(ValueError, match=r"has other classes than the checkpoint[\s\S]*only in the checkpoint: pink"):
        data.load_state_dict({**state, "classes": ["blue", "green", "pink"]})


@pytest.mark.parametrize(
    ("name", "value"), [("classes", "ab"), ("classes", [3]), ("classes", None), ("run_seed", "x"), ("run_seed", [])]
)
def test_a_checkpoint_that_does_not_say_what_it_keeps_of_the_data(tmp_path: Path, name: str, value: object) -> None:
    data = opened(make_root(tmp_path / "root"))
    for state in ({**data.state_dict(), name: value}, {k: v for k, v in data.state_dict().items() if k != name}):
        with pytest.raises(FolderError, match=f"ImageFolders: the checkpoint's {name}"):
            data.load_state_dict(state)


@pytest.mark.parametrize("name", get_args(Augmentation))
@pytest.mark.parametrize("size", [(32, 32), (70, 45), (20, 90)])
def test_every_augmentation_gives_uint8_squares_of_any_image(name: Augmentation, size: tuple[int, int]) -> None:
    image = Image.effect_noise(size, 40).convert("RGB")
    for transform in (build_training_transform(name, 32), build_evaluation_transform(name, 32)):
        result = transform(image)
        assert result.dtype == torch.uint8
        assert result.shape == (3, 32, 32)
    assert torch.equal(build_evaluation_transform(name, 32)(image), build_evaluation_transform(name, 32)(image))


@pytest.mark.parametrize("name", [name for name in get_args(Augmentation) if name != "none"])
def test_training_images_vary(name: Augmentation) -> None:
    image = Image.effect_noise((60, 60), 40).convert("RGB")
    assert len({build_training_transform(name, 32)(image).numpy().tobytes() for _ in range(8)}) > 3


@pytest.mark.parametrize("side", [32, 96])
def test_cutout_paints_a_square_of_half_the_side_in_the_mean_colour(side: int) -> None:
    white = torch.full((3, side, side), 255, dtype=torch.uint8)
    seen = set()
    for _ in range(8):
        result = build_training_transform("cutout", side)(white)
        hole = (result == torch.tensor([124, 116, 104])[:, None, None]).all(0)
        rows, columns = hole.any(1), hole.any(0)
        assert (int(rows.sum()), int(columns.sum()), int(hole.sum())) == (side // 2, side // 2, (side // 2) ** 2)
        seen.add((int(rows.int().argmax()), int(columns.int().argmax())))
    assert len(seen) > 3


def test_the_papers_crop_is_224_of_256() -> None:
    steps = {type(step).__name__: step for step in build_training_transform("paper", 224).transforms}
    assert (steps["Resize"].size, steps["RandomCrop"].size) == ([256, 256], (224, 224))
    steps = {type(step).__name__: step for step in build_evaluation_transform("paper", 224).transforms}
    assert (steps["Resize"].size, steps["CenterCrop"].size) == ([256], (224, 224))


def test_an_unknown_augmentation_is_named_with_the_nearest() -> None:
    with pytest.raises(LookupError, match='no augmentation "papre"; nearest: paper'):
        build_training_transform("papre", 32)  # type: ignore[arg-type]
