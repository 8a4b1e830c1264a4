"""Free memory of a device."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import torch

# The share of the free memory that a summary which is its grid may take.
SUMMARY_SHARE = 1 / 2


def free_bytes(device: torch.device) -> int:
    """Return the bytes of free memory on a device; half of all memory where the system does not report it."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return 1024 * int(next(line.split()[1] for line in lines if line.startswith("MemAvailable")))
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
