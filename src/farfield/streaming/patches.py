"""Plan what runs on parts of the volume: patches, of which only attention sees the whole, and the region of a check.

On patches, norms, means and pooling see what a tile reads. The graph of the whole volume states what tiles read, and
where attention stands in the whole; that of one patch runs.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from farfield.streaming.arguments import round_up
from farfield.streaming.graph import Value
from farfield.streaming.labels import GraphError, LabelledGraph, count_bytes, find_regions
from farfield.streaming.plan import GraphPlan, Halo, PatchPlan, RegionCheck, find_stored, join_halos, make_graph_plan
from farfield.streaming.rules.rule import OperationCall, Parts, Reduction
from farfield.streaming.run import compute, summarize_tile
from farfield.streaming.scales import Recording, find_scales
from farfield.streaming.spans import Box, Span, read_box, region_of, whole_box

# (volume, box) -> its numbers
ReadVolume = Callable[[int, Box], Tensor]

# The share of the planned MACs that a check may take.
SHARE = 0.02
# Positions along an axis of a region that are enough where halos are smaller.
ENOUGH = 32
# Tiles of a volume above which a region is cut along all axes, and not along the last alone.
MANY = 64


def make_patch_plan(
    labelled: LabelledGraph, tile: Sequence[int], strides: Sequence[int], record: Callable[[tuple[int, ...]], Recording]
) -> PatchPlan:
    """Plan how a network, which `record` records on the size of a patch, runs on patches; or raise GraphError."""
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
    halo = join_halos(each.halo for each in whole.passes)
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


def run_patch(
    plan: PatchPlan, stage: int, tile: Sequence[Span], read_volume: ReadVolume, parts: Mapping[int, Parts]
) -> tuple[dict[int, Parts], tuple[Box, Tensor] | None]:
    """Run a pass on the patch of a tile, of which `read_volume` reads boxes of volumes, with what passes summarized.

    Returns:
        The tile's parts of each attention that the pass summarizes; and, in the last pass, the tile's own box of the
        output, with its numbers.
    """
    labelled, region, graph = plan.labelled, plan.region(tile), plan.patch.graph
    summarized, wanted = plan.wanted(stage, tile)

    def move(value: Value, box: Box) -> Box:
        """Return where a box of a value on the patch lies in the whole; each dimension is one piece."""
        return tuple(
            ((first + start, first + stop),)
            for ((first, _),), ((start, stop),) in zip(plan.part(value, region), box, strict=True)
        )

    def reduce(index: int) -> Reduction:
        whole = labelled.reductions[index]

        def finish(call: OperationCall, output: int, box: Box, tensors: Sequence[Tensor], own: Parts) -> Tensor:
            return whole.finish(labelled.calls[index], output, move(Value(index, output), box), tensors, own)

        return whole._replace(finish=finish)

    def read(value: Value, box: Box) -> Tensor:
        return read_volume(graph.inputs.index(value), move(value, box))

    patch = copy.copy(plan.patch)
    patch.reductions = {index: reduce(index) for index in plan.reductions}
    known = compute(patch, plan.patch_boxes(wanted), graph.inputs, read, parts)

    def part(value: Value, box: Box) -> Tensor:
        return read_box(known[value], region_of(plan.part(value, region)), box)

    own = {index: summarize_tile(labelled, index, boxes, part, tile) for index, boxes in summarized.items()}
    box = plan.own_box(graph.output, tile) if plan.stages[stage].last else None
    return own, None if box is None else (box, part(graph.output, box))


# ---- the region of a check -------------------------------------------------------------------------------------------
def plan_check(
    record: Callable[[tuple[int, ...]], Recording],
    plan: GraphPlan,
    strides: Sequence[int],
    samples: int,
) -> RegionCheck | str:
    """Plan the largest check that takes at most `SHARE` of the planned MACs, and a tile's bytes; or tell why none.

    `record` records the network on volumes of a size, before any reduction.
    """
    if isinstance(plan, PatchPlan):
        return "norms and pooling see what a tile reads"
    if not plan.cut:
        return "the volume is one tile"
    labelled, size = plan.labelled, None
    macs, room = samples * sum(each.macs for each in plan.passes), max(each.bytes for each in plan.passes)
    reach = tuple(map(max, *join_halos(each.halo for each in plan.passes)))
    untiled, peak = sum(labelled.graph.nodes[index].macs for index in labelled.order), _untiled_bytes(plan)
    for each in region_sizes(labelled.size, plan.cut, strides, reach):
        # By positions, and tiles with their halos as twice the network; in float64 that takes twice the bytes.
        share = math.prod(each) / math.prod(labelled.size)
        if 4 * share * untiled <= SHARE * macs and 2 * share * peak <= room:
            size = each
    if size is None:
        return f"a region of two strides takes more than {SHARE:.0%} of the work, or more memory than a tile"
    try:
        recorded = record(size).label(plan.cut)
    except (GraphError, ValueError, TypeError) as error:
        return f"the network does not run on a region of size {size} ({str(error).splitlines()[0]:.80})"
    stored = find_stored(recorded)
    if set(plan.stored) <= stored:
        stored = {*recorded.gathered, *plan.stored}
    # Tiles of a region take their time however few positions they have: two where the volume has few.
    halved = plan.cut if len(plan.tiles) > MANY else plan.cut[-1:]
    own = make_graph_plan(recorded, _halve(size, halved, strides), stored)
    cost = 2.0 * sum(recorded.graph.nodes[index].macs for index in recorded.order)
    cost += sum(each.macs for each in own.passes)
    return RegionCheck(own, cost) if cost <= SHARE * macs else f"it takes more than {SHARE:.0%} of the work"


def region_sizes(
    size: Sequence[int], cut: Sequence[int], strides: Sequence[int], reach: Sequence[int]
) -> Iterator[tuple[int, ...]]:
    """Iterate over sizes of regions, the smallest first, up to ENOUGH, or one in whose middle a halo ends within it.

    Along axes that are cut a region has so many strides and what the volume has beyond those; at least two along one.
    """
    most = {}
    for axis in cut:
        halo, enough = -(-reach[axis] // strides[axis]), -(-ENOUGH // strides[axis])
        most[axis] = min(size[axis] // strides[axis], max(2 * halo + 2, enough))
    for steps in range(1, max(most.values(), default=1) + 1):
        # Two strides along the last axis alone, then along one more, then three along all, and so on.
        for doubled in range(len(cut)) if steps == 1 else [len(cut)]:
            counts = {
                axis: min(most[axis], max(steps, 2 if place <= doubled else 1))
                for place, axis in enumerate(reversed(cut))
            }
            yield tuple(
                counts[axis] * strides[axis] + length % strides[axis] if axis in counts else length
                for axis, length in enumerate(size)
            )


def _untiled_bytes(plan: GraphPlan) -> int:
    """Return the most bytes that the values of the untiled network take at once."""
    labelled = plan.labelled
    output, given = labelled.graph.output, labelled.graph.inputs
    regions = find_regions(labelled, {output: whole_box(labelled.layouts[output])}, given)
    return count_bytes(labelled, regions, given, [output])


def _halve(size: Sequence[int], axes: Sequence[int], strides: Sequence[int]) -> tuple[int, ...]:
    """Return the size of tiles that cut a region into two along each of some axes that has at least two strides."""
    return tuple(
        -(-(length // strides[axis]) // 2) * strides[axis] if axis in axes and length >= 2 * strides[axis] else length
        for axis, length in enumerate(size)
    )
