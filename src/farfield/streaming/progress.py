"""The tasks of a prediction: what they read and write is recorded, beside a file also on disk, and so resumed."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from farfield._files import replace_file
from farfield._fingerprint import fingerprint
from farfield._refusals import refusal
from farfield.streaming.checksums import box_checksum, bytes_of, checksum
from farfield.streaming.passes import Pass, Run
from farfield.streaming.records import DamagedError, Record, Records, empty_record, pack, unpack
from farfield.streaming.rules.rule import Parts
from farfield.volumes.input_files import InputFiles
from farfield.volumes.sink import ArrayOutput, FileOutput, check_path, overwrite_fix, to_numpy
from farfield.volumes.source import Region, VolumeSource, index_within, overlap
from farfield.volumes.unfinished import STATE, explain_disk_errors, unfinished_folder, was_moved

# A tile, and the checksums of what it and those after it wrote to the output, as in a record.
Written = tuple[int, dict[str, Tensor]]

# Of the file that tells what the records beside it are of.
FIELDS = {
    "identity": dict,
    # The plan: resuming does not depend on the free memory and disk. The size of tiles, node and output of each value
    # that is stored between passes, the nodes behind which passes end though nothing is summed, and whether values are
    # on disk; and whether several processes work on it, in files of blocks.
    "positions": list,
    "stored": list,
    "cuts": list,
    "on_disk": bool,
    "shared": bool,
    "threads": int,
    # Of each pass, the checksums of what it wrote, once the output is finished.
    "written": list,
}
# What follows from another model or reduction, and what is stored from another tile too.
_FOLLOWING = ("graph of the model", "memory or disk")


class Stream:
    """The tasks of a prediction: reads tiles of volumes, writes boxes of the output, and keeps records of the tiles."""

    def __init__(
        self,
        output: FileOutput | ArrayOutput,
        identity: dict[str, str],  # fingerprints of all that the result depends on: the same to resume
        planned: Mapping[str, Any],  # the fields of the plan that are saved, from `positions` to `threads`
        volumes: Mapping[str, tuple[VolumeSource, Sequence[Region]]],
    ) -> None:
        self.caller, self.output, self.identity, self.volumes = output.caller, output, identity, volumes
        self.planned = {"stored": (), "cuts": (), "on_disk": False, "shared": False, **planned}
        self.is_shared = self.planned["shared"]
        # Rounding follows from them, so a run keeps those that it began with.
        self.threads = self.planned.get("threads") or torch.get_num_threads()
        self.inputs = InputFiles({name: source.array for name, (source, _) in volumes.items()}, output.array)
        self.run: Run | None = None
        self.passes: list[Pass] = []
        self.records: list[Records] = []
        # The record of the tile that runs, of each thread; and what one thread at a time reads, or writes.
        self.own, self.reading, self.writing = threading.local(), threading.Lock(), threading.RLock()
        # Of each volume, behind the sample if each runs by itself, and of each tile; 0 until that is read.
        self.checksums: dict[str, np.ndarray] = {}
        # Passes whose checksums are known, of those that other processes run.
        self.known = 0
        self.overflowed = False  # whether there was a warning
        self.warn: Callable[[str], object] = warn_caller

    def open(self, run: Run) -> bool:
        """Open the output, and go on with an unfinished one of the same identity; False if it is made anew."""
        with self.explained():
            if not isinstance(self.output, FileOutput):
                self._plan(run)
                return False
            return self._open(self.output, run)

    def join(self, output: FileOutput, run: Run) -> None:
        """Open an output that several processes write: the first makes it, and none checks what others have written."""
        with self.explained():
            state = self._read_state(output)
            if state is None:
                self._make(output)
        if state is not None and _is_finished(output, run, state["written"]):
            return  # all is done but to remove the folder
        if not output.growing.exists():
            text = f'"{output.growing}" is gone; fix: remove "{output.folder}", and start all parts again.'
            raise refusal(FileNotFoundError, text)
        self.attach(output, run, self.threads if state is None else state["threads"])
        for records in self.records:
            records.settle()

    def attach(self, output: FileOutput, run: Run, threads: int) -> None:
        """Work on the tiles of an output that another process has made."""
        output.attach()
        self._plan(run)
        self.threads = threads

    def run_task(self, number: int, index: int) -> None:
        """Run a pass on a tile, and keep its record."""
        with self.writing:
            while self.is_shared and self.known < number:
                self._learn(self.records[self.known].read())
                self.known += 1
        if self.is_shared:
            self._check_there()
        record = self.own.record = empty_record()
        with torch.no_grad():
            parts = self.passes[number].run_tile(index)
        with self.reading:
            self.inputs.check(between=True)
        with self.explained(), self.writing:
            self.records[number].add(index, parts | {field: record[field] for field in ("read", "written")})

    def _check_there(self) -> None:
        """Refuse a task that is late: other processes have finished the output, and its folder is gone."""
        if isinstance(self.output, FileOutput) and not (self.output.folder / STATE).exists():
            text = f'"{self.output.folder}" is gone: the output is finished, or was removed; fix: repeat the call.'
            raise refusal(FileNotFoundError, text)

    def parts_of(self, number: int) -> Mapping[str, Parts]:
        """Return the merged parts of all tiles of a pass."""
        return self.records[number].read()["parts"]

    def finish(self) -> Any:
        self.inputs.check()
        with self.explained():
            if isinstance(self.output, FileOutput) and not was_moved(self.output.path):
                # Records are removed after the file is moved, and a process may be killed between.
                self._save(self.output, [_written_of(each.read()) for each in self.records])
            return self.output.finish()

    def _plan(self, run: Run) -> None:
        """Plan the passes of the run, and those that write coarser levels of an output."""
        self.run, self.passes, folder = run, list(run.passes), None
        if isinstance(self.output, FileOutput):
            folder = self.output.folder
            for level, count in enumerate(self.output.levels(), 1):
                run_tile = partial(self._write_level, self.output, level)
                self.passes.append(Pass(count, run_tile, float(count)))
        self.records = [
            Records(each.tiles, each.merge, folder and folder / f"pass-{number + 1}", shared=self.is_shared)
            for number, each in enumerate(self.passes)
        ]

    def _write_level(self, output: FileOutput, level: int, place: int) -> Record:
        with self.explained(), self.writing:
            output.write_level(level, place)
        return empty_record()

    def read(self, name: str, index: int, region: Region, sample: int | None = None) -> Tensor:
        """Read a region of a volume for a tile, of all samples by default; refuse own positions that have changed."""
        source, tiles = self.volumes[name]
        with self.reading:
            grid, own = source.load(region, sample, index), tiles[index]
        if overlap(own, region) != own:
            return grid.to(source.device)
        new_sum = checksum(bytes_of(grid[(slice(None), slice(None), *index_within(own, region))]))
        key = f"{'' if sample is None else sample} {name}"
        with self.reading:
            sums = self._sums_of(key)
        if not sums[index]:
            sums[index] = new_sum
            self.own.record["read"][key] = torch.tensor([new_sum])
        if sums[index] != new_sum:
            raise refusal(
                ValueError,
                f"the {name} has changed in tile {index} since the first read; fix: begin anew with "
                f'a {name} that stays as it is; if out is a path, remove the folder "….unfinished" beside it first.',
            )
        return grid.to(source.device)

    def _sums_of(self, key: str) -> np.ndarray:
        """Return the checksums of the tiles of a volume."""
        if key not in self.checksums:
            self.checksums[key] = np.zeros(len(self.volumes[key.partition(" ")[2]][1]), np.int64)
        return self.checksums[key]

    def write(self, index: tuple[slice, ...], box: Tensor) -> None:
        """Write the box of a tile to the output; record its checksum if the output is a file."""
        # What a network in float16 cannot hold is infinite in its result.
        if box.dtype == torch.float16 and not self.overflowed and box.isinf().any():
            self.overflowed = True
            self.warn(
                f"{self.caller}: the result has infinite numbers, and the network is of float16, which ends at "
                f"{torch.finfo(box.dtype).max:g}; fix: model.float(), or model.bfloat16()."
            )
        if self.is_shared:
            self._check_there()
        with self.explained(), self.writing:
            self.output.write(index, box)
        if isinstance(self.output, FileOutput):
            own_sum = box_checksum(to_numpy(box).astype(self.output.spec.dtype, copy=False))
            self.own.record["written"]["output"] = torch.tensor([own_sum])

    def close(self) -> None:
        """Let go of files and memory, and unlock the output for other processes."""
        if self.run is not None:
            self.run.close()
        self.output.let_go()

    def explained(self) -> AbstractContextManager[None]:
        """Explain errors of the disk to which a file is written."""
        if isinstance(self.output, FileOutput):
            return explain_disk_errors(self.output.path)
        return contextlib.nullcontext()

    def _open(self, output: FileOutput, run: Run) -> bool:
        """Lock the output and open it, with the records of an unfinished one of the same identity, or make it anew."""
        output.hold()
        try:
            state = self._read_state(output)
            if state is None:
                self._make(output)
                self._plan(run)
            else:
                self.threads = state["threads"]
                self._reopen(output, run, state["written"])
        except BaseException:
            output.owned.remove_if_new()  # of a call that comes when another has just finished
            raise
        return state is not None

    def _read_state(self, output: FileOutput) -> dict[str, Any] | None:
        """Return the state of an unfinished output of the same identity; None if there is none, or it is replaced."""
        overwrite = output.overwrite
        output.restore_replaced()
        check_path(output.path, overwrite)  # again: the path may exist since it was checked
        state = _read_saved(output.path, overwrite)
        saved = state["identity"] if state else {}
        changed = [name for name in self.identity | saved if state and saved.get(name) != self.identity.get(name)]
        if changed and not overwrite:
            changed = [name for name in changed if name not in _FOLLOWING] or changed
            raise refusal(
                ValueError,
                f'"{output.folder}" holds an unfinished prediction with another '
                f"{' and '.join(changed)}; fix: call it with the same {' and '.join(changed)} to finish that; to "
                f"begin anew, remove that folder{overwrite_fix(overwrite)}.",
            )
        return None if changed else state

    def _make(self, output: FileOutput) -> None:
        output.owned.empty()
        try:
            output.make()
            self._save(output, [])
        except OSError:
            with contextlib.suppress(OSError):
                output.owned.remove()
            raise

    def _save(self, output: FileOutput, written: Sequence[Any]) -> None:
        state = {"identity": self.identity, **self.planned, "threads": self.threads, "written": written}
        replace_file(output.folder / STATE, pack(state))

    def _reopen(self, output: FileOutput, run: Run, written: Sequence[Any]) -> None:
        """Go on with an unfinished output: what it and stored values do not hold any more runs again."""
        if _is_finished(output, run, written):
            return  # all is done but to remove the folder
        opened = output.open()
        self._plan(run)
        for each in self.records[len(run.passes) :]:  # what is in coarser levels has no checksum
            each.clear()
        records = [each.settle() for each in self.records]
        self._check_written(output, run, opened, [list(map(_written_of, own)) for own in records])
        number = next((number for number, each in enumerate(self.records) if not each.is_complete()), len(self.records))
        for each in self.records[number + 1 :]:  # there are some where a record before them was damaged
            each.clear()
        if number < len(run.passes):
            first = run.first_pass(number)
            sums: dict[str, np.ndarray] = {}
            for record in itertools.chain.from_iterable(records[first : number + 1]):
                for name, own in record["stored"].items():
                    _learn(sums.setdefault(name, np.zeros(self.records[number].count, np.int64)), record, own)
            if not run.resume(number, np.flatnonzero(self.records[number].are_finished()), sums):
                warn_caller(
                    f'{self.caller}: "{output.folder}" does not hold any more what passes stored for later ones; '
                    "all run again."
                )
                for each in self.records[first:]:
                    each.clear()
        for record in itertools.chain.from_iterable(records):
            self._learn(record)
        for key, read in self.checksums.items():
            sample, _, name = key.partition(" ")
            for index in map(int, np.flatnonzero(read)):
                self.read(name, index, self.volumes[name][1][index], int(sample) if sample else None)

    def _learn(self, record: Record) -> None:
        """Know the checksums of tiles that were read."""
        for key, read in record["read"].items():
            _learn(self._sums_of(key), record, read)

    def _check_written(self, output: FileOutput, run: Run, opened: bool, written: Sequence[Sequence[Written]]) -> None:
        """Let passes run again that wrote what the output does not hold any more."""
        if (
            opened
            and not was_moved(output.path)
            and all(_holds(output, run, number, each) for number, own in enumerate(written) for each in own)
        ):
            return
        output.make()
        check_path(output.path, output.overwrite)  # again: the file at the path is another
        counts = [sum(int(sums.count_nonzero()) for _, each in own for sums in each.values()) for own in written]
        first = next((number for number, count in enumerate(counts) if count), len(self.records))
        if first < len(self.records):
            warn_caller(
                f'{self.caller}: "{output.growing}" does not hold any more what was written to it; it is made anew, '
                f"and its {sum(counts)} tiles are computed again."
            )
        for records in self.records[first:]:
            records.clear()


def _is_finished(output: FileOutput, run: Run, written: Sequence[Written]) -> bool:
    """Whether a finished output was moved to its path; without boxes, what is there is an older file."""
    is_there = any(sums for _, sums in written) and was_moved(output.path) and output.open()
    return is_there and all(_holds(output, run, number, each) for number, each in enumerate(written))


def _holds(output: FileOutput, run: Run, number: int, written: Written) -> bool:
    """Whether an output holds what a pass wrote, by its checksums."""
    first, sums = written
    return all(
        output.holds(run.find_written(number, first + int(place)), int(own[place]), box_checksum)
        for own in sums.values()
        for place in own.nonzero()[:, 0]
    )


def _written_of(record: Record) -> Written:
    return record["tiles"][0], record["written"]


def _learn(sums: np.ndarray, record: Record, own: Tensor) -> None:
    """Add the checksums of a record to those of all tiles."""
    part = sums[slice(*record["tiles"])]
    np.maximum(part, own.numpy(), out=part)


def warn_caller(text: str) -> None:
    """Warn at the line that called farfield, however deep in it the reason was found."""
    level, frame = 1, inspect.currentframe()
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in ("farfield", "contextlib"):
        level, frame = level + 1, frame.f_back
    warnings.warn(text, stacklevel=level)


def find_unfinished(
    path: Path | None, overwrite: bool | None, model: nn.Module, volumes: Mapping[str, Any]
) -> tuple[dict[str, str], dict[str, Any] | None]:
    """Return what identifies a model and its volumes, and what an unfinished prediction of these was planned with."""
    if path is None:
        return {}, None
    check_path(path, overwrite)
    kinds = [f"{name} {tuple(volume.shape)} {getattr(volume, 'dtype', '')}" for name, volume in volumes.items()]
    # Of the model as it is given: a run may change what it holds.
    identity = {"model": fingerprint(model), "volume": "; ".join(kinds)}
    state = _read_saved(path, overwrite)
    if state is None or any(state["identity"].get(name) != own for name, own in identity.items()):
        return identity, None
    return identity, state


def refuse_shared(path: Path | None, saved: Mapping[str, Any] | None, *, several: bool) -> bool:
    """Return whether several processes write an output; refuse them where one has begun it."""
    if saved is None or not several or saved["shared"]:
        return several if saved is None else saved["shared"]
    fix = "repeat the call in one process, or remove that folder"
    raise refusal(ValueError, f'"{path}.unfinished" was begun by one process; fix: {fix}.')


def _read_saved(path: Path, overwrite: bool | None) -> dict[str, Any] | None:
    """Read the state of the unfinished prediction for a path; None if there is none, or it is damaged and replaced."""
    file = unfinished_folder(path) / STATE
    if not file.is_file():
        return None
    try:
        return unpack(file.read_bytes(), FIELDS)
    except DamagedError as error:
        if overwrite:
            return None
        raise refusal(
            ValueError,
            f'"{file}", the progress of an unfinished prediction, is damaged: {error}; '
            f'fix: to begin anew, remove "{file.parent}"{overwrite_fix(overwrite)}.',
        ) from None
