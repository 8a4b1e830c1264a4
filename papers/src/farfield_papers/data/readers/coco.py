"""Annotations in COCO's format: read them, check them, and turn polygons and RLE into masks."""

from __future__ import annotations

import json
import os
import reprlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import UInt8
from pycocotools import mask as coco
from torch import Tensor

from farfield._refusals import door
from farfield_papers.data.readers.coco_entries import (
    FIELDS,
    are_numbers,
    find_missing_keys,
    find_rle_fault,
    find_section_faults,
    find_value_faults,
    is_box,
)
from farfield_papers.data.readers.images import SHOWN, FolderError, list_images, list_some, read_utf8, refuse

# Number of pixels by which a box may exceed its image: annotators' coordinates are rounded.
_ROUNDING = 1.0


@dataclass(frozen=True)
class Annotated:
    """The images of one file of annotations, and the objects in each."""

    file: Path
    folder: Path  # of the images
    images: list[dict[str, Any]]  # `id`, `file_name`, `width`, `height`
    objects: dict[int, list[dict[str, Any]]]  # by image id: `bbox`, `category_id`, `segmentation`, `iscrowd` …
    categories: dict[int, str]  # names by id, in the order of the ids

    def path(self, image: Mapping[str, Any]) -> Path:
        """Return the path of an image."""
        return self.folder / image["file_name"]


@door("read_annotated")
def read_annotated(root: Path, name: str) -> Annotated:
    """Read `root/annotations/instances_<name>.json`, whose images lie in `<name>`, `images/<name>` or `images`."""
    file = root / "annotations" / f"instances_{name}.json"
    if not file.is_file():
        there = sorted(path.name for path in file.parent.glob("*.json")) or ["no .json files"]
        raise FolderError(
            f"there is no {file}; {file.parent} has {list_some(there)}.\n"
            "  fix: add that file, or name the splits that exist, --data.splits."
        )
    places = [root / name, root / "images" / name, root / "images"]
    folder = next((place for place in places if place.is_dir()), None)
    if folder is None:
        raise FolderError(
            f"{file} has no images beside it: there is none of {', '.join(map(str, places))}.\n"
            "  fix: put its images into one of these folders."
        )
    content = _read_json(file)
    _check_entries(file, content)
    objects: dict[int, list[dict[str, Any]]] = {image["id"]: [] for image in content["images"]}
    for each in content["annotations"]:
        objects[each["image_id"]].append(each)
    categories = {each["id"]: each["name"] for each in sorted(content["categories"], key=lambda each: each["id"])}
    return Annotated(file, folder, content["images"], objects, categories)


def _read_json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(read_utf8(file))
    except FolderError:
        raise
    # Numbers of thousands of digits are a ValueError too.
    except (ValueError, RecursionError) as error:
        reason = "its brackets are nested too deep" if isinstance(error, RecursionError) else error
        raise FolderError(f"{file} is not JSON: {reason}.") from error
    if not isinstance(content, dict):
        raise FolderError(
            f"{file} is not in COCO's format, it holds {type(content).__name__} and not an object with "
            f"{', '.join(FIELDS)}."
        )
    lacking = [section for section in FIELDS if section not in content]
    if lacking:
        raise FolderError(f"{file} is not in COCO's format, it has no {', '.join(lacking)}.")
    return content


def _check_entries(file: Path, content: Mapping[str, Any]) -> None:
    refuse_here = partial(refuse, place=f"{file}: ")
    refuse_here("parts are not in COCO's format", list(find_section_faults(content)), "use lists of objects with keys.")
    if not content["images"] or not content["categories"]:
        raise FolderError(f"{file} lists no {'categories' if content['images'] else 'images'}.")
    refuse_here("keys are missing", list(find_missing_keys(content)), "add them; COCO's format needs all of these.")
    refuse_here("values are of another kind", list(find_value_faults(content)), "use values of the kind after 'not'.")
    for section in FIELDS:
        counted = Counter(each["id"] for each in content[section])
        twice = [f"{section}: id {number}, {times} times" for number, times in counted.items() if times > 1]
        refuse_here("ids are given more than once", twice, "give each entry an id of its own.")
    images, categories = ({each["id"] for each in content[section]} for section in ("images", "categories"))
    lost = [
        f"annotation {each['id']} is of image {each['image_id']!r}"
        for each in content["annotations"]
        if each["image_id"] not in images
    ]
    refuse_here("annotations are of images that the file does not list", lost, "list the images, or leave these out.")
    formless = [
        f"annotation {each['id']}: {reprlib.repr(each['bbox'])}"
        for each in content["annotations"]
        if not is_box(each["bbox"])
    ]
    refuse_here("boxes are not x, y, width and height", formless, "give each box four numbers, in pixels.")
    known = ", ".join(f"{each['id']} {each['name']}" for each in content["categories"][:SHOWN])
    strange = [
        f"annotation {each['id']} has category {each['category_id']!r}"
        for each in content["annotations"]
        if each["category_id"] not in categories
    ]
    refuse_here("annotations have unknown categories", strange, f"use the ids under categories: {known}.")


