"""Segmentation of images: the loss on the grid of logits, DeepLab's learning rates, and mean IoU."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.lr_scheduler import LambdaLR
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassJaccardIndex

from farfield._checks import unknown
from farfield._refusals import put_name
from farfield_papers.tasks.classify import decayed_parameters
from farfield_papers.tasks.training_task import TrainingTask

# The label of pixels that the loss and the measures ignore.
_VOID = 255


class Segmented(NamedTuple):
    """Result of `predict_step` for a batch: paths and names of the images, the labels of their pixels."""

    paths: list[str]
    names: list[str]
    labels: list[Tensor]


class Segment(TrainingTask):
    """Train a network that computes one logit per class for each position; defaults are the settings of DeepLab.

    `rate_t = learning_rate · (1 - t / steps)^power`

    SGD with momentum; the learning rate falls at every step. It is multiplied by `head_rate` for the weights of the
    output layer and by `bias_rate` for its biases. Weight decay acts on the weights of convolutions and linear layers
    alone. Logits are smaller than the image, for DeepLab an eighth of its height and width. In training the labels are
    reduced to the size of the logits (but see `upsample_logits`); in evaluation the logits are interpolated bilinearly
    to the size of the labels. Pixel accuracy and mean IoU, the mean over classes of intersection over union, are
    computed from one confusion matrix of all images. Logged: `train/loss`, `val/loss`, `val/accuracy`, `val/miou`, the
    same for `test`, `test/iou/<class>` and `learning_rate`.

    Args:
        network: Any module from images `(batch, 3, height, width)` to logits `(batch, classes, y, x)`.
        learning_rate: Learning rate of the first step.
        power: Exponent of the schedule.
        momentum: Momentum of SGD.
        weight_decay: L2 penalty of the weights of convolutions and linear layers.
        head: Name of the network's output layer, a module with higher learning rates.
        head_rate: Factor of the learning rate of the output layer's weights.
        bias_rate: Factor of the learning rate of the output layer's biases.
        freeze_norms: Whether batch norms keep their statistics, weights and biases. True is for pretrained networks
            only: a network with random weights has to train its norms.
        upsample_logits: Whether training interpolates logits to the size of the labels, instead of reducing the labels.

    Raises:
        LookupError: If the network has no module `head`.
        ShapeError: In the first batch, if the network does not return one logit for each class of the data.

    Reference:
        KAN §4.1; Chen et al. 2017

    Example:
        >>> from collections import OrderedDict
        >>> network = nn.Sequential(OrderedDict(body=nn.AvgPool2d(8), head=nn.Conv2d(3, 4, 1)))
        >>> Segment(network)(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 4, 4, 4])
    """

    def __init__(
        self,
        network: nn.Module,
        *,
        learning_rate: float = 2.5e-4,
        power: float = 0.9,
        momentum: float = 0.9,
        weight_decay: float = 5e-4,
        head: str = "head",
        head_rate: float = 10.0,
        bias_rate: float = 20.0,
        freeze_norms: bool = True,
        upsample_logits: bool = False,
    ) -> None:
        super().__init__(network)
        if head not in dict(network.named_modules()):
            raise put_name(
                "Segment", unknown(f"module of {type(network).__name__}", head, dict(network.named_children()))
            )
        if freeze_norms:
            for norm in _list_norms(network):
                norm.requires_grad_(False)

    def forward(self, images: Float[Tensor, "b 3 h w"]) -> Float[Tensor, "b classes y x"]:
        """Return the logits of all classes at each position."""
        return self._run(images)

    def train(self, mode: bool = True) -> Segment:
        """Set training or eval mode; frozen norms stay in eval mode."""
        super().train(mode)
        if self.hparams["freeze_norms"]:
            for norm in _list_norms(self.network):
                norm.eval()
        return self

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Return the loss of a batch."""
        loss = self._train_on(*batch)
        self._log_rate()
        return loss

    def predict_step(self, batch: tuple[Tensor, list[str], list[str], Tensor], batch_idx: int) -> Segmented:
        """Return the likeliest class of each pixel, in the original size of each image."""
        images, paths, names, size = batch
        logits = self(images).float()
        labels = [
            functional.interpolate(each[None], tuple(own), mode="bilinear")[0].argmax(0).to(torch.uint8).cpu()
            for each, own in zip(logits, size.tolist(), strict=True)
        ]
        return Segmented(list(paths), list(names), labels)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """Return SGD on `parameter_groups`, and its schedule per step."""
        settings = self.hparams
        optimizer = self._build_sgd(self.parameter_groups(), settings["learning_rate"])
        steps, power = self.trainer.estimated_stepping_batches, settings["power"]
        schedule = LambdaLR(optimizer, lambda step: max(0.0, 1 - step / steps) ** power)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def parameter_groups(self) -> list[dict[str, Any]]:
        """Group the trained parameters by learning rate and weight decay, without empty groups."""
        settings, base = self.hparams, self.hparams["learning_rate"]
        decayed = {id(weight) for weight in decayed_parameters(self.network, "weights and depthwise")}
        prefix = settings["head"] + "."
        groups: dict[tuple[float, bool], list[nn.Parameter]] = {}
        for name, parameter in self.network.named_parameters():
            rate = 1.0
            if name.startswith(prefix):
                rate = settings["bias_rate"] if name.endswith("bias") else settings["head_rate"]
            if parameter.requires_grad:
                groups.setdefault((rate, id(parameter) in decayed), []).append(parameter)
        return [
            {"params": parameters, "lr": base * rate} | ({} if decays else {"weight_decay": 0.0})
            for (rate, decays), parameters in groups.items()
        ]

    def _compute_loss(self, output: Tensor, grid: Tensor, target: Tensor) -> Tensor:
        self._check_logits(grid, output)
        if self.hparams["upsample_logits"]:
            output = functional.interpolate(output, target.shape[1:], mode="bilinear")
        else:
            target = reduce_labels(target, output)
        return compute_pixel_loss(output, target)

    def _check_logits(self, images: Tensor, logits: Tensor) -> None:
        fix = "a network without global pooling, whose output is (batch, classes, height, width)."
        self._check_outputs("return one logit for {} per position", fix, 4, images=images, logits=logits)

    def _evaluate(self, stage: str, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        images, labels = batch
        logits = self(images)
        self._check_logits(images, logits)
        logits = functional.interpolate(logits.float(), labels.shape[1:], mode="bilinear")
        self.log(
            f"{stage}/loss", compute_pixel_loss(logits, labels), on_epoch=True, sync_dist=True, batch_size=len(images)
        )
        if self.measures is None:
            self.measures = build_pixel_measures(logits.shape[1]).to(self.device)
        self.measures.update(logits.argmax(1), labels)

    def _measure(self, stage: str) -> None:
        if self.measures is None:
            return
        values = self.measures.compute()
        each = values.pop("iou")
        self.log_dict({f"{stage}/{name}": value for name, value in values.items()}, prog_bar=True)
        if stage == "test" and self.classes:
            self.log_dict({f"test/iou/{name}": value for name, value in zip(self.classes, each, strict=True)})


def build_pixel_measures(classes: int) -> MetricCollection:
    """Build pixel accuracy, mean IoU and IoU per class from one confusion matrix; void pixels are ignored."""
    return MetricCollection(
        {
            "accuracy": MulticlassAccuracy(classes, average="micro", ignore_index=_VOID, validate_args=False),
            "miou": MulticlassJaccardIndex(classes, ignore_index=_VOID, validate_args=False),
            "iou": MulticlassJaccardIndex(classes, average=None, ignore_index=_VOID, validate_args=False),
        }
    )


def _list_norms(network: nn.Module) -> list[nn.Module]:
    # Those of attention too.
    return [module for module in network.modules() if getattr(module, "running_mean", None) is not None]


def compute_pixel_loss(logits: Float[Tensor, "b classes h w"], labels: Int[Tensor, "b h w"]) -> Float[Tensor, ""]:
    """Return the cross-entropy, averaged over the pixels that are not void; 0 if all pixels are void."""
    total = functional.cross_entropy(logits, labels, ignore_index=_VOID, reduction="sum")
    return total / (labels != _VOID).sum().clamp(min=1)


def reduce_labels(labels: Int[Tensor, "b h w"], logits: Float[Tensor, "b classes y x"]) -> Int[Tensor, "b y x"]:
    """Reduce labels to the size of logits, by nearest neighbour: each position has the label at its centre."""
    small = functional.interpolate(labels[:, None].float(), logits.shape[2:], mode="nearest-exact")
    return small[:, 0].to(labels.dtype)
