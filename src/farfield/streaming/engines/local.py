"""All tasks of a prediction in this process: one tile after the other, or tiles of a pass side by side in threads."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextvars import ContextVar, copy_context
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from farfield.ops.modes import set_threads, use_threads
from farfield.streaming.passes import Pass, Run
from farfield.streaming.progress import Stream
from farfield.streaming.records import Record, empty_record
from farfield.volumes.image_metadata import ImageMetadata
from farfield.volumes.levels import OutputSpec
from farfield.volumes.sink import FileOutput, check_path

# What makes the progress bar in place of tqdm's; each thread has its own.
_BAR: ContextVar[Callable[..., Any] | None] = ContextVar("_BAR", default=None)


@contextlib.contextmanager
def use_progress_bar(make: Callable[..., Any]) -> Iterator[None]:
    """Show the progress of predictions by another bar than tqdm's on standard error, such as one of a window.

    It shows the calls of `predict_whole` and `respond_whole` in the block and in the thread that enters it, whatever
    their `quiet`. An error that the bar raises in `update` ends the prediction after a tile, and passes: that is how a
    prediction is cancelled. Finished tiles stay beside a path given as `out`, and the same call goes on from them.

    Args:
        make: Called as `make(total=units, initial=units)`, with the work of all tiles and of those that are finished;
            tqdm's subclasses fit. It returns a context manager of a bar with `set_description(text)`, which names the
            pass, and `update(units)`, which adds the work of a tile.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from tqdm import tqdm
        >>> from farfield.streaming import predict_whole, use_progress_bar
        >>> class Percent(tqdm):
        ...     def update(self, units):
        ...         self.n += units
        ...         print(f"{self.n / self.total:.0%}")
        ...     def display(self, *args, **kwargs):
        ...         pass
        >>> with use_progress_bar(Percent):
        ...     whole = predict_whole(nn.Conv2d(1, 1, 1).eval(), torch.rand(64, 64), tile=(32, 64), quiet=True)
        50%
        100%
    """
    token = _BAR.set(make)
    try:
        yield
    finally:
        _BAR.reset(token)


def run_local(stream: Stream, quiet: bool) -> Any:
    """Run the tasks that are left, with a progress bar; return the finished output."""
    with show_progress(stream, quiet) as bar:
        for number, (records, each) in enumerate(zip(stream.records, stream.passes, strict=True)):
            bar.set_description(f"pass {number + 1} of {len(stream.passes)}")
            while not records.is_complete():  # a record that is damaged meanwhile is made again
                run_tiles(stream, number, records.left(), partial(bar.update, count_units(each)))
                records.settle()
    return stream.finish()


def run_tiles(stream: Stream, number: int, tiles: Sequence[int], update: Callable[[], object]) -> None:
    """Run a pass on tiles, as many at once as the run says, and call `update` after each; the first error stops all."""
    run = stream.run
    if run is None or run.workers == 1 or len(tiles) == 1:
        with use_threads(stream.threads):
            for index in tiles:
                stream.run_task(number, index)
                update()
        return
    warn, texts, running, count = stream.warn, list[str](), set[Future[None]](), min(run.workers, len(tiles))
    ready = threading.Barrier(count)

    def run_tile(index: int) -> None:
        with run.surroundings():
            stream.run_task(number, index)

    def begin() -> None:
        set_threads(stream.threads)
        # While one sets its number, threads that a tile starts would have that. A pool of which a thread does not begin
        # can wait for ever for others.
        with contextlib.suppress(threading.BrokenBarrierError):
            ready.wait()

    pool = ThreadPoolExecutor(count, initializer=begin)
    try:
        stream.warn = texts.append  # a warning names the line of this thread
        for position, index in enumerate(tiles, 1):
            # What the caller has set for its own thread.
            running.add(pool.submit(copy_context().run, run_tile, index))
            # One tile waits for each that runs, so that no thread waits for this one.
            while len(running) > (2 * count - 1 if position < len(tiles) else 0):
                done, running = wait(running, return_when=FIRST_COMPLETED)
                for each in done:
                    each.result()
                    while texts:
                        warn(texts.pop())
                    update()
    finally:
        ready.abort()
        pool.shutdown(cancel_futures=True)
        stream.warn = warn


def show_progress(stream: Stream, quiet: bool) -> Any:
    """Return a progress bar over the work of all passes, from what is finished."""
    pairs = list(zip(stream.records, stream.passes, strict=True))
    done = sum(count_units(each) * int(records.are_finished().sum()) for records, each in pairs)
    total = sum(count_units(each) * each.tiles for each in stream.passes)
    if (make := _BAR.get()) is not None:
        return make(total=total, initial=done)
    form = "{desc}{percentage:3.0f}%|{bar}| {elapsed}, {remaining} left"
    return tqdm(total=total, initial=done, bar_format=form, disable=quiet, file=sys.stderr)


def count_units(each: Pass) -> int:
    """Return the work of one tile of a pass: one without products reads and writes. Whole numbers add up exactly."""
    return max(1, round(each.work / each.tiles))


def write_whole(caller: str, path: Path, array: np.ndarray, metadata: ImageMetadata, overwrite: bool) -> Any:
    """Write an array in memory to a path, completely or not at all, and return it opened."""
    check_path(path, overwrite)
    output = FileOutput(caller, path, OutputSpec(array.shape, array.dtype, array.shape, metadata), overwrite)
    with contextlib.closing(Stream(output, {"model": "in one piece"}, {"positions": array.shape}, {})) as stream:
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
        self.stream.write(self.find_written(0, index), torch.from_numpy(self.array))
        return empty_record()

    def find_written(self, number: int, index: int) -> tuple[slice, ...]:
        return (slice(None),) * self.array.ndim
