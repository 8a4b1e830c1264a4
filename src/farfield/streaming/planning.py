"""Where the passes of a plan end, which values they store, and what they cost, from the labelled graph alone."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace

from farfield.streaming.arguments import iterate_diagonal, round_up
from farfield.streaming.cuts import cheapest_source, cut_levels
from farfield.streaming.graph import Node, Value
from farfield.streaming.labels import GraphError, LabelledGraph, count_bytes, find_regions, fit_tile
from farfield.streaming.patches import Patch, find_attention
from farfield.streaming.places import RecordedNetwork, find_places, find_scales
from farfield.streaming.plan import (
    PlannedPass,
    RegionCheck,
    StreamingPlan,
    count_stored,
    find_ends,
    find_wanted,
    refuse_moved_parts,
)
from farfield.streaming.spans import Halo, Layout, Region, join_halos, region_of, whole_box

# The share of the planned MACs that a check may take, and what it may take of any volume: a tenth of a second.
_SHARE, _FEW_MACS, _FEW_BYTES = 0.02, 2 * 10**9, 2**26
# MACs of an average product of a tile, from which on it runs with torch's threads. With other work on the machine, two
# threads wait for each other at every operation: they take twice as long as one at so many MACs, longer at fewer.
_LARGE = 2 * 10**9
# Positions along an axis of a region that are enough where halos are smaller.
_ENOUGH = 32
# Tiles of a volume above which a region is cut along all axes, and not along the last alone.
_MANY = 64


def make_plan(
    labelled: LabelledGraph, tile: Sequence[int], chosen: Collection[Value], cuts: Sequence[int] = ()
) -> StreamingPlan:
    """Plan the passes of a graph, without their costs; of the chosen values those are stored that a later one reads."""
    tile = tuple(map(min, tile, labelled.size))
    labelled, levels = fit_tile(labelled, tile), cut_levels(labelled, cuts)
    passes = end_passes(labelled, chosen, levels, labelled.reductions)
    written = {levels[value.node] for each in passes for value in each.writes}
    ends = tuple(index for index in cuts if levels[index] in written)
    return StreamingPlan(labelled, tile, passes, ends)


def end_passes(
    labelled: LabelledGraph, chosen: Collection[Value], levels: Mapping[int, int], reductions: Collection[int]
) -> tuple[PlannedPass, ...]:
    """Return where passes end, without their costs: each node runs in the pass of its level, and sums before it.

    A pass that would neither sum nor store anything is left out.
    """
    nodes, last, none = labelled.graph.nodes, levels[labelled.graph.output.node], (0,) * len(labelled.size)
    operands = {
        index: [nodes[index].inputs[each] for each in labelled.reductions[index].operands] for index in reductions
    }
    summed = {index: max(levels[value.node] for value in own) for index, own in operands.items()}
    passes, read = list[PlannedPass](), set[Value]()
    for number in range(last + 1):
        sums = tuple(index for index in reductions if summed[index] == number)
        writes = tuple(value for value in sorted(chosen) if levels[value.node] == number)
        ends = [value for index in sums for value in operands[index]]
        ends += [*writes, *([labelled.graph.output] if number == last else [])]
        stored = {value for value in chosen if levels[value.node] < number}
        reads = _reach(labelled, ends, stored.union(labelled.graph.inputs)) & stored
        passes.append(PlannedPass((), (), sums, writes, tuple(sorted(reads)), Halo(none, none)))
        read |= reads
    for number, each in enumerate(passes):
        writes = tuple(value for value in each.writes if value in read)
        paths = [[nodes[index].path for index in each.reductions], [nodes[value.node].path for value in writes]]
        passes[number] = each._replace(
            summarizes=tuple(dict.fromkeys(paths[0])), stores=tuple(dict.fromkeys(paths[1])), writes=writes
        )
    return (*(each for each in passes[:-1] if each.reductions or each.writes), passes[-1])


def _reach(labelled: LabelledGraph, ends: Sequence[Value], given: Collection[Value]) -> set[Value]:
    """Return the values that a pass computes or reads for its ends: none beyond what is given or was summarized."""
    waiting, reached = list(ends), set[Value]()
    while waiting:
        value = waiting.pop()
        if value in reached or value in labelled.known:
            continue
        reached.add(value)
        reduction = labelled.reductions.get(value.node)
        if value not in given and (reduction is None or reduction.reads is not None):
            waiting += labelled.graph.nodes[value.node].inputs
    return reached


def make_patch_plan(plan: StreamingPlan, record: Callable[[tuple[int, ...]], RecordedNetwork]) -> StreamingPlan:
    """Plan how a network, which `record` records on the size of a patch, runs on patches; or raise GraphError."""
    labelled, nodes = plan.labelled, plan.labelled.graph.nodes
    if labelled.gathered:
        path = nodes[min(labelled.gathered).node].path
        text = f"{path} needs all positions of the volume for each of its own"
        raise GraphError(f'{text}; fix: Tiles(…, statistics="whole")')
    for index, row in labelled.reductions.items():
        if row.fit is not None:
            text = f"{nodes[index].op} in {nodes[index].path} needs all positions of the volume before each of its own"
            raise GraphError(f'{text}; fix: Tiles(…, statistics="whole")')
    # All reductions but attention are those of a tile, and need no pass.
    attention, levels = find_attention(labelled), dict[int, int]()
    for index in labelled.order:
        levels[index] = max((levels[value.node] for value in nodes[index].inputs), default=0) + (index in attention)
    passes = end_passes(labelled, (), levels, attention)
    whole = count_costs(replace(plan, passes=passes))
    scales = find_scales(find_places(labelled))
    along = [[own[axis].numerator for own in scales.values() if axis in own] for axis in range(len(plan.tile))]
    multiples = tuple(math.lcm(*own) for own in along)
    halo = Halo(*(tuple(map(round_up, side, multiples)) for side in whole.halo))
    # A patch has the remainder of the volume's size, so that the last starts at a multiple; so do tiles that do not.
    size = tuple(
        min(length, round_up(own, multiple) + (own % multiple and multiple) + before + after + length % multiple)
        for length, own, before, after, multiple in zip(plan.size, plan.tile, *halo, multiples, strict=True)
    )
    own = record(size).label([])
    if [node.op for node in nodes] != [node.op for node in own.graph.nodes]:
        text = "it runs other operations on a patch than on the whole volume"
        raise GraphError(f'{text}; fix: Tiles(…, statistics="whole")')
    patch = Patch(own, plan.size, halo, scales, multiples)
    patched = replace(plan, passes=passes, cuts=(), patch=patch, on_disk=False, with_disk=None)
    refuse_moved_parts(patched)
    return count_costs(patched)


# ---- stored values ---------------------------------------------------------------------------------------------------
def find_stored(labelled: LabelledGraph, cuts: Sequence[int] = ()) -> set[Value]:
    """Return the values to store so that each operation with MACs runs in one pass alone."""
    levels, graph = cut_levels(labelled, cuts), labelled.graph
    stored = set(labelled.gathered)
    for index in labelled.order:
        for source in graph.nodes[index].inputs:
            later = levels[source.node] < levels[index]
            if later and source not in labelled.known and labelled.layouts[source]:
                stored.add(cheapest_source(labelled, source))
    return {value for value in stored if value not in graph.inputs}


def fit_stored(labelled: LabelledGraph, allowed: float, cuts: Sequence[int], *, keeps_all: bool = False) -> set[Value]:
    """Return the values to store in so many bytes: those that save most MACs a byte, and all that are gathered."""
    levels = cut_levels(labelled, cuts)

    def fits(values: Collection[Value]) -> bool:
        passes = end_passes(labelled, values, levels, labelled.reductions)
        return count_stored(labelled, passes, keeps_all=keeps_all) <= allowed

    def saved_by(value: Value) -> float:
        nodes = {each.node for each in _reach(labelled, [value], chosen - {value})}
        macs = (_split_macs(labelled.graph.nodes[index], index in labelled.reductions)[1] for index in nodes)
        return sum(macs) / labelled.graph.stored_info(value).bytes

    chosen, removed = find_stored(labelled, cuts), list[Value]()
    while not fits(chosen) and chosen != labelled.gathered:
        removed.append(min(sorted(chosen - labelled.gathered), key=saved_by))
        chosen.remove(removed[-1])
    # What was removed early may fit beside the rest after what was removed later.
    for value in reversed(removed):
        if fits({*chosen, value}):
            chosen.add(value)
    return chosen


# ---- costs -----------------------------------------------------------------------------------------------------------
def count_costs(plan: StreamingPlan) -> StreamingPlan:
    """Return a plan with the halo, the MACs and the bytes of each pass."""
    numbers, patch = range(len(plan.passes)), plan.patch
    costs = [_count_patch(plan, patch, each) if patch else _count_tiles(plan, each) for each in numbers]
    each_pass = zip(plan.passes, costs, strict=True)
    return replace(
        plan, passes=tuple(each._replace(halo=halo, macs=macs, bytes=size) for each, (halo, macs, size) in each_pass)
    )


def _count_tiles(plan: StreamingPlan, number: int) -> tuple[Halo, float, int]:
    # What a tile reads along an axis follows from its place along it alone, so a diagonal of tiles tells all.
    labelled, graph = plan.labelled, plan.labelled.graph
    given = {*graph.inputs, *plan.passes[number].reads}
    macs = {index: _split_macs(graph.nodes[index], index in labelled.reductions) for index in labelled.order}
    halos, peak = [Halo(*[(0,) * len(plan.tile)] * 2)], 0
    # Of each value, how many positions run along each axis in all tiles, and along no axis, None.
    counts: dict[Value, Counter[int | None]] = {}
    for tile, weights in iterate_diagonal(plan.size, plan.tile, 2):
        summarized, wanted = find_wanted(plan, number, tile)
        regions = find_regions(labelled, wanted, given)
        left = sum(labelled.bytes_on(value, regions[value]) for value in wanted)
        # Beside what was computed, a summary takes as much as its operands.
        copies = [sum(map(labelled.bytes_on, own, map(region_of, own.values()))) for own in summarized.values()]
        peak = max(peak, count_bytes(labelled, regions, given, wanted), left + max(copies, default=0))
        for value, region in regions.items():
            if value in graph.inputs:
                if graph.info(value).shape[-len(tile) :] != plan.size:  # what a loss takes may have other positions
                    continue
                spans = [(*own, dim[0]) for own, dim in zip(tile, region[-len(tile) :], strict=True)]
                before = tuple(max(0, start - read[0][0]) for start, _, read in spans)
                halos.append(Halo(before, tuple(max(0, read[-1][1] - stop) for _, stop, read in spans)))
            elif value not in given and macs[value.node][1]:
                _add_positions(counts.setdefault(value, Counter()), labelled.layouts[value], region, weights)
    # Windows of scans are there as a whole, in the pass that gives them twice more while two records merge.
    rows = {index: row.parts_bytes for index, row in labelled.reductions.items()}
    peak += sum(rows.values()) + 2 * sum(rows[index] for index in plan.passes[number].reductions)
    # What is scanned back runs once for the states, and once for its numbers.
    twice = {index for index, scan in labelled.scans.items() if scan.back}
    running = sum(
        (1 + (value.node in twice))
        * macs[value.node][1]
        * math.prod(own.values())
        / max(1, math.prod(graph.info(value).shape))
        for value, own in counts.items()
    )
    summing = sum(macs[index][0] for index in plan.passes[number].reductions)
    return join_halos(halos), summing + running, peak + labelled.constant_bytes


def _count_patch(plan: StreamingPlan, patch: Patch, number: int) -> tuple[Halo, float, int]:
    whole, graph, reductions = plan.labelled, patch.labelled.graph, plan.passes[number].reductions
    operands = (graph.nodes[index].inputs[each] for index in reductions for each in whole.reductions[index].operands)
    wanted = patch.boxes([*operands, *find_ends(whole, plan.passes, number)])
    regions, attention = find_regions(patch.labelled, wanted, graph.inputs), find_attention(whole)
    macs = sum(_split_macs(graph.nodes[index])[0] for index in reductions)
    macs += sum(_split_macs(graph.nodes[index], index in attention)[1] for index in {value.node for value in regions})
    peak = count_bytes(patch.labelled, regions, graph.inputs, wanted)
    return patch.halo, float(macs * len(plan.cores)), peak + patch.labelled.constant_bytes


def choose_threads(plan: StreamingPlan) -> int:
    """Return 1 where a volume is cut and the products of a tile are small, else 0, for torch's own number."""
    labelled = plan.labelled
    products = sum(1 for index in labelled.order if labelled.graph.nodes[index].macs)
    is_small = sum(each.macs for each in plan.passes) < _LARGE * max(1, products) * len(plan.cores)
    return int(is_small and bool(plan.cut))


