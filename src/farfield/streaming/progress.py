"""How far a prediction is, on disk beside its output, so that one that was killed goes on where it was."""

from __future__ import annotations

import hashlib
import json
import time
import warnings
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from farfield._files import open_replacement
from farfield.streaming.outputs import FileOutput, offered, unfinished

STATE = "progress.zip"
KINDS = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int64, torch.bool)
DTYPES = {str(dtype): dtype for dtype in KINDS}
# What the file holds; another number is another farfield's.
VERSION = 1
# What is saved of a `Progress`, and what JSON makes of it.
FIELDS = {
    "identity": dict,
    "positions": list,
    "stage": int,
    "tile": int,
    "checksums": dict,
    "found": list,
    "written": list,
}
# Saving may take one part in this many of the time.
SHARE = 20


class DamagedError(ValueError):
    """The file that says how far a prediction is does not say it."""


class Written(NamedTuple):
    """A box that was written to the output.

    Attributes:
        stage: The pass that wrote it.
        tile: The tile.
        box: First index and the one after the last, an axis each.
        checksum: Of its numbers.
    """

    stage: int
    tile: int
    box: list[list[int]]
    checksum: int

    @property
    def slices(self) -> tuple[slice, ...]:
        """Where it is in the output."""
        return tuple(slice(start, stop) for start, stop in self.box)


class Progress:
    """Which tile of which pass is next, what the passes before have found, and what was written.

    Args:
        folder: Where it is saved; None if it is not.
        identity: What must be the same to go on: name -> fingerprint.
        positions: A side of the tiles.
    """

    def __init__(self, folder: Path | None, identity: dict[str, str], positions: tuple[int, ...]) -> None:
        self.folder, self.identity, self.positions = folder, identity, positions
        self.stage, self.tile = 0, 0
        self.checksums: dict[str, list[int]] = {}
        self.found: list[dict[str, Any]] = []
        self.written: list[Written] = []
        self.saved, self.took = 0.0, 0.0

    def advance(self, found: list[dict[str, Any]]) -> None:
        """One tile more; saved now and then, so that saving takes little of the time."""
        self.tile, self.found = self.tile + 1, found
        if time.monotonic() - self.saved >= SHARE * self.took:
            self.save()

    def next_stage(self) -> None:
        """One pass more."""
        self.stage, self.tile = self.stage + 1, 0
        self.save()

    def rewind(self) -> None:
        """Go back to before anything was written."""
        if self.written:
            self.stage, self.tile = self.written[0].stage, self.written[0].tile
            self.written = []

    def save(self) -> None:
        """Write the state, whole or not at all."""
        if self.folder is None:
            return
        start = time.monotonic()
        write_state(self.folder / STATE, {field: getattr(self, field) for field in FIELDS})
        self.saved = time.monotonic()
        self.took = self.saved - start

    def load(self, state: dict[str, Any]) -> None:
        """Take up a state that was saved."""
        self.stage, self.tile = state["stage"], state["tile"]
        self.checksums, self.found = state["checksums"], state["found"]
        self.written = [Written(*each) for each in state["written"]]


def begin(
    caller: str, output: FileOutput, identity: dict[str, str], positions: tuple[int, ...], overwrite: bool | None
) -> Progress:
    """Begin a prediction, or go on with one that was begun on the same; the output is held from here.

    Raises:
        ValueError: If an unfinished one is of something else, or its progress is damaged, and may not be overwritten.
        FileExistsError: If what is unfinished was not made here.
        BlockingIOError: If another process is at it.
    """
    output.owned.hold()
    try:
        return begun(caller, output, identity, positions, overwrite)
    except BaseException:
        output.owned.let_go()
        raise


def begun(
    caller: str, output: FileOutput, identity: dict[str, str], positions: tuple[int, ...], overwrite: bool | None
) -> Progress:
    """Progress of an output that is held."""
    progress, state = Progress(output.folder, identity, positions), saved_state(caller, output.path, overwrite)
    if state is not None:
        changed = [name for name in identity if state["identity"].get(name) != identity[name]]
        if not changed:
            progress.load(state)
            take_up(caller, output, progress)
            return progress
        if not overwrite:
            raise ValueError(
                f'{caller}: "{output.folder}" holds an unfinished prediction with another {" and ".join(changed)}; '
                f"fix: call it with the same to finish that; to begin anew, remove that folder{offered(overwrite)}."
            )
    output.owned.empty()
    try:
        output.make()
        progress.save()
    except OSError:
        output.owned.remove()
        raise
    return progress


