"""Passes over tiles: shown while they run, saved as they go, taken up where they were."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from farfield.streaming.arrays import Region, Source, checksum
from farfield.streaming.formats import Wanted
from farfield.streaming.geometry import inner
from farfield.streaming.merging import Merged
from farfield.streaming.outputs import ArrayOutput, FileOutput, box_checksum, check_path, full_disk_says, to_numpy
from farfield.streaming.progress import Progress, Written, begin

# What a pass does with a tile, by its index and its own positions.
Take = Callable[[int, Region], None]


class Tiled:
    """A volume and the tiles it is read by.

    Args:
        source: The volume.
        tiles: The positions that each tile owns.
    """

    def __init__(self, source: Source, tiles: list[Region]) -> None:
        self.source, self.tiles = source, tiles


class Stream:
    """Passes over tiles.

    Args:
        caller: For errors.
        output: Where responses go.
        progress: How far they are.
        merged: What the attentions have heard; entries may come later.
        volumes: What is read, by name.
    """

    def __init__(
        self,
        caller: str,
        output: FileOutput | ArrayOutput,
        progress: Progress,
        merged: list[Merged],
        volumes: dict[str, Tiled],
    ) -> None:
        self.caller, self.output, self.progress, self.merged, self.volumes = caller, output, progress, merged, volumes

    def run(self, passes: Sequence[tuple[str, Take]], quiet: bool) -> Any:
        """Run the passes that are left, each over the tiles of a volume; return what the output is."""
        path = self.output.path if isinstance(self.output, FileOutput) else None
        said = full_disk_says(self.caller, path) if path else contextlib.nullcontext()
        with torch.no_grad(), said, contextlib.ExitStack() as stack:
            stack.callback(self.output.let_go)
            self.resume()
            counts = [len(self.volumes[name].tiles) for name, _ in passes]
            first = sum(counts[: self.progress.stage]) + self.progress.tile
            with tqdm(total=sum(counts), initial=first, unit="tile", disable=quiet, file=sys.stderr) as bar:
                for stage in range(self.progress.stage, len(passes)):
                    name, take = passes[stage]
                    bar.set_description(f"pass {stage + 1} of {len(passes)}")
                    for index in range(self.progress.tile, counts[stage]):
                        take(index, self.volumes[name].tiles[index])
                        self.progress.advance([each.state() for each in self.merged])
                        bar.update()
                    self.progress.next_stage()
            return self.output.finish()

    def resume(self) -> None:
        """Take up what was found before, after a look at whether the volumes still are what they were."""
        for merged, state in zip(self.merged, self.progress.found, strict=False):
            merged.load(state)
        for name, sums in self.progress.checksums.items():
            for index in range(len(sums)):
                self.read(name, index, self.volumes[name].tiles[index])

    def read(self, name: str, index: int, region: Region) -> Tensor:
        """Read a region of a volume around a tile's own positions, and see that these hold what they held before."""
        volume = self.volumes[name]
        grid = volume.source.read(region)
        found = checksum(grid[inner(volume.tiles[index], region)])
        sums = self.progress.checksums.setdefault(name, [])
        if index == len(sums):
            sums.append(found)
        elif sums[index] != found:
            raise ValueError(
                f"{self.caller}: the {name} has changed in tile {index} since it was begun; "
                f'fix: begin anew, where it writes to a path by removing the folder "….unfinished" beside it.'
            )
        return grid

    def write(self, index: tuple[slice, ...], box: Tensor) -> None:
        """Write a box of the tile at which the progress is, and note what it holds."""
        self.output.write(index, box)
        if isinstance(self.output, FileOutput):
            wanted = self.output.wanted
            spans = [list(span.indices(side)[:2]) for span, side in zip(index, wanted.shape, strict=True)]
            checksum = box_checksum(to_numpy(box).astype(wanted.dtype, copy=False))
            self.progress.written.append(Written(self.progress.stage, self.progress.tile, spans, checksum))


def progress_of(
    caller: str,
    output: FileOutput | ArrayOutput,
    identity: Callable[[], dict[str, str]],
    tile: Sequence[int],
    overwrite: bool | None,
) -> Progress:
    """Progress that is saved beside a file; elsewhere none is."""
    if isinstance(output, FileOutput):
        with full_disk_says(caller, output.path):
            return begin(caller, output, identity(), tuple(tile), overwrite)
    return Progress(None, {}, tuple(tile))


def write_whole(caller: str, path: Path, array: np.ndarray, axes: str, overwrite: bool) -> Any:
    """Write an array that is in memory to a path, as predictions are: whole or not at all. Return it, opened."""
    check_path(caller, path, overwrite)
    output = FileOutput(caller, path, Wanted(array.shape, array.dtype, axes, array.shape), overwrite)
    with full_disk_says(caller, path):
        begin(caller, output, {"model": "in one piece"}, array.shape, overwrite)
        try:
            output.write((slice(None),) * array.ndim, torch.from_numpy(array))
            return output.finish()
        finally:
            output.let_go()
