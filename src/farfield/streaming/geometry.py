"""Geometry: where the positions of a tile lie in every grid of a network, and how a volume is cut into tiles."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, NamedTuple

from farfield.volumes.source import Region, Span


class AxisScale(NamedTuple):
    """How an axis of a network's grid scales with a spatial axis of the volume.

    Attributes:
        axis: Index of the grid's axis; it can be 1 if a layer works on channels last.
        ratio: Positions of the grid per position of the volume: 1/4 after two strides of 2.
    """

    axis: int
    ratio: Fraction


class Halo(NamedTuple):
    """Positions that a tile reads before and after its own positions, one number per spatial dim each."""

    before: tuple[int, ...]
    after: tuple[int, ...]

    def join(self, other: Halo) -> Halo:
        """Return the larger of two halos, per axis and direction."""
        before, after = (tuple(map(max, *pair)) for pair in zip(self, other, strict=True))
        return Halo(before, after)

    def around(self, core: Region, whole: Sequence[int]) -> Region:
        """Return the region that a tile reads: its own positions and the halo, cut at the border of the volume."""
        return tuple(
            (max(0, start - before), min(length, stop + after))
            for (start, stop), before, after, length in zip(core, *self, whole, strict=True)
        )


def cores(size: Sequence[int], tile: Sequence[int]) -> list[Region]:
    """Return the own positions of each tile, without halo; every position of the volume is in exactly one tile."""
    return list(itertools.product(*axis_spans(size, tile)))


def axis_spans(size: Sequence[int], tile: Sequence[int]) -> list[list[Span]]:
    """Return for each axis the own positions of the tiles along it."""
    return [
        [(start, min(start + positions, length)) for start in range(0, length, positions)]
        for length, positions in zip(size, tile, strict=True)
    ]


def cut_axes(size: Sequence[int], tile: Sequence[int]) -> tuple[int, ...]:
    """Return the axes along which tiles are shorter than the volume."""
    return tuple(axis for axis, (length, own) in enumerate(zip(size, tile, strict=True)) if own < length)


def enlarge_region(least: Sequence[int], region: Region, whole: Sequence[int]) -> Region:
    """Enlarge a region along axes where it is shorter than a network takes.

    Args:
        least: Smallest size that the network takes, with the remainders of the volume's size modulo the strides.
        region: The region to read.
        whole: Size of the volume.

    Returns:
        A region that contains `region` and has at least that size, or that of the volume if the volume is smaller.
    """
    result = []
    for (start, stop), positions, length in zip(region, least, whole, strict=True):
        if stop - start < positions:
            stop = min(length, start + positions)
            start = min(start, max(0, stop - positions))
        result.append((start, stop))
    return tuple(result)


def count_positions(region: Region) -> int:
    """Return the number of positions in a region."""
    return math.prod(stop - start for start, stop in region)


def index_within(part: Region, read: Region) -> tuple[Any, ...]:
    """Return the index that selects the region `part` from a grid that was read for the region `read`."""
    return (..., *(slice(start - first, stop - first) for (start, stop), (first, _) in zip(part, read, strict=True)))


def round_up(number: int | Fraction, multiple: int) -> int:
    """Round a number up to the next multiple of `multiple`."""
    return math.ceil(Fraction(number) / multiple) * multiple
