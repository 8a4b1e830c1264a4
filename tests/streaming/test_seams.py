"""Seams: how far two tilings differ, the layer that it comes from, and the advice."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from farfield.streaming import GlobalLayer, SeamReport, find_seams, freeze_statistics
from farfield.volumes import ImageMetadata, Volume
from helpers.drawn_networks import Layer
from helpers.partly import partly
from helpers.streamed_nets import attention, relative, settled


def convolution(inputs: int, outputs: int, kernel: int = 3) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2)


def ramp(*size: int, channels: int = 1) -> Tensor:
    """Noise whose mean grows along the last axis."""
    noise = torch.rand(channels, *size, generator=torch.Generator().manual_seed(0))
    return noise + torch.linspace(0, 3, size[-1])


def with_layers(*layers: nn.Module) -> nn.Module:
    return settled(nn.Sequential(convolution(1, 4), *layers, convolution(4, 1)))


def tilings(run: Callable[[Tensor], Tensor], image: Tensor, tile: int, before: int, after: int) -> list[Tensor]:
    """Two tilings shifted by half a tile, of windows of one size, in plain slices."""
    results = []
    axes = [range(length) for length in image.shape[1:]]
    for first in (tile, tile // 2):
        result = torch.empty(image.shape)
        spans = []
        for axis in axes:
            ends, size = [0, *range(first, len(axis), tile), len(axis)], min(len(axis), tile + before + after)
            starts = [min(max(0, start - before), len(axis) - size) for start in ends[:-1]]
            spans.append(
                [(*pair, start, start + size) for pair, start in zip(itertools.pairwise(ends), starts, strict=True)]
            )
        for (top, bottom, up, down), (left, right, west, east) in itertools.product(*spans):
            part = run(image[None, :, up:down, west:east])[0]
            result[:, top:bottom, left:right] = part[:, top - up : bottom - up, left - west : right - west]
        results.append(result)
    return results


LOCAL: dict[str, Callable[[], nn.Module]] = {
    "plain": lambda: with_layers(nn.ReLU(), convolution(4, 4)),
    "batch norm": lambda: with_layers(nn.BatchNorm2d(4), nn.ReLU()),
    "strides": lambda: with_layers(nn.Conv2d(4, 4, 4, 2, 1), nn.ReLU(), nn.ConvTranspose2d(4, 4, 4, 2, 1)),
}


@pytest.mark.parametrize("name", LOCAL)
def test_a_halo_mends_what_is_local(name: str) -> None:
    seams = find_seams(LOCAL[name](), ramp(96, 128), 32)
    assert seams.mismatch.largest < 1e-5
    assert seams.without_halo.largest > 0.01
    assert (seams.choice, seams.layers) == ("halo", ())
    assert "A halo alone" in str(seams)


def test_numbers_of_everything_are_statistics() -> None:
    # Two tiles of the tilings, both with one number in place of their own maximum, agree.
    seams = find_seams(with_layers(Layer(lambda grid: grid / grid.max())), ramp(64, 96), 32)
    assert [layer.name for layer in seams.layers] == ["1: max"]
    assert seams.layers[0].removed > 0.99


def test_nothing_to_do() -> None:
    seams = find_seams(settled(nn.Sequential(convolution(1, 4, 1), nn.GELU())), ramp(96, 96), 32)
    assert seams.choice == "nothing"
    assert seams.without_halo.largest < 1e-5
    # A halo of no positions.
    assert seams.reads == seams.tile


@pytest.mark.parametrize("scale", [(1.0, 0.0), (85.0, 0.0), (1.0, 1000.0)])
def test_numbers_are_those_of_plain_tilings(scale: tuple[float, float]) -> None:
    net, image = with_layers(nn.InstanceNorm2d(4), nn.GELU()), scale[0] * ramp(96, 128) + scale[1]
    seams = find_seams(net, image, 32)
    with torch.no_grad():
        one, other = tilings(net, image, 32, 2, 2)
        bare = tilings(net, image, 32, 0, 0)
    assert relative(seams.predictions[0], one) < 1e-4
    assert relative(seams.predictions[1], other) < 1e-4
    extent = float(one.max() - one.min())
    for got, (first, second) in ((seams.mismatch, (one, other)), (seams.without_halo, bare)):
        difference = (first - second).abs() / extent
        assert got.mean == pytest.approx(float(difference.mean()), rel=1e-3)
        assert got.largest == pytest.approx(float(difference.max()), rel=1e-3)
    numbers = one[0].double().numpy()
    down, right = np.abs(np.diff(numbers, axis=0)), np.abs(np.diff(numbers, axis=1))
    borders = [down[[31, 63]].ravel(), right[:, [31, 63, 95]].ravel()]
    elsewhere = [np.delete(down, [31, 63], 0).ravel(), np.delete(right, [31, 63, 95], 1).ravel()]
    step = np.concatenate(borders).mean() / np.concatenate(elsewhere).mean()
    assert seams.mismatch.step == pytest.approx(step, rel=1e-3)


class Gate(nn.Module):
    """Each channel scaled by a function of all means."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, grid: Tensor) -> Tensor:
        return grid * torch.sigmoid(self.linear(grid.mean((2, 3))))[:, :, None, None]


