"""The base class of the tasks: what all of them do alike, with batches, checkpoints and the classes of the data."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.optim import SGD

from farfield._checks import check_network, shape_error
from farfield._refusals import door, put_name, refusal
from farfield_papers.tasks.checkpoints import check_same_network
from farfield_papers.tasks.whole_grids import WholeGrids, check_whole


class TrainingTask(LightningModule):
    """Train and evaluate a network; `_evaluate` gets validation and test batches, `_measure` logs after them."""

    # Names of arguments that a checkpoint does not hold.
    not_saved: tuple[str, ...] = ()
    # Size of the tiles of whole grids.
    tile: Any = None

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        with door(type(self).__name__):
            check_network(network, "network", f"{type(self).__name__}(network)")
        # Without `ignore` the network would be pickled into every checkpoint, and loading would execute its code.
        self.save_hyperparameters(ignore=["network", *self.not_saved])
        self.network: Any = network
        # What `_evaluate` sums up over an epoch: metrics of torchmetrics, made at the first batch.
        self.measures: Any = None
        # How the network runs on whole grids, where the data gives these.
        self.wholes: WholeGrids | None = None
        # Trainer.fit keeps the mode of every module, and loaded networks are in eval mode.
        self.train()

    @property
    def classes(self) -> list[str]:
        """Names of the data's classes; empty if there are none."""
        return getattr(getattr(self._trainer, "datamodule", None), "classes", None) or []

    def setup(self, stage: str) -> None:
        """Take whole grids in tiles, if the data gives whole ones: its attribute `whole` is True."""
        self.wholes = None
        if getattr(getattr(self._trainer, "datamodule", None), "whole", False) is True:
            with door(type(self).__name__):
                if type(self)._compute_loss is TrainingTask._compute_loss:
                    raise refusal(ValueError, "it does not run in tiles; fix: data without whole=True.")
                if stage == "fit":
                    check_whole(self.network)
                self.wholes = WholeGrids(self.network, self.tile, self._compute_loss)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Evaluate a validation batch."""
        self._evaluate("val", batch, batch_idx)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        """Evaluate a test batch."""
        self._evaluate("test", batch, batch_idx)

    def on_validation_epoch_start(self) -> None:
        """Reset the measures; tests begin alike."""
        self._reset()

    on_test_epoch_start = on_validation_epoch_start

    def on_validation_epoch_end(self) -> None:
        """Log the measures of all validation batches."""
        self._measure("val")

    def on_test_epoch_end(self) -> None:
        """Log the measures of all test batches."""
        self._measure("test")

    def configure_callbacks(self) -> list[Callback]:
        """Return `Replay`, which makes the random numbers of an epoch reproducible."""
        return [Replay()]

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Refuse the checkpoint of another network; the `CheckpointError` lists the differences."""
        check_same_network(self.state_dict(), checkpoint["state_dict"])

    def _evaluate(self, stage: str, batch: Any, batch_idx: int) -> None:
        raise NotImplementedError

    def _compute_loss(self, output: Tensor, grid: Tensor, target: Tensor) -> Tensor:
        """Return the loss of a batch in training; of whole grids it runs in tiles as the network does."""
        raise NotImplementedError

    def _run(self, grid: Tensor) -> Tensor:
        """Run the network."""
        grid = self._as_weights(grid)
        return self.network(grid) if self.wholes is None else self.wholes(grid)

    def _train_on(self, grid: Tensor, target: Tensor) -> Tensor:
        """Return the loss of a batch in training, and log it."""
        wholes = self.wholes
        loss = self._compute_loss(self(grid), grid, target) if wholes is None else wholes.train(grid, target)
        self._log_loss(loss, len(grid))
        return loss

    def _reset(self) -> None:
        self.measures = None

    def _measure(self, stage: str) -> None:
        """Log what `_evaluate` has summed up over an epoch; by default there is nothing."""

    def _check_outputs(self, what: str, fix: str, dims: int, **tensors: Tensor) -> None:
        """Refuse outputs, the last tensor, that do not have `dims` dims and a channel for each class of the data."""
        *_, outputs = tensors.values()
        number = len(self.classes)
        if outputs.ndim == dims:
            if number in (0, outputs.shape[1]):
                return
            fix = f"build it with num_classes={number} (--model.network.num_classes {number})."
        classes = f"each of the data's {number} classes" if number else "each class"
        problem = f"the network must {what.format(classes)}."
        raise put_name(type(self).__name__, shape_error(problem, fix, **tensors))

    def _as_weights(self, grid: Tensor) -> Tensor:
        # Under bf16-true and 64-true the weights are not float32; under autocast they are.
        return grid.to(next((weight.dtype for weight in self.network.parameters()), grid.dtype))

    def _build_sgd(self, parameters: Iterable[Any], rate: float) -> SGD:
        """Build SGD on parameters, or groups of them, with the momentum and the weight decay of the task."""
        names = ("momentum", "nesterov", "weight_decay")
        return SGD(parameters, rate, **{name: self.hparams[name] for name in names if name in self.hparams})

    def _check_loss(self, loss: Tensor) -> None:
        """Refuse a loss that is not finite, before a step from it makes all weights NaN."""
        # In float16 the scaler leaves such a step out.
        if getattr(self._trainer, "precision", None) != "16-mixed" and not bool(loss.isfinite()):
            problem = f"the loss is {loss.detach():.3g} in epoch {self.current_epoch}, step {self.global_step}"
            fix = "data of finite numbers, or a smaller learning_rate"
            raise ValueError(f"{type(self).__name__}: {problem}, and no step was taken from it; fix: {fix}.")

    def _log_loss(self, loss: Tensor, size: int) -> None:
        self._check_loss(loss)
        self.log("train/loss", loss, prog_bar=True, on_step=True, on_epoch=True, batch_size=size)

    def _log_rate(self) -> None:
        self.log("learning_rate", self.trainer.optimizers[0].param_groups[0]["lr"])


# A run killed in the middle of an epoch resumes at the start of that epoch and draws the same dropout masks again.
# From a checkpoint written in the middle of an epoch (every_n_train_steps) it does not, as its loader starts the epoch
# again.
class Replay(Callback):
    """Seed torch's random generators by (seed, epoch, process) before the first batch of every epoch."""

    def __init__(self) -> None:
        self.seed = int(os.environ.get("PL_GLOBAL_SEED", torch.initial_seed() % 2**32))

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Seed before the first batch, as the loader draws from the same generator after the start of the epoch."""
        if batch_idx == 0:
            mixed = np.random.SeedSequence((self.seed, trainer.current_epoch, trainer.global_rank))
            torch.manual_seed(int(mixed.generate_state(1, np.uint64)[0] >> np.uint64(1)))

    def state_dict(self) -> dict[str, Any]:
        """Return the seed, for the checkpoint."""
        return {"seed": self.seed}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the seed of the resumed run from its checkpoint."""
        self.seed = int(state_dict["seed"])
