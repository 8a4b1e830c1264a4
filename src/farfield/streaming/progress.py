"""Passes over the tiles of volumes: their progress is shown, saved beside a file, and resumed after a kill."""

from __future__ import annotations

import contextlib
import inspect
import io
import json
import math
import struct
import sys
import time
import warnings
import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from tqdm import tqdm

from farfield._files import open_replacement
from farfield._fingerprint import fingerprint
from farfield._refusals import refusal
from farfield.volumes.file_formats import OutputSpec
from farfield.volumes.image_metadata import ImageMetadata
from farfield.volumes.sink import ArrayOutput, FileOutput, box_checksum, check_path, overwrite_fix, to_numpy
from farfield.volumes.source import Region, VolumeSource, checksum
from farfield.volumes.unfinished import STATE, explain_disk_errors, unfinished_folder, was_moved

_KINDS = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int64, torch.bool)
_DTYPES = {str(dtype): dtype for dtype in _KINDS}
# Of the content of the file; a file of another version is refused.
_VERSION = 6
# Attributes of `Stream` that are saved, and their types in JSON.
FIELDS = {
    "identity": dict,
    "positions": list,
    "stored": list,
    "on_disk": bool,
    "stage": int,
    "tile": int,
    "checksums": dict,
    "summaries": list,
    "written": list,
}
# Within a pass the progress is saved again only after SHARE times the seconds that the last save took.
SHARE = 20


class Saved(NamedTuple):
    """What an unfinished prediction was planned with: resuming does not depend on the free memory and disk."""

    tile: tuple[int, ...]
    # Node and output of each value that is stored between passes.
    stored: tuple[tuple[int, int], ...] = ()
    on_disk: bool = False


class Pass(NamedTuple):
    """A pass over tiles: how many, what it does with one, and the work of all, relative to that of other passes."""

    tiles: int
    run_tile: Callable[[int], None]
    work: float


class _Written(NamedTuple):
    """A box that a pass and a tile wrote to the output, by first indices and those after the last."""

    stage: int
    tile: int
    box: list[list[int]]
    checksum: int


