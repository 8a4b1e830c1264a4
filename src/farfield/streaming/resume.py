"""Progress of a prediction, saved beside its output, so that it resumes after it was killed."""

from __future__ import annotations

import contextlib
import inspect
import json
import math
import time
import warnings
import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from farfield._files import open_replacement
from farfield.volumes.sink import FileOutput, check_path, overwrite_fix
from farfield.volumes.unfinished import FULL_DISK, STATE, unfinished_folder, was_moved

KINDS = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int64, torch.bool)
DTYPES = {str(dtype): dtype for dtype in KINDS}
# Version of the content of the file; a file of another version is refused.
VERSION = 5
# Attributes of `Progress` that are saved, and their types in JSON.
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
# Returns the state of each layer's summary, which takes time: only where it is saved.
Summaries = Callable[[], list[dict[str, Any]]]


class DamagedError(ValueError):
    """The progress file is damaged."""


class Written(NamedTuple):
    """A box that a pass and a tile wrote to the output, by first indices and those after the last; and its checksum."""

    stage: int
    tile: int
    box: list[list[int]]
    checksum: int

    @property
    def slices(self) -> tuple[slice, ...]:
        """Its index in the output."""
        return tuple(slice(start, stop) for start, stop in self.box)


class Saved(NamedTuple):
    """What an unfinished prediction was planned with: resuming does not depend on the free memory and disk.

    `stored` has node and output of each value that is stored between passes, on disk or in memory.
    """

    tile: tuple[int, ...]
    stored: tuple[tuple[int, int], ...] = ()
    on_disk: bool = False


class Progress:
    """The next pass and tile, the summaries so far, and the boxes that were written; saved if it has a folder.

    `identity` has a fingerprint of all that the result depends on, by name, which must be the same to resume.
    """

    def __init__(self, folder: Path | None, identity: dict[str, str], planned: Saved) -> None:
        self.folder, self.identity = folder, identity
        self.positions, self.stored, self.on_disk = planned
        self.stage, self.tile = 0, 0
        self.checksums: dict[str, dict[str, int]] = {}
        self.summaries: list[dict[str, Any]] = []
        self.written: list[Written] = []
        self.saved, self.took = 0.0, 0.0

    def advance(self, summaries: Summaries) -> None:
        """Go on to the next tile; save if SHARE times the seconds of the last save have passed."""
        self.tile += 1
        if time.monotonic() - self.saved >= SHARE * self.took:
            self.save(summaries)

    def next_stage(self, summaries: Summaries) -> None:
        """Go on to the next pass, and save."""
        self.stage, self.tile = self.stage + 1, 0
        self.save(summaries)

    def restart(self) -> None:
        """Go back to the first pass, and save; the checksums of the volume stay."""
        self.stage, self.tile, self.summaries, self.written = 0, 0, [], []
        self.save()

    def covers(self, shape: Sequence[int]) -> bool:
        """Whether the boxes that were written are a whole array of this shape."""
        return sum(math.prod(stop - start for start, stop in each.box) for each in self.written) == math.prod(shape)

    def save(self, summaries: Summaries | None = None) -> None:
        """Save the state, completely or not at all; None leaves the summaries as they are."""
        if self.folder is None:
            return
        start = time.monotonic()
        self.summaries = self.summaries if summaries is None else summaries()
        write_state(self.folder / STATE, {field: getattr(self, field) for field in FIELDS})
        self.saved = time.monotonic()
        self.took = self.saved - start

    def load(self, state: dict[str, Any]) -> None:
        """Resume from a saved state."""
        self.stage, self.tile = state["stage"], state["tile"]
        self.checksums, self.summaries = state["checksums"], state["summaries"]
        self.written = [Written(*each) for each in state["written"]]


def begin(caller: str, output: FileOutput, progress: Progress, overwrite: bool | None) -> Progress:
    """Lock the output and open it, with the progress of an unfinished prediction of the same identity, or make it anew.

    Raises:
        ValueError: If an unfinished prediction has another identity, or its progress is damaged, without `overwrite`.
        FileExistsError: If the folder for the unfinished file was not made by farfield.
        BlockingIOError: If another process has locked that folder.
    """
    with contextlib.ExitStack() as unlocked:
        output.owned.hold()
        unlocked.callback(output.owned.let_go)
        output.restore_replaced()
        check_path(caller, output.path, overwrite)  # again: the path may exist since it was checked
        state, identity = _saved_state(caller, output.path, overwrite), progress.identity
        changed = [name for name in identity if state and state["identity"].get(name) != identity[name]]
        if changed and not overwrite:
            raise ValueError(
                f'{caller}: "{output.folder}" holds an unfinished prediction with another {" and ".join(changed)}; '
                f"fix: call it with the same {' and '.join(changed)} to finish that; to begin anew, remove that folder"
                f"{overwrite_fix(overwrite)}."
            )
        if state is None or changed:
            _make_output(caller, output, progress)
        else:
            progress.load(state)
            _reopen_output(caller, output, progress)
        unlocked.pop_all()
    return progress


