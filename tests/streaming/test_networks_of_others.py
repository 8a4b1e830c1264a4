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


# What is refused, and why.
REFUSED = {
    "smp MAnet, resnet18": r"plan_whole: MAnet does not run in tiles: view in decoder\.center: its view splits",
}
EXACT = [
    *(
        f"MONAI {name}, {dims}-D"
        for name in (
            *("UNet, instance norm", "UNet, group norm", "BasicUNet", "DynUNet", "SegResNet", "AttentionUnet"),
            "SwinUNETR",
        )
        for dims in (2, 3)
    ),
    *(
        f"CARE U-Net with {name}, {dims}-D"
        for name in ("kronecker_qkv", "factorized_gaussian", "softmax")
        for dims in (2, 3)
    ),
    *(f"nnU-Net PlainConvUNet, {dims}-D" for dims in (2, 3)),
    "diffusers AutoencoderKL, encode",
    "diffusers AutoencoderKL, decode",
    "smp Unet, timm-efficientnet-b0",
    "smp Unet, mit_b0",
    *(
        f"smp {name}, resnet18"
        for name in ("DeepLabV3Plus", "PAN", "PSPNet", "UPerNet", "Segformer", "FPN", "DeepLabV3")
    ),
]
# Independent tiles of it, with the halo in multiples of the strides, are the whole volume.
WIDE = ["smp UPerNet, resnet18"]


@pytest.mark.parametrize("name", EXACT)
def test_tiles_give_what_the_whole_gives(name: str, script: ModuleType) -> None:
    if name.startswith("nnU-Net"):
        pytest.importorskip("dynamic_network_architectures")
    result = script.measure(script.settings()[name])
    assert result["tiles"] > 1
    assert result["streamed"] < 1e-5
    assert name in WIDE or result["alone"] > 0.005


@pytest.mark.parametrize("name", REFUSED)
def test_what_tiles_cannot_give_is_refused_by_name(name: str, script: ModuleType) -> None:
    result = script.measure(script.settings()[name])
    assert re.search(REFUSED[name], result["refused"])
