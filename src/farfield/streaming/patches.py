"""Norms, means and pooling over what a tile reads: the network runs on patches, and only attention sees the whole.

The graph of the whole volume states what tiles read, and where attention stands in the whole; that of one patch runs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from torch import Tensor

from farfield.streaming.geometry import Halo, enlarge_region, round_up
from farfield.streaming.graph import Graph, Node, Value, map_values, run_node
from farfield.streaming.labels import GraphError, LabelledGraph
from farfield.streaming.plan import GraphPass, GraphPlan, PassCost
from farfield.streaming.rules.rule import Parts
from farfield.streaming.run import summarize_tile
from farfield.streaming.scales import Scales
from farfield.streaming.spans import Box, Piece, Span, read_box, region_of


@dataclass
class PatchPlan:
    """How a graph runs on patches.

    Attributes:
        whole: The passes over the whole; its reductions are attention alone.
        patch: The graph of one patch, with the same nodes.
        size: The patch's size.
        halo: What a tile reads before and after its own positions, where the volume does not end.
        scales: How values scale with the volume.
    """

    whole: GraphPlan
    patch: Graph
    size: tuple[int, ...]
    halo: Halo
    scales: dict[Value, Scales]

    def region(self, tile: Sequence[Span]) -> tuple[Span, ...]:
        """Return the patch of a tile: all have the same size."""
        volume = self.whole.labelled.size
        return enlarge_region(self.size, self.halo.around(tuple(tile), volume), volume)

    def part(self, value: Value, region: Sequence[Span]) -> Box:
        """Return where a region of the volume lies in a value; the end of the volume is the end of the value."""
        labelled, scales = self.whole.labelled, self.scales[value]

        def span(piece: Piece) -> Span:
            if piece.axis is None:
                return 0, piece.length
            whole = Fraction(labelled.size[piece.axis], piece.length)
            (start, stop), scale = region[piece.axis], scales.get(piece.axis, whole)
            end = piece.length if stop == labelled.size[piece.axis] else min(int(stop / scale), piece.length)
            return min(int(start / scale), piece.length), end

        return tuple(tuple(map(span, dim)) for dim in labelled.layouts[value])

    def costs(self, macs: int, peak: int) -> list[PassCost]:
        """Return the cost of each pass, from the MACs and the bytes of one patch."""
        return [PassCost(float(macs * len(self.whole.tiles)), peak, self.halo) for _ in self.whole.stages]


def is_attention(node: Node) -> bool:
    """Whether a node is a layer that sees the whole in any case."""
    return node.op == "layer"


def see_tiles(labelled: LabelledGraph) -> LabelledGraph:
    """Return a graph in which all reductions but attention are those of a tile, and need no pass.

    Raises:
        GraphError: If an operation needs all positions for each of its own.
    """
    graph = labelled.graph
    if labelled.gathered:
        value = min(labelled.gathered)
        raise GraphError(f"{graph.nodes[value.node].path} needs all positions of the volume for each of its own")
    levels: dict[int, int] = {}
    for index in labelled.order:
        node = graph.nodes[index]
        before = max((levels[value.node] for value in node.inputs), default=0)
        levels[index] = before + (index in labelled.reductions and is_attention(node))
    return replace(labelled, levels=levels)


def attention_only(plan: GraphPlan) -> GraphPlan:
    """Return a plan whose passes summarize attention alone."""
    nodes = plan.labelled.graph.nodes
    stages = [
        GraphPass(tuple(index for index in each.reductions if is_attention(nodes[index])), (), each.last)
        for each in plan.stages
    ]
    return replace(plan, stages=stages)


def patch_size(
    size: Sequence[int], tile: Sequence[int], halo: Halo, strides: Sequence[int]
) -> tuple[tuple[int, ...], Halo]:
    """Return the size of all patches, and the halo rounded up to multiples of the strides.

    A patch has the remainder of the volume's size, so that the last starts at a multiple of the strides.
    """
    rounded = Halo(*(tuple(map(round_up, side, strides)) for side in halo))
    return tuple(
        min(length, own + before + after + length % stride)
        for length, own, before, after, stride in zip(size, tile, *rounded, strides, strict=True)
    ), rounded


def run_patch(
    plan: PatchPlan,
    stage: int,
    tile: Sequence[Span],
    volumes: Sequence[Tensor],
    parts: Mapping[int, Parts],
) -> tuple[dict[int, Parts], tuple[Box, Tensor] | None]:
    """Run a pass on a patch.

    Args:
        plan: The plan.
        stage: The pass.
        tile: Own positions of the tile.
        volumes: What the patch reads of each volume.
        parts: What earlier passes summarized.

    Returns:
        The tile's parts of each attention that the pass summarizes; and, in the last pass, the tile's own box of the
        output, with its numbers.
    """
    whole, region = plan.whole.labelled, plan.region(tile)
    each, output = plan.whole.stages[stage], plan.patch.output
    summarized: dict[int, Parts] = {}
    wanted, _ = plan.whole.wanted(stage, tile)
    ends = [plan.patch.nodes[index].inputs[0] for index in wanted] + ([output] if each.last else [])
    order = sorted({index for value in ends for index in plan.patch.needed(value)})
    users = Counter(value for index in order for value in set(plan.patch.nodes[index].inputs))
    known: dict[Value, Tensor] = {}
    for index in sorted({*order, *wanted}):
        node = plan.patch.nodes[index]
        tensors = [known[value] for value in node.inputs]
        if index in wanted:
            summarized[index] = summarize_patch(plan, index, wanted[index], tile, tensors)
            continue
        if index in whole.reductions and is_attention(node):
            box = plan.part(Value(index), region)
            outputs: Any = whole.reductions[index].finish(whole.calls[index], 0, box, tensors, parts[index])
        else:
            args, kwargs = (map_values(part, Value, known.__getitem__) for part in (node.args, node.kwargs))
            outputs = run_node(plan.patch, node, args, kwargs, volumes)
        results = outputs if isinstance(outputs, tuple | list) else (outputs,)
        known.update((Value(index, place), result) for place, result in enumerate(results))
        for value in set(node.inputs):
            users[value] -= 1
            if not users[value] and value not in ends:
                del known[value]
    if not each.last:
        return summarized, None
    own = plan.whole.own_box(whole.graph.output, tile)
    if own is None:
        return summarized, None
    read = region_of(plan.part(whole.graph.output, region))
    return summarized, (own, read_box(known[output], read, own))


def summarize_patch(
    plan: PatchPlan, index: int, boxes: Mapping[Value, Box], tile: Sequence[Span], tensors: Sequence[Tensor]
) -> Parts:
    """Return a tile's parts of an attention, from its own boxes of the inputs, of which a patch has these tensors."""
    whole, region = plan.whole.labelled, plan.region(tile)
    patch = dict(zip(whole.graph.nodes[index].inputs, tensors, strict=True))

    def read(value: Value, box: Box) -> Tensor:
        return read_box(patch[value], region_of(plan.part(value, region)), box)

    return summarize_tile(whole, index, boxes, read, tile)


def check_same(whole: Graph, patch: Graph) -> None:
    """Refuse a network that runs other operations on a patch than on the whole.

    Raises:
        GraphError: If it does.
    """
    if [node.op for node in whole.nodes] != [node.op for node in patch.nodes]:
        raise GraphError("it runs other operations on a patch than on the whole volume")


def peak_bytes(graph: Graph) -> int:
    """Return the most bytes that values of a graph take at once."""
    order = graph.needed()
    users = Counter(value for index in order for value in set(graph.nodes[index].inputs))
    live = peak = 0
    for index in order:
        node = graph.nodes[index]
        live += sum(info.bytes for info in node.outputs)
        peak = max(peak, live)
        for value in set(node.inputs):
            users[value] -= 1
            live -= 0 if users[value] else graph.info(value).bytes
    return peak
