"""File formats of outputs: how a file is made, and how it is opened again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

# Most bytes of a chunk of a zarr array, which is one file. Only axes of even length are halved, so a chunk whose axes
# all have odd lengths may be larger.
CHUNK = 2**24


class OutputSpec(NamedTuple):
    """Description of an output.

    Attributes:
        shape: Shape of the array.
        dtype: Its dtype.
        axes: Letters of its axes, as TIFF files name them.
        tile: Size of the tiles that are written, one number per spatial dim.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    axes: str
    tile: tuple[int, ...]


def make_npy(path: Path, spec: OutputSpec) -> Any:
    """Make a memory-mapped NumPy file."""
    return np.lib.format.open_memmap(path, mode="w+", dtype=spec.dtype, shape=spec.shape)


def open_npy(path: Path, mode: Literal["r", "r+"]) -> Any:
    """Open a NumPy file as a memory map."""
    return np.lib.format.open_memmap(path, mode=mode)


def make_tiff(path: Path, spec: OutputSpec) -> Any:
    """Make an uncompressed, memory-mapped TIFF file; OME-TIFF if its name ends in .ome.tif or .ome.tiff."""
    import tifffile

    large = np.prod(spec.shape, dtype=np.int64) * spec.dtype.itemsize > 2**31
    options: dict[str, Any] = {"photometric": "minisblack", "bigtiff": bool(large), "metadata": {"axes": spec.axes}}
    return tifffile.memmap(path, shape=spec.shape, dtype=spec.dtype, **options)


def open_tiff(path: Path, mode: Literal["r", "r+"]) -> Any:
    """Open an uncompressed TIFF file as a memory map."""
    import tifffile

    return tifffile.memmap(path, mode=mode)


def make_zarr(path: Path, spec: OutputSpec) -> Any:
    """Make a zarr array of version 3; chunks are no larger than a tile, so that few chunks are written twice."""
    import zarr

    leading = len(spec.shape) - len(spec.tile)
    chunks = [
        *spec.shape[:leading],
        *(min(positions, length) for positions, length in zip(spec.tile, spec.shape[leading:], strict=True)),
    ]
    while np.prod(chunks, dtype=np.int64) * spec.dtype.itemsize > CHUNK and any(length % 2 == 0 for length in chunks):
        axis = max((length, axis) for axis, length in enumerate(chunks) if length % 2 == 0)[1]
        chunks[axis] //= 2
    return zarr.create_array(str(path), shape=spec.shape, chunks=tuple(chunks), dtype=spec.dtype)


def open_zarr(path: Path, mode: Literal["r", "r+"]) -> Any:
    """Open a zarr array."""
    import zarr

    return zarr.open_array(str(path), mode=mode)


class Format(NamedTuple):
    """How files of a format are made and opened.

    Attributes:
        make: `(path, spec) -> array`.
        open: `(path, mode) -> array`.
        mapped: Whether the file is one memory map. Its disk space is then reserved at once, because writing to a
            memory map on a full disk kills the process.
    """

    make: Callable[[Path, OutputSpec], Any]
    open: Callable[[Path, Literal["r", "r+"]], Any]
    mapped: bool


FORMATS = {
    ".npy": Format(make_npy, open_npy, True),
    ".zarr": Format(make_zarr, open_zarr, False),
    ".tif": Format(make_tiff, open_tiff, True),
    ".tiff": Format(make_tiff, open_tiff, True),
}
