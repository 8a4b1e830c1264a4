"""Norms, means and pooling over what a tile reads: the network runs on patches, and only attention sees the whole.

The graph of the whole volume states what tiles read, and where attention stands in the whole; that of one patch runs.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from farfield.streaming.arguments import round_up
from farfield.streaming.graph import Value
from farfield.streaming.labels import GraphError, LabelledGraph
from farfield.streaming.plan import Halo, PatchPlan, make_graph_plan
from farfield.streaming.rules.rule import OperationCall, Parts, Reduction
from farfield.streaming.run import Read, compute
from farfield.streaming.scales import Recording, find_scales
from farfield.streaming.spans import Box, Span, read_box, region_of


def make_patch_plan(
    labelled: LabelledGraph, tile: Sequence[int], strides: Sequence[int], record: Callable[[tuple[int, ...]], Recording]
) -> PatchPlan:
    """Plan how a network, which `record` records on the size of a patch, runs on patches.

    Raises:
        GraphError: If it cannot.
    """
    nodes = labelled.graph.nodes
    if labelled.gathered:
        path = nodes[min(labelled.gathered).node].path
        raise GraphError(f"{path} needs all positions of the volume for each of its own")
    # All reductions but attention are those of a tile, and need no pass.
    levels: dict[int, int] = {}
    for index in labelled.order:
        before = max((levels[value.node] for value in nodes[index].inputs), default=0)
        levels[index] = before + (index in labelled.reductions and nodes[index].op == "layer")
    whole = make_graph_plan(replace(labelled, levels=levels), tile, [])
    halo = functools.reduce(Halo.join, (whole.cost(stage).halo for stage in range(len(whole.stages))))
    halo = Halo(*(tuple(map(round_up, side, strides)) for side in halo))
    # A patch has the remainder of the volume's size, so that the last starts at a multiple of the strides.
    size = tuple(
        min(length, own + before + after + length % stride)
        for length, own, before, after, stride in zip(labelled.size, whole.tile, *halo, strides, strict=True)
    )
    patch = record(size).label([])
    if [node.op for node in nodes] != [node.op for node in patch.graph.nodes]:
        raise GraphError("it runs other operations on a patch than on the whole volume")
    return PatchPlan(whole.labelled, whole.tile, {}, patch, halo, find_scales(labelled))


def compute_on_patch(
    plan: PatchPlan, tile: Sequence[Span], wanted: Mapping[Value, Box], read: Read, parts: Mapping[int, Parts]
) -> Read:
    """Run the patch of a tile; return the function that reads boxes of the wanted values, as those of the whole."""
    labelled, region, inputs = plan.labelled, plan.region(tile), plan.patch.graph.inputs

    def move(value: Value, box: Box) -> Box:
        """Return where a box of a value on the patch lies in the whole; each dimension is one piece."""
        return tuple(
            ((first + start, first + stop),)
            for ((first, _),), ((start, stop),) in zip(plan.part(value, region), box, strict=True)
        )

    def reduce(index: int) -> Reduction:
        whole = labelled.reductions[index]

        def finish(call: OperationCall, output: int, box: Box, tensors: Sequence[Tensor], own: Parts) -> Any:
            return whole.finish(labelled.calls[index], output, move(Value(index, output), box), tensors, own)

        return whole._replace(finish=finish)

    patch = copy.copy(plan.patch)
    patch.reductions = {index: reduce(index) for index in plan.reductions}
    known = compute(patch, plan.patch_boxes(wanted), inputs, lambda value, box: read(value, move(value, box)), parts)
    return lambda value, box: read_box(known[value], region_of(plan.part(value, region)), box)
