"""Blocks and networks that were made without memory get the initial values that they are built with."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from farfield.nn import GridAttention
from farfield_papers import models
from farfield_papers.models.bert import WordHead
from farfield_papers.models.gan import ConditionalNorm, GatedAttention
from farfield_papers.models.unet_parts import PreActivated
from farfield_papers.models.video import NonLocalBlock
from farfield_papers.nn import AttentionBlock, SqueezeExcite
from helpers.initializing import assert_each_part_is_initialized, assert_initialized, empty, reset

MODULES: dict[str, Callable[[], nn.Module]] = {
    "block": lambda: AttentionBlock(8, 8, "kronecker_qkv"),
    "squeeze excite": lambda: SqueezeExcite(8),
    "gated": lambda: GatedAttention(16, "factorized"),
    "conditional norm": lambda: ConditionalNorm(8, 3),
    "pre-activated": lambda: PreActivated(GridAttention(8, "averaged", project="qkvo")),
    "non-local": lambda: NonLocalBlock(8, "factorized"),
    "words": lambda: WordHead(8, 20),
}
SETUP = models.Setup(channels=16, frozen=False, shorter_side=64, longer_side=96)
BERTS = ("bert_base", "bert_large", "bert_small")
NARROW = {"operator": "siamese", "first_channels": 8}
SMALL: dict[str, dict[str, object]] = {
    "deeplab_v2": {"backbone": "resnet50", "output": "siamese", "residual": True},
    "deeplab_compact": {"width": 0.25},
    "unet_care": NARROW,
    "unet_residual": NARROW,
    "unet_projection": {"operator": "averaged", "first_channels": 8},
    "psmnet_stacked": NARROW,
    "psmnet_basic": NARROW,
    "sagan": {"operator": "siamese", "side": 32, "attention_at": 8, "generator_channels": 8, "num_classes": 3},
    **{name: {"operator": "siamese", "vocabulary": 500, "channels": 64, "heads": 4, "layers": 2} for name in BERTS},
}
# Parts of torchvision, which initializes them where it builds them only; they are made with weights from a file.
TORCHVISION = ("mask_rcnn", "faster_rcnn", "video_resnet")
NETWORKS = [name for name in models.MODELS if name not in TORCHVISION]


def build(name: str) -> nn.Module:
    options = SMALL.get(name, {"width": 0.25, "num_classes": 10} if name in models.VARIANTS else {})
    return models.Bert(name, **options) if name in BERTS else models.MODELS[name](**options)


@pytest.mark.parametrize("name", MODULES)
def test_modules_from_the_meta_device(name: str) -> None:
    torch.manual_seed(0)
    fresh = MODULES[name]()
    if name != "gated":  # spectral norm is torch's, and is drawn by the whole networks
        assert_initialized(reset(empty(MODULES[name])), fresh)
    else:
        assert float(reset(empty(MODULES[name])).state_dict()["gate"]) == 0.0


@pytest.mark.parametrize("name", NETWORKS)
def test_networks_from_the_meta_device(name: str) -> None:
    torch.manual_seed(0)
    assert_initialized(reset(empty(lambda: build(name))), build(name))


@pytest.mark.parametrize("name", NETWORKS)
def test_no_module_stays_as_it_was_allocated(name: str) -> None:
    assert_each_part_is_initialized(empty(lambda: build(name)))
