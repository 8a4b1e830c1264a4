"""Pairs of noisy and clean stacks (or images): CARE's npz files, and folders of TIFF files."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, TensorDataset

from farfield._refusals import put_name
from farfield.volumes.readers import is_zarr
from farfield_papers.data.base import Loading
from farfield_papers.data.patches import Patches, WholePair
from farfield_papers.data.readers.images import FolderError
from farfield_papers.data.readers.tiff import (
    check_stack_values,
    list_stack_pairs,
    list_stacks,
    load_npz,
    open_stack,
    open_stacks,
)
from farfield_papers.data.readers.volumes import list_stack_files, list_volumes, open_stack_volume

# Share of the patches, the last ones, that is held out where there is no validation folder.
_HELD_OUT = 0.1
# Patches are drawn with a fixed seed, so that the held-out ones do not change with the run's seed.
_DRAW = 0
# How many ways a whole pair is normalised in training.
_LEVELS = 32


# The loader would make tensors of arrays.
def _return_sample(sample: Any) -> Any:
    return sample


# Whole stacks are loaded one by one, in the main process: loader processes would copy them.
_ONE_BY_ONE: dict[str, Any] = {
    "batch_size": None,
    "num_workers": 0,
    "persistent_workers": False,
    "collate_fn": _return_sample,
}


class _Several(NamedTuple):
    """A file of several stacks, and the index of one of them."""

    path: Path
    place: int


class StackPairs(Loading):
    """Read pairs from `root/train` (or `train_data`), `root/val` and `root/test` (or `test_data`), laid out as CARE's.

    A folder has TIFF files of the same names in one folder per condition and one with the clean stacks,
    `train/low/a.tif` and `train/GT/a.tif`. A folder of training or validation may instead have one npz file with `X`,
    `Y` and `axes`; a folder of tests may have TIFF files of several stacks each, as Tribolium's: the clean stack last,
    before it the conditions from the last of `sources` to the first. Without `root/val` the last tenth of the patches
    is held out. A pair whose target has one plane is a projection.

    With `whole` the samples of training and validation are whole pairs, of which an epoch has each once; without
    `root/val` a tenth of them, at least one, is held out. In training each is normalised by other percentiles every
    time, in validation by the same. Of `patch` only the number of spatial dims counts, and neither `steps_per_epoch`
    nor `patches_per_stack` is used.

    Batches are `(sources, targets)`, normalised; tests and predictions are whole stacks, not normalised.

    Args:
        root: The folder, or an npz file. It may be left out where `predict` is given.
        patch: Size of a training patch, `[z, y, x]`, or `[y, x]` for images.
        batch_size: Patches per batch, on each device.
        steps_per_epoch: Batches per epoch, on each device; None for every patch once.
        patches_per_stack: Patches drawn from each pair of TIFF files.
        sources: Names of the folders of the stacks to be restored, one per condition.
        target: Name of the folder of the clean stacks.
        axes: Axes of the TIFF files, e.g. "ZYX", where the files give none or wrong ones.
        channel: Index of the channel to read from files of several; files of one channel are read as they are. To
            predict also a list: each of these channels is restored by itself.
        workers: Loader processes; 0 loads in the main process.
        predict: What is restored: a file or zarr that `volumes.open_volume` opens, or a folder of these; None restores
            `root`, which then is one of these, or has a folder of tests.
        whole: Whether the network is trained and validated on whole stacks, in tiles; they are of one size if
            `batch_size` is not 1.

    Raises:
        FolderError: If `patch` is out of range, or neither `root` nor `predict` is given. In `setup` and while stacks
            are read, for a folder or file that cannot be trained on, tested or predicted; the error names it.
    """

    # None where `predict` is given alone: `setup` refuses all stages that read it.
    root: Path

    def __init__(  # noqa: PLR0913  (the options of a command)
        self,
        root: str | None = None,
        *,
        patch: Sequence[int] = (16, 64, 64),
        batch_size: int = 16,
        steps_per_epoch: int | None = 400,
        patches_per_stack: int = 1024,
        sources: Sequence[str] = ("low",),
        target: str = "GT",
        axes: str | None = None,
        channel: list[int] | int | None = None,
        workers: int = 2,
        predict: str | None = None,
        whole: bool = False,
    ) -> None:
        super().__init__(batch_size, workers, _DRAW)
        if len(patch) not in (2, 3) or any(side < 1 for side in patch):
            error = FolderError(f"patch must be two or three numbers, [y, x] or [z, y, x], got {list(patch)}.")
            raise put_name("StackPairs", error)
        self._set_folders(root, predict, "a folder of pairs", "the stacks to restore")
        self.patch = patch
        self.draws = None if steps_per_epoch is None or whole else steps_per_epoch * batch_size
        # Stacks of validation may differ in size.
        self.whole = self.one_by_one = whole
        self.patches_per_stack, self.sources, self.target = patches_per_stack, list(sources), target
        self.axes, self.channel = axes, channel

    def _list_predict(self, path: Path) -> None:
        if not path.exists():
            raise FolderError(f"there is no {path}.")
        single = path.is_file() or is_zarr(path)
        files = [path] if single else list_volumes(path)
        test = None if files or self.predict else self._folder("test", "test_data")
        if test is not None:
            files = [each for source in self.sources for each in list_volumes(test / source)]
        if not files:
            raise FolderError(f"{path} has no volumes to restore, such as .tif files or zarr folders.")
        above = test or (path.parent if single else path)
        inputs = [part for each in files for part in list_stack_files(each)]
        entries = [(each, str(each.relative_to(above))) for each in files]
        self.parts["predict"] = self._listed(entries, self._read_prediction, inputs)

    def _list_root(self, stage: str) -> None:
        root: Path | None = self.root
        if root is None:
            raise FolderError(f"{stage} needs root, a folder of pairs; fix: --data.root.")
        if not root.exists():
            raise FolderError(f"there is no {root}.")
        if stage in ("fit", "validate"):
            self._list_training()
        elif stage == "test":
            self._list_tests()
        else:
            self._list_predict(root)

    def _evaluation_loader(self, part: str) -> DataLoader[Any]:
        return super()._evaluation_loader(part) if part == "val" else self._loader(self.parts[part], **_ONE_BY_ONE)

    def _folder(self, *names: str) -> Path | None:
        return next((self.root / name for name in names if (self.root / name).is_dir()), None)

    def _list_training(self) -> None:
        train, val = self._folder("train", "train_data"), self._folder("val")
        if self.root.is_file() or (train is None and list(self.root.glob("*.npz"))):
            train = self.root
        if train is None:
            raise FolderError(
                f"{self.root} has no folder train or train_data.\n"
                f"  fix: {self.root / 'train' / self.sources[0] / 'a.tif'} and "
                f"{self.root / 'train' / self.target / 'a.tif'} for each stack, or train/data.npz."
            )
        if self.whole:
            self._list_wholes(train, val)
            return
        self.parts["train"] = self._patches(train)
        if val is not None:
            self.parts["val"] = self._patches(val)
            return
        total = len(self.parts["train"])  # type: ignore[arg-type]
        held = round(total * _HELD_OUT)
        if not 0 < held < total:
            raise FolderError(
                f"{train} gives {total} patches; a tenth of them cannot be held out.\n"
                "  fix: more stacks, or a folder val beside train."
            )
        whole = self.parts["train"]
        self.parts["train"] = Subset(whole, range(total - held))
        self.parts["val"] = Subset(whole, range(total - held, total))

    def _patches(self, folder: Path) -> Dataset[Any]:
        files = [folder] if folder.is_file() else sorted(folder.glob("*.npz"))
        if len(files) > 1:
            raise FolderError(
                f"{folder} has {len(files)} npz files; fix: keep one, or give one of them as --data.root."
            )
        if files:
            return TensorDataset(*(torch.from_numpy(part) for part in load_npz(files[0], len(self.patch))))
        parts = [
            Patches(*pair, self.patch, self.patches_per_stack, seed=_DRAW + place)
            for place, pair in enumerate(self._pairs(folder))
        ]
        whole: Dataset[Any] = ConcatDataset(parts)
        order = np.random.default_rng(_DRAW).permutation(sum(map(len, parts)))
        return Subset(whole, order.tolist())

    def _list_wholes(self, train: Path, val: Path | None) -> None:
        if train.is_file() or list(train.glob("*.npz")):
            raise FolderError(
                f"{train} has patches, in an npz file, and no whole stacks.\n"
                "  fix: TIFF files of the stacks, or training without --whole (whole=True)."
            )
        pairs = self._pairs(train)
        if val is None:
            pairs = [pairs[place] for place in np.random.default_rng(_DRAW).permutation(len(pairs))]
            held = max(1, round(len(pairs) * _HELD_OUT))
            if held == len(pairs):
                raise FolderError(
                    f"{train} has one pair of stacks, and none is left to be held out.\n"
                    "  fix: more stacks, or a folder val beside train."
                )
            pairs, validation = pairs[:-held], pairs[-held:]
        else:
            validation = self._pairs(val)
        sizes = sorted({source.shape for _, source, _ in pairs})
        if len(sizes) > 1 and self.batch_size > 1:
            raise FolderError(
                f"{train} has stacks of {len(sizes)} sizes, such as {sizes[0]} and {sizes[-1]}, which are no batch of "
                f"{self.batch_size}.\n  fix: --data.batch_size 1."
            )
        for part, each, draws in (("train", pairs, _LEVELS), ("val", validation, 1)):
            whole = [WholePair(*pair, draws=draws, seed=_DRAW + place) for place, pair in enumerate(each)]
            self.parts[part] = ConcatDataset(whole)

    def _pairs(self, folder: Path) -> list[tuple[str, Any, Any]]:
        """Read the pairs of a folder: the name, the source and the target of each."""
        files = list_stack_pairs(folder, self.sources, self.target)
        return [
            (f"{each.condition}/{each.source.name}", *self._pair(str(each.source), each.source, each.target))
            for each in files
        ]

    def _pair(self, name: str, source: Path, target: Path) -> tuple[Any, Any]:
        spatial_dims, channel = len(self.patch), self.channel
        if isinstance(channel, list):
            fix = f"fix: --data.channel {channel[0] if channel else 0}; predict takes several."
            raise FolderError(f"pairs are read by one channel, got channel={channel}.\n  {fix}")
        stack = check_stack_values(source, open_stack(source, spatial_dims, self.axes, channel))
        truth = _open_target(target, spatial_dims, self.axes, channel)
        return stack, check_stack_values(target, _fit_target(name, stack, truth))

    def _list_tests(self) -> None:
        folder = self._folder("test", "test_data")
        if folder is None:
            raise FolderError(f"there is no folder {self.root / 'test'} or {self.root / 'test_data'}.")
        several = list_stacks(folder)
        if several:
            # The clean stack is last, the first source before it, and so on.
            names = list(enumerate(self.sources))
            entries: list[Any] = [
                (path.name, name, _Several(path, -2 - place)) for path in several for place, name in names
            ]
        else:
            files = list_stack_pairs(folder, self.sources, self.target)
            entries = [(pair.source.name, pair.condition, pair) for pair in files]
        self.parts["test"] = self._listed(entries, self._read_test)

    def _read_test(self, entry: tuple[str, str, Any]) -> tuple[Any, Any, str, str]:
        name, condition, place = entry
        if isinstance(place, _Several):
            stacks = open_stacks(place.path, len(self.sources) + 1, len(self.patch))
            pair = [check_stack_values(place.path, each) for each in (stacks[place.place], stacks[-1])]
            return pair[0], pair[1], name, condition
        return *self._pair(f"{condition}/{name}", place.source, place.target), name, condition

    def _read_prediction(self, entry: tuple[Path, str]) -> tuple[Any, str, str]:
        path, name = entry
        return open_stack_volume(path, len(self.patch), self.axes, self.channel), str(path), name


def _open_target(path: Path, spatial_dims: int, axes: str | None, channel: int | None) -> NDArray[Any]:
    """Open a clean stack or, if it is not a stack, the image of a projection; an error is that of the stack."""
    try:
        return open_stack(path, spatial_dims, axes, channel)
    except FolderError:
        if spatial_dims == 3:
            with suppress(FolderError):
                return open_stack(path, 2, channel=channel)
        raise


def _fit_target(name: str, stack: NDArray[Any], truth: NDArray[Any]) -> NDArray[Any]:
    """Return a clean stack of its source's size, or its only plane as an image."""
    if truth.ndim == 3 and len(truth) == 1 < len(stack):
        truth = truth[0]
    if stack.shape[stack.ndim - truth.ndim :] != truth.shape:
        raise FolderError(
            f"{name} has the size {stack.shape}, its clean counterpart {truth.shape}; fix: crop both to "
            "the same size, or for a projection to the same y and x."
        )
    return truth
