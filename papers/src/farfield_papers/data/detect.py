"""Images and the objects in them, in COCO's format: COCO itself, or your own."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torchvision import tv_tensors
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as images

from farfield._outputs import output_path
from farfield_papers.data.base import Loading, check_root, name_module, read_entry
from farfield_papers.data.readers.coco import (
    Annotated,
    check_files,
    decode_masks,
    find_box_fault,
    find_faults,
    find_mask_fault,
    has_masks,
    read_annotated,
)
from farfield_papers.data.readers.images import (
    Check,
    FolderError,
    Note,
    check_each,
    check_names,
    find_fault,
    format_size,
    list_images,
    read_size,
    refuse,
)
from farfield_papers.data.sampler import Draw, EpochSampler
from farfield_papers.data.segment import read_pixels

LeftOut = Literal["images_without_objects", "faulty_boxes"]

# Boundaries between the groups of aspect ratios (width / height) that are batched together, as in torchvision.
_SHAPES = 2 ** np.linspace(-1, 1, 7)


class CocoFolders(Loading):
    """Read images and their objects in COCO's format.

    The annotations are `root/annotations/instances_<split>.json`; the images are in the first of `root/<split>`,
    `root/images/<split>` and `root/images` that exists.

    Category ids may be any whole numbers. The categories, sorted by id, get the labels 1 to K, and 0 is the background;
    written predictions have the ids of the file. Segmentations may be polygons or RLE. Objects marked `iscrowd` are
    not trained on; in evaluation, detections inside them count as neither right nor wrong, as in COCO's own evaluation.
    Images without objects are trained on as background. Training images are mirrored with probability 1/2.

    In training and evaluation a batch is `(images, targets)`, two lists of the same length: images `(3, height, width)`
    with values from 0 to 1, and one dictionary per image with `boxes` (left, top, right, bottom), `labels`, `masks` if
    they are used, and in evaluation `iscrowd` and `area`.

    Args:
        root: The folder. Not read by `farfield predict` if `predict` is given; it may then be left out.
        splits: Names of the training, validation and test split; if the test split has no file, the validation split
            is tested.
        masks: Whether masks are used. By default they are, unless in some split no object has a mask or every mask is
            the rectangle of its box.
        leave_out: What to leave out of the training images: "images_without_objects", "faulty_boxes". If "faulty_boxes"
            is not among them, a box of no size or outside its image, in any split, is an error.
        group_by_shape: Whether images of similar aspect ratio are batched together, which reduces padding.
        batch_size: Training images per batch, on each device; evaluation has batches of one image.
        workers: Loader processes; 0 loads in the main process.
        predict: A folder whose images, at any depth, are predicted; None predicts the test or validation images.
        check: Whether to decode all files before training: `"once"`, `"always"` or `"never"`.

    Raises:
        FolderError: If neither `root` nor `predict` is given. In `prepare_data` and `setup`: if files are missing,
            damaged or not in COCO's format, images have no entry or entries no image, categories are unknown, or boxes
            or masks are faulty; the error names them.
    """

    one_by_one = True

    def __init__(
        self,
        root: str | None = None,
        *,
        splits: tuple[str, str, str] = ("train", "val", "test"),
        masks: bool | None = None,
        leave_out: Sequence[LeftOut] = (),
        group_by_shape: bool = False,
        batch_size: int = 2,
        workers: int = 2,
        predict: str | None = None,
        check: Check = "once",
    ) -> None:
        super().__init__(batch_size, workers)
        self._set_folders(root, predict, "a folder in COCO's format", "a folder of images")
        self.splits, self.masks, self.leave_out, self.check = tuple(splits), masks, tuple(leave_out), check
        self.group_by_shape = group_by_shape
        # Ids of the categories, of which the first is label 1.
        self.category_ids: list[int] = []

    def _check_root(self) -> None:
        parts = self._read()
        with_masks = self._with_masks(parts)
        for part in parts.values():
            check_files(part)
            refuse_here = partial(refuse, place=f"{part.file}: ")
            if "faulty_boxes" not in self.leave_out:
                fix = 'correct them, or train without them: --data.leave_out "[faulty_boxes]".'
                refuse_here("boxes are faulty", list(find_faults(part, "bbox", find_box_fault)), fix)
            if with_masks:
                fix = "correct them, or train boxes alone: --data.masks false."
                refuse_here("masks are faulty", list(find_faults(part, "segmentation", find_mask_fault)), fix)
            files = [part.path(image) for image in part.images]
            fault = partial(_find_image_fault, part)
            note = Note(part.folder, [*files, part.file])
            fix = "replace these images or correct their entries, or remove both."
            check_each(part.images, fault, self.check, note, f"images of {part.file} are not as listed", fix)

    def _list_predict(self, path: Path) -> None:
        paths = list_images(path)
        self._list_numbered(paths, [each.relative_to(path).as_posix() for each in paths], range(1, len(paths) + 1))

    def _list_root(self, stage: str) -> None:
        parts = self._read()
        with_masks = self._with_masks(parts)
        if not with_masks:
            rank_zero_info(f"CocoFolders: {self.root}: boxes without masks.")
        self.category_ids, self.classes = list(parts["val"].categories), list(parts["val"].categories.values())
        parts["train"] = _select_training(parts["train"], self.leave_out)
        self.parts |= {name: AnnotatedImages(part, name == "train", with_masks) for name, part in parts.items()}
        if "test" not in parts:
            if stage == "test":
                rank_zero_info(f"CocoFolders: {self.root} has no split {self.splits[2]}: using {self.splits[1]}.")
            self.parts["test"] = self.parts["val"]
        if stage == "predict":
            part = parts.get("test", parts["val"])
            paths, names = [part.path(image) for image in part.images], [image["file_name"] for image in part.images]
            self._list_numbered(paths, names, [image["id"] for image in part.images])

    def _list_numbered(self, paths: Sequence[Path], names: Sequence[str], numbers: Sequence[int]) -> None:
        entries = list(zip(paths, names, numbers, strict=True))
        outputs = (output_path(Path(), os.path.splitext(name)[0], number=number) for _, name, number in entries)
        check_names((output.as_posix() for output in outputs), "several images have", "pictures")
        self.parts["predict"] = self._listed(entries, _read_numbered_image, paths)

    def state_dict(self) -> dict[str, Any]:
        """Return the data entries of a checkpoint: those of `Loading` and the ids of the categories."""
        return super().state_dict() | {"category_ids": list(self.category_ids)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the data entries of a checkpoint; predictions of a folder without annotations get its category ids."""
        super().load_state_dict(state_dict)
        with name_module("CocoFolders"):
            self.category_ids = list(read_entry(state_dict, "category_ids", list))

    def _read(self) -> dict[str, Annotated]:
        root = check_root(self.root, "annotations")
        train, val, test = self.splits
        named = {"train": train, "val": val}
        if (root / "annotations" / f"instances_{test}.json").is_file():
            named["test"] = test
        parts = {name: read_annotated(root, split) for name, split in named.items()}
        for part in parts.values():
            expected = parts["train"]
            if part.categories != expected.categories:
                only = dict(part.categories.items() - expected.categories.items())
                absent = dict(expected.categories.items() - part.categories.items())
                raise FolderError(
                    f"{part.file} and {expected.file} have different categories.\n"
                    f"  only in {part.file}: {only or 'none'}\n  only in {expected.file}: {absent or 'none'}\n"
                    "  fix: list the same ids and names in all splits, used or not."
                )
        return parts

    def _with_masks(self, parts: Mapping[str, Annotated]) -> bool:
        return all(map(has_masks, parts.values())) if self.masks is None else self.masks

    def _order(self, samples: Dataset[Any], ranks: int, rank: int) -> EpochSampler:
        if not self.group_by_shape:
            return super()._order(samples, ranks, rank)
        part: Any = self.parts["train"]
        groups = np.digitize([image["width"] / image["height"] for image in part.part.images], _SHAPES)
        return GroupedSampler(samples, groups.tolist(), self.batch_size, seed=self.run_seed, ranks=ranks, rank=rank)

    def _loader(self, samples: Dataset[Any], **options: Any) -> DataLoader[Any]:
        return super()._loader(samples, collate_fn=_collate_lists, **options)


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

    @name_module("CocoFolders")
    def __getitem__(self, index: int) -> tuple[Tensor, dict[str, Tensor]]:
        entry = self.part.images[index]
        image, target = tv_tensors.Image(read_pixels(self.part.path(entry))), self._target(entry)
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


