"""A network of which a pass runs a part: from the volume and stored grids to what the pass wants, on any region."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from farfield.nn.tracing import LiveBytes, without_numbers
from farfield.streaming.geometry import NetworkGrid
from farfield.streaming.graph import (
    INPUT,
    Graph,
    Length,
    Respond,
    UntraceableError,
    Value,
    evaluate,
    replace_leaves,
)
from farfield.streaming.graph_recording import record_any_size
from farfield.streaming.replacement import GlobalLayer
from farfield.streaming.trace import device_of, dtype_of
from farfield.volumes.source import Region

# Graphs are recorded at sizes of this many multiples of the strides, on which every layer has inner positions.
RECORDED = 64
# Graphs of regions that are kept: most tiles have the same size. Each takes a tenth of a mebibyte.
KEPT = 16


class NetworkPart(NamedTuple):
    """The part of a network that a pass runs.

    Attributes:
        wanted: The grids that it computes: indices of steps.
        reads: The stored grids that it starts from: indices of steps.
        volume: Whether it reads the volume.
    """

    wanted: tuple[int, ...]
    reads: tuple[int, ...]
    volume: bool

    @property
    def sources(self) -> tuple[int | None, ...]:
        """What it reads: steps, and None for the volume."""
        return (*self.reads, *([None] if self.volume else []))


class PartialNetwork:
    """Runs parts of a network on regions of a volume.

    Args:
        caller: The function that errors name.
        model: The network.
        leading: Batch and channels of the volume.
        multiple: Multiple of the strides, per axis.
        grids: The network's grids, for the whole volume.
    """

    def __init__(
        self,
        caller: str,
        model: nn.Module,
        leading: tuple[int, int],
        multiple: Sequence[int],
        grids: Sequence[NetworkGrid],
    ) -> None:
        self.caller, self.model, self.leading, self.multiple, self.grids = caller, model, leading, multiple, grids
        self.device, self.dtype = device_of(model), dtype_of(model)
        self.recorded: dict[tuple[int, ...], Graph] = {}
        self.sized: dict[tuple[tuple[int, ...], tuple[int, ...]], Graph] = {}

    def graph(self, remainders: tuple[int, ...]) -> Graph:
        """Return the graph for grids with these lengths modulo the multiple of the strides, of any size."""
        if remainders not in self.recorded:
            size = tuple(rest + RECORDED * each for rest, each in zip(remainders, self.multiple, strict=True))
            graph = record_any_size(self.caller, self.model, self.leading, size, self.multiple)
            if len(graph.steps) != len(self.grids):
                raise UntraceableError("it runs other layers at another size")
            if any(graph.nodes[call].args[1] is not None for call in graph.calls):
                raise UntraceableError("an attention in it has a mask")
            self.recorded[remainders] = graph
        return self.recorded[remainders]

    def graph_at(self, region: Region, whole: Sequence[int]) -> Graph:
        """Return the graph for a region of a volume of size `whole`: at the volume's end with the volume's remainder.

        A part of the network with smaller strides than the whole network reads regions that are multiples of those.
        """
        size = tuple(stop - start for start, stop in region)
        remainders = tuple(
            length % multiple if stop == length else 0
            for (_, stop), length, multiple in zip(region, whole, self.multiple, strict=True)
        )
        if (remainders, size) not in self.sized:
            if len(self.sized) == KEPT:
                del self.sized[next(iter(self.sized))]
            self.sized[remainders, size] = self.graph(remainders).at(size)
        return self.sized[remainders, size]

    def strides(self, remainders: tuple[int, ...], order: Sequence[int], values: Collection[Value]) -> tuple[int, ...]:
        """Return for each axis the least common multiple of the strides of some nodes and values of a graph."""
        graph = self.graph(remainders)
        lengths: list[Length] = []
        for node in [graph.nodes[index] for index in order]:
            replace_leaves((node.args, node.kwargs, [info.shape for info in node.outputs]), Length, lengths.append)
        replace_leaves([graph.info(value).shape for value in values], Length, lengths.append)
        return tuple(
            math.lcm(*(length.ratios[axis].denominator for length in lengths)) for axis in range(len(self.multiple))
        )

    def run(
        self, part: NetworkPart, graph: Graph, given: dict[int | None, Tensor], respond: Respond
    ) -> dict[int, Tensor]:
        """Run a part of the network on a region.

        Args:
            part: The part.
            graph: The graph for the region.
            given: Step -> its grid in the region; None -> the volume. It is emptied, so that grids are freed early.
            respond: Runs the layers that need the whole grid.

        Returns:
            Wanted step -> its grid in the region.
        """
        values = {INPUT if step is None else step_value(graph, step): given.pop(step) for step in list(given)}
        wanted = {step: step_value(graph, step) for step in part.wanted}
        order = graph.order(wanted.values(), values)
        results = evaluate(graph, order, values, respond, set(wanted.values()), self.device)
        return {step: results[value] for step, value in wanted.items()}

    def peak(self, part: NetworkPart, graph: Graph) -> int:
        """Return the most bytes of grids that a part holds at once, those that it reads included."""

        def respond(call: int, layer: GlobalLayer, grid: Tensor, mask: Tensor | None) -> Tensor:
            return layer.run_whole(grid, mask)[1] if layer.keeps_size else layer.placeholder(grid)

        live = LiveBytes()
        with torch.no_grad(), without_numbers(), live:
            shapes = {step: graph.info(INPUT if step is None else step_value(graph, step)) for step in part.sources}
            given = {
                step: torch.empty(info.shape, dtype=info.dtype, device=self.device) for step, info in shapes.items()
            }
            self.run(part, graph, given, respond)
        return live.peak


def step_value(graph: Graph, step: int) -> Value:
    """Return the value of a step.

    Raises:
        UntraceableError: If it does not depend on the network's input.
    """
    value = graph.steps[step].grid
    if value is None:
        raise UntraceableError("a grid in it does not depend on the volume")
    return value
