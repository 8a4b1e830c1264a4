"""The mean over all flips of a volume: in tiles what it is in one piece, and what a loop over flips gives."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from farfield import ShapeError
from farfield.streaming import MeanOverFlips, Tiles, plan_whole, predict_whole
from helpers.streamed_nets import Branches, Hourglass, attention, relative, settled


def by_hand(net: nn.Module, volume: Tensor, axes: tuple[int, ...]) -> Tensor:
    """Mean over all flips, one after the other, in float64."""
    dims = [axis + 2 for axis in axes]
    flips = [flip for count in range(len(dims) + 1) for flip in itertools.combinations(dims, count)]
    with torch.no_grad():
        return sum(net(volume.flip(flip)).double().flip(flip) for flip in flips) / len(flips)


def volume_of(*size: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(size).astype("float32")


class Upwards(nn.Module):
    """A halo on one side only, an attention, and an output that is twice as long, of a network with a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(1, 6, 3), nn.InstanceNorm2d(6, affine=True)
        self.attention = attention("kronecker_qkv")
        self.last = nn.ConvTranspose2d(6, 2, 2, stride=2)

    def forward(self, grid: Tensor) -> Tensor:
        grid = nn.functional.pad(grid, (2, 0, 0, 2))
        return self.last(self.attention(self.norm(self.first(grid))))


NETWORKS: dict[str, Any] = {
    "hourglass": lambda: Hourglass("factorized_gaussian", 2),
    "branches": lambda: Branches("siamese"),
    "upwards": Upwards,
    "valid": lambda: nn.Sequential(nn.Conv2d(1, 3, 3), nn.Conv2d(3, 2, 4, stride=2)),
}


@pytest.mark.parametrize("axes", [(0,), (1,), (0, 1), ()])
@pytest.mark.parametrize("name", NETWORKS)
def test_tiles_give_the_mean_over_the_whole(name: str, axes: tuple[int, ...]) -> None:
    net, volume = settled(NETWORKS[name]()), volume_of(30, 36)
    want = by_hand(net, torch.from_numpy(volume)[None, None], axes)[0]
    flipped = MeanOverFlips(net, axes).eval()
    with torch.no_grad():
        assert relative(flipped(torch.from_numpy(volume)[None, None])[0], want) < 1e-5
    got = torch.as_tensor(predict_whole(flipped, volume, tile=(12, 18), quiet=True))
    assert relative(got.reshape(want.shape), want) < 1e-5
    # The test can fail: without flips the result is another.
    assert not axes or relative(net(torch.from_numpy(volume)[None, None]).detach()[0], want) > 1e-3


@pytest.mark.long
def test_padding_is_that_of_the_volume() -> None:
    net, volume = settled(Hourglass("siamese", 3)), volume_of(7, 15, 17)
    padded = np.pad(volume, [(0, 1), (0, 1), (0, 1)], "reflect")
    want = by_hand(net, torch.from_numpy(padded)[None, None], (0, 1, 2))[0, 0, :7, :15, :17]
    got = predict_whole(MeanOverFlips(net, (0, 1, 2)).eval(), volume, tile=(4, 6, 8), pad="reflect", quiet=True)
    assert relative(got, want) < 1e-5


def test_means_are_reduced_and_not_their_parts() -> None:
    net, volume = settled(nn.Sequential(nn.Conv2d(1, 4, 5, padding=2))), volume_of(20, 24)
    mean = by_hand(net, torch.from_numpy(volume)[None, None], (0, 1))
    flipped = MeanOverFlips(net, (0, 1)).eval()
    labels = predict_whole(flipped, volume, tile=8, reduce="argmax", quiet=True)
    top = mean[0].topk(2, dim=0).values
    apart = (top[0] - top[1] > 1e-5).numpy()
    np.testing.assert_array_equal(np.asarray(labels)[apart], mean[0].argmax(0).numpy()[apart])
    largest = predict_whole(flipped, volume, tile=8, reduce=lambda grid: grid.amax(1, keepdim=True), quiet=True)
    assert relative(largest, mean[0].amax(0)) < 1e-5