def _make_output(caller: str, output: FileOutput, progress: Progress) -> None:
    output.owned.empty()
    try:
        output.make()
        progress.save()
    except OSError as error:
        with contextlib.suppress(OSError):
            output.owned.remove()
        if error.errno not in FULL_DISK or caller in str(error):
            raise
        problem = f'the disk has no room for the progress of "{output.path}"'
        raise OSError(error.errno, f"{caller}: {problem}; fix: make room, or another disk.") from error


def _reopen_output(caller: str, output: FileOutput, progress: Progress) -> None:
    """Open an unfinished output; if it does not hold all that was written, make it anew and rewind the progress.

    A crash of the machine, or a user, can truncate files and remove chunks. The progress has the summaries, so only the
    last pass, which writes, runs again.
    """
    complete = progress.covers(output.spec.shape) or not was_moved(output.path)
    if complete and output.open() and all(output.holds(each.slices, each.checksum) for each in progress.written):
        return
    if progress.written:
        warn(
            f'{caller}: "{output.growing}" does not hold any more what was written to it; it is made anew, and its '
            f"{len(progress.written)} tiles are computed again."
        )
        progress.stage, progress.tile = progress.written[0].stage, progress.written[0].tile
        progress.written = []
    output.make()
    check_path(caller, output.path, output.overwrite)  # again: what is at the path is not the file that was moved there
    progress.save()


def warn(text: str) -> None:
    """Warn at the line that called farfield, however deep in it the reason was found."""
    level, frame = 1, inspect.currentframe()
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in ("farfield", "contextlib"):
        level, frame = level + 1, frame.f_back
    warnings.warn(text, stacklevel=level)


def saved_plan(caller: str, path: Path, overwrite: bool | None, model: str, volumes: Mapping[str, Any]) -> Saved | None:
    """Return what the unfinished prediction for a path was planned with.

    None if there is no such prediction, or if it is of another model or of volumes of another shape or dtype.
    """
    state = _saved_state(caller, path, overwrite)
    if state is None:
        return None
    identity = compute_identity(model, volumes, None)
    if any(state["identity"].get(name) != identity[name] for name in ("model", "volume")):
        return None
    stored = tuple((int(node), int(output)) for node, output in state["stored"])
    return Saved(tuple(state["positions"]), stored, state["on_disk"])


# ---- the file --------------------------------------------------------------------------------------------------------
def _saved_state(caller: str, path: Path, overwrite: bool | None) -> dict[str, Any] | None:
    """Read the state of the unfinished prediction for a path; None if there is none, or it is damaged and replaced."""
    file = unfinished_folder(path) / STATE
    if not file.is_file():
        return None
    try:
        return read_state(file)
    except DamagedError as error:
        if overwrite:
            return None
        raise DamagedError(
            f'{caller}: "{file}", the progress of an unfinished prediction, is damaged: {error}; '
            f'fix: to begin anew, remove "{file.parent}"{overwrite_fix(overwrite)}.'
        ) from None


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

    text = json.dumps({"version": VERSION, **state}, default=describe)
    with open_replacement(file) as opened, zipfile.ZipFile(opened, "w") as archive:
        archive.writestr(zipfile.ZipInfo("state.json"), text)  # without the time, which may be before 1980
        for number, tensor in enumerate(tensors):
            flat = tensor.detach().cpu().contiguous()
            flat = flat.as_strided((flat.numel(),), (1,))  # a tensor of one element may have any stride
            with archive.open(zipfile.ZipInfo(f"tensor{number}"), "w", force_zip64=True) as member:
                member.write(flat.view(torch.uint8).numpy().data)


def read_state(file: Path) -> dict[str, Any]:
    """Read what `write_state` wrote; no code in the file is run, and checksums cover every byte."""
    try:
        with zipfile.ZipFile(file) as archive:

            def restore(value: dict[str, Any]) -> Any:
                if value.keys() == {"dtype"}:
                    return DTYPES[value["dtype"]]
                if value.keys() != {"tensor", "shape", "of"}:
                    return value
                content = np.array(memoryview(archive.read(f"tensor{value['tensor']}")), np.uint8)
                return torch.from_numpy(content).view(DTYPES[value["of"]]).reshape(value["shape"])

            state = json.loads(archive.read("state.json"), object_hook=restore)
    except zipfile.BadZipFile as error:
        raise DamagedError(str(error)) from error
    except (KeyError, ValueError, TypeError, RuntimeError, NotImplementedError, EOFError, zlib.error) as error:
        raise DamagedError(f"{type(error).__name__}: {error}") from error
    if not isinstance(state, dict) or state.get("version") != VERSION:
        raise DamagedError("it was written by another version of farfield")
    for field, kind in FIELDS.items():
        if not isinstance(state.get(field), kind):
            raise DamagedError(f"{field} is {state.get(field)!r:.60}")
    return state


def compute_identity(model: str, volumes: Mapping[str, Any], tiles: object) -> dict[str, str]:
    """Return the fingerprint of the model, the volumes' shapes and dtypes, and how they are cut and written."""
    kinds = [f"{name} {tuple(volume.shape)} {getattr(volume, 'dtype', '')}" for name, volume in volumes.items()]
    return {"model": model, "volume": "; ".join(kinds), "tile or halo": repr(tiles)}
