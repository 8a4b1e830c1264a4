"""Make the plan of a prediction in tiles from a recorded network."""

from __future__ import annotations

import functools
import math
import shutil
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple, cast

import torch
from torch import nn

from farfield._checks import ShapeError, unknown
from farfield._fingerprint import fingerprint
from farfield.nn import GridAttention
from farfield.nn.devices import device_of, free_bytes
from farfield.nn.network_copy import copied, make_empty
from farfield.nn.tracing import without_numbers
from farfield.streaming.adapt import (
    Outputs,
    Reduction,
    ReductionError,
    check_arguments,
    check_reduction,
    parse_layouts,
)
from farfield.streaming.arguments import Tiles, refuse_axes, refuse_training, spatial_dims_of, split_padding
from farfield.streaming.flips import MeanOverFlips, check_axes, symmetric
from farfield.streaming.geometry import AxisScale, Halo, cut_axes, round_up
from farfield.streaming.labels import GraphError, LabelledGraph, label_graph
from farfield.streaming.operations import Graph, Value
from farfield.streaming.patches import PatchPlan, attention_only, check_same, patch_size, peak_bytes, see_tiles
from farfield.streaming.plan import GraphPlan, find_stored, fit_stored, make_graph_plan
from farfield.streaming.recordings import Recordings
from farfield.streaming.resume import Saved
from farfield.streaming.scales import Scales, cuttable, find_scales, scales_of
from farfield.streaming.spans import axes_of
from farfield.streaming.streaming_plan import PlannedOutput, PlannedPass, StreamingPlan
from farfield.streaming.summaries import SUMMARY_SHARE, has_grid_summary, summary_bytes
from farfield.volumes.source import MODES

# The share of the free memory that tiles and stored values may take, each; and of the free disk, stored values.
MEMORY_SHARE, DISK_SHARE = 0.25, 0.5


def make_plan(
    caller: str,
    model: nn.Module,
    shapes: Sequence[Sequence[int]],
    tiles: Tiles,
    pad: str | None,
    reduce: Reduction,
    path: Path | None,
    saved: Saved | None,
) -> StreamingPlan:
    """Make the plan of `predict_whole`, for `predict_whole` or `plan_whole`; errors name the caller.

    Raises:
        GraphError: If an operation of the network cannot run in tiles.
    """
    network = model.network if isinstance(model, MeanOverFlips) else model
    refuse_training(caller, network)
    if pad is not None and pad not in MODES:
        raise unknown(caller, "pad", pad, MODES)
    check_reduction(caller, reduce)
    check_arguments(caller, network, len(shapes))
    layouts = parse_layouts(caller, shapes, spatial_dims_of(caller, network, tiles.size))
    pairs = [layout.batch_and_channels(shape) for layout, shape in zip(layouts, shapes, strict=True)]
    batch, channels = pairs[0][0], tuple(own for _, own in pairs)
    own = tuple(shapes[0][len(shapes[0]) - layouts[0].spatial_dims :])
    if isinstance(model, MeanOverFlips):
        check_axes(caller, model, len(own))
    recordings = Recordings(caller, model, channels, reduce, Outputs())
    reach = None if tiles.halo is None else given_halo(caller, tiles.halo, len(own))
    padding, padded = ((0, 0),) * len(own), Scales()
    if pad is not None:
        strides, padded = recordings.strides(own, reach)
        padding = tuple(split_padding(length, stride, pad) for length, stride in zip(own, strides, strict=True))
    size = tuple(length + sum(positions) for length, positions in zip(own, padding, strict=True))
    mixed = batch > 1 and recordings.mixes_samples(size)
    graph = record_or_raise(recordings, batch if mixed else 1, size, reach)
    scales, strides = scales_of(graph, size, reach)
    chosen = None if saved is None else plan_saved(graph, size, strides, tiles, reach, saved)
    plan, on_disk = chosen or choose_tiles(caller, network, graph, size, strides, tiles, reach, path)
    refuse_large_summaries(caller, plan.labelled, network)
    costs = [plan.cost(stage) for stage in range(len(plan.stages))]
    samples, patches = 1 if mixed else batch, None
    if tiles.statistics == "tile" and plan.cut:
        patches = plan_patches(recordings, plan, batch if mixed else 1, strides, reach)
        plan = patches.whole
        macs = sum(patches.patch.nodes[index].macs for index in patches.patch.needed())
        costs = patches.costs(macs, peak_bytes(patches.patch))
    return StreamingPlan(
        layout=layouts[0],
        channels=channels,
        size=size,
        padding=padding,
        pad=pad,
        tile=tuple(stop - start for start, stop in plan.tiles[0]),
        samples=samples,
        passes=tuple(
            PlannedPass(
                tuple(dict.fromkeys(graph.nodes[index].path for index in each.reductions)),
                tuple(dict.fromkeys(graph.nodes[value.node].path for value in each.writes)),
                cost.halo,
                cost.macs,
                cost.bytes,
            )
            for each, cost in zip(plan.stages, costs, strict=True)
        ),
        output=plan_output(caller, network, plan, scales.get(graph.output, {}) | padded, padding, samples),
        outputs=recordings.outputs,
        macs=samples * sum(graph.nodes[index].macs for index in plan.labelled.order),
        on_disk=on_disk and bool(plan.stored),
        stored_bytes=plan.bytes_stored,
        graph=graph,
        stored=tuple(plan.stored),
        halo=reach,
        reduction=fingerprint(reduce),
        patch=None if patches is None else patches.patch,
        patch_size=() if patches is None else patches.size,
        patch_halo=Halo((), ()) if patches is None else patches.halo,
        bound=plan,
        patches=patches,
    )


