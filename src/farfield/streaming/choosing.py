"""Choose the size of tiles, where passes end and what they store, by the memory and the disk that they may take."""

from __future__ import annotations

import math
import shutil
import sys
from bisect import bisect
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from farfield._refusals import refusal
from farfield.nn.devices import free_bytes
from farfield.streaming.arguments import Tiles, cut_axes, refuse_large_summary
from farfield.streaming.cuts import Stretch, choose_cuts, estimate_seconds, find_stretches
from farfield.streaming.graph import Value
from farfield.streaming.labels import GraphError, LabelledGraph
from farfield.streaming.places import RecordedNetwork
from farfield.streaming.plan import StreamingPlan, count_stored
from farfield.streaming.planning import count_costs, find_stored, fit_stored, make_plan

# The share of the free memory that tiles and stored values may take, each; and of the free disk, stored values.
_MEMORY_SHARE, _DISK_SHARE = 0.25, 0.5
# How many times the MACs that stored values would save are worth a word.
_MUCH = 1.15


def plan_saved(
    recorded: RecordedNetwork, tiles: Tiles, given: tuple[int, ...] | None, saved: Mapping[str, Any] | None
) -> StreamingPlan | None:
    """Return the plan of an unfinished prediction, if the call is for it, whatever memory and disk are free."""
    if saved is None or len(saved["positions"]) != len(recorded.size):
        return None
    tile = tuple(saved["positions"])
    # An explicit number of bytes on disk determines by itself what is stored.
    is_explicit = tiles.disk is not None and (saved["on_disk"] or tiles.disk > 0)
    if is_explicit or (given or tile) != tile:
        return None
    try:
        labelled = recorded.label(cut_axes(recorded.size, tile))
    except GraphError:
        return None
    cuts = tuple(saved["cuts"])
    stored = {*labelled.gathered, *(Value(*each) for each in saved["stored"])}
    if not {*cuts} <= {*labelled.order} or not stored <= find_stored(labelled, cuts):
        return None
    plan = count_costs(make_plan(labelled, tile, stored, cuts))
    return replace(plan, on_disk=saved["on_disk"], threads=saved["threads"])


