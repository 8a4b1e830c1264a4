"""The CSV file of `farfield predict`: path, class, probability."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import BasePredictionWriter

from farfield.tasks.checkpoints import written
from farfield.tasks.classify import Predicted


class PredictionTable(BasePredictionWriter):
    """Write the predictions of `Classify` to a CSV file with the columns path, class and probability.

    Args:
        path: The file; None writes `predictions.csv` into the trainer's `default_root_dir`.
    """

    def __init__(self, path: str | None = None) -> None:
        super().__init__(write_interval="epoch")
        self.path = path

    def write_on_epoch_end(
        self, trainer: Trainer, pl_module: LightningModule, predictions: Sequence[Any], batch_indices: Sequence[Any]
    ) -> None:
        """Gather the rows of all processes and write them, sorted by path; an image read twice is written once."""
        classes = getattr(trainer.datamodule, "classes", None) or []  # type: ignore[attr-defined]
        rows = {row[0]: row for predicted in predictions for row in _rows(predicted, classes)}
        if trainer.world_size > 1:
            gathered: list[Any] = [None] * trainer.world_size
            torch.distributed.all_gather_object(gathered, rows)
            rows = {name: row for part in gathered for name, row in part.items()}
        if trainer.is_global_zero:
            text = io.StringIO()
            table = csv.writer(text)
            table.writerow(("path", "class", "probability"))
            table.writerows(rows[name] for name in sorted(rows))
            with written(self.place(trainer)) as file:
                file.write(text.getvalue().encode())

    def place(self, trainer: Trainer) -> Path:
        """Return the path of the file."""
        return Path(self.path or Path(trainer.default_root_dir) / "predictions.csv")


def _rows(predicted: Predicted, classes: Sequence[str]) -> list[tuple[str, str, str]]:
    names = [classes[index] if classes else str(index) for index in predicted.classes.tolist()]
    chances = [f"{probability:.6f}" for probability in predicted.probabilities.tolist()]
    return list(zip(predicted.names, names, chances, strict=True))
