"""Reproducible epochs: torch's random numbers in an epoch depend only on the seed, the epoch and the process."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer


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
