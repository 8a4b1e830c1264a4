"""Images and their classes: a folder of images (`ImageFolders`), or scikit-learn's handwritten digits (`Digits`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor
from torch.utils.data import Dataset
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional

from farfield._refusals import door
from farfield_papers.data.augment import Augmentation, build_evaluation_transform, build_training_transform
from farfield_papers.data.base import Listed, Loading, check_root, list_folders, name_module, refuse_level
from farfield_papers.data.readers.images import (
    Check,
    FolderError,
    check_classes,
    check_images,
    list_classes,
    list_images,
    read_image,
)

Colours = tuple[float, float, float]

# Mean and standard deviation of red, green and blue over ImageNet, for pixels in 0..1.
IMAGENET: tuple[Colours, Colours] = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))

# Share of the images that is held out where there is no validation folder.
_HELD_OUT = 0.2


class _Classification(Loading):
    """Base class of both data modules: the loaders return `uint8` images and their labels, or names to predict."""

    def __init__(self, batch_size: int, workers: int, seed: int, colours: tuple[Colours, Colours]) -> None:
        super().__init__(batch_size, workers, seed)
        self.normalize = v2.Normalize(*colours)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Normalise `uint8` images, on the device."""
        images, labels = batch
        return self.normalize(functional.to_dtype(images, torch.float32, scale=True)), labels


class ImageFolders(_Classification):
    """Read images from one folder per class: `root/train/<class>/*`, `root/val/<class>/*`, optionally `root/test`.

    Without `root/val` a fifth of each class is held out of the training images, always the same for one seed. Without
    all three folders the class folders lie in `root` itself. Without `root/test` the validation images are the test
    images. All files are decoded once before the first epoch, see `check`.

    Args:
        root: The folder. It may be left out where `predict` is given and predicted with a checkpoint.
        image_size: Height and width of the network's input, in pixels.
        batch_size: Images per batch, on each device.
        workers: Loader processes; 0 loads in the main process.
        augmentation: Augmentation of the training images, see `data.augment.build_training_transform`.
        subset: Number of training images to use, drawn with the same share of each class; None uses all.
        seed: Seed of split and subset, independent of the run's seed (`seed_everything`).
        predict: A folder of images, in any folders below it, to predict; None predicts the test or validation images.
        check: Whether to decode all files before training: `"once"`, `"always"` or `"never"`.
        colours: Mean and standard deviation of red, green and blue, for pixels in 0..1, to normalise by.

    Raises:
        FolderError: If neither `root` nor `predict` is given. In `prepare_data` and `setup`: no folder, no images, one
            class, a damaged file, a subset larger than the data, or classes that differ between train, val and test;
            the error names the folder or the files.
    """

    def __init__(
        self,
        root: str | None = None,
        *,
        image_size: int = 224,
        batch_size: int = 64,
        workers: int = 2,
        augmentation: Augmentation = "paper",
        subset: int | None = None,
        seed: int = 0,
        predict: str | None = None,
        check: Check = "once",
        colours: tuple[Colours, Colours] = IMAGENET,
    ) -> None:
        super().__init__(batch_size, workers, seed, colours)
        self._set_folders(root, predict, "a folder with one folder per class", "a folder of images")
        self.subset, self.image_size, self.check = subset, image_size, check
        self.training_transform = build_training_transform(augmentation, image_size)
        self.evaluation_transform = build_evaluation_transform(augmentation, image_size)

    @property
    @name_module("ImageFolders")
    def folders(self) -> dict[str, Path]:
        """The folders of train, val and test that exist, by name; `root` as train if it has none of them."""
        if self.root is None or (self.predict is not None and not self.root.is_dir()):
            return {}
        root = check_root(self.root)
        nested = {name: root / name for name in ("train", "val", "test") if (root / name).is_dir()}
        if not nested:
            # A folder of class folders may itself be called train, so that no folder around it is another root.
            refuse_level(root, "train", list_folders(root))
        return nested or {"train": root}

    def _check_root(self) -> None:
        self._read_classes()
        check_images([*self.folders.values()], self.check)

    def _list_predict(self, path: Path) -> None:
        self.classes = self._read_classes()
        self._list_named(list_images(path))

    def _list_root(self, stage: str) -> None:
        self.classes = self._read_classes()
        folders = self.folders
        if "train" in folders:
            self.parts |= self._training_parts(folders["train"])
        for name in ("val", "test"):
            if name in folders:
                self.parts[name] = self._images(list_labelled_images(folders[name]))
        if stage == "predict":
            held: Any = self.parts["test"] if "test" in self.parts else self.parts["val"]
            self._list_named([Path(path) for path, _ in held.entries])
        if stage == "test" and "test" not in folders and "val" in self.parts:
            rank_zero_info(f"{type(self).__name__}: {self.root} has no folder test: using val.")
            self.parts["test"] = self.parts["val"]
        wanted = {"fit": "train", "validate": "val", "test": "test"}.get(stage, "predict")
        if wanted not in self.parts:
            raise FolderError(f"there is no folder {check_root(self.root)}/{wanted}.")

    def _images(self, entries: Sequence[tuple[Any, Any]], paths: Sequence[Path] = ()) -> Listed:
        return self._listed(entries, partial(_read_labelled, self.evaluation_transform), paths)

    def _list_named(self, paths: Sequence[Path]) -> None:
        self.parts["predict"] = self._images([(path, str(path)) for path in paths], paths)

    def _read_classes(self) -> list[str]:
        """Return the classes of the first folder, train; refuse other classes elsewhere, and a class without images."""
        folders = self.folders
        if not folders:
            return []
        first, *_ = folders.values()
        classes = list_classes(first)
        for folder in folders.values():
            check_classes(folder, list_classes(folder), classes, str(first))
            for name in classes:
                list_images(folder / name)
        return classes

    def _training_parts(self, folder: Path) -> dict[str, Dataset[Any]]:
        """Return the training images, reduced to `subset`, and the held-out fifth if there is no folder val."""
        entries = list_labelled_images(folder)
        labels = [label for _, label in entries]
        kept, held = np.arange(len(entries)), np.arange(0)
        if "val" not in self.folders:
            kept, held = split_by_class(labels, _HELD_OUT, self.seed)
        if self.subset is not None:
            kept = kept[draw_subset([labels[index] for index in kept], self.subset, self.seed)]
        return {
            "train": self._listed([entries[index] for index in kept], partial(_read_labelled, self.training_transform)),
            "val": self._images([entries[index] for index in held]),
        }


