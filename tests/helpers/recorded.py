"""Record a network, and run its graph in tiles, in memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from farfield.streaming import record
from farfield.streaming.graph import Graph, Info, Value
from farfield.streaming.labels import LabelledGraph, label_graph
from farfield.streaming.passes import Store, run_in_memory
from farfield.streaming.plan import StreamingPlan
from farfield.streaming.planning import find_stored, make_plan
from farfield.streaming.spans import Box, write_box


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


def execute(plan: StreamingPlan, read_volume: Callable[[Value, Box], Tensor], on_disk: bool = False) -> Tensor:
    """Run all passes, and return the output.

    Args:
        plan: The plan.
        read_volume: Reads a box of a volume.
        on_disk: Whether stored values are in temporary files, or in memory.
    """
    graph, info = plan.labelled.graph, plan.labelled.graph.info(plan.labelled.graph.output)
    result = torch.empty(info.shape, dtype=info.dtype)

    def read(sample: int, volume: int, index: int, box: Box) -> Tensor:
        return read_volume(graph.inputs[volume], box)

    def write(sample: int, box: Box, numbers: Tensor) -> None:
        write_box(result, plan.labelled.layouts[graph.output], box, numbers)

    store = Store(plan, on_disk, None, torch.device("cpu"))
    run_in_memory(plan, store, read, write)
    return result


def run_in_tiles(
    net: nn.Module, volume: Tensor, tile: Sequence[int], *, store: bool = False, on_disk: bool = False
) -> Tiled:
    """Record a network and run it tile by tile."""
    graph, size = record_network(net, volume.shape, dtype=volume.dtype), volume.shape[2:]
    tile = [min(own, length) for own, length in zip(tile, size, strict=True)]
    labelled = label_graph(graph, size, [axis for axis, own in enumerate(tile) if own < size[axis]])

    def read(value: Value, box: Box) -> Tensor:
        if value not in graph.inputs:
            raise LookupError(f"{value} is no volume")
        return volume[tuple(slice(*spans[0]) for spans in box)]

    plan = make_plan(labelled, tile, find_stored(labelled) if store else labelled.gathered)
    with torch.no_grad():
        return Tiled(execute(plan, read, on_disk), labelled)
