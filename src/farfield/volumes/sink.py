"""Outputs of predictions: a file that gets its name when it is complete, a user's array, or an array in memory."""

from __future__ import annotations

import json
import math
import os
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from farfield._checks import ShapeError
from farfield._files import OwnedFolder, remove
from farfield._refusals import refusal
from farfield.volumes.file_formats import FORMATS, LABELS, Format, find_format
from farfield.volumes.levels import OutputSpec, grids_of_levels, write_level
from farfield.volumes.source import Region, release
from farfield.volumes.unfinished import FULL_DISK, REPLACED, STATE, unfinished_folder, was_moved
from farfield.volumes.whole_shards import WholeShards

_ZARR_2 = (".zarray", ".zgroup", ".zattrs")


def check_path(path: Path, overwrite: bool | None) -> None:
    """Refuse a path that cannot be written, or whose content must not be replaced; None is no, of a call without it."""
    written = known_format(path)
    if written is LABELS:
        path.parent.mkdir(exist_ok=True)
    if not path.absolute().parent.is_dir():
        raise refusal(
            FileNotFoundError, f'no folder "{path.absolute().parent}" for "{path.name}"; fix: make that folder first.'
        )
    if not os.access(path.absolute().parent, os.W_OK | os.X_OK):
        raise refusal(
            PermissionError,
            f'the folder "{path.absolute().parent}" is not writable; fix: another folder, or write permission there.',
        )
    if path.is_symlink():
        fix = f'the target of the link, "{path.resolve()}", or another path'
        raise refusal(FileExistsError, f'"{path}" is a link, and links are not replaced; fix: {fix}.')
    if path.exists() and not overwrite and not was_moved(path):
        raise refusal(FileExistsError, f'"{path}" exists; fix: another path{overwrite_fix(overwrite)}.')
    is_one_file = not written.folder
    if path.exists() and not (path.is_file() if is_one_file else is_own_zarr(path)):
        what = "a folder" if path.is_dir() else "not a file" if is_one_file else "not a zarr array"
        if path.is_dir() and not is_one_file:
            what = "a folder that is not one zarr array or image and nothing else"
        raise refusal(FileExistsError, f'"{path}" is {what}, and is not overwritten; fix: another path.')
    OwnedFolder(unfinished_folder(path), path).check()


def overwrite_fix(overwrite: bool | None) -> str:
    """Return the part of a fix that suggests `overwrite=True`; nothing if the caller has no such argument."""
    return "" if overwrite is None else ", or overwrite=True"


def known_format(path: Path) -> Format:
    """Return the format of a path; refuse another suffix."""
    by_suffix = find_format(path)
    if by_suffix is None:
        # Without the suffix of another format, and that of its compression.
        fix = (path.with_suffix("") if path.suffix.lower() == ".gz" else path) if path.name else path / "restored"
        fix = fix.with_suffix(".zarr")
        raise refusal(ValueError, f'the output "{path}" must end in one of {", ".join(FORMATS)}; fix: "{fix}".')
    return by_suffix


def is_own_zarr(path: Path) -> bool:
    """Whether a folder is empty, or one array of zarr or image of OME-Zarr as farfield writes it, and nothing else."""
    if not path.is_dir():
        return False
    names = set(os.listdir(path))
    if not names:
        return True
    if ".zarray" in names:  # of zarr 2, as labels in images of OME-Zarr 0.4
        return all(name in _ZARR_2 or name.isdecimal() for name in names)
    is_old = ".zgroup" in names
    try:
        described = json.loads((path / (".zattrs" if is_old else "zarr.json")).read_text(encoding="utf-8"))
        kind = "group" if is_old else described["node_type"]
        attributes = {"ome": described} if is_old else described.get("attributes", {})
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False
    if kind == "array":
        return names <= {"zarr.json", "c"}
    levels = sorted(names - {"zarr.json", *_ZARR_2})
    return (
        kind == "group"
        and "multiscales" in attributes.get("ome", {})
        and levels == sorted(map(str, range(len(levels))))
        and all(is_own_zarr(path / level) and any((path / level).iterdir()) for level in levels)
    )


