"""The check of a prediction: on a region of the user's volume, tiles are compared with the network itself.

The region runs as if it were the volume: untiled by a copy of the network, in its own precision and in float64, and in
tiles by the recorded graph. Tiles may differ by `_ALLOWED` times what the precision of the network makes it differ.
"""

from __future__ import annotations

import functools
import itertools
import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from farfield._refusals import refusal
from farfield.nn.network_copy import copied, share_parameters
from farfield.ops.modes import without_fast_attention
from farfield.streaming.graph import Graph, Value, run_node, run_whole
from farfield.streaming.labels import last_uses, summarized_boxes
from farfield.streaming.passes import Store, TiledRun
from farfield.streaming.plan import RegionCheck, StreamingPlan, own_box
from farfield.streaming.records import Records
from farfield.streaming.rules.rule import Parts
from farfield.streaming.run import compute, summarize_tile
from farfield.streaming.spans import Box, Span, take_box, whole_box, write_box

# The distance from the untiled network that is allowed, in its own distance from float64.
_ALLOWED = 4
# How many times as far apart as in training numbers are at least where bytes are given for numbers up to 1: the root.
_FAR = 16
# What rounds in float64, in what rounds in float32.
_NARROW = torch.finfo(torch.float64).eps / torch.finfo(torch.float32).eps
# The distance of float32 from which none of its digits tells how float64 rounds.
_LOST = 0.1
# Half of the digits of float64.
_HALF = math.sqrt(torch.finfo(torch.float64).eps)
# Where the volume is looked at for a region that is not constant: shares of the free room, the middle first.
_PLACES = (0.5, 0.25, 0.75, 0.0, 1.0)
_OTHER = "it computes something else than was recorded"
# (sample, volume, box of the volume) -> its numbers
_ReadBox = Callable[[int, int, Box], Tensor]


class TilesDifferError(ValueError):
    """Tiles give another result than the network."""


def run_check(
    check: RegionCheck,
    network: nn.Module,
    finish: Callable[[Any], Tensor],
    size: Sequence[int],
    read: _ReadBox,
    samples: int = 1,
    warn: Callable[[str], object] | None = None,
    tell_seconds: Callable[[float], object] = lambda seconds: None,
) -> str:
    """Compare tiles with a copy of the network on a region; return why it was not checked; refuse a difference.

    Of several samples that run one by one, the first and the last are those of one batch for the network.
    """
    plan, apart = check.plan, sorted({0, samples - 1})
    graph, layouts = plan.labelled.graph, plan.labelled.layouts
    whole = [whole_box(layouts[value]) for value in graph.inputs]

    def read_part(sample: int, volume: int, box: Box, region: Sequence[Span]) -> Tensor:
        spans = zip(region, box[2:], strict=True)
        return read(sample, volume, (*box[:2], *(((first + a, first + b),) for (first, _), ((a, b),) in spans)))

    region, first = find_varied(plan.size, size, partial(read_part, 0, 0, whole[0]))
    each = [
        [read_part(sample, volume, box, region) if sample or volume else first for volume, box in enumerate(whole)]
        for sample in apart
    ]
    reads = [partial(read_part, sample, region=region) for sample in apart]
    noisy = not all(_is_varied(own[0]) and all(bool(grid.isfinite().all()) for grid in own[1:]) for own in each)
    if noisy:
        # Norms of what does not vary make rounding as large as the result.
        each = [[_add_noise(grid) for grid in own] for own in each]
        reads = [partial(_read_known, plan, own) for own in each]
    grids = [torch.cat(own) for own in zip(*each, strict=True)]
    try:
        want = _run_copy(network, finish, grids, None, None if noisy else warn)
    except (RuntimeError, IndexError, ValueError) as error:
        return f"the network does not run on a region of size {plan.size} ({str(error).splitlines()[0]:.80})"
    if not want.isfinite().all():
        return "the result on a region has numbers that are not finite"
    started = time.perf_counter()
    got = torch.cat([run_tiles(plan, own, want.device) for own in reads])
    if got.is_cuda:
        torch.cuda.synchronize(got.device)
    tell_seconds((time.perf_counter() - started) / len(reads))
    # Each operation in series rounds at least once: nearer, no run in another precision is needed, which is slow. Of
    # float64 none tells how far rounding goes: norms of constants leave nothing in float32, and rounding alone in it.
    near = _HALF if want.dtype == torch.float64 else _eps(want) * _count_in_series(graph)
    # What is stored in fewer bits is rounded once a pass.
    dtypes = {graph.stored_info(value).dtype for value in plan.stored if graph.stored_info(value) != graph.info(value)}
    rounding = max((torch.finfo(dtype).eps for dtype in dtypes), default=0.0)
    near = max(near, rounding * len(plan.passes))
    if distance(got, want) <= near:
        return ""
    allowed = _find_allowed(network, finish, grids, want, rounding)
    if isinstance(allowed, str):
        return allowed
    problem = "" if distance(got, want) <= allowed else _find_problem(plan, each, got, want, allowed)
    if not problem:
        return ""
    name, axes = type(network).__name__, (None,) * len(size)
    in_tiles = plan.cut and problem != _OTHER  # which the graph of the whole would compute too
    fix = f"tile={axes} without plan, which runs the volume in" if in_tiles else f"{name}(volume), itself in"
    raise refusal(
        TilesDifferError,
        f"{name} has another result in tiles than untiled, on a region of size {plan.size}: the largest difference "
        f"is {float((got.double() - want.double()).abs().max()):.3g}; {problem}; fix: {fix} one piece.",
    )