def _split_macs(node: Node, is_reduction: bool = True) -> tuple[int, int]:
    """Return the MACs of a node while it is summarized, and those while it runs, as only a layer does of reductions."""
    summing = node.args[0].summing if node.op == "layer" else node.macs
    return (summing, node.macs - summing) if is_reduction else (0, node.macs)


def _add_positions(counts: Counter[int | None], layout: Layout, region: Region, weights: Sequence[int]) -> None:
    """Add the positions of a region along each axis, so often; those along no axis, None, are the same in all tiles."""
    extents: dict[int | None, int] = dict.fromkeys([*range(len(weights)), None], 1)
    for piece, spans in zip(itertools.chain(*layout), itertools.chain(*region), strict=True):
        extents[piece.axis] *= sum(stop - start for start, stop in spans)
    counts.setdefault(None, extents.pop(None))
    counts.update({axis: extents[axis] * weight for axis, weight in enumerate(weights)})


# ---- the region that is checked --------------------------------------------------------------------------------------
def plan_check(
    record: Callable[[tuple[int, ...]], RecordedNetwork], plan: StreamingPlan, strides: Sequence[int]
) -> RegionCheck | str:
    """Plan the largest check that takes at most `_SHARE` of the planned MACs, and a tile's bytes; or tell why none.

    What takes few of both is no matter of a share, such as the whole of a small volume.
    """
    labelled, size = plan.labelled, None
    most = max(_SHARE * plan.samples * sum(each.macs for each in plan.passes), _FEW_MACS)
    room = max(_FEW_BYTES, *(each.bytes for each in plan.passes))
    reach = tuple(map(max, *plan.halo))
    untiled, output = sum(labelled.graph.nodes[index].macs for index in labelled.order), labelled.graph.output
    regions = find_regions(labelled, {output: whole_box(labelled.layouts[output])}, labelled.graph.inputs)
    peak = count_bytes(labelled, regions, labelled.graph.inputs, [output])
    batch = min(plan.samples, 2)
    for each in [*region_sizes(labelled.size, plan.cut, strides, reach), labelled.size]:
        # By positions, and tiles with their halos as twice the network; in float64 that takes twice the bytes.
        share = batch * math.prod(each) / math.prod(labelled.size)
        if 4 * share * untiled <= most and 2 * share * peak <= room:
            size = each
    if size is None:
        return "the volume is one tile" if not plan.cut else "a region of two strides takes too much work, or memory"
    # A patch runs in one piece, of whatever size.
    cut = () if plan.patch else plan.cut
    try:
        recorded = record(size).label(cut)
    except (GraphError, ValueError, TypeError) as error:
        return f"the network does not run on a region of size {size} ({str(error).splitlines()[0]:.80})"
    # Batch norms have outputs that are empty, and not read.
    if any(0 in recorded.graph.nodes[index].outputs[0].shape for index in recorded.order):
        return f"the network crops all of a region of size {size}"
    stored = find_stored(recorded, plan.cuts)
    if {*plan.stored} <= stored:
        stored = {*recorded.gathered, *plan.stored}
    # Tiles of a region take their time however few positions they have: two where the volume has few.
    halved = cut if len(plan.cores) > _MANY else cut[-1:]
    tile = [
        round_up(length // stride, 2) // 2 * stride if axis in halved and length >= 2 * stride else length
        for axis, (length, stride) in enumerate(zip(size, strides, strict=True))
    ]
    own = count_costs(make_plan(recorded, tile, stored, plan.cuts))
    cost = 2.0 * sum(recorded.graph.nodes[index].macs for index in recorded.order)
    cost = batch * (cost + sum(each.macs for each in own.passes))
    if cost > most:
        return "it takes too much of the work"
    # In float64, convolutions of torch on a CPU unfold: as many numbers as they take products for an output channel.
    nodes = recorded.graph.nodes
    unfolded = max((node.macs // node.outputs[0].shape[1] for node in nodes if "convolution" in node.op), default=0)
    return RegionCheck(own, cost, 8 * (unfolded + sum(each.numel() for each in recorded.graph.constants.values())))


def region_sizes(
    size: Sequence[int], cut: Sequence[int], strides: Sequence[int], reach: Sequence[int]
) -> Iterator[tuple[int, ...]]:
    """Iterate over sizes of regions, the smallest first, up to those in whose middle a halo ends within them."""
    # Along axes that are cut a region has so many strides and what the volume has beyond those; at least two along one.
    most = {}
    for axis in cut:
        halo, enough = -(-reach[axis] // strides[axis]), -(-_ENOUGH // strides[axis])
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
