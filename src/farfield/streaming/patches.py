"""Norms, means and pooling over what a tile reads: the network runs on patches, and only attention sees the whole.

The graph of the whole volume states what tiles read, and where attention stands in the whole; that of one patch runs.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from torch import Tensor

from farfield.streaming.graph import Graph, Value, run_node
from farfield.streaming.labels import GraphError, LabelledGraph
from farfield.streaming.plan import GraphPlan, Halo, PlannedPass, make_graph_plan, round_up, summing_macs
from farfield.streaming.rules.rule import Parts
from farfield.streaming.run import summarize_tile
from farfield.streaming.scales import Recording, Scales, find_scales
from farfield.streaming.spans import Box, Piece, Span, read_box, region_of

# (volume, box) -> its numbers
ReadVolume = Callable[[int, Box], Tensor]


@dataclass
class PatchPlan(GraphPlan):
    """How a graph runs on patches; its passes summarize attention alone, and store nothing.

    Attributes:
        patch: The graph of one patch, with the same nodes.
        patch_size: The patch's size.
        patch_bytes: The most bytes that its values take at once.
        patch_halo: What a tile reads before and after its own positions, where the volume does not end.
        scales: How values scale with the volume.
    """

    patch: Graph
    patch_size: tuple[int, ...]
    patch_bytes: int
    patch_halo: Halo
    scales: dict[Value, Scales]

    def region(self, tile: Sequence[Span]) -> tuple[Span, ...]:
        """Return the patch of a tile: all have the same size, also at the border of the volume."""
        region = []
        for (start, stop), positions, length in zip(
            self.patch_halo.around(tile, self.labelled.size), self.patch_size, self.labelled.size, strict=True
        ):
            if stop - start < positions:
                stop = min(length, start + positions)
                start = min(start, max(0, stop - positions))
            region.append((start, stop))
        return tuple(region)

    def part(self, value: Value, region: Sequence[Span]) -> Box:
        """Return where a region of the volume lies in a value; the end of the volume is the end of the value."""
        size, scales = self.labelled.size, self.scales[value]

        def span(piece: Piece) -> Span:
            if piece.axis is None:
                return 0, piece.length
            (start, stop), length = region[piece.axis], piece.length
            scale = scales.get(piece.axis, Fraction(size[piece.axis], length))
            first, end = min(int(start / scale), length), min(int(stop / scale), length)
            return first, length if stop == size[piece.axis] else end

        return tuple(tuple(map(span, dim)) for dim in self.labelled.layouts[value])

    def needed(self, stage: int) -> list[int]:
        """Return the nodes that run on a patch in a pass."""
        reductions = self.stages[stage].reductions
        ends = [*self.ends(stage), *(value for index in reductions for value in self.patch.nodes[index].inputs)]
        return sorted({*reductions, *(index for value in ends for index in self.patch.needed(value))})

    def cost(self, stage: int) -> PlannedPass:
        """Return a pass with its cost, from the MACs and the bytes of one patch."""
        nodes, attention, macs = self.patch.nodes, self.attention, 0
        for index in self.needed(stage):
            # Attention either is summarized, or responds.
            summing = summing_macs(nodes[index]) if index in attention else 0
            macs += summing if index in self.stages[stage].reductions else nodes[index].macs - summing
        return self.describe(stage, self.patch_halo, float(macs * len(self.tiles)), self.patch_bytes)

    @property
    def attention(self) -> set[int]:
        """The nodes that see the whole."""
        return {index for index in self.labelled.reductions if self.labelled.graph.nodes[index].op == "layer"}


def make_patch_plan(
    labelled: LabelledGraph, tile: Sequence[int], strides: Sequence[int], record: Callable[[tuple[int, ...]], Recording]
) -> PatchPlan:
    """Plan how a network, which `record` records on the size of a patch, runs on patches.

    Raises:
        GraphError: If it cannot.
    """
    graph = labelled.graph
    if labelled.gathered:
        path = graph.nodes[min(labelled.gathered).node].path
        raise GraphError(f"{path} needs all positions of the volume for each of its own")
    # All reductions but attention are those of a tile, and need no pass.
    levels: dict[int, int] = {}
    for index in labelled.order:
        before = max((levels[value.node] for value in graph.nodes[index].inputs), default=0)
        levels[index] = before + (index in labelled.reductions and graph.nodes[index].op == "layer")
    whole = make_graph_plan(replace(labelled, levels=levels), tile, [])
    halo = functools.reduce(Halo.join, (whole.cost(stage).halo for stage in range(len(whole.stages))))
    halo = Halo(*(tuple(map(round_up, side, strides)) for side in halo))
    # A patch has the remainder of the volume's size, so that the last starts at a multiple of the strides.
    size = tuple(
        min(length, own + before + after + length % stride)
        for length, own, before, after, stride in zip(labelled.size, whole.tile, *halo, strides, strict=True)
    )
    patch = record(size)
    if [node.op for node in graph.nodes] != [node.op for node in patch.graph.nodes]:
        raise GraphError("it runs other operations on a patch than on the whole volume")
    peak = make_graph_plan(patch.label([]), size, []).cost(0).bytes
    plan = PatchPlan(whole.labelled, whole.tile, [], {}, patch.graph, size, peak, halo, find_scales(labelled))
    for each in whole.stages:
        plan.stages.append(each._replace(reductions=tuple(filter(plan.attention.__contains__, each.reductions))))
    return plan


def run_patch(
    plan: PatchPlan, stage: int, tile: Sequence[Span], read_volume: ReadVolume, parts: Mapping[int, Parts]
) -> tuple[dict[int, Parts], tuple[Box, Tensor] | None]:
    """Run a pass on a patch.

    Args:
        plan: The plan.
        stage: The pass.
        tile: Own positions of the tile.
        read_volume: Reads what the patch needs of a volume.
        parts: What earlier passes summarized.

    Returns:
        The tile's parts of each attention that the pass summarizes; and, in the last pass, the tile's own box of the
        output, with its numbers.
    """
    labelled, region, output = plan.labelled, plan.region(tile), plan.patch.output
    summarized, (boxes, _) = dict[int, Parts](), plan.wanted(stage, tile)
    order, ends, attention = plan.needed(stage), plan.ends(stage), plan.attention
    users = Counter(value for index in order for value in set(plan.patch.nodes[index].inputs))
    known: dict[Value, Tensor] = {}
    volumes = []
    for number, value in enumerate(plan.patch.inputs):
        batch, channels = plan.patch.info(value).shape[:2]
        volumes.append(read_volume(number, (((0, batch),), ((0, channels),), *((span,) for span in region))))

    def read(value: Value, box: Box) -> Tensor:
        return read_box(known[value], region_of(plan.part(value, region)), box)

    for index in order:
        node = plan.patch.nodes[index]
        if index in plan.stages[stage].reductions:
            if index in boxes:
                summarized[index] = summarize_tile(labelled, index, boxes[index], read, tile)
        elif index in attention:
            tensors, box = [known[value] for value in node.inputs], plan.part(Value(index), region)
            known[Value(index)] = labelled.reductions[index].finish(
                labelled.calls[index], 0, box, tensors, parts[index]
            )
        else:
            run_node(plan.patch, index, known, volumes)
        for value in set(node.inputs):
            users[value] -= 1
            if not users[value] and value not in ends:
                del known[value]
    own = plan.own_box(output, tile) if ends else None
    return summarized, None if own is None else (own, read(output, own))
