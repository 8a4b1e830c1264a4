"""Networks of other libraries, with random weights: an addition changes nothing at first and can be taken out again."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import timm
import torch
import torchvision
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from transformers import ViTConfig, ViTForImageClassification, ViTModel

from farfield import insert, remove
from farfield.insertion import detector_places, resnet_places
from farfield.nn import GridAttention
from helpers.partly import partly

make = partial(GridAttention, operator="factorized_gaussian", inner_channels=64, project="qkvo", residual=True)
image, video = torch.rand(1, 3, 64, 64), torch.rand(1, 3, 4, 32, 32)


def detector() -> nn.Module:
    few = {"rpn_pre_nms_top_n_test": 20, "rpn_post_nms_top_n_test": 10}
    # In training every anchor counts, so that every level of the pyramid gets a gradient.
    few |= {"rpn_batch_size_per_image": 4096, "rpn_post_nms_top_n_train": 10, "box_batch_size_per_image": 8}
    network = torchvision.models.detection.maskrcnn_resnet50_fpn_v2
    return network(weights=None, weights_backbone=None, num_classes=3, min_size=64, max_size=64, **few)


def mobilenet() -> nn.Module:
    # With running statistics of its own, without which nothing of a change is left at its end.
    model = torchvision.models.mobilenet_v2()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = 1.0
    model(torch.rand(4, 3, 64, 64))
    return model


def hugging_face_vit() -> nn.Module:
    sizes = {"image_size": 64, "hidden_size": 96, "num_hidden_layers": 3, "num_attention_heads": 3}
    return ViTModel(ViTConfig(**sizes, intermediate_size=192))


def unet() -> nn.Module:
    return pytest.importorskip("segmentation_models_pytorch").Unet("resnet18", encoder_weights=None)


class Host(NamedTuple):
    build: Callable[[], nn.Module]
    # Where, as it is given, and the documented width of each place it stands for.
    where: str | list[str]
    widths: dict[str, int]
    example: Any = image
    layout: Any = "channels_first"


HOSTS = {
    "resnet50": Host(
        torchvision.models.resnet50,
        ["layer3", "conv1", "layer4.*"],
        {"layer3": 1024, "conv1": 64, "layer4.0": 2048, "layer4.1": 2048, "layer4.2": 2048},
    ),
    "mobilenet_v2": Host(
        mobilenet, ["features.3", "features.18"], {"features.3": 24, "features.18": 1280}
    ),
    "convnext_tiny": Host(
        torchvision.models.convnext_tiny, ["features.3", "features.7.*"], {"features.3": 192}
        | {f"features.7.{block}": 768 for block in range(3)}
    ),
    "maskrcnn_resnet50_fpn_v2": Host(
        detector,
        detector_places("res3", "fpn1", "fpn5"),
        {"backbone.body.layer3": 1024, "backbone.fpn[0]": 256, "backbone.fpn[pool]": 256},
        [image[0]],
    ),
    "deeplabv3_resnet50": Host(
        partial(torchvision.models.segmentation.deeplabv3_resnet50, weights_backbone=None),
        ["backbone.layer4", "classifier.0"],
        {"backbone.layer4": 2048, "classifier.0": 256},
    ),
    "r3d_18": Host(
        torchvision.models.video.r3d_18, resnet_places("res2", "res3.0"), {"layer2": 128, "layer3.0": 256}, video
    ),
    "timm resnet50": Host(
        partial(timm.create_model, "resnet50"), resnet_places("res3", "res4.2"), {"layer3": 1024, "layer4.2": 2048}
    ),
    "vit_small": Host(
        partial(timm.create_model, "vit_small_patch16_224", img_size=64, depth=4),
        ["blocks.1", "blocks"],
        {"blocks.1": 384, "blocks": 384},
        layout="channels_last",
    ),
    "swin_tiny": Host(
        partial(timm.create_model, "swin_tiny_patch4_window7_224", img_size=56),
        ["layers.1", "layers.3.blocks.0"],
        {"layers.1": 192, "layers.3.blocks.0": 768},
        torch.rand(1, 3, 56, 56),
        "channels_last",
    ),
    "Hugging Face ViT": Host(
        hugging_face_vit, "layers.*", {f"layers.{layer}": 96 for layer in range(3)}, {"pixel_values": image},
        "channels_last",
    ),
    "segmentation_models_pytorch Unet": Host(
        unet, ["encoder.layer3", "decoder.blocks.1"], {"encoder.layer3": 256, "decoder.blocks.1": 128}
    ),
}  # fmt: skip


def run(model: nn.Module, example: Any) -> list[Any]:
    """What a model answers, as a flat list of tensors."""
    if isinstance(example, dict):
        return tree_leaves(model(**example))
    return tree_leaves(model(example))


def same(one: list[Any], other: list[Any]) -> bool:
    """Equal numbers of equal type in equal memory."""
    kinds = [[(part.dtype, part.stride()) for part in parts if isinstance(part, Tensor)] for parts in (one, other)]
    return kinds[0] == kinds[1] and all(
        torch.equal(a, b) if isinstance(a, Tensor) else a == b for a, b in zip(one, other, strict=True)
    )


def responses(model: nn.Module, added: dict[str, nn.Module], example: Any) -> dict[str, tuple[Tensor, Tensor]]:
    """What each addition is given, and what it adds."""
    seen: dict[str, tuple[Tensor, Tensor]] = {}
    handles = [
        module.register_forward_hook(
            lambda module, inputs, answer, path=path: seen.update({path: (inputs[0], answer - inputs[0])})
        )
        for path, module in added.items()
    ]
    run(model, example)
    for handle in handles:
        handle.remove()
    return seen


def with_other_corner(example: Any) -> Any:
    if isinstance(example, dict):
        return {name: with_other_corner(value) for name, value in example.items()}
    if isinstance(example, list):
        return [with_other_corner(value) for value in example]
    changed = example.clone()
    changed[..., :4, :4] += 1
    return changed


def at_one_place(host: Host) -> Host:
    place, width = next(iter(host.widths.items()))
    return host._replace(where=place, widths={place: width})


@pytest.mark.long
@pytest.mark.parametrize("places", partly(["one", "many"], ["many"]))
@pytest.mark.parametrize("name", HOSTS)
def test_host(name: str, places: str) -> None:
    host = HOSTS[name] if places == "many" else at_one_place(HOSTS[name])
    assert (len(host.widths) > 1) == (places == "many")
    model = host.build().eval()
    base = {key: value.clone() for key, value in model.state_dict().items()}
    with torch.no_grad():
        before = run(model, host.example)
    modules = list(model.modules())

    added = insert(model, host.where, make, example=host.example, layout=host.layout)
    assert {path: module.channels for path, module in added.items()} == host.widths
    with torch.no_grad():
        assert same(run(model, host.example), before)

    # A checkpoint from before loads, into the same names.
    report = model.load_state_dict(base, strict=False)
    assert report.unexpected_keys == []
    assert len(report.missing_keys) == 8 * len(added)
    assert all("farfield" in key.split(".") for key in report.missing_keys)
    assert sorted(report.missing_keys) == sorted(model.state_dict().keys() - base.keys())

    # One step later every position hears of one corner.
    optimizer = torch.optim.SGD([weight for module in added.values() for weight in module.parameters()], lr=1.0)
    answers = responses(model, added, host.example)
    assert all(not response.any() for _, response in answers.values())
    sum((response * torch.randn_like(response)).mean() for _, response in answers.values()).backward()
    optimizer.step()
    with torch.no_grad():
        here = responses(model, added, host.example)
        there = responses(model, added, with_other_corner(host.example))
    for path, (_, response) in here.items():
        assert ((response - there[path][1]).abs().amax(1) > 0).all(), path

    remove(model)
    assert list(model.modules()) == modules
    assert list(model.state_dict()) == list(base)
    assert all(torch.equal(value, base[key]) for key, value in model.state_dict().items())
    with torch.no_grad():
        assert same(run(model, host.example), before)


def test_an_entry_of_what_a_model_of_transformers_returns() -> None:
    # Its outputs are dicts with attributes, and the head reads one of these.
    model = ViTForImageClassification(hugging_face_vit().config).eval()
    with torch.no_grad():
        before = model(image).logits
        example, place = {"pixel_values": image}, "vit[last_hidden_state]"
        added = insert(model, place, make, example=example, layout="channels_last")[place]
        assert torch.equal(model(image).logits, before)
        nn.init.normal_(added.output.weight)
        assert not torch.equal(model(image).logits, before)
        remove(model)
        assert torch.equal(model(image).logits, before)


def test_far_positions_do_not_depend_on_a_corner_without_an_addition() -> None:
    model = torchvision.models.resnet50().eval()
    large = torch.rand(1, 3, 160, 160)
    added = insert(model, "layer1.0", make, example=large)
    nn.init.normal_(added["layer1.0"].output.weight)
    with torch.no_grad():
        (grid, response), (other, changed) = (
            responses(model, added, example)["layer1.0"] for example in (large, with_other_corner(large))
        )
    assert torch.equal(grid[..., -1, -1], other[..., -1, -1])
    assert not torch.equal(response[..., -1, -1], changed[..., -1, -1])


@pytest.mark.long
def test_a_detector_with_attention_everywhere_trains_a_step() -> None:
    model = detector()
    count = sum(weight.numel() for weight in model.parameters())
    places = detector_places("fpn_all", "res3", "res4")
    added = insert(model, places, make, example=[image[0]])
    assert list(added) == places
    # With reprojection and 64 inner channels: 256, 1,024 and 2,048 channels.
    extra = [sum(weight.numel() for weight in module.parameters()) for module in added.values()]
    assert extra == [164_480] * 5 + [2_230_400, 8_654_976]
    assert sum(weight.numel() for weight in model.parameters()) == count + sum(extra)

    model.train()
    target = {"boxes": torch.tensor([[4.0, 4.0, 40.0, 40.0]]), "labels": torch.tensor([1])}
    target["masks"] = torch.ones(1, 64, 64, dtype=torch.uint8)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    sum(model([image[0]], [target]).values()).backward()
    gradients = [module.output.weight.grad for module in added.values()]
    assert all(gradient is not None and gradient.abs().sum() > 0 for gradient in gradients)
    optimizer.step()
    assert all(module.output.weight.abs().sum() > 0 for module in added.values())


def test_a_level_of_the_pyramid_is_attended_by_itself() -> None:
    # fpn5 is made from fpn4 as it was, and the top-down path hears of no level.
    model = detector().eval()
    with torch.no_grad():
        before = model.backbone(image)
        for path, module in insert(model, detector_places("fpn4"), make, example=[image[0]]).items():
            assert path == "backbone.fpn[3]"
            nn.init.normal_(module.output.weight)
        after = model.backbone(image)
    assert [name for name in before if not torch.equal(before[name], after[name])] == ["3"]
