"""Keys and values of softmax attention over all positions, stored on disk in place of memory, and read in blocks."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from farfield.streaming.geometry import StoredGrid, count_positions
from farfield.streaming.runner import Stream
from farfield.streaming.softmax_layer import SoftmaxLayer
from farfield.streaming.stored_grids import StoredFile, spans_in
from farfield.streaming.summaries import Merged, check_keys
from farfield.volumes.sink import FileOutput
from farfield.volumes.source import Span, release

# Names of the files, in the folder of the unfinished output, end with this.
SUFFIX = ".keys"


class StoredKeys:
    """Keys and values of all tiles of one softmax attention, in a file; each tile is a block, in their order.

    Args:
        name: What errors begin with.
        layer: The attention.
        file: The file, whose grid has the channels of keys, then those of values.
    """

    def __init__(self, name: str, layer: SoftmaxLayer, file: StoredFile) -> None:
        self.name, self.layer, self.file = name, layer, file
        self.indices = {
            tuple(start for start, _ in part): index for index, part in enumerate(file.parts) if count_positions(part)
        }
        self.device = torch.device("cpu")

    @property
    def parts(self) -> list[int]:
        """The checksums of the blocks that were written."""
        return self.file.checksums

    def add(self, parts: tuple[Tensor, Tensor], origin: tuple[int, ...]) -> None:
        """Write keys and values `(batch, heads, positions, channels)` of the tile at `origin`.

        Raises:
            ValueError: If they are not finite.
            OSError: If they cannot be written.
        """
        check_keys(self.name, parts, origin)
        if not self.file.checksums or self.indices[origin] == 0:
            self.file.make()
        empty = torch.empty(0, dtype=self.file.stored.dtype)
        for index in range(len(self.file.checksums), self.indices[origin]):  # tiles without positions of the grid
            self.file.write(index, empty)
        self.file.write(self.indices[origin], torch.cat([part.mT.flatten(1, 2) for part in parts], 1))

    def whole(self, device: torch.device) -> StoredKeys:
        """Return this summary, whose blocks are moved one by one."""
        self.device = device
        return self

    def blocks(self, positions: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield keys and values in blocks of at most so many positions.

        Raises:
            ValueError: If the file was changed since it was written.
        """
        heads, channels = self.layer.heads, self.layer.channels
        array = self.file.mapped()
        for index in range(len(self.file.checksums)):
            self.file.check(array, index)
            both = self.file.block(array, index).flatten(2).split([heads * each for each in channels], 1)
            key, value = (part.unflatten(1, (heads, -1)).mT.split(positions, 2) for part in both)
            yield from ((one.to(self.device), other.to(self.device)) for one, other in zip(key, value, strict=True))
            release(array)  # or the whole file would be resident

    def state(self) -> dict[str, Any]:
        """Return the state that `load` resumes from."""
        return {"keys": self.file.checksums}

    def load(self, state: Mapping[str, Any]) -> None:
        """Do nothing: `store_keys` has compared the file with the state."""


def store_keys(
    caller: str,
    merged: list[Merged],
    layers: Sequence[Any],
    keys: Mapping[int, StoredGrid],
    tiles: Sequence[Sequence[Span]],
    passes: int,
    stream: Stream,
) -> None:
    """Replace the empty summaries of some softmax attentions by ones that are stored on disk.

    If a file does not hold any more what was stored, the prediction begins anew, with a warning.

    Args:
        caller: The function that errors name.
        merged: Summary of each call.
        layers: Layer of each call.
        keys: Call -> grid of its keys and values.
        tiles: For each axis of the volume, the tiles' own positions.
        passes: Number of passes; after the last the files are not needed, and may have been removed.
        stream: Has the output and the progress.
    """
    folder = stream.output.folder if isinstance(stream.output, FileOutput) else None
    whole, saved, intact = [spans[-1][1] for spans in tiles], stream.progress.summaries, True
    for call, grid in keys.items():
        path = None if folder is None else folder / f"{call}{SUFFIX}"
        file = StoredFile(caller, path, grid, spans_in(grid.grid, tiles, whole))
        merged[call] = StoredKeys(f"{caller}: {grid.grid.name}", layers[call], file)
        sums = saved[call]["keys"] if saved and stream.progress.stage < passes else []
        intact = intact and (not sums or file.intact(sums))
    if not intact:
        warnings.warn(
            f'{caller}: "{folder}" does not hold any more the keys and values that were stored between passes; all '
            "passes run again.",
            stacklevel=2,
        )
        stream.progress.restart()