def choose_plan(
    recorded: RecordedNetwork, tiles: Tiles, given: tuple[int, ...] | None, device: torch.device, path: Path | None
) -> StreamingPlan:
    """Choose the size of tiles, the ends of passes and the values that are stored."""
    size, memory = recorded.size, _find_memory(tiles, device)
    if given is None and (whole := count_costs(make_plan(recorded.label([]), size, []))).tile_bytes <= memory:
        return whole
    axes = recorded.cuttable if given is None else cut_axes(size, given)
    labelled = recorded.label(axes)
    # Patches store nothing, and have no ends but those of attention.
    is_whole = tiles.statistics == "whole"
    wanted = sum(labelled.graph.stored_info(value).bytes for value in find_stored(labelled))
    room = _find_room(wanted, memory, tiles.disk, path)
    _refuse_gathered(labelled, memory // 2 if room is None else room, room is not None)

    def plan_tiles(count: int, allowed: int) -> StreamingPlan:
        edges = tuple(count * multiple if axis in axes else length for axis, length in enumerate(size))
        tile = given or edges
        return choose_ends(labelled, tile, allowed, find_stretches(labelled, tile) if axes and is_whole else [])

    multiple = math.lcm(*(recorded.strides[axis] for axis in axes))
    most = 1 if given else max((-(-size[axis] // multiple) for axis in axes), default=1)
    # Bytes of a tile, and of what is stored. In memory they share it; where nothing is summed, it may be all a tile's.
    budgets = [(memory, room)] if room is not None else [(memory - memory // 2, memory // 2)]
    if room is None and not wanted and not given:
        budgets.append((memory, 0))
    plans = []
    for of_tile, allowed in budgets:

        def is_large(count: int, of_tile: int = of_tile, allowed: int = allowed) -> bool:
            return (tiles.workers or 1) * plan_tiles(count, allowed).tile_bytes > of_tile

        # The largest number of multiples that fits; one where none does.
        count = bisect(range(1, most + 1), False, key=is_large) if most > 1 else 1
        plans.append(plan_tiles(max(1, count), allowed))
    plan = min(plans, key=estimate_seconds)
    better = _find_better(plan) if is_whole else None
    return replace(plan, on_disk=room is not None and bool(plan.stored), with_disk=better)


def choose_workers(plan: StreamingPlan, tiles: Tiles, device: torch.device) -> int:
    """Return how many tiles run at once: where each has one thread of torch, as many as that has and memory allows."""
    if tiles.workers or plan.threads != 1 or device.type != "cpu" or plan.labelled.scans:
        return tiles.workers or 1
    room = _find_memory(tiles, device) - (0 if plan.on_disk else plan.stored_bytes)
    return max(1, min(torch.get_num_threads(), room // max(1, plan.tile_bytes), len(plan.cores)))


def _find_memory(tiles: Tiles, device: torch.device) -> int:
    return int(_MEMORY_SHARE * free_bytes(device)) if tiles.memory is None else tiles.memory


def _find_better(plan: StreamingPlan) -> tuple[int, float] | None:
    """Return the bytes with which tiles compute much less again, and how often the network's MACs that is."""
    if plan.recomputed < _MUCH:
        return None
    better = choose_ends(plan.labelled, plan.tile, sys.maxsize, find_stretches(plan.labelled, plan.tile))
    return (better.stored_bytes, better.recomputed) if plan.recomputed > _MUCH * better.recomputed else None


def choose_ends(
    labelled: LabelledGraph,
    tile: Sequence[int],
    allowed: float,
    stretches: Sequence[Stretch],
    *,
    prices: int = 1,
    keeps_all: bool = False,
) -> StreamingPlan:
    """Return the plan whose ends of passes cost least; of what crosses them, what fits in so many bytes is stored.

    While it does not fit, the price of what is stored is doubled, for fewer ends, and at the last of so many prices
    what saves least is left out. Bytes are those at once, or, of who `keeps_all`, those of all passes.
    """
    for price in range(prices):
        cuts = choose_cuts(labelled, [each._replace(stored=2**price * each.stored) for each in stretches])
        plan = make_plan(labelled, tile, find_stored(labelled, cuts), cuts)
        if count_stored(labelled, plan.passes, keeps_all=keeps_all) <= allowed:
            return count_costs(plan)
    return count_costs(make_plan(labelled, tile, fit_stored(labelled, allowed, cuts, keeps_all=keeps_all), cuts))


def _find_room(wanted: int, memory: int, disk: int | None, path: Path | None) -> int | None:
    """Return the bytes of disk that stored values may take; None if they are in memory."""
    if disk is not None or path is None:
        return disk or None
    # On disk a value outlives a process that is killed.
    room = int(_DISK_SHARE * shutil.disk_usage(path.absolute().parent).free)
    return room if room >= min(wanted or memory // 2, memory // 2) else None


def _refuse_gathered(labelled: LabelledGraph, allowed: int, on_disk: bool) -> None:
    """Refuse operations that need all positions for each of their own, where these cannot be stored."""
    graph = labelled.graph
    least = sum(graph.stored_info(value).bytes for value in labelled.gathered)
    if least > allowed:
        names = ", ".join(dict.fromkeys(graph.nodes[value.node].path for value in labelled.gathered))
        where = "disk" if on_disk else "memory"
        raise refusal(
            ValueError,
            f"{names} needs all positions for each of its own, which are {least:,} bytes to store, "
            f"and may take {allowed:,} bytes of {where}; fix: tile=Tiles(…, disk={least}), or attention that "
            "compresses, such as factorized_gaussian.",
        )


def refuse_large_summaries(labelled: LabelledGraph, device: torch.device) -> None:
    """Refuse layers whose summary takes too much of the free memory."""
    free = free_bytes(device)
    for node in (labelled.graph.nodes[index] for index in labelled.reductions):
        if node.op == "layer" and node.args[0].summary_bytes:
            name = f"the summary of {node.args[0].module.operator_name} at {node.path}"
            refuse_large_summary(name, node.args[0].summary_bytes, free)
