"""Record a network, and run its graph in tiles, in memory."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from farfield.streaming import record
from farfield.streaming.check import run_tiles
from farfield.streaming.graph import Graph, Info
from farfield.streaming.labels import LabelledGraph, label_graph
from farfield.streaming.plan import StreamingPlan
from farfield.streaming.planning import count_costs, find_stored, make_plan
from farfield.streaming.spans import Box


def record_network(net: nn.Module, *shapes: Sequence[int], dtype: torch.dtype = torch.float32) -> Graph:
    """Record a network on volumes of these shapes and one dtype."""
    return record.record_network(net, [Info(tuple(shape), dtype) for shape in shapes])


class Tiled(NamedTuple):
    """A network's output in tiles.

    Attributes:
        output: The output.
        labelled: The graph with its labels.
    """

    output: Tensor
    labelled: LabelledGraph


def draw_cuts(labelled: LabelledGraph, seed: int) -> tuple[int, ...]:
    """Draw up to four nodes behind which passes end."""
    draw = random.Random(seed)
    return tuple(sorted(draw.sample(labelled.order, min(len(labelled.order), draw.randrange(5)))))


def cut_plan(plan: StreamingPlan, cuts: tuple[int, ...]) -> StreamingPlan:
    """Return a plan whose passes end behind these nodes, and store what crosses."""
    planned = make_plan(plan.labelled, plan.tile, find_stored(plan.labelled, cuts), cuts)
    return count_costs(replace(plan, passes=planned.passes, cuts=cuts))


def run_in_tiles(
    net: nn.Module,
    volume: Tensor,
    tile: Sequence[int],
    *,
    store: bool = False,
    on_disk: bool = False,
    seed: int | None = None,
) -> Tiled:
    """Record a network and run it tile by tile; a seed draws where passes end."""
    graph, size = record_network(net, volume.shape, dtype=volume.dtype), volume.shape[2:]
    tile = [min(own, length) for own, length in zip(tile, size, strict=True)]
    labelled = label_graph(graph, size, [axis for axis, own in enumerate(tile) if own < size[axis]])

    def read(index: int, box: Box) -> Tensor:
        return volume[tuple(slice(*spans[0]) for spans in box)]

    cuts = () if seed is None else draw_cuts(labelled, seed)
    plan = make_plan(labelled, tile, find_stored(labelled, cuts) if store else labelled.gathered, cuts)
    with torch.no_grad():
        return Tiled(run_tiles(replace(plan, on_disk=on_disk), read, torch.device("cpu")), labelled)
