"""Where a part of a value lies: pieces of its dimensions, spans of pieces, boxes and regions.

A dimension of a value is an ordered product of *pieces*: `(8, 64·48)` after `flatten(2)` of a grid of 64 × 48 has the
dimensions `(8,)` and `(64, 48)`. A piece that runs along an axis of the volume which is cut has that axis as its label;
all others are read whole. Spans are in positions of the piece itself, whatever its stride to the volume.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from fractions import Fraction
from typing import NamedTuple

import torch
from torch import Tensor

from farfield.volumes.place import Place

Span = tuple[int, int]
# A span of each piece of each dimension.
Box = tuple[tuple[Span, ...], ...]
# Disjoint spans in order, of each piece of each dimension; their product.
Region = tuple[tuple[tuple[Span, ...], ...], ...]
# More spans of a piece than this are joined: roll and circular padding need two.
SPANS = 2


class Piece(NamedTuple):
    """A factor of the length of a dimension."""

    length: int  # its number of positions in the whole
    axis: int | None = None  # of the volume that it runs along, if that is cut; None for any other


Dim = tuple[Piece, ...]
# The pieces of each dimension of a value.
Layout = tuple[Dim, ...]


def join_pieces(pieces: Sequence[Piece]) -> Dim:
    """Return the pieces of a dimension in their only form: a piece takes in unlabelled ones behind it."""
    joined: list[Piece] = []
    for piece in pieces:
        if piece.length == 1:
            continue
        if joined and piece.axis is None:
            joined[-1] = joined[-1]._replace(length=joined[-1].length * piece.length)
        else:
            joined.append(piece)
    return tuple(joined) or (Piece(1),)


def constant_layout(shape: Sequence[int]) -> Layout:
    """Return the layout of a value that is read whole."""
    return tuple((Piece(length),) for length in shape)


def length_of(dim: Dim) -> int:
    return math.prod(piece.length for piece in dim)


def shape_of(layout: Layout) -> tuple[int, ...]:
    return tuple(map(length_of, layout))


def is_cut(dim: Dim) -> bool:
    """Whether a dimension runs along an axis that is cut."""
    return any(piece.axis is not None for piece in dim)


def distinct(layout: Sequence[Dim]) -> Layout:
    """Return a layout in which no axis stands twice: a tile has its own part of the first, and all of the others."""
    seen: set[int | None] = set()
    result = []
    for dim in layout:
        axes = axes_of((dim,))
        result.append(dim if seen.isdisjoint(axes) else (Piece(length_of(dim)),))
        seen.update(axes)
    return tuple(result)


def axes_of(layout: Layout) -> list[int]:
    """Return the axes of all labelled pieces, in order."""
    return [piece.axis for dim in layout for piece in dim if piece.axis is not None]


def lengths_along(layout: Layout) -> dict[int, int]:
    """Return how many positions run along each axis."""
    return {piece.axis: piece.length for dim in layout for piece in dim if piece.axis is not None}


def whole_dim(dim: Dim) -> tuple[Span, ...]:
    return tuple((0, piece.length) for piece in dim)


def whole_box(layout: Layout) -> Box:
    return tuple(map(whole_dim, layout))


def box_shape(box: Box) -> tuple[int, ...]:
    return tuple(math.prod(stop - start for start, stop in spans) for spans in box)


def is_empty(box: Box) -> bool:
    """Whether a box has no position."""
    return any(start >= stop for spans in box for start, stop in spans)


def hull(one: Box, other: Box) -> Box:
    """Return the smallest box that contains two boxes of a value."""
    return tuple(
        tuple((min(start, first), max(stop, last)) for (start, stop), (first, last) in zip(*spans, strict=True))
        for spans in zip(one, other, strict=True)
    )


def positions_of(lengths: Sequence[int], spans: Sequence[Span]) -> Tensor:
    """Return the positions in a flattened whole, of pieces of these lengths, of those in some spans."""
    return flat_index(lengths, [torch.arange(start, stop) for start, stop in spans])


def flat_index(lengths: Sequence[int], places: Sequence[Tensor]) -> Tensor:
    """Return the positions in a flattened whole of these lengths from those along each axis, the last fastest."""
    index = torch.zeros(1, dtype=torch.long)
    for length, own in zip(lengths, places, strict=True):
        index = (index[:, None] * length + own).flatten()
    return index


# ---- windows ---------------------------------------------------------------------------------------------------------
class Window(NamedTuple):
    """The window of a dimension: position i reads from `i * stride - padding` on, `kernel` positions."""

    kernel: int
    stride: int
    padding: int
    dilation: int = 1
    # Positions that are added behind.
    extra: int = 0
    transposed: bool = False  # position i of the operand is written there

    @property
    def moves(self) -> bool:
        """Whether a position reads another than itself."""
        return (self.kernel, self.stride, self.padding, self.extra) != (1, 1, 0, 0)

    @property
    def place(self) -> Place:
        """Where positions of the result stand: in the middle of their windows."""
        middle = Fraction(self.dilation * (self.kernel - 1), 2) - self.padding
        return (
            Place(Fraction(1, self.stride), -middle / self.stride)
            if self.transposed
            else Place(Fraction(self.stride), middle)
        )

    def reach(self, span: Span) -> Span:
        """Return where the windows of a span begin and end, padding included."""
        ends = [place * self.stride - self.padding for place in (span[0], span[1] - 1)]
        return min(ends), max(ends) + self.dilation * (self.kernel - 1) + 1

    def read(self, span: Span, length: int) -> Span:
        """Return the positions, of so many, that a span of the result reads."""
        if not self.transposed:
            return clip(self.reach(span), length)
        first, last = span[0] + self.padding, span[1] - 1 + self.padding
        first = min(-(-(first - self.dilation * (self.kernel - 1)) // self.stride), first // self.stride)
        return clip((first, last // self.stride + 1), length)


def clip(span: Span, length: int) -> Span:
    """Return the part of a span within an axis, at least one position."""
    start = min(max(span[0], 0), length - 1)
    return start, max(min(span[1], length), start + 1)


# ---- halos -----------------------------------------------------------------------------------------------------------
class Halo(NamedTuple):
    """Positions that a tile reads before and after its own positions, one number per spatial dim each."""

    before: tuple[int, ...]
    after: tuple[int, ...]

    def around(self, core: Sequence[Span], whole: Sequence[int]) -> tuple[Span, ...]:
        """Return the region that a tile reads: its own positions and the halo, cut at the border of the volume."""
        return tuple(
            (max(0, start - before), min(length, stop + after))
            for (start, stop), before, after, length in zip(core, *self, whole, strict=True)
        )


def join_halos(halos: Iterable[Halo]) -> Halo:
    """Return the largest of some halos, per axis and direction."""
    return Halo(*(tuple(map(max, zip(*ends, strict=True))) for ends in zip(*halos, strict=True)))


# ---- regions ---------------------------------------------------------------------------------------------------------
def region_of(box: Box) -> Region:
    return tuple(tuple((span,) for span in spans) for spans in box)


def join_spans(spans: Sequence[Span]) -> tuple[Span, ...]:
    """Return the union of spans, disjoint and in order; the nearest are joined if there are more than `SPANS`."""
    joined: list[Span] = []
    for start, stop in sorted(span for span in spans if span[0] < span[1]):
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(stop, joined[-1][1])
        else:
            joined.append((start, stop))
    while len(joined) > SPANS:
        gaps = [after[0] - before[1] for before, after in itertools.pairwise(joined)]
        nearest = gaps.index(min(gaps))
        joined[nearest : nearest + 2] = [(joined[nearest][0], joined[nearest + 1][1])]
    return tuple(joined)


def add_box(region: Region | None, box: Box) -> Region:
    """Return the smallest region that contains both."""
    if region is None:
        return region_of(box)
    return tuple(
        tuple(join_spans([*own, span]) for own, span in zip(dim, spans, strict=True))
        for dim, spans in zip(region, box, strict=True)
    )


def boxes_of(region: Region) -> Iterator[Box]:
    """Iterate over the boxes of a region, the last piece fastest."""
    pieces = [spans for dim in region for spans in dim]
    lengths = [len(dim) for dim in region]
    for chosen in itertools.product(*pieces):
        rest = iter(chosen)
        yield tuple(tuple(itertools.islice(rest, count)) for count in lengths)


def count_positions(region: Region) -> int:
    return math.prod(sum(stop - start for start, stop in spans) for dim in region for spans in dim)


# ---- tensors on regions ----------------------------------------------------------------------------------------------
def read_box(tensor: Tensor, region: Region, box: Box) -> Tensor:
    """Return a box of a value that is known on a region which contains it."""
    for axis, (dim, spans) in enumerate(zip(region, box, strict=True)):
        if all(known == (span,) for known, span in zip(dim, spans, strict=True)):
            continue
        if len(dim) == 1:
            tensor = _narrow_to(tensor, axis, dim[0], spans[0])
            continue
        tensor = tensor.unflatten(axis, [sum(stop - start for start, stop in known) for known in dim])
        for piece, (known, span) in enumerate(zip(dim, spans, strict=True)):
            tensor = _narrow_to(tensor, axis + piece, known, span)
        tensor = tensor.flatten(axis, axis + len(dim) - 1)
    return tensor


def take_box(tensor: Tensor, layout: Layout, box: Box) -> Tensor:
    """Return a box of a value that is known as a whole."""
    return read_box(tensor, region_of(whole_box(layout)), box)


def _narrow_to(tensor: Tensor, axis: int, known: tuple[Span, ...], span: Span) -> Tensor:
    """Return a span along an axis of which `known` spans are there."""
    first = 0
    for start, stop in known:
        if start <= span[0] and span[1] <= stop:
            return tensor.narrow(axis, first + span[0] - start, span[1] - span[0])
        first += stop - start
    raise LookupError(f"span {span} is not in {known}")


def join_boxes(tensors: Sequence[Tensor], region: Region) -> Tensor:
    """Return the value on a region from the values on its boxes, in the order of `boxes_of`."""
    if len(tensors) == 1:
        return tensors[0]
    rest = [
        each.reshape([stop - start for spans in box for start, stop in spans])
        for each, box in zip(tensors, boxes_of(region), strict=True)
    ]
    counts = [len(spans) for dim in region for spans in dim]
    for axis in reversed(range(len(counts))):
        if counts[axis] > 1:
            rest = [torch.cat(rest[at : at + counts[axis]], axis) for at in range(0, len(rest), counts[axis])]
    return rest[0].reshape([count_positions((dim,)) for dim in region])


def write_box(tensor: Tensor, layout: Layout, box: Box, value: Tensor, *, add: bool = False) -> None:
    """Write a box, or add to it, by pieces: where a dimension has several, it is a copy that is read."""
    view = tensor.view([piece.length for dim in layout for piece in dim])
    for axis, (start, stop) in enumerate(span for spans in box for span in spans):
        view = view.narrow(axis, start, stop - start)
    value = value.reshape(view.shape)
    if add:
        view += value.to(view.device)
    else:
        view.copy_(value)
