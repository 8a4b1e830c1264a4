"""Values of a graph that are stored between passes, in memory or in files in which every tile is a block."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import tempfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from farfield.streaming.graph import Info, Value
from farfield.streaming.plan import GraphPlan
from farfield.streaming.spans import (
    Box,
    Layout,
    box_shape,
    narrow_to,
    read_box,
    region_of,
    whole_box,
    write_box,
)
from farfield.volumes.source import release
from farfield.volumes.unfinished import FULL_DISK, REASONS

# Names of the files, in the folder of the unfinished output, end with this.
SUFFIX = ".value"


class StoredInMemory:
    """A value that is stored in memory.

    Args:
        info: Its shape and dtype.
        layout: Its pieces.
        device: Where it is stored.
    """

    def __init__(self, info: Info, layout: Layout, device: torch.device) -> None:
        self.info, self.layout, self.device = info, layout, device
        self.whole: Tensor | None = None

    def write(self, index: int, box: Box, block: Tensor) -> None:
        """Write a tile's own part."""
        if self.whole is None:
            self.whole = torch.empty(self.info.shape, dtype=self.info.dtype, device=self.device)
        write_box(self.whole, self.layout, box, block)

    def read(self, index: int, box: Box) -> Tensor:
        """Read a box for a tile."""
        if self.whole is None:
            raise LookupError("no tile of the value has been stored")
        # As it is read from a file: the order in which a kernel adds, and so its rounding, follows from strides.
        return read_box(self.whole, region_of(whole_box(self.layout)), box).contiguous()

    def holds(self, checksums: Mapping[str, int], tiles: Sequence[int]) -> bool:
        """Whether nothing of these tiles is needed: memory ends with its process."""
        return not tiles

    def remove(self) -> None:
        """Free it."""
        self.whole = None

    close = remove


class StoredInFile:
    """A value that is stored in a file; each tile's own part is a contiguous block, in the order of the tiles.

    Args:
        caller: The function that errors name.
        path: Path of the file; None for a temporary file without a name, which ends with the process.
        name: What errors call the value.
        info: Its shape and dtype.
        boxes: Each tile's own part; None for one that has none.
        device: Where it is read to.
    """

    def __init__(
        self, caller: str, path: Path | None, name: str, info: Info, boxes: Sequence[Box | None], device: torch.device
    ) -> None:
        self.caller, self.path, self.name, self.info, self.boxes = caller, path, name, info, boxes
        self.device = device
        sizes = [0 if box is None else math.prod(box_shape(box)) * info.dtype.itemsize for box in boxes]
        self.offsets = [0, *itertools.accumulate(sizes)]
        self.checksums: dict[int, int] = {}
        self.file: Any | None = None
        self.array: Any = None

    @property
    def described(self) -> str:
        """The name of the file in errors."""
        return f'"{self.path}"' if self.path is not None else f"the temporary file of {self.name}"

    def write(self, index: int, box: Box, block: Tensor) -> None:
        """Write a tile's own part; make the file at the first.

        Raises:
            OSError: If it cannot be written.
        """
        if not self.checksums:
            self.make()
        content = block.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data
        self.checksums[index] = zlib.crc32(content)
        with self.explained("make room"):
            file = self.opened()
            file.seek(self.offsets[index])
            while len(content):
                content = content[file.write(content) :]

    def make(self) -> None:
        """Make the file anew, and reserve its disk space.

        Raises:
            OSError: If the disk has no room for it.
        """
        self.remove()
        with self.explained(f"make room for its {self.offsets[-1]:,} bytes"):
            # Open until the last pass that reads it has run.
            self.file = (
                tempfile.TemporaryFile(buffering=0)  # noqa: SIM115
                if self.path is None
                else self.path.open("w+b", buffering=0)
            )
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(self.file.fileno(), 0, self.offsets[-1])

    def read(self, index: int, box: Box) -> Tensor:
        """Read a box for a tile, and check the tile's own part.

        Raises:
            ValueError: If the file was changed since it was written.
        """
        array = self.mapped()
        self.check(array, index)
        spans = [span for dim in box for span in dim]
        result = torch.empty([stop - start for start, stop in spans], dtype=self.info.dtype, device="cpu")
        for place, own in enumerate(self.boxes):
            if own is None:
                continue
            parts = [span for dim in own for span in dim]
            both = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(spans, parts, strict=True)]
            if any(start >= stop for start, stop in both):
                continue
            target, block = result, self.block(array, place, parts)
            for axis, (span, whole, part) in enumerate(zip(both, spans, parts, strict=True)):
                target, block = narrow_to(target, axis, (whole,), span), narrow_to(block, axis, (part,), span)
            target.copy_(block)
            release(array)  # after each block, or all neighbors of a tile would be resident at once
        return result.reshape(box_shape(box)).to(self.device)

    def check(self, array: Any, index: int) -> None:
        """Compare a tile's block of the mapped file with its checksum.

        Raises:
            ValueError: If it was changed since it was written.
        """
        if index in self.checksums and self.checksum(array, index) != self.checksums[index]:
            raise self.changed(f"in tile {index}")

    def checksum(self, array: Any, index: int) -> int:
        """Return the checksum of a block of the mapped file."""
        return zlib.crc32(array[self.offsets[index] : self.offsets[index + 1]])

    def block(self, array: Any, index: int, parts: Sequence[tuple[int, int]]) -> Tensor:
        """Return a block of the mapped file, as a tensor that shares its memory."""
        flat = np.asarray(array[self.offsets[index] : self.offsets[index + 1]])
        return torch.from_numpy(flat).view(self.info.dtype).reshape([stop - start for start, stop in parts])

    def holds(self, checksums: Mapping[str, int], tiles: Sequence[int]) -> bool:
        """Whether the file holds the blocks of these tiles, by their checksums; they are then read and continued."""
        needed = {index: checksums.get(str(index)) for index in tiles if self.boxes[index] is not None}
        if not needed:
            return True
        if None in needed.values() or self.path is None or self.path.is_symlink() or not self.path.is_file():
            return False
        try:
            array = self.mapped()
        except ValueError:
            return False
        same = all(self.checksum(array, index) == own for index, own in needed.items())
        release(array)
        self.checksums = {index: own for index, own in needed.items() if same and own is not None}
        return same

    def mapped(self) -> Any:
        """Return the file as an array of bytes in memory that is mapped.

        Raises:
            OSError: If it cannot be mapped.
            ValueError: If it became shorter; reading it would kill the process.
        """
        file = self.opened()
        if os.fstat(file.fileno()).st_size < self.offsets[-1]:
            raise self.changed("and is shorter")
        if self.array is None:
            with self.explained("make room"):
                self.array = np.memmap(file, np.uint8, "r+", shape=(self.offsets[-1],))
        return self.array

    def opened(self) -> Any:
        """Return the opened file."""
        if self.file is None:
            if self.path is None:
                raise self.changed("and is gone")
            with self.explained("make room"):
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
        self.checksums = {}
        if self.path is not None:
            with self.explained("make room"):
                self.path.unlink(missing_ok=True)

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
            problem = f"cannot write {self.described}, which stores {self.name} between passes: {reason}"
            raise OSError(error.errno, f"{self.caller}: {problem}; fix: {fix}, and repeat the call.") from error

    def changed(self, how: str) -> ValueError:
        """Return the error for a file that is not as it was written."""
        return ValueError(
            f"{self.caller}: {self.described} has changed since it was written, {how}; it stores {self.name} between "
            "passes; fix: repeat the call, which computes it again."
        )


