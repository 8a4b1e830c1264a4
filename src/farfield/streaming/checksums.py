"""Checksums of what is read, stored and written."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from farfield._checks import install_command

try:
    from xxhash import xxh3_64_intdigest
except ModuleNotFoundError as error:
    # The first import of streaming that the core does not bring.
    text = f"farfield.streaming: it needs {error.name}, which is not installed; fix: {install_command('stream')}"
    raise ModuleNotFoundError(text, name=error.name) from None


def checksum(content: Any) -> int:
    """Return the checksum of some bytes: 63 bits, and never 0, which stands for none."""
    return xxh3_64_intdigest(content) >> 1 or 1


def bytes_of(grid: Tensor) -> memoryview:
    """Return the bytes of a grid's numbers."""
    grid = grid.detach().cpu().contiguous()
    flat = grid.as_strided((grid.numel(),), (1,))  # a tensor of one element may have any stride
    return flat.view(torch.uint8).numpy().data


def box_checksum(box: np.ndarray) -> int:
    """Return a checksum that is the same for 0 and -0: zarr stores a chunk of only -0 as one of 0."""
    return checksum(np.add(box, 0, order="C"))
