"""Spans, boxes and regions, beside sets of positions."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from farfield.streaming.graph import Info
from farfield.streaming.rules.rule import (
    Operand,
    OperationCall,
    RuleError,
    label_output,
    single,
)
from farfield.streaming.spans import (
    SPANS,
    Box,
    Layout,
    Piece,
    Region,
    add_box,
    boxes_of,
    count_positions,
    distinct,
    is_empty,
    join_boxes,
    join_pieces,
    join_spans,
    length_of,
    positions_of,
    read_box,
    region_of,
    shape_of,
    whole_box,
    write_box,
)

LENGTHS = st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=3), min_size=1, max_size=3)


@st.composite
def spans(draw: st.DrawFn, length: int) -> tuple[int, int]:
    start = draw(st.integers(0, length - 1))
    return start, draw(st.integers(start + 1, length))


@st.composite
def boxes(draw: st.DrawFn, layout: Layout) -> Box:
    return tuple(tuple(draw(spans(piece.length)) for piece in dim) for dim in layout)


LAYOUTS = LENGTHS.map(lambda dims: tuple(tuple(Piece(length) for length in dim) for dim in dims))


def mark(layout: Layout, region: Region) -> Tensor:
    """Return which positions of a value, with its pieces as dimensions, are in a region."""
    marked = torch.zeros([piece.length for dim in layout for piece in dim], dtype=torch.bool)
    for box in boxes_of(region):
        marked[tuple(slice(*span) for dim in box for span in dim)] = True
    return marked


def numbered(layout: Layout) -> Tensor:
    """Return a value whose numbers are all different."""
    return torch.arange(float(math.prod(shape_of(layout)))).reshape(shape_of(layout))


def by_slices(layout: Layout, box: Box) -> Tensor:
    """Return a box of the numbered value by Python's slices of its pieces."""
    pieces = numbered(layout).reshape([piece.length for dim in layout for piece in dim])
    part = pieces[tuple(slice(*span) for dim in box for span in dim)]
    return part.reshape([math.prod(stop - start for start, stop in dim) for dim in box])


@given(st.data(), LAYOUTS)
def test_a_region_contains_what_was_added_and_reads_it(data: st.DataObject, layout: Layout) -> None:
    added = data.draw(st.lists(boxes(layout), min_size=1, max_size=4))
    region = None
    for box in added:
        region = add_box(region, box)
    assert region is not None
    marked = mark(layout, region)
    assert marked.sum() == count_positions(region)
    assert all(len(each) <= SPANS for dim in region for each in dim)
    value = join_boxes([by_slices(layout, box) for box in boxes_of(region)], region)
    for box in added:
        assert (marked | ~mark(layout, region_of(box))).all()
        assert torch.equal(read_box(value, region, box), by_slices(layout, box))


@given(st.data(), LAYOUTS)
def test_boxes_are_written_where_they_are_read(data: st.DataObject, layout: Layout) -> None:
    box = data.draw(boxes(layout))
    value = torch.zeros(shape_of(layout))
    write_box(value, layout, box, by_slices(layout, box) + 1)
    whole = region_of(whole_box(layout))
    assert torch.equal(read_box(value, whole, box), by_slices(layout, box) + 1)
    assert value.count_nonzero() == count_positions(region_of(box))


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=6))
def test_joined_spans_are_disjoint_and_contain_all(drawn: list[tuple[int, int]]) -> None:
    given_spans = [(min(pair), max(pair)) for pair in drawn]
    joined = join_spans(given_spans)
    assert all(before[1] < after[0] for before, after in itertools.pairwise(joined))
    places = {place for start, stop in joined for place in range(start, stop)}
    wanted = {place for start, stop in given_spans for place in range(start, stop)}
    assert wanted <= places
    # Up to the joined gaps, nothing is added, and nothing beyond the ends.
    assert not wanted or (min(places), max(places)) == (min(wanted), max(wanted))


def test_a_span_that_is_not_there_is_not_read() -> None:
    region = add_box(region_of((((0, 2),),)), (((5, 8),),))
    value = torch.arange(5.0)
    assert read_box(value, region, (((6, 8),),)).tolist() == [3.0, 4.0]
    with pytest.raises(LookupError, match=r"\(1, 6\)"):
        read_box(value, region, (((1, 6),),))


def test_pieces_have_one_form() -> None:
    assert join_pieces([Piece(1), Piece(4), Piece(3), Piece(5, 1)]) == (Piece(12), Piece(5, 1))
    assert join_pieces([Piece(4, 0), Piece(3)]) == (Piece(12, 0),)
    assert length_of(join_pieces([Piece(4, 0), Piece(3), Piece(5, 1)])) == 60
    assert join_pieces([Piece(1, 0), Piece(1)]) == (Piece(1),)


@given(st.data(), LAYOUTS)
def test_positions_of_spans_are_those_of_the_whole(data: st.DataObject, layout: Layout) -> None:
    for dim, own in zip(layout, data.draw(boxes(layout)), strict=True):
        assert positions_of([piece.length for piece in dim], own).tolist() == by_slices((dim,), (own,)).long().tolist()


def label(layouts: list[Layout], shape: tuple[int, ...]) -> Layout:
    """Return the labels of what is computed position by position from values of these layouts."""
    operands = tuple(Operand(layout, torch.float32) for layout in layouts)
    call = OperationCall("", (), {}, operands, (), (Info(shape, torch.float32),))
    return label_output(call, [range(len(layout)) for layout in layouts], shape)


def test_an_axis_stands_once_in_a_layout() -> None:
    rows, columns = (Piece(7, 0),), (Piece(7, 0), Piece(2, 1))
    assert distinct((rows, columns, (Piece(3),))) == (rows, (Piece(14),), (Piece(3),))
    assert label([(rows, (Piece(1),)), ((Piece(1),), rows)], (7, 7)) == (rows, (Piece(7),))
    with pytest.raises(RuleError, match="different axes"):
        label([((Piece(6, 0),),), ((Piece(2, 0), Piece(3, 1)),)], (6,))
    with pytest.raises(RuleError, match="several axes"):
        single(((0, 1), (0, 1)))


def test_nothing_is_empty() -> None:
    assert is_empty((((0, 2),), ((1, 1),)))
    assert not is_empty(())
