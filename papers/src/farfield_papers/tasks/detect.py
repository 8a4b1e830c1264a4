"""Detection of objects and masks: torchvision's losses, learning rates per image, and COCO's average precision."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from pycocotools import mask as coco
from torch import Tensor, nn
from torch.optim.lr_scheduler import LinearLR, MultiStepLR
from torchmetrics.detection import MeanAveragePrecision

from farfield_papers.tasks.training_task import TrainingTask

# Share of the learning rate at the first step.
_WARM = 1e-3
# torchmetrics' keys of precisions, for boxes alone or boxes and masks -> kind of object.
_KINDS = {"precision": "box", "bbox_precision": "box", "segm_precision": "mask"}
# Measures that are logged in validation.
_BRIEF = ("ap", "ap50", "ap75")
_AREAS = ("all", "small", "medium", "large")

_Batch = tuple[list[Tensor], list[dict[str, Tensor]]]


class Detected(NamedTuple):
    """Result of `predict_step` for a batch: path, name, number and detections of each image."""

    paths: list[str]
    names: list[str]
    numbers: list[int]  # ids of COCO's annotations, or places in a folder without annotations, from 1
    found: list[list[dict[str, Any]]]  # as from `list_entries`


class Detect(TrainingTask):
    """Train a detector with the interface of torchvision's; defaults are the settings of FA and of torchvision.

    `learning rate = lr_per_image · images per step`, divided by ten at each milestone

    FA prints a learning rate of 1.25e-4 for batches of 64. The usual 0.02 for batches of 16 corresponds to 0.08 for 64,
    640 times as much. The framework of FA's authors has learning rates per image. The default here is 1.25e-3 per
    image, which is 0.02 for 16 and 0.08 for 64; `learning_rate` sets the learning rate itself, e.g. to the printed one.

    SGD with momentum and a linear warm-up. The loss is the sum of torchvision's losses. Average precision is COCO's, by
    pycocotools: the mean over ten thresholds of the IoU from 0.50 to 0.95, and over all classes that occur. Logged:
    `train/loss` and its terms, `learning_rate`, `val/box_ap`, `val/box_ap50`, `val/box_ap75`, the same for masks if
    network and data have them, and for `test` also of `small`, `medium` and `large` objects and of each class. An
    average precision is -1 if there are no objects of its kind.

    Args:
        network: Module with the interface of torchvision's detectors. Its arguments are a list of images and, in
            training, the list of their targets. It returns a dictionary of losses in training, and in evaluation one
            dictionary per image with `boxes`, `labels`, `scores` and optionally `masks`.
        lr_per_image: Learning rate per image of a step, over all devices.
        learning_rate: The learning rate itself, in place of `lr_per_image`.
        momentum: Momentum of SGD.
        weight_decay: L2 penalty of all weights.
        warmup: Steps over which the learning rate rises from a thousandth to its full value; 0 for no warm-up.
        milestones: Epochs, counted from 0, at whose start the learning rate is divided by ten.
        max_detections: Number of detections per image and class that are evaluated, those with the highest scores:
            COCO's 100, or more if an image has more objects.

    Raises:
        ValueError: If network and data have different numbers of classes; in the first batch, if the network has a mask
            head and the data have no masks; if `learning_rate` is None and the training loader has no batch size.

    Reference: FA §4.1.

    Example:
        >>> class Nothing(nn.Module):
        ...     def forward(self, images, targets=None):
        ...         return [{"boxes": torch.zeros(0, 4)} for image in images]
        >>> Detect(Nothing())([torch.zeros(3, 8, 8)])
        [{'boxes': tensor([], size=(0, 4))}]
    """

    def __init__(
        self,
        network: nn.Module,
        *,
        lr_per_image: float = 1.25e-3,
        learning_rate: float | None = None,
        momentum: float = 0.9,
        weight_decay: float = 1e-4,
        warmup: int = 1000,
        milestones: Sequence[int] = (17, 20),
        max_detections: int = 100,
    ) -> None:
        super().__init__(network)

    def forward(
        self, images: Sequence[Float[Tensor, "3 h w"]], targets: Sequence[Mapping[str, Tensor]] | None = None
    ) -> Any:
        """Return a dictionary of losses in training, and otherwise a list of the detections in each image."""
        images = [self._as_weights(image) for image in images]
        return self.network(images) if targets is None else self.network(images, targets)

    def on_fit_start(self) -> None:
        """Refuse a network whose `num_classes` is not the number of classes of the data, before any stage."""
        own, classes = getattr(self.network, "num_classes", None), self.classes
        if classes and own not in (None, len(classes)):
            raise ValueError(
                f"Detect: the network has {own} classes and the data {len(classes)}; fix: build the network with "
                f"num_classes={len(classes)} (--model.network.num_classes {len(classes)})."
            )

    on_validation_start = on_test_start = on_predict_start = on_fit_start

    def training_step(self, batch: _Batch, batch_idx: int) -> Tensor:
        """Return the sum of the losses of a batch."""
        images, targets = batch
        heads = (getattr(module, "mask_head", None) for module in self.network.modules())
        if batch_idx == 0 and "masks" not in targets[0] and any(head is not None for head in heads):
            raise ValueError(
                "Detect: the network is trained on masks and the data have boxes alone; fix: a network without a mask "
                "head, --model.network faster_rcnn."
            )
        losses = self(images, targets)
        loss = torch.stack(list(losses.values())).sum()
        self._log_loss(loss, len(images))
        self.log_dict({f"train/{name}": value for name, value in losses.items()}, batch_size=len(images))
        self._log_rate()
        return loss

    def predict_step(self, batch: tuple[list[Tensor], list[str], list[str], list[int]], batch_idx: int) -> Detected:
        """Return the detections in the images, as COCO's results."""
        images, paths, names, numbers = batch
        return Detected(paths, names, numbers, [list_entries(detections) for detections in self(images)])

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """Return SGD on the trained parameters, the warm-up, which changes per step, and the milestones, per epoch."""
        settings = self.hparams
        trained = [weight for weight in self.network.parameters() if weight.requires_grad]
        optimizer = self._build_sgd(trained, self.rate())
        schedules: list[Any] = [MultiStepLR(optimizer, list(settings["milestones"]))]
        if settings["warmup"]:
            warmup = LinearLR(optimizer, _WARM, total_iters=settings["warmup"])
            schedules.append({"scheduler": warmup, "interval": "step"})
        return [optimizer], schedules

    def rate(self) -> float:
        """Return `learning_rate`, or without it `lr_per_image` times the images per step over all devices."""
        settings, trainer = self.hparams, self.trainer
        if settings["learning_rate"] is not None:
            return settings["learning_rate"]
        # Reading this property makes the trainer set up its data loaders.
        _ = trainer.estimated_stepping_batches
        size = getattr(trainer.train_dataloader, "batch_size", None)
        if size is None:
            raise ValueError(
                "Detect: the training loader has no batch_size, by which lr_per_image is multiplied; "
                "fix: --model.learning_rate 0.02, the learning rate itself."
            )
        return settings["lr_per_image"] * size * trainer.world_size * trainer.accumulate_grad_batches

    def _evaluate(self, stage: str, batch: _Batch, batch_idx: int) -> None:
        images, targets = batch
        detections = [dict(each) for each in self(images)]
        masks = "masks" in detections[0] and "masks" in targets[0]
        if self.measures is None:
            self.measures = _build_measures(masks, self.hparams["max_detections"]).to(self.device)
        if masks:
            for each in detections:
                each["masks"] = _threshold_masks(each["masks"])
        self.measures.update(detections, targets)

    def _measure(self, stage: str) -> None:
        values = {} if self.measures is None else _compute_precisions(self.measures.compute(), self.classes)
        if stage == "val":
            values = {name: value for name, value in values.items() if name.partition("_")[2] in _BRIEF}
        self.log_dict({f"{stage}/{name}": value for name, value in values.items()}, prog_bar=stage == "val")