class Stream:
    """Runs passes over the tiles of volumes; beside a file, saves how far they came, and goes on from there."""

    def __init__(
        self,
        output: FileOutput | ArrayOutput,
        identity: dict[str, str],  # fingerprints of all that the result depends on: the same to resume
        planned: Saved,
        volumes: Mapping[str, tuple[VolumeSource, Sequence[Region]]],
    ) -> None:
        self.caller, self.output, self.identity, self.volumes = output.caller, output, identity, volumes
        self.positions, self.stored, self.on_disk = planned
        # The next pass and tile.
        self.stage, self.tile = 0, 0
        # Of each volume and tile, once it is read.
        self.checksums: dict[str, dict[str, int]] = {}
        self.summaries: list[dict[str, Any]] = []
        self.written: list[_Written] = []
        # When the progress was saved, and how many seconds that took.
        self.saved, self.took = 0.0, 0.0
        self.overflowed = False  # whether there was a warning
        if isinstance(output, FileOutput):
            with self.explained():
                self._open(output)

    def run(self, passes: Sequence[Pass], summaries: Any, quiet: bool) -> Any:
        """Run what remains of passes; return the finished output. What is saved is `summaries.state()`."""
        self._resume(summaries)
        # Of one tile of each pass; one without products reads and writes nevertheless. Whole numbers add up exactly.
        work = [max(1, round(each.work / each.tiles)) for each in passes]
        total = sum(own * each.tiles for own, each in zip(work, passes, strict=True))
        done = sum(own * each.tiles for own, each in zip(work[: self.stage], passes, strict=False))
        done += sum(work[self.stage : self.stage + 1]) * self.tile
        form = "{desc}{percentage:3.0f}%|{bar}| {elapsed}, {remaining} left"
        shown = tqdm(total=total, initial=done, bar_format=form, disable=quiet, file=sys.stderr)
        with torch.no_grad(), shown as bar:
            while self.stage < len(passes):
                (count, run_tile, _), own = passes[self.stage], work[self.stage]
                bar.set_description(f"pass {self.stage + 1} of {len(passes)}", refresh=self.tile == 0)
                run_tile(self.tile)
                with self.explained():
                    self.advance(count, summaries)
                bar.update(own)
            with self.explained():
                return self.output.finish()

    def advance(self, count: int, summaries: Any) -> None:
        """Go on to the next tile or, after `count`, the next pass; save then, and if the last save was long ago."""
        self.tile += 1
        is_last = self.tile == count
        if is_last:
            self.stage, self.tile = self.stage + 1, 0
        if isinstance(self.output, FileOutput) and (is_last or time.monotonic() - self.saved >= SHARE * self.took):
            start = time.monotonic()
            self.summaries = [summaries.state()]
            self._save(self.output)
            self.saved = time.monotonic()
            self.took = self.saved - start

    def read(self, name: str, index: int, region: Region, sample: int | None = None) -> Tensor:
        """Read a region of a volume for a tile, of all samples by default; refuse own positions that have changed."""
        source, tiles = self.volumes[name]
        grid, own = source.read(region, sample, index), tiles[index]
        spans = list(zip(own, region, strict=True))
        if any(start < first or stop > last for (start, stop), (first, last) in spans):
            return grid
        inside = tuple(slice(start - first, stop - first) for (start, stop), (first, _) in spans)
        new_sum = checksum(grid[(slice(None), slice(None), *inside)])
        key = str(index) if sample is None else f"{sample} {index}"
        if self.checksums.setdefault(name, {}).setdefault(key, new_sum) != new_sum:
            raise refusal(
                ValueError,
                f"the {name} has changed in tile {index} since the first read; fix: begin anew with "
                f'a {name} that stays as it is; if out is a path, remove the folder "….unfinished" beside it first.',
            )
        return grid

    def write(self, index: tuple[slice, ...], box: Tensor) -> None:
        """Write a box of the current tile to the output; record its checksum if the output is a file."""
        # What a network in float16 cannot hold is infinite in its result.
        if box.dtype == torch.float16 and not self.overflowed and box.isinf().any():
            self.overflowed = True
            _warn(
                f"{self.caller}: the result has infinite numbers, and the network is of float16, which ends at "
                f"{torch.finfo(box.dtype).max:g}; fix: model.float(), or model.bfloat16()."
            )
        with self.explained():
            self.output.write(index, box)
        if isinstance(self.output, FileOutput):
            spec = self.output.spec
            spans = [list(span.indices(length)[:2]) for span, length in zip(index, spec.shape, strict=True)]
            own_sum = box_checksum(to_numpy(box).astype(spec.dtype, copy=False))
            self.written.append(_Written(self.stage, self.tile, spans, own_sum))

    def close(self) -> None:
        """Unlock the output for other processes."""
        self.output.let_go()

    def explained(self) -> AbstractContextManager[None]:
        """Explain errors of the disk to which a file is written."""
        if isinstance(self.output, FileOutput):
            return explain_disk_errors(self.output.path)
        return contextlib.nullcontext()

    def _save(self, output: FileOutput) -> None:
        write_state(output.folder / STATE, {field: getattr(self, field) for field in FIELDS})

    def _resume(self, summaries: Any) -> None:
        """Load what was saved, and check that the tiles that were read for it have not changed."""
        output: Any = self.output
        if self.summaries and not summaries.load(self.summaries[-1], self.stage, self.tile):
            _warn(
                f'{self.caller}: "{output.folder}" does not hold any more what passes stored for later ones; '
                "all run again."
            )
            self.stage, self.tile, self.summaries, self.written = 0, 0, [], []
            with self.explained():
                self._save(output)
        for name, sums in self.checksums.items():
            for key in list(sums):  # the sample, if each runs by itself, and the tile
                *sample, index = map(int, key.split())
                self.read(name, index, self.volumes[name][1][index], *sample)

    def _open(self, output: FileOutput) -> None:
        """Lock the output and open it, with the progress of an unfinished one of the same identity, or make it anew."""
        overwrite = output.overwrite
        with contextlib.ExitStack() as unlocked:
            output.owned.hold()
            unlocked.callback(output.owned.let_go)
            output.restore_replaced()
            check_path(output.path, overwrite)  # again: the path may exist since it was checked
            state = _read_saved(output.path, overwrite)
            changed = [name for name, own in self.identity.items() if state and state["identity"].get(name) != own]
            if changed and not overwrite:
                raise refusal(
                    ValueError,
                    f'"{output.folder}" holds an unfinished prediction with another '
                    f"{' and '.join(changed)}; fix: call it with the same {' and '.join(changed)} to finish that; to "
                    f"begin anew, remove that folder{overwrite_fix(overwrite)}.",
                )
            if state is None or changed:
                self._make(output)
            else:
                self.stage, self.tile = state["stage"], state["tile"]
                self.checksums, self.summaries = state["checksums"], state["summaries"]
                self.written = [_Written(*each) for each in state["written"]]
                self._reopen(output)
            unlocked.pop_all()

    def _make(self, output: FileOutput) -> None:
        output.owned.empty()
        try:
            output.make()
            self._save(output)
        except OSError:
            with contextlib.suppress(OSError):
                output.owned.remove()
            raise

    def _reopen(self, output: FileOutput) -> None:
        """Open an unfinished output; if it does not hold all that was written, make it anew and rewind the progress."""
        boxes = [(tuple(slice(*span) for span in each.box), each.checksum) for each in self.written]
        covered = sum(math.prod(stop - start for start, stop in each.box) for each in self.written)
        complete = covered == math.prod(output.spec.shape) or not was_moved(output.path)
        if complete and output.open() and all(output.holds(*each) for each in boxes):
            return
        # The progress has the summaries, so only the last pass, which writes, runs again.
        if self.written:
            _warn(
                f'{self.caller}: "{output.growing}" does not hold any more what was written to it; it is made anew, '
                f"and its {len(self.written)} tiles are computed again."
            )
            self.stage, self.tile = self.written[0][:2]
            self.written = []
        output.make()
        check_path(output.path, output.overwrite)  # again: the file at the path is another
        self._save(output)


