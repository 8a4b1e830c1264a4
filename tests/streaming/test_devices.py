"""Networks on a GPU, without one: operations of the table have kernels for it, and tasks run on fake tensors of it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from farfield.nn import attention_for
from farfield.nn.network_copy import Copier, make_empty
from farfield.streaming import check, graph, passes, record, rewrites
from farfield.streaming.graph import Graph, Info, RecordingError, Value
from farfield.streaming.labels import GraphError, label_graph
from farfield.streaming.planning import make_plan
from farfield.streaming.rules import RULES
from farfield.streaming.rules.rule import RuleError
from farfield.streaming.spans import Box, Layout, write_box
from helpers.drawn_networks import draw_network, draw_tile

CUDA = torch.device("cuda", 0)
KERNELS = ("CUDA", "CompositeImplicitAutograd", "CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional")


@pytest.mark.parametrize("op", [op for op in RULES if "." in op])
def test_operations_of_the_table_have_a_kernel_for_cuda(op: str) -> None:
    namespace, name, overload = op.split(".")
    name = f"{namespace}::{name}" + (f".{overload}" if overload != "default" else "")
    assert any(torch._C._dispatch_has_kernel_for_dispatch_key(name, key) for key in KERNELS)


def copied_to_cuda(module: nn.Module) -> nn.Module:
    """Return a copy of a module with tensors of the GPU that have no numbers."""
    return Copier(lambda tensor: make_empty(tensor, CUDA)).copy(module)


class Flat(nn.Module):
    """A function of a grid of 4 channels and of modules behind a convolution."""

    def __init__(self, function: Callable[..., Tensor], *modules: nn.Module) -> None:
        super().__init__()
        self.first, self.function, self.parts = nn.Conv2d(1, 4, 3, padding=1), function, nn.ModuleList(modules)

    def forward(self, grid: Tensor) -> Tensor:
        return self.function(self.first(grid), *self.parts)


def of_rows(function: Callable[[Tensor, Any], Any]) -> Callable[[Tensor, Any], Tensor]:
    """Return the function on rows as sequences `(rows, columns, channels)`."""

    def run(grid: Tensor, *modules: Any) -> Tensor:
        batch, channels, height, width = grid.shape
        rows = function(grid.permute(0, 2, 3, 1).reshape(batch * height, width, channels), *modules)
        return rows.reshape(batch, height, width, -1).permute(0, 3, 1, 2)

    return run


def attend(rows: Tensor) -> Tensor:
    """Attention of torch, causal."""
    return F.scaled_dot_product_attention(rows[:, None], rows[:, None], rows[:, None], is_causal=True)[:, 0]


def add_coordinates(grid: Tensor) -> Tensor:
    """Coordinates, a table of positions, a stepped slice and a choice."""
    height, width = grid.shape[2:]
    places = torch.stack(torch.meshgrid(torch.arange(float(height)), torch.linspace(0, 1, width), indexing="ij"))
    grid = torch.cat([grid, places[None].to(grid)], 1)
    grid[:, 0, ::2] = 1
    return grid.roll(3, 2) + grid[:, :, torch.arange(height).flip(0)] * torch.tensor([2.0, 3.0])[1]


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "attention": lambda: Flat(of_rows(attend)),
    "heads": lambda: Flat(
        of_rows(lambda rows, own: own(rows, rows, rows)[0]), nn.MultiheadAttention(4, 2, batch_first=True)
    ),
    "encoder": lambda: Flat(
        of_rows(lambda rows, own: own(rows)), nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
    ),
    "LSTM": lambda: Flat(
        of_rows(lambda rows, own: own(rows)[0]), nn.LSTM(4, 3, 2, batch_first=True, bidirectional=True)
    ),
    "GRU": lambda: Flat(of_rows(lambda rows, own: own(rows)[0]), nn.GRU(4, 3, batch_first=True)),
    "GRU cell": lambda: Flat(of_rows(lambda rows, own: own(rows.flatten(0, 1))), nn.GRUCell(4, 4)),
    "RMS norm": lambda: Flat(of_rows(lambda rows, own: own(rows)), nn.RMSNorm(4)),
    "coordinates": lambda: Flat(add_coordinates),
    "batch norm": lambda: Flat(lambda grid, own: own(grid), nn.BatchNorm2d(4)),
    "instance norm": lambda: Flat(lambda grid, own: own(grid), nn.InstanceNorm2d(4)),
    "group norm": lambda: Flat(lambda grid, own: own(grid), nn.GroupNorm(2, 4)),
    "resized": lambda: Flat(lambda grid: F.interpolate(grid, scale_factor=1.7, mode="bicubic", antialias=True)),
    "layer": lambda: Flat(lambda grid, own: own(grid), attention_for(4, "factorized_gaussian", heads=2)),
    "softmax layer": lambda: Flat(lambda grid, own: own(grid), attention_for(4, "softmax", heads=2)),
}


def run_on_cuda(network: nn.Module, shape: tuple[int, ...], tile: tuple[int, ...]) -> Tensor:
    """Record a network as one on a GPU, and run all tasks, on tensors of the GPU that have no numbers.

    Numbers that Python reads are those of the network, which is on the CPU.
    """
    with FakeTensorMode(allow_non_fake_inputs=True), CUDA:
        own = record.record_network(network, [Info(shape, torch.float32)])
        for index, node in enumerate(own.nodes):
            if node.op == "layer":
                layer = replace(node.args[0], module=copied_to_cuda(node.args[0].module))
                own.nodes[index] = node._replace(args=(layer, *node.args[1:]))
    labelled = label_graph(own, shape[2:], [axis for axis, length in enumerate(tile) if length < shape[2 + axis]])
    plan = make_plan(labelled, tile, labelled.gathered)
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad(), CUDA:
        own.constants.update({name: torch.empty_like(each) for name, each in own.constants.items()})

        def write(result: Tensor, layout: Layout, box: Box, numbers: Tensor) -> None:
            assert numbers.device == CUDA
            write_box(result, layout, box, numbers)

        with mock.patch.object(check, "write_box", write):
            return check.run_tiles(
                plan, lambda volume, box: torch.empty([stop - start for ((start, stop),) in box]), CUDA
            )


@pytest.fixture(autouse=True)
def on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """The network is taken for one on a GPU; what Python reads of it is computed on the CPU."""

    def run_on_cpu(own: Graph, inputs: Sequence[Tensor], output: Value) -> Tensor:
        return graph.run_whole(replace(own, device=torch.device("cpu")), inputs, output)

    for module in (record, rewrites):
        monkeypatch.setattr(module, "run_whole", run_on_cpu)
    monkeypatch.setattr(record, "device_of", lambda *_: CUDA)
    # Numbers that are not finite are looked for.
    monkeypatch.setattr(passes, "are_numbers", lambda parts: True)
    monkeypatch.setattr(passes, "_spreads", lambda *_: False)


@pytest.mark.parametrize("name", NETWORKS)
def test_tasks_run_on_one_device(name: str) -> None:
    torch.manual_seed(0)
    network = NETWORKS[name]().eval()
    try:
        result = run_on_cuda(network, (1, 1, 16, 24), (8, 24))
    except GraphError as error:
        raise AssertionError(str(error)) from error
    assert isinstance(result, FakeTensor)
    assert result.device == CUDA


@pytest.mark.parametrize("seed", range(26))
def test_tasks_of_drawn_networks_run_on_one_device(seed: int) -> None:
    network, shape, _ = draw_network(seed)
    with contextlib.suppress(GraphError, RecordingError, RuleError):  # refused, as on the CPU
        assert run_on_cuda(network, shape, draw_tile(seed, shape[2:])).device == CUDA
