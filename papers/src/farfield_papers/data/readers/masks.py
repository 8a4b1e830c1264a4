"""Images and their masks: PASCAL VOC's folders and lists, SBD's, and checks of a pair."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torchvision.datasets.folder import IMG_EXTENSIONS

from farfield._refusals import door
from farfield_papers.data.readers.images import (
    Check,
    FolderError,
    Note,
    check_each,
    find_fault,
    format_size,
    list_some,
    name_file,
    read_size,
    read_utf8,
    refuse,
)

VOC_CLASSES = (
    *("background", "aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat", "chair", "cow"),
    *("diningtable", "dog", "horse", "motorbike", "person", "pottedplant", "sheep", "sofa", "train", "tvmonitor"),
)
# The label of pixels that the loss and the metrics ignore.
VOID = 255
# Pillow's modes of an image with one number per pixel: a palette, or grey.
_INDEXED = ("P", "L")
LISTS = Path("ImageSets", "Segmentation")
_IMAGES, _MASKS = "JPEGImages", "SegmentationClass"


class Pair(NamedTuple):
    """An image file and the file with its labels: an index image, or SBD's `.mat`."""

    image: Path
    mask: Path


@door("read_mask_classes")
def read_mask_classes(root: Path) -> list[str]:
    """Read the classes, one per line in the order of their labels, from `root/classes.txt`; without it VOC's 21."""
    path = root / "classes.txt"
    if not path.is_file():
        return list(VOC_CLASSES)
    lines = [line.split(maxsplit=1) for line in read_utf8(path).splitlines() if line.strip()]
    # All lines may begin with the label itself. Longer strings of digits are names: int() limits their length.
    if lines and all(line[0].isdecimal() and len(line[0]) < 10 and len(line) == 2 for line in lines):
        numbered = [(int(label), name.strip()) for label, name in lines if int(label) != VOID]
        labels, names = [label for label, _ in numbered], [name for _, name in numbered]
        if labels != list(range(len(labels))) or not labels:
            raise FolderError(
                f"the labels of {path} must count up from 0, got {list_some(labels) or 'none'}.\n"
                "  fix: 0, 1, 2 and so on, one per line, or no labels."
            )
        return names
    if not lines:
        raise FolderError(f"{path} names no classes.\n  fix: one name per line, in the order of their labels.")
    return [" ".join(line).strip() for line in lines]


@door("read_list")
def read_list(path: Path) -> list[list[str]]:
    """Read the lines of a list of images, each split into words."""
    if not path.is_file():
        held = ", ".join(sorted(entry.stem for entry in path.parent.glob("*.txt"))) or "no lists"
        raise FolderError(f"there is no list {path}; {path.parent} has {held}.\n  fix: write that list.")
    lines = [line.split() for line in read_utf8(path).splitlines() if line.strip()]
    if not lines:
        raise FolderError(f"{path} is empty.\n  fix: one name per line, that of {_IMAGES}/<name>.jpg.")
    return lines


@door("list_mask_pairs")
def list_mask_pairs(root: Path, path: Path) -> list[Pair]:
    """Return the pairs of a list: names of images (VOC), or two paths per line below the root (train_aug lists)."""
    pairs = [
        Pair(root / words[0].lstrip("/"), root / words[1].lstrip("/"))
        if len(words) == 2
        else Pair(_find_image(root / _IMAGES, words[0]), root / _MASKS / f"{words[0]}.png")
        for words in read_list(path)
    ]
    return _check_complete(pairs, path)


@door("list_train_aug")
def list_train_aug(root: Path, sbd: Path) -> list[Pair]:
    """List VOC's 10,582 training images, (SBD train and val, and VOC train) without VOC val, with SBD's masks."""
    # The folder of cls, train.txt and val.txt, or the one around it.
    sbd = sbd / "dataset" if (sbd / "dataset").is_dir() else sbd
    files = (sbd / "train.txt", sbd / "val.txt", root / LISTS / "train.txt", root / LISTS / "val.txt")
    sbd_train, sbd_val, train, val = ({words[0] for words in read_list(file)} for file in files)
    pairs = []
    for name in sorted((sbd_train | sbd_val | train) - val):
        # VOC's own masks take precedence.
        mask = root / _MASKS / f"{name}.png" if name in train else sbd / "cls" / f"{name}.mat"
        pairs.append(Pair(_find_image(root / _IMAGES, name), mask))
    return _check_complete(pairs, sbd)


def _find_image(folder: Path, name: str) -> Path:
    """Return the file of an image by its name without suffix; that with `.jpg` if there is none."""
    paths = (folder / f"{name}{suffix}" for suffix in (".jpg", *IMG_EXTENSIONS))
    # pathlib's is_file raises for names that no file can have, which a damaged list may hold.
    return next((path for path in paths if os.path.isfile(path)), folder / f"{name}.jpg")


def _check_complete(pairs: Sequence[Pair], source: Path) -> list[Pair]:
    """Return the pairs; raise `FolderError` if a file is missing. `source` is their list or folder, for the error."""
    missing = [path for pair in pairs for path in pair if not os.path.isfile(path)]
    fix = f"an image and a mask for each name, {_IMAGES}/<name>.jpg and {_MASKS}/<name>.png."
    refuse(f"files of the {len(pairs)} pairs in {source} are missing", missing, fix)
    return list(pairs)


@door("read_mask")
def read_mask(path: Path) -> Tensor:
    """Read the labels of a mask as a `uint8` tensor `(height, width)`; refuse colours."""
    with name_file(path):
        if path.suffix == ".mat":
            from scipy.io import loadmat

            return torch.from_numpy(loadmat(path, mat_dtype=False)["GTcls"][0]["Segmentation"][0].astype(np.uint8))
        with Image.open(path) as image:
            mode, labels = image.mode, torch.from_numpy(np.array(image))
    if mode not in _INDEXED:
        raise FolderError(
            f"{path} has colours (mode {mode}) and not one label per pixel.\n"
            "  fix: save masks as palette or grey PNG files whose numbers are the labels."
        )
    return labels


@door("check_pairs")
def check_pairs(pairs: Sequence[Pair], classes: Sequence[str], root: Path, check: Check = "once") -> None:
    """Decode every pair and refuse those that cannot be trained on, in one error."""
    note = Note(root, (path for pair in pairs for path in pair), f"{len(classes)} classes")
    fix = (
        f"labels are 0 to {len(classes) - 1} and {VOID} for void, in palette or grey PNG files of their image's size; "
        "classes.txt names them."
    )
    fault = partial(find_pair_fault, classes=len(classes))
    check_each(pairs, fault, check, note, f"pairs in {root} cannot be trained on", fix)


def find_pair_fault(pair: Pair, classes: int) -> str | None:
    """Read one pair; return what is wrong with it, or None."""
    damaged = find_fault(pair.image)
    if damaged:
        return damaged
    try:
        labels = read_mask(pair.mask)
    except FolderError as error:
        return error.text.splitlines()[0]
    size = read_size(pair.image)
    if tuple(labels.shape) != size:
        return f"{pair.mask} is {format_size(labels.shape)}, {pair.image} is {format_size(size)}"
    foreign = [label for label in labels.unique().tolist() if label >= classes and label != VOID]
    if foreign:
        return f"{pair.mask}: labels {list_some(foreign)} are no classes"
    return None
