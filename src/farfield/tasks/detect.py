"""Detection of objects and masks: torchvision's losses, learning rates per image, and COCO's average precision."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from pycocotools import mask as coco
from torch import Tensor, nn
from torch.optim.lr_scheduler import LinearLR, MultiStepLR
from torchmetrics.detection import MeanAveragePrecision

from farfield.tasks.checkpoints import check_same_network
from farfield.tasks.replay import Replay

# Share of the learning rate at the first step.
WARM = 1e-3
# What torchmetrics calls the precisions of what is measured, alone or side by side.
KINDS = {"precision": "box", "bbox_precision": "box", "segm_precision": "mask"}
# What is logged in validation.
BRIEF = ("ap", "ap50", "ap75")
AREAS = ("all", "small", "medium", "large")

Batch = tuple[list[Tensor], list[dict[str, Tensor]]]


class Detected(NamedTuple):
    """What `predict_step` returns for a batch: of each image its path, name and number, and what was found.

    `found` has entries of COCO's results: `bbox` as x, y, width and height, `score`, `segmentation` as RLE where the
    network gives masks, and `label`, which is a category's place from 1 and not its id.
    """

    paths: list[str]
    names: list[str]
    numbers: list[int]
    found: list[list[dict[str, Any]]]


class Detect(LightningModule):
    """Train a detector that is called as torchvision's are, with FA's settings and torchvision's as defaults.

    `learning rate = lr_per_image · images a step`, a tenth of it from each milestone on

    FA gives 1.25e-4 for batches of 64, which is 640 times below the usual 0.02 for 16. Where it comes from learning
    rates are given per image; 1.25e-3 for each, 0.02 for 16 and 0.08 for 64, is the default here, and
    `learning_rate` takes the printed number as it stands.

    SGD with momentum, warmed up linearly. The loss is the sum of torchvision's. Average precision is COCO's, by
    pycocotools: the mean over ten overlaps from 0.50 to 0.95, all images and all classes that occur. Logged:
    `train/loss` and its terms, `learning_rate`, `val/box_ap`, `val/box_ap50`, `val/box_ap75`, the same for masks where
    network and data have them, and for `test` also of `small`, `medium` and `large` objects and of each class. It is -1
    where there is no such object.

    A checkpoint holds the network's weights and these numbers; never the network's code.

    Args:
        network: From a list of images, and in training their targets, to a dictionary of losses; in evaluation to
            `boxes`, `labels`, `scores` and perhaps `masks` of each image.
        lr_per_image: Learning rate for each image of a step, on all devices together.
        learning_rate: Taken as it stands in place of that.
        momentum: Momentum of SGD.
        weight_decay: L2 penalty of all weights.
        warmup: Steps in which the learning rate rises to its own.
        milestones: Epochs, from 0, from which it is a tenth.
        max_detections: How many objects of an image and class are measured, the surest: COCO's 100, or more where an
            image has more.

    Raises:
        ValueError: If the network has other classes than the data; in the first batch, if it has masks and they none.

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
        super().__init__()
        # The network itself would be pickled into every checkpoint, and run on loading.
        self.save_hyperparameters(ignore=["network"])
        self.network = network
        self.measures: MeanAveragePrecision | None = None
        # Trainer.fit leaves modules in the modes it finds them in; saved networks come in eval mode.
        self.train()

    def forward(
        self, images: Sequence[Float[Tensor, "3 h w"]], targets: Sequence[Mapping[str, Tensor]] | None = None
    ) -> Any:
        """Return the losses in training, and otherwise what is found in each image."""
        # Under bf16-true and 64-true the weights are not float32; under autocast they are.
        dtype = next((weight.dtype for weight in self.network.parameters()), torch.float32)
        images = [image.to(dtype) for image in images]
        return self.network(images) if targets is None else self.network(images, targets)

    def on_fit_start(self) -> None:
        """Refuse a network of other classes than the data."""
        own, classes = getattr(self.network, "num_classes", None), self.classes
        if classes and own not in (None, len(classes)):
            raise ValueError(
                f"Detect: the network has {own} classes and the data {len(classes)}; fix: build it with "
                f"num_classes={len(classes)} (--model.network.num_classes {len(classes)})."
            )

    on_validation_start = on_test_start = on_predict_start = on_fit_start

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return the sum of the losses of a batch."""
        images, targets = batch
        if batch_idx == 0 and "masks" not in targets[0] and gives_masks(self.network):
            raise ValueError(
                "Detect: the network is trained on masks and the data have boxes alone; fix: a network without masks, "
                "--model.network faster_rcnn."
            )
        losses = self(images, targets)
        loss = torch.stack(list(losses.values())).sum()
        self.log("train/loss", loss, prog_bar=True, on_step=True, on_epoch=True, batch_size=len(images))
        self.log_dict({f"train/{name}": value for name, value in losses.items()}, batch_size=len(images))
        self.log("learning_rate", self.trainer.optimizers[0].param_groups[0]["lr"])
        return loss

    def on_validation_epoch_start(self) -> None:
        """Begin a new measurement."""
        self.measures = None

    on_test_epoch_start = on_validation_epoch_start

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Compare what is found in validation images with what is there."""
        self._evaluate(batch)

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        """Compare what is found in test images with what is there."""
        self._evaluate(batch)

    def on_validation_epoch_end(self) -> None:
        """Log the average precision over all images."""
        values = {name: value for name, value in self._measure().items() if name.partition("_")[2] in BRIEF}
        self.log_dict({f"val/{name}": value for name, value in values.items()}, prog_bar=True)

    def on_test_epoch_end(self) -> None:
        """Log the average precision over all images, also by size and by class."""
        self.log_dict({f"test/{name}": value for name, value in self._measure().items()})

    def predict_step(self, batch: tuple[list[Tensor], list[str], list[str], list[int]], batch_idx: int) -> Detected:
        """Return what is found in the images, as COCO's results."""
        images, paths, names, numbers = batch
        return Detected(paths, names, numbers, [entries_of(found) for found in self(images)])

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """Return SGD on what is trained, the warm-up, a step a step, and the milestones, an epoch a step."""
        settings = self.hparams
        optimizer = torch.optim.SGD(
            [weight for weight in self.network.parameters() if weight.requires_grad],
            lr=self.rate(),
            momentum=settings["momentum"],
            weight_decay=settings["weight_decay"],
        )
        schedules: list[Any] = [MultiStepLR(optimizer, list(settings["milestones"]))]
        if settings["warmup"]:
            warmup = LinearLR(optimizer, WARM, total_iters=settings["warmup"])
            schedules.append({"scheduler": warmup, "interval": "step"})
        return [optimizer], schedules

    def rate(self) -> float:
        """The learning rate: as it is given, or that of an image times the images of a step."""
        settings, trainer = self.hparams, self.trainer
        if settings["learning_rate"] is not None:
            return settings["learning_rate"]
        # This makes the trainer load its loaders.
        _ = trainer.estimated_stepping_batches
        size = getattr(trainer.train_dataloader, "batch_size", None)
        if size is None:
            raise ValueError("Detect: the data's loader has no batch size; fix: --model.learning_rate.")
        return settings["lr_per_image"] * size * trainer.world_size * trainer.accumulate_grad_batches

    def configure_callbacks(self) -> list[Callback]:
        """Return what makes an epoch depend on the seed and its number alone."""
        return [Replay()]

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Refuse the checkpoint of another network, naming what differs."""
        check_same_network(self.state_dict(), checkpoint["state_dict"])

    @property
    def classes(self) -> list[str]:
        """The data's classes, where there are data that name them."""
        return getattr(getattr(self._trainer, "datamodule", None), "classes", None) or []

    def _evaluate(self, batch: Batch) -> None:
        images, targets = batch
        found = [dict(each) for each in self(images)]
        masks = "masks" in found[0] and "masks" in targets[0]
        if self.measures is None:
            self.measures = measures_of(masks, self.hparams["max_detections"]).to(self.device)
        if masks:
            for each in found:
                each["masks"] = solid(each["masks"])
        self.measures.update(found, targets)

    def _measure(self) -> dict[str, float]:
        """Return each average precision by its name, `box_ap50` or `mask_ap/nucleus`; none before the first image."""
        return {} if self.measures is None else precisions(self.measures.compute(), self.classes)