class Digits(_Classification):
    """Read scikit-learn's 1,797 handwritten digits, 8x8 pixels, enlarged to three channels; nothing is downloaded.

    A fifth of each class is held out, always the same images for one seed, as validation set and as test set.

    Args:
        image_size: Height and width of the network's input, in pixels.
        batch_size: Images per batch, on each device.
        workers: Loader processes; 0 loads in the main process, which is the fastest here.
        augmentation: Augmentation of the training images; `"shift"` only shifts here, as a mirrored digit is not a
            digit.
        subset: Number of training images to use, drawn with the same share of each class; None uses all.
        seed: Seed of split and subset.
    """

    def __init__(
        self,
        *,
        image_size: int = 32,
        batch_size: int = 64,
        workers: int = 0,
        augmentation: Literal["none", "shift"] = "shift",
        subset: int | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(batch_size, workers, seed, ((0.3,) * 3, (0.35,) * 3))
        self.subset, self.image_size = subset, image_size
        shift = v2.RandomCrop(image_size, padding=image_size // 16)
        self.training_transform = shift if augmentation == "shift" else v2.Identity()

    def _list_root(self, stage: str) -> None:
        bunch = load_digits()
        self.classes = [str(name) for name in bunch.target_names]
        small = torch.from_numpy(bunch.images * (255 / 16)).float()[:, None].expand(-1, 3, -1, -1)
        large = functional.resize(small, [self.image_size] * 2, antialias=True).round().clamp(0, 255).to(torch.uint8)
        kept, held = split_by_class(bunch.target, _HELD_OUT, self.seed)
        if self.subset is not None:
            kept = kept[draw_subset(bunch.target[kept], self.subset, self.seed)]
        labels = bunch.target.tolist()
        self.parts["train"] = _Images(large[kept], [labels[index] for index in kept], self.training_transform)
        self.parts["val"] = self.parts["test"] = _Images(large[held], [labels[index] for index in held])
        self.parts["predict"] = _Images(large[held], [f"digit {index}" for index in held])


class _Images(Dataset[Any]):
    """Images held in memory, transformed on access, each with its label or name."""

    # In one tensor: views of it in a list would each take all of it along to a loader process.
    def __init__(
        self, images: Tensor, labels: Sequence[Any], transform: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        self.images, self.labels, self.transform = images, labels, transform

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, Any]:
        image = self.images[index]
        return (image if self.transform is None else self.transform(image)), self.labels[index]


@door("split_by_class")
def split_by_class(labels: Sequence[int], fraction: float | int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Split samples by class, `fraction` of each (an int: so many in all) into the second part; return the indices."""
    try:
        parts = train_test_split(np.arange(len(labels)), test_size=fraction, stratify=labels, random_state=seed)
    except ValueError as error:
        raise FolderError(
            f"{len(labels)} images cannot be split, {fraction:g} held out: {error}\n"
            "  fix: more images of each class, a larger subset, or folders train and val."
        ) from error
    return np.sort(parts[0]), np.sort(parts[1])


@door("draw_subset")
def draw_subset(labels: Sequence[int], number: int, seed: int) -> np.ndarray:
    """Draw a number of samples with the same share of each class; return their indices, sorted."""
    if number > len(labels):
        raise FolderError(f"subset={number} of {len(labels)} training images; fix: a subset of {len(labels)} at most.")
    return np.arange(number) if number == len(labels) else split_by_class(labels, len(labels) - number, seed)[0]


@door("list_labelled_images")
def list_labelled_images(folder: Path) -> list[tuple[str, int]]:
    """List the images of class folders, each with its label."""
    return [
        (str(path), label)
        for label, name in enumerate(list_classes(folder))
        # In torchvision's order, a folder's files before the folders in it, as splits depend on the order.
        for path in sorted(list_images(folder / name), key=lambda path: (str(path.parent), path.name))
    ]


def _read_labelled(transform: Callable[[Any], Tensor], entry: tuple[str | Path, Any]) -> tuple[Tensor, Any]:
    """Read and transform an image; return it with its label or name."""
    path, label = entry
    return transform(read_image(path)), label
