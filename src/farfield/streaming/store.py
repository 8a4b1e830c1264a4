"""Values of a graph that are stored between passes, in memory or in files in which every tile is a block."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from farfield._files import replace_file
from farfield._refusals import is_refusal, refusal
from farfield.streaming.blocks import Blocks
from farfield.streaming.checksums import bytes_of, checksum
from farfield.streaming.graph import Info
from farfield.streaming.spans import Box, Layout, box_shape, take_box, write_box
from farfield.volumes.source import index_within, overlap, release, size_of
from farfield.volumes.unfinished import FULL_DISK, REASONS

# Names of the files, in the folder of the unfinished output, end with this.
SUFFIX = ".value"
# Bytes of blocks that a read has resident at once.
_HELD = 2**20
# Bytes of a checksum at the end of a block that is a file.
_CHECKSUM = 8


class StoredValue(ABC):
    """A value that is stored between passes: each tile writes its own part, and any tile reads any box.

    It begins with the first write of a sample, and goes on in another process where `holds` says so. Whoever keeps a
    value is the only one to know where: in memory, in a file, or in files that several processes share.
    """

    @abstractmethod
    def write(self, index: int, box: Box, block: Tensor) -> int | None:
        """Write a tile's own part; return its checksum, by which `holds` finds it again, or None if it does not."""

    @abstractmethod
    def read(self, index: int, box: Box) -> Tensor:
        """Read a box for a tile, as numbers on the device; refuse what is not as it was written."""

    @abstractmethod
    def holds(self, checksums: np.ndarray, tiles: Collection[int]) -> bool:
        """Whether the blocks of these tiles are there, by their checksums; they are then read and continued."""

    @property
    def is_reusable(self) -> bool:
        """Whether another value can take over what this one is kept in."""
        return False

    @abstractmethod
    def take_over(self, other: Any) -> None:
        """Begin anew in what another value, or this one, was kept in, which nothing reads any more."""

    @abstractmethod
    def free(self) -> None:
        """Let go of a value that this process does not read any more."""

    @abstractmethod
    def remove(self) -> None:
        """Remove a value that no process reads any more."""

    @abstractmethod
    def close(self) -> None:
        """Let go of memory and open files; what has a name stays."""

    def begin(self, sample: int) -> None:  # noqa: B027  # one value after the other is in one place
        """Write and read the value of a sample from now on."""

    def clean(self, *, is_read: bool) -> None:  # noqa: B027  # `free` and `take_over` leave nothing
        """Remove what other processes have left of earlier samples, and of this one unless it is read."""


class StoredInMemory(StoredValue):
    """A value that is stored in memory, from the first write until it is removed."""

    def __init__(self, info: Info, layout: Layout, device: torch.device) -> None:
        self.info, self.layout, self.device = info, layout, device
        self.whole: Tensor | None = None

    def write(self, index: int, box: Box, block: Tensor) -> int | None:
        """Write a tile's own part; memory ends with its process, and has no checksum."""
        if self.whole is None:
            self.whole = torch.empty(self.info.shape, dtype=self.info.dtype, device=self.device)
        write_box(self.whole, self.layout, box, block)
        return None

    def read(self, index: int, box: Box) -> Tensor:
        if self.whole is None:
            raise LookupError("no tile of the value has been stored")
        # As it is read from a file: the order in which a kernel adds, and so its rounding, follows from strides.
        return take_box(self.whole, self.layout, box).contiguous()

    def holds(self, checksums: np.ndarray, tiles: Collection[int]) -> bool:
        """Whether nothing of these tiles is needed."""
        return len(tiles) == 0

    def take_over(self, other: Any) -> None:
        """Free a value that nothing reads any more."""
        other.remove()

    def remove(self) -> None:
        """Free it."""
        self.whole = None

    free = close = remove


