"""Where the own parts of tiles lie in a file: the offset of each, and which of them a box meets, without a list."""

from __future__ import annotations

import itertools
import math
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence

from farfield.streaming.arguments import Cores, axis_spans
from farfield.streaming.labels import LabelledGraph
from farfield.streaming.spans import Layout, Span


class Blocks:
    """The own parts of a value, one a tile, one behind the other in the order of tiles.

    A tile's own span of a piece follows from the tile's place along the axis of that piece. So the positions in all
    tiles before one are a product of those along each axis, and the tiles that a span meets are neighbours.
    """

    def __init__(self, labelled: LabelledGraph, layout: Layout, cores: Cores, itemsize: int) -> None:
        self.cores, pieces = cores, [piece for dim in layout for piece in dim]
        spans = [axis_spans(*pair) for pair in zip(cores.size, cores.tile, strict=True)]
        # Of each piece: its axis, and where the own spans along that begin, and the end of the last one.
        self.axes = [piece.axis for piece in pieces]
        self.starts = [
            (0, piece.length)
            if piece.axis is None
            else array("q", (0, *(labelled.own_span(piece.length, piece.axis, span)[1] for span in spans[piece.axis])))
            for piece in pieces
        ]
        # Of each axis: the positions that all tiles before a place have along it.
        self.before = list(map(self._count_before, range(len(spans))))
        self.bytes = itemsize * math.prod(piece.length for piece in pieces if piece.axis is None)

    @property
    def total(self) -> int:
        """The bytes of all blocks."""
        return self.bytes * math.prod(before[-1] for before in self.before)

    def find(self, index: int) -> Span:
        """Return where the block of a tile begins and ends in the file; it is empty where the tile owns nothing."""
        offset, count = 0, 1
        for before, place in zip(self.before, self.cores.places(index), strict=True):
            offset = offset * before[-1] + count * before[place]
            count *= before[place + 1] - before[place]
        return offset * self.bytes, (offset + count) * self.bytes

    def has(self, index: int) -> bool:
        """Whether a tile owns a part."""
        start, stop = self.find(index)
        return start < stop

    def find_met(self, spans: Sequence[Span]) -> Iterator[tuple[int, list[Span]]]:
        """Iterate over the tiles whose own parts have positions in some spans, one a piece, with these parts."""
        near = [range(count if axis in self.axes else 1) for axis, count in enumerate(self.cores.counts)]
        for axis, starts, (start, stop) in zip(self.axes, self.starts, spans, strict=True):
            if axis is not None:
                first, last = bisect_right(starts, start) - 1, bisect_left(starts, stop)
                near[axis] = range(max(near[axis].start, first), min(near[axis].stop, last))
        pairs = zip(near, self.before, strict=True)
        for places in itertools.product(*([at for at in own if before[at] < before[at + 1]] for own, before in pairs)):
            yield self.cores.index_of(places), self._part(places)

    def _part(self, places: Sequence[int]) -> list[Span]:
        at = (0 if axis is None else places[axis] for axis in self.axes)
        return [(starts[place], starts[place + 1]) for starts, place in zip(self.starts, at, strict=True)]

    def _count_before(self, axis: int) -> Sequence[int]:
        count = self.cores.counts[axis]
        own = [starts for starts, each in zip(self.starts, self.axes, strict=True) if each == axis]
        if not own:  # the first tile along it owns all
            return array("q", [0] + [1] * count)
        lengths = (math.prod(starts[at + 1] - starts[at] for starts in own) for at in range(count))
        return array("q", itertools.accumulate(lengths, initial=0))
