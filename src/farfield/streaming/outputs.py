"""Where predictions go: a file that appears when it is whole, an array that takes slices, or memory."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from farfield._checks import ShapeError
from farfield._files import OwnedFolder, remove
from farfield.streaming.arrays import Region, release
from farfield.streaming.formats import FORMATS, Wanted

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def check_path(caller: str, path: Path, overwrite: bool | None) -> None:
    """Refuse a path that cannot be written, or that holds what may not be replaced.

    Args:
        caller: For errors.
        path: Where something is to appear.
        overwrite: Whether what is there is replaced; None where the caller does not offer that.

    Raises:
        ValueError: If it is of another format.
        FileNotFoundError: If its folder does not exist.
        PermissionError: If its folder may not be written.
        FileExistsError: If it exists and may not be overwritten; if it is a link, or a folder that is more than a zarr
            array; if the folder in which its contents would grow was not made here.
    """
    if path.suffix.lower() not in FORMATS:
        raise ValueError(f'{caller}: out="{path}" must end in one of {", ".join(FORMATS)}; fix: "{path}.zarr".')
    if not path.absolute().parent.is_dir():
        raise FileNotFoundError(
            f'{caller}: no folder "{path.absolute().parent}" for "{path.name}"; fix: make it first.'
        )
    if not os.access(path.absolute().parent, os.W_OK | os.X_OK):
        raise PermissionError(
            f'{caller}: the folder "{path.absolute().parent}" may not be written; fix: another folder, or the right to '
            f"write there."
        )
    if path.is_symlink():
        fix = f'the path it leads to, "{os.readlink(path)}", or another one'
        raise FileExistsError(f'{caller}: "{path}" is a link, and links are not replaced; fix: {fix}.')
    if path.exists() and not overwrite:
        raise FileExistsError(f'{caller}: "{path}" exists; fix: another path{offered(overwrite)}.')
    if path.exists() and not (path.is_file() if FORMATS[path.suffix.lower()].mapped else is_zarr_array(path)):
        what = "a folder that is not one zarr array and nothing else" if path.is_dir() else "not a zarr array"
        raise FileExistsError(f'{caller}: "{path}" is {what}, and is not overwritten; fix: another path.')
    OwnedFolder(caller, unfinished(path), path).check()


def offered(overwrite: bool | None) -> str:
    """The fix that overwriting is, where a caller offers it."""
    return "" if overwrite is None else ", or overwrite=True"


def is_zarr_array(path: Path) -> bool:
    """Whether a folder is one zarr array, as they are written here, and nothing else; so is an empty folder."""
    if not path.is_dir():
        return False
    names = set(os.listdir(path))
    if not names or not names <= {"zarr.json", "c"}:
        return not names
    try:
        described = json.loads((path / "zarr.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(described, dict) and described.get("node_type") == "array"


class FileOutput:
    """A file that grows in a folder beside its path and takes its name when it is whole.

    Args:
        caller: For errors.
        path: Where it appears.
        wanted: What is written.
        overwrite: Whether what is there then is replaced.
    """

    def __init__(self, caller: str, path: Path, wanted: Wanted, overwrite: bool | None) -> None:
        self.caller, self.path, self.wanted, self.overwrite = caller, path, wanted, overwrite
        self.owned = OwnedFolder(caller, unfinished(path), path)
        self.folder = self.owned.path
        self.format = FORMATS[path.suffix.lower()]
        self.growing = self.folder / path.name
        self.array: Any = None

    def let_go(self) -> None:
        """Let other processes write to the path."""
        self.owned.let_go()

    def make(self) -> None:
        """Make the file, with room for all of it where it is one piece."""
        self.array = None
        if self.growing.exists() or self.growing.is_symlink():
            remove(self.growing)
        try:
            self.array = self.format.make(self.growing, self.wanted)
            self.reserve()
        except OSError as error:
            if error.errno not in FULL:
                raise
            size = np.prod(self.wanted.shape, dtype=np.int64) * self.wanted.dtype.itemsize
            problem = f'no room for the {size:,} bytes of "{self.path}"; nothing was begun'
            raise OSError(error.errno, f"{self.caller}: {problem}; fix: another disk.") from error

    def reserve(self) -> None:
        """Take the room of all of the file on the disk, where it is one piece."""
        if self.format.mapped and hasattr(os, "posix_fallocate"):
            with self.growing.open("r+b") as file:
                os.posix_fallocate(file.fileno(), 0, self.growing.stat().st_size)

    def open(self) -> bool:
        """Open the file that was begun before; False if it is not there any more, or damaged beyond opening."""
        if self.growing.is_symlink():
            return False
        try:
            self.array = self.format.open(self.growing, "r+")
            self.reserve()  # of a file that was cut short, which opening it has made long again
        except FileNotFoundError:
            return False
        except OSError:  # a full disk, or too many open files, says nothing about the file
            raise
        except Exception:  # noqa: BLE001  # libraries say in many ways that a file is not of their kind
            return False
        return (tuple(self.array.shape), self.array.dtype) == (self.wanted.shape, self.wanted.dtype)

    def holds(self, index: tuple[slice, ...], checksum: int) -> bool:
        """Whether a box is what was written."""
        try:
            box = np.asarray(self.array[index])
        except OSError:
            raise
        except Exception:  # noqa: BLE001  # of the codec of a damaged chunk
            return False
        found = box_checksum(box)
        release(self.array)
        return found == checksum

    def write(self, index: tuple[slice, ...], box: Tensor) -> None:
        """Write a box."""
        self.array[index] = to_numpy(box)
        if self.format.mapped:
            self.array.flush()
            release(self.array)

    def finish(self) -> Any:
        """Give the file its name, remove the folder it grew in, and open it for reading.

        Raises:
            FileExistsError: If something has appeared at the path that may not be replaced.
        """
        check_path(self.caller, self.path, self.overwrite)
        self.array = None
        for scrap in self.growing.rglob("*.partial"):  # chunks whose writer was killed
            scrap.unlink()
        if self.path.is_dir():  # a folder cannot be replaced in one step
            self.path.rename(self.folder / "replaced")
        self.growing.replace(self.path)
        self.owned.remove()
        return self.format.open(self.path, "r")


class ArrayOutput:
    """An array that takes slices: the caller's, or one in memory.

    Args:
        caller: For errors.
        array: NumPy's, torch's, zarr's, h5py's or one of the caller's.
    """

    def __init__(self, caller: str, array: Any) -> None:
        self.caller, self.array, self.dtype = caller, array, dtype_of_array(array)

    def write(self, index: tuple[slice, ...], box: Tensor) -> None:
        """Write a box.

        Raises:
            ValueError: If it holds whole numbers that the array cannot.
        """
        kept = numpy_dtype(box.dtype)
        if self.dtype is not None and self.dtype.kind in "iu" and not np.can_cast(kept, self.dtype):
            numbers, room = to_numpy(box), np.iinfo(self.dtype)
            if numbers.min() < room.min or numbers.max() > room.max:
                raise ValueError(
                    f"{self.caller}: the result has numbers from {numbers.min()} to {numbers.max()}, and out is of "
                    f"{self.dtype}; fix: an array of {kept}."
                )
        self.array[index] = box.to(self.array.device) if isinstance(self.array, Tensor) else to_numpy(box)
        release(self.array)

    def let_go(self) -> None:
        """Nothing is kept from others."""

    def finish(self) -> Any:
        """Return the array."""
        return self.array


def unfinished(path: Path) -> Path:
    """The folder beside a path in which its file grows, with what is needed to go on."""
    return path.with_name(path.name + ".unfinished")


def output_for(caller: str, out: Any, wanted: Wanted, like: Any, overwrite: bool | None) -> FileOutput | ArrayOutput:
    """An output for what the caller asked for: a path, an array, or None for one of the volume's kind in memory."""
    if isinstance(out, str | Path):
        return FileOutput(caller, Path(out), wanted, overwrite)
    if out is None:
        empty = np.empty(wanted.shape, wanted.dtype)
        return ArrayOutput(caller, torch.from_numpy(empty).to(like.device) if isinstance(like, Tensor) else empty)
    if not hasattr(out, "__setitem__") or not hasattr(out, "shape"):
        raise TypeError(f"{caller}: out must be a path, an array that takes slices, or None, got {type(out).__name__}.")
    if tuple(out.shape) != wanted.shape:
        raise ShapeError(f"{caller}: out must have shape {wanted.shape}, got {tuple(out.shape)}.")
    dtype = dtype_of_array(out)
    # Whole numbers into fewer bits, labels as bytes for example, are looked at when they are written.
    labels = dtype is not None and dtype.kind in "iu" and wanted.dtype.kind in "iu"
    if dtype is not None and not labels and not np.can_cast(wanted.dtype, dtype, "same_kind"):
        raise TypeError(
            f"{caller}: out is of {dtype}, and the result of {wanted.dtype} would be cut to that; fix: an array of "
            f"{wanted.dtype}, or a network whose last step rounds to whole numbers of a torch integer dtype."
        )
    return ArrayOutput(caller, out)