def _read_numbered_image(entry: tuple[Path, str, int]) -> tuple[Tensor, str, str, int]:
    """Read an image to predict; return it with its path, its name, and its number or id."""
    path, name, number = entry
    return images.to_dtype(read_pixels(path), torch.float32, scale=True), str(path), name, number


def _select_training(part: Annotated, leave_out: Sequence[LeftOut]) -> Annotated:
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


def _find_image_fault(part: Annotated, image: Mapping[str, Any]) -> str | None:
    """Decode an image and compare its size with that in its entry; return what is wrong, or None."""
    path = part.path(image)
    fault = find_fault(path)
    listed = (image["height"], image["width"])
    if fault is None and (size := read_size(path)) != listed:
        return f"{path}: has {format_size(size)} pixels, and {format_size(listed)} by its entry"
    return fault


def _find_labels(sample: Any) -> Tensor:
    # With the boxes, SanitizeBoundingBoxes removes their labels.
    return sample[1]["labels"]


class GroupedSampler(EpochSampler):
    """Shuffle samples so that each batch has samples of one of `groups`; what is left comes last, in mixed batches."""

    def __init__(
        self, samples: Any, groups: Sequence[int], batch_size: int, *, seed: int, ranks: int = 1, rank: int = 0
    ) -> None:
        super().__init__(samples, seed=seed, ranks=ranks, rank=rank)
        self.groups, self.batch_size = groups, batch_size

    def __iter__(self) -> Iterator[Draw]:
        waiting: dict[int, list[Draw]] = defaultdict(list)
        for draw in super().__iter__():
            group = waiting[self.groups[draw.place]]
            group.append(draw)
            if len(group) == self.batch_size:
                yield from group
                group.clear()
        yield from chain.from_iterable(waiting.values())


def _collate_lists(samples: Sequence[Sequence[Any]]) -> list[list[Any]]:
    return [list(part) for part in zip(*samples, strict=True)]
