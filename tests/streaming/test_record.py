"""Recorded networks: the graph on the whole gives the network's own bits, and what cannot be repeated is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from farfield.streaming import record
from farfield.streaming.check import without_fast_attention
from farfield.streaming.graph import OWN, RecordingError, map_values, run_whole
from farfield.testing.predictions import SoftmaxBetween
from helpers.drawn_networks import KINDS, Layer, draw_network, draw_values
from helpers.recorded import record_network
from helpers.streamed_nets import Blocks, Branches, Hourglass, NormUNet, settled

NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "softmax": (SoftmaxBetween, (1, 1, 12, 9)),
    "hourglass": (lambda: Hourglass("kronecker_kv", 2), (1, 1, 20, 14)),
    "hourglass in space": (lambda: Hourglass("siamese_local", 3), (1, 1, 8, 6, 10)),
    "branches": (lambda: Branches("kronecker_qkv"), (1, 1, 24, 18)),
    "blocks": (lambda: Blocks("siamese"), (1, 1, 16, 12)),
    "norms": (lambda: NormUNet(2, 3), (1, 1, 32, 24)),
    "norms in space": (lambda: NormUNet(3, 2), (1, 1, 8, 12, 6)),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_the_graph_on_the_whole_gives_the_bits_of_the_network(name: str) -> None:
    make, shape = NETWORKS[name]
    net, volume = settled(make()), torch.randn(shape)
    # A block that folds its attention into other layers, another order of sums, does so where none has a hook.
    for module in net.modules():
        module.register_forward_pre_hook(lambda *_: None)
    with torch.no_grad():
        assert torch.equal(run_whole(record_network(net, shape), [volume]), net(volume))


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_each_kind_of_layer_gives_its_own_bits(kind: str) -> None:
    net, shape, _ = draw_network(5, [kind])
    volume = draw_values(5, shape)
    with torch.no_grad(), without_fast_attention():
        want, got = net(volume), run_whole(record_network(net, shape), [volume])
    assert torch.equal(got.nan_to_num(7.0), want.nan_to_num(7.0))


def of_grid(function: Callable[[Tensor], Tensor]) -> nn.Module:
    """Return the function behind a convolution."""
    return nn.Sequential(nn.Conv2d(1, 3, 3, padding=1), Layer(function)).eval()


def write_in_place(grid: Tensor) -> Tensor:
    """Write to views of views."""
    grid = grid.clone()
    part = grid[:, :, 2:9].transpose(2, 3)
    part[:, 0] *= 2
    part[..., ::2].add_(1)
    grid.flatten(2)[:, :, 7] = -1
    return grid


def write_to_new(grid: Tensor) -> Tensor:
    """Write rows to a tensor that is made in the forward."""
    result = grid.new_zeros(grid.shape)
    for row in range(0, grid.shape[2], 3):
        result[:, :, row] = grid[:, :, row].cumsum(-1)
    return result


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "writes": write_in_place,
    "new": write_to_new,
    "circular": lambda grid: F.pad(grid, (3, -2, 1, 4), mode="circular"),
    "number of the network": lambda grid: grid * torch.tensor([0.5, 2.0])[1].item(),
    "choice of the network": lambda grid: grid if bool(torch.ones(3).sum() > 2) else -grid,
    "mask": lambda grid: grid.masked_scatter(grid > 9, grid) + (grid > 0) * torch.arange(grid.shape[3]),
    "meshgrid": lambda grid: grid + torch.stack(torch.meshgrid(*map(torch.arange, grid.shape[2:]), indexing="ij"))[0],
    "quantile": lambda grid: grid - torch.quantile(grid, 0.3, 1, keepdim=True),
    "stack": lambda grid: torch.hstack([grid, grid.rot90(2, (2, 3))]).movedim(1, -1).unflatten(-1, (2, 3)).sum(-2).mT,
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_give_their_own_bits(name: str) -> None:
    net, volume = of_grid(FUNCTIONS[name]), torch.randn(1, 1, 17, 14)
    graph = record_network(net, volume.shape)
    with torch.no_grad():
        assert torch.equal(run_whole(graph, [volume]), net(volume))
    # Nothing writes: each operation is our own, or returns what it computes.
    for index in graph.needed():
        op = graph.nodes[index].op
        assert op in (*OWN, "input", "constant", "full") or not op.split(".")[1].endswith("_")


@pytest.mark.parametrize("mode", ["constant", "reflect", "replicate"])
@pytest.mark.parametrize(("spatial_dims", "pads"), [(2, (0, 1, 0, 0)), (2, (0, 0, 0, 0)), (3, (0, 0, 0, 0, 0, 0))])
def test_what_pads_nothing_is_its_operand(mode: str, spatial_dims: int, pads: tuple[int, ...]) -> None:
    net, grid = Layer(lambda grid: F.pad(grid, pads, mode) + F.pad(grid.sin(), pads, mode)), torch.randn(1, 2, 5, 4, 3)
    grid = grid if spatial_dims == 3 else grid[..., 0]
    graph = record_network(net, grid.shape)
    assert sum("pad" in node.op for node in graph.nodes) == (2 if any(pads) else 0)
    assert torch.equal(run_whole(graph, [grid]), net(grid))
    assert torch.equal(
        run_whole(record_network(Layer(lambda grid: F.pad(grid, pads, mode)), grid.shape), [grid]),
        F.pad(grid, pads, mode),
    )


def test_arguments_stand_at_their_places_however_they_were_given() -> None:
    volume = torch.randn(1, 1, 9, 8)
    graphs = [
        record_network(of_grid(function), volume.shape)
        for function in (
            lambda grid: torch.ops.aten.sum.dim_IntList(grid, dim=[1], keepdim=True),
            lambda grid: torch.ops.aten.sum.dim_IntList(grid, [1], True),
        )
    ]
    one, other = (graph.nodes[graph.output.node] for graph in graphs)
    assert one.args[1:] == other.args[1:] == ([1], True)
    assert one.kwargs == other.kwargs == {"dtype": None}


class Counting(nn.Module):
    """Counts its calls in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, grid: Tensor) -> Tensor:
        self.count += 1
        return grid * self.count