def dtype_of_array(array: Any) -> np.dtype | None:
    """The dtype that an array says it has, as NumPy has it; None where it says none that NumPy knows."""
    if isinstance(array, Tensor):
        return numpy_dtype(array.dtype)
    try:
        return np.dtype(array.dtype)
    except (AttributeError, TypeError):
        return None


def to_numpy(box: Tensor) -> np.ndarray:
    """A box as NumPy has it, which knows no bfloat16."""
    box = box.detach().cpu()
    return (box.float() if box.dtype == torch.bfloat16 else box).numpy()


def numpy_dtype(dtype: torch.dtype) -> np.dtype:
    """The same."""
    return to_numpy(torch.empty(0, dtype=dtype)).dtype


def box_checksum(box: np.ndarray) -> int:
    """A checksum of numbers, the same for 0 and -0: a chunk of nothing but -0 is kept as one of 0."""
    return zlib.crc32(np.add(box, 0, order="C"))


def box_index(layout_shape: Sequence[int], region: Region) -> tuple[slice, ...]:
    """The index of a region in an array of such a shape: all of what comes before the sides."""
    leading = (slice(None),) * (len(layout_shape) - len(region))
    return (*leading, *(slice(start, stop) for start, stop in region))


@contextlib.contextmanager
def full_disk_says(caller: str, path: Path) -> Iterator[None]:
    """Say that a disk is full, and that what is finished stays."""
    try:
        yield
    except OSError as error:
        if error.errno not in FULL or caller in str(error):
            raise
        kept = f'finished tiles are in "{unfinished(path)}"'
        raise OSError(error.errno, f"{caller}: the disk is full; {kept}; fix: make room and call it again.") from error