class FileOutput:
    """A file that is written in a folder beside its path and moved to the path when it is complete.

    Args:
        caller: The function that warnings name.
        path: Path of the finished file.
        spec: Shape, dtype, tile, axes and voxel size of the array in the file.
        overwrite: Whether what exists at the path when the file is complete is replaced; None is no.
    """

    def __init__(self, caller: str, path: Path, spec: OutputSpec, overwrite: bool | None) -> None:
        self.caller, self.path, self.overwrite = caller, path, overwrite
        self.owned = OwnedFolder(unfinished_folder(path), path)
        self.folder = self.owned.path
        self.format = known_format(path)
        self.spec = self.format.fit(path, spec)
        self.growing = self.folder / path.name
        self.array: Any = None

    def hold(self) -> None:
        """Lock the path against other processes."""
        self.owned.hold()

    def let_go(self) -> None:
        """Unlock the path for other processes."""
        self.owned.let_go()

    def make(self) -> None:
        """Make the unfinished file anew; reserve its disk space if it is a memory map."""
        self.array = None
        if self.growing.exists() or self.growing.is_symlink():
            remove(self.growing)
        try:
            self.array = self.format.make(self.growing, self.spec)
            self.reserve()
        except OSError as error:
            if error.errno not in FULL_DISK:
                raise
            problem = f'the disk has no room for the {self.spec.nbytes:,} bytes of "{self.path}"'
            raise refusal(OSError, error.errno, f"{problem}; fix: make room, or another disk.") from error

    def reserve(self) -> None:
        """Reserve the disk space of the whole file if it is a memory map."""
        if self.format.mapped and hasattr(os, "posix_fallocate"):
            with self.growing.open("r+b") as file:
                os.posix_fallocate(file.fileno(), 0, self.growing.stat().st_size)

    def attach(self) -> None:
        """Open the unfinished file that another process has made."""
        self.array = self.format.open(self.growing, self.spec, "r+")

    def open(self) -> bool:
        """Open the unfinished file, or the one moved to its path; False if it is missing, damaged or another."""
        if self.growing.is_symlink():
            return False
        try:
            if self.is_cut(self.path if was_moved(self.path) else self.growing):
                return False
            if was_moved(self.path):
                self.array = self.format.open(self.path, self.spec, "r")
            else:
                self.array = self.format.open(self.growing, self.spec, "r+")
                self.reserve()  # opening a truncated file extends it again
        except FileNotFoundError:
            return False
        except OSError:  # a full disk or too many open files: the file itself may be fine
            raise
        except Exception:  # noqa: BLE001  # libraries raise many types of errors for damaged files
            return False
        return (tuple(self.array.shape), self.array.dtype) == (self.spec.shape, self.spec.dtype)

    def is_cut(self, file: Path) -> bool:
        """Whether a memory-mapped file is shorter than a new one; what TIFF has after the array has no checksum."""
        if not self.format.mapped:
            return False
        new = self.folder / f"new-{self.path.name}"
        self.format.make(new, self.spec)
        length = new.stat().st_size
        remove(new)
        return file.stat().st_size < length

    def holds(self, index: tuple[slice, ...], own_sum: int, find_sum: Callable[[np.ndarray], int]) -> bool:
        """Whether the box at an index of the file is readable and has this checksum."""
        try:
            box = np.asarray(self.array[index])
        except OSError:
            raise
        except Exception:  # noqa: BLE001  # codecs raise many types of errors for damaged chunks
            return False
        is_same = find_sum(box) == own_sum
        release(self.array)
        return is_same

    def write(self, index: tuple[slice, ...], box: Tensor) -> None:
        self.array[index] = to_numpy(box)
        release(self.array)

    def levels(self) -> list[int]:
        """Return the number of chunks of each coarser level, which follow from the level before it."""
        return list(map(math.prod, grids_of_levels(self.spec)))

    def write_level(self, level: int, place: int) -> None:
        write_level(self.format.group(self.growing), self.spec, level, place)

    def restore_replaced(self) -> None:
        """Move a folder back to its path if a process was killed before it moved the new one there."""
        if (self.folder / REPLACED).is_dir() and not os.path.lexists(self.path):
            (self.folder / REPLACED).rename(self.path)

    def finish(self) -> Any:
        """Move the file to its path, remove the folder in which it was written, and return it opened for reading.

        Raises:
            FileExistsError: If the path now has content that must not be replaced.
        """
        check_path(self.path, self.overwrite)
        if self.format.mapped and not was_moved(self.path):
            self.array.flush()  # once: until then a box that a crash of the machine loses is found by its checksum
        self.array = None
        if not was_moved(self.path):
            self.format.complete(self.growing, self.spec)
            self.move()
        self.format.enter(self.path)
        try:
            self.owned.empty(keep=(STATE,))  # the progress last: until then a repeated call takes the file as it is
            self.owned.remove()
        except OSError as error:
            warnings.warn(
                f'{self.caller}: "{self.path}" is complete, but "{self.folder}" could not be removed '
                f"({error.strerror or error}); fix: remove that folder.",
                stacklevel=2,
            )
        return self.format.open(self.path, self.spec, "r")

    def move(self) -> None:
        """Move the file to its path; what it replaces is there until then, and again if that fails."""
        for scrap in self.growing.rglob("*.partial"):  # chunks of a process that was killed while it wrote them
            scrap.unlink()
        if self.path.is_dir():  # a folder cannot be replaced in one step
            self.path.rename(self.folder / REPLACED)
        try:
            self.growing.replace(self.path)
        except OSError:
            self.restore_replaced()
            raise


