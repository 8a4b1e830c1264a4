"""Norms and pooling that see what a tile reads, `Tiles(statistics="tile")`: the network on patches, put together."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from farfield.nn import SqueezeExcite
from farfield.streaming import MeanOverFlips, Tiles, plan_whole, predict_whole
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