def gives_masks(network: nn.Module) -> bool:
    """Whether a network has the mask head of torchvision's detectors."""
    return any(getattr(module, "mask_head", None) is not None for module in network.modules())


def measures_of(masks: bool, max_detections: int) -> MeanAveragePrecision:
    """Build COCO's average precision of boxes, and of masks."""
    # Its own mean is that of 100 objects and -1 for any other number; `precisions` takes the mean for the last number.
    measures = MeanAveragePrecision(
        iou_type=("bbox", "segm") if masks else "bbox",
        max_detection_thresholds=[max_detections] * 3,
        extended_summary=True,
        backend="pycocotools",
    )
    measures.warn_on_many_detections = False
    return measures


def precisions(computed: Mapping[str, Any], classes: Sequence[str] = ()) -> dict[str, float]:
    """Take the means that COCO reports, and those of each class, from its precisions.

    Args:
        computed: `precision`, or `bbox_precision` and `segm_precision` (overlaps, recalls, classes, areas, limits), and
            `classes`, the labels that occur.
        classes: Names of the labels from 1.

    Returns:
        Name -> average precision, -1 where there is nothing to find.
    """
    found: dict[str, float] = {}
    for key, name in KINDS.items():
        if key not in computed:
            continue
        # Objects of all sizes come first, and so do overlaps of 0.50, with 0.75 five further.
        values = computed[key][..., -1]
        found |= {f"{name}_ap": mean_of(values[..., 0])}
        found |= {f"{name}_ap50": mean_of(values[0, ..., 0]), f"{name}_ap75": mean_of(values[5, ..., 0])}
        found |= {f"{name}_ap_{area}": mean_of(values[..., place]) for place, area in enumerate(AREAS) if place}
        for place, label in enumerate(computed["classes"].reshape(-1).tolist()):
            if classes:
                found[f"{name}_ap/{classes[label - 1]}"] = mean_of(values[:, :, place, 0])
    return found


