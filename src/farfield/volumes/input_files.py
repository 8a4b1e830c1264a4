"""The files that a run reads, as they were when it began: a chunk that is lost is read as zeros, without an error."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from farfield._refusals import refusal
from farfield.volumes.aliasing import file_key, places
from farfield.volumes.axes_view import AxesView
from farfield.volumes.chunk_cache import ChunkCache

# What is looked for beside the chunks of a zarr array, of either version.
_METADATA = ("zarr.json", ".zarray")
# Between tiles, files are compared in so small a share of the time.
_SHARE = 0.02


class InputFiles:
    """The files of some arrays, with the size, the inode and the time of change of each.

    Args:
        arrays: The arrays, by name.
        out: The array that is written, if it is one; a run changes its files itself.
    """

    def __init__(self, arrays: Mapping[str, Any], out: Any) -> None:
        written = {file_key(place.file) for place in places(out) if place.file is not None}
        found = {name: _find_files(array, written) for name, array in arrays.items()}
        self.files = {name: (files, _look(files())) for name, files in found.items()}
        self.due = 0.0

    def check(self, *, between: bool = False) -> None:
        """Refuse files that are gone or others than before; `between` tiles only if that was not just done."""
        start = time.monotonic()
        if between and start < self.due:
            return
        for name, (files, before) in self.files.items():
            changed = np.flatnonzero(_look(files()) != before)
            if len(changed):
                file = next(itertools.islice(files(), int(changed[0]), None))
                what = "has been changed" if os.path.exists(file) else "is gone"
                raise refusal(
                    ValueError,
                    f'"{file}", of which the {name} is read, {what} since the call began; fix: open a {name} that '
                    'stays as it is, and call again; if out is a path, remove the folder "….unfinished" beside it '
                    "first.",
                )
        end = time.monotonic()
        self.due = end + (end - start) / _SHARE


def _find_files(array: Any, written: set[Any]) -> Callable[[], Iterable[str]]:
    """Return what lists the files of an array, but those that are written; of zarr in a folder, of its positions."""
    positions: list[Sequence[int]] = [range(length) for length in array.shape]
    while isinstance(array, AxesView | ChunkCache):
        positions = array.choose(positions) if isinstance(array, AxesView) else positions
        array = array.array
    # HDF5 writes what a file that is opened for writing has in memory when it likes to, and locks it for others.
    if getattr(getattr(array, "file", None), "mode", "r") != "r":
        return tuple
    files = [place.file for place in places(array) if place.file is not None and file_key(place.file) not in written]
    if not files or not files[0].is_dir():
        return partial(map, str, files)
    return partial(_list_chunks, files[0], array, positions)


def _list_chunks(folder: Path, array: Any, positions: Sequence[Sequence[int]]) -> Iterator[str]:
    """Iterate over the metadata and the chunks of a zarr array, which can be millions."""
    chunks = [
        # Neighbours that are no farther apart than a chunk is long leave none out.
        range(min(each) // length, max(each) // length + 1)
        if isinstance(each, range) and abs(each.step) <= length
        else sorted({position // length for position in each})
        for each, length in zip(positions, array.shards or array.chunks, strict=True)
    ]
    yield from (os.path.join(folder, name) for name in _METADATA)
    yield from (os.path.join(folder, array.metadata.encode_chunk_key(place)) for place in itertools.product(*chunks))


def _look(files: Iterable[str]) -> np.ndarray:
    """Return a number for each file, which is another where the file is; 0 for one that is not there."""
    return np.fromiter(map(_look_at, files), np.int64)


def _look_at(file: str) -> int:
    try:
        status = os.stat(file)
    except OSError:
        return 0
    return hash((status.st_size, status.st_ino, status.st_mtime_ns))
