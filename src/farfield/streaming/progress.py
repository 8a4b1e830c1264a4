"""How far a prediction is, on disk beside its output, so that one that was killed goes on where it was."""

from __future__ import annotations

import hashlib
import io
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from farfield.streaming.outputs import FileOutput, emptied, unfinished

STATE = "progress.pt"
# Saving may take one part in this many of the time.
SHARE = 20


class Progress:
    """Which tile of which pass is next, and what the passes before have found.

    Args:
        folder: Where it is saved; None if it is not.
        identity: What must be the same to go on: name -> fingerprint.
        cells: A side of the tiles.
    """

    def __init__(self, folder: Path | None, identity: dict[str, str], cells: tuple[int, ...]) -> None:
        self.folder, self.identity, self.cells = folder, identity, cells
        self.stage, self.tile = 0, 0
        self.checksums: dict[str, list[int]] = {}
        self.found: list[dict[str, Any]] = []
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

    def save(self) -> None:
        """Write the state, whole or not at all."""
        if self.folder is None:
            return
        start = time.monotonic()
        fields = ("identity", "cells", "stage", "tile", "checksums", "found")
        temporary = self.folder / f"{STATE}.tmp"
        packed = io.BytesIO()  # torch writing to a full disk does not say that it is full
        torch.save({field: getattr(self, field) for field in fields}, packed)
        temporary.write_bytes(packed.getbuffer())
        os.replace(temporary, self.folder / STATE)
        self.saved = time.monotonic()
        self.took = self.saved - start

    def load(self) -> None:
        """Read the state."""
        state = torch.load(self.folder / STATE, weights_only=True) if self.folder is not None else {}
        self.stage, self.tile = state["stage"], state["tile"]
        self.checksums, self.found = state["checksums"], state["found"]


def begin(
    caller: str, output: FileOutput, identity: dict[str, str], cells: tuple[int, ...], overwrite: bool
) -> Progress:
    """Begin a prediction, or go on with one that was begun on the same; the output is held from here.

    Raises:
        ValueError: If an unfinished one is of something else and may not be overwritten.
        BlockingIOError: If another process is at it.
    """
    output.hold()
    try:
        return begun(caller, output, identity, cells, overwrite)
    except BaseException:
        output.let_go()
        raise


def begun(
    caller: str, output: FileOutput, identity: dict[str, str], cells: tuple[int, ...], overwrite: bool
) -> Progress:
    """Progress of an output that is held."""
    progress, state = Progress(output.folder, identity, cells), output.folder / STATE
    if state.is_file() and output.growing.exists():
        was = torch.load(state, weights_only=True)["identity"]
        changed = [name for name in identity if was.get(name) != identity[name]]
        if not changed:
            progress.load()
            output.open()
            return progress
        if not overwrite:
            raise ValueError(
                f'{caller}: "{output.folder}" holds an unfinished prediction with another {" and ".join(changed)}; '
                f"fix: call it with the same to finish that, or overwrite=True to begin anew."
            )
    emptied(output.folder)
    output.make()
    progress.save()
    return progress


def begun_tile(path: Path) -> tuple[int, ...] | None:
    """Cells a side of the tiles of a prediction that was begun, which memory need not allow again."""
    state = unfinished(path) / STATE
    return torch.load(state, weights_only=True)["cells"] if state.is_file() else None


def identity_of(model: nn.Module, volumes: Sequence[Any], tiles: object) -> dict[str, str]:
    """What is computed: fingerprints of the model's state, of the kind of the volumes and of how they are cut."""
    digest = hashlib.sha256(repr(model).encode())
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    kinds = [f"{tuple(volume.shape)} {getattr(volume, 'dtype', '')}" for volume in volumes]
    return {"model": digest.hexdigest(), "volume": "; ".join(kinds), "tile or halo": repr(tiles)}
