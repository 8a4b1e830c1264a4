"""torchvision's MobileNetV2 in our networks: the same outputs in ours, the right channels in the others."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor, nn
from torchvision.models import mobilenet_v2

from farfield_papers import models
from farfield_papers.models import CLASSIFIERS, load_torchvision
from farfield_papers.nn import AttentionBlock


def theirs(width: float = 1.0) -> nn.Module:
    """A MobileNetV2 of torchvision with every entry of its state dict random."""
    net = mobilenet_v2(width_mult=width)
    for part in net.modules():
        if isinstance(part, nn.BatchNorm2d):
            part.momentum = 1.0
            nn.init.uniform_(part.weight, 0.5, 1.5)
            nn.init.normal_(part.bias, 0, 0.1)
    nn.init.normal_(net.classifier[1].bias)
    with torch.no_grad():
        net(torch.randn(4, 3, 64, 64))
    return net.eval()


@pytest.mark.parametrize("width", [0.25, 1.0])
@pytest.mark.parametrize("size", [(32, 32), (65, 96)])
def test_outputs_are_torchvisions(width: float, size: tuple[int, int]) -> None:
    source, net = theirs(width), models.mobilenet_v2(width=width).eval()
    report = load_torchvision(net, source.state_dict())
    assert report == (list(net.state_dict()), [], [])
    with torch.no_grad():
        image = torch.randn(2, 3, *size)
        expected = source(image)
        assert expected.std() > 0.1
        torch.testing.assert_close(net(image), expected, rtol=0, atol=0)
        torch.testing.assert_close(net.forward_features(image), source.features(image), rtol=0, atol=0)


def test_training_is_torchvisions_too() -> None:
    source, net = theirs(0.25), models.mobilenet_v2(width=0.25, dropout=0.0)
    load_torchvision(net, source.state_dict())
    source.classifier[0].p = 0.0
    image = torch.randn(4, 3, 64, 64)
    torch.testing.assert_close(net.train()(image), source.train()(image), rtol=0, atol=0)


def entries(net: nn.Module) -> dict[str, Tensor]:
    return {name: entry.clone() for name, entry in net.state_dict().items()}


@pytest.mark.parametrize("name", ["kanet_qkv", "sanet", "sanet_without_attention", "senet", "mobilenet_v2_siamese"])
def test_blocks_start_from_the_expanded_channels(name: str) -> None:
    source, net = theirs().state_dict(), CLASSIFIERS[name]()
    before = entries(net)
    report, after = load_torchvision(net, source), net.state_dict()
    assert sorted([*report.whole, *report.part, *report.kept]) == sorted(after)
    for entry in report.kept:
        torch.testing.assert_close(after[entry], before[entry], rtol=0, atol=0)
    blocks = [(f"rows.{row}.{index}", block) for row, part in enumerate(net.rows) for index, block in enumerate(part)]
    assert len(blocks) == 17
    for number, (path, block) in enumerate(blocks[1:], 2):
        theirs_at, wide, own = f"features.{number}.conv", 6 * block.channels, block.expanded
        assert own == (
            wide if name.startswith("mobilenet") and not isinstance(block, AttentionBlock) else 5 * block.channels
        )
        expand, depthwise = after[f"{path}.expand.convolution.weight"], after[f"{path}.depthwise.norm.running_var"]
        project = after[f"{path}.project.convolution.weight"]
        torch.testing.assert_close(expand, source[f"{theirs_at}.0.0.weight"][:own], rtol=0, atol=0)
        torch.testing.assert_close(depthwise[:own], source[f"{theirs_at}.1.1.running_var"][:own], rtol=0, atol=0)
        torch.testing.assert_close(project[:, :own], source[f"{theirs_at}.2.weight"][:, :own], rtol=0, atol=0)
        # What reads the input or the attention keeps its own values.
        torch.testing.assert_close(
            project[:, own:], before[f"{path}.project.convolution.weight"][:, own:], rtol=0, atol=0
        )
        torch.testing.assert_close(depthwise[own:], before[f"{path}.depthwise.norm.running_var"][own:], rtol=0, atol=0)
        assert (f"{path}.project.convolution.weight" in report.part) == (own < wide)
    for entry in ("rows.0.0.depthwise.convolution.weight", "head.convolution.weight", "classifier.bias"):
        assert entry in report.whole
    assert all("attention" in entry for entry in report.kept)


def test_other_classes_and_image_channels_keep_their_own() -> None:
    net = models.mobilenet_v2(num_classes=10, in_channels=5)
    report = load_torchvision(net, theirs().state_dict())
    assert report.kept == ["stem.convolution.weight", "classifier.weight", "classifier.bias"]
    report = load_torchvision(models.mobilenet_v2(num_classes=0), theirs().state_dict())
    assert (report.part, report.kept) == ([], [])


def test_another_width_changes_nothing() -> None:
    narrow, net = models.kanet(width=0.5), models.kanet()
    text = "load_torchvision: stem.convolution.weight of kanet is (16, 3, 3, 3), features.0.0.weight is (32, 3, 3, 3); "
    with pytest.raises(ValueError, match=re.escape(text)):
        load_torchvision(narrow, theirs().state_dict())
    # Here all but one of the last entries agree.
    state, before = theirs().state_dict() | {"features.18.0.weight": torch.zeros(640, 320, 1, 1)}, entries(net)
    with pytest.raises(ValueError, match=re.escape("head.convolution.weight of kanet is (1280, 320, 1, 1)")):
        load_torchvision(net, state)
    for name, entry in net.state_dict().items():
        torch.testing.assert_close(entry, before[name], rtol=0, atol=0)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"features.3.conv.0.0.weight": None}, "it lacks features.3.conv.0.0.weight (1 lacking, 0 unknown)"),
        ({"layer1.weight": torch.zeros(1)}, "it has layer1.weight (0 lacking, 1 unknown)"),
    ],
)
def test_another_network_is_refused(change: dict[str, Tensor | None], text: str) -> None:
    state = {name: entry for name, entry in {**theirs(0.25).state_dict(), **change}.items() if entry is not None}
    beginning = "load_torchvision: for sanet the state dict must be that of torchvision.models.mobilenet_v2; "
    with pytest.raises(ValueError, match=re.escape(beginning + text)):
        load_torchvision(models.sanet(width=0.25), state)