def _find_allowed(
    network: nn.Module, finish: Callable[[Any], Tensor], grids: Sequence[Tensor], want: Tensor, rounding: float
) -> float | str:
    """Return how far tiles may be from what the network gives: by its own distance in another precision, or why not."""
    # Of float64 there is no wider one: float32 rounds as often, and by so much more.
    is_wide = want.dtype == torch.float64
    dtype, share = (torch.float32, _NARROW) if is_wide else (torch.float64, 1.0)
    try:
        other = _run_copy(network, finish, grids, dtype)
    except (RuntimeError, TypeError, ValueError, NotImplementedError) as error:
        # A network of the user may take one precision alone, and refuse others by any of these.
        return f"the network does not run on a region in {dtype} ({str(error).splitlines()[0]:.80})"
    own = distance(want, other)
    if is_wide and math.isinf(own):
        return f"the result on a region has numbers that are not finite in {dtype}"
    if is_wide and own > _LOST:
        return f"the result on a region is rounding alone in {dtype}"
    # Rounding of what is stored is carried as far, and is so much coarser; that of integers is not known.
    eps = _eps(want)
    return _ALLOWED * (share * own + eps) * (max(1.0, rounding / eps) if eps else 1.0)


def _find_problem(
    plan: StreamingPlan, each: Sequence[Sequence[Tensor]], got: Tensor, want: Tensor, allowed: float
) -> str:
    """Return why tiles differ on the grids of each sample; nothing if rounding that a condition made large is why."""
    for own in each:
        if problem := _find_difference(plan, own):
            return problem
    # The same numbers through the same operations.
    known = [run_tiles(plan, partial(_read_known, plan, own), want.device) for own in each]
    if not torch.equal(got, torch.cat(known)):
        return "a part of a volume is read as other numbers than the whole"
    # Such a condition is `x > x.mean()` near the mean.
    if distance(torch.cat([run_whole(plan.labelled.graph, own) for own in each]), want) <= allowed:
        return ""
    return _OTHER


def _read_known(plan: StreamingPlan, grids: Sequence[Tensor], volume: int, box: Box) -> Tensor:
    """Read a box of a volume from what is known of all."""
    return take_box(grids[volume], plan.labelled.layouts[plan.labelled.graph.inputs[volume]], box)


def _add_noise(grid: Tensor) -> Tensor:
    """Return a grid that varies and is finite, the same each time."""
    noise = torch.rand(grid.shape, generator=torch.Generator().manual_seed(0))
    return grid.where(grid.isfinite(), 0) + noise.to(grid)


def find_varied(
    own: Sequence[int], size: Sequence[int], read: Callable[[tuple[Span, ...]], Tensor]
) -> tuple[tuple[Span, ...], Tensor]:
    """Return a region of its own size, where what is read is finite and not constant if that is found, and that."""
    for place in _PLACES:
        starts = [int(place * (length - each)) for length, each in zip(size, own, strict=True)]
        region = tuple((start, start + each) for start, each in zip(starts, own, strict=True))
        grid = read(region)
        if _is_varied(grid):
            break
    return region, grid


def _is_varied(grid: Tensor) -> bool:
    return bool((grid != grid.flatten()[0]).any() and grid.isfinite().all())


