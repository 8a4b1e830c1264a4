"""DeepLab: the counts to the digit, dilations where DeepLabV2 has them, every output layer, weights from files."""

from __future__ import annotations

import pickle
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torchvision.models import resnet50, resnet101
from torchvision.models.segmentation import deeplabv3_resnet50

from farfield import ShapeError, cost
from farfield.ops import OPERATORS, Operator
from farfield.ops.slots import softmax_of_products
from farfield_papers import models
from farfield_papers.models import DeepLab
from farfield_papers.models.deeplab import ASPP, OUTPUTS
from farfield_papers.nn import AttentionBlock, BaseBlock
from helpers.partly import partly


def size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def unbuilt(*arguments: str, **options: object) -> DeepLab:
    """ResNet-101 has 170 MB of weights, which counting does not need."""
    with torch.device("meta"):
        return models.deeplab_v2(*arguments, **options)


# ---- counts ----------------------------------------------------------------------------------------------------------
def test_parameters_of_deeplab_v2() -> None:
    net = unbuilt()
    assert (size(net), size(net.backbone), size(net.head)) == (44_048_532, 42_500_160, 1_548_372)


def test_parameters_of_the_attention_output_layer() -> None:
    assert size(unbuilt(output="softmax").head) == 144_981
    # 9.4, 20.3 and 47 % of those of ASPP.
    shares = [size(unbuilt(output="kronecker_qkv", channels=channels).head) / 1_548_372 for channels in (64, 128, 256)]
    assert [round(share, 3) for share in shares] == [0.094, 0.203, 0.47]


@pytest.mark.parametrize("row", OPERATORS)
def test_every_operator_is_an_output_layer(row: str) -> None:
    # w of siamese rows is one number a channel more; siamese_local reads no keys and has no map of them. flare has 64
    # latents and no map of queries, hedgehog two maps more.
    extra = {"siamese": 64, "siamese_local": 64 - (64 * 64 + 64), "flare": 64 * 64 - (64 * 64 + 64)}
    extra["hedgehog"] = 2 * 64 * 64
    net = models.deeplab_compact("mobilenet_v2", row, num_classes=5, width=0.25, residual=False)
    features = net.features
    expected = features * 64 + 64 + 3 * (64 * 64 + 64) + 64 * 5 + 5 + extra.get(row, 0)
    assert size(net.head) == expected
    out = net(torch.randn(2, 3, 40, 56))
    assert out.shape == (2, 5, 5, 7)
    out.square().sum().backward()
    assert all(parameter.grad is not None for parameter in net.parameters())


def test_an_operator_of_ones_own() -> None:
    own = Operator(coefficients=softmax_of_products)
    net = models.deeplab_compact(output=own, num_classes=3, width=0.25)
    assert net(torch.randn(1, 3, 32, 32)).shape == (1, 3, 4, 4)


def test_macs_at_the_papers_crop() -> None:
    with torch.device("meta"):
        net = models.deeplab_v2(output="softmax").eval()
    counted = cost.count(net, (1, 3, 321, 321)).macs
    assert 73.0e9 < counted < 73.6e9
    # The output layer alone, on 41x41 positions.
    assert cost.count(net.head, (1, 2048, 41, 41)).macs < 0.65e9


# ---- dilations -------------------------------------------------------------------------------------------------------
def dilations(net: nn.Module, stage: str) -> list[tuple[int, int, int]]:
    convolutions = [part.conv2 for part in getattr(net, stage)]
    return [(part.dilation[0], part.padding[0], part.stride[0]) for part in convolutions]


@pytest.mark.parametrize(("backbone", "blocks"), [("resnet101", 23), ("resnet50", 6)])
def test_every_3x3_of_the_last_stages_is_dilated(backbone: str, blocks: int) -> None:
    body = unbuilt(backbone).backbone
    assert dilations(body, "layer3") == [(2, 2, 1)] * blocks
    assert dilations(body, "layer4") == [(4, 4, 1)] * 3
    assert dilations(body, "layer2")[0] == (1, 1, 2)
    shortcuts = [getattr(body, stage)[0].downsample[0].stride for stage in ("layer2", "layer3", "layer4")]
    assert shortcuts == [(2, 2), (1, 1), (1, 1)]


def test_torchvisions_option_is_not_that() -> None:
    with torch.device("meta"):
        net = resnet101(replace_stride_with_dilation=[False, True, True])
    assert dilations(net, "layer3") == [(1, 1, 1)] + [(2, 2, 1)] * 22
    assert dilations(net, "layer4") == [(2, 2, 1)] + [(4, 4, 1)] * 2


@pytest.mark.parametrize(("side", "positions"), [(321, 41), (513, 65), (65, 9)])
def test_an_eighth_of_the_size(side: int, positions: int) -> None:
    with torch.device("meta"):
        net, image = models.deeplab_v2("resnet50"), torch.empty(1, 3, side, side)
        assert net(image).shape == (1, 21, positions, positions)


