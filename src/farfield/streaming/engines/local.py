"""All tasks of a prediction in this process, one tile after the other."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from farfield.streaming.passes import Pass, Run
from farfield.streaming.progress import Saved, Stream
from farfield.streaming.records import Record, empty_record
from farfield.volumes.file_formats import OutputSpec
from farfield.volumes.image_metadata import ImageMetadata
from farfield.volumes.sink import FileOutput, check_path


def run_local(stream: Stream, quiet: bool) -> Any:
    """Run the tasks that are left, with a progress bar; return the finished output."""
    with show_progress(stream, quiet) as bar:
        for number, (records, each) in enumerate(zip(stream.records, stream.passes, strict=True)):
            bar.set_description(f"pass {number + 1} of {len(stream.passes)}")
            while not records.is_complete():  # a record that is damaged meanwhile is made again
                for index in sorted(set(range(each.tiles)) - records.finished()):
                    stream.run_task(number, index)
                    bar.update(count_units(each))
                records.settle()
    return stream.finish()


def show_progress(stream: Stream, quiet: bool) -> Any:
    """Return a progress bar over the work of all passes, from what is finished."""
    pairs = list(zip(stream.records, stream.passes, strict=True))
    done = sum(count_units(each) * len(records.finished()) for records, each in pairs)
    total = sum(count_units(each) * each.tiles for each in stream.passes)
    form = "{desc}{percentage:3.0f}%|{bar}| {elapsed}, {remaining} left"
    return tqdm(total=total, initial=done, bar_format=form, disable=quiet, file=sys.stderr)


def count_units(each: Pass) -> int:
    """Return the work of one tile of a pass: one without products reads and writes. Whole numbers add up exactly."""
    return max(1, round(each.work / each.tiles))


def write_whole(caller: str, path: Path, array: np.ndarray, metadata: ImageMetadata, overwrite: bool) -> Any:
    """Write an array in memory to a path, completely or not at all, and return it opened."""
    check_path(path, overwrite)
    output = FileOutput(caller, path, OutputSpec(array.shape, array.dtype, array.shape, metadata), overwrite)
    with contextlib.closing(Stream(output, {"model": "in one piece"}, Saved(array.shape), {})) as stream:
        stream.open(_InOnePiece(stream, array))
        return run_local(stream, quiet=True)


class _InOnePiece(Run):
    """Writes an array as one tile."""

    def __init__(self, stream: Stream, array: np.ndarray) -> None:
        self.stream, self.array = stream, array

    @property
    def passes(self) -> list[Pass]:
        return [Pass(1, self._write, 1.0)]

    def _write(self, index: int) -> Record:
        self.stream.write((slice(None),) * self.array.ndim, torch.from_numpy(self.array))
        return empty_record()
