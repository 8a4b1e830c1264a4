"""A recorded network, the axes along which it can be cut, and its strides to the volume, from its rules."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property

from farfield.streaming.graph import Graph, Value
from farfield.streaming.labels import GraphError, LabelledGraph, box_at, find_needs, label_graph
from farfield.streaming.spans import Box, Layout, Span, whole_box

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
        """Return the graph with its labels for a volume that is cut along these axes; raise GraphError if it cannot."""
        chosen = tuple(axes)
        if chosen not in self._labelled:
            self._labelled[chosen] = label_graph(self.graph, self.size, chosen, halo=self.halo)
        return self._labelled[chosen]

    def _try_label(self, axes: Sequence[int]) -> LabelledGraph | None:
        try:
            return self.label(axes)
        except GraphError:
            return None

    @cached_property
    def cuttable(self) -> tuple[int, ...]:
        """The axes along which it can be cut: all together, or else each by itself."""
        axes = tuple(range(len(self.size)))
        return axes if self._try_label(axes) else tuple(axis for axis in axes if self._try_label([axis]))

    @cached_property
    def scales(self) -> dict[Value, Scales]:
        """The scales of each value along all these axes, where it has even steps."""
        labelled = self._try_label(self.cuttable)
        return find_scales(labelled) if labelled else {}

    @property
    def strides(self) -> tuple[int, ...]:
        """For each axis, the least common multiple of all strides to the volume."""
        strides: list[set[int]] = [{1} for _ in self.size]
        for value, own in self.scales.items():
            node = self.graph.nodes[value.node]
            if node.op == "view":  # which takes windows apart: it computes nothing, and has no stride
                continue
            for axis, scale in own.items():
                if any(self.scales.get(source, {}).get(axis, scale) != scale for source in node.inputs):
                    strides[axis].add(scale.numerator)
        return tuple(math.lcm(*own) for own in strides)

    @property
    def output_axes(self) -> dict[int, int]:
        """Axis of the volume -> the dimension of the output that runs along it."""
        labelled = self._try_label(self.cuttable)
        layout = labelled.layouts[self.graph.output] if labelled else ()
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
    scales: dict[Value, Scales] = {}
    for value, layout in labelled.layouts.items():
        along = {axis: _scale_along(labelled, scales, value, axis, end) for axis, (_, end) in _whole_of(layout).items()}
        scales[value] = {axis: scale for axis, scale in along.items() if scale is not None}
    return scales


def _scale_along(
    labelled: LabelledGraph, scales: dict[Value, Scales], value: Value, axis: int, length: int
) -> Fraction | None:
    """Return the scale of a value along an axis, on which it has a length: that of what it reads, times its steps.

    None if it has no even steps: it is one position, or reads windows of the volume.
    """
    node, layouts = labelled.graph.nodes[value.node], labelled.layouts
    if node.op == "input":
        return Fraction(1)
    if length < 2:
        return None
    there = (_whole_of(layouts[source]).get(axis) for source in node.inputs)
    distance = _find_distance(length, next((span[1] for span in there if span is not None), length))
    # In the middle, as windows end at borders.
    first = (length - 1 - distance) // 2
    boxes = [box_at(layouts[value], axis, place) for place in (first, first + distance)]
    needs = [find_needs(labelled, value, box) for box in boxes]
    for (source, one), (_, other) in zip(*needs, strict=True):
        before, after = (_spans_along(layouts[source], box).get(axis) for box in (one, other))
        if axis not in scales.get(source, {}) or before is None or after is None:
            continue
        moved = max(abs(after[0] - before[0]), abs(after[1] - before[1]))
        scale = scales[source][axis] * Fraction(moved, distance)
        if moved and scale.denominator <= FINEST:
            return scale
    return None


def _find_distance(length: int, read: int) -> int:
    """Return the largest distance of two positions of one phase, at most half of a length; `read` is the operand's."""
    # The phases of a transposed convolution are as many as its stride, which is the ratio of the lengths.
    period = Fraction(read, length).denominator
    period = period if period <= length // 2 else 1
    distance = period * next(each for each in PHASES if each * period <= length // 2)
    return length // 2 // distance * distance


def _spans_along(layout: Layout, box: Box) -> dict[int, Span]:
    """Return the span of a box along each axis that a value runs along; none if nothing is read, `()`."""
    spans = zip(itertools.chain(*layout), itertools.chain(*box), strict=False)
    return {piece.axis: span for piece, span in spans if piece.axis is not None}


def _whole_of(layout: Layout) -> dict[int, Span]:
    return _spans_along(layout, whole_box(layout))