@pytest.mark.long
def test_a_file_holds_the_mean_and_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from farfield.streaming import progress

    net, volume = MeanOverFlips(settled(Hourglass("siamese", 2)), (0, 1)).eval(), volume_of(20, 24)
    plain = predict_whole(net, volume, tile=8, quiet=True)
    read, reads = progress.Stream.read, []

    def counted(*arguments: Any) -> Tensor:
        reads.append(arguments)
        return read(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(progress.Stream, "read", counted)
        predict_whole(net, volume, tile=8, quiet=True)
    last, count = len(reads) - 6, itertools.count()

    def stopped(*arguments: Any) -> Tensor:
        if next(count) == last:
            raise InterruptedError
        return read(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(progress.Stream, "read", stopped)
        with pytest.raises(InterruptedError):
            predict_whole(net, volume, tile=8, out=tmp_path / "out.zarr", quiet=True)
    written = predict_whole(net, volume, tile=8, out=tmp_path / "out.zarr", quiet=True)
    np.testing.assert_array_equal(written[:], plain)


def test_the_plan_counts_flips() -> None:
    net = settled(Hourglass("siamese", 2))
    plain, flipped = (plan_whole(each, (40, 40), tile=20) for each in (net, MeanOverFlips(net, (0, 1)).eval()))
    assert flipped.macs == 4 * plain.macs
    assert len(flipped.passes) == len(plain.passes)
    assert flipped.recomputed < 1.1
    assert "network.bottom" in flipped.passes[0].summarizes


def test_grids_of_flips_are_stored() -> None:
    net, volume = MeanOverFlips(settled(Hourglass("siamese", 2)), (0,)).eval(), volume_of(24, 24)
    tiles = Tiles(12, disk=10**9)
    plan = plan_whole(net, volume.shape, tile=tiles)
    assert plan.on_disk
    assert plan.disk_bytes > 0
    got = predict_whole(net, volume, tile=tiles, quiet=True)
    assert relative(got, by_hand(net.network, torch.from_numpy(volume)[None, None], (0,))[0, 0]) < 1e-5


@pytest.mark.parametrize("axes", [(0,), (0, 1)])
@pytest.mark.parametrize("options", [{"tile": 8}, {"tile": (None, 8)}, {"tile": 8, "pad": "reflect"}])
def test_sizes_that_strides_do_not_divide(axes: tuple[int, ...], options: dict[str, Any]) -> None:
    net, volume = settled(nn.Sequential(nn.Conv2d(1, 2, 3, stride=2, padding=1))), volume_of(21, 20)
    got = predict_whole(MeanOverFlips(net, axes).eval(), volume, quiet=True, **options)
    padded = np.pad(volume, [(0, "pad" in options), (0, 0)], "reflect")
    assert relative(got, by_hand(net, torch.from_numpy(padded)[None, None], axes)[0]) < 1e-5


@pytest.mark.parametrize(
    ("axes", "error", "text"),
    [
        (0, TypeError, r"MeanOverFlips: axes must be integers, got 0; fix: axes=\(0, 1\)"),
        ((0, 1.0), TypeError, "axes must be integers"),
        ((0, 0), ValueError, "axes must be different numbers from 0"),
        ((-1,), ValueError, "axes must be different numbers from 0"),
    ],
)
def test_axes_that_are_none(axes: Any, error: type, text: str) -> None:
    with pytest.raises(error, match=text):
        MeanOverFlips(nn.Conv2d(1, 1, 1), axes)


@pytest.mark.long
def test_what_cannot_be_flipped_is_refused() -> None:
    net = settled(Hourglass("siamese", 2))
    with pytest.raises(ShapeError, match=r"predict_whole: .*axes \(2,\), .*grid has 2"):
        predict_whole(MeanOverFlips(net, (2,)).eval(), volume_of(20, 20), tile=8, quiet=True)

    class Labels(nn.Sequential):
        def forward(self, grid: Tensor) -> Tensor:
            return super().forward(grid).argmax(1, keepdim=True)

    labels, volume = settled(Labels(nn.Conv2d(1, 3, 3, padding=1))), volume_of(20, 20)
    with pytest.raises(TypeError, match=r'^predict_whole: .*int64, .*; fix: a network .* scores, and reduce="argmax"'):
        predict_whole(MeanOverFlips(labels, (0,)).eval(), volume, tile=Tiles(8, halo=1), quiet=True)
    # The fix works.
    flipped = MeanOverFlips(labels[0], (0,)).eval()
    got = predict_whole(flipped, volume, tile=8, reduce="argmax", quiet=True)
    mean = by_hand(labels[0], torch.from_numpy(volume)[None, None], (0,))[0]
    assert (got == mean.argmax(0).numpy()).mean() > 0.99


def test_gradients_pass() -> None:
    net = MeanOverFlips(nn.Conv1d(1, 1, 3, padding=1).double(), (0,))
    assert torch.autograd.gradcheck(net, torch.randn(1, 1, 6, dtype=torch.float64, requires_grad=True))


def test_means_of_float16_do_not_overflow() -> None:
    net = MeanOverFlips(nn.Identity(), (0,))
    assert net(torch.full((1, 1, 4), 6e4, dtype=torch.float16)).tolist() == [[[6e4] * 4]]


class Normalizing(nn.Conv2d):
    """A network that writes to its input."""

    def forward(self, grid: Tensor) -> Tensor:
        return super().forward(grid.sub_(0.4).mul_(3.0))


@pytest.mark.parametrize("axes", [(0, 1), ()])
def test_each_flip_of_a_network_that_writes_to_its_input_gets_the_volume(axes: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    net, volume = Normalizing(1, 2, 3, padding=1).eval(), torch.rand(1, 1, 24, 26)
    kept, flipped = volume.clone(), MeanOverFlips(net, axes).eval()
    with torch.no_grad():
        for got in (flipped(volume), predict_whole(flipped, volume, tile=8, quiet=True)):
            assert relative(got, by_hand(net, volume, axes)) < 1e-5
    assert torch.equal(volume, kept)
