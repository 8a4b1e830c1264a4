"""Kinds of files that predictions are written to: how one is made, and how it is opened again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

# Bytes of a chunk, about, of a zarr array: a file each.
CHUNK = 2**24


class Wanted(NamedTuple):
    """What is written.

    Attributes:
        shape: Of the array.
        dtype: Of its numbers.
        axes: Their letters, as TIFF files name them.
        tile: Positions a side that are written at a time.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    axes: str
    tile: tuple[int, ...]


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
        *(min(positions, side) for positions, side in zip(wanted.tile, wanted.shape[leading:], strict=True)),
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
