"""Checks of arguments that users give: volumes, and sizes as an integer or one per spatial dim."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from farfield._checks import ShapeError


def check_volume(caller: str, name: str, volume: Any) -> None:
    """Refuse objects that are no arrays, such as lists and paths.

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


def parse_positions(
    caller: str, name: str, given: Any, least: int, *, optional: bool = False
) -> int | tuple[int | None, ...]:
    """Parse an integer, or one per spatial dim.

    Args:
        caller: The function that errors name.
        name: Name of the argument.
        given: Its value.
        least: The smallest allowed number.
        optional: Whether None is allowed in a sequence.

    Returns:
        An int for a number of any type, a tuple for a sequence of any type.

    Raises:
        TypeError: If it is neither.
        ShapeError: If a number is too small.
    """
    is_sequence = isinstance(given, Sequence | np.ndarray | Tensor) and not isinstance(given, str | bytes)
    is_sequence = is_sequence and getattr(given, "ndim", 1) == 1
    try:
        values = given if is_sequence else [given]
        numbers = [None if optional and each is None else parse_integer(each) for each in values]
    except TypeError:
        expected = "an integer, or one per spatial dim" + (", None for those that are not cut" if optional else "")
        raise TypeError(f"{caller}: {name} must be {expected}, got {given!r}; fix: {name}=64, for example.") from None
    if any(number is not None and number < least for number in numbers):
        raise ShapeError(f"{caller}: {name} must be at least {least}, got {given!r}; fix: {name}=64, for example.")
    return tuple(numbers) if is_sequence else numbers[0] or 0


def parse_integer(given: Any) -> int:
    """Return an int for any integer type; raise TypeError for booleans and for numbers with a fraction."""
    if isinstance(given, bool | np.bool_):
        raise TypeError
    return operator.index(given)