@pytest.mark.parametrize(("stride", "late"), [(8, (2, 4)), (16, (1, 2)), (32, (1, 1))])
def test_compact_backbones_are_dilated_where_strides_are_taken_out(stride: int, late: tuple[int, int]) -> None:
    net = models.deeplab_compact("sanet", width=0.25, output_stride=stride)
    assert net(torch.randn(1, 3, 64, 96)).shape == (1, 21, 64 // stride, 96 // stride)
    rows = net.backbone.rows
    expected = dict.fromkeys(range(4), 1) | dict.fromkeys((4, 5, 6), late[0])
    expected |= dict.fromkeys((7, 8, 9), late[1])
    for index, row in enumerate(rows):
        for block in row:
            convolution = block.depthwise.convolution
            assert convolution.dilation == convolution.padding == (expected[index],) * 2


def test_a_dilated_block_gives_what_its_layers_give() -> None:
    net = models.deeplab_compact("sanet", width=0.25).eval()
    with torch.no_grad():
        for block in net.backbone.rows[7]:
            grid = torch.randn(1, block.channels, 9, 11)
            assert isinstance(block, AttentionBlock | BaseBlock)
            torch.testing.assert_close(block(grid), block.plain(grid))


def test_what_a_dilated_network_sees_is_what_the_strided_one_sees() -> None:
    # Taking a stride out and dilating what follows keeps every position computed before: the others lie between.
    torch.manual_seed(0)
    strided = models.deeplab_compact("mobilenet_v2", width=0.25, output_stride=32).eval()
    dense = models.deeplab_compact("mobilenet_v2", width=0.25, output_stride=8).eval()
    dense.load_state_dict(strided.state_dict())
    # The first convolution behind a stride that was taken out is dilated too, so the positions are not the same ones;
    # with torchvision's rule they would be.
    for row in (4, 7):
        convolution = dense.backbone.rows[row][0].depthwise.convolution
        convolution.dilation = convolution.padding = (1, 1) if row == 4 else (2, 2)
    image = torch.randn(1, 3, 96, 128)
    with torch.no_grad():
        torch.testing.assert_close(dense(image)[..., ::4, ::4], strided(image), rtol=1e-4, atol=1e-5)


# ---- the head --------------------------------------------------------------------------------------------------------
def test_aspp_is_the_sum_of_four_dilated_convolutions() -> None:
    aspp, grid = ASPP(4, 3), torch.randn(1, 4, 50, 51)
    weights = [(part.weight, part.bias) for part in aspp]
    expected = sum(
        nn.functional.conv2d(grid, weight, bias, padding=rate, dilation=rate)
        for (weight, bias), rate in zip(weights, (6, 12, 18, 24), strict=True)
    )
    torch.testing.assert_close(aspp(grid), expected)


@pytest.mark.parametrize("output", ["aspp", "plain", "softmax"])
def test_what_classifies_starts_from_a_narrow_normal_and_what_comes_before_it_from_glorots_law(output: str) -> None:
    head = models.deeplab_v2("resnet50", output).head
    for name, layer in head.named_modules():
        if isinstance(layer, nn.Conv2d | nn.Linear):
            classifies = output != "softmax" or name == "classify"
            wanted = 0.01 if classifies else (2 / sum(layer.weight.shape[:2])) ** 0.5
            # Standard deviation and mean of n draws: wanted (1 +- 5/sqrt(2n)) and 0 +- 5 wanted/sqrt(n).
            count = layer.weight.numel()
            assert float(layer.weight.detach().std()) == pytest.approx(wanted, rel=5 / (2 * count) ** 0.5), name
            assert abs(float(layer.weight.detach().mean())) < 5 * wanted / count**0.5, name
            assert not layer.bias.any()


@pytest.mark.parametrize("output", ["averaged", "factorized", "dot", "siamese", "kronecker_qkv", "factorized_gaussian"])
def test_logits_stay_finite_however_large_features_grow(output: str) -> None:
    """So did training on CamVid end: within twenty steps, responses that are cubic in their input were NaN."""
    image, logits = torch.randn(1, 3, 64, 64), {}
    for normalized in (True, False):
        torch.manual_seed(0)
        net = models.deeplab_compact("mobilenet_v2", output, num_classes=5, width=0.25, normalized=normalized)
        with torch.no_grad():
            net.head.reduce.weight *= 1e14
        logits[normalized] = net.train()(image)
        if normalized:
            logits[normalized].sum().backward()
            assert all(each.grad is None or each.grad.isfinite().all() for each in net.parameters())
    assert logits[True].isfinite().all()
    assert 1e-4 < float(logits[True].std()) < 100
    # Without the norm these three, which have no softmax, are no numbers.
    if output in ("averaged", "factorized", "dot"):
        assert not logits[False].isfinite().all()


def test_without_a_residual_siamese_responses_differ_by_one_factor() -> None:
    net = models.deeplab_compact("mobilenet_v2", "siamese", width=0.25, residual=False).eval()
    response = net.head.attention(torch.randn(1, 64, 9, 9)).flatten(2)[0]
    centred = response - response.mean(1, keepdim=True)
    singular = torch.linalg.svdvals(centred)
    assert singular[1] < 1e-5 * singular[0]


# ---- names, weights, saving ------------------------------------------------------------------------------------------
def test_both_builders_are_in_the_catalog_and_pickle() -> None:
    for name in ("deeplab_v2", "deeplab_compact"):
        assert models.MODELS[name] is getattr(models, name)
        assert pickle.loads(pickle.dumps(models.MODELS[name])) is models.MODELS[name]


@pytest.mark.long
@pytest.mark.parametrize("output", partly(OUTPUTS, ["plain", "aspp", "kronecker_qkv"]))
def test_a_saved_network_comes_back(tmp_path: Path, output: str) -> None:
    net = models.deeplab_compact("kanet_kv", output, num_classes=4, width=0.125, output_stride=16).eval()
    net.save_pretrained(tmp_path)
    found, image = models.from_pretrained(tmp_path), torch.randn(1, 3, 48, 48)
    assert found.config == net.config
    assert torch.equal(found(image), net(image))


def test_torchvisions_weights_fill_the_backbone(tmp_path: Path) -> None:
    theirs = resnet50()
    torch.save(theirs.state_dict(), tmp_path / "resnet50.pth")
    net = models.deeplab_v2("resnet50", weights=tmp_path / "resnet50.pth")
    own = theirs.state_dict()
    assert all(torch.equal(own[name], tensor) for name, tensor in net.backbone.state_dict().items())
    assert set(own) - set(net.backbone.state_dict()) == {"fc.weight", "fc.bias"}


def test_the_weights_of_torchvisions_segmentation_networks_fill_it_too(tmp_path: Path) -> None:
    theirs = deeplabv3_resnet50(weights=None, weights_backbone=None)
    torch.save(theirs.state_dict(), tmp_path / "coco.pth")
    net = models.deeplab_v2("resnet50", weights=tmp_path / "coco.pth")
    assert torch.equal(net.backbone.layer4[2].conv2.weight, theirs.backbone.layer4[2].conv2.weight)


@pytest.mark.long
def test_a_trained_classifier_fills_a_compact_backbone(tmp_path: Path) -> None:
    classifier = models.sanet(num_classes=3, width=0.25)
    classifier.save_pretrained(tmp_path)
    net = models.deeplab_compact("sanet", width=0.25, weights=tmp_path / "model.safetensors")
    assert torch.equal(
        net.backbone.rows[8][0].project.convolution.weight, classifier.rows[8][0].project.convolution.weight
    )


# ---- errors ----------------------------------------------------------------------------------------------------------
def test_weights_of_another_backbone(tmp_path: Path) -> None:
    save_file(models.sanet(width=0.5).state_dict(), tmp_path / "other.safetensors")
    text = r"deeplab_compact: .*other\.safetensors holds the weights of another network: \d+ of \d+ .*stem\.convolution"
    with pytest.raises(ValueError, match=text):
        models.deeplab_compact("sanet", width=0.25, weights=tmp_path / "other.safetensors")
    with pytest.raises(FileNotFoundError, match=r"deeplab_v2: there are no weights .*none\.pth; fix: the path"):
        models.deeplab_v2("resnet50", weights=tmp_path / "none.pth")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"backbone": "resnet18"}, 'deeplab_v2: no backbone "resnet18"; nearest: resnet101, resnet50'),
        ({"output": "siamse"}, 'deeplab_v2: no output layer "siamse"; nearest: siamese'),
        ({"num_classes": 0}, "deeplab_v2: num_classes must be a whole number from 1, got 0."),
        ({"output_stride": 4}, "deeplab_v2: output_stride must be 8, 16 or 32, got 4."),
        ({"width": 0.5}, "deeplab_v2: resnet101 has one width, got 0.5; fix: leave width out."),
        ({"backbone": "sanet", "output": "dot", "channels": 10, "heads": 4}, "heads=4 does not divide the 10 channels"),
    ],
)
def test_wrong_options(options: dict[str, object], text: str) -> None:
    with torch.device("meta"), pytest.raises((LookupError, ValueError), match=re.escape(text)):
        DeepLab(**options)


def test_a_wrong_image() -> None:
    net = models.deeplab_compact(width=0.25)
    with pytest.raises(ShapeError, match=r"deeplab_compact: .*image .*\(batch, 3, height, width\)"):
        net(torch.randn(3, 32, 32))
    with pytest.raises(TypeError, match=r"must be floating point, got torch\.uint8"):
        net(torch.zeros(1, 3, 32, 32, dtype=torch.uint8))


def test_a_fix_that_the_network_does_not_have_is_not_named() -> None:
    with torch.device("meta"):
        net, image = models.deeplab_v2("resnet50"), torch.randn(1, 4, 32, 32)
    with pytest.raises(ShapeError) as error:
        net(image)
    assert "fix: give it (batch, 3, height, width)." in str(error.value)
