"""The networks against the papers' counts, sizes and initial values, and what a user can ask of them."""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from farfield import ShapeError
from farfield.nn import GridAttention
from farfield.ops import OPERATORS, Operator
from farfield.ops.slots import softmax_of_products
from farfield_papers import models
from farfield_papers.models import CLASSIFIERS, CompactNet
from farfield_papers.nn import AttentionBlock, BaseBlock
from helpers.partly import partly
from helpers.responding import responding

# SPEC A2 and A3: weights of convolutions, linear maps and w; no biases, no norms.
WEIGHTS = {
    "mobilenet_v2": 3_469_760,
    "mobilenet_v2_kronecker_kv": 3_461_120,
    "mobilenet_v2_siamese": 3_462_080,
    "kanet_kv": 3_448_448,
    "kanet_qkv": 3_448_448,
    "kanet_without_attention": 3_457_088,
    "attnnet": 3_448_448,
    "attnnet_pooled": 3_448_448,
    "attnnet_averaged": 3_448_448,
    "sanet": 3_449_408,
    "sanet_ones": 3_448_448,
    "sanet_local": 3_449_408,
    "sanet_without_attention": 3_344_448,
    "senet": 3_448_448,
}
# Scale and shift of the norms after convolutions, wherever every block is KANet's or SANet's.
NORMS = {"mobilenet_v2": 34_112} | dict.fromkeys(("kanet_kv", "kanet_qkv", "attnnet", "sanet", "sanet_ones"), 29_824)
OPERATORS_OF = {
    "mobilenet_v2_kronecker_kv": "kronecker_kv",
    "mobilenet_v2_siamese": "siamese",
    "kanet_kv": "kronecker_kv",
    "kanet_qkv": "kronecker_qkv",
    "attnnet": "softmax",
    "attnnet_pooled": "softmax_pooled",
    "attnnet_averaged": "averaged",
    "sanet": "siamese",
    "sanet_ones": "siamese_ones",
    "sanet_local": "siamese_local",
}
SMALL = (1, 1, 2, 2, 2)


def weights(net: nn.Module) -> int:
    count = sum(part.weight.numel() for part in net.modules() if isinstance(part, nn.Conv2d | nn.Linear))
    scores = (part.weight for part in net.modules() if isinstance(part, GridAttention))
    return count + sum(weight.numel() for weight in scores if weight is not None)


def norms(net: nn.Module) -> int:
    return sum(2 * part.num_features for part in net.modules() if isinstance(part, nn.BatchNorm2d))


def blocks(net: CompactNet) -> list[Any]:
    return [block for row in net.rows for block in row]


def settled(net: CompactNet) -> CompactNet:
    """A float64 net in eval mode whose running statistics are those of random images: its logits are far from 0."""
    for part in responding(net).modules():
        if hasattr(part, "momentum"):
            part.momentum = 1.0
    with torch.no_grad():
        net.double().train()(torch.randn(4, net.in_channels, 64, 64, dtype=torch.float64))
    return net.eval()


def images(count: int, *size: int) -> Tensor:
    return torch.randn(count, 3, *size, dtype=torch.float64)


# ---- counts ----------------------------------------------------------------------------------------------------------
def test_the_names_are_the_fixed_ones() -> None:
    assert list(CLASSIFIERS) == list(WEIGHTS)


@pytest.mark.parametrize("name", WEIGHTS)
def test_weights_are_the_papers(name: str) -> None:
    with torch.device("meta"):
        net = CLASSIFIERS[name]()
    assert weights(net) == WEIGHTS[name]
    assert norms(net) == NORMS.get(name, norms(net))
    linear_maps = [part for part in net.modules() if isinstance(part, nn.Linear) and part.bias is not None]
    assert linear_maps == [net.classifier]


def test_all_parameters_of_mobilenet_are_torchvisions() -> None:
    assert sum(parameter.numel() for parameter in models.mobilenet_v2().parameters()) == 3_504_872


