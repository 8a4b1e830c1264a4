"""Where predictions go: a file that appears when it is whole, an array that takes slices, or memory."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from farfield._checks import ShapeError
from farfield.streaming.arrays import Region, release

with contextlib.suppress(ImportError):  # not on Windows
    import fcntl

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# Bytes of a chunk, about, of a zarr array: a file each.
CHUNK = 2**24


class Wanted(NamedTuple):
    """What is written.

    Attributes:
        shape: Of the array.
        dtype: Of its numbers.
        axes: Their letters, as TIFF files name them.
        tile: Cells a side that are written at a time.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    axes: str
    tile: tuple[int, ...]


# ---- formats: make a file, open it again -----------------------------------------------------------------------------
def make_npy(path: Path, wanted: Wanted) -> Any:
    """A NumPy file, mapped into memory."""
    return np.lib.format.open_memmap(path, mode="w+", dtype=wanted.dtype, shape=wanted.shape)


def open_npy(path: Path, mode: Literal["r", "r+"]) -> Any:
    """The same, that was made before."""
    return np.lib.format.open_memmap(path, mode=mode)


def make_tiff(path: Path, wanted: Wanted) -> Any:
    """A TIFF file whose numbers lie side by side, mapped into memory; OME-TIFF if it is named so."""
    import tifffile

    large = np.prod(wanted.shape, dtype=np.int64) * wanted.dtype.itemsize > 2**31
    options: dict[str, Any] = {"photometric": "minisblack", "bigtiff": bool(large), "metadata": {"axes": wanted.axes}}
    return tifffile.memmap(path, shape=wanted.shape, dtype=wanted.dtype, **options)


def open_tiff(path: Path, mode: Literal["r", "r+"]) -> Any:
    """The same, that was made before."""
    import tifffile

    return tifffile.memmap(path, mode=mode)


def make_zarr(path: Path, wanted: Wanted) -> Any:
    """A zarr array of version 3, its chunks no larger than a tile, so that no chunk is written twice if it can be."""
    import zarr

    leading = len(wanted.shape) - len(wanted.tile)
    chunks = [
        *wanted.shape[:leading],
        *(min(cells, side) for cells, side in zip(wanted.tile, wanted.shape[leading:], strict=True)),
    ]
    while np.prod(chunks, dtype=np.int64) * wanted.dtype.itemsize > CHUNK and any(side % 2 == 0 for side in chunks):
        axis = max((side, axis) for axis, side in enumerate(chunks) if side % 2 == 0)[1]
        chunks[axis] //= 2
    return zarr.create_array(str(path), shape=wanted.shape, chunks=tuple(chunks), dtype=wanted.dtype)


def open_zarr(path: Path, mode: Literal["r", "r+"]) -> Any:
    """The same, that was made before."""
    import zarr

    return zarr.open_array(str(path), mode=mode)


class Format(NamedTuple):
    """How files of a kind are made and opened.

    Attributes:
        make: `(path, wanted) -> array`.
        open: `(path, mode) -> array`.
        mapped: Whether the file is one piece in memory: its room on the disk is taken at once then, because a disk
            that is full while such memory is written ends the process.
    """

    make: Callable[[Path, Wanted], Any]
    open: Callable[[Path, Literal["r", "r+"]], Any]
    mapped: bool


FORMATS = {
    ".npy": Format(make_npy, open_npy, True),
    ".zarr": Format(make_zarr, open_zarr, False),
    ".tif": Format(make_tiff, open_tiff, True),
    ".tiff": Format(make_tiff, open_tiff, True),
}


def check_path(caller: str, path: Path, overwrite: bool) -> None:
    """Refuse a path of another format, one that exists, or one whose folder does not."""
    if path.suffix.lower() not in FORMATS:
        raise ValueError(f'{caller}: out="{path}" must end in one of {", ".join(FORMATS)}; fix: "{path}.zarr".')
    if path.exists() and not overwrite:
        raise FileExistsError(f'{caller}: "{path}" exists; fix: another path, or overwrite=True.')
    if not path.absolute().parent.is_dir():
        raise FileNotFoundError(
            f'{caller}: no folder "{path.absolute().parent}" for "{path.name}"; fix: make it first.'
        )


