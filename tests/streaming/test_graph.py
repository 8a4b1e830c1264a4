"""Graphs of networks: parts that start from stored values give what the network gives."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from farfield.streaming.graph import INPUT, Graph, UntraceableError, Value, evaluate
from farfield.streaming.graph_recording import record_graph
from farfield.streaming.replacement import GlobalLayer
from farfield.streaming.trace import trace
from torch import Tensor, nn

from helpers.streamed_nets import Branches, Hourglass, relative, settled

# Sums of a few hundred products in float32, in another order.
TOLERANCE = 1e-5
CPU = torch.device("cpu")


class NormedUNet(nn.Module):
    """Norms in series, an activation in place, a skip connection, a gate by the mean, weights that are computed."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.deep = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.last, self.norm = nn.Conv2d(8, 1, 3, padding=1), nn.InstanceNorm2d(4, affine=True)

    def forward(self, grid: Tensor) -> Tensor:
        near = F.relu(self.norm(self.first(grid)), inplace=True)
        far = self.deep(F.max_pool2d(near, 2))
        far = F.leaky_relu_(F.group_norm(far, 2, self.norm.weight.sigmoid(), self.norm.bias), 0.1)
        far = far * far.mean((2, 3), keepdim=True).sigmoid()
        return self.last(torch.cat([near, F.interpolate(far, scale_factor=2.0)], 1))


def whole_response(call: int, layer: GlobalLayer, grid: Tensor, mask: Tensor | None) -> Tensor:
    return layer.run_whole(grid, mask)[1]


def run(graph: Graph, wanted: list[Value], given: dict[Value, Tensor]) -> dict[Value, Tensor]:
    with torch.no_grad():
        return evaluate(graph, graph.order(wanted, given), dict(given), whole_response, wanted, CPU)


NETWORKS = {"norms": NormedUNet, "attention": lambda: Hourglass("siamese", 2), "branches": lambda: Branches("siamese")}


@pytest.mark.parametrize("name", NETWORKS)
def test_a_graph_gives_what_its_network_gives(name: str) -> None:
    net, grid = settled(NETWORKS[name]()), torch.randn(2, 1, 24, 36)
    graph = record_graph("test", net, tuple(grid.shape))
    output = graph.steps[-1].grid
    with torch.no_grad():
        assert relative(run(graph, [output], {INPUT: grid})[output], net(grid)) < TOLERANCE


def test_parts_from_stored_inputs_of_layers_do_not_run_what_is_before_them() -> None:
    net, grid = settled(NormedUNet()), torch.randn(2, 1, 24, 36)
    graph = record_graph("test", net, tuple(grid.shape))
    inputs, output = [step.grid for step in graph.steps if step.summarized], graph.steps[-1].grid
    assert len(inputs) == len(graph.calls) == 3
    stored = run(graph, inputs, {INPUT: grid})
    order = graph.order([output], stored)
    # The mean's own result, the skip connection's norm, and one convolution; nothing of the input.
    assert 0 not in order
    assert sum(graph.nodes[index].macs > 0 for index in order) == 1
    with torch.no_grad():
        assert relative(run(graph, [output], stored)[output], net(grid)) < TOLERANCE


def test_macs_are_those_of_the_network() -> None:
    net = settled(NormedUNet())
    graph = record_graph("test", net, (1, 1, 24, 36))
    assert sum(node.macs for node in graph.nodes) == trace("test", net, (1, 1, 24, 36)).macs[-1] > 0


def test_what_cannot_be_recorded_is_refused() -> None:
    class Strided(nn.Module):
        def forward(self, grid: Tensor) -> Tensor:
            return grid.as_strided(grid.shape, grid.stride()) + 1

    with pytest.raises(UntraceableError, match="strides"):
        record_graph("test", Strided().eval(), (1, 1, 8, 8))
