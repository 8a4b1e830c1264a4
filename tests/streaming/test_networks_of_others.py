"""Networks of MONAI and segmentation_models_pytorch run in tiles as on the whole volume, or are refused by name."""

from __future__ import annotations

from types import ModuleType

import pytest

pytestmark = pytest.mark.slow


@pytest.fixture
def script(benchmarks_on_path: None) -> ModuleType:
    """The benchmark that has the networks."""
    return __import__("streamed_networks")


@pytest.mark.parametrize(
    "name",
    [
        "MONAI UNet, 2-D, group norm",
        "MONAI SegResNet, 3-D",
        "MONAI AttentionUnet, 2-D",
        "diffusers AutoencoderKL, encode",
        "diffusers AutoencoderKL, decode",
        "smp Unet, efficientnet-b0",
    ],
)
def test_tiles_give_what_the_whole_gives(name: str, script: ModuleType) -> None:
    result = script.measure(script.settings()[name])
    assert result["tiles"] > 1
    assert result["streamed"] < 1e-5
    assert result["alone"] > 0.01


def test_what_tiles_cannot_give_is_refused_by_name(script: ModuleType) -> None:
    result = script.measure(script.settings()["smp FPN, resnet18"])
    assert "align_corners=True" in result["refused"]
