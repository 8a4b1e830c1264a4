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
    """How a volume is cut into tiles, and what may be stored, where the size of the tiles alone is not enough.

    Attributes:
        size: Size of the tiles that are written, without halo: one number, or one per spatial dim, None for those that
            are not cut; rounded up to multiples of the strides; by default the largest that memory allows, which is
            the whole volume where its values fit.
        halo: Positions of the volume that operations without a rule read before and after their own: one number, or
            one per spatial dim. By default a network with such an operation is refused. All other halos follow from
            the rules of operations, whatever is given here.
        memory: Bytes for the values of a tile and, half of them, for values that are stored in memory between passes;
            by default a quarter of the free memory. A size that is given is kept, whatever its values take. Workspace
            of kernels, the network and the libraries come on top.
        disk: Bytes of disk that stored values may take at once; they then are on disk. None: on disk if the output is a
            file, in at most half of the free space there, so that a call that was killed goes on from them; else, and
            where the disk has less room than memory, in memory. 0: never on disk. What does not fit is computed again
            in each pass that needs it.
        statistics: What norms, means and pooling see: "whole", all positions of the volume, or "tile", the positions
            that a tile reads, as in training on patches. Tiles then all read as many positions, their halo included,
            rounded up to multiples of the strides, and the result depends on where they are cut. Nothing is stored.
            `GridAttention` and layers with `summarize` and `respond` see the whole in either case.

    Example:
        >>> from torch import nn
        >>> from farfield.streaming import Tiles, plan_whole
        >>> norms = [nn.Conv2d(1, 8, 3, padding=1), nn.InstanceNorm2d(8), nn.Conv2d(8, 1, 3, padding=1)]
        >>> net = nn.Sequential(*norms).eval()
        >>> plan = plan_whole(net, (100, 100), tile=Tiles(32, disk=1e9))
        >>> plan.passes[0].stores, plan.disk_bytes, round(plan.recomputed, 2)
        (('0',), 320000, 1.0)
        >>> plan = plan_whole(net, (100, 100), tile=Tiles(32, memory=0))  # nothing is stored
        >>> plan.passes[1].halo.before, plan.disk_bytes, round(plan.recomputed, 2)
        ((2, 2), 0, 1.56)
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
