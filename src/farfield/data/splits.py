"""Splits into training and held-out samples, and datasets of images."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.model_selection import train_test_split
from torch import Tensor
from torch.utils.data import Dataset

from farfield._refusals import door
from farfield.data.base import Listed
from farfield.data.readers.images import FolderError, list_classes, list_images, read_image


def split_by_class(labels: Sequence[int], fraction: float | int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Split samples by class, `fraction` of each (an int: so many in all) into the second part; return the indices."""
    try:
        parts = train_test_split(np.arange(len(labels)), test_size=fraction, stratify=labels, random_state=seed)
    except ValueError as error:
        raise FolderError(
            f"data.classify: {len(labels)} images cannot be split, {fraction:g} held out: {error}\n"
            "  fix: more images of each class, a larger subset, or folders train and val."
        ) from error
    return np.sort(parts[0]), np.sort(parts[1])


def draw_subset(labels: Sequence[int], number: int, seed: int) -> np.ndarray:
    """Draw a number of samples with the same share of each class; return their indices, sorted."""
    if number > len(labels):
        raise FolderError(
            f"data.classify: subset={number} of {len(labels)} training images; fix: a subset of {len(labels)} at most."
        )
    return np.arange(number) if number == len(labels) else split_by_class(labels, len(labels) - number, seed)[0]


class Images(Dataset[Any]):
    """Images held in memory, transformed on access, each with its label or name."""

    def __init__(
        self, images: Tensor, labels: Sequence[Any], transform: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        self.images, self.labels, self.transform = images, labels, transform

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, Any]:
        image = self.images[index]
        return (image if self.transform is None else self.transform(image)), self.labels[index]


@door("ImageFolders")
def list_labelled_images(folder: Path) -> list[tuple[str, int]]:
    """List the images of class folders, each with its label."""
    return [
        (str(path), label)
        for label, name in enumerate(list_classes(folder))
        # In torchvision's order, a folder's files before the folders in it, as splits depend on the order.
        for path in sorted(list_images(folder / name), key=lambda path: (str(path.parent), path.name))
    ]


def read_images(
    entries: Sequence[tuple[str | Path, Any]], transform: Callable[[Any], Tensor], paths: Sequence[Path] = ()
) -> Listed:
    """List images that are read from files and transformed on access, each with its label or name."""
    return Listed(entries, partial(_read_labelled, transform), paths)


@door("ImageFolders")
def _read_labelled(transform: Callable[[Any], Tensor], entry: tuple[str | Path, Any]) -> tuple[Tensor, Any]:
    path, label = entry
    return transform(read_image(path)), label
