"""Output of `farfield predict` for classification, a CSV file, and segmentation, a folder; the base of all folders."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import BasePredictionWriter
from PIL import Image

from farfield._files import OwnedFolder
from farfield._outputs import check_not_input, output_path
from farfield._refusals import door
from farfield_papers.tasks.checkpoints import written
from farfield_papers.tasks.classify import Predicted
from farfield_papers.tasks.segment import Segmented


class PredictionFile(BasePredictionWriter):
    """Write the predictions of all processes to one file; None is the file `default` in `default_root_dir`."""

    default: str

    def __init__(self, path: str | None = None) -> None:
        super().__init__(write_interval="epoch")
        self.path = path

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Refuse a file that is one of the inputs."""
        with door("farfield predict"):
            check_not_input(self.place(trainer), list_inputs(trainer))

    def place(self, trainer: Trainer) -> Path:
        """Return the path of the file."""
        return Path(self.path or Path(trainer.default_root_dir) / self.default)


class PredictionTable(PredictionFile):
    """Write the predictions of `Classify` to a CSV file with the columns path, class and probability.

    Args:
        path: The file; None writes `predictions.csv` into the trainer's `default_root_dir`.
    """

    default = "predictions.csv"

    def write_on_epoch_end(
        self, trainer: Trainer, pl_module: LightningModule, predictions: Sequence[Any], batch_indices: Sequence[Any]
    ) -> None:
        """Gather the rows of all processes and write them, sorted by path; an image predicted twice is written once."""
        classes = getattr(trainer.datamodule, "classes", None) or []  # type: ignore[attr-defined]
        rows = {row[0]: row for predicted in predictions for row in _list_rows(predicted, classes)}
        rows = {name: row for part in gather_parts(trainer, rows) for name, row in part.items()}
        if trainer.is_global_zero:
            text = io.StringIO()
            table = csv.writer(text)
            table.writerow(("path", "class", "probability"))
            table.writerows(rows[name] for name in sorted(rows))
            with written(self.place(trainer)) as file:
                file.write(text.getvalue().encode())


def _list_rows(predicted: Predicted, classes: Sequence[str]) -> list[tuple[str, str, str]]:
    names = [classes[index] if classes else str(index) for index in predicted.classes.tolist()]
    chances = [f"{probability:.6f}" for probability in predicted.probabilities.tolist()]
    return list(zip(predicted.names, names, chances, strict=True))


class PredictionFolder(BasePredictionWriter):
    """Write predictions to a folder, which appears when all are written, batch by batch.

    Args:
        path: The folder; None writes `predictions` into the trainer's `default_root_dir`.
    """

    def __init__(self, path: str | None = None) -> None:
        super().__init__(write_interval="batch")
        self.path = path
        self.growing: OwnedFolder | None = None
        # Output file -> the image it belongs to.
        self.sources: dict[Path, str] = {}

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Refuse a path that is not a new or empty folder, and remove the files of an interrupted prediction."""
        place, self.sources = self.place(trainer), {}
        # A link is refused too: a folder cannot replace it, which would fail only after all predictions.
        if os.path.lexists(place) and (place.is_symlink() or not place.is_dir() or any(place.iterdir())):
            raise FileExistsError(
                f"farfield predict: {place} exists and nothing in it is overwritten; "
                "fix: remove it, or name another by --predictions.path."
            )
        if trainer.is_global_zero:
            place.parent.mkdir(parents=True, exist_ok=True)
            # It has a hidden name until then, so that an interrupted prediction is never taken for a finished one.
            self.growing = OwnedFolder(hide_path(place), place)
            with door("farfield predict"):
                self.growing.hold()
                self.growing.empty()
        trainer.strategy.barrier()

    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Move the folder to its final name."""
        trainer.strategy.barrier()
        if self.growing is not None:
            with door("farfield predict"):
                self.growing.become_target()
        self.let_go()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Release the lock on the folder."""
        self.let_go()

    def let_go(self) -> None:
        """Release the lock on the folder, in the process that holds it."""
        if self.growing is not None:
            self.growing.let_go()
        self.growing = None

    def place(self, trainer: Trainer) -> Path:
        """Return the path of the folder."""
        return Path(self.path or Path(trainer.default_root_dir) / "predictions")

    def output(
        self, trainer: Trainer, kind: str, source: str, name: str, suffix: str, number: int | None = None
    ) -> Path:
        """Return the path for the image at `source` in the folder `kind`; refuse another image's. See `output_path`."""
        path = output_path(hide_path(self.place(trainer)) / kind, name, suffix, number)
        other = self.sources.setdefault(path, source)
        if other != source:
            raise FileExistsError(
                f"farfield predict: {other} and {source} would both be written to {path}; fix: rename one."
            )
        return path


class MaskFolder(PredictionFolder):
    """Write the predictions of `Segment`: `masks/<name>.png` with VOC's palette, and `overlays/<name>.jpg`."""

    def write_on_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, prediction: Segmented, *rest: Any
    ) -> None:
        """Write the mask and the overlay of each image."""
        for path, name, labels in zip(*prediction, strict=True):
            mask = Image.fromarray(labels.numpy())
            mask.putpalette(PALETTE)
            with Image.open(path) as image:
                overlay = Image.blend(image.convert("RGB"), mask.convert("RGB"), 0.5)
            with written(self.output(trainer, "masks", path, name, ".png")) as file:
                mask.save(file, "PNG")
            with written(self.output(trainer, "overlays", path, name, ".jpg")) as file:
                overlay.save(file, "JPEG", quality=90)


def list_inputs(trainer: Trainer) -> list[Path]:
    """Return the input files of a prediction, if the data module lists them."""
    inputs: Callable[[], list[Path]] = getattr(getattr(trainer, "datamodule", None), "inputs", list)
    return inputs()


def gather_parts(trainer: Trainer, own: Any) -> list[Any]:
    """Return this object of every process, in their order."""
    if trainer.world_size == 1:
        return [own]
    parts: list[Any] = [None] * trainer.world_size
    torch.distributed.all_gather_object(parts, own)
    return parts


def hide_path(place: Path) -> Path:
    """Return the hidden path at which a folder is written until it is complete."""
    return place.with_name(f".{place.name}.partial")


def _voc_palette() -> list[int]:
    # Bits 0, 3 and 6 of a label are the highest of red; bits 1, 4 and 7 those of green, bits 2, 5 and 8 those of blue.
    return [
        sum(((label >> (3 * bit + channel)) & 1) << (7 - bit) for bit in range(3))
        for label in range(256)
        for channel in range(3)
    ]


PALETTE = _voc_palette()
