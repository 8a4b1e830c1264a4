"""`predict_whole` gives what the network gives that sees everything at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from farfield import ops
from farfield.nn import GridAttention
from farfield.streaming import Tiles, plan_whole, predict_whole, prediction
from farfield.streaming.labels import GraphError, label_graph
from farfield.streaming.layers import has_grid_summary, make_streamable, summary_bytes
from farfield.streaming.rules import windows
from farfield.streaming.run import compute
from farfield.volumes import ImageMetadata, Volume
from helpers.drawn_networks import Layer
from helpers.grids import ENGINE_ROWS
from helpers.partly import UNLIKE, partly
from helpers.recorded import record_network
from helpers.streamed_nets import Blocks, Branches, Hourglass, attention, relative, settled

# What the issue asks for; float32 has eps 1.2e-7, and sums over positions take other orders.
TOLERANCE = 1e-5


def whole(net: nn.Module, grid: Tensor) -> Tensor:
    with torch.no_grad():
        return net(grid)


@pytest.mark.parametrize("row", partly(ENGINE_ROWS, [*UNLIKE, "factorized_gaussian"]))
@pytest.mark.parametrize(
    ("size", "tile"), [((38, 46), 12), ((14, 10, 18), (8, 6, None)), ((45,), 8)], ids=["2d", "3d", "1d"]
)
def test_tiles_give_what_the_whole_gives(row: str, size: tuple[int, ...], tile: object) -> None:
    net = settled(Hourglass(row, len(size)))
    size = tuple(side + side % 2 for side in size)
    grid = torch.randn(1, 1, *size)
    assert relative(predict_whole(net, grid, tile=tile, quiet=True), whole(net, grid)) < TOLERANCE


@pytest.mark.parametrize("row", ENGINE_ROWS)
def test_blocks_that_take_attention_apart(row: str) -> None:
    net, grid = settled(Blocks(row)), torch.randn(2, 1, 30, 34)
    assert relative(predict_whole(net, grid, tile=14, quiet=True), whole(net, grid)) < TOLERANCE


@pytest.mark.parametrize("row", ["siamese", "kronecker_qkv", "softmax_pooled"])
def test_attentions_that_do_not_depend_on_each_other_share_a_pass(row: str) -> None:
    net, grid = settled(Branches(row)), torch.randn(1, 1, 39, 40)
    plan = plan_whole(net, grid.shape, tile=13)
    assert [each.summarizes for each in plan.passes] == [("left", "right"), ("both",), ("both",), ()]
    assert plan.tile == (15, 14)
    assert relative(predict_whole(net, grid, tile=13, quiet=True), whole(net, grid)) < TOLERANCE


# What reads some channels of the volume here, and others there.
CHANNELS: dict[str, tuple[Callable[[Tensor, nn.Module], Tensor], int]] = {
    "two of four": (lambda grid, own: own(grid[:, 2:4]) * grid[:, 1:2].sigmoid(), 2),
    "in another order": (lambda grid, own: own(grid[:, [3, 0]]) + grid[:, 2:3], 2),
    "chunks": (lambda grid, own: own(grid.chunk(2, 1)[1]) * grid.chunk(2, 1)[0].sum(1, keepdim=True), 2),
    "the last alone": (lambda grid, own: own(grid[:, 3:]), 1),
    "each by itself": (lambda grid, own: sum(own(each[:, None]) for each in grid.unbind(1)), 1),
    "with a norm of one": (lambda grid, own: F.instance_norm(own(grid[:, 1:3])) + grid[:, :1], 2),
}


@pytest.mark.parametrize("statistics", ["whole", "tile"])
@pytest.mark.parametrize("name", CHANNELS)
def test_channels_of_the_volume_that_are_read_apart(name: str, statistics: str) -> None:
    run, channels = CHANNELS[name]
    net = settled(Layer(run, nn.Conv2d(channels, 3, 3, padding=1))).double()
    grid, masked = torch.randn(2, 4, 40, 44, dtype=torch.float64), torch.rand(40, 44) > 0.1
    got = predict_whole(net, grid, tile=Tiles(16, statistics=statistics), quiet=True)
    if statistics == "whole" or "norm" not in name:
        torch.testing.assert_close(got, whole(net, grid))
    if statistics == "whole" and "norm" not in name:
        got = predict_whole(net, grid, tile=16, mask=masked, fill=2.0, quiet=True)
        torch.testing.assert_close(got[..., masked], whole(net, grid.where(masked, 2.0))[..., masked])


def test_a_reader_of_another_shape_is_refused() -> None:
    net, volume = settled(nn.Conv2d(2, 3, 3, padding=1)), torch.randn(1, 2, 20, 22)
    graph = record_network(net, volume.shape)
    labelled = label_graph(graph, volume.shape[2:], (0, 1))
    box = labelled.core(labelled.layouts[graph.output], ((4, 12), (4, 12)))
    with pytest.raises(LookupError, match="1, 2, 20, 22"):
        compute(labelled, {graph.output: box}, graph.inputs, lambda *_: volume, {})


def test_a_plain_sliding_window_differs() -> None:
    # The same tiles and the same overlap, attention being global in a tile only: 0.6 % of the largest value off.
    net, grid, tile = settled(Hourglass("siamese", 2)), torch.randn(1, 1, 48, 48), 16
    grid = grid + torch.linspace(0, 4, 48)  # brighter to one side, as real volumes are
    plan = plan_whole(net, grid.shape, tile=tile)
    halo, want, got = plan.passes[-1].halo, whole(net, grid), torch.empty_like(grid)
    for core in plan.cores:
        (top, bottom), (left, right) = halo.around(core, plan.size)
        (y0, y1), (x0, x1) = core
        part = whole(net, grid[:, :, top:bottom, left:right])
        got[:, :, y0:y1, x0:x1] = part[:, :, y0 - top : y1 - top, x0 - left : x1 - left]
    assert relative(got, want) > 0.004
    assert relative(predict_whole(net, grid, tile=tile, quiet=True), want) < TOLERANCE


def test_a_network_without_attention_is_one_pass() -> None:
    net, grid = settled(nn.Sequential(nn.Conv2d(1, 4, 5, padding=2), nn.Conv2d(4, 3, 3))), torch.randn(1, 31, 29)
    plan = plan_whole(net, grid.shape, tile=10)
    assert len(plan.passes) == 1
    # The convolution without padding is two positions short at the far end.
    assert plan.passes[0].halo == ((2, 2), (4, 4))
    got = predict_whole(net, grid, tile=10, quiet=True)
    assert got.shape == (3, 29, 27)
    assert relative(got, whole(net, grid[None])[0]) < TOLERANCE


def test_a_bare_attention_is_a_network_too() -> None:
    layer, grid = settled(attention("factorized_gaussian")), torch.randn(6, 20, 21)
    assert relative(predict_whole(layer, grid, tile=(7, 9), quiet=True), whole(layer, grid[None])[0]) < TOLERANCE
    with pytest.raises(
        ValueError,
        match=r"spatial dims .*GridAttention .*fix: tile\b",
    ):
        predict_whole(layer, grid, tile=7, quiet=True)


@pytest.mark.parametrize("shape", [(2, 3, 24, 26), (1, 2, 9, 10, 12)])
def test_a_network_without_convolution_takes_a_volume_as_torch_does(shape: tuple[int, ...]) -> None:
    net, grid = settled(Layer(lambda grid: grid * 2 + grid.mean((2, 3), keepdim=True))), torch.randn(shape)
    assert relative(predict_whole(net, grid, tile=5, quiet=True), whole(net, grid)) < TOLERANCE
    # Letters tell it first.
    space = Volume(torch.randn(3, 9, 10, 12).numpy(), ImageMetadata("CZYX"))
    got = predict_whole(net, space, tile=5, quiet=True)
    assert relative(torch.as_tensor(got), whole(net, torch.from_numpy(space.array)[None])[0]) < TOLERANCE


def test_an_attention_that_is_masked_inside() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.attention, self.last = nn.Conv2d(1, 6, 1), attention("kronecker_qkv"), nn.Conv2d(6, 1, 1)

        def forward(self, grid: Tensor) -> Tensor:
            return self.last(self.attention(self.first(grid), mask=grid[:, 0] > 0))

    net, grid = settled(Masked()), torch.randn(1, 1, 21, 22)
    assert relative(predict_whole(net, grid, tile=8, quiet=True), whole(net, grid)) < TOLERANCE


@pytest.mark.parametrize("size", [(9,), (4, 6), (4, 6, 2)], ids=str)
def test_a_volume_smaller_than_a_tile(size: tuple[int, ...]) -> None:
    net, grid = settled(Hourglass("siamese", len(size))), torch.randn(1, 1, *(side + side % 2 for side in size))
    plan = plan_whole(net, grid.shape, tile=64)
    assert (len(plan.cores), len(plan.passes)) == (1, 1)
    with pytest.MonkeyPatch.context() as patch:
        # Small volumes are convolved by oneDNN in tiles, and not by torch: the same bits come from the same kernels.
        patch.setattr(windows, "convolve", convolve)
        assert torch.equal(predict_whole(net, grid, tile=64, quiet=True), whole(net, grid))
    assert relative(predict_whole(net, grid, tile=64, quiet=True), whole(net, grid)) < TOLERANCE


def convolve(
    grid: Tensor, weight: Tensor, bias: Tensor | None, stride: Any, padding: Any, dilation: Any, groups: int
) -> Tensor:
    """Convolve by the kernel that torch chooses."""
    return torch.convolution(grid, weight, bias, stride, padding, dilation, False, [0] * len(padding), groups)


def test_tiles_that_memory_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    net, grid = settled(Hourglass("averaged", 2)), torch.randn(1, 1, 200, 300)
    assert len(plan_whole(net, grid.shape).cores) == 1
    monkeypatch.setattr("farfield.streaming.choosing.free_bytes", lambda device: 4 * 2**20)
    plan = plan_whole(net, grid.shape)
    assert len(plan.cores) > 4
    assert plan.tile_bytes <= 2**20
    assert relative(predict_whole(net, grid, quiet=True), whole(net, grid)) < TOLERANCE


@pytest.mark.parametrize("tile", [(None, 9, 10), (3, 9, 10), (2, None, None)], ids=str)
def test_a_side_that_is_summed_can_be_cut(tile: tuple[int | None, ...]) -> None:
    class Projection(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.select, self.image, self.attention = (
                nn.Conv3d(1, 1, 3, padding=1),
                nn.Conv2d(1, 6, 3, padding=1),
                attention("siamese"),
            )

        def forward(self, stack: Tensor) -> Tensor:
            weights = self.select(stack).softmax(2)
            return self.attention(self.image((weights * stack).sum(2)))

    net, stack = settled(Projection()), torch.randn(1, 1, 7, 24, 25)
    assert relative(predict_whole(net, stack, tile=tile, quiet=True), whole(net, stack)) < TOLERANCE


@pytest.mark.long
@pytest.mark.parametrize("mode", ["reflect", "replicate", "constant"])
def test_padding_is_that_of_the_padded_volume(mode: str) -> None:
    net, grid = settled(Hourglass("kronecker_kv", 2)), torch.randn(1, 1, 37, 41)
    want = whole(net, F.pad(grid, (0, 1, 0, 1), mode=mode))[:, :, :37, :41]
    assert relative(predict_whole(net, grid, tile=10, pad=mode, quiet=True), want) < TOLERANCE
    with pytest.raises(ValueError, match=r'size \(37, 41\)(?s:.*)fix: .*2 × 2 .*pad="reflect"'):
        predict_whole(net, grid, tile=10, quiet=True)


def test_padding_is_to_the_strides_and_not_to_the_windows_of_pooled_attention() -> None:
    net, grid = settled(Hourglass("softmax_pooled", 2)), torch.randn(1, 1, 37, 42)
    plan = plan_whole(net, grid.shape, tile=10, pad="reflect")
    assert (plan.size, plan.tile) == ((38, 42), (10, 10))
    want = whole(net, F.pad(grid, (0, 0, 0, 1), mode="reflect"))[:, :, :37]
    assert relative(predict_whole(net, grid, tile=10, pad="reflect", quiet=True), want) < TOLERANCE


def test_padding_on_both_ends() -> None:
    net = settled(
        nn.Sequential(nn.Conv1d(1, 6, 8, stride=8), attention("siamese"), nn.ConvTranspose1d(6, 1, 8, stride=8))
    )
    grid = torch.randn(1, 1, 61)
    want = whole(net, F.pad(grid, (1, 2), mode="reflect"))[:, :, 1:62]
    assert relative(predict_whole(net, grid, tile=16, pad="reflect", quiet=True), want) < TOLERANCE


@pytest.mark.parametrize("leading", [(), (1,), (1, 1), (3, 1)], ids=str)
@pytest.mark.parametrize("out_channels", [1, 2])
def test_the_output_has_the_axes_of_the_volume(leading: tuple[int, ...], out_channels: int) -> None:
    net = settled(nn.Sequential(nn.Conv2d(1, 6, 3, padding=1), attention("averaged"), nn.Conv2d(6, out_channels, 1)))
    volume = np.random.default_rng(0).normal(size=(*leading, 20, 22)).astype("float32")
    got = predict_whole(net, volume, tile=8, quiet=True)
    axes = leading[:-1] + ((out_channels,) if leading or out_channels > 1 else ())
    assert got.shape == (*axes, 20, 22)
    batch = leading[0] if len(leading) == 2 else 1
    want = whole(net, torch.from_numpy(volume).reshape(batch, 1, 20, 22))
    assert relative(got, want.reshape(got.shape)) < TOLERANCE


@torch.library.custom_op("farfield_tests::blur", mutates_args=())
def blur(grid: Tensor) -> Tensor:
    """A foreign kernel, of which no rule tells what it reads: 3 positions on each side."""
    return F.avg_pool2d(grid, 7, 1, 3)


@blur.register_fake
def fake_blur(grid: Tensor) -> Tensor:
    return torch.empty_like(grid)


class Blurred(nn.Module):
    """A stride, a foreign kernel, an attention, and the stride back."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Conv2d(1, 6, 2, stride=2), nn.ConvTranspose2d(6, 1, 2, stride=2)
        self.attention = attention("siamese")

    def forward(self, grid: Tensor) -> Tensor:
        return self.up(self.attention(blur(self.down(grid))))


