"""Splits into training and held-out samples, and datasets of images."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from sklearn.model_selection import train_test_split
from torch import Tensor
from torch.utils.data import Dataset
from torchvision.datasets import ImageFolder

from farfield._refusals import named
from farfield.data.base import Listed
from farfield.data.readers.images import FolderError, list_classes, list_images, read_image


def split_by_class(labels: Sequence[int], fraction: float | int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Split samples into two parts with the same share of each class; return the indices of both, sorted.

    `fraction` is the share of the samples in the second part, or, as an int, their number.

    Example:
        >>> first, second = split_by_class([0] * 10 + [1] * 20, 0.2, seed=0)
        >>> len(first), len(second)
        (24, 6)
    """
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


@named("ImageFolders")
def _read_image(path: str | Path) -> Image.Image:
    return read_image(path)


class ClassFolders(ImageFolder):
    """torchvision's `ImageFolder` without hidden folders and files."""

    def __init__(self, folder: Path, transform: Callable[[Any], Tensor]) -> None:
        super().__init__(str(folder), transform, loader=_read_image)

    @staticmethod
    @named("ImageFolders")
    def make_dataset(
        directory: str | Path,
        class_to_idx: dict[str, int],
        extensions: Any = None,
        is_valid_file: Any = None,
        allow_empty: bool = False,
    ) -> list[tuple[str, int]]:
        """List images and labels of all classes; torchvision's own version does not end where links form a circle."""
        return [
            (str(path), place)
            for name, place in sorted(class_to_idx.items())
            # In torchvision's order, a folder's files before the folders in it, as splits depend on the order.
            for path in sorted(list_images(Path(directory, name)), key=lambda path: (str(path.parent), path.name))
        ]

    def find_classes(self, directory: str | Path) -> tuple[list[str], dict[str, int]]:
        """Return the class folders, without hidden ones, and their labels."""
        names = list_classes(Path(directory))
        return names, {name: place for place, name in enumerate(names)}


def name_images(paths: Sequence[Path], transform: Callable[[Any], Tensor]) -> Listed:
    """List images that are read from files and transformed on access, each with its path."""
    return Listed(paths, partial(_read_named, transform), paths)


def _read_named(transform: Callable[[Any], Tensor], path: Path) -> tuple[Tensor, str]:
    return transform(_read_image(path)), str(path)
