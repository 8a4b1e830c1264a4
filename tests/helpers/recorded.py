"""Record a network, and run its graph in tiles, in memory."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from farfield.streaming.execute import execute
from farfield.streaming.labels import LabelledGraph, label_graph
from farfield.streaming.layers import layers_recorded
from farfield.streaming.operations import Graph, Value
from farfield.streaming.plan import make_graph_plan
from farfield.streaming.record import Recorder, iterate_modules, record_graph
from farfield.streaming.spans import Box


def record_network(net: nn.Module, *shapes: Sequence[int], dtype: torch.dtype = torch.float32) -> Graph:
    """Record a network on volumes of these shapes, by a copy whose tensors are fake."""
    mode, fakes, names, reals = FakeTensorMode(allow_non_fake_inputs=True), {}, {}, {}
    for name, tensor in [*net.named_parameters(remove_duplicate=False), *net.named_buffers(remove_duplicate=False)]:
        if id(tensor) in fakes:
            continue
        fake = mode.from_tensor(tensor.detach())
        fakes[id(tensor)] = nn.Parameter(fake, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else fake
        names[id(fakes[id(tensor)])], reals[name] = name, tensor.detach()
    duplicate = copy.deepcopy(net, fakes)

    def run(recorder: Recorder, *given: Tensor) -> Tensor:
        for path, module in iterate_modules(duplicate):
            module.register_forward_pre_hook(lambda *_, path=path: recorder.running.append(path))
            module.register_forward_hook(lambda *_: (recorder.running.pop(), None)[1])
        with layers_recorded(recorder, duplicate, net):
            return duplicate(*given)

    with mode:
        volumes = [torch.empty(tuple(shape), dtype=dtype) for shape in shapes]
        return record_graph(run, volumes, names, reals)


class Tiled(NamedTuple):
    """A network's output in tiles.

    Attributes:
        output: The output.
        labelled: The graph with its labels.
    """

    output: Tensor
    labelled: LabelledGraph


def run_in_tiles(net: nn.Module, volume: Tensor, tile: Sequence[int], *, store: bool = False) -> Tiled:
    """Record a network and run it tile by tile."""
    graph, size = record_network(net, volume.shape, dtype=volume.dtype), volume.shape[2:]
    tile = [min(own, length) for own, length in zip(tile, size, strict=True)]
    labelled = label_graph(graph, size, [axis for axis, own in enumerate(tile) if own < size[axis]])

    def read(value: Value, box: Box) -> Tensor:
        if value not in graph.inputs:
            raise LookupError(f"{value} is no volume")
        return volume[tuple(slice(*spans[0]) for spans in box)]

    with torch.no_grad():
        return Tiled(execute(make_graph_plan(labelled, tile, store=store), read), labelled)