def mean_of(values: Tensor) -> float:
    """Mean of the precisions that there are; COCO writes -1 where there is nothing to find."""
    there = values[values > -1]
    return float(there.mean()) if len(there) else -1.0


def solid(masks: Float[Tensor, "objects 1 h w"]) -> Tensor:
    """Masks of ones and zeros: where an object is likelier than not."""
    return (masks[:, 0] > 0.5).to(torch.uint8)


def entries_of(found: Mapping[str, Tensor]) -> list[dict[str, Any]]:
    """Write what was found in an image as entries of COCO's results, with labels in the place of category ids."""
    corners = found["boxes"].double().cpu()
    boxes = torch.cat([corners[:, :2], corners[:, 2:] - corners[:, :2]], 1).tolist()
    labels, scores = found["labels"].tolist(), found["scores"].double().tolist()
    entries: list[dict[str, Any]] = [
        {"bbox": box, "score": score, "label": label} for box, score, label in zip(boxes, scores, labels, strict=True)
    ]
    if "masks" in found:
        for entry, mask in zip(entries, solid(found["masks"]).cpu().numpy(), strict=True):
            rle = coco.encode(np.asfortranarray(mask))
            entry["segmentation"] = {"size": list(rle["size"]), "counts": rle["counts"].decode("ascii")}
    return entries
