"""The base class of the data modules: loaders, and epochs that a resumed run repeats exactly."""

from __future__ import annotations

import contextlib
import difflib
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader, Dataset

from farfield._refusals import door
from farfield_papers.data.readers.images import Check, FolderError, check_classes, check_images, list_some
from farfield_papers.data.sampler import DrawnSamples, EpochSampler

_Value = TypeVar("_Value")


@contextlib.contextmanager
def name_module(name: str) -> Iterator[None]:
    """Put the name of a data module in front of what is refused; it was called, and not the reader that refuses."""
    try:
        with door(name):
            yield
    except FolderError as error:
        error.args = (f"{name}: {error.text}",)
        raise


def read_entry(state: dict[str, Any], name: str, kind: type[_Value]) -> _Value:
    """Return the entry `name` of a data module's state in a checkpoint, which may be damaged or of other data."""
    value = state.get(name)
    if not isinstance(value, kind):
        raise FolderError(
            f"the checkpoint's {name} must be a {kind.__name__}, got {value!r:.100}; "
            f"fix: a checkpoint that was written for this kind of data, or train anew."
        )
    return value


def check_root(root: Path | None, entry: str = "") -> Path:
    """Return the folder that is trained on; refuse a missing one, or one without `entry` if one around it has it."""
    if root is None:
        raise FolderError(
            "training, validation and tests need root, and only predict is given; fix: give root, --data.root."
        )
    if not root.is_dir():
        what = f"{root} is a file, not a folder" if root.is_file() else f"there is no folder {root}"
        raise FolderError(f"{what}.\n  fix: {_advise_folder(root, entry)}")
    if entry and not (root / entry).is_dir():
        refuse_level(root, entry, [*list_folders(root), *root.absolute().parents[:2]])
    return root


def _advise_folder(path: Path, entry: str) -> str:
    around = [folder for folder in path.absolute().parents if folder.is_dir()]
    if path.is_file():
        root = next((folder for folder in around[:3] if entry and (folder / entry).is_dir()), None)
        return f"--data.root {root}." if root else "--data.root with a folder; an archive has to be unpacked first."
    beside = [folder.name for folder in list_folders(around[0])]
    near = difflib.get_close_matches(path.name, beside, n=3) if around[0] == path.absolute().parent else []
    if near:
        return f"--data.root {around[0] / near[0]}" + "".join(f", or {around[0] / name}" for name in near[1:]) + "."
    return f"--data.root with a folder that exists; {around[0]} has {list_some(beside) or 'no folders'}."


def refuse_level(root: Path, entry: str, others: Sequence[Path]) -> None:
    """Raise FolderError if one of some folders has the entry of a root, which `root` itself has not."""
    other = next((folder for folder in others if (folder / entry).is_dir()), None)
    if other is not None:
        held = list_some(folder.name for folder in list_folders(root)) or "no folders"
        raise FolderError(
            f"{root} is not the folder of the data: it has {held}, and not {entry}.\n"
            f"  fix: --data.root {other}, which has {entry}."
        )


def list_folders(folder: Path) -> list[Path]:
    """Return the folders in a folder, without hidden ones, in sorted order."""
    return sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))


class Listed(Dataset[Any]):
    """Entries of a list of the data module `name`, each read on access; `paths` are the files of all of them."""

    def __init__(
        self, name: str, entries: Sequence[Any], read: Callable[[Any], Any], paths: Sequence[Path] = ()
    ) -> None:
        self.name, self.entries, self.read, self.paths = name, entries, read, paths

    def __len__(self) -> int:
        return len(self.entries)

    def __getitem__(self, index: int) -> Any:
        with name_module(self.name):
            return self.read(self.entries[index])