def monai_unet() -> nn.Module:
    networks = pytest.importorskip("monai.networks.nets")
    torch.manual_seed(0)
    return networks.UNet(2, 1, 1, (4, 8), (2,), num_res_units=1)


def smp_unet() -> nn.Module:
    models = pytest.importorskip("segmentation_models_pytorch")
    torch.manual_seed(0)
    options = {"decoder_channels": (32, 16, 16), "decoder_attention_type": "scse"}
    return models.Unet("resnet18", encoder_depth=3, encoder_weights=None, in_channels=1, **options)


def autoencoder() -> nn.Module:
    diffusers = pytest.importorskip("diffusers")
    torch.manual_seed(0)
    options = {"block_out_channels": (8,), "norm_num_groups": 4, "mid_block_add_attention": False}
    return diffusers.AutoencoderKL(1, 1, **options)


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "MONAI": monai_unet,
    "segmentation_models_pytorch": smp_unet,
    "diffusers": autoencoder,
    "instance and group norm": lambda: with_layers(
        nn.InstanceNorm2d(4), nn.GELU(), convolution(4, 4), nn.GroupNorm(2, 4)
    ),
    "a gate of means": lambda: with_layers(nn.BatchNorm2d(4), Gate()),
    "a norm after batch norms": lambda: with_layers(nn.BatchNorm2d(4), nn.ReLU(), nn.GroupNorm(1, 4)),
}


@pytest.mark.long
@pytest.mark.parametrize("name", partly(NETWORKS, [name for name in NETWORKS if name != "diffusers"]))
def test_the_first_layer_removes_most(name: str) -> None:
    """Each layer is frozen by `freeze_statistics` on the tiles, and both tilings run again."""
    net, image = NETWORKS[name]().eval(), ramp(64, 128)
    seams = find_seams(net, image, 32)
    assert seams.mismatch.mean > 1e-4
    halo = [side[1] for side in seams.halo]
    assert seams.halo.before[0] == halo[0]
    windows: list[Tensor] = []

    def collect(grid: Tensor) -> Tensor:
        windows.append(grid)
        return run(net)(grid)

    def run(network: nn.Module) -> Callable[[Tensor], Tensor]:
        def first(grid: Tensor) -> Tensor:
            result = network(grid)
            return result if isinstance(result, Tensor) else result["sample"]

        return first

    with torch.no_grad():
        before = relative(*tilings(collect, image, 32, *halo))
        layers = freeze_statistics(net, windows).frozen
        left = {}
        for call in layers:
            frozen = freeze_statistics(net, windows, only=[call.key[0]])
            one, other = tilings(run(frozen), image, 32, *halo)
            left[str(call)] = float((one - other).abs().mean())
        one, other = tilings(run(net), image, 32, *halo)
    total = float((one - other).abs().mean())
    assert before > 0
    assert {each.name for each in seams.layers} == set(left)
    best = min(left.values())
    # Of two that remove the same within a hundredth, either may be named.
    assert left[seams.layers[0].name] <= best + 0.01 * total
    # Of few layers all tiles were run again.
    for layer in seams.layers if len(layers) < 10 else ():
        assert layer.removed == pytest.approx(1 - left[layer.name] / total, abs=0.02)
    removed = [layer.removed for layer in seams.layers]
    assert removed == sorted(removed, reverse=True)


