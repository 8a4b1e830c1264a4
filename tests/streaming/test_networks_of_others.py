"""Networks of MONAI and segmentation_models_pytorch run in tiles as on the whole volume, or are refused by name."""

from __future__ import annotations

import re
from types import ModuleType

import pytest

pytestmark = pytest.mark.slow


@pytest.fixture
def script(benchmarks_on_path: None) -> ModuleType:
    """The benchmark that has the networks."""
    return __import__("streamed_networks")


WINDOWS = r'Linear at "swinViT\.layers1\.0\.blocks\.0\.attn\.qkv" gets windows of the grid as samples'
# What is refused, and why.
REFUSED = {
    "MONAI SwinUNETR, 2-D": WINDOWS,
    "MONAI SwinUNETR, 3-D": WINDOWS,
    "smp FPN, resnet18": "align_corners=True",
}
EXACT = [
    *(f"MONAI {name}, {dims}-D" for name in ("UNet, instance norm", "DynUNet", "SegResNet") for dims in (2, 3)),
    *(f"MONAI {name}, 2-D" for name in ("UNet, group norm", "BasicUNet", "AttentionUnet")),
    *(f"CARE U-Net with {name}, 2-D" for name in ("kronecker_qkv", "factorized_gaussian", "softmax")),
    "nnU-Net PlainConvUNet, 2-D",
    "diffusers AutoencoderKL, encode",
    "diffusers AutoencoderKL, decode",
    "smp Unet, timm-efficientnet-b0",
]


@pytest.mark.parametrize("name", EXACT)
def test_tiles_give_what_the_whole_gives(name: str, script: ModuleType) -> None:
    if name.startswith("nnU-Net"):
        pytest.importorskip("dynamic_network_architectures")
    result = script.measure(script.settings()[name])
    assert result["tiles"] > 1
    assert result["streamed"] < 1e-5
    assert result["alone"] > 0.005


@pytest.mark.parametrize("name", REFUSED)
def test_what_tiles_cannot_give_is_refused_by_name(name: str, script: ModuleType) -> None:
    result = script.measure(script.settings()[name])
    assert re.search(REFUSED[name], result["refused"])
