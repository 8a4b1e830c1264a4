"""The folder of a run, and its CSV log, which a resumed run goes on with."""

from __future__ import annotations

import csv
import warnings
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.loggers.csv_logs import ExperimentWriter
from lightning.pytorch.loggers.logger import rank_zero_experiment


class RunLog(CSVLogger):
    """Lightning's CSV logger on a fixed folder; it keeps the rows of the run it resumes, up to its checkpoint.

    Args:
        folder: Where `metrics.csv` lies.
        resumed_at: Optimiser steps in the checkpoint that the run goes on from; rows of later steps are dropped, as
            their epoch is played again. None starts the file over.
    """

    def __init__(self, folder: Path, resumed_at: int | None = None) -> None:
        super().__init__(str(folder.parent), name="", version=number(folder))
        self.kept: list[dict[str, Any]] = []
        table = folder / ExperimentWriter.NAME_METRICS_FILE
        if resumed_at is not None and table.is_file():
            with table.open(newline="") as file:
                self.kept = [row for row in csv.DictReader(file) if int(row["step"]) < resumed_at]

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        """The writer, which starts with the rows that were kept."""
        if self._experiment is None:
            with warnings.catch_warnings():
                # What Lightning warns of is what is wanted: the file is written again, with the rows that were kept.
                warnings.filterwarnings("ignore", message="Experiment logs directory")
                writer = super().experiment
            writer.metrics = self.kept
            writer.save()
        return self._experiment


def number(folder: Path) -> int:
    """Return the number of a run's folder `version_3`, or -1.

    Example:
        >>> number(Path("runs/digits/version_3"))
        3
    """
    digits = folder.name.removeprefix("version_")
    return int(digits) if digits.isdigit() else -1


def newest_run(root: Path, file: str) -> Path | None:
    """Return the newest run in a folder that has a certain file."""
    runs = sorted(root.glob("version_*"), key=number, reverse=True)
    return next((run for run in runs if (run / file).is_file()), None)


def next_run(root: Path) -> Path:
    """Return the first run that is not there yet."""
    return root / f"version_{max((number(run) for run in root.glob('version_*')), default=-1) + 1}"