class StoredInFile(StoredValue):
    """A value that is stored in a file; each tile's own part, if it has one, is a contiguous block, in their order."""

    # What computes it again where it has changed.
    again = "repeat the call"

    def __init__(self, path: Path | None, name: str, info: Info, blocks: Blocks, device: torch.device) -> None:
        self.path, self.name, self.info, self.blocks, self.device = path, name, info, blocks, device
        # Of each tile, 0 for those that are not written; None before the first is.
        self.checksums: np.ndarray | None = None
        self.file: Any | None = None
        self.array: Any = None

    @property
    def is_reusable(self) -> bool:
        """Whether another value can take over its file, which is open."""
        return self.file is not None

    @property
    def _described(self) -> str:
        return f'"{self.path}"' if self.path is not None else f"the temporary file of {self.name}"

    def write(self, index: int, box: Box, block: Tensor) -> int | None:
        """Write a tile's own part; make the file, and reserve its disk space, at the first."""
        if self.checksums is None:
            self._make()
            self.checksums = np.zeros(len(self.blocks.cores), np.int64)
        content = bytes_of(block)
        self.checksums[index] = own_sum = checksum(content)
        with self._explained():
            file = self._opened()
            file.seek(self.blocks.find(index)[0])
            while len(content):
                content = content[file.write(content) :]
        return own_sum

    def _make(self) -> None:
        with self._explained():
            # Open until the last pass that reads it has run.
            if self.file is None:
                self.remove()
                self.file = (
                    tempfile.TemporaryFile(buffering=0)  # noqa: SIM115
                    if self.path is None
                    else self.path.open("w+b", buffering=0)
                )
            os.truncate(self.file.fileno(), self.blocks.total)
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(self.file.fileno(), 0, self.blocks.total)

    def take_over(self, other: Any) -> None:
        """Take the file of a value that nothing reads any more: pages that are there are written ten times as fast."""
        if other.file is None or os.name != "posix":  # elsewhere an opened file keeps its name
            other.remove()
            return
        if self.path is not None and other.path is not None and other is not self:
            with self._explained():
                other.path.replace(self.path)
        self.file, other.file = other.file, self.file
        self.array = other.array = None
        self.checksums = other.checksums = None

    def read(self, index: int, box: Box) -> Tensor:
        """Read a box for a tile; refuse a file of which the tile's own part was changed since it was written."""
        if not self._is_intact(index):
            raise self._changed(f"in tile {index}")
        spans = [span for dim in box for span in dim]
        result, held = torch.empty(size_of(spans), dtype=self.info.dtype, device="cpu"), 0
        for each, part in self.blocks.find_met(spans):
            both = overlap(spans, part) or ()
            block = torch.from_numpy(mapped := self._map_block(each)).view(self.info.dtype)
            result[index_within(both, spans)] = block.view(size_of(part))[index_within(both, part)]
            held += mapped.nbytes
            if held > _HELD:  # or all neighbors of a tile would be resident at once
                release(mapped)
                held = 0
        if held:
            release(mapped)
        return result.reshape(box_shape(box)).to(self.device)

    def _is_intact(self, index: int) -> bool:
        """Whether the tile's own block is as it was written."""
        own_sum = 0 if self.checksums is None else self.checksums[index]
        return own_sum == 0 or checksum(self._map_block(index).data) == own_sum

    def _map_block(self, index: int) -> Any:
        return self._mapped()[slice(*self.blocks.find(index))]

    def holds(self, checksums: np.ndarray, tiles: Collection[int]) -> bool:
        """Whether the file holds the blocks of these tiles, by their checksums; they are then read and continued."""
        needed = np.fromiter(filter(self.blocks.has, tiles), np.int64)
        if not len(needed):
            return True
        if not checksums[needed].all() or self.path is None or self.path.is_symlink() or not self.path.is_file():
            return False
        self.checksums = np.zeros_like(checksums)
        self.checksums[needed] = checksums[needed]
        try:
            same = all(map(self._is_intact, map(int, needed)))
        except ValueError:
            same = False
        if not same:
            self.checksums = None
            return False
        release(self._mapped())
        return True

    def _mapped(self) -> Any:
        """Return the file as an array of bytes; refuse one that became shorter, of which reading kills the process."""
        file = self._opened()
        if os.fstat(file.fileno()).st_size < self.blocks.total:
            raise self._changed("and is shorter")
        if self.array is None:
            with self._explained():
                self.array = np.asarray(np.memmap(file, np.uint8, "r+", shape=(self.blocks.total,)))
        return self.array

    def _opened(self) -> Any:
        if self.file is None:
            if self.path is None:
                raise self._changed("and is gone")
            with self._explained():
                self.file = self.path.open("r+b", buffering=0)
        return self.file

    def close(self) -> None:
        """Close the file, which ends one without a name; another is opened again where it is read."""
        self.array = None
        if self.file is not None:
            self.file.close()
        self.file = None

    def remove(self) -> None:
        """Close and remove the file."""
        self.close()
        self.checksums = None
        if self.path is not None:
            with self._explained():
                self.path.unlink(missing_ok=True)

    free = remove

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Replace an error of the disk by one that names the file and the fix."""
        try:
            yield
        except OSError as error:
            if is_refusal(error):  # explained within
                raise
            reason, fix = REASONS.get(error.errno or 0, (os.strerror(error.errno or 0).lower(), "check the disk"))
            fix = f"make room for its {self.blocks.total:,} bytes" if error.errno in FULL_DISK else fix
            problem = f"cannot write {self._described}, which stores {self.name} between passes: {reason}"
            raise refusal(OSError, error.errno, f"{problem}; fix: {fix}, and repeat the call.") from error

    def _changed(self, how: str) -> ValueError:
        return refusal(
            ValueError,
            f"{self._described} has changed since it was written, {how}; it stores {self.name} between "
            f"passes; fix: {self.again}, which computes it again.",
        )


class StoredInBlocks(StoredInFile):
    """A value of which each block is a file of its own, which any process may write, and any reads.

    A file ends with its checksum. Each sample has files of its own: a process that is late overwrites none of the next.
    """

    sample = 0
    again = "repeat the call without part="

    def __init__(self, path: Path, name: str, info: Info, blocks: Blocks, device: torch.device) -> None:
        super().__init__(path, name, info, blocks, device)
        self.folders = path  # that of one sample begins with its number

    def begin(self, sample: int) -> None:
        self.sample = sample

    def write(self, index: int, box: Box, block: Tensor) -> int | None:
        content = bytes_of(block)
        own_sum = checksum(content)
        with self._explained():
            replace_file(self._file(index), content, own_sum.to_bytes(_CHECKSUM, "little"))
        return own_sum

    def holds(self, checksums: np.ndarray, tiles: Collection[int]) -> bool:
        """Whether there are the blocks of these tiles, by their checksums."""
        needed = filter(self.blocks.has, map(int, tiles))
        try:
            return all(self._is_intact(index) and checksums[index] == self._read_sum(index) for index in needed)
        except ValueError:
            return False

    def clean(self, *, is_read: bool) -> None:
        """Remove the files of earlier samples, and of this one unless it is read; other processes may be ahead."""
        for folder in self.folders.parent.glob(f"*-{self.folders.name}"):
            sample = int(folder.name.partition("-")[0])
            if sample < self.sample or (sample == self.sample and not is_read):
                shutil.rmtree(folder, ignore_errors=True)

    def remove(self) -> None:
        """Remove the files."""
        self.clean(is_read=False)

    def take_over(self, other: Any) -> None:
        """Leave what other processes may still read to `clean`: blocks that are written are files of their own."""

    def free(self) -> None:
        """Leave what other processes may still read to `clean`."""

    @property
    def _folder(self) -> Path:
        return self.folders.with_name(f"{self.sample}-{self.folders.name}")

    @property
    def _described(self) -> str:
        return f'"{self._folder}"'

    def _file(self, index: int) -> Path:
        return self._folder / str(index)

    def _is_intact(self, index: int) -> bool:
        return not self.blocks.has(index) or checksum(self._map_block(index).data) == self._read_sum(index)

    def _read_sum(self, index: int) -> int:
        with self._file(index).open("rb") as file:
            file.seek(-_CHECKSUM, os.SEEK_END)
            return int.from_bytes(file.read(), "little")

    def _map_block(self, index: int) -> Any:
        start, stop = self.blocks.find(index)
        length = stop - start
        try:
            with self._file(index).open("r+b") as file:
                if os.fstat(file.fileno()).st_size != length + _CHECKSUM:
                    raise self._changed("and has another length")
                return np.asarray(np.memmap(file, np.uint8, "r+", shape=(length,)))
        except FileNotFoundError:
            raise self._changed(f"and has no block of tile {index}") from None