class FileOutput:
    """A file that grows in a folder beside its path and takes its name when it is whole.

    Args:
        caller: For errors.
        path: Where it appears.
        wanted: What is written.
    """

    def __init__(self, caller: str, path: Path, wanted: Wanted) -> None:
        self.caller, self.path, self.wanted = caller, path, wanted
        self.folder = unfinished(path)
        self.format = FORMATS[path.suffix.lower()]
        self.growing = self.folder / path.name
        self.array: Any = None
        self.lock: int | None = None

    def hold(self) -> None:
        """Keep other processes from writing to the path until `let_go`, or until this one ends.

        Raises:
            BlockingIOError: If another one does.
        """
        self.folder.mkdir(exist_ok=True)
        self.lock = hold(self.caller, self.folder, self.path)

    def let_go(self) -> None:
        """Let other processes write to the path."""
        if self.lock is not None:
            os.close(self.lock)
        self.lock = None

    def make(self) -> None:
        """Make the file, with room for all of it where it is one piece."""
        self.folder.mkdir(exist_ok=True)
        try:
            self.array = self.format.make(self.growing, self.wanted)
            if self.format.mapped and hasattr(os, "posix_fallocate"):
                with self.growing.open("r+b") as file:
                    os.posix_fallocate(file.fileno(), 0, self.growing.stat().st_size)
        except OSError as error:
            shutil.rmtree(self.folder, ignore_errors=True)
            if error.errno not in FULL:
                raise
            size = np.prod(self.wanted.shape, dtype=np.int64) * self.wanted.dtype.itemsize
            problem = f'no room for the {size:,} bytes of "{self.path}"; nothing was begun'
            raise OSError(error.errno, f"{self.caller}: {problem}; fix: another disk.") from error

    def open(self) -> None:
        """Open the file that was begun before."""
        self.array = self.format.open(self.growing, "r+")

    def write(self, index: tuple[slice, ...], box: Tensor) -> None:
        """Write a box."""
        self.array[index] = to_numpy(box)
        if self.format.mapped:
            self.array.flush()
            release(self.array)

    def finish(self) -> Any:
        """Give the file its name, remove the folder it grew in, and open it for reading."""
        self.array = None
        for scrap in self.growing.rglob("*.partial"):  # chunks whose writer was killed
            scrap.unlink()
        old = self.folder / "replaced"
        if self.path.is_dir():  # a folder cannot be replaced in one step
            self.path.rename(old)
        self.growing.replace(self.path)
        shutil.rmtree(self.folder)
        return self.format.open(self.path, "r")


def hold(caller: str, folder: Path, path: Path) -> int | None:
    """Lock a folder in which the contents of `path` grow, until what is returned is closed or this process ends.

    A killed process ends too, so no lock outlives the one that took it. None where the system knows no such locks.

    Raises:
        BlockingIOError: If another process has it.
    """
    if os.name == "nt":
        return None
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise BlockingIOError(
            f'{caller}: another process is writing "{path}"; fix: wait until it is done, or another path.'
        ) from None
    except OSError:  # some network drives
        os.close(handle)
        return None
    return handle


def emptied(folder: Path) -> None:
    """Remove what is in a folder, and not the folder, which may be locked."""
    for each in folder.iterdir():
        if each.is_dir() and not each.is_symlink():
            shutil.rmtree(each)
        else:
            each.unlink()


class ArrayOutput:
    """An array that takes slices: the caller's, or one in memory.

    Args:
        array: NumPy's, torch's, zarr's, h5py's or one of the caller's.
    """

    def __init__(self, array: Any) -> None:
        self.array = array

    def write(self, index: tuple[slice, ...], box: Tensor) -> None:
        """Write a box."""
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


def output_for(caller: str, out: Any, wanted: Wanted, like: Any) -> FileOutput | ArrayOutput:
    """An output for what the caller asked for: a path, an array, or None for one of the volume's kind in memory."""
    if isinstance(out, str | Path):
        return FileOutput(caller, Path(out), wanted)
    if out is None:
        empty = np.empty(wanted.shape, wanted.dtype)
        return ArrayOutput(torch.from_numpy(empty).to(like.device) if isinstance(like, Tensor) else empty)
    if not hasattr(out, "__setitem__") or not hasattr(out, "shape"):
        raise TypeError(f"{caller}: out must be a path, an array that takes slices, or None, got {type(out).__name__}.")
    if tuple(out.shape) != wanted.shape:
        raise ShapeError(f"{caller}: out must have shape {wanted.shape}, got {tuple(out.shape)}.")
    return ArrayOutput(out)


def to_numpy(box: Tensor) -> np.ndarray:
    """A box as NumPy has it, which knows no bfloat16."""
    box = box.detach().cpu()
    return (box.float() if box.dtype == torch.bfloat16 else box).numpy()


def numpy_dtype(dtype: torch.dtype) -> np.dtype:
    """The same."""
    return to_numpy(torch.empty(0, dtype=dtype)).dtype


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
