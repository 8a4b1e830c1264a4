"""Where the positions of a tile lie in every grid of a network, and how tiles cut a volume."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, NamedTuple

from farfield.streaming.arrays import Region, Span


class Along(NamedTuple):
    """How a grid of the network follows a side of the volume.

    Attributes:
        axis: Which of the grid's axes; 1 too where a layer has the channels last.
        ratio: Its positions for each position of the volume: 1/4 after two strides of 2.
    """

    axis: int
    ratio: Fraction


class Placed(NamedTuple):
    """A grid on its way through the network.

    Attributes:
        name: What returned it, or the attention that reads it.
        attends: Whether an attention reads it.
        shape: Of the whole.
        along: How it follows each side of the volume; None where it does not.
    """

    name: str
    attends: bool
    shape: tuple[int, ...]
    along: tuple[Along | None, ...]

    @property
    def size(self) -> tuple[int, ...]:
        """Of a grid with the channels first, such as attentions read and networks return."""
        return self.shape[2:]

    def part(self, region: Region, whole: Sequence[int]) -> Region:
        """Where a region of the volume lies in this grid."""
        spans = [(0, side) for side in self.size]
        for follows, span, side in zip(self.along, region, whole, strict=True):
            if follows is not None:
                spans[follows.axis - 2] = self.span(follows, span, side)
        return tuple(spans)

    def span(self, follows: Along, span: Span, side: int) -> Span:
        """Where a span of a side lies in this grid; what ends the volume ends the grid.

        After convolutions without padding a grid ends earlier, and nothing of it need lie in a span near the end.
        """
        start, stop = (min(int(index * follows.ratio), self.shape[follows.axis]) for index in span)
        return start, self.shape[follows.axis] if span[1] == side else stop


class Halo(NamedTuple):
    """Positions that a tile reads before and after what it owns, a side each."""

    before: tuple[int, ...]
    after: tuple[int, ...]

    def join(self, other: Halo) -> Halo:
        """The larger of two."""
        before, after = (tuple(map(max, *pair)) for pair in zip(self, other, strict=True))
        return Halo(before, after)

    def around(self, core: Region, whole: Sequence[int]) -> Region:
        """What a tile reads: its own positions and the halo, cut at the volume's true border."""
        return tuple(
            (max(0, start - before), min(side, stop + after))
            for (start, stop), before, after, side in zip(core, *self, whole, strict=True)
        )


def cores(size: Sequence[int], tile: Sequence[int]) -> list[Region]:
    """The positions that each tile owns: every position of the volume in one tile."""
    spans = [
        [(start, min(start + positions, side)) for start in range(0, side, positions)]
        for side, positions in zip(size, tile, strict=True)
    ]
    return list(itertools.product(*spans))


def at_least(least: Sequence[int], region: Region, whole: Sequence[int]) -> Region:
    """A region that is made larger where it has fewer positions a side than a network takes.

    Args:
        least: Positions a side that it takes, with what is left of the whole's when strides have divided it.
        region: What is read.
        whole: Sides of the volume.
    """
    found = []
    for (start, stop), positions, side in zip(region, least, whole, strict=True):
        if stop - start < positions:
            stop = min(side, start + positions)
            start = min(start, max(0, stop - positions))
        found.append((start, stop))
    return tuple(found)


def positions_of(region: Region) -> int:
    """How many positions a region has."""
    return math.prod(stop - start for start, stop in region)


def overlap(size: Sequence[int], tile: Sequence[int], halo: Halo) -> float:
    """Positions that all tiles read, for each position of the volume."""
    return sum(positions_of(halo.around(core, size)) for core in cores(size, tile)) / math.prod(size)


def inner(part: Region, read: Region) -> tuple[Any, ...]:
    """The index of a part in the grid of what was read."""
    return (..., *(slice(start - first, stop - first) for (start, stop), (first, _) in zip(part, read, strict=True)))


def rounded_up(number: int | Fraction, multiple: int) -> int:
    """The next multiple."""
    return math.ceil(Fraction(number) / multiple) * multiple
