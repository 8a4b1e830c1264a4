"""Labels of a recorded graph: along which axes values run, what sums over the whole, and what a part needs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from torch import Tensor

from farfield.streaming.graph import Graph, Node, Value, map_values, run_node
from farfield.streaming.layers import LAYER
from farfield.streaming.rules import Rule, find_rule
from farfield.streaming.rules.reading import local
from farfield.streaming.rules.rule import FIX, Operand, OperationCall, Recurrence, Reduction, RuleError, widen
from farfield.streaming.spans import (
    Box,
    Layout,
    Piece,
    Region,
    Span,
    add_box,
    axes_of,
    boxes_of,
    constant_layout,
    count_positions,
    is_empty,
    region_of,
    take_box,
    whole_box,
)

# A box of a value -> the boxes of the operands that it is computed from.
Needs = dict[tuple[Value, Box], list[tuple[Value, Box]]]
# Bytes up to which a value that does not depend on the volume is computed once.
_KEPT = 2**22
# Operations of which the result may lie where its operand does.
_VIEWS = ("view", "expand", "permute", "slice")


class GraphError(ValueError):
    """A network cannot run on parts of the volume; the text names an operation and the module that ran it."""


@dataclass
class LabelledGraph:
    """A graph whose values have labels, for a volume of a size that is cut along some axes."""

    graph: Graph
    size: tuple[int, ...]
    cut: tuple[int, ...]
    # How far operations without a rule reach, in positions of the volume; None if they are refused.
    halo: Sequence[int] | None = None
    # The size of tiles, once it is chosen: of scans, windows follow from it.
    tile: tuple[int, ...] = ()
    layouts: dict[Value, Layout] = field(default_factory=dict)  # in the order of nodes
    calls: dict[int, OperationCall] = field(default_factory=dict)
    rules: dict[int, Rule] = field(default_factory=dict)
    reductions: dict[int, Reduction] = field(default_factory=dict)  # of nodes that sum over the whole
    # The number of reductions before a node in series, itself included.
    levels: dict[int, int] = field(default_factory=dict)
    scans: dict[int, Recurrence] = field(default_factory=dict)  # of nodes that run along an axis tile by tile
    # One position needs all of these along a cut axis, or they are of a scan: they are stored before.
    gathered: set[Value] = field(default_factory=set)

    @cached_property
    def order(self) -> list[int]:
        """The nodes that the output depends on."""
        return self.graph.needed()

    @cached_property
    def known(self) -> set[Value]:
        """The values that do not depend on the volume."""
        return {value for value in self.layouts if self.graph.nodes[value.node].known}

    @cached_property
    def kept(self) -> set[Value]:
        """The known values that are computed once; of the others, each tile computes the positions that it reads."""
        kept, regions = self.known - {self.graph.output}, dict[Value, Region]()
        for value in reversed(self.layouts):
            inputs, boxes = self.graph.nodes[value.node].inputs, [box_at(self.layouts[value])]
            if value in kept:
                # How much of it is read for one position of what depends on the volume.
                if value not in regions or self._is_made_whole(value, regions[value]):
                    continue
                kept.remove(value)
                boxes = list(boxes_of(regions[value]))
            if value.node not in self.calls or kept.isdisjoint(inputs) or (value.output and value not in regions):
                continue
            pairs = [pair for box in boxes for pair in find_needs(self, value, box)]
            if value.node in self.reductions:
                operands = (inputs[each] for each in self.reductions[value.node].operands)
                pairs += [(operand, whole_box(self.layouts[operand])) for operand in operands]
            for source, box in pairs:
                if source in kept and is_read(self, source, box):
                    regions[source] = add_box(regions.get(source), box)
        return kept

    def _is_made_whole(self, value: Value, region: Region) -> bool:
        """Whether a known value is small, has no rule for parts, or is needed as a whole."""
        info, has_rule = self.graph.info(value), self.rules.get(value.node, WHOLE) is not WHOLE
        is_whole = 2 * count_positions(region) > math.prod(info.shape)
        return info.bytes <= _KEPT or is_whole or not has_rule or value.node in self.reductions

    @cached_property
    def _made(self) -> tuple[set[Value], list[Value]]:
        """The values that are kept and read, and all that these are computed from, in order."""
        others = (self.graph.nodes[value.node].inputs for value in self.layouts if value not in self.kept)
        read = self.kept.intersection(itertools.chain(*others))
        nodes = {index for value in read for index in self.graph.needed(value)}
        return read, sorted(value for value in self.known if value.node in nodes)

    @cached_property
    def constants(self) -> dict[Value, Tensor]:
        """The values that are kept and read, computed when the first of them is."""
        constants: dict[Value, Tensor] = {}
        read, made = self._made
        freed = last_uses(self.graph, made, (), read)
        for value in made:
            if value not in constants:
                run_node(self.graph, value.node, constants)
            for source in freed[value]:
                del constants[source]
        return constants

    @cached_property
    def constant_bytes(self) -> int:
        """The most that values take while those that are kept are computed, beside tensors of the network."""
        (read, made), regions = self._made, dict[Value, Region]()
        for value in made:
            node = self.graph.nodes[value.node]
            if node.op != "constant" and (node.op not in _VIEWS or node.inputs[0] in regions):
                regions[value] = region_of(whole_box(self.layouts[value]))
        return count_bytes(self, regions, (), read)

    def bytes_on(self, value: Value, region: Region) -> int:
        return count_positions(region) * self.graph.info(value).dtype.itemsize

    def owns(self, layout: Layout, tile: Sequence[Span]) -> bool:
        """Whether a tile has its own part of a value: along axes that it does not run along, the first tile has."""
        there = axes_of(layout)
        return all(axis in there or tile[axis][0] == 0 for axis in self.cut)

    def core(self, layout: Layout, tile: Sequence[Span]) -> Box:
        """Return a tile's own part of a value: its share of each labelled piece, all of the others."""
        return tuple(
            tuple((0, length) if axis is None else self.own_span(length, axis, tile[axis]) for length, axis in dim)
            for dim in layout
        )

    def own_span(self, count: int, axis: int, span: Span) -> Span:
        """Return a tile's own span of so many positions along an axis: those of all tiles are all, each once."""
        (start, stop), length = span, self.size[axis]
        # Tiles begin at multiples of the strides, and so do their spans, also where a piece ends earlier than the
        # volume.
        many, few = find_ratio(count, length)
        first, last = (min(count, place * many // few) for place in (start, stop))
        return first, count if stop == length else last


def find_ratio(length: int, whole: int) -> tuple[int, int]:
    """Return the ratio of a length to that of the volume; a stride, or its inverse, if it is near one."""
    # A convolution with a stride of 2, and one without padding, give somewhat less than each second, or each, position.
    many, few = max(1, round(length / whole)), max(1, round(whole / max(1, length)))
    near = abs(length * few - whole * many) * 8 <= whole * many
    return (many, few) if near else (length, whole)


def label_graph(
    graph: Graph,
    size: Sequence[int],
    cut: Sequence[int],
    *,
    halo: Sequence[int] | None = None,
    first: int = 2,
    refused: dict[int, str] | None = None,
) -> LabelledGraph:
    """Find the labels of all values, and what sums over the whole; axes are dimensions from `first` on.

    Operations that do not run on parts are noted in `refused`, if it is given, and their outputs get labels of grids.
    """
    labelled = LabelledGraph(graph, tuple(size), tuple(cut), halo)
    for index in labelled.order:
        label_node(labelled, index, first, refused)
    return labelled


def fit_tile(labelled: LabelledGraph, tile: Sequence[int]) -> LabelledGraph:
    """Return a graph whose scans have windows for tiles of a size."""
    first, rows = [(0, own) for own in tile], dict[int, Reduction]()
    for index, row in labelled.reductions.items():
        call = labelled.calls[index]
        if row.fit is not None:
            rows[index] = row.fit(call, labelled.core(call.layouts[0], first))
    return replace(labelled, tile=tuple(tile), reductions=labelled.reductions | rows) if rows else labelled


def label_node(labelled: LabelledGraph, index: int, first: int = 2, refused: dict[int, str] | None = None) -> None:
    """Find the labels of one node behind those that have theirs; as of `label_graph`."""
    node = labelled.graph.nodes[index]
    labelled.levels[index] = max((labelled.levels[value.node] for value in node.inputs), default=0)
    if node.op == "input":
        shape = node.outputs[0].shape
        # What a loss takes beside the volume may have no channels, or no positions at all.
        own = min(first, len(shape) - len(labelled.size))
        if own == first or own > 0:
            cut = [axis for axis in labelled.cut if shape[own + axis] > 1]
            labelled.layouts[Value(index)] = _grid_layout(shape, cut, own)
        else:
            labelled.layouts[Value(index)] = constant_layout(shape)
        return
    if node.op == "constant":
        labelled.layouts[Value(index)] = constant_layout(node.outputs[0].shape)
        return
    try:
        _label_by_rule(labelled, index, node)
    except RuleError as error:
        if refused is None:
            raise GraphError(f"{node.op} in {node.path}: {error}") from error
        refused[index] = str(error)
        for output, info in enumerate(node.outputs):
            is_grid = len(info.shape) == len(labelled.size) + first
            layout = _grid_layout(info.shape, labelled.cut, first) if is_grid else constant_layout(info.shape)
            labelled.layouts[Value(index, output)] = layout


def _grid_layout(shape: Sequence[int], cut: Collection[int], first: int) -> Layout:
    """Return the layout of a grid whose dimensions from `first` on run along the axes of the volume."""
    dims = ((Piece(length, axis if axis in cut else None),) for axis, length in enumerate(shape[first:]))
    return (*constant_layout(shape[:first]), *dims)


def _label_by_rule(labelled: LabelledGraph, index: int, node: Node) -> None:
    def operand(value: Value) -> Operand:
        layout, (shape, dtype) = labelled.layouts[value], labelled.graph.info(value)
        if shape and not layout:
            raise RuleError(f"it reads output {value.output} of {labelled.graph.nodes[value.node].op}; {FIX}")
        return Operand(layout, dtype)

    args, kwargs = map_values((node.args, node.kwargs), Value, operand)
    operands = tuple(operand(value) for value in node.inputs)
    call = OperationCall(node.op, args, kwargs, operands, (), node.outputs)
    rule, is_cut = LAYER if node.op == "layer" else find_rule(node.op), any(axes_of(each.layout) for each in operands)
    if rule is None and is_cut:
        if labelled.halo is None:
            raise RuleError("there is no rule for it; fix: tile=Tiles(…, halo=positions) if it is local")
        rule = local(labelled.halo, labelled.size)
    rule = rule or WHOLE
    try:
        layouts = rule.label(call)
    except RuleError:
        if is_cut:
            raise
        rule, layouts = WHOLE, WHOLE.label(call)
    call = call._replace(layouts=tuple(layouts))
    labelled.calls[index], labelled.rules[index] = call, rule
    labelled.layouts.update((Value(index, output), layout) for output, layout in enumerate(call.layouts))
    reduction = rule.reduce(call) if rule.reduce is not None else None
    if reduction is not None:
        for each in reduction.operands:
            widen(operands[each].dtype)
        labelled.reductions[index] = reduction
        labelled.levels[index] += 1
        return
    gathered = find_gathered(labelled, node, call, rule)
    scan = rule.scan(call)
    if scan is not None:
        labelled.scans[index] = scan
        labelled.gathered.add(Value(index))
        # Tiles may run again for their states, from the same numbers.
        gathered |= {node.inputs[0]}.difference(labelled.graph.inputs)
    labelled.gathered |= gathered
    before = gathered.union(value for value in node.inputs if value.node in labelled.scans)
    labelled.levels[index] = max([labelled.levels[index], *(labelled.levels[value.node] + 1 for value in before)])


def find_gathered(labelled: LabelledGraph, node: Node, call: OperationCall, rule: Rule) -> set[Value]:
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
    return take_box(result, constant_layout(result.shape), box)


# An operation without a rule on values that run along no axis that is cut.
WHOLE = Rule(
    lambda call: [constant_layout(each.shape) for each in call.infos],
    lambda call, output, box: [whole_box(operand.layout) for operand in call.operands],
    _run_whole,
)


# ---- what a part needs ----------------------------------------------------------------------------------------------
def find_needs(labelled: LabelledGraph, value: Value, box: Box) -> list[tuple[Value, Box]]:
    """Return the boxes of the operands from which a box of a value is computed; empty ones are not read."""
    call, reduction = labelled.calls[value.node], labelled.reductions.get(value.node)
    if reduction is None:
        boxes = labelled.rules[value.node].needs(call, value.output, box)
    elif reduction.reads is None:
        return []
    else:
        boxes = reduction.reads(call, box)
    return list(zip(labelled.graph.nodes[value.node].inputs, boxes, strict=True))


def find_regions(labelled: LabelledGraph, wanted: Mapping[Value, Box], given: Collection[Value]) -> dict[Value, Region]:
    """Return the region of each value that is computed, or read if it is `given`, for some boxes of values."""
    return trace(labelled, wanted, given)[0]


def trace(
    labelled: LabelledGraph, wanted: Mapping[Value, Box], given: Collection[Value]
) -> tuple[dict[Value, Region], Needs]:
    """Return also what each box of these regions needs."""
    regions, needs = {value: region_of(box) for value, box in wanted.items()}, Needs()
    for value in reversed(labelled.layouts):
        if value not in regions or value in given:
            continue
        for box in boxes_of(regions[value]):
            own = needs[value, box] = find_needs(labelled, value, box)
            for source, needed in own:
                if source not in labelled.kept and is_read(labelled, source, needed):
                    regions[source] = add_box(regions.get(source), needed)
    return regions, needs


def is_read(labelled: LabelledGraph, value: Value, box: Box) -> bool:
    """Whether a box has a position; `()` is nothing of a value that has dimensions."""
    return not is_empty(box) and (box != () or labelled.layouts[value] == ())


# ---- reductions ------------------------------------------------------------------------------------------------------
def summarized_boxes(labelled: LabelledGraph, index: int, tile: Sequence[Span]) -> dict[Value, Box]:
    """Return the tile's own part of each operand that a reduction summarizes; nothing if it has none."""
    reduction, inputs = labelled.reductions[index], labelled.graph.nodes[index].inputs
    layouts = {inputs[each]: labelled.layouts[inputs[each]] for each in reduction.operands}
    boxes = {value: reduction.whole_windows(each, labelled.core(each, tile)) for value, each in layouts.items()}
    owns = labelled.owns(layouts[inputs[reduction.operands[0]]], tile)
    return boxes if owns and not any(map(is_empty, boxes.values())) else {}


# ---- memory ----------------------------------------------------------------------------------------------------------
def last_uses(
    graph: Graph, values: Collection[Value], given: Collection[Value], wanted: Collection[Value]
) -> dict[Value, set[Value]]:
    """Return for each value that is computed those that nothing uses after it; `wanted` ones are used at the end."""
    freed, later = dict[Value, set[Value]](), set(wanted)
    for value in sorted(values, reverse=True):
        if value not in given:
            freed[value] = set(graph.nodes[value.node].inputs) - later
            later |= freed[value]
    return freed


def count_bytes(
    labelled: LabelledGraph, regions: Mapping[Value, Region], given: Collection[Value], wanted: Collection[Value]
) -> int:
    """Return the most bytes that values on their regions take at once while they are computed, scratch included."""
    freed = last_uses(labelled.graph, regions, given, wanted)
    sizes = {value: labelled.bytes_on(value, region) for value, region in regions.items()}
    live = peak = 0
    for value in sorted(regions):
        live, scratch = live + sizes[value], 0
        if value not in given and value.node in labelled.rules and value.node not in labelled.reductions:
            rule, call = labelled.rules[value.node], labelled.calls[value.node]
            scratch = max((rule.scratch(call, value.output, box) for box in boxes_of(regions[value])), default=0)
        peak = max(peak, live + scratch * labelled.graph.info(value).dtype.itemsize)
        live -= sum(sizes.get(source, 0) for source in freed.get(value, ()))
    return peak