class ArrayOutput:
    """An output that is an array, of NumPy, torch, zarr, h5py or another class with `shape` and slicing."""

    def __init__(self, caller: str, array: Any) -> None:
        self.caller, self.array, self.dtype = caller, array, dtype_of_array(array)
        self.waiting = WholeShards(array) if hasattr(array, "shards") else None  # zarr's

    def write(self, index: tuple[slice, ...], box: Tensor) -> None:
        """Write a box; refuse numbers that the dtype does not hold: outside its range, or whole ones that it rounds."""
        numbers = to_numpy(box)
        room = self.room(numbers.dtype)
        finite = numbers[np.isfinite(numbers)] if room is not None else numbers[:0]
        if room is not None and finite.size:
            low, high = finite.min().item(), finite.max().item()
            if low < room[0] or high > room[1]:
                raise refusal(
                    ValueError,
                    f"the result has numbers from {low} to {high}, and out is of {self.dtype}, which "
                    f"holds those from {room[0]} to {room[1]}; fix: an array of {numbers.dtype}.",
                )
        if isinstance(self.array, Tensor):
            # Tensors that are made in inference mode can be written to in it alone.
            with torch.inference_mode(self.array.is_inference()):
                self.array[index] = box.to(self.array.device)
        elif self.waiting is not None:
            self.waiting[index] = numbers
        else:
            self.array[index] = numbers
        release(self.array)

    def room(self, kept: np.dtype) -> tuple[float, float] | None:
        """Return the smallest and the largest number of a dtype that the array holds; None if it holds all of them."""
        if self.dtype is None or self.dtype.kind not in "iufc" or kept.kind not in "iuf":
            return None
        if self.dtype.kind in "iu":
            limits = np.iinfo(self.dtype)
            return None if np.can_cast(kept, self.dtype) else (int(limits.min), int(limits.max))
        # A tensor can be of bfloat16, which NumPy has not.
        floats = torch.finfo(self.array.dtype) if isinstance(self.array, Tensor) else np.finfo(self.dtype)
        if kept.kind == "f":
            return None if floats.max >= np.finfo(kept).max else (float(floats.min), float(floats.max))
        largest = int(2 / floats.eps)  # whole numbers above are rounded
        return None if np.iinfo(kept).max <= largest else (-largest, largest)

    def let_go(self) -> None:
        """Write what waits for other tiles."""
        if self.waiting is not None:
            self.waiting.flush()

    def finish(self) -> Any:
        return self.array