@door("check_files")
def check_files(part: Annotated) -> None:
    """Refuse listed images that do not exist, and images of the split's own folder that are not listed."""
    refuse_here = partial(refuse, place=f"{part.file}: ")
    listed = {part.path(image) for image in part.images}
    # pathlib's is_file raises for names that no file can have.
    absent = sorted(str(path) for path in listed if not os.path.isfile(path))
    refuse_here("listed images are not there", absent, "put them there, or take them out of the file.")
    if part.folder.name != "images":
        extra = sorted(str(path) for path in set(list_images(part.folder)) - listed)
        fix = "list them too, without annotations if nothing is on them, or move them elsewhere."
        refuse_here(f"images in {part.folder} are not listed", extra, fix)


def find_faults(part: Annotated, key: str, find: Callable[[Any, int, int], str | None]) -> Iterator[str]:
    """Yield a text for each object of which `find` returns what is wrong with its entry `key`."""
    for image in part.images:
        for each in part.objects[image["id"]]:
            if fault := find(each.get(key), image["width"], image["height"]):
                yield f"annotation {each['id']} in {image['file_name']}: {fault}"


def find_box_fault(box: Sequence[float], width: int, height: int) -> str | None:
    """Return what is wrong with a box `(x, y, width, height)`, None if nothing."""
    x, y, wide, high = box
    if wide <= 0 or high <= 0:
        return f"box {box} has no size"
    if min(x, y) < -_ROUNDING or x + wide > width + _ROUNDING or y + high > height + _ROUNDING:
        return f"box {box} lies outside the image of {width}x{height} pixels"
    return None


def find_mask_fault(segmentation: Any, width: int, height: int) -> str | None:
    """Return what is wrong with a segmentation, polygons of at least three points or RLE, None if nothing."""
    if isinstance(segmentation, Mapping):
        return find_rle_fault(segmentation, width, height)
    if not segmentation:
        return "it has no segmentation"
    if not isinstance(segmentation, list) or not all(isinstance(polygon, list) for polygon in segmentation):
        return "its segmentation is neither a list of polygons nor RLE"
    short = [polygon for polygon in segmentation if len(polygon) < 6 or len(polygon) % 2]
    if short:
        return f"a polygon has {len(short[0])} numbers, and three points have 6"
    # pycocotools allocates memory for each pixel on the outline of a polygon.
    most = 2 * max(width, height)
    stray = [polygon for polygon in segmentation if not are_numbers(polygon, most)]
    return f"the polygon {reprlib.repr(stray[0])} has points far outside the image, or no numbers" if stray else None


def has_masks(part: Annotated) -> bool:
    """Return whether the objects have masks: False if none has one, or if every mask is the rectangle of its box."""
    objects = [each for several in part.objects.values() for each in several]
    return not objects or any(each.get("segmentation") and not is_rectangle(each) for each in objects)


def is_rectangle(each: Mapping[str, Any]) -> bool:
    """Return whether the segmentation of an object is the rectangle of its box, as in files made from boxes."""
    segmentation = each["segmentation"]
    polygon = segmentation[0] if isinstance(segmentation, list) and len(segmentation) == 1 else None
    if not (isinstance(polygon, list) and len(polygon) == 8 and are_numbers(polygon)):
        return False
    points, (x, y, wide, high) = np.reshape(polygon, (4, 2)), each["bbox"]
    corners = [(left, top) for left in (x, x + wide) for top in (y, y + high)]
    return all(np.abs(points - corner).max(1).min() < _ROUNDING / 2 for corner in corners)


def decode_masks(objects: Sequence[Mapping[str, Any]], height: int, width: int) -> UInt8[Tensor, "objects h w"]:
    """Turn the segmentations of objects, polygons or RLE (compressed or not), into masks: 1 on the object, else 0."""
    masks = np.zeros((len(objects), height, width), np.uint8)
    for place, each in enumerate(objects):
        segmentation = each["segmentation"]
        if isinstance(segmentation, Mapping) and not isinstance(segmentation["counts"], list):
            rle = segmentation
        else:
            rle = coco.frPyObjects(segmentation, height, width)
        masks[place] = coco.decode(coco.merge(rle) if isinstance(rle, list) else rle)
    return torch.from_numpy(masks)
