"""Arrays whose parts are computed when they are read: those of dask, counted, and those that mask their slices."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

STACK = np.random.default_rng(0).random((9, 64, 48), "float32")
CHUNKS = ((2, 7), (30, 20, 14), (48,))


def counted(folder: Path, stack: np.ndarray = STACK, chunks: Any = CHUNKS) -> Any:
    """A lazy array of which each chunk that is computed writes a file, with the process and the chunk."""
    from dask import array

    folder.mkdir()

    def compute(block: np.ndarray, block_id: tuple[int, ...]) -> np.ndarray:
        (folder / f"{os.getpid()} {block_id} {os.urandom(8).hex()}").touch()
        return block

    return array.map_blocks(compute, array.from_array(stack, chunks=chunks), dtype=stack.dtype, meta=np.empty(0))


def computed(folder: Path) -> Counter[str]:
    """How often each process has computed each chunk."""
    return Counter(file.name.rpartition(" ")[0] for file in folder.iterdir())


class Lazy:
    """An array on disk whose slices are masked, as a variable of netCDF4."""

    def __init__(self, array: np.ma.MaskedArray) -> None:
        self.array, self.shape, self.dtype = array, array.shape, array.dtype

    def __getitem__(self, index: Any) -> np.ma.MaskedArray:
        return self.array[index]
