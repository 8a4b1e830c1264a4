"""How the values of a graph scale with the volume: the strides of a network, from its rules."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

from farfield.streaming.graph import Graph, Value
from farfield.streaming.labels import GraphError, LabelledGraph, label_graph
from farfield.streaming.run import find_needs
from farfield.streaming.spans import Box, Layout, Piece, Span

# Positions whose distance is a multiple of this have the same phase of interpolation.
PHASES = (5040, 240, 24, 4, 2, 1)

# Steps finer than one in so many of the volume's are no even ones.
FINEST = 64

# Axis of the volume -> positions of the volume from one position of a value to the next.
Scales = dict[int, Fraction]


def find_scales(labelled: LabelledGraph) -> dict[Value, Scales]:
    """Return the scales of each value along the axes that it runs along, where it has even steps."""
    scales: dict[Value, Scales] = {value: {} for value in labelled.layouts}
    for index in labelled.order:
        for output in range(len(labelled.graph.nodes[index].outputs)):
            value = Value(index, output)
            for piece in (piece for dim in labelled.layouts[value] for piece in dim):
                if piece.axis is None:
                    continue
                scale = scale_along(labelled, scales, value, piece.axis, piece.length)
                if scale is not None:
                    scales[value][piece.axis] = scale
    return scales


def scale_along(
    labelled: LabelledGraph, scales: dict[Value, Scales], value: Value, axis: int, length: int
) -> Fraction | None:
    """Return the scale of a value along an axis, on which it has a length: that of what it reads, times its steps.

    None if it has no even steps: it is one position, or reads windows of the volume.
    """
    if labelled.graph.nodes[value.node].op == "input":
        return Fraction(1)
    if length < 2:
        return None
    # In the middle, as windows end at borders.
    distance = find_distance(labelled, value, axis, length)
    first = (length - 1 - distance) // 2
    boxes = [box_at(labelled.layouts[value], axis, place) for place in (first, first + distance)]
    needs = [find_needs(labelled, value.node, value.output, box) for box in boxes]
    for (source, one), (_, other) in zip(*needs, strict=True):
        first_span, last_span = (span_along(labelled.layouts[source], box, axis) for box in (one, other))
        if axis not in scales.get(source, {}) or first_span is None or last_span is None:
            continue
        moved = max(abs(after - before) for before, after in zip(first_span, last_span, strict=True))
        scale = scales[source][axis] * Fraction(moved, distance)
        if moved and scale.denominator <= FINEST:
            return scale
    return None


def find_distance(labelled: LabelledGraph, value: Value, axis: int, length: int) -> int:
    """Return the largest distance of two positions along an axis, at most half of it, that have the same phase."""
    lengths = [
        piece.length
        for source in labelled.graph.nodes[value.node].inputs
        for dim in labelled.layouts[source]
        for piece in dim
        if piece.axis == axis
    ]
    # The phases of a transposed convolution are as many as its stride, which is the ratio of the lengths.
    period = Fraction(lengths[0], length).denominator if lengths else 1
    period = period if period <= length // 2 else 1
    distance = period * next(each for each in PHASES if each * period <= length // 2)
    return length // 2 // distance * distance


def box_at(layout: Layout, axis: int, place: int) -> Box:
    """Return the box of one position along an axis, and of the middle position along all others that are cut."""

    def span(piece: Piece) -> Span:
        if piece.axis is None:
            return 0, piece.length
        start = place if piece.axis == axis else piece.length // 2
        return start, start + 1

    return tuple(tuple(map(span, dim)) for dim in layout)


def span_along(layout: Layout, box: Box, axis: int) -> Span | None:
    """Return the span of a box along an axis, None if the value does not run along it, or nothing is read."""
    for dim, spans in zip(layout, box, strict=False):
        for piece, span in zip(dim, spans, strict=True):
            if piece.axis == axis:
                return span
    return None


def strides_of(labelled: LabelledGraph, scales: dict[Value, Scales]) -> tuple[int, ...]:
    """Return, for each axis, the least common multiple of all strides to the volume.

    Strides are those of operations that compute: a view that takes windows apart has none.
    """
    strides: list[set[int]] = [{1} for _ in labelled.size]
    for value, own in scales.items():
        node = labelled.graph.nodes[value.node]
        read = [scales.get(source, {}) for source in node.inputs]
        for axis, scale in own.items():
            if node.op != "view" and any(each.get(axis, scale) != scale for each in read):
                strides[axis].add(scale.numerator)
    return tuple(math.lcm(*own) for own in strides)


def scales_of(
    graph: Graph, size: tuple[int, ...], halo: Sequence[int] | None
) -> tuple[dict[Value, Scales], tuple[int, ...]]:
    """Return how the values of a graph scale along the axes along which it can be cut, and its strides."""
    for axes in (range(len(size)), cuttable(graph, size, halo)):
        try:
            labelled = label_graph(graph, size, axes, halo=halo)
        except GraphError:
            continue
        scales = find_scales(labelled)
        return scales, strides_of(labelled, scales)
    return {}, (1,) * len(size)


def cuttable(graph: Graph, size: tuple[int, ...], halo: Sequence[int] | None) -> tuple[int, ...]:
    """Return the axes along which a graph can be cut, each by itself."""
    axes = []
    for axis in range(len(size)):
        try:
            label_graph(graph, size, [axis], halo=halo)
        except GraphError:
            continue
        axes.append(axis)
    return tuple(axes)
