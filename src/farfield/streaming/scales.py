"""A recorded network, the axes along which it can be cut, and its strides to the volume, from its rules."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property

from farfield.streaming.graph import Graph, Value
from farfield.streaming.labels import GraphError, LabelledGraph, box_at, find_needs, label_graph
from farfield.streaming.spans import Box, Layout, Span

# Positions whose distance is a multiple of this have the same phase of interpolation.
PHASES = (5040, 240, 24, 4, 2, 1)

# Steps finer than one in so many of the volume's are no even ones.
FINEST = 64

# Axis of the volume -> positions of the volume from one position of a value to the next.
Scales = dict[int, Fraction]


@dataclass
class Recording:
    """A network that was recorded on one size, and its labels.

    Attributes:
        graph: Its graph.
        size: The volume's size.
        halo: How far operations without a rule reach; None if they are refused.
    """

    graph: Graph
    size: tuple[int, ...]
    halo: Sequence[int] | None
    _labelled: dict[tuple[int, ...], LabelledGraph] = field(default_factory=dict)

    def label(self, axes: Sequence[int]) -> LabelledGraph:
        """Return the graph with its labels for a volume that is cut along these axes.

        Raises:
            GraphError: If it cannot be.
        """
        chosen = tuple(axes)
        if chosen not in self._labelled:
            self._labelled[chosen] = label_graph(self.graph, self.size, chosen, halo=self.halo)
        return self._labelled[chosen]

    def _can_cut(self, axes: Sequence[int]) -> bool:
        try:
            self.label(axes)
        except GraphError:
            return False
        return True

    @cached_property
    def cuttable(self) -> tuple[int, ...]:
        """The axes along which it can be cut: all together, or else each by itself."""
        axes = tuple(range(len(self.size)))
        return axes if self._can_cut(axes) else tuple(axis for axis in axes if self._can_cut([axis]))

    @cached_property
    def scales(self) -> dict[Value, Scales]:
        """The scales of each value along all these axes, where it has even steps."""
        return find_scales(self.label(self.cuttable)) if self._can_cut(self.cuttable) else {}

    @property
    def strides(self) -> tuple[int, ...]:
        """For each axis, the least common multiple of all strides to the volume."""
        strides: list[set[int]] = [{1} for _ in self.size]
        for value, own in self.scales.items():
            node = self.graph.nodes[value.node]
            read = [self.scales.get(source, {}) for source in node.inputs]
            for axis, scale in own.items():
                # A view that takes windows apart computes nothing, and has no stride.
                if node.op != "view" and any(each.get(axis, scale) != scale for each in read):
                    strides[axis].add(scale.numerator)
        return tuple(math.lcm(*own) for own in strides)

    @property
    def output_axes(self) -> dict[int, int]:
        """Axis of the volume -> the dimension of the output that runs along it."""
        if not self._can_cut(self.cuttable):
            return {}
        layout = self.label(self.cuttable).layouts[self.graph.output]
        return {dim[0].axis: place for place, dim in enumerate(layout) if len(dim) == 1 and dim[0].axis is not None}

    @property
    def mixes_samples(self) -> bool:
        """Whether the output of a sample depends on others; of a network that was recorded on several."""
        try:
            labelled = label_graph(self.graph, self.graph.info(self.graph.inputs[0]).shape, [0], first=0)
        except GraphError:
            return True
        kept = labelled.layouts[self.graph.output][0]
        return bool(labelled.reductions or labelled.gathered) or [piece.axis for piece in kept] != [0]


def find_scales(labelled: LabelledGraph) -> dict[Value, Scales]:
    """Return the scales of each value along the axes that it runs along, where it has even steps."""
    scales: dict[Value, Scales] = {value: {} for value in labelled.layouts}
    for index in labelled.order:
        for output in range(len(labelled.graph.nodes[index].outputs)):
            value = Value(index, output)
            for piece in (piece for dim in labelled.layouts[value] for piece in dim):
                if piece.axis is None:
                    continue
                scale = _scale_along(labelled, scales, value, piece.axis, piece.length)
                if scale is not None:
                    scales[value][piece.axis] = scale
    return scales


def _scale_along(
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
    distance = _find_distance(labelled, value, axis, length)
    first = (length - 1 - distance) // 2
    boxes = [box_at(labelled.layouts[value], axis, place) for place in (first, first + distance)]
    needs = [find_needs(labelled, value.node, value.output, box) for box in boxes]
    for (source, one), (_, other) in zip(*needs, strict=True):
        first_span, last_span = (_span_along(labelled.layouts[source], box, axis) for box in (one, other))
        if axis not in scales.get(source, {}) or first_span is None or last_span is None:
            continue
        moved = max(abs(after - before) for before, after in zip(first_span, last_span, strict=True))
        scale = scales[source][axis] * Fraction(moved, distance)
        if moved and scale.denominator <= FINEST:
            return scale
    return None


def _find_distance(labelled: LabelledGraph, value: Value, axis: int, length: int) -> int:
    """Return the largest distance of two positions of the same phase along an axis, at most half of it."""
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


def _span_along(layout: Layout, box: Box, axis: int) -> Span | None:
    """Return the span of a box along an axis, None if the value does not run along it, or nothing is read."""
    for dim, spans in zip(layout, box, strict=False):
        for piece, span in zip(dim, spans, strict=True):
            if piece.axis == axis:
                return span
    return None