@pytest.mark.parametrize(("reduction", "count"), [(2, 3_448_448), (4, 3_392_128), (8, 3_363_968), (16, 3_349_888)])
def test_senet_by_its_reduction(reduction: int, count: int) -> None:
    with torch.device("meta"):
        assert weights(models.senet(reduction=reduction)) == count


# ---- the table -------------------------------------------------------------------------------------------------------
def test_attention_stands_where_the_papers_put_it() -> None:
    found = [(block.channels, block.depthwise.convolution.kernel_size) for block in blocks(models.kanet()) if
             isinstance(block, AttentionBlock)]  # fmt: skip
    assert [channels for channels, _ in found] == [32, 64, 64, 64, 64, 96, 96, 160, 160, 160]
    assert {kernel for _, kernel in found} == {(3, 3)}


@pytest.mark.parametrize("name", WEIGHTS)
def test_variants_have_their_blocks(name: str) -> None:
    found = blocks(CLASSIFIERS[name](width=0.25))
    base = [block for block in found if isinstance(block, BaseBlock)]
    attention = [block for block in found if isinstance(block, AttentionBlock)]
    assert len(base) + len(attention) == 17
    assert len(attention) == (10 if name in OPERATORS_OF or name == "senet" else 0)
    operators = {block.attention.operator_name for block in attention if isinstance(block.attention, GridAttention)}
    assert operators == ({OPERATORS_OF[name]} if name in OPERATORS_OF else set())
    # MobileNetV2's blocks concatenate nothing; KANet without attention has them in the ten attention places alone.
    concatenating = sum(block.concatenates for block in base)
    assert concatenating == (0 if name.startswith("mobilenet") else 16 if name == "sanet_without_attention" else 6)
    # KAN §4.5 adds AttnModules without the inner skip to MobileNetV2; everything else has it.
    assert {block.skip for block in attention} <= {name != "mobilenet_v2_kronecker_kv"}


@pytest.mark.parametrize("operator", [*OPERATORS, OPERATORS["softmax"], OPERATORS["siamese"]])
def test_kanet_and_sanet_take_any_operator(operator: str | Operator) -> None:
    for build in (models.kanet, models.sanet):
        net = build(operator, width=0.25, num_classes=3, strides=SMALL)
        names = {part.operator_name for part in net.modules() if isinstance(part, GridAttention)}
        assert names == {operator if isinstance(operator, str) else net.config["operator"]}
        assert net(torch.randn(2, 3, 32, 32)).isfinite().all()


def test_kanet_takes_an_operator_of_ones_own() -> None:
    net = models.kanet(Operator(coefficients=softmax_of_products, score="ones"), width=0.25, num_classes=3)
    assert net.config["operator"] is None
    assert net(torch.randn(2, 3, 64, 64)).shape == (2, 3)


# ---- arguments -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("width", [0.1, 0.25, 0.35, 0.5, 0.75, 1.0, 1.3, 1.4])
def test_widths_are_torchvisions(width: float) -> None:
    from torchvision.models import mobilenet_v2

    with torch.device("meta"):
        ours, theirs = models.mobilenet_v2(width=width), mobilenet_v2(width_mult=width)
        attention = models.sanet(width=width)
    assert [tuple(p.shape) for p in ours.parameters()] == [tuple(p.shape) for p in theirs.parameters()]
    assert all(block.channels % 8 == 0 for block in blocks(attention))


