"""Output of `farfield predict` for detection: COCO's results, and pictures with boxes and masks."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import UInt8
from lightning.pytorch import LightningModule, Trainer
from PIL import Image
from pycocotools import mask as coco
from torch import Tensor
from torchvision.utils import draw_bounding_boxes, draw_segmentation_masks

from farfield_papers.tasks.checkpoints import written
from farfield_papers.tasks.detect import Detected
from farfield_papers.tasks.writers.predictions import PALETTE, PredictionFolder, gather_parts, hide_path


class DetectionFolder(PredictionFolder):
    """Write the predictions of `Detect` to a folder: `results.json` and `pictures/<name>.jpg`.

    `results.json` has COCO's format of results, with the annotations' ids of images and categories and the `file_name`
    of each image; images of a folder without annotations are numbered from 1 in the order of their names. It holds all
    detections; pictures show those with a score above `draw_above`, each object in its own colour. If the annotations
    name an image outside their folder, its picture is `<last part of its name>-<id>.jpg`.

    Args:
        path: The folder; None writes `predictions` into the trainer's `default_root_dir`.
        draw_above: Score above which an object is drawn; 1 draws none.
    """

    def __init__(self, path: str | None = None, draw_above: float = 0.5) -> None:
        super().__init__(path)
        self.draw_above = draw_above
        self.results: list[dict[str, Any]] = []

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Refuse a folder that is not empty, and clear the results."""
        super().on_predict_start(trainer, pl_module)
        self.results = []

    def write_on_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, prediction: Detected, *rest: Any
    ) -> None:
        """Keep the results of each image for `results.json`, and write its picture."""
        data = getattr(trainer, "datamodule", None)
        ids, classes = getattr(data, "category_ids", None), getattr(data, "classes", None) or []
        for path, name, number, entries in zip(*prediction, strict=True):
            for entry in entries:
                kept = {key: value for key, value in entry.items() if key != "label"}
                category = ids[entry["label"] - 1] if ids else entry["label"]
                # Images of a folder without annotations are numbered from 1 in the order of their names.
                self.results.append({"image_id": number, "category_id": category, **kept, "file_name": name})
            picture = Image.fromarray(draw_detections(path, entries, classes, self.draw_above).permute(1, 2, 0).numpy())
            stem = os.path.splitext(name)[0]
            # An image outside the annotations' folder has a picture of its last name and id.
            with written(self.output(trainer, "pictures", path, stem, ".jpg", number)) as file:
                picture.save(file, "JPEG", quality=90)

    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Gather the results of all processes, write them, and move the folder to its final name."""
        results = gather_parts(trainer, self.results)
        if trainer.is_global_zero:
            with written(hide_path(self.place(trainer)) / "results.json") as file:
                file.write(json.dumps(merge_results(results)).encode())
        super().on_predict_end(trainer, pl_module)


def merge_results(parts: Sequence[Sequence[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Merge the results of several processes; an image that two processes predicted counts once."""
    by_image: dict[Any, list[dict[str, Any]]] = {}
    for part in parts:
        own: dict[Any, list[dict[str, Any]]] = {}
        for entry in part:
            own.setdefault(entry["image_id"], []).append(entry)
        by_image |= own
    return [entry for image in sorted(by_image) for entry in by_image[image]]


def draw_detections(
    path: str, entries: Sequence[Mapping[str, Any]], classes: Sequence[str], above: float
) -> UInt8[Tensor, "3 h w"]:
    """Read an image, and draw its detections with a score above `above`; with several classes also names and scores."""
    with Image.open(path) as opened:
        image = torch.from_numpy(np.array(opened.convert("RGB"))).permute(2, 0, 1)
    entries = [entry for entry in entries if entry["score"] > above]
    if not entries:
        return image
    colours = [tuple(PALETTE[3 * place : 3 * place + 3]) for place in (1 + np.arange(len(entries)) % 20)]
    if "segmentation" in entries[0]:
        masks = torch.from_numpy(np.stack([coco.decode(entry["segmentation"]) for entry in entries])).bool()
        image = draw_segmentation_masks(image, masks, alpha=0.5, colors=colours)
    corners = [[x, y, x + wide, y + high] for x, y, wide, high in (entry["bbox"] for entry in entries)]
    names = [f"{classes[entry['label'] - 1]} {entry['score']:.2f}" for entry in entries] if len(classes) > 1 else None
    return draw_bounding_boxes(image, torch.tensor(corners), names, colours)
