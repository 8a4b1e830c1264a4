"""Checks of arguments that users give: volumes, and sizes as an integer or one per spatial dim."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from farfield._checks import ShapeError

COMPLEX = (torch.complex32, torch.complex64, torch.complex128)


def check_volume(caller: str, name: str, volume: Any) -> None:
    """Refuse an object that is no array of numbers, such as a list, a path or a network.

    Raises:
        TypeError: If the object has no shape, takes no slices, or does not hold booleans, integers or floats.
    """
    if hasattr(volume, "shape") and hasattr(volume, "__getitem__"):
        check_numbers(caller, name, volume)
        return
    if isinstance(volume, nn.Module):
        fix = f"the network first, {caller}(model, volume)"
    elif isinstance(volume, str | bytes) or hasattr(volume, "__fspath__"):
        fix = 'open it first, e.g. numpy.load(path, mmap_mode="r"), zarr.open_array(path) or tifffile.memmap(path)'
    else:
        fix = "numpy.asarray(…)"
    raise TypeError(
        f"{caller}: {name} must be an array, with a shape and slices, got {type(volume).__name__}; fix: {fix}."
    )


def check_numbers(caller: str, name: str, volume: Any) -> None:
    """Raise TypeError for an array whose dtype is known and is not that of booleans, integers or floats."""
    dtype = getattr(volume, "dtype", None)
    kind = dtype.kind if isinstance(dtype, np.dtype) else "c" if dtype in COMPLEX else "f"
    if kind not in "bfiu":
        fix = f"the magnitude, abs({name})" if kind == "c" else f'an array of one of these, {name}.astype("float32")'
        raise TypeError(f"{caller}: {name} must hold booleans, integers or floats, got {dtype}; fix: {fix}.")


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
        An int if one integer is given, of any integer type; a tuple if a sequence, 1-D array or tensor is given.

    Raises:
        TypeError: If neither is given, or a number is a boolean or no integer.
        ShapeError: If a number is below `least`.
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
    """Return an int for any integer type; raise TypeError for booleans and for floats, even whole ones."""
    if isinstance(given, bool | np.bool_):
        raise TypeError
    return operator.index(given)
