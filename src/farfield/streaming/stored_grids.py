"""Grids that are stored on disk between passes: one raw file each, in which every tile is one block with a checksum."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import tempfile
import warnings
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from farfield.streaming.geometry import NetworkGrid, StoredGrid, index_within
from farfield.streaming.runner import Stream
from farfield.streaming.spilling import SpillPlan
from farfield.volumes.sink import FileOutput
from farfield.volumes.source import Region, Span, release
from farfield.volumes.unfinished import FULL_DISK, REASONS

# Names of the files, in the folder of the unfinished output, end with this.
SUFFIX = ".grid"


class StoredFile:
    """A file that stores a grid; each tile's own positions are a contiguous block, in the order of the tiles.

    Args:
        caller: The function that errors name.
        path: Path of the file; None for a temporary file without a name, which ends with the process.
        stored: The grid.
        spans: For each axis, the tiles' own positions in the grid.
    """

    def __init__(self, caller: str, path: Path | None, stored: StoredGrid, spans: Sequence[Sequence[Span]]) -> None:
        self.caller, self.path, self.stored, self.spans = caller, path, stored, spans
        self.parts: list[Region] = list(itertools.product(*spans))
        self.leading = stored.grid.shape[:2]
        sizes = [self.block_bytes(part) for part in self.parts]
        self.offsets = [0, *itertools.accumulate(sizes)]
        self.checksums: list[int] = []
        self.file: Any | None = None
        self.array: Any = None

    def block_bytes(self, part: Region) -> int:
        """Return the size of a block in bytes."""
        return math.prod((*self.leading, *(stop - start for start, stop in part))) * self.stored.dtype.itemsize

    @property
    def name(self) -> str:
        """The name of the file in errors."""
        return f'"{self.path}"' if self.path is not None else f"the temporary file of {self.stored.grid.name}"

    def make(self) -> None:
        """Make the file anew, and reserve its disk space.

        Raises:
            OSError: If the disk has no room for it.
        """
        self.close()
        self.checksums = []
        with self.explained(f"make room for its {self.stored.bytes:,} bytes"):
            # Open until the last pass that reads it has run.
            self.file = (
                tempfile.TemporaryFile(buffering=0)  # noqa: SIM115
                if self.path is None
                else self.path.open("w+b", buffering=0)
            )
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(self.file.fileno(), 0, self.stored.bytes)

    def write(self, index: int, block: Tensor) -> None:
        """Write the own positions of a tile, which is the next one, or one that was written before.

        Raises:
            OSError: If they cannot be written.
        """
        content = to_bytes(block)
        checksum = zlib.crc32(content)
        with self.explained("make room"):
            file = self.open()
            file.seek(self.offsets[index])
            while len(content):
                content = content[file.write(content) :]
        self.checksums[index:] = [checksum]

    @contextlib.contextmanager
    def explained(self, room: str) -> Iterator[None]:
        """Replace an error of the disk by one that names the caller, the file and the fix: `room` on a full disk."""
        try:
            yield
        except OSError as error:
            if f"{self.caller}: " in str(error):  # explained within
                raise
            reason, fix = REASONS.get(error.errno or 0, (os.strerror(error.errno or 0).lower(), "check the disk"))
            fix = room if error.errno in FULL_DISK else fix
            problem = f'cannot write {self.name}, which stores "{self.stored.grid.name}" between passes: {reason}'
            raise OSError(error.errno, f"{self.caller}: {problem}; fix: {fix}, and repeat the call.") from error

    def read(self, index: int, region: Region) -> Tensor:
        """Read a region around the own positions of a tile, and check these.

        Raises:
            ValueError: If the file was changed since it was written.
        """
        array = self.mapped()
        self.check(array, index)
        size = tuple(stop - start for start, stop in region)
        result = torch.empty((*self.leading, *size), dtype=self.stored.dtype, device="cpu")
        near = [
            [each for each, (start, stop) in enumerate(spans) if start < last and stop > first and start < stop]
            for spans, (first, last) in zip(self.spans, region, strict=True)
        ]
        for places in itertools.product(*near):
            block = int(np.ravel_multi_index(places, [len(spans) for spans in self.spans]))
            part = self.parts[block]
            both = tuple(
                (max(start, first), min(stop, last)) for (start, stop), (first, last) in zip(part, region, strict=True)
            )
            result[index_within(both, region)] = self.block(array, block)[index_within(both, part)]
            release(array)  # after each block, or all neighbors of a tile would be resident at once
        return result

    def check(self, array: Any, index: int) -> None:
        """Compare a block of the mapped file with its checksum.

        Raises:
            ValueError: If it was changed since it was written.
        """
        if zlib.crc32(array[self.offsets[index] : self.offsets[index + 1]]) != self.checksums[index]:
            raise self.changed(f"in tile {index}")

    def block(self, array: Any, index: int) -> Tensor:
        """Return a block of the mapped file, as a tensor that shares its memory."""
        flat = np.asarray(array[self.offsets[index] : self.offsets[index + 1]])
        shape = (*self.leading, *(stop - start for start, stop in self.parts[index]))
        return torch.from_numpy(flat).view(self.stored.dtype).reshape(shape)

    def intact(self, checksums: Sequence[int]) -> bool:
        """Whether the file holds the blocks that have these checksums; they are then read and continued."""
        if self.path is None or self.path.is_symlink() or not self.path.is_file():
            return False
        self.checksums = list(checksums)
        try:
            array = self.mapped()
        except ValueError:
            return False
        sums = [zlib.crc32(array[start:stop]) for start, stop in itertools.pairwise(self.offsets[: len(checksums) + 1])]
        release(array)
        return sums == self.checksums

    def mapped(self) -> Any:
        """Return the file as an array of bytes in memory that is mapped.

        Raises:
            OSError: If it cannot be mapped.
            ValueError: If it became shorter; reading it would kill the process.
        """
        file = self.open()
        if os.fstat(file.fileno()).st_size < self.stored.bytes:
            raise self.changed("and is shorter")
        if self.array is None:
            with self.explained("make room"):
                self.array = np.memmap(file, np.uint8, "r+", shape=(self.stored.bytes,))
        return self.array

    def open(self) -> Any:
        """Return the opened file."""
        if self.file is None:
            if self.path is None:
                raise self.changed("and is gone")
            with self.explained("make room"):
                self.file = self.path.open("r+b", buffering=0)
        return self.file

    def close(self) -> None:
        """Close the file."""
        self.array = None
        if self.file is not None:
            self.file.close()
        self.file = None

    def remove(self) -> None:
        """Close and remove the file."""
        self.close()
        self.checksums = []
        if self.path is not None:
            with self.explained("make room"):
                self.path.unlink(missing_ok=True)

    def changed(self, how: str) -> ValueError:
        """Return the error for a file that is not as it was written."""
        return ValueError(
            f"{self.caller}: {self.name} has changed since it was written, {how}; it stores "
            f'"{self.stored.grid.name}" between passes; fix: repeat the call, which computes it again.'
        )


class StoredGrids:
    """The grids that are stored between the passes of a prediction, each from its own pass to the last that reads it.

    Args:
        caller: The function that errors name.
        folder: Folder of the files; None for temporary files.
        stored: Step -> grid.
        tiles: For each axis of the volume, the tiles' own positions.
    """

    def __init__(
        self, caller: str, folder: Path | None, stored: Mapping[int, StoredGrid], tiles: Sequence[Sequence[Span]]
    ) -> None:
        self.caller, self.folder, self.stage = caller, folder, -1
        whole = [spans[-1][1] for spans in tiles]
        self.files = {
            step: StoredFile(
                caller,
                None if folder is None else folder / f"{step}{SUFFIX}",
                each,
                spans_in(each.grid, tiles, whole),
            )
            for step, each in stored.items()
        }

    def read(self, step: int, index: int, region: Region) -> Tensor:
        """Read a region of a grid around a tile's own positions."""
        return self.files[step].read(index, region)

    def write(self, step: int, index: int, block: Tensor) -> None:
        """Write a tile's own positions of a grid; make its file at the first tile."""
        file = self.files[step]
        if not file.checksums or index == 0:
            file.make()
        file.write(index, block)

    def skip(self, steps: Sequence[int], index: int) -> None:
        """Write the own positions of a tile that has none of some grids."""
        for step in steps:
            self.write(step, index, torch.empty(0, dtype=self.files[step].stored.dtype))

    def begin(self, stage: int) -> None:
        """Remove the files of grids that no pass from `stage` on reads, if it is a new pass."""
        if stage != self.stage:
            self.stage = stage
            for file in self.files.values():
                if file.stored.last < stage:
                    file.remove()

    def state(self) -> dict[str, Any]:
        """Return the checksums of all blocks."""
        return {"stored": {str(step): file.checksums for step, file in self.files.items()}}

    def load(self, state: Mapping[str, Any]) -> None:
        """Do nothing: `holds` has compared the files with the state."""

    def holds(self, state: Mapping[str, Any], stage: int) -> bool:
        """Whether the files that passes from `stage` on read hold what has the checksums of a state."""
        sums = {int(step): own for step, own in state.get("stored", {}).items()}
        return all(
            file.intact(sums.get(step, []))
            for step, file in self.files.items()
            if file.stored.last >= stage and sums.get(step)
        )


