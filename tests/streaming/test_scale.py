"""`scale` is what the volume scaled before gives: of each channel, under a mask, padded, resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from farfield.streaming import predict_whole
from farfield.volumes import ImageMetadata, Volume, mean_and_std, percentiles
from helpers.stopping import stopping
from helpers.streamed_nets import settled

IMAGE = (1000 * np.random.default_rng(0).random((2, 37, 44)) ** [[[1]], [[4]]]).astype("uint16")
NET = settled(
    nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.InstanceNorm2d(4), nn.ReLU(), nn.Conv2d(4, 1, 3, padding=1))
)


def scaled(low: Any, high: Any, image: np.ndarray = IMAGE) -> np.ndarray:
    low, high = (np.reshape(np.asarray(each, float), (-1, 1, 1)) for each in (low, high))
    return ((image - low) / (high - low)).astype("float32")


def check(found: Any, volume: np.ndarray, net: nn.Module = NET, **options: Any) -> None:
    want = predict_whole(net, volume, tile=16, quiet=True, **options)
    np.testing.assert_allclose(np.asarray(found), want, atol=2e-5 * np.abs(want).max())


@pytest.mark.parametrize("kind", ["array", "tensor", "volume"])
def test_numbers_of_each_channel(kind: str) -> None:
    pair = percentiles(IMAGE, [1, 99.8], axes="YX")
    assert pair[0].ravel().tolist() == np.percentile(IMAGE, 1, axis=(1, 2)).tolist()
    given: dict[str, Any] = {"array": IMAGE, "tensor": torch.from_numpy(IMAGE.astype("int32"))}
    given["volume"] = Volume(IMAGE.transpose(1, 2, 0), ImageMetadata("YXC"))
    pair = percentiles(given[kind], [1, 99.8]) if kind == "volume" else pair
    check(predict_whole(NET, given[kind], tile=16, scale=pair, quiet=True), scaled(*pair))


def test_one_pair_for_all_channels() -> None:
    check(predict_whole(NET, IMAGE, tile=16, scale=(10, 900.5), quiet=True), scaled(10, 900.5))


def test_mean_and_deviation_under_a_mask() -> None:
    mask = np.zeros(IMAGE.shape[1:], bool)
    mask[5:20, 8:40] = True
    mean, std = mean_and_std(IMAGE, axes="YX", mask=mask)
    found = predict_whole(NET, IMAGE, tile=16, mask=mask, fill=0.5, scale=(mean, mean + std), quiet=True)
    check(found, scaled(mean, mean + std), mask=mask, fill=0.5)


@pytest.mark.parametrize("pad", ["constant", "reflect"])
def test_padding_is_that_of_the_scaled_volume(pad: str) -> None:
    net = settled(nn.Sequential(nn.Conv2d(2, 3, 2, stride=2), nn.ConvTranspose2d(3, 1, 2, stride=2)))
    found = predict_whole(net, IMAGE, tile=16, pad=pad, scale=(100, 700), quiet=True)
    check(found, scaled(100, 700), net, pad=pad)


def test_a_network_of_half_precision_takes_numbers_that_it_could_not_hold() -> None:
    net = settled(nn.Conv2d(2, 1, 1)).bfloat16()
    large = 70000.0 + IMAGE.astype("float32")
    found = predict_whole(net, large, tile=16, scale=(70000, 71000), quiet=True)
    np.testing.assert_allclose(found, predict_whole(net, scaled(0, 1000), tile=16, quiet=True), atol=0.02)
    assert np.std(found) > 0.01


class Sum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(2, 1, 3, padding=1), nn.Conv2d(1, 1, 1)

    def forward(self, image: Tensor, other: Tensor) -> Tensor:
        return self.first(image) + self.second(other)


def test_of_several_inputs_each_has_its_own() -> None:
    net, other = settled(Sum()), np.random.default_rng(1).random((1, 37, 44)).astype("float32")
    found = predict_whole(net, (IMAGE, other), tile=16, scale=((0, [900, 300]), None), quiet=True)
    check(found, (scaled(0, [900, 300]), other), net)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"scale must be a pair .* each of 2 inputs, got .*; fix: a tuple of 2"):
        predict_whole(net, (IMAGE, other), tile=16, scale=((0, 1),), quiet=True)


def test_it_goes_on_with_the_same_scale_alone(tmp_path: Path) -> None:
    out = tmp_path / "out.npy"
    with stopping(4):
        predict_whole(NET, IMAGE, tile=16, scale=(0, 900), out=out, quiet=True)
    for other in ({}, {"scale": (0, 901)}):
        with pytest.raises(ValueError, match="an unfinished prediction with another scale; fix: "):
            predict_whole(NET, IMAGE, tile=16, out=out, quiet=True, **other)
    found = predict_whole(NET, IMAGE, tile=16, scale=(0, 900), out=out, quiet=True)
    np.testing.assert_array_equal(found, predict_whole(NET, IMAGE, tile=16, scale=(0, 900), quiet=True))


@pytest.mark.parametrize(
    ("scale", "kind", "text"),
    [
        ("percentiles", TypeError, r"got 'percentiles'; fix: scale=percentiles\(volume, \[1, 99\.8\]\)"),
        (3, TypeError, "scale must be the two numbers that become 0 and 1, .*, got 3; fix"),
        ((0, [1, 2, 3]), ValueError, 'scale has 1 and 3 numbers, and the volume has 2 channels; fix: .*axes="YX"'),
        ((0, [1, 0]), ValueError, r"scale must be finite numbers that differ, got low = \[0\.0\] and high = \[1\.0, 0"),
        ((0, np.inf), ValueError, "scale must be finite numbers"),
    ],
)
def test_what_is_no_scale_is_refused(scale: Any, kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=f"^predict_whole: .*{text}"):
        predict_whole(NET, IMAGE, tile=16, scale=scale, quiet=True)