def take_up(caller: str, output: FileOutput, progress: Progress) -> None:
    """Open an output that was begun; if it does not hold all that was written to it, make it anew.

    Files are cut short and chunks get lost by a crash of the machine, or by somebody. The summaries are kept in the
    progress, so only the last pass has to be run again.
    """
    if output.open() and all(output.holds(each.slices, each.checksum) for each in progress.written):
        return
    if progress.written:
        warnings.warn(
            f'{caller}: "{output.growing}" does not hold any more what was written to it; it is made anew, and its '
            f"{len(progress.written)} tiles are computed again.",
            stacklevel=2,
        )
    progress.rewind()
    output.make()
    progress.save()


def begun_tile(caller: str, path: Path, overwrite: bool | None) -> tuple[int, ...] | None:
    """Positions a side of the tiles of a prediction that was begun, which memory need not allow again."""
    state = saved_state(caller, path, overwrite)
    return None if state is None else tuple(state["positions"])


# ---- the file --------------------------------------------------------------------------------------------------------
def saved_state(caller: str, path: Path, overwrite: bool | None) -> dict[str, Any] | None:
    """The state of what is unfinished at a path; None where there is none, or a damaged one that may be overwritten.

    Raises:
        DamagedError: If it is damaged and may not be overwritten.
    """
    file = unfinished(path) / STATE
    if not file.is_file():
        return None
    try:
        return read_state(file)
    except DamagedError as error:
        if overwrite:
            return None
        raise DamagedError(
            f'{caller}: "{file}", which says how far an unfinished prediction is, is damaged: {error}; '
            f'fix: to begin anew, remove "{file.parent}"{offered(overwrite)}.'
        ) from None


def write_state(file: Path, state: dict[str, Any]) -> None:
    """Write numbers, texts, lists, dictionaries and tensors: JSON, and beside it the bytes of the tensors."""
    tensors: list[Tensor] = []

    def described(value: object) -> dict[str, Any]:
        if isinstance(value, torch.dtype):
            return {"dtype": str(value)}
        if not isinstance(value, Tensor):
            raise TypeError(f"{type(value).__name__} cannot be saved")
        tensors.append(value)
        return {"tensor": len(tensors) - 1, "shape": list(value.shape), "of": str(value.dtype)}

    text = json.dumps({"version": VERSION, **state}, default=described)
    with open_replacement(file) as opened, zipfile.ZipFile(opened, "w") as archive:
        archive.writestr("state.json", text)
        for number, tensor in enumerate(tensors):
            flat = tensor.detach().cpu().contiguous()
            flat = flat.as_strided((flat.numel(),), (1,))  # a single number may have any stride
            with archive.open(f"tensor{number}", "w", force_zip64=True) as member:
                member.write(flat.view(torch.uint8).numpy().data)


def read_state(file: Path) -> dict[str, Any]:
    """Read what `write_state` wrote. Nothing in the file is run, and every byte is checked by a checksum.

    Raises:
        DamagedError: Saying what is wrong.
    """
    try:
        with zipfile.ZipFile(file) as archive:

            def restored(value: dict[str, Any]) -> Any:
                if value.keys() == {"dtype"}:
                    return DTYPES[value["dtype"]]
                if value.keys() != {"tensor", "shape", "of"}:
                    return value
                content = np.array(memoryview(archive.read(f"tensor{value['tensor']}")), np.uint8)
                return torch.from_numpy(content).view(DTYPES[value["of"]]).reshape(value["shape"])

            state = json.loads(archive.read("state.json"), object_hook=restored)
    except zipfile.BadZipFile as error:
        raise DamagedError(str(error)) from error
    except (KeyError, ValueError, TypeError, RuntimeError, NotImplementedError, EOFError, zlib.error) as error:
        raise DamagedError(f"{type(error).__name__}: {error}") from error
    if not isinstance(state, dict) or state.get("version") != VERSION:
        raise DamagedError("it is of another version of farfield")
    for field, kind in FIELDS.items():
        if not isinstance(state.get(field), kind):
            raise DamagedError(f"{field} is {state.get(field)!r:.60}")
    return state


def identity_of(model: nn.Module, volumes: Sequence[Any], tiles: object) -> dict[str, str]:
    """What is computed: fingerprints of the model's state, of the kind of the volumes and of how they are cut."""
    digest = hashlib.sha256(repr(model).encode())
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    kinds = [f"{tuple(volume.shape)} {getattr(volume, 'dtype', '')}" for volume in volumes]
    return {"model": digest.hexdigest(), "volume": "; ".join(kinds), "tile or halo": repr(tiles)}