def test_the_advice() -> None:
    net, image = with_layers(nn.InstanceNorm2d(4)), ramp(128, 128)
    tiles = [image[:, top : top + 32, left : left + 32] for top in range(0, 128, 32) for left in range(0, 128, 32)]
    advice = {
        "no patches": find_seams(net, image, 32),
        "patches like the whole": find_seams(net, image, 32, [image, image.flip(1)]),
        "patches that differ as tiles do": find_seams(net, image, 32, tiles),
        "patches of one place": find_seams(net, image, 32, torch.stack(tiles[::4])),
    }
    assert advice["no patches"].choice == "compare"
    assert "not known here" in advice["no patches"].advice
    assert advice["patches like the whole"].choice == "whole"
    assert advice["patches that differ as tiles do"].choice == "whole"
    assert advice["patches of one place"].choice == "frozen"
    assert "freeze_statistics" in advice["patches of one place"].advice
    assert advice["patches of one place"].layers[0].removed == pytest.approx(1, abs=1e-3)


def test_a_halo_without_room() -> None:
    net = settled(nn.Sequential(convolution(1, 4, 41), nn.InstanceNorm2d(4)))
    seams = find_seams(net, ramp(64, 96), 32)
    assert seams.missing_halo == (20, 20)
    assert seams.halo == ((8, 8), (8, 8))
    assert "20 × 20 positions there was no room" in str(seams)


# Distances of tiles, whole and patches; why it is not exact; the choice.
CHOICES = [
    ((0.5, 0.1, 0.2), "", "whole"),
    ((0.2, 0.5, 0.3), "", "tile"),
    ((0.4, 0.5, 0.3), "", "frozen"),
    ((0.4, 0.04, 0.0), "", "whole"),
    ((0.2, 0.1, 0.3), "an operation", "frozen"),
    ((0.4, 0.5, None), "", "compare"),
    ((0.4, 0.5, None), "an operation", "frozen"),
]


@pytest.mark.parametrize(("distances", "exact", "choice"), CHOICES)
def test_the_rule_of_the_choice(distances: tuple[float, float, float | None], exact: str, choice: str) -> None:
    seams = find_seams(with_layers(nn.InstanceNorm2d(4)), ramp(64, 64), 32)
    # A layer with which nothing goes does not count.
    layers = (GlobalLayer("norm", "", 0.9, *distances), GlobalLayer("other", "", -0.1, 9.0, 9.0, 0.0))
    changed = replace(seams, layers=layers if distances[2] is not None else layers[:1], exact=exact)
    assert changed.choice == choice
    if distances[2] is not None:
        assert changed.distances() == pytest.approx(distances)
        # Where nothing goes with one layer alone, all count.
        alone = replace(changed, layers=tuple(each._replace(removed=-0.1) for each in layers[:1]))
        assert alone.choice == choice
    assert changed.advice in str(changed)
    assert (exact in changed.advice) if exact else ("cannot" not in changed.advice)


def test_constants_that_do_not_mend() -> None:
    seams = find_seams(with_layers(nn.InstanceNorm2d(4)), ramp(64, 64), 32)
    assert replace(seams, removed=0.2).choice == "whole"
    assert replace(seams, removed=0.2, exact="an operation").choice == "overlap"
    halo = replace(seams, removed=0.2, missing_halo=(40, 40))
    assert halo.choice == "halo"
    assert "halo of 40 × 40 positions" in halo.advice


def test_attention_is_named() -> None:
    seams = find_seams(
        settled(nn.Sequential(convolution(1, 6), attention("siamese"), convolution(6, 1))), ramp(96, 96), 32
    )
    assert seams.choice == "whole"
    assert seams.layers[0].kept == "it attends to all positions"
    assert "1: layer" in seams.advice


class Sorted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = convolution(1, 4), nn.InstanceNorm2d(4)

    def forward(self, grid: Tensor) -> Tensor:
        return self.norm(self.first(grid)).sort(-1)[0]


def test_what_does_not_run_exactly_is_named() -> None:
    seams = find_seams(settled(Sorted()), ramp(96, 96), 32)
    assert "aten.sort" in seams.exact
    assert seams.choice in ("overlap", "frozen")
    assert "sort" in seams.advice
    assert [each.name for each in seams.layers] == ["norm: F.instance_norm", "Sorted: sort"]