def test_a_network_with_a_foreign_operation_gives_its_halo() -> None:
    net, grid = settled(Blurred()), torch.randn(1, 1, 40, 44)
    with pytest.raises(GraphError, match=r"predict_whole: Blurred .*farfield_tests\.blur.*fix: tile=Tiles\(…, halo="):
        predict_whole(net, grid, tile=12, quiet=True)
    plan = plan_whole(net, grid.shape, tile=Tiles(12, halo=(6, 7)))
    # In positions of the volume, where the operation runs: at half of them, 3 and 4.
    assert plan.passes[0].halo == ((6, 8), (6, 8))
    assert relative(predict_whole(net, grid, plan=plan, quiet=True), whole(net, grid)) < TOLERANCE


def test_operations_with_a_rule_need_no_halo() -> None:
    net, shape = settled(Hourglass("siamese", 2)), (1, 1, 40, 40)
    plan, other = (plan_whole(net, shape, tile=tile) for tile in (Tiles(12, halo=(9, 2)), 12))
    assert plan.passes == other.passes


def test_the_halo_that_is_found_is_needed() -> None:
    net = settled(nn.Sequential(nn.Conv2d(1, 4, 3, padding=4, dilation=4), nn.Conv2d(4, 1, (1, 5), padding=(0, 2))))
    assert plan_whole(net, (64, 64), tile=16).passes[0].halo == ((4, 6), (4, 6))