def _build_measures(masks: bool, max_detections: int) -> MeanAveragePrecision:
    # torchmetrics' own mean is -1 for limits other than 100 detections, so `_compute_precisions` takes the means.
    measures = MeanAveragePrecision(
        iou_type=("bbox", "segm") if masks else "bbox",
        max_detection_thresholds=[max_detections] * 3,
        extended_summary=True,
        backend="pycocotools",
    )
    measures.warn_on_many_detections = False
    return measures


def _compute_precisions(computed: Mapping[str, Any], classes: Sequence[str] = ()) -> dict[str, float]:
    # Name -> mean precision as COCO reports it, and for each class.
    result: dict[str, float] = {}
    for key, name in _KINDS.items():
        if key not in computed:
            continue
        # Axes: thresholds of the IoU (index 0 is 0.50, index 5 is 0.75), recalls, classes, areas (index 0: all sizes),
        # limits of detections.
        values = computed[key][..., -1]
        parts = {"": values[..., 0], "50": values[0, ..., 0], "75": values[5, ..., 0]}
        parts |= {f"_{area}": values[..., place] for place, area in enumerate(_AREAS) if place}
        labels = computed["classes"].reshape(-1).tolist() if classes else []
        parts |= {f"/{classes[label - 1]}": values[:, :, place, 0] for place, label in enumerate(labels)}
        result |= {f"{name}_ap{which}": average_defined(part) for which, part in parts.items()}
    return result


def average_defined(values: Tensor) -> float:
    """Return the mean of the defined precisions; COCO has -1 where there is no object."""
    defined = values[values > -1]
    return float(defined.mean()) if len(defined) else -1.0


def _threshold_masks(masks: Float[Tensor, "objects 1 h w"]) -> Tensor:
    return (masks[:, 0] > 0.5).to(torch.uint8)


def list_entries(detections: Mapping[str, Tensor]) -> list[dict[str, Any]]:
    """Convert the detections in one image to a list of COCO's results, without `image_id` and `category_id`."""
    corners = detections["boxes"].double().cpu()
    boxes = torch.cat([corners[:, :2], corners[:, 2:] - corners[:, :2]], 1).tolist()
    labels, scores = detections["labels"].tolist(), detections["scores"].double().tolist()
    # `bbox` is x, y, width and height; `label` the place of the category in the order of the ids, from 1, not its id.
    entries: list[dict[str, Any]] = [
        {"bbox": box, "score": score, "label": label} for box, score, label in zip(boxes, scores, labels, strict=True)
    ]
    if "masks" in detections:
        for entry, mask in zip(entries, _threshold_masks(detections["masks"]).cpu().numpy(), strict=True):
            rle = coco.encode(np.asfortranarray(mask))
            entry["segmentation"] = {"size": list(rle["size"]), "counts": rle["counts"].decode("ascii")}
    return entries
