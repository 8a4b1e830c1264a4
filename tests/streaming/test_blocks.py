"""Blocks that are found by arithmetic, beside the list of all tiles' own parts."""

from __future__ import annotations

import itertools
import math

from hypothesis import given
from hypothesis import strategies as st

from farfield.streaming.arguments import Cores, axis_spans, cut_axes
from farfield.streaming.blocks import Blocks
from farfield.streaming.graph import Graph
from farfield.streaming.labels import LabelledGraph
from farfield.streaming.spans import Piece, box_shape, is_empty
from farfield.volumes.source import overlap


@st.composite
def cases(draw: st.DrawFn) -> tuple[LabelledGraph, tuple[tuple[Piece, ...], ...], Cores]:
    """A volume in tiles, and a value: of other strides, of lengths without any, of an axis twice or not at all."""
    size = tuple(draw(st.lists(st.integers(1, 13), min_size=1, max_size=3)))
    cores = Cores(size, tuple(draw(st.integers(1, length)) for length in size))
    cut = cut_axes(cores.size, cores.tile)
    axes = draw(st.permutations([*cut, None, *draw(st.lists(st.sampled_from([*cut, None]), max_size=2))]))
    if draw(st.booleans()):
        axes = axes[1:]
    lengths = (draw(st.just(size[axis]) | st.integers(1, 2 * size[axis])) if axis in cut else 3 for axis in axes)
    own = list(map(Piece, lengths, axes))
    first = draw(st.integers(0, len(own)))
    return LabelledGraph(Graph(), size, cut), (tuple(own[:first]), tuple(own[first:])), cores


@given(cases(), st.data())
def test_blocks_are_those_of_the_list(drawn: tuple, data: st.DataObject) -> None:
    labelled, layout, cores = drawn
    tiles = list(itertools.product(*map(axis_spans, cores.size, cores.tile)))
    assert list(cores) == tiles
    assert [cores.index_of(cores.places(index)) for index in range(len(cores))] == list(range(len(tiles)))
    boxes = [labelled.core(layout, tile) for tile in tiles]
    owned = [labelled.owns(layout, tile) and not is_empty(box) for tile, box in zip(tiles, boxes, strict=True)]
    sizes = [4 * math.prod(box_shape(box)) * owns for box, owns in zip(boxes, owned, strict=True)]
    ends = list(itertools.accumulate(sizes))
    blocks = Blocks(labelled, layout, cores, 4)
    assert [blocks.find(index) for index in range(len(tiles))] == [*zip([0, *ends], ends, strict=False)]
    assert [blocks.has(index) for index in range(len(tiles))] == owned
    assert blocks.total == ends[-1]
    starts = [data.draw(st.integers(0, piece.length - 1)) for dim in layout for piece in dim]
    read = [(start, start + data.draw(st.integers(1, 9))) for start in starts]
    parts = [[span for dim in box for span in dim] for box in boxes]
    met = [(at, part) for at, part in enumerate(parts) if owned[at] and overlap(read, part) is not None]
    assert list(blocks.find_met(read)) == met