def output_for(
    caller: str, out: Any, spec: OutputSpec, like: Any, overwrite: bool | None, dtype: torch.dtype
) -> FileOutput | ArrayOutput:
    """Make the output for `out`: a path, an array, or None for a new one of the kind of `like`, a tensor of `dtype`."""
    if isinstance(out, str | Path):
        output = FileOutput(caller, Path(out), spec, overwrite)
        refused = output.format.refuse(output.path, output.spec)
        if refused is not None:
            name = output.path.stem.removesuffix(".ome").removesuffix(".nii")
            raise refusal(TypeError, f'"{out}" cannot be written: {refused}; fix: "{name}.zarr".')
        return output
    if out is None:
        if isinstance(like, Tensor):
            return ArrayOutput(caller, torch.empty(spec.shape, dtype=dtype, device=like.device))
        return ArrayOutput(caller, np.empty(spec.shape, spec.dtype))
    if not hasattr(out, "__setitem__") or not hasattr(out, "shape"):
        raise refusal(
            TypeError,
            f"out must be a path, an array that takes slices, or None, got {type(out).__name__}; fix: out=None.",
        )
    if isinstance(out, Tensor) and out.requires_grad:
        raise refusal(ValueError, "out requires a gradient, and is written to in place; fix: out.detach().")
    if _is_read_only(out):
        raise refusal(
            ValueError,
            'out is opened read-only, and cannot be written to; fix: open it with mode="r+", or another out.',
        )
    if tuple(out.shape) != spec.shape:
        raise refusal(
            ShapeError,
            f"out must have shape {spec.shape}, got {tuple(out.shape)}; fix: an array of that shape, or out=None.",
        )
    held = dtype_of_array(out)
    # Integers of fewer bits are allowed, for example 8 bits for labels: `write` checks their range.
    labels = held is not None and held.kind in "iu" and spec.dtype.kind in "iu"
    if held is not None and not labels and not np.can_cast(spec.dtype, held, "same_kind"):
        raise refusal(
            TypeError,
            f"out is of {held}, and the result of {spec.dtype} would be cut to that; fix: an array of "
            f"{spec.dtype}, or, in predict_whole, a network that returns an integer dtype of torch.",
        )
    return ArrayOutput(caller, out)


def _is_read_only(array: Any) -> bool:
    """Whether an array of NumPy, zarr or h5py is known to take no numbers."""
    if isinstance(array, np.ndarray):
        return not array.flags.writeable
    file = getattr(array, "file", None)  # that of h5py
    return bool(getattr(array, "read_only", False)) or getattr(file, "mode", "") == "r"


def dtype_of_array(array: Any) -> np.dtype | None:
    """Return an array's dtype as a NumPy dtype; None if the array has none, or NumPy has no such dtype."""
    if isinstance(array, Tensor):
        return numpy_dtype(array.dtype)
    try:
        return np.dtype(getattr(array.dtype, "numpy_dtype", array.dtype))  # which tensorstore's has
    except (AttributeError, TypeError):
        return None


def to_numpy(box: Tensor) -> np.ndarray:
    """Convert a box to NumPy, which has no bfloat16: that becomes float32."""
    box = box.detach().cpu()
    return (box.float() if box.dtype == torch.bfloat16 else box).numpy()


def numpy_dtype(dtype: torch.dtype) -> np.dtype:
    """Return the NumPy dtype of what `to_numpy` returns for a tensor of this dtype."""
    return to_numpy(torch.empty(0, dtype=dtype)).dtype


def box_index(layout_shape: Sequence[int], region: Region) -> tuple[slice, ...]:
    """Return the index of a spatial region, with all samples and channels, in an array of this shape."""
    leading = (slice(None),) * (len(layout_shape) - len(region))
    return (*leading, *(slice(start, stop) for start, stop in region))