class Remembering(Counting):
    """Keeps the mean of what it saw in a buffer."""

    def forward(self, grid: Tensor) -> Tensor:
        self.count.mul_(0.9).add_(grid.mean())
        return grid - self.count


REFUSED: dict[str, tuple[nn.Module, str]] = {
    "dropout": (nn.Dropout(0.5).train(), r"1 draws random numbers, aten\.bernoulli"),
    "noise": (Layer(lambda grid: grid + torch.randn_like(grid)), r"1 draws random numbers, aten\.randn"),
    "statistics": (nn.BatchNorm2d(3).train(), r"1 (updates its running|writes to 1\.num_batches)"),
    "running": (nn.InstanceNorm2d(3, track_running_stats=True).train(), r"1 .*(running|writes)"),
    "average": (Remembering(), r"1\.count of the network is computed from the volume"),
    "positions": (Layer(lambda grid: grid[grid > 0]), r"1 computes a shape from numbers, aten\.nonzero"),
    "number": (Layer(lambda grid: grid * grid.mean().item()), "1 reads a computed number in Python"),
    "array": (
        Layer(lambda grid: grid + torch.from_numpy(grid.numpy())),
        "1 makes an array of NumPy of a tensor; fix: ",
    ),
    "choice": (Layer(lambda grid: grid if grid.sum() > 0 else -grid), "1 reads a computed number in Python"),
    "bits": (Layer(lambda grid: grid.view(torch.int32).float()), "1 reads a tensor as another dtype"),
    "unpooling": (
        Layer(
            lambda grid: F.max_unpool2d(
                grid, torch.arange(grid[0, 0].numel()).view(1, 1, *grid.shape[2:]).expand_as(grid), 1
            )
        ),
        "1 unpools to",
    ),
    "unpooling other sizes": (
        Layer(lambda grid: F.max_unpool2d(*F.max_pool2d(grid, 2, return_indices=True), 2)),
        r"1 unpools to \(16, 14\)",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_repeated_is_refused_by_module(name: str) -> None:
    layer, message = REFUSED[name]
    net = nn.Sequential(nn.Conv2d(1, 3, 3, padding=1), copy.deepcopy(layer))
    with pytest.raises(RecordingError, match=message):
        record_network(net, (1, 1, 17, 14))


def test_a_tensor_that_is_not_recorded_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a pair of a number and a tensor, if these are not looked at."""

    def map_most(part: object, kind: type, function: Callable[..., object]) -> object:
        return part if type(part) is tuple and part and type(part[0]) is int else map_values(part, kind, function)

    net = of_grid(lambda grid: 2**grid)
    assert record_network(net, (1, 1, 9, 8)).nodes
    monkeypatch.setattr(record, "map_values", map_most)
    with pytest.raises(RecordingError, match="on a tensor that is not recorded"):
        record_network(net, (1, 1, 9, 8))


def test_a_network_may_count_its_runs() -> None:
    net, volume = nn.Sequential(Counting()), torch.randn(1, 1, 9, 8)
    graph = record_network(net, volume.shape)
    assert torch.equal(run_whole(graph, [volume]), volume)
    assert int(net[0].count) == 0


def test_the_network_itself_is_not_run() -> None:
    net = nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3)).eval()
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    hooks = []
    net.register_forward_pre_hook(lambda *_: hooks.append(len(hooks)) or None)
    graph = record_network(net, (1, 1, 4000, 5000))
    assert graph.info(graph.output).shape == (1, 3, 3998, 4998)
    assert all(torch.equal(tensor, before[name]) for name, tensor in net.state_dict().items())
    assert torch.backends.mha.get_fastpath_enabled()
