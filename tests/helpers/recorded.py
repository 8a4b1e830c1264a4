"""Record a network, and run its graph in tiles, in memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from farfield.streaming import record
from farfield.streaming.check import run_tiles
from farfield.streaming.graph import Graph, Info
from farfield.streaming.labels import LabelledGraph, label_graph
from farfield.streaming.planning import find_stored, make_plan
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


def run_in_tiles(
    net: nn.Module, volume: Tensor, tile: Sequence[int], *, store: bool = False, on_disk: bool = False
) -> Tiled:
    """Record a network and run it tile by tile."""
    graph, size = record_network(net, volume.shape, dtype=volume.dtype), volume.shape[2:]
    tile = [min(own, length) for own, length in zip(tile, size, strict=True)]
    labelled = label_graph(graph, size, [axis for axis, own in enumerate(tile) if own < size[axis]])

    def read(index: int, box: Box) -> Tensor:
        return volume[tuple(slice(*spans[0]) for spans in box)]

    plan = make_plan(labelled, tile, find_stored(labelled) if store else labelled.gathered)
    with torch.no_grad():
        return Tiled(run_tiles(plan, read, torch.device("cpu"), on_disk=on_disk), labelled)