class Loading(LightningDataModule):
    """Check and list the data, and build the loaders of `parts`: "train", "val", "test" and "predict"."""

    # Whether evaluation and prediction have batches of one sample, as sizes may differ.
    one_by_one = False

    def __init__(self, batch_size: int, workers: int, seed: int = 0) -> None:
        super().__init__()
        self.batch_size, self.workers, self.seed = batch_size, workers, seed
        self.root: Path | None = None
        self.predict: Path | None = None
        self.check: Check = "never"
        self.classes: list[str] = []
        self._run_seed: int | None = None
        self.parts: dict[str, Dataset[Any]] = {}
        # Samples per epoch on each device; None for every sample once.
        self.draws: int | None = None

    def prepare_data(self) -> None:
        """Check the files of `root` and `predict`, see `check`; runs in one process of each machine."""
        with name_module(type(self).__name__):
            if self.predict is not None:
                self._check_predict(self.predict)
            if self.predict is None or (self.root is not None and self.root.is_dir()):
                self._check_root()

    def setup(self, stage: str) -> None:
        """List the samples of train, val and test, or those to predict."""
        with name_module(type(self).__name__):
            if stage == "predict" and self.predict is not None:
                self._list_predict(self.predict)
            else:
                self._list_root(stage)

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
        return self._evaluation_loader("val")

    def test_dataloader(self) -> DataLoader[Any]:
        """Return the loader of the test samples."""
        return self._evaluation_loader("test")

    def predict_dataloader(self) -> DataLoader[Any]:
        """Return the loader of the samples to predict, which have names in place of labels."""
        return self._evaluation_loader("predict")

    def inputs(self) -> list[Path]:
        """Return the input files of `predict`, which must not be overwritten."""
        return list(getattr(self.parts.get("predict"), "paths", ()))

    def state_dict(self) -> dict[str, Any]:
        """Return the data entries of a checkpoint: the seed of the epochs and the names of the classes."""
        return {"run_seed": self.run_seed, "classes": list(self.classes)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the seed and the classes of a checkpoint, which must be those of the data."""
        with name_module(type(self).__name__):
            classes = read_entry(state_dict, "classes", list)
            if not all(isinstance(name, str) for name in classes):
                raise FolderError(
                    f"the checkpoint's classes are not all strings, got {classes!r:.200}; "
                    "fix: another checkpoint, or train anew."
                )
            self._run_seed = read_entry(state_dict, "run_seed", int)
            if self.classes:
                check_classes("the data", self.classes, classes, "the checkpoint")
        self.classes = list(classes)

    @property
    def run_seed(self) -> int:
        """The seed of order and augmentation: of the resumed checkpoint, else of `seed_everything`, else `seed`."""
        return int(os.environ.get("PL_GLOBAL_SEED", self.seed)) if self._run_seed is None else self._run_seed

    def _check_predict(self, folder: Path) -> None:
        check_images([folder], self.check)

    def _check_root(self) -> None:
        """Check the files of `root`; by default there is nothing to check."""

    def _list_predict(self, path: Path) -> None:
        raise NotImplementedError

    def _list_root(self, stage: str) -> None:
        raise NotImplementedError

    def _listed(self, entries: Sequence[Any], read: Callable[[Any], Any], paths: Sequence[Path] = ()) -> Listed:
        return Listed(type(self).__name__, entries, read, paths)

    def _set_folders(self, root: str | None, predict: str | None, layout: str, images: str) -> None:
        if root is None and predict is None:
            raise FolderError(f"{type(self).__name__}: give root, {layout}, or predict, {images}.")
        self.root, self.predict = (None if path is None else Path(path) for path in (root, predict))

    def _order(self, samples: Dataset[Any], ranks: int, rank: int) -> EpochSampler:
        return EpochSampler(samples, seed=self.run_seed, ranks=ranks, rank=rank, draws=self.draws)

    def _evaluation_loader(self, part: str) -> DataLoader[Any]:
        return self._loader(self.parts[part], batch_size=1 if self.one_by_one else self.batch_size)

    def _loader(self, samples: Dataset[Any], **options: Any) -> DataLoader[Any]:
        # Workers can persist between epochs, as each draw has the seed of its sample.
        usual = {"batch_size": self.batch_size, "num_workers": self.workers, "persistent_workers": self.workers > 0}
        return DataLoader(samples, pin_memory=torch.cuda.is_available(), **usual | options)
