"""What callers give by hand: a volume, and whole numbers a side. Refused here, by name, before anything is read."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from farfield._checks import ShapeError


def check_volume(caller: str, name: str, volume: Any) -> None:
    """Refuse what is no array, a list or a path for example.

    Raises:
        TypeError: If it has no shape, or takes no slices.
    """
    if hasattr(volume, "shape") and hasattr(volume, "__getitem__"):
        return
    if isinstance(volume, str | bytes) or hasattr(volume, "__fspath__"):
        fix = 'open it first, e.g. numpy.load(path, mmap_mode="r"), zarr.open_array(path) or tifffile.memmap(path)'
    else:
        fix = f"numpy.asarray({name})"
    raise TypeError(
        f"{caller}: {name} must be an array, with a shape and slices, got {type(volume).__name__}; fix: {fix}."
    )


def positions_a_side(
    caller: str, name: str, given: Any, least: int, *, optional: bool = False
) -> int | tuple[int | None, ...]:
    """A whole number, or one for each side.

    Args:
        caller: For errors.
        name: Of the argument.
        given: What the caller gave.
        least: No number may be below it.
        optional: Whether None may stand for a side.

    Returns:
        An int for a number of any kind, a tuple for numbers in a row of any kind.

    Raises:
        TypeError: If it is neither.
        ShapeError: If a number is too small.
    """
    rows = isinstance(given, Sequence | np.ndarray | Tensor) and not isinstance(given, str | bytes)
    row = rows and getattr(given, "ndim", 1) == 1
    try:
        numbers = [None if optional and each is None else whole_number(each) for each in (given if row else [given])]
    except TypeError:
        offered = "a whole number, or one for each side" + (", None where it is not cut" if optional else "")
        raise TypeError(f"{caller}: {name} must be {offered}, got {given!r}; fix: {name}=64, for example.") from None
    if any(number is not None and number < least for number in numbers):
        raise ShapeError(
            f"{caller}: {name} must be {least} or more a side, got {given!r}; fix: {name}=64, for example."
        )
    return tuple(numbers) if row else numbers[0] or 0


def whole_number(given: Any) -> int:
    """An int of what counts as one: no truth, and nothing with a fraction."""
    if isinstance(given, bool | np.bool_):
        raise TypeError
    return operator.index(given)
