"""Every built-in network starts with attention that is heard, and whose projections all learn."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.models import resnet18

from farfield import insert, maps
from farfield.insertion import resnet_places
from farfield.nn import GridAttention
from farfield.ops import OPERATORS
from farfield_papers import models
from farfield_papers.models import Bert, CompactNet
from farfield_papers.models.deeplab import build_head
from farfield_papers.models.video import NonLocalBlock

# Less of the grid's deviation is not noticed beside it; less of the largest projection's gradient is no learning.
HEARD, LEARNS = 0.01, 1e-3
# Their features hardly differ before training, so that their weights are nearly uniform and responses nearly constant:
# 0.5 to 1 % of the grid's deviation in some networks. What they learn by, the gradients, is checked.
UNIFORM = ("linear_elu", "hedgehog", "inline", "mala")
SMALL_SAGAN = {"side": 32, "attention_at": 16, "num_classes": 4, "generator_channels": 32, "discriminator_channels": 32}


def images(*shape: int) -> Tensor:
    """Images of large shapes and some noise: their means differ, as those of photographs do."""
    size = shape[2:]
    mode = ("linear", "bilinear", "trilinear")[len(size) - 1]
    shapes = F.interpolate(torch.randn(*shape[:2], *(max(2, length // 8) for length in size)), size, mode=mode)
    return shapes + 0.3 * torch.randn(shape)


def check(net: nn.Module, example: Any, calls: int = 1) -> None:
    found = maps.health(net, example)
    assert len(found) >= calls
    for one in found:
        assert one.response >= HEARD or one.operator in UNIFORM, one
        assert min(one.gradients.values()) >= LEARNS, one


# ---- the papers' classifiers -----------------------------------------------------------------------------------------
COMPACT = [name for name, variant in models.VARIANTS.items() if variant.path in OPERATORS]


@pytest.mark.parametrize("name", COMPACT)
def test_compact_networks(name: str) -> None:
    check(CompactNet(name, num_classes=10, width=0.25), images(2, 3, 96, 96), 10)


# ---- segmentation ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("operator", OPERATORS)
def test_deeplabs_heads(operator: str) -> None:
    """The head of ResNet-101 on features as a backbone with norms gives them."""
    head = build_head(2048, operator, 21, 64, 1, residual=False)
    check(head, images(1, 2048, 16, 16).relu())


def test_a_whole_deeplab() -> None:
    check(models.deeplab_compact("kanet_qkv", "kronecker_qkv", num_classes=5, width=0.25), images(2, 3, 64, 64), 11)


@pytest.mark.parametrize("operator", OPERATORS)
def test_a_head_hands_back_more_than_one_drawn_as_its_last_layer(operator: str) -> None:
    """So it was drawn in 0.1: logits varied by 3e-8 over positions, and the backbone had 11 times smaller gradients."""
    features = images(2, 256, 12, 12).relu().requires_grad_()
    labels = torch.randint(5, (2, 12, 12))
    head, narrow = (build_head(256, operator, 5, 64, 1, residual=False) for _ in range(2))
    narrow_down(narrow.attention)
    nn.init.normal_(narrow.reduce.weight, std=0.01)
    norms = []
    for each in (head, narrow):
        logits = each(features)
        (gradient,) = torch.autograd.grad(F.cross_entropy(logits, labels), features)
        norms.append(float(gradient.norm()))
        if each is head:  # over positions logits differ
            assert float(logits.detach().flatten(2).std(2).mean()) > 3e-4
    assert norms[0] > 5 * norms[1]


# ---- restoration -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("name", ["unet_care", "unet_residual"])
def test_unets(name: str, operator: str) -> None:
    check(models.MODELS[name](operator, spatial_dims=2), images(2, 1, 32, 32).sigmoid(), 3)


def test_the_projection_network() -> None:
    check(models.unet_projection("siamese"), images(1, 1, 3, 32, 32).sigmoid(), 3)


# ---- generation ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("operator", OPERATORS)
def test_sagan(operator: str) -> None:
    net = models.sagan(operator, **SMALL_SAGAN)
    check(net.generator, (torch.randn(4, 128), torch.arange(4)))
    check(net.discriminator, {"images": images(4, 3, 32, 32), "labels": torch.arange(4)})


# ---- language --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("operator", OPERATORS)
def test_bert(operator: str) -> None:
    net = Bert("bert_small", operator=operator, vocabulary=300, positions=32, channels=128, layers=2, heads=4)
    check(net, {"words": torch.randint(300, (2, 32))}, 2)


@pytest.mark.parametrize("operator", ["softmax", "factorized_gaussian"])
def test_a_layer_of_bert_base(operator: str) -> None:
    net = Bert("bert_base", operator=operator, vocabulary=300, positions=64, layers=1)
    check(net, torch.randint(300, (1, 64)))


@pytest.mark.parametrize("operator", [name for name in OPERATORS if name != "siamese_ones"])
def test_tokens_differ_behind_the_layers_of_bert(operator: str) -> None:
    """Where a fifth of it differed, softmax and `factorized_gaussian` learned which words are frequent and no more.

    The response of `siamese_ones`, a sum of all channels in all channels, is the larger part with any initial values.
    """
    net = models.bert_small(operator, vocabulary=512, positions=128, channels=128, layers=4, heads=4)
    with torch.no_grad():
        tokens = net.encode(torch.randint(512, (4, 128)))
    constant = tokens.mean(1).square().mean() / tokens.square().mean()
    assert 1 - float(constant) > 0.5


# ---- video -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("operator", OPERATORS)
def test_nonlocal_blocks(operator: str) -> None:
    check(NonLocalBlock(128, operator), images(2, 128, 4, 8, 8).relu())


@pytest.mark.parametrize("operator", ["softmax", "factorized_gaussian"])
def test_video_resnets(operator: str) -> None:
    net = models.video_resnet("r3d_18", operator, where=["layer2", "layer3"], num_classes=3)
    check(net, images(2, 3, 4, 48, 48), 2)


# ---- stereo ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("operator", OPERATORS)
def test_psmnet(operator: str) -> None:
    net = models.psmnet_basic(operator, max_disparity=16, first_channels=8)
    check(net, (images(2, 3, 48, 48), images(2, 3, 48, 48)), 2)


# ---- what is inserted ------------------------------------------------------------------------------------------------
def inserted(operator: str) -> nn.Module:
    net = resnet18(num_classes=5)
    project = OPERATORS[operator].projections("qkvo")
    make = partial(GridAttention, operator=operator, inner_channels=64, project=project, residual=True)
    insert(net, resnet_places("res1", "res2", "res3"), make, example=torch.zeros(1, 3, 64, 64))
    return net


@pytest.mark.parametrize("operator", OPERATORS)
def test_behind_the_stages_of_a_resnet(operator: str) -> None:
    check(inserted(operator), images(2, 3, 64, 64), 3)


@pytest.mark.parametrize("operator", ["factorized", "factorized_gaussian"])
def test_detectors(operator: str) -> None:
    setup = models.Setup(channels=32, frozen=False, shorter_side=64, longer_side=96)
    net = models.faster_rcnn("resnet18", ["fpn1", "fpn2", "res3", "res4"], operator, num_classes=2, setup=setup)
    check(net.eval(), ([images(1, 3, 64, 96)[0].sigmoid()],), 4)


# ---- that it can fail ------------------------------------------------------------------------------------------------
def narrow_down(attention: GridAttention) -> None:
    """Draw all projections as an output layer."""
    for linear in (attention.query, attention.key, attention.value, attention.output):
        if linear is not None:
            nn.init.normal_(linear.weight, std=0.01)


@pytest.mark.parametrize(
    "build", [partial(build_head, 64, "softmax", 5, 32, 1, False), partial(NonLocalBlock, 64, "dot")]
)
def test_a_start_as_that_of_an_output_layer_is_found(build: Callable[[], nn.Module]) -> None:
    net = build()
    narrow_down(net.attention)
    with pytest.raises(AssertionError):
        check(net, images(2, 64, *(8,) * (3 if isinstance(net, NonLocalBlock) else 2)).relu())
