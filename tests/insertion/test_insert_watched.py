"""Who else looks at a place: hooks from before, and those that put another layer in it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
from timm.models import FeatureHookNet
from torch import Tensor, nn
from transformers import (
    ConvNextConfig,
    DepthAnythingConfig,
    DepthAnythingForDepthEstimation,
    Dinov2Backbone,
    Dinov2Config,
    SegformerConfig,
    SegformerForSemanticSegmentation,
    UperNetConfig,
    UperNetForSemanticSegmentation,
    ViTConfig,
    ViTModel,
)

from farfield import insert, remove
from helpers.seeding import seeded_generator
from helpers.small_hosts import Net, felt, identity, image

square = torch.rand(1, 3, 32, 32, generator=seeded_generator(2))


# ---- hooks from before -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("where", ["stem", "stage", "stage.1", "stage.2"])
def test_who_hooked_before_sees_a_place_with_its_addition(where: str) -> None:
    net, seen = Net().eval(), []
    place = net.get_submodule(where)
    place.register_forward_hook(lambda module, inputs, grid: seen.append(grid))
    net(image)
    added = insert(net, where, felt, example=image)[where]
    seen[1:] = []
    net(image)
    assert torch.equal(seen[1], added(seen[0]))


def test_a_hook_changes_what_the_addition_made() -> None:
    net = nn.Sequential(nn.Conv2d(3, 8, 1)).eval()
    net[0].register_forward_hook(lambda module, inputs, grid: torch.zeros_like(grid))
    with pytest.raises(ValueError, match=r"0 has no effect: .*Sequential"):
        insert(net, "0", identity, example=image)


def vit(**options: Any) -> ViTConfig:
    sizes = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 32}
    return ViTConfig(image_size=32, patch_size=8, **sizes, **options)


@pytest.mark.parametrize("hooked", ["before", "by the example", "after"])
def test_hidden_states_of_transformers(hooked: str) -> None:
    model = ViTModel(vit()).eval()
    if hooked == "before":
        model(square, output_hidden_states=True)
    example = {"pixel_values": square, "output_hidden_states": hooked == "by the example"}
    added = insert(model, "layers.1", felt, example=example, layout="channels_last")["layers.1"]
    answers: list[Tensor] = []
    added.register_forward_hook(lambda module, inputs, grid: answers.append(grid.movedim(1, -1)))
    states = model(square, output_hidden_states=True).hidden_states
    assert torch.equal(states[2], answers[0])


def test_the_probe_leaves_no_hook_of_the_host() -> None:
    model = ViTModel(vit())
    attributes = [set(vars(module)) for module in model.modules()]
    insert(
        model, "layers.1", felt, example={"pixel_values": square, "output_hidden_states": True}, layout="channels_last"
    )
    remove(model)
    assert [set(vars(module)) for module in model.modules()] == attributes
    assert not any(module._forward_hooks for module in model.modules())
    assert len(model(square, output_hidden_states=True).hidden_states) == 4


def tiny_vit() -> nn.Module:
    return timm.create_model("vit_tiny_patch16_224", img_size=32, depth=3, embed_dim=12, num_heads=2).eval()


def test_features_that_timm_hooks() -> None:
    net = tiny_vit()
    features = FeatureHookNet(net, out_indices=(0, 1))
    before = features(square)
    insert(net, ["blocks.0", "blocks.1"], felt, example=square, layout="channels_last")
    after = features(square)
    assert len(after) == 2
    assert not any(torch.equal(one, other) for one, other in zip(before, after, strict=True))


def dinov2(**options: Any) -> Dinov2Config:
    stages = [f"stage{stage}" for stage in range(1, 5)]
    sizes = {"hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2, "mlp_ratio": 2}
    return Dinov2Config(image_size=32, patch_size=8, out_features=stages, **sizes, **options)


def named(model: nn.Module, kind: str) -> list[str]:
    """The paths of the modules of a class."""
    return [path for path, module in model.named_modules() if type(module).__name__ == kind]


def depth_anything() -> nn.Module:
    neck = {"reassemble_hidden_size": 16, "neck_hidden_sizes": [8] * 4, "fusion_hidden_size": 8, "head_hidden_size": 4}
    config = DepthAnythingConfig(backbone_config=dinov2(reshape_hidden_states=False), patch_size=8, **neck)
    return DepthAnythingForDepthEstimation(config)


def upernet() -> nn.Module:
    stages = [f"stage{stage}" for stage in range(1, 5)]
    backbone = ConvNextConfig(hidden_sizes=[8, 8, 16, 16], depths=[1] * 4, out_features=stages)
    head = {"hidden_size": 16, "num_labels": 2, "use_auxiliary_head": False, "pool_scales": [1, 2]}
    return UperNetForSemanticSegmentation(UperNetConfig(backbone_config=backbone, **head))


def segformer() -> nn.Module:
    sizes = {"hidden_sizes": [8, 8, 16, 16], "depths": [1] * 4, "num_attention_heads": [1] * 4}
    return SegformerForSemanticSegmentation(SegformerConfig(**sizes, decoder_hidden_size=8, num_labels=2))


@pytest.mark.parametrize(
    ("build", "kind", "head"),
    [
        (depth_anything, "Dinov2Layer", "neck"),
        (upernet, "ConvNextStage", "decode_head"),
        (segformer, "SegformerStage", "decode_head"),
        (lambda: Dinov2Backbone(dinov2()), "Dinov2Layer", None),
    ],
)
def test_each_stage_reaches_what_transformers_hooks_for_a_head(
    build: Callable[[], nn.Module], kind: str, head: str | None
) -> None:
    model = build().eval()
    given: list[Any] = []

    def look() -> Any:
        answer = model(square)
        return answer.feature_maps if head is None else given.pop()

    if head is not None:
        model.get_submodule(head).register_forward_pre_hook(lambda module, inputs: given.append(inputs[0]))
    before = look()
    stages = named(model, kind)
    assert len(stages) == len(before) == 4
    insert(model, stages, felt, example=square, layout="channels_last" if kind == "Dinov2Layer" else "channels_first")
    given.clear()
    after = look()
    assert not any(torch.equal(one, other) for one, other in zip(before, after, strict=True))


# ---- those that put another layer in the place -----------------------------------------------------------------------
def test_convert_sync_batchnorm_keeps_an_addition_of_a_block() -> None:
    net = Net().eval()
    added = insert(net, "stage.1", felt, example=image)["stage.1"]
    before = net(image)
    net = nn.SyncBatchNorm.convert_sync_batchnorm(net)
    assert isinstance(net.stage[1].norm, nn.SyncBatchNorm)
    assert torch.equal(net(image), before)
    assert torch.equal(copy.deepcopy(net)(image), before)
    assert net.get_submodule("stage.1").farfield is added
    remove(net)
    assert not torch.equal(net(image), before)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in net.modules())