def write_whole(caller: str, path: Path, array: np.ndarray, metadata: ImageMetadata, overwrite: bool) -> Any:
    """Write an array in memory to a path, completely or not at all, and return it opened."""
    check_path(path, overwrite)
    output = FileOutput(caller, path, OutputSpec(array.shape, array.dtype, array.shape, metadata), overwrite)
    stream = Stream(output, {"model": "in one piece"}, Saved(array.shape), {})
    with stream.explained(), contextlib.closing(stream):
        output.write((slice(None),) * array.ndim, torch.from_numpy(array))
        return output.finish()


def _warn(text: str) -> None:
    """Warn at the line that called farfield, however deep in it the reason was found."""
    level, frame = 1, inspect.currentframe()
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in ("farfield", "contextlib"):
        level, frame = level + 1, frame.f_back
    warnings.warn(text, stacklevel=level)


def find_unfinished(
    path: Path | None, overwrite: bool | None, model: nn.Module, volumes: Mapping[str, Any]
) -> tuple[dict[str, str], Saved | None]:
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
    stored = tuple((int(node), int(output)) for node, output in state["stored"])
    return identity, Saved(tuple(state["positions"]), stored, state["on_disk"])


def _read_saved(path: Path, overwrite: bool | None) -> dict[str, Any] | None:
    """Read the state of the unfinished prediction for a path; None if there is none, or it is damaged and replaced."""
    file = unfinished_folder(path) / STATE
    if not file.is_file():
        return None
    try:
        return read_state(file)
    except ValueError as error:
        if overwrite:
            return None
        raise refusal(
            ValueError,
            f'"{file}", the progress of an unfinished prediction, is damaged: {error}; '
            f'fix: to begin anew, remove "{file.parent}"{overwrite_fix(overwrite)}.',
        ) from None


# What reading a damaged zip file raises beside.
_DAMAGED = (zipfile.BadZipFile, zlib.error, struct.error)


def write_state(file: Path, state: dict[str, Any]) -> None:
    """Write a state of JSON values, dtypes and tensors to a zip file: JSON, and the bytes of each tensor."""
    tensors: list[Tensor] = []

    def describe(value: object) -> dict[str, Any]:
        if isinstance(value, torch.dtype):
            return {"dtype": str(value)}
        if not isinstance(value, Tensor):
            raise TypeError(f"{type(value).__name__} cannot be saved")
        tensors.append(value)
        return {"tensor": len(tensors) - 1, "shape": list(value.shape), "of": str(value.dtype)}

    text = json.dumps({"version": _VERSION, **state}, default=describe)
    with open_replacement(file) as opened, zipfile.ZipFile(opened, "w") as archive:
        archive.writestr(zipfile.ZipInfo("state.json"), text)  # without the time, which may be before 1980
        for number, tensor in enumerate(tensors):
            flat = tensor.detach().cpu().contiguous()
            flat = flat.as_strided((flat.numel(),), (1,))  # a tensor of one element may have any stride
            with archive.open(zipfile.ZipInfo(f"tensor{number}"), "w", force_zip64=True) as member:
                member.write(flat.view(torch.uint8).numpy().data)


def read_state(file: Path) -> dict[str, Any]:
    """Read what `write_state` wrote; no code in the file is run, and checksums cover every byte."""
    # From memory: where a damaged file has a position that cannot be, reading a file fails as a disk does.
    content = io.BytesIO(file.read_bytes())
    try:
        with zipfile.ZipFile(content) as archive:

            def restore(value: dict[str, Any]) -> Any:
                if value.keys() == {"dtype"}:
                    return _DTYPES[value["dtype"]]
                if value.keys() != {"tensor", "shape", "of"}:
                    return value
                numbers = np.array(memoryview(archive.read(f"tensor{value['tensor']}")), np.uint8)
                return torch.from_numpy(numbers).view(_DTYPES[value["of"]]).reshape(value["shape"])

            state = json.loads(archive.read("state.json"), object_hook=restore)
    except (ArithmeticError, EOFError, LookupError, RuntimeError, TypeError, ValueError, *_DAMAGED) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error
    if not isinstance(state, dict) or state.get("version") != _VERSION:
        raise ValueError("it was written by another version of farfield")
    for field, kind in FIELDS.items():
        if not isinstance(state.get(field), kind):
            raise ValueError(f"{field} is {state.get(field)!r:.60}")
    return state