class Store:
    """The values that are stored between the passes of a plan, each from its own pass to the last that reads it.

    Args:
        caller: The function that errors name.
        plan: The plan.
        on_disk: Whether they are stored in files.
        folder: Folder of the files; None for temporary files.
        device: Where they are read to.
    """

    def __init__(self, caller: str, plan: GraphPlan, on_disk: bool, folder: Path | None, device: torch.device) -> None:
        self.plan = plan
        self.values: dict[Value, StoredInMemory | StoredInFile] = {}
        for value in plan.stored:
            info, layout = plan.labelled.graph.info(value), plan.labelled.layouts[value]
            if not on_disk:
                self.values[value] = StoredInMemory(info, layout, device)
                continue
            path = None if folder is None else folder / f"{value.node}-{value.output}{SUFFIX}"
            boxes = [plan.own_box(value, tile) for tile in plan.tiles]
            name = f'"{plan.labelled.graph.nodes[value.node].path}"'
            self.values[value] = StoredInFile(caller, path, name, info, boxes, device)

    def read(self, value: Value, index: int, box: Box) -> Tensor:
        """Read a box of a value for a tile."""
        return self.values[value].read(index, box)

    def write(self, value: Value, index: int, box: Box, block: Tensor) -> None:
        """Write a tile's own part of a value."""
        self.values[value].write(index, box, block)

    def end(self, stage: int) -> None:
        """Remove what no pass after this one reads."""
        for value, last in self.plan.stored.items():
            if last <= stage:
                self.values[value].remove()

    def close(self) -> None:
        """Let go of memory and opened files; what is in files with a name stays there."""
        for each in self.values.values():
            each.close()

    def state(self) -> dict[str, Any]:
        """Return the checksums of all blocks that are in files."""
        files = {value: each for value, each in self.values.items() if isinstance(each, StoredInFile)}
        return {
            f"{value.node}-{value.output}": {str(index): own for index, own in each.checksums.items()}
            for value, each in files.items()
        }

    def holds(self, state: Mapping[str, Mapping[str, int]], stage: int, index: int) -> bool:
        """Whether all is there that a pass needs to go on with a tile: what it reads, and what it stored before.

        Args:
            state: What `state` returned.
            stage: The pass.
            index: The tile.
        """
        for value, each in self.values.items():
            level, needed = self.plan.level_of(value), 0
            if level < stage <= self.plan.stored[value]:
                needed = len(self.plan.tiles)
            elif level == stage:
                needed = index
            if not each.holds(state.get(f"{value.node}-{value.output}", {}), range(needed)):
                self.end(len(self.plan.stages))
                return False
        return True
