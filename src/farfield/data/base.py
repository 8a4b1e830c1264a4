"""The base class of the data modules: loaders, and epochs that a resumed run repeats exactly."""

from __future__ import annotations

import difflib
import os
from pathlib import Path
from typing import Any, TypeVar

import torch
from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader, Dataset

from farfield.data.readers.images import FolderError, check_classes
from farfield.data.sampler import DrawnSamples, EpochSampler

Value = TypeVar("Value")


def read_entry(state: dict[str, Any], name: str, kind: type[Value], caller: str) -> Value:
    """Return the entry `name` of a data module's state in a checkpoint, which may be damaged or of other data.

    Raises:
        FolderError: If the entry is missing, or of another type than `kind`.
    """
    value = state.get(name)
    if not isinstance(value, kind):
        raise FolderError(
            f"{caller}: the checkpoint's {name} must be a {kind.__name__}, got {value!r:.100}; "
            f"fix: a checkpoint that was written for this kind of data, or train anew."
        )
    return value


def check_root(root: Path | None, caller: str) -> Path:
    """Return the folder that training, validation and test read.

    Raises:
        FolderError: If it is not given, or does not exist.
    """
    if root is None:
        raise FolderError(
            f"{caller}: training, validation and tests need root, and only predict is given; "
            "fix: give root, --data.root."
        )
    if not root.is_dir():
        what = f"{root} is a file, not a folder" if root.is_file() else f"there is no folder {root}"
        beside = [path.name for path in root.parent.iterdir() if path.is_dir()] if root.parent.is_dir() else []
        near = [str(root.parent / name) for name in difflib.get_close_matches(root.name, beside, n=3)]
        hint = f"; near it: {', '.join(near)}" if near else ""
        raise FolderError(f"{caller}: {what}.\n  fix: a folder that exists as root, --data.root{hint}.")
    return root


class Loading(LightningDataModule):
    """Build the loaders of the datasets in `parts`, which `setup` fills: "train", "val", "test" and "predict".

    Args:
        batch_size: Samples per batch, on each device.
        workers: Loader processes; 0 loads in the main process.
        seed: Seed of the order and the augmentation of epochs, used if `seed_everything` set none.
    """

    def __init__(self, batch_size: int, workers: int, seed: int) -> None:
        super().__init__()
        self.batch_size, self.workers, self.seed = batch_size, workers, seed
        self.classes: list[str] = []
        self._run_seed: int | None = None
        self.parts: dict[str, Dataset[Any]] = {}
        # Samples per epoch on each device; None for every sample once.
        self.draws: int | None = None

    def train_dataloader(self) -> DataLoader[Any]:
        """Return the loader of the shuffled, augmented training samples."""
        samples = DrawnSamples(self.parts["train"])
        ranks, rank, epoch = 1, 0, 0
        if self.trainer is not None:
            ranks, rank = self.trainer.world_size, self.trainer.global_rank
            # A resumed run builds its loader before it sets the sampler's epoch.
            epoch = self.trainer.fit_loop.epoch_progress.current.processed  # type: ignore[attr-defined]
        order = self._order(samples, ranks, rank)
        order.set_epoch(epoch)
        # A batch of one image has no batch statistics: an incomplete last batch is dropped, unless it is the only one.
        return self._loader(samples, sampler=order, drop_last=len(order) > self.batch_size)

    def val_dataloader(self) -> DataLoader[Any]:
        """Return the loader of the validation samples."""
        return self._loader(self.parts["val"])

    def test_dataloader(self) -> DataLoader[Any]:
        """Return the loader of the test samples."""
        return self._loader(self.parts["test"])

    def predict_dataloader(self) -> DataLoader[Any]:
        """Return the loader of the samples to predict, which have names in place of labels."""
        return self._loader(self.parts["predict"])

    def inputs(self) -> list[Path]:
        """Return the input files of `predict`, which must not be overwritten."""
        return list(getattr(self.parts.get("predict"), "paths", ()))

    def state_dict(self) -> dict[str, Any]:
        """Return the data entries of a checkpoint: the seed of the epochs and the names of the classes."""
        return {"run_seed": self.run_seed, "classes": list(self.classes)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the seed and the classes of a checkpoint, and refuse one with other classes than the data.

        Raises:
            FolderError: If an entry is missing or of another type, or the classes differ.
        """
        classes = read_entry(state_dict, "classes", list, type(self).__name__)
        if not all(isinstance(name, str) for name in classes):
            raise FolderError(
                f"{type(self).__name__}: the checkpoint's classes are not all strings, got {classes!r:.200}; "
                "fix: another checkpoint, or train anew."
            )
        self._run_seed = read_entry(state_dict, "run_seed", int, type(self).__name__)
        if self.classes:
            check_classes("the data", self.classes, classes, "the checkpoint", type(self).__name__)
        self.classes = list(classes)

    @property
    def run_seed(self) -> int:
        """The seed of order and augmentation: of the resumed checkpoint, else of `seed_everything`, else `seed`."""
        return int(os.environ.get("PL_GLOBAL_SEED", self.seed)) if self._run_seed is None else self._run_seed

    def _order(self, samples: Dataset[Any], ranks: int, rank: int) -> EpochSampler:
        return EpochSampler(samples, seed=self.run_seed, ranks=ranks, rank=rank, draws=self.draws)

    def _loader(self, samples: Dataset[Any], **options: Any) -> DataLoader[Any]:
        # Workers can persist between epochs, as each draw has the seed of its sample.
        usual = {"batch_size": self.batch_size, "num_workers": self.workers, "persistent_workers": self.workers > 0}
        return DataLoader(samples, pin_memory=torch.cuda.is_available(), **usual | options)
