"""Datasets of images with their objects, for training, evaluation and prediction."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset
from torchvision import tv_tensors
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as images

from farfield._outputs import output_path
from farfield._refusals import door
from farfield.data.base import Listed
from farfield.data.readers.coco import Annotated, decode_masks, find_box_fault
from farfield.data.readers.images import check_names, find_fault, read_image

LeftOut = Literal["images_without_objects", "faulty_boxes"]


class AnnotatedImages(Dataset[tuple[Tensor, dict[str, Tensor]]]):
    """Images and their targets, see `CocoFolders`; in training without crowds, mirrored with probability 1/2."""

    def __init__(self, part: Annotated, training: bool, masks: bool) -> None:
        self.part, self.masks, self.training = part, masks, training
        self.labels = {category: label for label, category in enumerate(part.categories, 1)}
        # Boxes are clipped to the image; those that are then narrower or lower than a pixel are removed.
        self.view = v2.Compose(
            [
                v2.ClampBoundingBoxes(),
                v2.SanitizeBoundingBoxes(labels_getter=_find_labels),
                v2.RandomHorizontalFlip(),
                v2.ToPureTensor(),
            ]
        )

    def __len__(self) -> int:
        return len(self.part.images)

    def __getitem__(self, index: int) -> tuple[Tensor, dict[str, Tensor]]:
        entry = self.part.images[index]
        image, target = read_image_tensor(self.part.path(entry)), self._target(entry)
        if self.training:
            image, target = self.view(image, target)
        return images.to_dtype(image, torch.float32, scale=True), target

    def _target(self, entry: Mapping[str, Any]) -> dict[str, Tensor]:
        objects = self.part.objects[entry["id"]]
        if self.training:
            objects = [each for each in objects if not each.get("iscrowd")]
        size = (entry["height"], entry["width"])
        boxes = torch.tensor([each["bbox"] for each in objects], dtype=torch.float32).reshape(-1, 4)
        boxes[:, 2:] += boxes[:, :2]
        target: dict[str, Any] = {"boxes": boxes}
        target["labels"] = torch.tensor([self.labels[each["category_id"]] for each in objects], dtype=torch.int64)
        if self.masks:
            target["masks"] = decode_masks(objects, *size)
        if self.training:
            # As tv_tensors, boxes and masks are mirrored and removed together.
            box: Any = tv_tensors.BoundingBoxes
            target["boxes"] = box(boxes, format="XYXY", canvas_size=size)
            return target | ({"masks": tv_tensors.Mask(target["masks"])} if self.masks else {})
        target["iscrowd"] = torch.tensor([each.get("iscrowd", 0) for each in objects], dtype=torch.int64)
        areas = [each.get("area", each["bbox"][2] * each["bbox"][3]) for each in objects]
        return target | {"area": torch.tensor(areas, dtype=torch.float32)}


def list_numbered_images(paths: Sequence[Path], names: Sequence[str], numbers: Sequence[int]) -> Listed:
    """List images to predict: the image, its path, its name below the folder, and its number or id."""
    entries = list(zip(paths, names, numbers, strict=True))
    stems = [output_path(Path(), os.path.splitext(name)[0], number=number).as_posix() for _, name, number in entries]
    check_names(stems, "CocoFolders: several images have", "pictures")
    return Listed(entries, _read_numbered_image, paths)


def _read_numbered_image(entry: tuple[Path, str, int]) -> tuple[Tensor, str, str, int]:
    path, name, number = entry
    return images.to_dtype(read_image_tensor(path), torch.float32, scale=True), str(path), name, number


def select_training(part: Annotated, leave_out: Sequence[LeftOut]) -> Annotated:
    """Return the training images and their objects without what `leave_out` names."""
    kept, objects = part.images, part.objects
    if "faulty_boxes" in leave_out:
        objects = {
            image["id"]: [
                each
                for each in objects[image["id"]]
                if find_box_fault(each["bbox"], image["width"], image["height"]) is None
            ]
            for image in kept
        }
    if "images_without_objects" in leave_out:
        kept = [image for image in kept if any(not each.get("iscrowd") for each in objects[image["id"]])]
    return Annotated(part.file, part.folder, kept, objects, part.categories)


def find_image_fault(part: Annotated, image: Mapping[str, Any]) -> str | None:
    """Decode an image and compare its size with that in its entry; return what is wrong, or None."""
    path = part.path(image)
    fault = find_fault(path)
    if fault is None:
        with Image.open(path) as opened:
            if opened.size != (image["width"], image["height"]):
                sizes = "x".join(map(str, opened.size)), f"{image['width']}x{image['height']}"
                return f"{path}: has {sizes[0]} pixels, and {sizes[1]} by its entry"
    return fault


@door("CocoFolders")
def read_image_tensor(path: Path) -> tv_tensors.Image:
    """Read an image as `uint8` `(3, height, width)`."""
    return tv_tensors.Image(images.pil_to_tensor(read_image(path)))


def _find_labels(sample: Any) -> Tensor:
    # With the boxes, SanitizeBoundingBoxes removes their labels.
    return sample[1]["labels"]
