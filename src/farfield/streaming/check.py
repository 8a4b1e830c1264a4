"""The check of a prediction: on a region of the user's volume, tiles are compared with the network itself.

The region runs as if it were the volume: untiled by a copy of the network, in its own precision and in float64, and in
tiles by the recorded graph. Tiles may differ by `ALLOWED` times what the precision of the network makes it differ.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from farfield.nn.network_copy import copied, share_parameters
from farfield.streaming.graph import Value, map_values, run_node, run_whole
from farfield.streaming.labels import GraphError, count_bytes, find_regions, summarized_boxes
from farfield.streaming.passes import Sums, TiledRun
from farfield.streaming.plan import GraphPlan, Halo, find_stored, make_graph_plan
from farfield.streaming.run import compute, summarize_tile
from farfield.streaming.scales import Recording
from farfield.streaming.spans import Box, Span, read_box, region_of, whole_box, write_box
from farfield.streaming.store import Store

# The share of the planned MACs that a check may take.
SHARE = 0.02
# The distance from the untiled network that is allowed, in its own distance from float64.
ALLOWED = 4
# Positions along an axis of a region that are enough where halos are smaller.
ENOUGH = 32
# Where the volume is looked at for a region that is not constant: shares of the free room, the middle first.
PLACES = (0.5, 0.25, 0.75, 0.0, 1.0)


class TilesDifferError(ValueError):
    """Tiles give another result than the network."""


@dataclass
class RegionCheck:
    """A check on a region, which runs as if it were the volume.

    Attributes:
        plan: The passes over its tiles, of which there are at least two.
        macs: MACs of the check: of the untiled network in two precisions, and of the tiles.
    """

    plan: GraphPlan
    macs: float

    @property
    def size(self) -> tuple[int, ...]:
        """Size of the region."""
        return self.plan.labelled.size


def plan_check(
    record: Callable[[tuple[int, ...]], Recording],
    plan: GraphPlan,
    strides: Sequence[int],
    halo: Halo,
    macs: float,
    room: int,
) -> RegionCheck | str:
    """Plan the largest check that takes no more than `SHARE` of the planned MACs and `room` bytes; or tell why none.

    Args:
        record: Records the network on volumes of a size, before any reduction.
        plan: The plan of the volume.
        strides: Strides of the network.
        halo: What its tiles read.
        macs: The planned MACs.
        room: The planned bytes of a tile.
    """
    if not plan.cut:
        return "the volume is one tile"
    labelled, size = plan.labelled, None
    untiled, peak = sum(labelled.graph.nodes[index].macs for index in labelled.order), _untiled_bytes(plan)
    for each in region_sizes(labelled.size, plan.cut, strides, tuple(map(max, *halo))):
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
    own = make_graph_plan(recorded, _halve(size, plan.cut, strides), stored)
    cost = 2.0 * sum(recorded.graph.nodes[index].macs for index in recorded.order)
    cost += sum(own.cost(stage).macs for stage in range(len(own.stages)))
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


def _halve(size: Sequence[int], cut: Sequence[int], strides: Sequence[int]) -> tuple[int, ...]:
    """Return the size of tiles that cut a region into two along each axis that has at least two strides."""
    return tuple(
        -(-(length // strides[axis]) // 2) * strides[axis] if axis in cut and length >= 2 * strides[axis] else length
        for axis, length in enumerate(size)
    )


# ---- running ---------------------------------------------------------------------------------------------------------
# Reads a region of a volume, by the number of the volume.
ReadRegion = Callable[[int, tuple[Span, ...]], Tensor]


def run_check(
    caller: str,
    check: RegionCheck,
    network: nn.Module,
    finish: Callable[[Any], Tensor],
    size: Sequence[int],
    read: ReadRegion,
) -> str:
    """Compare tiles with the network on a region of a volume of this size; return "" or why it was not checked.

    Args:
        caller: The function that errors name.
        check: The check.
        network: The network; a copy of it runs.
        finish: Makes one grid of what the network returns.
        size: The volume's size.
        read: Reads a region of a volume.

    Raises:
        TilesDifferError: If they differ by more than is allowed, and so does an operation, or the recording.
    """
    grids = _read_varied(check, size, read)
    if not all(bool(grid.isfinite().all()) for grid in grids):
        return "the region that was read has numbers that are not finite"
    try:
        want, wide = (_run_copy(network, finish, grids, dtype) for dtype in (None, torch.float64))
    except (RuntimeError, TypeError, ValueError, NotImplementedError) as error:
        return f"the network does not run on a region in float64 ({str(error).splitlines()[0]:.80})"
    if not want.isfinite().all():
        return "the result on a region has numbers that are not finite"
    got = run_tiles(check.plan, grids)
    if agree(got, want, wide):
        return ""
    problem = find_difference(check.plan, grids)
    if not problem:
        # Rounding that a condition made large, such as `x > x.mean()` near the mean, is no fault of tiles.
        if agree(run_whole(check.plan.labelled.graph, grids), want, wide):
            return ""
        problem = "it computes something else than was recorded"
    raise TilesDifferError(
        f"{caller}: {type(network).__name__} has another result in tiles than untiled, on a region of size "
        f"{check.size}: the largest difference is {float((got.double() - want.double()).abs().max()):.3g}; {problem}; "
        f"fix: tile=({'None, ' * len(size)}), which runs the volume in one piece."
    )


def _read_varied(check: RegionCheck, size: Sequence[int], read: ReadRegion) -> list[Tensor]:
    """Read a region of all volumes, one in which the first is finite and not constant if such a one is found."""
    for place in PLACES:
        starts = [int(place * (length - own)) for length, own in zip(size, check.size, strict=True)]
        region = tuple((start, start + own) for start, own in zip(starts, check.size, strict=True))
        first = read(0, region)
        if bool((first != first.flatten()[0]).any()) and bool(first.isfinite().all()):
            break
    return [first, *(read(number, region) for number in range(1, len(check.plan.labelled.graph.inputs)))]


def _run_copy(
    network: nn.Module, finish: Callable[[Any], Tensor], grids: Sequence[Tensor], dtype: torch.dtype | None
) -> Tensor:
    """Run a copy of the network, in another precision if one is given."""

    def convert(tensor: Tensor) -> Tensor:
        shared = share_parameters(tensor)
        return shared.detach().to(dtype) if dtype is not None and tensor.is_floating_point() else shared

    with copied(network, convert, discard=True) as own, _without_fast_attention():
        return finish(own(*(grid.clone() if dtype is None else grid.to(dtype) for grid in grids)))


@contextmanager
def _without_fast_attention() -> Iterator[None]:
    """Run attention of torch by its operations, as it is recorded, and not by a kernel that rounds otherwise."""
    enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(enabled)


def run_tiles(plan: GraphPlan, grids: Sequence[Tensor]) -> Tensor:
    """Run all passes over the tiles of grids in memory."""
    graph, layouts = plan.labelled.graph, plan.labelled.layouts
    info = graph.info(graph.output)
    result = torch.empty(info.shape, dtype=info.dtype, device=grids[0].device)

    def read(sample: int, volume: int, index: int, box: Box) -> Tensor:
        return read_box(grids[volume], region_of(whole_box(layouts[graph.inputs[volume]])), box)

    def write(sample: int, box: Box, numbers: Tensor) -> None:
        write_box(result, layouts[graph.output], box, numbers)

    run = TiledRun(plan, None, Store("check", plan, False, None, grids[0].device), read, write)
    for stage, index in itertools.product(range(len(plan.stages)), range(len(plan.tiles))):
        run.run_task(stage, index)
    return result


def agree(got: Tensor, want: Tensor, wide: Tensor) -> bool:
    """Whether a result is as near to that of the untiled network as its precision allows."""
    finite = wide.isfinite()
    if got.shape != want.shape or not torch.equal(got.isfinite(), want.isfinite()):
        return False
    if not got.is_floating_point():
        return torch.equal(got, want)
    if not finite.any():
        return True
    # What rounds to the same numbers by chance still rounds.
    eps = torch.finfo(want.dtype).eps
    got, want, wide = (each[finite].double() for each in (got, want, wide))
    return bool((got - want).abs().max() <= ALLOWED * ((want - wide).abs().max() + eps * wide.abs().max()))


# ---- the first operation that differs --------------------------------------------------------------------------------
def find_difference(plan: GraphPlan, grids: Sequence[Tensor]) -> str:
    """Return what names the first operation that differs in tiles from itself untiled; nothing if none does.

    Each operation runs in tiles on untiled operands, so a difference is its own: it is one where it is more than half
    of the digits of its dtype.
    """
    labelled = plan.labelled
    graph = labelled.graph
    users = Counter(value for index in labelled.order for value in set(graph.nodes[index].inputs))
    known: dict[Value, Tensor] = {}
    for index in labelled.order:
        node = graph.nodes[index]
        args, kwargs = (map_values(part, Value, known.__getitem__) for part in (node.args, node.kwargs))
        outputs = run_node(graph, node, args, kwargs, grids)
        known.update(
            (Value(index, place), each)
            for place, each in enumerate(outputs if isinstance(outputs, tuple | list) else (outputs,))
        )
        if index in labelled.calls:
            got = _run_operation(plan, index, known)
            if not _is_near(got, known[Value(index)]):
                return f"the first operation that differs is {node.op} in {node.path}"
        for value in set(node.inputs):
            users[value] -= 1
            if not users[value]:
                del known[value]
    return ""


def _run_operation(plan: GraphPlan, index: int, known: dict[Value, Tensor]) -> Tensor:
    """Run the first output of one operation tile by tile, on operands that are known as a whole."""
    labelled, value = plan.labelled, Value(index)
    graph, result, sums = labelled.graph, torch.empty_like(known[value]).contiguous(), Sums(plan)

    def read(source: Value, box: Box) -> Tensor:
        return read_box(known[source], region_of(whole_box(labelled.layouts[source])), box)

    if index in labelled.reductions:
        for tile in plan.tiles:
            boxes = summarized_boxes(labelled, index, tile)
            if boxes:
                sums.add(index, summarize_tile(labelled, index, boxes, read, tile), tile)
    for tile in plan.tiles:
        box = plan.own_box(value, tile)
        if box is not None:
            numbers = compute(labelled, {value: box}, graph.nodes[index].inputs, read, sums)[value]
            write_box(result, labelled.layouts[value], box, numbers)
    return result


def _is_near(got: Tensor, want: Tensor) -> bool:
    """Whether numbers agree in half of their digits, relative to the largest."""
    if not want.is_floating_point():
        return torch.equal(got, want)
    finite = want.isfinite()
    if not torch.equal(got.isfinite(), finite):
        return False
    got, want = got[finite], want[finite]
    return not len(want) or bool((got - want).abs().max() <= math.sqrt(torch.finfo(want.dtype).eps) * want.abs().max())
