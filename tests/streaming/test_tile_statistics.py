"""Norms and pooling that see what a tile reads, `Tiles(statistics="tile")`: the network on patches, put together."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from farfield.streaming import MeanOverFlips, Tiles, plan_whole, predict_whole
from farfield.streaming.labels import GraphError
from helpers.explaining import explains
from helpers.partly import in_turn
from helpers.small_networks import SqueezeExcite
from helpers.streamed_nets import attention, relative, settled

VOLUME = torch.randn(1, 1, 46, 39, generator=torch.Generator().manual_seed(0)) * torch.linspace(0.5, 4, 39) + 3


def patch_nets(layer: nn.Module) -> nn.Module:
    return settled(
        nn.Sequential(
            nn.Conv2d(1, 4, 3, padding=1),
            layer,
            nn.ReLU(),
            nn.Conv2d(4, 4, 2, stride=2),
            nn.ConvTranspose2d(4, 2, 2, 2),
        )
    )


def spans(length: int, tile: int, patch: int, before: int) -> list[tuple[slice, slice]]:
    """Own positions and patch of each tile along an axis; patches have one length, and lie inside."""
    return [
        (slice(start, min(start + tile, length)), slice(first, min(first + patch, length)))
        for start in range(0, length, tile)
        for first in [max(0, min(start - before, length - patch))]
    ]


def by_patches(
    run: Callable[[Tensor], Tensor], grid: Tensor, tile: Sequence[int], before: Sequence[int], after: Sequence[int]
) -> Tensor:
    """Run a function on patches of a grid, and put their own positions together."""
    axes = [
        spans(length, own, min(length, one + own + other), one)
        for length, own, one, other in zip(grid.shape[2:], tile, before, after, strict=True)
    ]
    rows = []
    for (row, rows_read), (column, columns_read) in itertools.product(*axes):
        with torch.no_grad():
            output = run(grid[..., rows_read, columns_read])
        inside = [
            slice(own.start - read.start, own.stop - read.start)
            for own, read in ((row, rows_read), (column, columns_read))
        ]
        rows.append((row, column, output[..., inside[0], inside[1]]))
    result = torch.empty(grid.shape[0], rows[0][2].shape[1], *grid.shape[2:])
    for row, column, part in rows:
        result[..., row, column] = part
    return result


LAYERS = {
    "instance norm": lambda: nn.InstanceNorm2d(4, affine=True),
    "group norm": lambda: nn.GroupNorm(2, 4),
    "batch norm without running statistics": lambda: nn.BatchNorm2d(4, track_running_stats=False),
    "squeeze and excite": lambda: SqueezeExcite(4),
}


@pytest.mark.parametrize("name", LAYERS)
def test_each_tile_is_the_network_on_its_patch(name: str) -> None:
    net, grid = patch_nets(LAYERS[name]()), VOLUME[..., :38]
    tiles = Tiles((12, 16), statistics="tile")
    plan = plan_whole(net, grid.shape, tile=tiles)
    assert len(plan.passes) == 1
    assert plan.patch_size == (16, 20)
    assert plan.passes[0].halo.before == (2, 2)
    got = predict_whole(net, grid, tile=tiles, quiet=True)
    assert relative(got, by_patches(net, grid, (12, 16), *plan.passes[0].halo)) < 1e-5
    # The test can fail: over the whole volume the statistics are others.
    exact = predict_whole(net, grid, tile=(12, 16), quiet=True)
    assert relative(got, exact) > 1e-2
    # In one tile both are the same.
    assert relative(predict_whole(net, grid, tile=Tiles((64, 64), statistics="tile"), quiet=True), exact) < 1e-5


def test_sizes_that_the_strides_do_not_divide() -> None:
    net = settled(nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.InstanceNorm2d(4), nn.Conv2d(4, 2, 2, stride=2)))
    plan = plan_whole(net, VOLUME.shape, tile=Tiles(8, statistics="tile"))
    # A patch has the remainder of the volume, so that the last starts at a multiple of the strides.
    assert plan.patch_size == (12, 13)
    got = predict_whole(net, VOLUME, tile=Tiles(8, statistics="tile"), quiet=True)
    assert got.shape == (1, 2, 23, 19)
    with torch.no_grad():
        last = net(VOLUME[..., 46 - 12 :, 39 - 13 :])
        first = net(VOLUME[..., :12, :13])
    assert relative(got[..., -3:, -3:], last[..., -3:, -3:]) < 1e-5
    assert relative(got[..., :4, :4], first[..., :4, :4]) < 1e-5


def test_attention_sees_the_whole_before_and_after_norms() -> None:
    first, second = attention("siamese", 4), attention("kronecker_qkv", 4)
    scale, norm, last = nn.Conv2d(1, 4, 1), nn.InstanceNorm2d(4), nn.Conv2d(4, 2, 1)
    net = settled(nn.Sequential(scale, first, norm, second, last))
    tiles = Tiles((16, 20), statistics="tile")
    # By their paths: the norm between them needs no pass.
    assert [each.summarizes for each in plan_whole(net, VOLUME.shape, tile=tiles).passes] == [("1",), ("3",), ()]
    with torch.no_grad():
        features = by_patches(norm, first(scale(VOLUME)), (16, 20), (0, 0), (0, 0))
        want = last(second(features))
    assert relative(predict_whole(net, VOLUME, tile=tiles, quiet=True), want) < 1e-5


def test_passes_read_the_same_patches() -> None:
    """The norm before the attention has the same statistics in the pass that summarizes and in the last."""
    first, norm, attends = nn.Conv2d(1, 4, 3, padding=1), nn.InstanceNorm2d(4), attention("siamese", 4)
    last = nn.Conv2d(4, 2, 5, padding=2)
    net, tiles = settled(nn.Sequential(first, norm, attends, last)), Tiles((12, 13), statistics="tile")
    plan = plan_whole(net, VOLUME.shape, tile=tiles)
    assert [each.halo for each in plan.passes] == [((3, 3), (3, 3))] * 2

    with torch.no_grad():
        features = by_patches(nn.Sequential(first, norm), VOLUME, (12, 13), (3, 3), (3, 3))
        summary = attends.summarize(features)

        def run(patch: Tensor) -> Tensor:
            return last(attends.respond(norm(first(patch)), summary))

        want = by_patches(run, VOLUME, (12, 13), (3, 3), (3, 3))
    assert relative(predict_whole(net, VOLUME, tile=tiles, quiet=True), want) < 1e-5


@pytest.mark.parametrize("tile", [(8, 8), (12, 20), (2, 6)], ids=str)
def test_pooled_attention_sees_whole_windows(tile: tuple[int, int]) -> None:
    """Also where the strides do not divide the volume, whose last column and row no window has."""
    net = settled(
        nn.Sequential(nn.Conv2d(1, 6, 1), nn.MaxPool2d(2), attention("softmax_pooled"), nn.Conv2d(6, 1, 3, padding=1))
    )
    grid = VOLUME[..., :41, :]
    tiles = Tiles(tile, statistics="tile")
    with torch.no_grad():
        want = net(grid)
    assert relative(predict_whole(net, grid, tile=tiles, quiet=True), want) < 1e-5


class Centred(nn.Module):
    """The grid without its mean, by the methods that run in tiles."""

    def summarize(self, tile: Tensor) -> tuple[Tensor, Tensor]:
        return tile.flatten(2).double().sum(2), torch.tensor(tile[0, 0].numel())

    def respond(self, tile: Tensor, total: Tensor, count: Tensor) -> Tensor:
        return tile - (total / count)[:, :, None, None].to(tile.dtype)

    def forward(self, grid: Tensor) -> Tensor:
        return self.respond(grid, *self.summarize(grid))


def test_layers_of_the_user_see_the_whole() -> None:
    net = settled(nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), Centred()))
    with torch.no_grad():
        want = net(VOLUME)
    assert relative(predict_whole(net, VOLUME, tile=Tiles(16, statistics="tile"), quiet=True), want) < 1e-5


@pytest.mark.long
@pytest.mark.parametrize("call", [plan_whole, predict_whole], ids=lambda call: call.__name__)
def test_a_norm_of_all_positions_takes_no_patch_and_the_fix_works(call: Callable[..., object]) -> None:
    net = settled(nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.LayerNorm(VOLUME.shape[2:])))
    given = VOLUME.shape if call is plan_whole else VOLUME
    with pytest.raises(ValueError, match=rf'{call.__name__}: (?s:.)*18(?s:.)*fix: Tiles\(…, statistics="whole"\)'):
        call(net, given, tile=Tiles(16, statistics="tile"))
    with torch.no_grad():
        want = net(VOLUME)
    assert relative(predict_whole(net, VOLUME, tile=Tiles(16, statistics="whole"), quiet=True), want) < 1e-5


def test_flips_have_the_same_patches() -> None:
    # One-sided: each position depends on the two to its left.
    net = settled(nn.Sequential(nn.ZeroPad2d((2, 0, 0, 0)), nn.Conv2d(1, 4, (1, 3)), nn.InstanceNorm2d(4)))
    flipped, tiles = MeanOverFlips(net, (0, 1)).eval(), Tiles((12, 13), statistics="tile")
    assert plan_whole(net, VOLUME.shape, tile=tiles).passes[-1].halo == ((0, 2), (0, 0))
    plan = plan_whole(flipped, VOLUME.shape, tile=tiles)
    assert plan.passes[-1].halo == ((0, 2), (0, 2))
    want = by_patches(flipped, VOLUME, (12, 13), *plan.passes[-1].halo)
    assert relative(predict_whole(flipped, VOLUME, tile=tiles, quiet=True), want) < 1e-5


def test_the_plan_states_it() -> None:
    net = patch_nets(nn.InstanceNorm2d(4))
    plan = plan_whole(net, (64, 64), tile=Tiles(16, statistics="tile"))
    assert 'norms and pooling see the 20 × 20 positions that a tile reads: statistics="tile"' in str(plan)
    # 16 patches of 20 × 20 positions.
    assert plan.recomputed == pytest.approx(16 * 20**2 / 64**2)
    assert "statistics" not in str(plan_whole(net, (64, 64), tile=16))
    assert "statistics" not in str(plan_whole(net, (64, 64), tile=Tiles(64, statistics="tile")))
    # Values of patches depend on the tile: none is stored.
    plan = plan_whole(net, (64, 64), tile=Tiles(16, statistics="tile", disk=1e9))
    assert (plan.stored, plan.disk_bytes) == ((), 0)


# ---- what has no statistics is the whole's ---------------------------------------------------------------------------
class Made(nn.Module):
    """A network without statistics: two convolutions, and a function of these and of the grid."""

    def __init__(self, run: Callable[[nn.Module, nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.run, self.first, self.second = run, nn.Conv2d(2, 3, 3, padding=1), nn.Conv2d(3, 3, 3, padding=1)

    def forward(self, grid: Tensor) -> Tensor:
        return self.run(self.first, self.second, grid)


def rows(grid: Tensor) -> Tensor:
    return torch.arange(grid.shape[2], device=grid.device)[:, None]


def in_windows(grid: Tensor, window: int) -> Tensor:
    """Attention of the positions of each window."""
    batch, channels, height, width = grid.shape
    apart = grid.view(batch, channels, height // window, window, width // window, window)
    tokens = apart.permute(0, 2, 4, 3, 5, 1).reshape(-1, window**2, channels)
    tokens = (tokens @ tokens.transpose(1, 2)).softmax(-1) @ tokens
    apart = tokens.view(batch, height // window, width // window, window, window, channels)
    return apart.permute(0, 5, 1, 3, 2, 4).reshape(grid.shape)


def resize(grid: Tensor, **options: Any) -> Tensor:
    return F.interpolate(grid, **{"mode": "bilinear", "scale_factor": 2, **options})


# What patches compute as the whole does, whatever the tile.
SAME: dict[str, Callable[[nn.Module, nn.Module, Tensor], Tensor]] = {
    "twice as large": lambda first, second, x: second(resize(first(x))),
    "twice as large, cubic": lambda first, second, x: resize(first(x), mode="bicubic"),
    "half as large again": lambda first, second, x: resize(first(x), scale_factor=1.5),
    "to the size before": lambda first, second, x: resize(F.avg_pool2d(x, 2), scale_factor=None, size=x.shape[2:]),
    "a stride of 3": lambda first, second, x: F.conv_transpose2d(
        F.conv2d(x, first.weight, stride=3), first.weight, stride=3
    ),
    "without padding": lambda first, second, x: F.conv2d(x, first.weight),
    "negative padding": lambda first, second, x: F.pad(first(x), (-2, -1, -3, 0)),
    "wide padding": lambda first, second, x: F.pad(first(x), (6, 5, 7, 9)),
    "wide padding before": lambda first, second, x: first(F.pad(x, (6, 5, 7, 9))),
    "wide reflection": lambda first, second, x: first(F.pad(x, (6, 5, 7, 9), mode="reflect")),
    "windows of 2": lambda first, second, x: in_windows(first(x), 2),
    "windows of 4": lambda first, second, x: in_windows(first(x), 4),
    "each second row": lambda first, second, x: first(x)[:, :, 1::2],
    "flipped inside": lambda first, second, x: second(first(x.flip(2)).flip(2)),
    "a count of neighbours": lambda first, second, x: first(x) / F.avg_pool2d(torch.ones_like(x[:, :1]), 3, 1, 1),
}
# What they do not, or not for each tile.
OTHER: dict[str, Callable[[nn.Module, nn.Module, Tensor], Tensor]] = {
    "places": lambda first, second, x: first(x) + rows(x) / 24,
    "places as a channel": lambda first, second, x: first(
        torch.cat([x.mean(1, True), (rows(x) / 24).expand_as(x[:, :1])], 1)
    ),
    "places in a condition": lambda first, second, x: torch.where(rows(x) < 24, first(x), 0.0),
    "rotations": lambda first, second, x: torch.view_as_real(
        torch.view_as_complex(first(x)[:, :2].movedim(1, -1).contiguous())
        * torch.polar(torch.ones(1), rows(x) * 1.0)[..., 0, None]
    ).movedim(-1, 1),
    "a window over the whole": lambda first, second, x: first(x) * torch.hann_window(x.shape[3]),
    "a pattern of 2": lambda first, second, x: first(x) * (rows(x) % 2),
    "a pattern of 16": lambda first, second, x: first(x) * (rows(x) % 16),
    "the border": lambda first, second, x: first(x) * (rows(x) > 2),
    "a table": lambda first, second, x: (
        first(x) + resize(first.weight[:, :1].mean(0)[None], scale_factor=None, size=x.shape[2:])
    ),
    "1.3 times as large": lambda first, second, x: resize(first(x), scale_factor=1.3),
    "corners": lambda first, second, x: resize(first(x), align_corners=True),
    "its size": lambda first, second, x: first(x) / x.shape[2],
    "a dilation of its size": lambda first, second, x: F.conv2d(
        x, first.weight, padding=1 + x.shape[2] // 16, dilation=1 + x.shape[2] // 16
    ),
    "its middle": lambda first, second, x: first(x)[:, :, x.shape[2] // 4 : -(x.shape[2] // 4)],
    "a fixed size": lambda first, second, x: F.adaptive_avg_pool2d(first(x), (16, 13)),
}


@pytest.mark.parametrize(*in_turn(name=[*SAME, *OTHER], tile=[16, (7, 13), (12, 20)]))
def test_without_statistics_patches_are_the_whole(name: str, tile: int | tuple[int, ...]) -> None:
    """They are, or the network is refused, and the fix works."""
    net = settled(Made((SAME | OTHER)[name])).double()
    grid = torch.randn(1, 2, 48, 52, generator=torch.Generator().manual_seed(1)).double()
    tiles = Tiles(tile, statistics="tile")
    with torch.no_grad():
        want = net(grid)
    if name in SAME:
        assert relative(predict_whole(net, grid, tile=tiles, quiet=True), want) < 1e-12
        return
    with explains(GraphError, "predict_whole", "Made", 'statistics="whole"'):
        predict_whole(net, grid, tile=tiles, quiet=True)
    assert relative(predict_whole(net, grid, tile=Tiles(tile, statistics="whole"), quiet=True), want) < 1e-12


def test_what_a_plan_of_patches_reads_is_looked_at_again() -> None:
    """A table of places that was zero when it was planned, and is not when it runs."""

    class Placed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.table = nn.Conv2d(1, 1, 3, padding=1), nn.Parameter(torch.zeros(1, 1, 4, 4))

        def forward(self, grid: Tensor) -> Tensor:
            return self.first(grid) + resize(self.table, scale_factor=None, size=grid.shape[2:])

    net = settled(Placed())
    net.table.data.zero_()
    plan = plan_whole(net, VOLUME.shape, tile=Tiles(16, statistics="tile"))
    with torch.no_grad():
        assert relative(predict_whole(net, VOLUME, plan=plan, quiet=True), net(VOLUME)) < 1e-5
    net.table.data.normal_()
    with pytest.raises(GraphError, match=r'predict_whole: .*aten.add.*fix: Tiles\(…, statistics="whole"\)'):
        predict_whole(net, VOLUME, plan=plan, quiet=True)


def test_other_names_are_refused() -> None:
    net = patch_nets(nn.InstanceNorm2d(4))
    with pytest.raises(LookupError, match='predict_whole: no statistics "tiles"; nearest: tile'):
        predict_whole(net, VOLUME, tile=Tiles(16, statistics="tiles"), quiet=True)


def test_an_unfinished_file_of_the_other_statistics_is_refused(tmp_path: Path) -> None:
    net, out = patch_nets(nn.InstanceNorm2d(4)), tmp_path / "out.npy"

    class Broken:
        shape, dtype = VOLUME.shape, np.dtype("float32")

        def __getitem__(self, index: object) -> np.ndarray:
            if index[-1].stop == 39:  # type: ignore[index]  # the last tile of the first row
                raise InterruptedError
            return VOLUME.numpy()[index]  # type: ignore[index]

    with pytest.raises(InterruptedError):
        predict_whole(net, Broken(), tile=Tiles(16, statistics="tile"), out=out, quiet=True)
    with pytest.raises(ValueError, match="another tile or halo"):
        predict_whole(net, VOLUME.numpy(), tile=16, out=out, quiet=True)
    written = predict_whole(net, VOLUME.numpy(), tile=Tiles(16, statistics="tile"), out=out, quiet=True)
    np.testing.assert_array_equal(written, predict_whole(net, VOLUME, tile=Tiles(16, statistics="tile"), quiet=True))
