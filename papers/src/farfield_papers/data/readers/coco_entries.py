"""The keys and values of entries in COCO's format, run-length encoded masks among them, and checks of them."""

from __future__ import annotations

import os
import reprlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

# The largest side of a JPEG file. Every object has a mask of its image's size, so a wrong size would take all memory.
_LARGEST_SIDE = 65_535
# The largest coordinate: boxes are float32 in training.
_LARGEST = 1e9
# The most digits of 5 bits that a run of 32 bits has.
_DIGITS = 7


class _Field(NamedTuple):
    """The values that a key may have."""

    fits: Callable[[Any], bool]
    kind: str  # the allowed values in words, for errors
    needed: bool = True


def _is_whole(value: Any, least: int = -(2**63), most: int = 2**63 - 1) -> bool:
    # A bool is an int too.
    return type(value) is int and least <= value <= most


def are_numbers(values: Iterable[Any], most: float = _LARGEST) -> bool:
    """Return whether all values are finite numbers of magnitude `most` or less, and none a bool."""
    return all(type(value) in (int, float) and abs(value) <= most for value in values)


def is_box(box: Any) -> bool:
    """Return whether a value is a list of four finite numbers."""
    return isinstance(box, list) and len(box) == 4 and are_numbers(box)


def _is_text(value: Any) -> bool:
    # It must be possible as the name of a file.
    try:
        return isinstance(value, str) and bool(value.strip()) and "\0" not in value and bool(os.fsencode(value))
    except UnicodeEncodeError:
        return False


_ID = _Field(_is_whole, "a whole number")
_SIDE = _Field(lambda value: _is_whole(value, 1, _LARGEST_SIDE), f"a whole number from 1 to {_LARGEST_SIDE:,}")
_NAME = _Field(_is_text, "a text that is not empty and can be a name")
_FLAG = _Field(lambda value: value in (0, 1), "0 or 1", needed=False)
_AREA = _Field(lambda value: are_numbers([value], _LARGEST**2) and value >= 0, "a number from 0", needed=False)
# Boxes are checked separately, by `is_box`.
_ANY = _Field(lambda value: True, "anything")
FIELDS: dict[str, dict[str, _Field]] = {
    "images": {"id": _ID, "file_name": _NAME, "width": _SIDE, "height": _SIDE},
    "annotations": {"id": _ID, "image_id": _ID, "category_id": _ID, "bbox": _ANY, "iscrowd": _FLAG, "area": _AREA},
    "categories": {"id": _ID, "name": _NAME},
}


def find_section_faults(content: Mapping[str, Any]) -> Iterator[str]:
    """Yield a text for each section that is not a list, and for each entry that is not an object with keys."""
    for section in FIELDS:
        if not isinstance(content[section], list):
            yield f"{section} is {reprlib.repr(content[section])}, not a list"
            continue
        for place, entry in enumerate(content[section]):
            if not isinstance(entry, dict):
                yield f"{section}[{place}] is {reprlib.repr(entry)}, not an object with keys"


def find_missing_keys(content: Mapping[str, Any]) -> Iterator[str]:
    """Yield a text for each key that an entry must have and lacks."""
    for section, fields in FIELDS.items():
        for place, entry in enumerate(content[section]):
            lacking = (key for key, field in fields.items() if field.needed and key not in entry)
            yield from (f"{section}[{place}] has no {key}" for key in lacking)


def find_value_faults(content: Mapping[str, Any]) -> Iterator[str]:
    """Yield a text for each value of an entry that is not allowed."""
    for section, fields in FIELDS.items():
        for place, entry in enumerate(content[section]):
            for key, field in fields.items():
                if key in entry and not field.fits(entry[key]):
                    yield f"{section}[{place}]: {key} is {reprlib.repr(entry[key])}, not {field.kind}"


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
