"""The check of a prediction: on a region of the user's volume, tiles are compared with the network itself.

The region runs as if it were the volume: untiled by a copy of the network, in its own precision and in float64, and in
tiles by the recorded graph. Tiles may differ by `_ALLOWED` times what the precision of the network makes it differ.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from farfield._refusals import refusal
from farfield.nn.network_copy import copied, share_parameters
from farfield.streaming.graph import Graph, Value, run_node, run_whole
from farfield.streaming.labels import summarized_boxes
from farfield.streaming.passes import Store, run_in_memory
from farfield.streaming.plan import GraphPlan, RegionCheck
from farfield.streaming.rules.rule import Parts
from farfield.streaming.run import compute, summarize_tile
from farfield.streaming.spans import Box, Span, read_box, region_of, whole_box, write_box

# The distance from the untiled network that is allowed, in its own distance from float64.
_ALLOWED = 4
# Where the volume is looked at for a region that is not constant: shares of the free room, the middle first.
_PLACES = (0.5, 0.25, 0.75, 0.0, 1.0)
# Reads a region of a volume, by the number of the volume.
_ReadRegion = Callable[[int, tuple[Span, ...]], Tensor]


class TilesDifferError(ValueError):
    """Tiles give another result than the network."""


def run_check(
    check: RegionCheck,
    network: nn.Module,
    finish: Callable[[Any], Tensor],
    size: Sequence[int],
    read: _ReadRegion,
) -> str:
    """Compare tiles with a copy of the network on a region; return why it was not checked; refuse a difference."""
    grids = read_varied(check.size, len(check.plan.labelled.graph.inputs), size, read)
    if not all(bool(grid.isfinite().all()) for grid in grids):
        return "the region that was read has numbers that are not finite"
    # Norms of what does not vary make rounding as large as the result.
    if not any(map(_varies, grids)):
        return "the region that was read is constant"
    graph = check.plan.labelled.graph
    want = _run_copy(network, finish, grids, None)
    if not want.isfinite().all():
        return "the result on a region has numbers that are not finite"
    got = run_tiles(check.plan, grids)
    # Each operation in series rounds at least once: nearer, no run in float64 is needed, which is slow.
    if distance(got, want) <= _eps(want) * _count_in_series(graph):
        return ""
    try:
        wide = _run_copy(network, finish, grids, torch.float64)
    except (RuntimeError, TypeError, ValueError, NotImplementedError) as error:
        # A network of the user may take one precision alone, and refuse others by any of these.
        return f"the network does not run on a region in float64 ({str(error).splitlines()[0]:.80})"
    allowed = _ALLOWED * (distance(want, wide) + _eps(want))
    if distance(got, want) <= allowed:
        return ""
    problem = _find_difference(check.plan, grids)
    if not problem:
        # Rounding that a condition made large, such as `x > x.mean()` near the mean, is no fault of tiles.
        if distance(run_whole(graph, grids), want) <= allowed:
            return ""
        problem = "it computes something else than was recorded"
    raise refusal(
        TilesDifferError,
        f"{type(network).__name__} has another result in tiles than untiled, on a region of size "
        f"{check.size}: the largest difference is {float((got.double() - want.double()).abs().max()):.3g}; {problem}; "
        f"fix: tile=({'None, ' * len(size)}), which runs the volume in one piece.",
    )


def read_varied(own: Sequence[int], count: int, size: Sequence[int], read: _ReadRegion) -> list[Tensor]:
    """Read a region of its own size of all volumes; where the first is finite and not constant if that is found."""
    for place in _PLACES:
        starts = [int(place * (length - each)) for length, each in zip(size, own, strict=True)]
        region = tuple((start, start + each) for start, each in zip(starts, own, strict=True))
        first = read(0, region)
        if _varies(first) and bool(first.isfinite().all()):
            break
    return [first, *(read(number, region) for number in range(1, count))]


def _varies(grid: Tensor) -> bool:
    return bool((grid != grid.flatten()[0]).any())


def _run_copy(
    network: nn.Module, finish: Callable[[Any], Tensor], grids: Sequence[Tensor], dtype: torch.dtype | None
) -> Tensor:
    """Run a copy of the network, in another precision if one is given."""

    def convert(tensor: Tensor) -> Tensor:
        shared = share_parameters(tensor)
        return shared.detach().to(dtype) if dtype is not None and tensor.is_floating_point() else shared

    with copied(network, convert, discard=True) as own, without_fast_attention():
        return finish(own(*(grid.clone() if dtype is None else grid.to(dtype) for grid in grids)))


@contextmanager
def without_fast_attention() -> Iterator[None]:
    """Run attention of torch by its operations, as it is recorded, and not by a kernel that rounds otherwise."""
    enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(enabled)


def run_tiles(plan: GraphPlan, grids: Sequence[Tensor]) -> Tensor:
    graph, layouts = plan.labelled.graph, plan.labelled.layouts
    info = graph.info(graph.output)
    result = torch.empty(info.shape, dtype=info.dtype, device=grids[0].device)

    def read(sample: int, volume: int, index: int, box: Box) -> Tensor:
        return read_box(grids[volume], region_of(whole_box(layouts[graph.inputs[volume]])), box)

    def write(sample: int, box: Box, numbers: Tensor | None) -> None:
        if numbers is not None:
            write_box(result, layouts[graph.output], box, numbers)

    run_in_memory(plan, Store(plan, False, None, grids[0].device), read, write)
    return result


def distance(one: Tensor, other: Tensor) -> float:
    """Return the largest difference of two results, relative to the largest number of the second."""
    finite = other.isfinite()
    if one.shape != other.shape or not torch.equal(one.isfinite(), finite):
        return math.inf
    one, other = one[finite].double(), other[finite].double()
    if not len(other) or torch.equal(one, other):
        return 0.0
    return float((one - other).abs().max() / other.abs().max().clamp(min=torch.finfo(torch.float64).tiny))


def _eps(result: Tensor) -> float:
    """Return how far rounding of one operation moves numbers of a dtype; integers are not moved."""
    return torch.finfo(result.dtype).eps if result.is_floating_point() else 0.0


def _count_in_series(graph: Graph) -> int:
    """Return the number of operations on the longest way to the output."""
    counts: dict[int, int] = {}
    for index in graph.needed():
        counts[index] = 1 + max((counts[value.node] for value in graph.nodes[index].inputs), default=0)
    return counts[graph.output.node]


def _find_difference(plan: GraphPlan, grids: Sequence[Tensor]) -> str:
    """Return what names the first operation that differs in tiles from itself untiled; nothing if none does."""
    # Operands are untiled, so a difference is the operation's own: it is one from half of the digits of its dtype on.
    labelled = plan.labelled
    graph = labelled.graph
    users = Counter(value for index in labelled.order for value in set(graph.nodes[index].inputs))
    known: dict[Value, Tensor] = {}
    for index in labelled.order:
        node = graph.nodes[index]
        run_node(graph, index, known, grids)
        if index in labelled.calls:
            got = _run_operation(plan, index, known)
            if distance(got, known[Value(index)]) > math.sqrt(_eps(got)):
                return f"the first operation that differs is {node.op} in {node.path}"
        for value in set(node.inputs):
            users[value] -= 1
            if not users[value]:
                del known[value]
    return ""


def _run_operation(plan: GraphPlan, index: int, known: dict[Value, Tensor]) -> Tensor:
    """Run the first output of one operation tile by tile, on operands that are known as a whole."""
    labelled, value = plan.labelled, Value(index)
    graph, result = labelled.graph, torch.empty_like(known[value]).contiguous()
    parts: dict[int, Parts] = {}

    def read(source: Value, box: Box) -> Tensor:
        return read_box(known[source], region_of(whole_box(labelled.layouts[source])), box)

    if index in labelled.reductions:
        boxes = [(tile, own) for tile in plan.tiles if (own := summarized_boxes(labelled, index, tile))]
        each = (summarize_tile(labelled, index, own, read, tile) for tile, own in boxes)
        parts[index] = functools.reduce(labelled.reductions[index].merge, each)
    for tile in plan.tiles:
        box = plan.own_box(value, tile)
        if box is not None:
            numbers = compute(labelled, {value: box}, graph.nodes[index].inputs, read, parts)[value]
            write_box(result, labelled.layouts[value], box, numbers)
    return result
