"""Classification of images: the loss, the optimiser with the papers' schedule, and the measures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Float
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.types import LRSchedulerConfigType, OptimizerLRSchedulerConfig
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.conv import _ConvNd
from torch.optim import Optimizer
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    LinearLR,
    LRScheduler,
    MultiStepLR,
    OneCycleLR,
    SequentialLR,
)
from torchmetrics.functional.classification import multiclass_accuracy

from farfield_papers.tasks.training_task import TrainingTask

Decay = Literal["weights", "weights and depthwise", "all"]
Schedule = Literal["cosine", "one-cycle"]

# Momentum at the highest learning rate of the one-cycle schedule.
_LEAST_MOMENTUM = 0.85


class Predicted(NamedTuple):
    """Result of `predict_step` for a batch: image names, the index of the likeliest class of each, its probability."""

    names: list[str]
    classes: Tensor
    probabilities: Tensor


class Classify(TrainingTask):
    """Train a network that computes one score per class of an image; defaults are the settings of KAN and SAN.

    SGD with momentum; the learning rate is divided by ten after the epochs of `schedule`. Weight decay acts on weights
    of convolutions and linear layers and, by default, not on depthwise kernels, norms, biases and the weight vectors of
    attention, as in the code that the authors of the papers published. Logged: `train/loss`, `val/loss`,
    `val/accuracy`, `val/top5` if there are more than five classes, the same for `test`, and `learning_rate`.

    Args:
        network: Any module from images `(batch, 3, height, width)` to scores `(batch, classes)`.
        learning_rate: The highest learning rate: that of the first epoch, or that at the end of the warm-up.
        momentum: Momentum of SGD.
        nesterov: Whether SGD uses Nesterov momentum.
        weight_decay: L2 penalty of the parameters chosen by `decay`.
        decay: Parameters with weight decay: `"weights"` for the weights of convolutions (except depthwise ones) and
            linear layers, `"weights and depthwise"` to include depthwise kernels, or `"all"` parameters.
        schedule: Epochs after which the learning rate is divided by ten, or `"cosine"` for half a cosine over the whole
            training, or `"one-cycle"` (Smith and Topin 2018): the learning rate changes at every step, rises from a
            25th of `learning_rate` over `warmup_epochs`, then falls to about 0 by half a cosine, while the momentum
            falls to 0.85 and rises again.
        warmup_epochs: Epochs over which the learning rate rises at first, from a tenth of `learning_rate`, linearly;
            for `"one-cycle"` see there.
        label_smoothing: Share of the target distribution that is spread over all classes, in training only.
        channels_last: Whether images and weights have the channels-last memory format, which is faster on most
            processors.

    Attributes:
        mirrors: Whether scores in evaluation and prediction are means over an image and its mirror image. False; the
            callback `MirroredScores` sets it to True.

    Raises:
        ShapeError: In the first batch, if the network does not return one score per image for each class of the data.

    Reference:
        KAN §4.1, SAN Appendix

    Example:
        >>> module = Classify(nn.Sequential(nn.Flatten(), nn.Linear(12, 3)), learning_rate=0.05)
        >>> module(torch.zeros(2, 3, 2, 2)).shape
        torch.Size([2, 3])
    """

    def __init__(
        self,
        network: nn.Module,
        *,
        learning_rate: float = 0.1,
        momentum: float = 0.9,
        nesterov: bool = False,
        weight_decay: float = 4e-5,
        decay: Decay = "weights",
        schedule: list[int] | Schedule = [80, 105, 120],  # noqa: B006  A tuple would be no YAML list.
        warmup_epochs: int = 0,
        label_smoothing: float = 0.0,
        channels_last: bool = True,
    ) -> None:
        super().__init__(network)
        self.mirrors = False
        if channels_last:
            self.network.to(memory_format=torch.channels_last)

    def forward(self, images: Float[Tensor, "b 3 h w"]) -> Float[Tensor, "b classes"]:
        """Return the scores of all classes."""
        images = self._as_weights(images)
        if self.hparams["channels_last"]:
            images = images.contiguous(memory_format=torch.channels_last)
        return self.network(images)

    def on_train_epoch_start(self) -> None:
        """Log the learning rate of the epoch."""
        self._log_rate()

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Return the loss of a batch."""
        scores, labels = self._scores(batch, self)
        loss = functional.cross_entropy(scores, labels, label_smoothing=self.hparams["label_smoothing"])
        self._log_loss(loss, len(labels))
        return loss

    def predict_step(self, batch: tuple[Tensor, list[str]], batch_idx: int) -> Predicted:
        """Return the names of the images of a batch, and the likeliest class of each with its probability."""
        images, names = batch
        probabilities, classes = self._evaluation_scores(images).float().softmax(1).max(1)
        return Predicted(list(names), classes.cpu(), probabilities.cpu())

    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        """Return SGD on two groups of parameters, with and without weight decay, and its schedule."""
        settings = self.hparams
        decayed = set(decayed_parameters(self.network, settings["decay"]))
        trained = [parameter for parameter in self.network.parameters() if parameter.requires_grad]
        groups: list[dict[str, Any]] = [
            {"params": [parameter for parameter in trained if parameter in decayed]},
            {"params": [parameter for parameter in trained if parameter not in decayed], "weight_decay": 0.0},
        ]
        optimizer = self._build_sgd([group for group in groups if group["params"]], settings["learning_rate"])
        return {"optimizer": optimizer, "lr_scheduler": self._scheduler(optimizer)}

    def _evaluation_scores(self, images: Tensor) -> Tensor:
        scores: Tensor = self(images)
        return (scores + self(images.flip(-1))) / 2 if self.mirrors else scores

    def _scores(self, batch: tuple[Tensor, Tensor], score: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        images, labels = batch
        scores = score(images)
        fix = "end the network with global pooling and a linear layer, or flatten its output."
        self._check_outputs("give one score for {}", fix, 2, images=images, scores=scores)
        return scores, labels

    def _evaluate(self, stage: str, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        scores, labels = self._scores(batch, self._evaluation_scores)
        scores = scores.float()
        values = {"loss": functional.cross_entropy(scores, labels)}
        for name, number in (("accuracy", 1), ("top5", 5)):
            if number == 1 or number < scores.shape[1]:
                values[name] = multiclass_accuracy(scores, labels, scores.shape[1], average="micro", top_k=number)
        logged = {f"{stage}/{name}": value for name, value in values.items()}
        self.log_dict(logged, prog_bar=True, on_epoch=True, sync_dist=True, batch_size=len(labels))

    def _scheduler(self, optimizer: Optimizer) -> LRScheduler | LRSchedulerConfigType:
        schedule, warmup, rate = (self.hparams[name] for name in ("schedule", "warmup_epochs", "learning_rate"))
        epochs = self.trainer.max_epochs or 1
        main: LRScheduler
        if schedule == "one-cycle":
            momentum = self.hparams["momentum"]
            bounds = {"base_momentum": min(_LEAST_MOMENTUM, momentum), "max_momentum": momentum}
            steps = max(2, int(self.trainer.estimated_stepping_batches))
            # torch divides by (steps of the rise - 1) and by the steps of the fall.
            share = min(1 - 0.5 / steps, max(warmup / epochs, 1.5 / steps))
            cycle = OneCycleLR(optimizer, rate, steps, pct_start=share, **bounds)
            return {"scheduler": cycle, "interval": "step"}
        if schedule == "cosine":
            main = CosineAnnealingLR(optimizer, max(1, epochs - warmup))
        else:
            main = MultiStepLR(optimizer, [epoch - warmup for epoch in schedule], gamma=0.1)
        if not warmup:
            return main
        rising = LinearLR(optimizer, start_factor=0.1, total_iters=warmup)
        return SequentialLR(optimizer, [rising, main], milestones=[warmup])


class MirroredScores(Callback):
    """Evaluate and predict with the mean of the scores of an image and of its mirror image; needs `Classify`.

    This is a callback of the trainer and not an argument of `Classify`, because training does not depend on it:
    `--trainer.callbacks+ farfield_papers.tasks.classify.MirroredScores`. Evaluation takes twice as long.

    Raises:
        TypeError: At the start, if the task is not `Classify`.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> trainer = Trainer(logger=False, accelerator="cpu", callbacks=[MirroredScores()])
    """

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Set `mirrors` of the task."""
        if not isinstance(pl_module, Classify):
            name = type(pl_module).__name__
            raise TypeError(f"MirroredScores: {name} has no scores of images; fix: leave this callback out.")
        pl_module.mirrors = True


def decayed_parameters(network: nn.Module, decay: Decay) -> list[nn.Parameter]:
    """List the parameters with weight decay, see `Classify`, in the order of the network's modules."""
    if decay == "all":
        return list(network.parameters())
    decayed: list[nn.Parameter] = []
    for module in network.modules():
        depthwise = isinstance(module, _ConvNd) and 1 < module.groups == module.in_channels
        if isinstance(module, nn.Linear | _ConvNd) and (not depthwise or decay != "weights"):
            decayed += [weight for name, weight in module.named_parameters(recurse=False) if name == "weight"]
    return decayed
