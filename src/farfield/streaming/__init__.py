"""Grids that do not fit in memory: a layer, or a whole network, over tiles, with the response of the whole.

A summary merges over tiles. So one pass over the tiles summarizes what answers, and the next lets each tile respond to
the whole; a network with n attentions, one after the other, takes n + 1 passes.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn


def predict_whole(
    model: nn.Module,
    volume: Any,
    *,
    tile: int | Sequence[int | None] | None = None,
    halo: int | Sequence[int] | None = None,
    pad: str | None = None,
    out: str | Path | Any | None = None,
    overwrite: bool = False,
    quiet: bool = False,
) -> Any:
    """Predict a volume tile by tile, exactly as `model(volume)` would.

    Args:
        model: In eval mode, from one grid `(batch, channels, *sides)` to one.
        volume: Anything with `shape` and slicing: `(*sides)` (one channel), `(channels, *sides)` or
            `(batch, channels, *sides)`; which of them the model's rank decides.
        tile: Cells a side of what a tile writes (halos are read beside it); None for a side that is not cut; by default
            what memory allows.
        halo: Cells that a tile reads beyond what it writes; by default found by probing the model.
        pad: "reflect", "replicate" or "constant": pad the sides to what the model's strides divide, and crop.
        out: A path ending in .npy, .zarr, .tif or .tiff, an array that takes slices, or None: in memory.
        overwrite: Whether a path that exists is replaced.
        quiet: Whether to say nothing of plan and progress.

    Returns:
        What was written: the array, or for a path the file opened for reading; in the layout of the volume.
    """
    raise NotImplementedError