def plan_patches(
    recordings: Recordings,
    plan: GraphPlan,
    batch: int,
    strides: tuple[int, ...],
    reach: tuple[int, ...] | None,
) -> PatchPlan:
    """Plan how the network runs on patches, so that norms, means and pooling see what a tile reads.

    Raises:
        GraphError: If it cannot.
        ValueError: If the network does not take a grid of the size of a patch.
    """
    flips, labelled = recordings.network, plan.labelled
    tile = tuple(stop - start for start, stop in plan.tiles[0])
    if isinstance(flips, MeanOverFlips):
        graph = replace(recordings, network=flips.network).at(batch, labelled.size)
        labelled = label_graph(graph, labelled.size, labelled.cut, halo=reach)
    whole = attention_only(make_graph_plan(see_tiles(labelled), tile, []))
    halo = functools.reduce(Halo.join, (whole.cost(stage).halo for stage in range(len(whole.stages))))
    if isinstance(flips, MeanOverFlips):
        if len(whole.stages) > 1:
            raise GraphError('attention of flips sees the whole volume, and statistics="tile" what a tile reads of it')
        halo = symmetric(halo, flips.axes)
    size, halo = patch_size(labelled.size, tile, halo, strides)
    try:
        patch = recordings.at(batch, size)
    except GraphError:
        raise
    except ValueError as error:
        raise ValueError(
            f'{error}\n  fix: Tiles(…, statistics="whole"), as the network takes no patch of the volume.'
        ) from error
    if not isinstance(flips, MeanOverFlips):
        check_same(labelled.graph, patch)
    return PatchPlan(whole, patch, size, halo, find_scales(labelled))


def given_halo(caller: str, halo: int | Sequence[int], spatial_dims: int) -> tuple[int, ...]:
    """Return the halo that the user gives, per spatial dim.

    Raises:
        ShapeError: If it has another number of entries than spatial dims.
    """
    requested = (halo,) * spatial_dims if isinstance(halo, int) else tuple(halo)
    if len(requested) != spatial_dims:
        raise ShapeError(
            f"{caller}: halo must be one number, or one for each of {spatial_dims} spatial dims, got {halo!r}; fix: "
            f"halo={max(requested, default=0)}."
        )
    return requested


def record_or_raise(recordings: Recordings, batch: int, size: tuple[int, ...], halo: Sequence[int] | None) -> Graph:
    """Record the network on the whole volume.

    Raises:
        ValueError: If it does not take its size; the text has sizes that it takes if the strides are why.
    """
    caller, network = recordings.caller, recordings.network
    network = network.network if isinstance(network, MeanOverFlips) else network
    try:
        return recordings.at(batch, size)
    except (GraphError, ReductionError):
        raise
    except ValueError as error:
        refuse_axes(caller, network, recordings.channels, size, error)
        strides, _ = recordings.strides(size, halo)
        if any(length % multiple for length, multiple in zip(size, strides, strict=True)):
            multiples = " × ".join(map(str, strides))
            raise ValueError(f'{error}\n  fix: a size that {multiples} divides, or pad="reflect".') from error
        raise