def store_grids(caller: str, plan: SpillPlan, size: Sequence[int], tile: Sequence[int], stream: Stream) -> StoredGrids:
    """Return the stored grids of a prediction, in the folder of its unfinished output, and add them to its state.

    If files do not hold any more what was stored, the prediction begins anew, with a warning.

    Args:
        caller: The function that errors name.
        plan: The plan of the grids.
        size: Size of the volume.
        tile: Size of the tiles.
        stream: Has the output and the progress.
    """
    folder = stream.output.folder if isinstance(stream.output, FileOutput) else None
    stored, progress = StoredGrids(caller, folder, plan.stored, axis_tiles(size, tile)), stream.progress
    if progress.summaries and not stored.holds(progress.summaries[-1], progress.stage):
        warnings.warn(
            f'{caller}: "{folder}" does not hold any more the grids that were stored between passes; all passes run '
            f"again.",
            stacklevel=2,
        )
        progress.restart()
    stream.merged = [*stream.merged, stored]
    return stored


def axis_tiles(size: Sequence[int], tile: Sequence[int]) -> list[list[Span]]:
    """Return for each axis of a volume the tiles' own positions."""
    return [
        [(start, min(start + own, length)) for start in range(0, length, own)]
        for length, own in zip(size, tile, strict=True)
    ]


def spans_in(grid: NetworkGrid, tiles: Sequence[Sequence[Span]], whole: Sequence[int]) -> list[list[Span]]:
    """Return for each axis the tiles' own positions in a grid, which has the volume's axes in their order."""
    scales = [axis_scale for axis_scale in grid.axis_scales if axis_scale is not None]
    return [
        [grid.span(axis_scale, span, length) for span in spans]
        for axis_scale, spans, length in zip(scales, tiles, whole, strict=True)
    ]


def to_bytes(block: Tensor) -> memoryview:
    """Return the bytes of a block."""
    return block.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data
