"""Checks of arguments that users give: tiles, and sizes as an integer or one per spatial dim."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from torch import Tensor

from farfield._checks import ShapeError, unknown

# What norms and pooling see: all positions of the volume, or those that a tile reads.
STATISTICS = ("whole", "tile")


@dataclass(frozen=True)
class Tiles:
    """How a volume is cut into tiles, where the size of the tiles alone is not enough.

    Attributes:
        size: Size of the tiles that are written, without halo: one number, or one per spatial dim, None for those that
            are not cut; by default the largest that memory allows.
        halo: Positions of the volume that a tile reads before and after its own: one number, or one per spatial dim;
            rounded up to multiples of the strides; by default found by running the network on small grids.
        memory: Bytes that the grids of a tile may take, for tiles whose size is not given; by default a quarter of the
            free memory. Workspace of kernels, the network and the libraries come on top.
        disk: Bytes of disk that grids inside the network may take at once, which are stored between passes so that
            later passes start from them, and keys and values of softmax attention; by default none: each pass starts
            from the volume, and keys and values are in memory.
        statistics: What norms, means and pooling see: "whole", all positions of the volume, or "tile", the positions
            that a tile reads, as in training on patches. Tiles then all read as many positions, their halo included,
            and the result depends on where they are cut. Attention, layers with `summarize` and `respond`, and
            layer norm over positions see the whole in either case.

    Example:
        >>> from torch import nn
        >>> from farfield.streaming import Tiles, plan_whole
        >>> net = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.Conv2d(8, 1, 3, padding=1)).eval()
        >>> plan_whole(net, (100, 100), tile=Tiles(32, halo=5)).passes[-1].halo.before
        (5, 5)
    """

    size: int | Sequence[int | None] | None = None
    halo: int | Sequence[int] | None = None
    memory: int | None = None
    disk: int | None = None
    statistics: str = "whole"


def parse_tiles(caller: str, tile: Any) -> Tiles:
    """Parse the argument `tile`: a size, or `Tiles`.

    Raises:
        TypeError: If a number is no integer.
        ShapeError: If a number is too small.
        LookupError: If `statistics` is unknown.
    """
    given = tile if isinstance(tile, Tiles) else Tiles(tile)
    size = None if given.size is None else parse_positions(caller, "tile", given.size, 1, optional=True)
    halo = None if given.halo is None else parse_positions(caller, "halo", given.halo, 0)
    memory = None if given.memory is None else parse_bytes(caller, "memory", given.memory)
    if given.statistics not in STATISTICS:
        raise unknown(caller, "statistics", given.statistics, STATISTICS)
    disk = None if given.disk is None else parse_bytes(caller, "disk", given.disk)
    return Tiles(size, cast(int | tuple[int, ...] | None, halo), memory, disk, given.statistics)


def parse_bytes(caller: str, name: str, given: Any) -> int:
    """Parse a number of bytes, of any type whose value is a whole number, such as 2e9.

    Raises:
        TypeError: If it is no whole number.
        ValueError: If it is negative.
    """
    is_number = isinstance(given, int | float | np.integer | np.floating) and not isinstance(given, bool)
    if not is_number or not float(given).is_integer():
        raise TypeError(f"{caller}: {name} must be a number of bytes, got {given!r}; fix: {name}=2 * 10**9.")
    if given < 0:
        raise ValueError(f"{caller}: {name} must be at least 0 bytes, got {given!r}; fix: {name}=2 * 10**9.")
    return int(given)


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
