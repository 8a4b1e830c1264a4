"""Run-length encoded masks as COCO writes them: their runs, and checks of them."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from typing import Any

import numpy as np

# The most digits of 5 bits that a run of 32 bits has.
_DIGITS = 7


def find_rle_fault(segmentation: Mapping[str, Any], width: int, height: int) -> str | None:
    """Return what is wrong with the RLE of a mask, None if nothing."""
    # pycocotools decodes into memory of the given size without checking the runs.
    size = segmentation.get("size")
    if "counts" not in segmentation:
        return "its RLE has no counts"
    if size != [height, width] or not all(type(side) is int for side in size):
        return f"its RLE has the size {reprlib.repr(size)}, and the image has {[height, width]}"
    try:
        runs = read_runs(segmentation["counts"])
    except ValueError as error:
        return f"its RLE {error}"
    if min(runs, default=0) < 0:
        return f"its RLE has a negative run, {min(runs)}"
    if sum(runs) != height * width:
        return f"its RLE has runs of {sum(runs)} pixels in all, and the image has {height * width}"
    return None


def read_runs(counts: Any) -> list[int]:
    """Return the runs of background and object in turn, from a list or from COCO's string; `ValueError` if damaged."""
    if isinstance(counts, list) and all(type(run) is int for run in counts):
        return counts
    if not isinstance(counts, str) or not counts.isascii():
        raise ValueError(f"has the counts {reprlib.repr(counts)}, neither a list of whole numbers nor COCO's string")
    # A number of COCO's string is written in digits of 5 bits, the lowest first, each a character from "0" on. The bit
    # of value 32 means that another digit follows, the bit of value 16 in the last digit that the number is negative.
    digits = np.frombuffer(counts.encode(), np.uint8).astype(np.int64) - ord("0")
    ends = np.flatnonzero(digits < 32)
    if not ((digits >= 0) & (digits < 64)).all() or (len(digits) and (not len(ends) or ends[-1] != len(digits) - 1)):
        raise ValueError(f"has the counts {reprlib.repr(counts)}, which are damaged: no whole string of COCO's")
    if not len(ends):
        return []
    starts = np.concatenate([[0], ends[:-1] + 1])
    lengths = ends - starts + 1
    if lengths.max() > _DIGITS:
        raise ValueError(f"has the counts {reprlib.repr(counts)}, with a run of more than {_DIGITS} digits")
    shifts = 5 * (np.arange(len(digits)) - np.repeat(starts, lengths))
    runs = np.add.reduceat((digits & 31) << shifts, starts)
    runs -= (digits[ends] >> 4 & 1) << 5 * lengths
    # From the fourth on, a number is the difference between its run and the run two before.
    for turn in (1, 2):
        runs[turn::2] = np.cumsum(runs[turn::2])
    return runs.tolist()
