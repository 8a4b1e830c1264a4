"""SAGAN: the counts to the digit, an identity at first with every operator, spectral norms that hold, faults named."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from farfield import ShapeError
from farfield.ops import OPERATORS, Operator
from farfield.ops.slots import softmax_of_products
from farfield_papers import models
from farfield_papers.models.gan import ConditionalNorm, DiscriminatorBlock, GatedAttention, GeneratorBlock
from helpers.partly import partly

SMALL: dict[str, Any] = {
    "side": 16,
    "attention_at": 8,
    "num_classes": 3,
    "noise_channels": 8,
    "generator_channels": 8,
    # An eighth of them are the queries, and a softmax over one channel has no gradient.
    "discriminator_channels": 16,
}


def size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


# ---- counts, by hand from the published architecture -----------------------------------------------------------------
def convolution(before: int, after: int, kernel: int) -> int:
    return kernel**2 * before * after + after


def residual(before: int, after: int) -> int:
    return convolution(before, after, 3) + convolution(after, after, 3) + convolution(before, after, 1)


def attention(channels: int) -> int:
    """Two maps to an eighth, one to half and one from half, without biases, and the gate."""
    return 2 * channels * (channels // 8) + 2 * channels * (channels // 2) + 1


def generator(widths: list[int], classes: int, at: int) -> int:
    """From 4x4 positions of the first width; batch norms have two numbers a channel and class, the last one two."""
    blocks = list(zip([widths[0], *widths], widths, strict=False))
    whole = 129 * 16 * widths[0] + 2 * widths[-1] + convolution(widths[-1], 3, 3) + attention(at)
    return whole + sum(residual(*block) + 2 * classes * sum(block) for block in blocks)


def discriminator(widths: list[int], classes: int, at: int) -> int:
    """The last block keeps sides and channels and has no map on its shortcut."""
    blocks = sum(residual(*block) for block in zip([3, *widths], widths, strict=False))
    last = 2 * convolution(widths[-1], widths[-1], 3)
    return blocks + last + widths[-1] + 1 + classes * widths[-1] + attention(at)


@pytest.mark.long
@pytest.mark.parametrize(
    ("options", "up", "down", "at"),
    partly(
        [
            ({}, [1024, 512, 256, 128, 64], [64, 128, 256, 512, 1024], (256, 128)),
            ({"attention_at": 64}, [1024, 512, 256, 128, 64], [64, 128, 256, 512, 1024], (128, 64)),
            ({"side": 32, "attention_at": 16}, [256, 128, 64], [64, 128, 256], (128, 64)),
            ({"side": 64, "attention_at": 8, "num_classes": 10}, [512, 256, 128, 64], [64, 128, 256, 512], (512, 256)),
        ],
        [({"side": 32, "attention_at": 16}, [256, 128, 64], [64, 128, 256], (128, 64))],
    ),
    ids=str,
)
def test_parameters(options: dict[str, int], up: list[int], down: list[int], at: tuple[int, int]) -> None:
    with torch.device("meta"):
        net = models.sagan(**options)
    classes = options.get("num_classes", 1000)
    assert size(net.generator) == generator(up, classes, at[0])
    assert size(net.discriminator) == discriminator(down, classes, at[1])


@pytest.mark.long
def test_parameters_of_the_published_networks() -> None:
    with torch.device("meta"):
        net = models.sagan()
    assert (size(net.generator), size(net.discriminator)) == (42_078_852, 39_463_618)


@pytest.mark.long
@pytest.mark.parametrize(
    ("side", "at", "in_generator", "in_discriminator"),
    partly([(128, 64, 128, 64), (64, 16, 256, 128), (32, 16, 128, 64)], [(32, 16, 128, 64)]),
)
def test_attention_is_where_it_is_requested(side: int, at: int, in_generator: int, in_discriminator: int) -> None:
    # At 64 of 128 pixels the discriminator has FA's example: 64x64 positions of 64 channels.
    seen: list[tuple[int, ...]] = []
    with torch.device("meta"):
        net = models.sagan(side=side, attention_at=at, num_classes=10)
        for part in (net.generator, net.discriminator):
            part.attention.register_forward_hook(lambda *call: seen.append(tuple(call[-1].shape)))
        labels = torch.zeros(2, dtype=torch.long)
        images = net(torch.empty(2, 128), labels)
        assert images.shape == (2, 3, side, side)
        assert net.discriminator(images, labels).shape == (2,)
    assert seen == [(2, in_generator, at, at), (2, in_discriminator, at, at)]


# ---- attention -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("row", OPERATORS)
def test_a_closed_gate_leaves_the_networks_without_attention(row: str) -> None:
    net, without = models.sagan(row, **SMALL), models.sagan(None, **SMALL)
    missing = without.load_state_dict(net.state_dict(), strict=False)
    assert missing.missing_keys == []
    assert all(".attention." in name for name in missing.unexpected_keys)
    noise, labels = torch.randn(4, 8), torch.tensor([0, 1, 2, 0])
    for training in (True, False):
        images = net.train(training)(noise, labels)
        # Spectral norms go on with each call, from the same vectors in both.
        assert torch.equal(images, without.train(training)(noise, labels))
        scores = (part.discriminator(images.detach(), labels) for part in (net, without))
        assert torch.equal(*scores)


@pytest.mark.parametrize("row", OPERATORS)
def test_an_open_gate_trains_every_weight(row: str) -> None:
    net = models.sagan(row, **SMALL)
    nn.init.constant_(net.generator.attention.gate, 0.5)
    nn.init.constant_(net.discriminator.attention.gate, 0.5)
    noise, labels = torch.randn(6, 8), torch.arange(6) % 3
    (net.discriminator(net(noise, labels), labels).square().sum()).backward()
    for name, parameter in net.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert name.endswith("bias") or parameter.grad.any(), name


def test_gated_attention_is_an_explicit_matrix() -> None:
    attention = GatedAttention(16, "softmax_pooled").double().eval()
    nn.init.constant_(attention.gate, 0.7)
    grid = torch.randn(2, 16, 6, 8, dtype=torch.float64)
    maps = attention.attention
    positions, pooled = grid.flatten(2), nn.functional.max_pool2d(grid, 2).flatten(2)
    query, key, value = maps.query.weight @ positions, maps.key.weight @ pooled, maps.value.weight @ pooled
    assert query.shape == (2, 2, 48)
    assert value.shape == (2, 8, 12)
    matrix = (query.mT @ key).softmax(-1)
    expected = grid + 0.7 * (maps.output.weight @ (value @ matrix.mT)).unflatten(2, (6, 8))
    torch.testing.assert_close(attention(grid), expected)


def test_an_operator_of_ones_own() -> None:
    net = models.sagan(Operator(coefficients=softmax_of_products), **SMALL)
    assert net(torch.randn(2, 8)).shape == (2, 3, 16, 16)


# ---- blocks ----------------------------------------------------------------------------------------------------------
def test_a_block_up_is_what_the_published_one_computes() -> None:
    block, labels = GeneratorBlock(6, 4, 3).eval(), torch.tensor([0, 2])
    for part in (block.first_norm, block.second_norm):
        for embedding in (part.scale, part.shift):
            nn.init.normal_(embedding.weight)
        part.norm.running_mean.normal_()
        part.norm.running_var.uniform_(0.5, 2)
    grid = torch.randn(2, 6, 5, 3)

    def norm(part: ConditionalNorm, x: Tensor) -> Tensor:
        mean, deviation = part.norm.running_mean, (part.norm.running_var + part.norm.eps).sqrt()
        normed = (x - mean[:, None, None]) / deviation[:, None, None]
        return torch.stack(
            [
                part.scale.weight[label][:, None, None] * sample + part.shift.weight[label][:, None, None]
                for label, sample in zip(labels, normed, strict=True)
            ]
        )

    def doubled(x: Tensor) -> Tensor:
        return x.repeat_interleave(2, 2).repeat_interleave(2, 3)

    out = block.first(doubled(norm(block.first_norm, grid).relu()))
    out = block.second(norm(block.second_norm, out).relu())
    # The shortcut after the doubling, as it is published.
    torch.testing.assert_close(block(grid, labels), block.shortcut(doubled(grid)) + out)


@pytest.mark.parametrize("activate", [True, False])
def test_a_block_down_is_what_the_published_one_computes(activate: bool) -> None:
    block, grid = DiscriminatorBlock(4, 6, activate=activate).eval(), torch.randn(2, 4, 6, 8)
    out = block.second(block.first(grid.relu() if activate else grid).relu())
    # The 1x1 map before the averages, as it is published.
    expected = nn.functional.avg_pool2d(out + block.shortcut(grid), 2)
    torch.testing.assert_close(block(grid), expected)


def test_the_score_has_a_term_for_the_class() -> None:
    net = models.sagan(**SMALL).discriminator.eval()
    images = torch.rand(1, 3, 16, 16).expand(3, -1, -1, -1)
    scores = net(images, torch.arange(3))
    plain = scores - (net.classes.weight * features(net, images)).sum(1)
    torch.testing.assert_close(plain, plain[:1].expand(3))
    assert scores.unique().numel() == 3


def features(net: nn.Module, images: Tensor) -> Tensor:
    found: list[Tensor] = []
    handle = net.score.register_forward_pre_hook(lambda _, inputs: found.append(inputs[0]))
    net(images, torch.zeros(len(images), dtype=torch.long))
    handle.remove()
    return found[0]


def test_without_classes_there_is_nothing_of_them() -> None:
    net = models.sagan(**SMALL | {"num_classes": 0})
    assert not [name for name, _ in net.named_parameters() if "scale" in name or "shift" in name or "classes" in name]
    images = net(torch.randn(2, 8))
    assert net.discriminator(images).shape == (2,)


def test_labels_decide_what_is_drawn_and_without_them_chance_does() -> None:
    net = models.sagan(**SMALL).eval()
    for part in net.modules():
        if isinstance(part, ConditionalNorm):
            nn.init.normal_(part.shift.weight)
    noise = torch.randn(1, 8).expand(40, -1)
    images = net(noise, torch.arange(40) % 3)
    torch.testing.assert_close(images[::3], images[:1].expand(14, -1, -1, -1))
    assert not torch.allclose(images[0], images[1], atol=1e-3)
    drawn = net(noise)
    distances = (drawn[:, None] - images[None, :3]).abs().amax((2, 3, 4))
    assert distances.amin(1).max() < 1e-5
    assert distances.argmin(1).unique().numel() == 3


# ---- spectral norm ---------------------------------------------------------------------------------------------------
def test_every_matrix_has_a_spectral_norm_of_one() -> None:
    net = models.sagan("factorized", **SMALL)
    seen = 0
    for name, part in net.named_modules():
        if isinstance(part, nn.Conv2d | nn.Linear | nn.Embedding) and "_norm." not in name:
            original = part.parametrizations.weight.original
            with torch.no_grad():
                original.mul_(3).add_(torch.randn_like(original) * 0.1)
                for _ in range(300):  # each look at the weight is one step of the iteration
                    weight = part.weight
            # Power iteration from a random vector of n numbers is short by about log(n) / (2 · 300), n up to 256.
            assert float(torch.linalg.matrix_norm(weight.flatten(1), 2)) == pytest.approx(1, abs=0.02), name
            seen += 1
    # Generator: two blocks of three, four maps of the attention, first and last layer. Discriminator: two blocks of
    # three and one of two, four maps, the score and the classes.
    assert seen == (2 * 3 + 4 + 2) + (2 * 3 + 2 + 4 + 2)


def test_the_iteration_goes_on_in_training_alone() -> None:
    net, noise, labels = models.sagan("siamese", **SMALL), torch.randn(2, 8), torch.tensor([0, 1])
    vectors = {name: buffer for name, buffer in net.named_buffers() if name.endswith("._u") and buffer.numel() > 1}
    for training in (True, False):
        before = {name: vector.clone() for name, vector in vectors.items()}
        net.train(training).discriminator(net(noise, labels), labels)
        same = [name for name, vector in vectors.items() if torch.equal(vector, before[name])]
        assert same == ([] if training else list(vectors))


# ---- faults, saving --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"side": 48}, ValueError, "sagan: side must be a power of two from 16, got 48."),
        ({"side": 8}, ValueError, "sagan: side must be a whole number from 16, got 8."),
        (
            {"side": 64, "attention_at": 64},
            ValueError,
            "sagan: attention_at must be the side of a grid inside both networks, 8, 16, 32 for images of 64, got 64.",
        ),
        ({"operator": "factorised"}, LookupError, 'sagan: no operator "factorised"; nearest: factorized'),
        ({"num_classes": -1}, ValueError, "sagan: num_classes must be a whole number from 0, got -1."),
        ({"generator_channels": 0}, ValueError, "sagan: generator_channels must be a whole number from 1, got 0."),
    ],
    ids=str,
)
def test_wrong_arguments_are_named(options: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=re.escape(text)):
        models.sagan(**options)


def test_wrong_tensors_are_named() -> None:
    net = models.sagan(**SMALL)
    with pytest.raises(ShapeError, match=r"sagan: noise must be \(batch, 8\)(.|\n)*fix: torch.randn\(batch, 8\)"):
        net(torch.randn(2, 9))
    with pytest.raises(ShapeError, match=r"images must be \(batch, 3, 16, 16\)(.|\n)*--data.image_size 16"):
        net.discriminator(torch.rand(2, 3, 32, 32), torch.tensor([0, 1]))


@pytest.mark.long
@pytest.mark.parametrize("operator", partly([None, "siamese_local", "softmax_pooled"], ["softmax_pooled"]))
def test_saved_networks_come_back(tmp_path: Path, operator: str | None) -> None:
    net = models.sagan(operator, **SMALL).eval()
    net.save_pretrained(tmp_path)
    found, noise, labels = models.from_pretrained(tmp_path), torch.randn(2, 8), torch.tensor([0, 2])
    assert found.config == net.config
    images = net(noise, labels)
    assert torch.equal(found(noise, labels), images)
    assert torch.equal(found.discriminator(images, labels), net.discriminator(images, labels))
    assert "`generator_channels` | `8`" in (tmp_path / "README.md").read_text()