class Watched:
    """A volume that notes the regions that are read of it."""

    def __init__(self, grid: Tensor) -> None:
        self.numbers, self.read = grid.numpy(), []
        self.shape, self.dtype = self.numbers.shape, self.numbers.dtype

    def __getitem__(self, index: tuple[slice, ...]) -> np.ndarray:
        self.read.append(tuple((span.start, span.stop) for span in index[2:]))
        return self.numbers[index]


def test_the_plan_is_what_runs(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    # The check has a line, and MACs, of its own.
    monkeypatch.setattr(prediction, "run_check", lambda *given: "")
    net, grid = settled(Hourglass("siamese", 2)), torch.randn(1, 1, 40, 40)
    # No room for values inside the network: each pass starts from the volume.
    plan = plan_whole(net, grid.shape, tile=Tiles(20, disk=1))
    assert [each.summarizes for each in plan.passes] == [("bottom",), ("one",), ("two",), ()]
    assert not plan.stored
    work = [each.macs for each in plan.passes]
    assert work == sorted(work)
    assert plan.recomputed == pytest.approx(sum(work) / plan.macs)
    volume = Watched(grid)
    with FlopCounterMode(display=False) as counter:
        predict_whole(net, volume, plan=plan)
    assert volume.read == [each.halo.around(core, plan.size) for each in plan.passes for core in plan.cores]
    # Of attention, each tile projects its few slots again, as whole slots are planned once.
    assert 0.99 * sum(work) <= counter.get_total_flops() // 2 <= 1.03 * sum(work)
    said = capsys.readouterr().err
    assert "pass 1 of 4: summarize bottom" in said
    assert "times the MACs of the untiled network" in said


@pytest.mark.parametrize(("operator", "grows"), [("dot", False), ("factorized", False), ("softmax", True)])
def test_which_summaries_grow_with_the_grid(operator: str, grows: bool) -> None:
    attention = GridAttention(8, operator)
    sizes = [summary_bytes(make_streamable(attention).summarize(torch.randn(1, 8, side, side))) for side in (8, 16)]
    assert (sizes[1] > sizes[0]) is grows
    assert has_grid_summary(attention) is grows


def test_a_network_is_left_as_it_was() -> None:
    net, grid = settled(Hourglass("dot", 2)), torch.randn(1, 1, 24, 24)
    before, modules = whole(net, grid), [dict(vars(module)) for module in net.modules()]
    predict_whole(net, grid, tile=10, quiet=True)
    with pytest.raises(ValueError, match="not finite"):
        predict_whole(net, torch.full((1, 1, 24, 24), torch.nan), tile=10, quiet=True)
    assert torch.equal(whole(net, grid), before)
    for module, was in zip(net.modules(), modules, strict=True):
        assert vars(module).keys() == was.keys()
        assert not module._forward_hooks
        assert not module._forward_pre_hooks


def test_half_precision() -> None:
    net = settled(Hourglass("siamese", 2)).to(torch.bfloat16)
    grid = torch.randn(1, 1, 24, 28)
    got = predict_whole(net, grid.numpy(), tile=10, quiet=True)
    assert got.dtype == np.float32
    assert relative(got, whole(net, grid.bfloat16()).float()) < 0.05
    double = settled(Hourglass("siamese", 2)).double()
    assert relative(predict_whole(double, grid.double(), tile=10, quiet=True), whole(double, grid.double())) < 1e-13


def test_custom_rows() -> None:
    row = ops.Operator(
        basis=ops.OPERATORS["averaged"].basis, coefficients=softplus_queries, per=ops.OPERATORS["averaged"].per
    )
    net = settled(nn.Sequential(nn.Conv2d(1, 6, 3, padding=1), GridAttention(6, row), nn.Conv2d(6, 1, 1)))
    grid = torch.randn(1, 1, 20, 20)
    assert relative(predict_whole(net, grid, tile=9, quiet=True), whole(net, grid)) < TOLERANCE


def softplus_queries(query: Tensor, summary: ops.Summary) -> Tensor:
    return F.softplus(query)


class LastNorm(nn.LayerNorm):
    """`LayerNorm` over the channels of each position, as ConvNeXt has it."""

    def forward(self, grid: Tensor) -> Tensor:
        return super().forward(grid.movedim(1, -1)).movedim(-1, 1)


class LastMixing(nn.Module):
    """The rest of ConvNeXt's block: modules that see the channels last."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(channels)
        self.mix = nn.Sequential(nn.Linear(channels, 2 * channels), nn.GELU(), nn.Linear(2 * channels, channels))

    def forward(self, grid: Tensor) -> Tensor:
        return grid + self.mix(self.norm(grid.movedim(1, -1))).movedim(-1, 1)


@pytest.mark.parametrize(("size", "tile"), [((41,), 9), ((30, 41), 11), ((9, 12, 20), 6)], ids=["1d", "2d", "3d"])
def test_layers_that_have_the_channels_last(size: tuple[int, ...], tile: int) -> None:
    convolution = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}[len(size)]
    layers = [convolution(1, 8, 5, padding=2), LastNorm(8), LastMixing(8), attention("siamese", 8)]
    net = settled(nn.Sequential(*layers, LastNorm(8), convolution(8, 2, 3, padding=1)))
    grid = torch.randn(1, 1, *size)
    assert relative(predict_whole(net, grid, tile=tile, quiet=True), whole(net, grid)) < TOLERANCE


def test_convnext_of_torchvision_with_an_attention() -> None:
    torchvision = pytest.importorskip("torchvision")
    first = torchvision.models.convnext_tiny().features[:2]
    net = settled(nn.Sequential(first, attention("kronecker_qkv", 96), nn.Conv2d(96, 1, 1)))
    grid = torch.randn(1, 3, 160, 132)
    assert relative(predict_whole(net, grid, tile=80, quiet=True), whole(net, grid)) < TOLERANCE
