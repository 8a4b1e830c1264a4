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
    "smp MAnet, resnet18": r'Conv2d at "decoder\.center\.out_conv" sees further',
    "smp Unet, mit_b0": r'at "encoder\.block1\.0\.attn\.attn_drop" sees further',
    **{
        f"smp {name}, resnet18": "align_corners=True"
        for name in ("DeepLabV3Plus", "PAN", "PSPNet", "Segformer", "UPerNet")
    },
    "smp FPN, resnet18": "align_corners=True",
}
EXACT = [
    *(
        f"MONAI {name}, {dims}-D"
        for name in ("UNet, instance norm", "UNet, group norm", "BasicUNet", "DynUNet", "SegResNet", "AttentionUnet")
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
