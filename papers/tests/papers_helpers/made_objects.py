"""What tests of detection share: folders in COCO's format, of images with rectangles and discs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from pycocotools import mask as coco
from pycocotools.coco import COCO
from torch import Tensor, nn

# Ids with gaps, listed in another order than that of the ids.
CATEGORIES = [{"id": 7, "name": "disc"}, {"id": 3, "name": "rectangle"}]


def make_scene(seed: int, height: int, width: int, number: int = 3) -> tuple[np.ndarray, list[tuple[int, np.ndarray]]]:
    """An image and its objects: of each the category and the mask."""
    random = np.random.default_rng(seed)
    image, objects = np.full((height, width, 3), 60.0), []
    rows, columns = np.mgrid[:height, :width]
    for place in range(number):
        side = int(random.integers(min(height, width) // 5, min(height, width) // 3))
        top, left = (int(random.integers(1, length - side - 1)) for length in (height, width))
        if place % 2:
            mask = (rows - top - side / 2) ** 2 + (columns - left - side / 2) ** 2 < (side / 2) ** 2
        else:
            mask = (rows >= top) & (rows < top + side) & (columns >= left) & (columns < left + side)
        image[mask] = (220, 60, 50) if place % 2 else (50, 90, 220)
        objects.append(((7, 3)[1 - place % 2], mask))
    return np.clip(image + random.normal(0, 8, image.shape), 0, 255).astype(np.uint8), objects


def annotation(number: int, image: int, category: int, mask: np.ndarray, kind: str) -> dict[str, Any]:
    """An entry of COCO's: the segmentation as a polygon, as RLE, as compressed RLE, or none ("box")."""
    rle = coco.encode(np.asfortranarray(mask.astype(np.uint8)))
    box = [float(value) for value in coco.toBbox(rle)]
    entry = {"id": number, "image_id": image, "category_id": category, "bbox": box, "area": float(mask.sum())}
    entry["iscrowd"] = 0
    x, y, wide, high = box
    if kind == "polygon":
        middle, angles = (x + wide / 2, y + high / 2), np.linspace(0, 2 * np.pi, 24, endpoint=False)
        disc = [(middle[0] + wide / 2 * np.cos(a), middle[1] + high / 2 * np.sin(a)) for a in angles]
        corners = [(x, y), (x + wide, y), (x + wide, y + high), (x, y + high)]
        points = disc if category == 7 else corners
        entry["segmentation"] = [[float(value) for point in points for value in point]]
    elif kind == "rle":
        runs = np.diff(np.flatnonzero(np.diff(np.r_[-1, mask.T.ravel().astype(int), -1])))
        first = [0] if mask[0, 0] else []
        entry["segmentation"] = {"size": list(mask.shape), "counts": first + runs.tolist()}
    elif kind == "compressed":
        entry["segmentation"] = {"size": list(mask.shape), "counts": rle["counts"].decode()}
    return entry


def make_coco(
    root: Path,
    splits: dict[str, int] | None = None,
    *,
    kinds: Sequence[str] = ("polygon", "rle", "compressed"),
    size: tuple[int, int] = (64, 80),
    empty: int = 0,
    crowd: bool = False,
) -> Path:
    """Write a folder in COCO's format, so many images in each split, and return it.

    Args:
        root: Where.
        splits: Images of each split.
        kinds: Of segmentation, in turn.
        sides: Height and width of the first image; each further one is a pixel higher.
        empty: How many further images of each split have no objects.
        crowd: Whether the last object of each image is a crowd.
    """
    (root / "annotations").mkdir(parents=True)
    for split, number in (splits or {"train": 4, "val": 3}).items():
        (root / split).mkdir()
        images, annotations = [], []
        for place in range(number + empty):
            height, width = size[0] + place, size[1]
            image, objects = make_scene(1000 * len(split) + place, height, width, 3 if place < number else 0)
            name = f"{split}_{place}.png"
            Image.fromarray(image).save(root / split / name)
            images.append({"id": 10 * place + 5, "file_name": name, "height": height, "width": width})
            for index, (category, mask) in enumerate(objects):
                each = len(annotations) + 1
                annotations.append(annotation(each, 10 * place + 5, category, mask, kinds[index % len(kinds)]))
            if crowd and objects:
                mask = objects[-1][1]
                annotations[-1] = annotation(len(annotations), 10 * place + 5, objects[-1][0], mask, "compressed")
                annotations[-1]["iscrowd"] = 1
        write_annotations(root, split, {"images": images, "annotations": annotations, "categories": CATEGORIES})
    return root


def read_annotations(root: Path, split: str) -> dict[str, Any]:
    return json.loads((root / "annotations" / f"instances_{split}.json").read_text())


def write_annotations(root: Path, split: str, content: dict[str, Any]) -> None:
    (root / "annotations" / f"instances_{split}.json").write_text(json.dumps(content))


class Oracle(nn.Module):
    """A network that finds what a file says there is, shifted a little, some of it twice, some of it as another class.

    Args:
        root: Folder in COCO's format.
        split: Whose images it knows.
        masks: Whether it gives masks.
        seed: Of its errors.
    """

    num_classes = 2

    def __init__(self, root: str, split: str = "val", masks: bool = True, seed: int = 0) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        annotations = COCO(str(Path(root) / "annotations" / f"instances_{split}.json"))
        random, self.found = np.random.default_rng(seed), {}
        for number, image in annotations.imgs.items():
            pixels = np.array(Image.open(Path(root) / split / image["file_name"]).convert("RGB"))
            objects = annotations.loadAnns(annotations.getAnnIds(number))
            solid = [annotations.annToMask(each) if masks else pixels[..., 0] for each in objects]
            pairs = [pair for pair in zip(solid, objects, strict=True) for _ in range(3)]
            entries = [self.guess(mask, each, random) for mask, each in pairs]
            found = {
                "boxes": torch.tensor([entry[0] for entry in entries], dtype=torch.float32).reshape(-1, 4),
                "labels": torch.tensor([entry[1] for entry in entries], dtype=torch.int64),
                "scores": torch.from_numpy(random.random(len(entries))).float(),
            }
            if masks:
                size = (0, 1, *pixels.shape[:2])
                found["masks"] = torch.stack([entry[2] for entry in entries]) if entries else torch.zeros(size)
            order = found["scores"].argsort(descending=True)
            self.found[int(pixels.astype(int).sum())] = {name: value[order] for name, value in found.items()}

    @staticmethod
    def guess(mask: np.ndarray, each: dict[str, Any], random: np.random.Generator) -> tuple[list[float], int, Tensor]:
        """An object's box, label and mask, nearly right."""
        down, right = random.integers(-3, 4, 2)
        moved = np.roll(mask, (down, right), (0, 1)).astype(np.float32) * 0.9
        x, y, wide, high = each["bbox"]
        box = [x + right, y + down, x + wide + right * random.random(), y + high + down * random.random()]
        label = {3: 1, 7: 2}[each["category_id"]]
        return box, label if random.random() < 0.8 else 3 - label, torch.from_numpy(moved)[None]

    def forward(self, images: list[Tensor], targets: Any = None) -> Any:
        if self.training:
            return {"loss_nothing": self.scale.square()}
        return [dict(self.found[int((image * 255).round().long().sum())]) for image in images]
