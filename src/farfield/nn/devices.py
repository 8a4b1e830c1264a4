"""Where a network runs: its device, its dtype, and the memory that is free there."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import torch
from torch import nn

from farfield.nn.tracing import tensors

_FLOATS = ("float16", "bfloat16", "float32", "float64")


def device_of(*parts: Any) -> torch.device:
    """Return the device of the first tensor in modules and inputs, which may be nested; else torch's default."""
    for part in parts:
        for tensor in [*part.parameters(), *part.buffers()] if isinstance(part, nn.Module) else tensors(part):
            return tensor.device
    return torch.get_default_device()


def dtype_of(model: nn.Module, *inputs: Any) -> torch.dtype:
    """Return the dtype of a model's input: that of its first floats, of its inputs if it has none, or else torch's."""
    dtypes = [each.dtype for each in (*model.parameters(), *model.buffers(), *inputs) if hasattr(each, "dtype")]
    # An array's dtype has a name, and a tensor's is one.
    names = (getattr(dtype, "name", str(dtype).removeprefix("torch.")) for dtype in dtypes)
    found: torch.dtype = getattr(torch, next(filter(_FLOATS.__contains__, names), ""), torch.get_default_dtype())
    return found


def free_bytes(device: torch.device) -> int:
    """Return the bytes of free memory on a device; half of all memory where the system does not report it."""
    if device.type == "cuda":
        # What torch has reserved and not given out is free too, so that a second call finds as much as the first.
        spare = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + spare
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return 1024 * int(next(line.split()[1] for line in lines if line.startswith("MemAvailable")))
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