def plan_output(
    caller: str,
    network: nn.Module,
    plan: GraphPlan,
    scales: Scales,
    padding: Sequence[tuple[int, int]],
    samples: int,
) -> PlannedOutput:
    """Return what is known of the output.

    Raises:
        GraphError: If its axes are not those of the volume.
        ShapeError: If nothing of it is left without the padding.
    """
    labelled, size = plan.labelled, plan.labelled.size
    info, layout = labelled.graph.info(labelled.graph.output), labelled.layouts[labelled.graph.output]
    if axes_of(layout[:2]) or any(len(dim) > 1 for dim in layout):
        raise GraphError("the axes of its output are not those of the volume")
    there = {dim[0].axis: place for place, dim in enumerate(layout) if dim[0].axis is not None}
    along: list[AxisScale | None] = []
    for axis, length in enumerate(size):
        same = (axis not in labelled.cut or axis in scales) and axis + 2 < len(layout)
        place = there.get(axis, axis + 2 if same else None)
        if place is None:
            along.append(None)
            continue
        known = 1 / scales[axis] if axis in scales else Fraction(info.shape[place], length).limit_denominator(64)
        along.append(AxisScale(place, known))
    kept = [(0, length) for length in info.shape[2:]]
    for scale, (before, after) in zip(along, padding, strict=True):
        if scale is not None:
            length = info.shape[scale.axis]
            kept[scale.axis - 2] = int(before * scale.ratio), length - int(after * scale.ratio)
    if any(start >= stop for start, stop in kept):
        raise ShapeError(
            f"{caller}: the network returns {info.shape[2:]} for size {size}, nothing of which is left without the "
            f"{tuple(padding)} padded positions; fix: a larger volume, or one that needs no padding."
        )
    box = labelled.core(layout, plan.tiles[0])
    written = tuple(stop - start for dim in box[2:] for start, stop in dim)
    shape = (info.shape[0] * samples, *info.shape[1:])
    return PlannedOutput(shape, info.dtype, tuple(along), tuple(kept), written)


# ---- tiles -----------------------------------------------------------------------------------------------------------
class Budget(NamedTuple):
    """What tiles and stored values may take.

    Attributes:
        tile: Bytes of memory for the values of a tile.
        stored: Bytes for stored values.
        on_disk: Whether these are bytes of disk.
    """

    tile: int
    stored: int
    on_disk: bool


