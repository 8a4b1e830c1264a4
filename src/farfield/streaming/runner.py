"""Run passes over tiles: show the progress, save it, and resume from it."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from farfield.streaming.resume import Progress, Saved, Written, begin, warn
from farfield.volumes.file_formats import OutputSpec
from farfield.volumes.image_metadata import ImageMetadata
from farfield.volumes.sink import ArrayOutput, FileOutput, box_checksum, check_path, to_numpy
from farfield.volumes.source import Readable, Region, checksum
from farfield.volumes.unfinished import explain_disk_errors

# What a pass does with a tile; its arguments are the tile's index and own positions.
TileFunction = Callable[[int, Region], None]


class TiledVolume(NamedTuple):
    """A volume and the own positions of the tiles by which it is read."""

    source: Readable
    tiles: list[Region]


class Stream:
    """Runs passes over the tiles of volumes, from the progress on; the states of `merged` are saved and loaded."""

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
        """Run the remaining passes, each with the name of the volume whose tiles it takes; return the finished output.

        Raises:
            ValueError: If a volume has changed since it was read first.
            OSError: If the output's disk is full, read-only or broken.
        """
        counts = [len(self.volumes[name].tiles) for name, _ in passes]
        with torch.no_grad(), contextlib.ExitStack() as stack:
            stack.callback(self.output.let_go)
            self._resume()
            first = sum(counts[: self.progress.stage]) + self.progress.tile
            bar = stack.enter_context(
                tqdm(total=sum(counts), initial=first, unit="tile", disable=quiet, file=sys.stderr)
            )
            for stage in range(self.progress.stage, len(passes)):
                name, function = passes[stage]
                bar.set_description(f"pass {stage + 1} of {len(passes)}")
                for index in range(self.progress.tile, counts[stage]):
                    function(index, self.volumes[name].tiles[index])
                    with self._writing():
                        self.progress.advance(self._states)
                    bar.update()
                with self._writing():
                    self.progress.next_stage(self._states)
            with self._writing():
                return self.output.finish()

    def _states(self) -> list[dict[str, Any]]:
        return [each.state() for each in self.merged]

    def _writing(self) -> AbstractContextManager[None]:
        """Explain errors of the disk to which a file output is written; those of other arrays pass."""
        if isinstance(self.output, FileOutput):
            return explain_disk_errors(self.caller, self.output.path)
        return contextlib.nullcontext()

    def _resume(self) -> None:
        """Load saved summaries, and check that the tiles that were read for them have not changed."""
        for merged, state in zip(self.merged, self.progress.summaries, strict=False):
            merged.load(state)
        for name, sums in self.progress.checksums.items():
            for key in list(sums):  # the sample, if each runs by itself, and the tile
                *sample, index = map(int, key.split())
                self.read(name, index, self.volumes[name].tiles[index], *sample)

    def read(self, name: str, index: int, region: Region, sample: int | None = None) -> Tensor:
        """Read a region of a volume for a tile, of all samples by default.

        Raises:
            ValueError: If the tile's own positions have changed since the first read.
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
            warn(
                f"{self.caller}: the result has infinite numbers, and the network is of float16, which ends at "
                f"{torch.finfo(box.dtype).max:g}; fix: model.float(), or model.bfloat16()."
            )
        with self._writing():
            self.output.write(index, box)
        if isinstance(self.output, FileOutput):
            spec = self.output.spec
            spans = [list(span.indices(length)[:2]) for span, length in zip(index, spec.shape, strict=True)]
            checksum = box_checksum(to_numpy(box).astype(spec.dtype, copy=False))
            self.progress.written.append(Written(self.progress.stage, self.progress.tile, spans, checksum))


def make_progress(
    caller: str,
    output: FileOutput | ArrayOutput,
    identity: dict[str, str],
    tile: Sequence[int],
    overwrite: bool | None,
    stored: Sequence[tuple[int, int]] = (),
    on_disk: bool = False,
) -> Progress:
    """Return the progress: saved beside a file output, where it may resume as in `begin`; not saved for others."""
    planned = Saved(tuple(tile), tuple(stored), on_disk)
    if not isinstance(output, FileOutput):
        return Progress(None, identity, planned)
    with explain_disk_errors(caller, output.path):
        return begin(caller, output, Progress(output.folder, identity, planned), overwrite)


def write_whole(caller: str, path: Path, array: np.ndarray, metadata: ImageMetadata, overwrite: bool) -> Any:
    """Write an array in memory to a path, completely or not at all, and return it opened."""
    check_path(caller, path, overwrite)
    output = FileOutput(caller, path, OutputSpec(array.shape, array.dtype, array.shape, metadata), overwrite)
    make_progress(caller, output, {"model": "in one piece"}, array.shape, overwrite)
    with explain_disk_errors(caller, path), contextlib.ExitStack() as stack:
        stack.callback(output.let_go)
        output.write((slice(None),) * array.ndim, torch.from_numpy(array))
        return output.finish()
