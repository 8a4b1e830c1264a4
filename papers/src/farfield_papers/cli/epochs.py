"""What a training prints: a line at its start, a line an epoch, and on a terminal a bar within the epoch."""

from __future__ import annotations

import logging
import os
import sys
import time
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import TQDMProgressBar
from torch import Tensor

# Beginnings of Lightning's messages that do not concern the run: adverts, devices that are not there, how it works.
_UNRELATED = (
    "💡",
    "TPU available",
    "HPU available",
    "GPU available: False",
    "Loading `",
    "Seed set to",
    "`Trainer.fit` stopped",
    "Restoring states from the checkpoint path",
    "Loaded model weights from the checkpoint",
)


class EpochLines(TQDMProgressBar):
    """Print a line at the start of a training and one an epoch, and on a terminal a bar within the epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.started = 0.0

    @property
    def is_enabled(self) -> bool:
        """Whether there are bars: on a terminal."""
        return super().is_enabled and sys.stdout.isatty()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Print the network, the batches, the device and the folder of the run."""
        super().on_train_start(trainer, pl_module)
        network = getattr(pl_module, "network", pl_module)
        name = getattr(network, "name", type(network).__name__)
        parameters = sum(parameter.numel() for parameter in pl_module.parameters())
        self._say(
            f"farfield fit: {name}, {parameters:,} parameters; {_number_of_epochs(trainer)} of "
            f"{trainer.num_training_batches:,} batches; {_describe_device(trainer)}; "
            f"seed {os.environ.get('PL_GLOBAL_SEED', 'not set')}; {trainer.log_dir or 'nothing is saved'}"
        )

    def on_train_epoch_start(self, trainer: Trainer, *arguments: Any) -> None:
        super().on_train_epoch_start(trainer, *arguments)
        self.started = time.monotonic()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_epoch_end(trainer, pl_module)
        if self._train_progress_bar is not None:
            self._train_progress_bar.leave = False
            self._train_progress_bar.close()
        most = f" of {trainer.max_epochs}" if (trainer.max_epochs or -1) > 0 else ""
        took = duration(time.monotonic() - self.started)
        self._say(f"epoch {trainer.current_epoch + 1}{most} ({took}): {metrics_text(trainer)}")

    def _say(self, line: str) -> None:
        if self._enabled:
            print(line, flush=True)


def metrics_text(trainer: Trainer) -> str:
    """Return the metrics of an epoch or an evaluation with four digits, as text."""
    return ", ".join(f"{name} {value:.4g}" for name, value in metrics_of_epoch(trainer.callback_metrics).items())


def metrics_of_epoch(metrics: dict[str, Tensor]) -> dict[str, float]:
    """Return the metrics of an epoch without those of its last step: training first, other than tasks' metrics last."""
    own = {name: value for name, value in metrics.items() if not name.endswith(("_step", "_epoch"))}
    ordered = sorted(own, key=lambda name: ("/" not in name, not name.startswith("train/"), name))
    return {name: float(own[name]) for name in ordered}


def _number_of_epochs(trainer: Trainer) -> str:
    """Return the number of epochs as text, those of a resumed run as "epochs 4 to 15"."""
    last = trainer.max_epochs
    if last is None or last < 0:
        return "epochs"
    if trainer.current_epoch:
        return f"epochs {trainer.current_epoch + 1} to {last}"
    return f"{last} epoch{'s' * (last != 1)}"


def _describe_device(trainer: Trainer) -> str:
    """Return the device as text, for a CPU with the number of threads, for several devices with their number."""
    device = trainer.strategy.root_device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    number = torch.get_num_threads()
    threads = f", {number} thread{'s' * (number != 1)}" if device.type == "cpu" else ""
    return f"{name}{threads}" if trainer.world_size == 1 else f"{trainer.world_size} × {name}{threads}"


def duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02} min" if minutes < 60 else f"{minutes // 60}:{minutes % 60:02}:{rest:02} h"


def is_related(record: logging.LogRecord) -> bool:
    """Return whether a message of Lightning concerns the run, see `_UNRELATED`."""
    return not record.getMessage().startswith(_UNRELATED)


def leave_out_unrelated() -> None:
    """Leave unrelated messages of Lightning out of this process's output."""
    for name in ("lightning.pytorch.utilities.rank_zero", "lightning.fabric.utilities.seed"):
        logging.getLogger(name).addFilter(is_related)