def test_a_scripted_network_is_compared_without_layers() -> None:
    net = with_layers(nn.InstanceNorm2d(4))
    scripted = torch.jit.trace(net, torch.rand(1, 1, 32, 32))
    seams, plain = find_seams(scripted, ramp(96, 96), (32, 32)), find_seams(net, ramp(96, 96), 32)
    assert seams.layers == ()
    assert "scripted" in str(seams)
    # By the range of predictions with a halo, which is another where it is not known.
    assert seams.without_halo.mean == pytest.approx(plain.without_halo.mean, rel=0.1)


def test_three_spatial_dims_and_an_axis_that_is_not_cut(tmp_path: Path) -> None:
    net = settled(nn.Sequential(nn.Conv3d(1, 4, 3, padding=1), nn.InstanceNorm3d(4), nn.Conv3d(4, 2, 2, 2)))
    seams = find_seams(net, ramp(8, 32, 48).numpy(), (None, 16, 16))
    assert seams.tile == (8, 16, 16)
    assert seams.predictions[0].shape == (2, 4, 16, 24)
    assert seams.borders == ((), (8,), (8, 16))
    seams.plot(tmp_path / "seams.png")
    assert (tmp_path / "seams.png").stat().st_size > 1000


def test_a_part_of_a_large_volume_is_read() -> None:
    class Counted:
        shape, dtype, read = (1, 4000, 4000), np.dtype("float32"), 0

        def __getitem__(self, index: tuple[slice, ...]) -> np.ndarray:
            part = np.random.default_rng(0).random([len(range(*each.indices(4000))) for each in index[1:]])
            self.read += part.size
            return part[None].astype("float32")

    volume = Counted()
    seams: SeamReport = find_seams(with_layers(nn.InstanceNorm2d(4)), volume, 32)
    assert seams.size == (128, 128)
    assert volume.read <= 2 * 128 * 128
    assert "128 × 128 of 4000 × 4000" in str(seams)


def test_planes_one_after_the_other_and_an_axis_that_is_not_cut() -> None:
    planes = Volume(ramp(5, 64, 64)[0].numpy(), ImageMetadata("ZYX"))
    assert find_seams(with_layers(nn.InstanceNorm2d(4)), planes, 32).size == (64, 64)
    # A stride of 2 makes 25 of 49, which tiles do not cut.
    strided = settled(nn.Sequential(nn.Conv2d(1, 4, 3, 2, 1), nn.InstanceNorm2d(4)))
    assert find_seams(strided, ramp(49, 64), (None, 16)).layers[0].name == "1: F.instance_norm"


REFUSED: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "no module": (lambda: find_seams(abs, ramp(32, 32), 16), TypeError, "network must be"),
    "training": (lambda: find_seams(with_layers().train(), ramp(32, 32), 16), ValueError, "model.eval"),
    "no tile": (lambda: find_seams(with_layers(), ramp(32, 32), None), TypeError, "tile=64"),
    "one tile": (lambda: find_seams(with_layers(), ramp(32, 32), 32), ValueError, "not smaller than the volume"),
    "channels": (lambda: find_seams(with_layers(), ramp(64, 64, channels=2), 32), ValueError, "does not run on a tile"),
    "no array": (lambda: find_seams(with_layers(), "a.tif", 32), TypeError, "open_volume"),
    "not finite": (lambda: find_seams(with_layers(), ramp(64, 64) / 0, 32), ValueError, "is not finite"),
    "patches": (
        lambda: find_seams(with_layers(nn.InstanceNorm2d(4)), ramp(64, 64), 32, [ramp(32, 32, channels=3)]),
        ValueError,
        "does not run on a patch of shape",
    ),
    "no values": (lambda: find_seams(with_layers().to("meta"), ramp(64, 64), 32), ValueError, "on the device meta"),
    "shortened": (lambda: find_seams(settled(nn.Conv2d(1, 1, 3)), ramp(64, 64), 32), ValueError, "no multiple or"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name: str) -> None:
    call, kind, text = REFUSED[name]
    with pytest.raises(kind, match=text) as error:
        call()
    assert str(error.value).startswith("find_seams: ")
