"""The base class of the tasks: what all of them do alike, with batches, checkpoints and the classes of the data."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, LightningModule
from torch import Tensor, nn

from farfield.tasks.checkpoints import check_same_network
from farfield.tasks.replay import Replay


class TrainingTask(LightningModule):
    """Train and evaluate a network; `_evaluate` gets validation and test batches, `_measure` logs after them."""

    # Names of arguments that a checkpoint does not hold.
    not_saved: tuple[str, ...] = ()

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        # Without `ignore` the network would be pickled into every checkpoint, and loading would execute its code.
        self.save_hyperparameters(ignore=["network", *self.not_saved])
        self.network: Any = network

    @property
    def classes(self) -> list[str]:
        """Names of the data's classes; empty if there are none."""
        return getattr(getattr(self._trainer, "datamodule", None), "classes", None) or []

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

    def _reset(self) -> None:
        """Reset what `_evaluate` sums up over an epoch; by default there is nothing."""

    def _measure(self, stage: str) -> None:
        """Log what `_evaluate` has summed up over an epoch; by default there is nothing."""

    def _as_weights(self, grid: Tensor) -> Tensor:
        # Under bf16-true and 64-true the weights are not float32; under autocast they are.
        return grid.to(next((weight.dtype for weight in self.network.parameters()), grid.dtype))

    def _log_loss(self, loss: Tensor, size: int) -> None:
        self.log("train/loss", loss, prog_bar=True, on_step=True, on_epoch=True, batch_size=size)

    def _log_rate(self) -> None:
        self.log("learning_rate", self.trainer.optimizers[0].param_groups[0]["lr"])