@pytest.mark.parametrize("name", WEIGHTS)
@pytest.mark.parametrize("size", partly([[32, 32], [33, 33], [40, 96], [96, 96]], [[33, 33], [40, 96]]))
def test_any_image_size(name: str, size: tuple[int, int]) -> None:
    net = CLASSIFIERS[name](width=0.25, num_classes=5).eval()
    with torch.no_grad():
        image = torch.randn(2, 3, *size)
        assert net(image).shape == (2, 5)
        assert net.forward_features(image).shape == (2, 1280, *(-(-side // 32) for side in size))


@pytest.mark.parametrize("name", ["mobilenet_v2", "kanet_kv", "kanet_qkv", "sanet"])
def test_the_papers_size(name: str) -> None:
    with torch.no_grad():
        assert CLASSIFIERS[name]().eval()(torch.randn(1, 3, 224, 224)).shape == (1, 1000)


@pytest.mark.parametrize(("strides", "size"), [(None, [4, 2, 1]), (SMALL, [16, 8, 4]), ([1, 1, 1, 1, 1], [32, 32, 32])])
def test_strides_set_the_attention_grids(strides: tuple[int, ...] | None, size: list[int]) -> None:
    net, seen = models.kanet(width=0.25, strides=strides).eval(), []
    for part in net.modules():
        if isinstance(part, GridAttention):
            part.register_forward_hook(lambda part, inputs, output: seen.append(tuple(inputs[0].shape[2:])))
    with torch.no_grad():
        net(torch.randn(1, 3, 32, 32))
    assert len(seen) == 10
    assert list(dict.fromkeys(seen)) == list(dict.fromkeys((side, side) for side in size))


def test_images_of_other_channels() -> None:
    net = models.sanet(width=0.25, in_channels=5, num_classes=2)
    assert net(torch.randn(2, 5, 32, 32)).shape == (2, 2)


def test_without_classes_the_features_come_out() -> None:
    net = models.kanet(width=0.25, num_classes=0).eval()
    image = torch.randn(2, 3, 64, 64)
    features = net.forward_features(image)
    assert isinstance(net.classifier, nn.Identity)
    torch.testing.assert_close(net(image), features.mean((2, 3)))
    torch.testing.assert_close(net.forward_head(features, pre_logits=True), net(image))


def test_a_new_classifier() -> None:
    net, image = settled(models.kanet(width=0.25, num_classes=10)), images(1, 64, 64)
    before = net.forward_features(image)
    net.reset_classifier(3)
    assert net.get_classifier() is net.classifier
    assert net.classifier.weight.dtype == torch.float64
    assert net.config["num_classes"] == net.num_classes == 3
    torch.testing.assert_close(net.forward_features(image), before)
    assert net(image).shape == (1, 3)


def test_dropout_is_before_the_classifier_in_training_only() -> None:
    net = models.mobilenet_v2(width=0.25, dropout=0.5, num_classes=0)
    grid = torch.ones(4, 1280, 2, 2)
    dropped = net.forward_head(grid)
    assert set(dropped.unique().tolist()) == {0.0, 2.0}
    torch.testing.assert_close(net.eval().forward_head(grid), torch.ones(4, 1280))


# ---- initial values --------------------------------------------------------------------------------------------------
def test_initial_values_are_glorots() -> None:
    net = models.sanet(num_classes=100)
    for part in net.modules():
        if isinstance(part, nn.Conv2d | nn.Linear):
            outs, ins = part.weight.shape[0], part.weight[0].numel()
            bound = (6 / (ins + outs * part.weight[0, 0].numel())) ** 0.5
            assert 0.9 * bound < part.weight.abs().max() <= bound
            assert part.bias is None or not part.bias.any()
        elif isinstance(part, nn.BatchNorm2d):
            assert (part.weight == 1).all()
            assert not part.bias.any()
        elif isinstance(part, GridAttention):
            bound = (6 / (1 + part.channels // 4)) ** 0.5
            assert 0.8 * bound < part.weight.abs().max() <= bound


# ---- behaviour -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", WEIGHTS)
def test_gradients_reach_every_parameter(name: str) -> None:
    net = responding(CLASSIFIERS[name](width=0.25, num_classes=4, strides=SMALL))
    loss = nn.functional.cross_entropy(net(torch.randn(4, 3, 32, 32)), torch.arange(4))
    loss.backward()
    for parameter_name, parameter in net.named_parameters():
        assert parameter.grad is not None, parameter_name
        assert parameter.grad.isfinite().all(), parameter_name
        assert parameter.grad.any(), parameter_name


@pytest.mark.parametrize("name", partly(WEIGHTS, ["mobilenet_v2", "attnnet", "kanet_qkv", "sanet", "senet"]))
def test_an_image_does_not_see_its_neighbours(name: str) -> None:
    net, batch = settled(CLASSIFIERS[name](width=0.25, num_classes=4)), images(3, 64, 64)
    with torch.no_grad():
        whole = net(batch)
        assert whole.std() > 0.1
        for index in range(3):
            torch.testing.assert_close(net(batch[index : index + 1]), whole[index : index + 1])


@pytest.mark.parametrize("name", partly(WEIGHTS, ["mobilenet_v2", "attnnet", "kanet_qkv", "sanet", "senet"]))
def test_channels_last_stays(name: str) -> None:
    net, batch = settled(CLASSIFIERS[name](width=0.25, num_classes=4)), images(2, 64, 96)
    with torch.no_grad():
        expected = net(batch)
        last, batch = net.to(memory_format=torch.channels_last), batch.to(memory_format=torch.channels_last)
        assert all(grid.is_contiguous(memory_format=torch.channels_last) for grid in last.pyramid(batch))
        torch.testing.assert_close(last(batch), expected)


@pytest.mark.parametrize(("width", "channels"), [(1.0, [16, 24, 32, 96, 320]), (0.25, [8, 8, 8, 24, 80])])
@pytest.mark.parametrize("strides", [None, SMALL])
def test_pyramid(width: float, channels: list[int], strides: tuple[int, ...] | None) -> None:
    net = models.kanet(width=width, strides=strides).eval()
    with torch.no_grad():
        grids = net.pyramid(torch.randn(1, 3, 70, 96))
    totals = [2, 4, 8, 16, 32] if strides is None else [1, 1, 2, 4, 8]
    assert [tuple(grid.shape) for grid in grids] == [
        (1, number, -(-70 // total), -(-96 // total)) for number, total in zip(channels, totals, strict=True)
    ]
    assert [(info["num_chs"], info["reduction"]) for info in net.feature_info] == list(
        zip(channels, totals, strict=True)
    )


def test_pyramid_is_what_the_classifier_sees() -> None:
    net, image = settled(models.sanet(width=0.25)), images(2, 64, 64)
    with torch.no_grad():
        torch.testing.assert_close(net.head(net.pyramid(image)[-1]), net.forward_features(image))


@pytest.mark.parametrize("name", ["kanet_qkv", "sanet", "senet"])
def test_copies_and_pickles(name: str) -> None:
    net, image = settled(CLASSIFIERS[name](width=0.25, num_classes=3)), images(2, 64, 64)
    for twin in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        torch.testing.assert_close(twin(image), net(image), rtol=0, atol=0)
        assert twin.config == net.config


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", ["kanet_qkv", "sanet", "attnnet_averaged"])
def test_other_precisions(name: str, dtype: torch.dtype) -> None:
    net = CLASSIFIERS[name](width=0.25, num_classes=3).to(dtype)
    logits = net(torch.randn(4, 3, 64, 64, dtype=dtype))
    assert logits.dtype == dtype
    logits.square().sum().backward()
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in net.parameters())


@pytest.mark.parametrize("name", ["kanet_qkv", "sanet", "attnnet_averaged"])
def test_autocast(name: str) -> None:
    net = CLASSIFIERS[name](width=0.25, num_classes=3)
    with torch.autocast(torch.get_default_device().type, dtype=torch.bfloat16):
        logits = net(torch.randn(4, 3, 64, 64))
    assert logits.dtype == torch.bfloat16
    logits.float().square().sum().backward()
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in net.parameters())


# ---- errors ----------------------------------------------------------------------------------------------------------
def call(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return models.kanet_qkv(width=0.25)(torch.zeros(*shape, dtype=dtype))


IMAGE = "kanet_qkv: the image must be (batch, 3, height, width).\n  image  "


@pytest.mark.parametrize(
    ("wrong", "error", "text"),
    [
        (partial(call, 3, 32, 32), ShapeError, f"{IMAGE}(3, 32, 32)\n  fix: add the batch: image.unsqueeze(0)."),
        (
            partial(call, 2, 32, 32, 3),
            ShapeError,
            f"{IMAGE}(2, 32, 32, 3)\n  fix: put the channels first: image.permute(0, 3, 1, 2).",
        ),
        (
            partial(call, 2, 1, 32, 32),
            ShapeError,
            f"{IMAGE}(2, 1, 32, 32)\n  fix: give it (batch, 3, height, width), or build it with other in_channels.",
        ),
        (
            partial(call, 2, 3, 0, 32),
            ShapeError,
            "kanet_qkv: the image is empty.\n  image  (2, 3, 0, 32)\n  fix: batch, height and width of 1 at least.",
        ),
        (
            partial(call, 2, 3, 32, 32, dtype=torch.uint8),
            TypeError,
            "kanet_qkv: the image must be floating point, got torch.uint8; fix: image.float() / 255, then ",
        ),
        (partial(models.kanet, "kronecker"), LookupError, 'kanet: no operator "kronecker"; nearest: kronecker_kv'),
        (partial(models.sanet, "siamse"), LookupError, 'sanet: no operator "siamse"; nearest: siamese'),
        (partial(models.kanet, 10), TypeError, "kanet: operator must be a name or an ops.Operator, got 10; fix: "),
        (partial(models.sanet, num_classes=np.int64(4)), ValueError, "from 0, got np.int64(4); fix: int(4)."),
        (partial(CompactNet, "kanet_qvk"), LookupError, 'models.CompactNet: no model "kanet_qvk"; nearest: kanet_qkv'),
        (
            partial(CompactNet, "mobilenet_v2", operator="dot"),
            ValueError,
            "mobilenet_v2: has no attention whose operator could be replaced; fix: models.kanet(operator).",
        ),
        (partial(models.sanet, width=0), ValueError, "sanet: width must be a number above 0, got 0."),
        (partial(models.sanet, width=float("nan")), ValueError, "sanet: width must be a number above 0, got nan."),
        (partial(models.sanet, dropout=1.0), ValueError, "sanet: dropout must be a probability below 1, got 1.0."),
        (
            partial(models.sanet, num_classes=-1),
            ValueError,
            "sanet: num_classes must be a whole number from 0, got -1.",
        ),
        (partial(models.sanet, in_channels=0), ValueError, "sanet: in_channels must be a whole number from 1, got 0."),
        (
            partial(models.sanet, strides=(1, 2)),
            ValueError,
            "sanet: strides must be 5 whole numbers from 1, those of the stem and of the rows of 24, 32, 64 and 160 "
            "channels, got (1, 2); fix: the papers' (2, 2, 2, 2, 2), or (1, 1, 2, 2, 2) for 32 pixels.",
        ),
        (partial(models.sanet, strides=(1, 1, 2, 2, 0)), ValueError, "sanet: strides must be 5 whole numbers from 1"),
    ],
)
def test_errors(wrong: Callable[[], object], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=re.escape(text)):
        wrong()


@pytest.mark.parametrize("build", [models.sanet, models.attnnet_averaged, models.mobilenet_v2_siamese])
def test_scores_of_images_far_from_the_running_statistics_are_finite(build: Any) -> None:
    torch.manual_seed(0)
    net = responding(build(num_classes=10, width=0.25, strides=SMALL))
    optimizer = torch.optim.SGD(net.parameters(), 0.02, momentum=0.9)
    for _ in range(10):
        loss = net(torch.randn(8, 3, 32, 32)).logsumexp(1).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    images = torch.randn(8, 3, 32, 32)
    with torch.no_grad():
        for times in (1, 2, 10, 1000):
            assert net.eval()(times * images).isfinite().all(), times
