"""Images with a label for each pixel, in PASCAL VOC's layout: VOC itself, VOC with SBD, or your own."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2 import ColorJitter
from torchvision.transforms.v2 import functional as images

from farfield._refusals import put_name
from farfield_papers.data.base import Loading, check_root, name_module
from farfield_papers.data.classify import IMAGENET
from farfield_papers.data.readers.images import Check, FolderError, check_names, list_images, read_image
from farfield_papers.data.readers.masks import (
    LISTS,
    VOID,
    Pair,
    check_pairs,
    list_mask_pairs,
    list_train_aug,
    read_mask,
    read_mask_classes,
)

_NEAREST = InterpolationMode.NEAREST_EXACT


class VOCFolders(Loading):
    """Read `root/JPEGImages/*.jpg` and `root/SegmentationClass/*.png` by the lists of `root/ImageSets/Segmentation`.

    Masks are index images: palette or grey PNG files whose numbers are the labels, 255 for void. The classes are
    VOC's 21, or those of `root/classes.txt`, one name per line. A list has one name per line, or two paths below the
    root, `/JPEGImages/<id>.jpg /SegmentationClassAug/<id>.png`. `validate` uses the list `val`, and `test` the list
    `test`, or `val` if there is none.

    A training batch is `(images, labels)` of one size. In evaluation a batch is one whole image with its labels at
    their original size; to predict, it is one whole image with its path, its name and its original size.

    With `whole` training images are not cropped: resized, changed and mirrored at random as others are, and those of a
    batch filled up to the largest with the mean colour and void labels, as images smaller than the crop are.

    Args:
        root: The folder. It is not read, and may be left out, where `predict` is given and predicted.
        train: Name of the training list, or a path to one, or the folder of SBD (`cls/*.mat`, `train.txt`, `val.txt`).
            With SBD the training images are the 10,582 of train_aug, with VOC's masks, or SBD's where VOC has none.
        crop: Height and width of the training images, in pixels.
        scales: Range of the random factor by which a training image is resized before it is cropped.
        jitter: Largest relative change of brightness, contrast and saturation of a training image; 0 as in the papers.
        shorter_side: Length to which the shorter side of every image is resized first, in pixels; None for no resizing.
        batch_size: Training images per batch, on each device.
        workers: Loader processes; 0 loads in the main process.
        predict: A folder of images, in any folders below it, to predict; None predicts the test or validation images.
        check: Whether to decode all files before training: `"once"`, `"always"` or `"never"`.
        whole: Whether the network runs on whole images in tiles, in training too; `crop` then is not used.

    Raises:
        FolderError: If neither `root` nor `predict` is given, or `scales` is out of range. In `prepare_data` and
            `setup`: no folder, no list or an empty one, missing or damaged files, masks of another size than their
            image, with colours, or with labels that are no class; the error names the files.
    """

    one_by_one = True

    def __init__(
        self,
        root: str | None = None,
        *,
        train: str = "train",
        crop: int = 321,
        scales: tuple[float, float] = (0.5, 1.5),
        jitter: float = 0.0,
        shorter_side: int | None = None,
        batch_size: int = 8,
        workers: int = 2,
        predict: str | None = None,
        check: Check = "once",
        whole: bool = False,
    ) -> None:
        super().__init__(batch_size, workers)
        self._set_folders(root, predict, "a folder in VOC's layout", "a folder of images")
        if not 0 < scales[0] <= scales[1]:
            error = FolderError(f"scales must be two numbers above 0, the smaller first, got {scales}.")
            raise put_name("VOCFolders", error)
        self.train, self.check, self.shorter_side = train, check, shorter_side
        self.whole = whole
        self.random_view = RandomView(None if whole else crop, scales, jitter, shorter_side)

    @property
    @name_module("VOCFolders")
    def folder(self) -> Path:
        """The root; `FolderError` if it is not given or does not exist."""
        return check_root(self.root, "ImageSets")

    def _check_root(self) -> None:
        root = self.folder
        pairs = dict.fromkeys(pair for part in self._pairs(root).values() for pair in part)
        check_pairs(list(pairs), read_mask_classes(root), root, self.check)

    def _list_predict(self, path: Path) -> None:
        self._list_named(path, list_images(path))

    def _list_root(self, stage: str) -> None:
        root = self.folder
        pairs, self.classes = self._pairs(root), read_mask_classes(root)
        for name, part in pairs.items():
            view = self.random_view if name == "train" else self._whole_view
            self.parts[name] = self._listed(part, partial(_read_pair, view))
        if "test" not in pairs:
            if stage == "test":
                rank_zero_info(f"VOCFolders: {self.root} has no list test: using val.")
            self.parts["test"] = self.parts["val"]
        if stage == "predict":
            listed = [pair.image for pair in pairs.get("test", pairs["val"])]
            # Lists may refer to any folder, with `..` or by links; names are relative to the common parent folder.
            paths = [path.parent.resolve() / path.name for path in listed]
            folder = Path(os.path.commonpath([path.parent for path in paths]))
            self._list_named(folder, paths)

    def _list_named(self, folder: Path, paths: Sequence[Path]) -> None:
        names = [path.relative_to(folder).with_suffix("").as_posix() for path in paths]
        check_names(names, f"{folder} has several images of", "masks")
        entries = list(zip(paths, names, strict=True))
        self.parts["predict"] = self._listed(entries, partial(_read_to_predict, self.shorter_side), paths)

    def _loader(self, samples: Dataset[Any], **options: Any) -> DataLoader[Any]:
        if self.whole and "sampler" in options:  # the loader of training
            options["collate_fn"] = _fill_batch
        return super()._loader(samples, **options)

    def _whole_view(self, image: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        return normalize_image(_shorten_side(image, self.shorter_side)), labels.long()

    def _pairs(self, root: Path) -> dict[str, list[Pair]]:
        named, given = root / LISTS / f"{self.train}.txt", Path(self.train)
        if given.is_dir() and not named.is_file():
            parts = {"train": list_train_aug(root, given)}
        else:
            parts = {"train": list_mask_pairs(root, given if given.is_file() and not named.is_file() else named)}
        parts["val"] = list_mask_pairs(root, root / LISTS / "val.txt")
        if (root / LISTS / "test.txt").is_file():
            parts["test"] = list_mask_pairs(root, root / LISTS / "test.txt")
        return parts


class RandomView:
    """Resize an image and its labels by a random factor, crop at random, mirror with probability 1/2 (KAN §4.1)."""

    def __init__(
        self, crop: int | None, scales: tuple[float, float], jitter: float = 0.0, shorter_side: int | None = None
    ) -> None:
        # Height and width of the result, None for the whole image, and the length to which the shorter side is resized
        # first, in pixels.
        self.crop, self.scales, self.shorter_side = crop, scales, shorter_side
        # Largest relative change of brightness, contrast and saturation.
        self.jitter = ColorJitter(jitter, jitter, jitter)

    def __call__(self, image: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return one random view of a `uint8` image, normalised, and of its labels."""
        factor, mirrored = float(torch.empty(()).uniform_(*self.scales)), bool(torch.rand(()) < 0.5)
        if self.shorter_side is not None:
            factor *= self.shorter_side / min(image.shape[1:])
        size = [max(1, round(side * factor)) for side in image.shape[1:]]
        image = images.resize(image, size, antialias=True)
        labels = images.resize(labels[None], size, interpolation=_NEAREST)[0]
        if self.crop is not None:
            top, left = (int(torch.randint(max(0, side - self.crop) + 1, ())) for side in size)
            image = image[:, top : top + self.crop, left : left + self.crop]
            labels = labels[top : top + self.crop, left : left + self.crop]
            size = [self.crop, self.crop]
        image, labels = _fill(normalize_image(self.jitter(image)), labels.long(), size)
        return (image.flip(-1), labels.flip(-1)) if mirrored else (image, labels)