def choose_tiles(
    caller: str,
    network: nn.Module,
    graph: Graph,
    size: tuple[int, ...],
    strides: tuple[int, ...],
    tiles: Tiles,
    reach: tuple[int, ...] | None,
    path: Path | None,
) -> tuple[GraphPlan, bool]:
    """Choose the size of tiles and the values that are stored; return the plan, and whether they are on disk."""
    given = given_tile(tiles.size, size, strides)
    memory = int(MEMORY_SHARE * free_bytes(device_of(network))) if tiles.memory is None else tiles.memory
    if given is None:
        whole = make_graph_plan(label_graph(graph, size, []), size, [])
        if whole.cost(0).bytes <= memory:
            return whole, False
    axes = cuttable(graph, size, reach) if given is None else cut_axes(size, given)
    labelled = label_graph(graph, size, axes, halo=reach)
    budget = choose_budget(caller, labelled, tiles, memory, path)

    def plan_tile(tile: Sequence[int]) -> GraphPlan:
        return make_graph_plan(labelled, tile, fit_stored(labelled, tile, budget.stored))

    if given is not None:
        return plan_tile(given), budget.on_disk
    multiple = math.lcm(*(strides[axis] for axis in axes))
    few, many = 1, max(-(-size[axis] // multiple) for axis in axes) if axes else 1
    best = None
    while few <= many:
        middle = (few + many) // 2
        edges = tuple(min(length, middle * multiple) if axis in axes else length for axis, length in enumerate(size))
        plan = plan_tile(edges)
        if max(plan.cost(stage).bytes for stage in range(len(plan.stages))) <= budget.tile:
            best, few = plan, middle + 1
        else:
            smallest, many = plan, middle - 1
    return best or smallest, budget.on_disk


def plan_saved(
    graph: Graph,
    size: tuple[int, ...],
    strides: tuple[int, ...],
    tiles: Tiles,
    reach: tuple[int, ...] | None,
    saved: Saved,
) -> tuple[GraphPlan, bool] | None:
    """Return the plan of an unfinished prediction, and whether it stores on disk, whatever memory and disk are free.

    None where the call is for something else.
    """
    # An explicit number of bytes on disk determines by itself what is stored.
    is_explicit = tiles.disk is not None and (saved.on_disk or tiles.disk > 0)
    given = saved.tile if tiles.size is None else given_tile(tiles.size, size, strides)
    if is_explicit or given != saved.tile or len(given) != len(size):
        return None
    try:
        labelled = label_graph(graph, size, cut_axes(size, saved.tile), halo=reach)
    except GraphError:
        return None
    stored = {*labelled.gathered, *(Value(*each) for each in saved.stored)}
    if not stored <= find_stored(labelled):
        return None
    return make_graph_plan(labelled, saved.tile, stored), saved.on_disk


def given_tile(
    tile: int | Sequence[int | None] | None, size: tuple[int, ...], strides: tuple[int, ...]
) -> tuple[int, ...] | None:
    """Return the size of the requested tiles, rounded up to multiples of the strides; None if none is requested."""
    if tile is None:
        return None
    requested = (tile,) * len(size) if isinstance(tile, int) else tuple(tile)
    return tuple(
        length if own is None else min(length, round_up(own, stride))
        for own, length, stride in zip(requested, size, strides, strict=True)
    )


def choose_budget(caller: str, labelled: LabelledGraph, tiles: Tiles, memory: int, path: Path | None) -> Budget:
    """Return what may be stored, and where: on disk where that is allowed, if it has as much room as memory.

    Raises:
        ValueError: If what must be stored does not fit.
    """
    graph = labelled.graph
    wanted = sum(graph.info(value).bytes for value in find_stored(labelled))
    budget = Budget(memory // 2, memory // 2, False) if wanted else Budget(memory, 0, False)
    if tiles.disk:
        budget = Budget(memory, tiles.disk, True)
    elif wanted and path is not None and tiles.disk is None:
        # On disk a value outlives a process that is killed.
        room = int(DISK_SHARE * shutil.disk_usage(path.absolute().parent).free)
        if room >= min(wanted, memory // 2):
            budget = Budget(memory, room, True)
    least = sum(graph.info(value).bytes for value in labelled.gathered)
    if least > budget.stored:
        names = ", ".join(dict.fromkeys(graph.nodes[value.node].path for value in labelled.gathered))
        where = "disk" if budget.on_disk else "memory"
        raise ValueError(
            f"{caller}: {names} needs all positions for each of its own, which are {least:,} bytes to store, and may "
            f"take {budget.stored:,} bytes of {where}; fix: tile=Tiles(…, disk={least}), or attention that compresses, "
            "such as factorized_gaussian."
        )
    return budget


def refuse_large_summaries(caller: str, labelled: LabelledGraph, network: nn.Module) -> None:
    """Refuse an attention whose summary has a slot for each key, if that takes too much of the free memory.

    Raises:
        ValueError: If a summary takes more than SUMMARY_SHARE of it.
    """
    free = free_bytes(device_of(network))
    for index in labelled.reductions:
        node = labelled.graph.nodes[index]
        module = node.args[0].module if node.op == "layer" else None
        if not isinstance(module, GridAttention) or not has_grid_summary(module):
            continue
        info = labelled.graph.info(node.inputs[0])
        with without_numbers(), copied(module, make_empty, discard=True) as fake:
            grid = torch.empty(info.shape, dtype=info.dtype, device="cpu")
            size = summary_bytes(cast(GridAttention, fake).summarize(grid), None)
        if size > SUMMARY_SHARE * free:
            raise ValueError(
                f"{caller}: the summary of {module.operator_name} at {node.path} is its grid, {size:,} bytes, and may "
                f"take half of the {free:,} bytes that are free; fix: an operator that compresses, such as "
                "factorized_gaussian."
            )
