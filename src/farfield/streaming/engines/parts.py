"""A share of the tasks of a prediction, for arrays of jobs: each process does its own, and waits for the others.

No process knows another: all see one folder. Whoever finishes the last tile of a group merges their records.
"""

from __future__ import annotations

import contextlib
import re
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from farfield._files import OwnedFolder
from farfield._refusals import refusal
from farfield.streaming.engines.local import count_units, run_tiles, show_progress
from farfield.streaming.progress import Stream
from farfield.streaming.records import Records
from farfield.volumes.file_formats import has_chunks
from farfield.volumes.sink import FileOutput
from farfield.volumes.unfinished import STATE, unfinished_folder

# Seconds between two looks at what others have finished.
_POLL = 0.2


@dataclass(frozen=True)
class Part:
    """A share of a prediction: `Part(3, 16)` is the third of sixteen, and `Part.parse("reduce")` what follows them all.

    Args:
        index: Which part, from 1; 0 runs no tile, and finishes what all parts have written.
        count: How many parts there are; each call must have the same.
        timeout: Seconds to wait for tiles of other parts.
        only: The pass to run, from 1, where passes are jobs that start one after the other; None runs all.

    Raises:
        ValueError: If there is no such part, or no such number of them.

    Example:
        >>> Part.parse("3/16").count
        16
    """

    index: int
    count: int
    timeout: float = 3600.0
    only: int | None = None

    def __post_init__(self) -> None:
        for name, number in (("index", self.index), ("count", self.count), ("only", self.only)):
            if not isinstance(number, int | None) or isinstance(number, bool):
                raise TypeError(f"Part: {name} must be a whole number, got {number!r:.40}.")
        if self.only is not None and self.only < 1:
            raise ValueError(f"Part: passes are counted from 1, got only={self.only}.")
        if not 0 <= self.index <= self.count or self.count < 1:
            raise ValueError(f"Part: part {self.index} of {self.count}; fix: from 1 to {max(1, self.count)}.")

    @classmethod
    def parse(cls, text: str, timeout: float = 3600.0, only: int | None = None) -> Part:
        """Read a part as the command line has it: "3/16", or "reduce"."""
        if text == "reduce":
            return cls(0, 1, timeout, only)
        match = re.fullmatch(r"(\d+)/(\d+)", text)
        if match is None or int(match[1]) == 0:
            raise ValueError(f'Part: "{text}" is no part; fix: "3/16", the third of sixteen, or "reduce".')
        return cls(int(match[1]), int(match[2]), timeout, only)


def check_part(part: Any, out: Any) -> None:
    """Refuse what is no part, and outputs that several processes cannot write."""
    if not isinstance(part, Part):
        raise refusal(TypeError, f'part must be a Part, got {part!r:.40}; fix: Part.parse("3/16").')
    if not has_chunks(out):
        raise refusal(
            ValueError,
            f"parts write whole chunks, each in a file, so out must be a path, and not of .npy, got "
            f'{type(out).__name__ if not isinstance(out, str | Path) else out}; fix: out="prediction.ome.zarr".',
        )


_Found = TypeVar("_Found", bound=tuple[Any, Any])


@contextlib.contextmanager
def plan_in_turns(path: Path | None, part: Part, overwrite: bool, find: Callable[[], _Found]) -> Iterator[_Found]:
    """Find what an output was planned with; the first part plans it while others wait, and these take its plan."""
    found = find()
    if path is None or (found[1] is not None and not overwrite):
        yield found
        return
    owned, start = OwnedFolder(unfinished_folder(path), path), time.monotonic()
    while True:
        try:
            owned.hold()
            break
        except BlockingIOError:
            if time.monotonic() - start > part.timeout:
                raise
            time.sleep(_POLL)
    try:
        yield find()
    finally:
        owned.remove_if_new()
        owned.let_go()


def run_part(part: Part, stream: Stream, quiet: bool) -> Any:
    """Run the tiles of a part in each pass, after all tiles of the pass before; return the output where it is finished.

    None is returned where other parts may still run.
    """
    if part.index == 0:
        _hold_finished(stream)
    if stream.passes and part.only is not None and part.only > len(stream.passes):
        raise refusal(ValueError, f"there are {len(stream.passes)} passes, got only={part.only}; fix: one of them.")
    with show_progress(stream, quiet) as bar:
        for number, (records, each) in enumerate(zip(stream.records, stream.passes, strict=True)):
            bar.set_description(f"pass {number + 1} of {len(stream.passes)}")
            if part.index == 0:
                _check_complete(stream, number)
                continue
            if part.only is not None and part.only < number + 1:
                break
            if part.only is None or part.only == number + 1:
                _wait(stream, number - 1, part)
                if stream.run is not None:
                    stream.run.clean(number)
                run_tiles(stream, number, _left(part, records), partial(bar.update, count_units(each)))
                records.settle()
    stream.inputs.check()
    return None if part.index else stream.finish()


def _hold_finished(stream: Stream) -> None:
    """Lock the output, so that one process finishes it; refuse one that another has finished meanwhile."""
    output = stream.output
    if isinstance(output, FileOutput):
        output.hold()
        if not (output.folder / STATE).exists():
            output.owned.remove_if_new()
            raise refusal(FileExistsError, f'"{output.path}" was finished by another process.')


def _left(part: Part, records: Records) -> Sequence[int]:
    """Return the tiles of a part that are left: its share is of neighbours, which have chunks in common."""
    first, last = (records.count * place // part.count for place in (part.index - 1, part.index))
    left = records.left()
    return left[bisect_left(left, first) : bisect_left(left, last)]


def _wait(stream: Stream, number: int, part: Part) -> None:
    """Wait until all tiles of a pass are finished."""
    if number < 0:
        return
    start, records = time.monotonic(), stream.records[number]
    while not records.is_complete():
        if time.monotonic() - start > part.timeout:
            raise _missing(stream, number, f"after {part.timeout:g} seconds")
        time.sleep(_POLL)
        if records.are_finished().all():
            records.settle()


def _check_complete(stream: Stream, number: int) -> None:
    records = stream.records[number]
    records.settle()
    if not records.is_complete():
        raise _missing(stream, number, "yet")


def _missing(stream: Stream, number: int, when: str) -> Exception:
    records = stream.records[number]
    left = records.left()
    return refusal(
        TimeoutError,
        f"{len(left)} of {records.count} tiles of pass {number + 1} are not finished {when}, from tile {left[0]} on; "
        f"fix: start the parts again that do not run any more: what is finished is kept.",
    )
