"""The folder of a run, and its CSV log, which a resumed run continues."""

from __future__ import annotations

import csv
import warnings
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.loggers.csv_logs import ExperimentWriter
from lightning.pytorch.loggers.logger import rank_zero_experiment


class RunLog(CSVLogger):
    """Lightning's CSV logger with a fixed folder; it keeps the rows of a resumed run up to its checkpoint."""

    def __init__(self, folder: Path, resumed_at: int | None = None) -> None:
        super().__init__(str(folder.parent), name="", version=number(folder))
        self.kept: list[dict[str, Any]] = []
        table = folder / ExperimentWriter.NAME_METRICS_FILE
        # Steps of the optimiser in the checkpoint; the epoch of later ones runs again.
        if resumed_at is not None and table.is_file():
            with table.open(newline="") as file:
                self.kept = [row for row in csv.DictReader(file) if int(row["step"]) < resumed_at]

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        """The writer, which starts with the kept rows."""
        if self._experiment is None:
            with warnings.catch_warnings():
                # Lightning warns that the folder is not empty; here the file is written again with the kept rows.
                warnings.filterwarnings("ignore", message="Experiment logs directory")
                writer = super().experiment
            writer.metrics = self.kept
            writer.save()
        return self._experiment


def number(folder: Path) -> int:
    """Return the number of a run's folder, 3 for `version_3`; -1 for other names."""
    digits = folder.name.removeprefix("version_")
    return int(digits) if digits.isdigit() else -1


def newest_run(root: Path, file: str) -> Path | None:
    """Return the folder of the newest run in `root` that has the given file; None if none has it."""
    runs = sorted(root.glob("version_*"), key=number, reverse=True)
    return next((run for run in runs if (run / file).is_file()), None)


def next_run(root: Path) -> Path:
    """Return the path of the folder of the next run in `root`, without creating it."""
    return root / f"version_{max((number(run) for run in root.glob('version_*')), default=-1) + 1}"
