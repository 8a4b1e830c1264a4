"""Run passes over tiles: show the progress, save it, and resume from it."""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from farfield.streaming.resume import Progress, Written, begin
from farfield.volumes.file_formats import OutputSpec
from farfield.volumes.image_metadata import ImageMetadata
from farfield.volumes.sink import ArrayOutput, FileOutput, box_checksum, check_path, to_numpy
from farfield.volumes.source import Readable, Region, checksum
from farfield.volumes.unfinished import explain_disk_errors

# What a pass does with a tile; its arguments are the tile's index and own positions.
TileFunction = Callable[[int, Region], None]


class TiledVolume:
    """A volume and the tiles by which it is read.

    Args:
        source: The volume.
        tiles: Own positions of each tile.
    """

    def __init__(self, source: Readable, tiles: list[Region]) -> None:
        self.source, self.tiles = source, tiles


class Stream:
    """Runs passes over the tiles of volumes.

    Args:
        caller: The function that errors name.
        output: Where responses are written.
        progress: The next pass and tile, and the state after those before them.
        merged: Summary of each layer, and whatever else is saved; may be set later, before `run`.
        volumes: Name -> volume that is read.
    """

    def __init__(
        self,
        caller: str,
        output: FileOutput | ArrayOutput,
        progress: Progress,
        merged: Sequence[Any],
        volumes: dict[str, TiledVolume],
    ) -> None:
        self.caller, self.output, self.progress, self.merged, self.volumes = caller, output, progress, merged, volumes
        self.overflowed = False  # whether there was a warning

    def run(self, passes: Sequence[tuple[str, TileFunction]], quiet: bool) -> Any:
        """Run the remaining passes, and return the finished output.

        Args:
            passes: For each pass the name of a volume, and the function that is called for each of its tiles.
            quiet: Whether to show no progress.

        Raises:
            ValueError: If a volume has changed since it was read first.
            OSError: If the output's disk is full, read-only or broken.
        """
        with torch.no_grad(), contextlib.ExitStack() as stack:
            stack.callback(self.output.let_go)
            self.resume()
            counts = [len(self.volumes[name].tiles) for name, _ in passes]
            first = sum(counts[: self.progress.stage]) + self.progress.tile
            with tqdm(total=sum(counts), initial=first, unit="tile", disable=quiet, file=sys.stderr) as bar:
                for stage in range(self.progress.stage, len(passes)):
                    name, function = passes[stage]
                    bar.set_description(f"pass {stage + 1} of {len(passes)}")
                    for index in range(self.progress.tile, counts[stage]):
                        function(index, self.volumes[name].tiles[index])
                        with self.writing():
                            self.progress.advance([each.state() for each in self.merged])
                        bar.update()
                    with self.writing():
                        self.progress.next_stage()
            with self.writing():
                return self.output.finish()

    def writing(self) -> AbstractContextManager[None]:
        """Explain errors of the disk to which a file output is written; those of other arrays pass."""
        if isinstance(self.output, FileOutput):
            return explain_disk_errors(self.caller, self.output.path)
        return contextlib.nullcontext()

    def resume(self) -> None:
        """Load saved summaries, and check that the tiles that were read for them have not changed."""
        for merged, state in zip(self.merged, self.progress.summaries, strict=False):
            merged.load(state)
        for name, sums in self.progress.checksums.items():
            for key in list(sums):
                sample, index = parse_key(key)
                self.read(name, index, self.volumes[name].tiles[index], sample)

    def read(self, name: str, index: int, region: Region, sample: int | None = None) -> Tensor:
        """Read a region for a tile, and check that the tile's own positions have not changed since the first read.

        Args:
            name: Name of the volume.
            index: Index of the tile.
            region: The region.
            sample: Index of the sample that is read; None for all.

        Raises:
            ValueError: If they have changed.
        """
        volume = self.volumes[name]
        grid, own = volume.source.read(region, sample), volume.tiles[index]
        if any(start < first or stop > last for (start, stop), (first, last) in zip(own, region, strict=True)):
            return grid
        inside: Any = [
            slice(start - first, stop - first) for (start, stop), (first, _) in zip(own, region, strict=True)
        ]
        new_sum = checksum(grid[(..., *inside)])
        key = str(index) if sample is None else f"{sample} {index}"
        if self.progress.checksums.setdefault(name, {}).setdefault(key, new_sum) != new_sum:
            raise ValueError(
                f"{self.caller}: the {name} has changed in tile {index} since the first read; fix: begin anew with "
                f'a {name} that stays as it is; if out is a path, remove the folder "….unfinished" beside it first.'
            )
        return grid

    def write(self, index: tuple[slice, ...], box: Tensor) -> None:
        """Write a box of the current tile to the output; record its checksum if the output is a file.

        What a network in float16 cannot hold is infinite in its result, of which there is one warning.
        """
        if box.dtype == torch.float16 and not self.overflowed and box.isinf().any():
            self.overflowed = True
            warnings.warn(
                f"{self.caller}: the result has infinite numbers, and the network is of float16, which ends at "
                f"{torch.finfo(box.dtype).max:g}; fix: model.float(), or model.bfloat16().",
                stacklevel=2,
            )
        with self.writing():
            self.output.write(index, box)
        if isinstance(self.output, FileOutput):
            spec = self.output.spec
            spans = [list(span.indices(length)[:2]) for span, length in zip(index, spec.shape, strict=True)]
            checksum = box_checksum(to_numpy(box).astype(spec.dtype, copy=False))
            self.progress.written.append(Written(self.progress.stage, self.progress.tile, spans, checksum))


def parse_key(key: str) -> tuple[int | None, int]:
    """Return the sample, None for all, and the tile that a checksum is of."""
    *sample, index = map(int, key.split())
    return (sample[0] if sample else None), index


def make_progress(
    caller: str,
    output: FileOutput | ArrayOutput,
    identity: dict[str, str],
    tile: Sequence[int],
    overwrite: bool | None,
    stored: Sequence[tuple[int, int]] = (),
    on_disk: bool = False,
) -> Progress:
    """Return the progress: saved beside a file output, where it may resume, and not saved for other outputs.

    Args:
        caller: The function that errors name.
        output: The output.
        identity: Name -> fingerprint of what the result depends on.
        tile: Size of the tiles.
        overwrite: Whether an unfinished file of another identity is replaced; None is no.
        stored: Node and output of each value that is stored between passes.
        on_disk: Whether those are in files.

    Raises:
        ValueError, FileExistsError, BlockingIOError: As in `begin`.
    """
    if isinstance(output, FileOutput):
        with explain_disk_errors(caller, output.path):
            return begin(caller, output, identity, tuple(tile), overwrite, stored, on_disk)
    return Progress(None, {}, tuple(tile))


def write_whole(caller: str, path: Path, array: np.ndarray, metadata: ImageMetadata, overwrite: bool) -> Any:
    """Write an array in memory to a path, completely or not at all, and return it opened."""
    check_path(caller, path, overwrite)
    output = FileOutput(caller, path, OutputSpec(array.shape, array.dtype, array.shape, metadata), overwrite)
    with explain_disk_errors(caller, path):
        begin(caller, output, {"model": "in one piece"}, array.shape, overwrite)
        try:
            output.write((slice(None),) * array.ndim, torch.from_numpy(array))
            return output.finish()
        finally:
            output.let_go()
