"""Labels of a recorded graph: along which axes of the volume each value runs, and what sums over the whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from torch import Tensor

from farfield.streaming.graph import Graph, Node, Value, map_values, run_node
from farfield.streaming.layers import LAYER
from farfield.streaming.rules import Rule, find_rule
from farfield.streaming.rules.reading import local
from farfield.streaming.rules.rule import Operand, OperationCall, Reduction, RuleError
from farfield.streaming.spans import (
    Box,
    Layout,
    Piece,
    Span,
    axes_of,
    constant_layout,
    read_box,
    region_of,
    whole_box,
)


class GraphError(ValueError):
    """A network cannot run on parts of the volume; the text names an operation and the module that ran it."""


@dataclass
class LabelledGraph:
    """A graph whose values have labels, for a volume that is cut along some axes.

    Attributes:
        graph: The graph.
        size: The volume's size.
        cut: The axes along which it is cut.
        halo: How far operations without a rule reach, in positions of the volume; None if they are refused.
        layouts: Value -> its pieces.
        calls: Node -> its call.
        rules: Node -> its rule.
        reductions: Node -> how it sums over the whole, of nodes that do.
        levels: Node -> the number of reductions before it in series, itself included.
        known: Values that do not depend on the volume.
        gathered: Values of which one position needs all along a cut axis: they are stored before.
    """

    graph: Graph
    size: tuple[int, ...]
    cut: tuple[int, ...]
    halo: Sequence[int] | None = None
    layouts: dict[Value, Layout] = field(default_factory=dict)
    calls: dict[int, OperationCall] = field(default_factory=dict)
    rules: dict[int, Rule] = field(default_factory=dict)
    reductions: dict[int, Reduction] = field(default_factory=dict)
    levels: dict[int, int] = field(default_factory=dict)
    known: set[Value] = field(default_factory=set)
    gathered: set[Value] = field(default_factory=set)

    @cached_property
    def order(self) -> list[int]:
        """The nodes that the output depends on."""
        return self.graph.needed()

    @cached_property
    def constants(self) -> dict[Value, Tensor]:
        """The values that do not depend on the volume, computed when they are first read."""
        constants: dict[Value, Tensor] = {}
        for index in sorted({value.node for value in self.known}):
            run_node(self.graph, index, constants)
        return constants

    def core(self, layout: Layout, tile: Sequence[Span]) -> Box:
        """Return a tile's own part of a value: its share of each labelled piece, all of the others."""
        return tuple(tuple(self.core_of(piece, tile) for piece in dim) for dim in layout)

    def core_of(self, piece: Piece, tile: Sequence[Span]) -> Span:
        """Return a tile's own span of a piece: the spans of all tiles are all its positions, each once.

        Tiles begin at multiples of the strides, and so do their spans, also where a piece ends earlier than the volume.
        """
        if piece.axis is None:
            return 0, piece.length
        (start, stop), length = tile[piece.axis], self.size[piece.axis]
        many, few = _nearest_ratio(piece.length, length)
        first, last = (min(piece.length, place * many // few) for place in (start, stop))
        return first, piece.length if stop == length else last


def _nearest_ratio(length: int, whole: int) -> tuple[int, int]:
    """Return the ratio of a length to that of the volume; a stride, or its inverse, if it is near one."""
    # A convolution with a stride of 2, and one without padding, give somewhat less than each second, or each, position.
    many, few = max(1, round(length / whole)), max(1, round(whole / max(1, length)))
    near = abs(length * few - whole * many) * 8 <= whole * many
    return (many, few) if near else (length, whole)


def label_graph(
    graph: Graph, size: Sequence[int], cut: Sequence[int], *, halo: Sequence[int] | None = None, first: int = 2
) -> LabelledGraph:
    """Find the labels of all values, and the operations that sum over the whole; dimensions from `first` on are axes.

    Raises:
        GraphError: If an operation has no rule, or cannot run on parts.
    """
    labelled = LabelledGraph(graph, tuple(size), tuple(cut), halo)
    for index in labelled.order:
        node = graph.nodes[index]
        labelled.levels[index] = max((labelled.levels[value.node] for value in node.inputs), default=0)
        if node.op == "input":
            shape = node.outputs[0].shape
            axes = [axis if axis in cut else None for axis in range(len(size))]
            dims = ((Piece(*pair),) for pair in zip(shape[first:], axes, strict=True))
            layout = (*constant_layout(shape[:first]), *dims)
            labelled.layouts[Value(index)] = layout
            continue
        if all(value in labelled.known for value in node.inputs):
            labelled.known.update(Value(index, output) for output in range(len(node.outputs)))
        if node.op == "constant":
            labelled.layouts[Value(index)] = constant_layout(node.outputs[0].shape)
            continue
        try:
            _label_node(labelled, index, node)
        except RuleError as error:
            raise GraphError(f"{node.op} in {node.path}: {error}") from error
    return labelled


def _label_node(labelled: LabelledGraph, index: int, node: Node) -> None:

    def operand(value: Value) -> Operand:
        return Operand(labelled.layouts[value], labelled.graph.info(value).dtype)

    args, kwargs = (map_values(part, Value, operand) for part in (node.args, node.kwargs))
    operands = tuple(operand(value) for value in node.inputs)
    call = OperationCall(node.op, args, kwargs, operands, (), node.outputs)
    rule = LAYER if node.op == "layer" else find_rule(node.op)
    if rule is None:
        rule = WHOLE
        if any(axes_of(each.layout) for each in operands):
            if labelled.halo is None:
                raise RuleError("there is no rule for it; fix: tile=Tiles(…, halo=positions) if it is local")
            rule = local(labelled.halo, labelled.size)
    layouts = rule.label(call)
    call = call._replace(layouts=tuple(layouts))
    labelled.calls[index], labelled.rules[index] = call, rule
    labelled.layouts.update((Value(index, output), layout) for output, layout in enumerate(layouts))
    reduction = rule.reduce(call) if rule.reduce is not None else None
    if reduction is not None:
        labelled.reductions[index] = reduction
        labelled.levels[index] += 1
        return
    gathered = _find_gathered(labelled, node, call, rule)
    labelled.gathered |= gathered
    labelled.levels[index] = max([labelled.levels[index], *(labelled.levels[value.node] + 1 for value in gathered)])


def _find_gathered(labelled: LabelledGraph, node: Node, call: OperationCall, rule: Rule) -> set[Value]:
    """Return the operands of which one position of the output needs all along an axis that is cut."""
    gathered = set()
    for value, needed in zip(node.inputs, rule.needs(call, 0, box_at(call.layouts[0])), strict=True):
        for dim, spans in zip(labelled.layouts[value], needed, strict=False):
            for piece, (start, stop) in zip(dim, spans, strict=True):
                if piece.axis is not None and stop - start == piece.length:
                    gathered.add(value)
    # A volume can be read anywhere as it is.
    return gathered - set(labelled.graph.inputs)


def box_at(layout: Layout, axis: int | None = None, place: int = 0) -> Box:
    """Return the box of one position along an axis, and of the middle position along all others that are cut."""

    def span(piece: Piece) -> Span:
        if piece.axis is None:
            return 0, piece.length
        start = place if piece.axis == axis else piece.length // 2
        return start, start + 1

    return tuple(tuple(map(span, dim)) for dim in layout)


def _run_whole(call: OperationCall, output: int, box: Box, tensors: Sequence[Tensor]) -> Tensor:
    result = call.run(output, tensors)
    return read_box(result, region_of(tuple(((0, length),) for length in result.shape)), box)


# An operation without a rule on values that run along no axis that is cut.
WHOLE = Rule(
    lambda call: [constant_layout(each.shape) for each in call.infos],
    lambda call, output, box: [whole_box(operand.layout) for operand in call.operands],
    _run_whole,
)
