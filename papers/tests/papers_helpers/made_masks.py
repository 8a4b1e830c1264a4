"""What tests of segmentation share: PASCAL VOC's and SBD's folders, of images with squares of one colour a class."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from PIL import Image
from scipy.io import savemat

CLASSES = ("ground", "red", "green", "blue")
COLOURS = np.array([(110, 110, 110), (210, 50, 40), (50, 180, 60), (40, 60, 200)])


def make_pair(seed: int, height: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    """An image and its labels: a square of each class on the ground, and a border of void."""
    random = np.random.default_rng(seed)
    labels = np.zeros((height, width), np.uint8)
    for label in range(1, len(CLASSES)):
        side = min(height, width) // 3
        top, left = random.integers(0, height - side), random.integers(0, width - side)
        labels[top : top + side, left : left + side] = label
    image = np.clip(random.normal(COLOURS[labels], 20), 0, 255).astype(np.uint8)
    labels[:2] = 255
    return image, labels


def save_mask(path: Path, labels: np.ndarray) -> None:
    """Write labels as a palette PNG, as VOC does."""
    mask = Image.fromarray(labels)
    mask.putpalette([value for label in range(256) for value in (label, 255 - label, label // 2)])
    path.parent.mkdir(parents=True, exist_ok=True)
    mask.save(path)


def make_voc(
    root: Path, lists: Mapping[str, int] | None = None, *, size: Sequence[int] = (48, 64), named: bool = True
) -> Path:
    """Write a folder in VOC's layout with lists of so many images each, and return it."""
    (root / "ImageSets" / "Segmentation").mkdir(parents=True)
    (root / "JPEGImages").mkdir()
    for name, number in (lists or {"train": 6, "val": 3}).items():
        ids = [f"{name}_{place}" for place in range(number)]
        (root / "ImageSets" / "Segmentation" / f"{name}.txt").write_text("\n".join(ids) + "\n")
        for place, each in enumerate(ids):
            image, labels = make_pair(1000 * len(name) + place, size[0] + place, size[1])
            Image.fromarray(image).save(root / "JPEGImages" / f"{each}.jpg")
            save_mask(root / "SegmentationClass" / f"{each}.png", labels)
    if named:
        (root / "classes.txt").write_text("\n".join(CLASSES) + "\n")
    return root


def make_sbd(folder: Path, voc: Path, train: Sequence[str], val: Sequence[str]) -> Path:
    """Write SBD's folder: masks as .mat files of all names, whose images lie in VOC's folder, and return it."""
    (folder / "cls").mkdir(parents=True)
    for place, name in enumerate((*train, *val)):
        path = voc / "JPEGImages" / f"{name}.jpg"
        image, labels = make_pair(place, 40, 50)
        if path.is_file():
            with Image.open(path) as there:
                labels = np.zeros(there.size[::-1], np.uint8)
        else:
            Image.fromarray(image).save(path)
        structure = np.array([(labels,)], dtype=[("Segmentation", object)])
        savemat(folder / "cls" / f"{name}.mat", {"GTcls": structure[None]})
    (folder / "train.txt").write_text("\n".join(train))
    (folder / "val.txt").write_text("\n".join(val))
    return folder