def _run_copy(
    network: nn.Module,
    finish: Callable[[Any], Tensor],
    grids: Sequence[Tensor],
    dtype: torch.dtype | None,
    warn: Callable[[str], object] | None = None,
) -> Tensor:
    """Run a copy of the network, in another precision if one is given; warn of numbers unlike those of training."""

    def convert(tensor: Tensor) -> Tensor:
        shared = share_parameters(tensor)
        return shared.detach().to(dtype) if dtype is not None and tensor.is_floating_point() else shared

    def compare(norm: Any, given: Any) -> None:
        spread = given[0].transpose(0, 1).flatten(1).var(1) / (norm.running_var + norm.eps)
        if warn is not None and (factor := float(spread.median().sqrt())) > _FAR:
            warn(
                f"predict_whole: the first batch norm gets numbers that are {factor:.0f} times as far apart as in "
                "training; fix: the volume as in training, such as volume / 255 of bytes."
            )

    with copied(network, convert, discard=True) as own, without_fast_attention():
        norms = (each for each in own.modules() if isinstance(each, _BatchNorm) and each.num_batches_tracked)
        for norm in itertools.islice(norms, 1):
            norm.register_forward_pre_hook(compare)
        return finish(own(*(grid.clone() if dtype is None else grid.to(dtype) for grid in grids)))


def run_tiles(plan: StreamingPlan, read_volume: Callable[[int, Box], Tensor], device: torch.device) -> Tensor:
    """Run all passes on one sample, one tile after the other, and return the output."""
    records = list[Records]()
    result = torch.empty(plan.output_shape, dtype=plan.output_dtype, device=device)

    layout = plan.labelled.layouts[plan.labelled.graph.output]
    run = TiledRun(
        plan,
        Store(plan),
        lambda sample, volume, index, box: read_volume(volume, box),
        lambda sample, box, numbers: None if numbers is None else write_box(result, layout, box, numbers),
        lambda number: records[number].read()["parts"],
    )
    for each in run.passes:
        records.append(Records(each.tiles, each.merge))
        for index in range(each.tiles):
            records[-1].add(index, each.run_tile(index))
    run.close()
    return result


def distance(one: Tensor, other: Tensor) -> float:
    """Return the largest difference of two results, relative to the largest number of the second."""
    finite = other.isfinite()
    if one.shape != other.shape or not torch.equal(one.isfinite(), finite):
        return math.inf
    one, other = (each[finite].to(torch.promote_types(each.dtype, torch.float64)) for each in (one, other))
    if not len(other) or torch.equal(one, other):
        return 0.0
    return float((one - other).abs().max() / other.abs().max().clamp(min=torch.finfo(torch.float64).tiny))


def _eps(result: Tensor) -> float:
    """Return how far rounding of one operation moves numbers of a dtype; integers are not moved."""
    return torch.finfo(result.dtype).eps if result.is_floating_point() or result.is_complex() else 0.0


def _count_in_series(graph: Graph) -> int:
    """Return the number of operations on the longest way to the output."""
    counts: dict[int, int] = {}
    for index in graph.needed():
        counts[index] = 1 + max((counts[value.node] for value in graph.nodes[index].inputs), default=0)
    return counts[graph.output.node]


def _find_difference(plan: StreamingPlan, grids: Sequence[Tensor]) -> str:
    """Return what names the first operation that differs in tiles from itself untiled; nothing if none does."""
    # Operands are untiled, so a difference is the operation's own: it is one from half of the digits of its dtype on.
    labelled = plan.labelled
    graph = labelled.graph
    freed, known = last_uses(graph, list(map(Value, labelled.order)), (), ()), dict[Value, Tensor]()
    for index in labelled.order:
        node = graph.nodes[index]
        run_node(graph, index, known, grids)
        if index in labelled.calls and index not in labelled.scans and Value(index) not in labelled.kept:
            got = _run_operation(plan, index, known)
            if distance(got, known[Value(index)]) > math.sqrt(_eps(got)):
                return f"the first operation that differs is {node.op} in {node.path}"
        for value in freed[Value(index)]:
            del known[value]
    return ""


def _run_operation(plan: StreamingPlan, index: int, known: dict[Value, Tensor]) -> Tensor:
    """Run the first output of one operation tile by tile, on operands that are known as a whole."""
    labelled, value = plan.labelled, Value(index)
    graph, result = labelled.graph, torch.empty_like(known[value]).contiguous()
    parts: dict[int, Parts] = {}

    def read(source: Value, box: Box) -> Tensor:
        return take_box(known[source], labelled.layouts[source], box)

    if index in labelled.reductions:
        boxes = [(tile, own) for tile in plan.cores if (own := summarized_boxes(labelled, index, tile))]
        each = (summarize_tile(labelled, index, own, read, tile) for tile, own in boxes)
        parts[index] = functools.reduce(labelled.reductions[index].merge, each)
    for tile in plan.cores:
        box = own_box(plan, value, tile)
        if box is not None:
            numbers = compute(labelled, {value: box}, graph.nodes[index].inputs, read, parts)[value]
            write_box(result, labelled.layouts[value], box, numbers)
    return result