def _fill(image: Tensor, labels: Tensor, size: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Fill an image up to a size with the mean colour, which is 0 after normalising, and its labels with void."""
    missing = (0, size[1] - labels.shape[1], 0, size[0] - labels.shape[0])
    return functional.pad(image, missing), functional.pad(labels, missing, value=VOID)


def _fill_batch(samples: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Make a batch of images of any sizes, with their labels."""
    size = [max(sides) for sides in zip(*(labels.shape for _, labels in samples), strict=True)]
    images, labels = zip(*(_fill(*sample, size) for sample in samples), strict=True)
    return torch.stack(images), torch.stack(labels)


def _read_pair(view: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]], pair: Pair) -> tuple[Tensor, Tensor]:
    return view(read_pixels(pair.image), read_mask(pair.mask))


def _read_to_predict(shorter_side: int | None, entry: tuple[Path, str]) -> tuple[Tensor, str, str, Tensor]:
    path, name = entry
    image = read_pixels(path)
    return normalize_image(_shorten_side(image, shorter_side)), str(path), name, torch.tensor(image.shape[1:])


def read_pixels(path: Path) -> Tensor:
    """Read an image as a `uint8` tensor `(3, height, width)`."""
    return images.pil_to_tensor(read_image(path))


def _shorten_side(image: Tensor, side: int | None) -> Tensor:
    return image if side is None else images.resize(image, [side], antialias=True)


def normalize_image(image: Tensor) -> Tensor:
    """Normalise a `uint8` image by the mean and standard deviation of ImageNet's colours."""
    mean, deviation = IMAGENET
    return images.normalize(images.to_dtype(image, torch.float32, scale=True), list(mean), list(deviation))
