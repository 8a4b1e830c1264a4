"""FA's introduction, §3.4, Tables 9-11 and conclusion: memory and computation that come out by formula."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from farfield import cost, nn

GIGA = 1e9


def module(
    operator: str,
    channels: int,
    *,
    project: str = "qkv",
    inner: int | None = None,
    width: int | None = None,
    heads: int = 1,
) -> nn.GridAttention:
    with torch.device("meta"):
        return nn.GridAttention(
            channels, operator, project=project, inner_channels=inner, value_channels=width, heads=heads
        ).eval()


def fa(operator: str, sides: tuple[int, ...], channels: int = 64) -> cost.Cost:
    """FA's typical setting, half the channels in keys and queries; the dot product stands for its non-local module."""
    return cost.predict(
        operator, channels=channels, sides=sides, project="qkv", inner_channels=channels // 2, convention="FA"
    )


def ratios(sides: tuple[int, ...], channels: int) -> tuple[float, float]:
    """How many times more memory and computation the conventional module takes."""
    dense, linear = fa("dot", sides, channels), fa("factorized", sides, channels)
    return dense.activation_bytes / linear.activation_bytes, dense.madds / linear.madds


# ---- introduction ----------------------------------------------------------------------------------------------------
def test_128_by_128() -> None:
    found = fa("softmax", (128, 128))
    assert found.activation_bytes > 1 * GIGA  # "over 1 GB"
    assert found.coefficients == 128**4
    # "over 50 GMACC", where 1 MACC is one multiplication or one addition: two a multiply-add.
    assert 50 * GIGA < 2 * found.madds < 53 * GIGA


def test_64_by_64_by_32() -> None:
    found = fa("softmax", (64, 64, 32))
    assert 68 * GIGA < found.activation_bytes < 69 * GIGA  # "over 68 GB"
    assert 3.2e12 < 2 * found.madds < 3.4e12  # "over 3.2 TMACC"


# ---- §3.4 ------------------------------------------------------------------------------------------------------------
def test_64_by_64() -> None:
    memory, computation = ratios((64, 64), 64)
    assert f"{memory:.0f}x" == "17x"
    assert f"{int(computation)}x" == "32x"


def test_256_by_256() -> None:
    found = fa("dot", (256, 256))
    assert f"{4 * (found.coefficients or 0) / GIGA:.1f} GB" == "17.2 GB"
    # Here 1 MACC has to be one multiply-add.
    assert f"{int(found.madds / GIGA)} GMACC" == "412 GMACC"
    small = fa("dot", (64, 64))
    linear = fa("factorized", (256, 256))
    assert linear.activation_bytes < small.activation_bytes
    assert linear.madds < small.madds


def test_28_by_28_by_4() -> None:
    # "2x" of both needs c = 1024; the volume of that network has 512 channels.
    assert [f"{ratio:.0f}x" for ratio in ratios((28, 28, 4), 1024)] == ["2x", "2x"]
    assert [f"{ratio:.1f}x" for ratio in ratios((28, 28, 4), 512)] == ["2.5x", "3.7x"]


def test_64_by_64_by_32_ratios() -> None:
    # "32x less memory and 1025x less computation" are of different c.
    assert [f"{ratio:.0f}x" for ratio in ratios((64, 64, 32), 64)] == ["513x", "1025x"]
    assert [f"{ratio:.0f}x" for ratio in ratios((64, 64, 32), 1024)] == ["33x", "65x"]


@pytest.mark.parametrize(
    ("sides", "channels", "ratio"),
    [((64, 64), 64, "32.33"), ((28, 28, 4), 512, "3.40"), ((64, 64, 32), 64, "1024.33"), ((64, 64, 32), 1024, "64.33")],
)
def test_computation_with_the_factor_that_table_9_lacks(sides: tuple[int, ...], channels: int, ratio: str) -> None:
    # (2kc + c²)s in place of 2(2kc + c²)s in Table 9's row CA-dot: one multiply-add of the maps counted as one MACC.
    dense, linear = fa("dot", sides, channels), fa("factorized", sides, channels)
    maps = 2 * channels**2 * math.prod(sides)
    assert f"{(2 * dense.madds - maps) / (2 * linear.madds):.2f}" == ratio


# ---- Tables 9-11, as far as they are not misprinted (docs/printed-numbers.md) ----------------------------------------
SIZES = list(itertools.product((12, 64), (8, 24), (16, 40), (1, 4), (30, 200)))


@pytest.mark.parametrize(("c", "b", "m", "h", "s"), SIZES)
def test_table_9(c: int, b: int, m: int, h: int, s: int) -> None:
    """Memory in numbers (4 bytes), computation in multiplications and additions (2 a multiply-add); k = b."""

    def found(operator: str, project: str, width: int | None, heads: int) -> tuple[int, int]:
        attention = module(operator, c, project=project, inner=b, width=width, heads=heads)
        predicted = cost.predict(attention, sides=(s,), convention="FA")
        return predicted.activation_bytes // 4, 2 * predicted.madds

    assert found("factorized", "qkv", None, 1) == ((2 * b + 3 * c) * s + b * c, (8 * b * c + 2 * c**2) * s)
    # CA-dot: the table lacks a factor 2 in its first term, which all other rows have.
    assert found("dot", "qkv", None, 1) == (
        (2 * b + 3 * c) * s + s**2,
        2 * (2 * b * c + c**2) * s + (2 * b + 2 * c) * s**2,
    )
    linear, dense = (2 * b + 2 * m + 2 * c) * s + b * m // h, (2 * b + 2 * m + 2 * c) * s + h * s**2
    assert found("factorized", "qkvo", m, h) == (linear, (4 * b * c + 4 * m * c + 4 * b * m // h) * s)
    # CA-multi: the table prints 2hk where heads divide the channels, 2k.
    assert found("dot", "qkvo", m, h) == (dense, (4 * b * c + 4 * m * c) * s + (2 * b + 2 * m) * s**2)


@pytest.mark.parametrize(("c", "h", "s"), [(64, 1, 100), (64, 4, 100), (128, 8, 900)])
def test_table_10_and_11(c: int, h: int, s: int) -> None:
    half = module("factorized", c, project="qkvo", inner=c // 2, width=c // 2, heads=h)
    found = cost.predict(half, sides=(s,), convention="FA")
    assert found.activation_bytes / 4 == 4 * c * s + c**2 / (4 * h)
    assert 2 * found.madds == (4 * c**2 + c**2 / h) * s
    quarter = module("factorized", c, project="qkvo", inner=c // 4, width=c // 4, heads=h)
    found = cost.predict(quarter, sides=(s,), convention="FA")
    assert found.activation_bytes / 4 == 3 * c * s + c**2 / (16 * h)
    assert 2 * found.madds == (2 * c**2 + c**2 / (4 * h)) * s
    dense = module("dot", c, project="qkvo", inner=c // 4, width=c // 4, heads=h)
    assert cost.predict(dense, sides=(s,), convention="FA").activation_bytes / 4 == 3 * c * s + h * s**2
    plain = module("factorized", c, project="qkv", inner=c // 2)
    found = cost.predict(plain, sides=(s,), convention="FA")
    assert (found.activation_bytes / 4, 2 * found.madds) == (4 * c * s + c**2 / 2, 6 * c**2 * s)


# ---- conclusion: BERT ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("tokens", "activations", "with_parameters"), [(512, "43.8", "19.1"), (128, "12.5", "1.4")])
def test_bert_saves_20_percent_only_with_its_parameters(tokens: int, activations: str, with_parameters: str) -> None:
    layers, parameters = 12, 109_482_240
    dense, linear = (
        layers
        * (
            cost.predict(module(row, 768, project="qkvo", heads=12), sides=(tokens,), convention="FA").activation_bytes
            // 4
        )
        for row in ("dot", "factorized")
    )
    feedforward = layers * 4 * 768 * tokens  # FA Table 9, FA-Tfm: 6cs in place of 2cs
    saved, whole = dense - linear, dense + feedforward
    assert f"{100 * saved / whole:.1f}" == activations
    assert f"{100 * saved / (whole + parameters):.1f}" == with_parameters


# ---- modules in other networks: weights, biases included -------------------------------------------------------------
@pytest.mark.parametrize(
    ("channels", "whole", "reprojected", "half", "narrow"),
    [
        (256, 98_688, 164_480, 98_816, 65_984),
        (1024, 1_180_800, 2_230_400, 1_181_312, 263_360),
        (2048, 4_458_624, 8_654_976, 4_459_648, 526_528),
    ],
)
def test_detection_modules(channels: int, whole: int, reprojected: int, half: int, narrow: int) -> None:
    def parameters(project: str, width: int | None = None) -> int:
        attention = module("factorized_gaussian", channels, project=project, inner=64, width=width)
        return cost.predict(attention, sides=(14, 20)).parameters

    assert parameters("qkv") == whole
    assert parameters("qkvo") == reprojected
    assert parameters("qkvo", channels // 2) == half
    assert parameters("qkvo", 64) == narrow


def test_stereo_modules() -> None:
    whole, narrow = (module("factorized_gaussian", 128, project="qkvo", inner=64, width=width) for width in (None, 64))
    assert cost.predict(whole, sides=(64, 128)).parameters == 49_536
    assert cost.predict(narrow, sides=(64, 128)).parameters == 33_088


@pytest.mark.parametrize(
    ("channels", "softmax", "siamese", "bare"),
    [(128, 66_048, 66_176, 49_280), (64, 16_640, 16_704, 12_352), (32, 4_224, 4_256, 3_104)],
)
def test_restoration_modules(channels: int, softmax: int, siamese: int, bare: int) -> None:
    def predicted(operator: str, project: str) -> cost.Cost:
        return cost.predict(operator, channels=channels, sides=(4, 16, 16), project=project)

    assert predicted("softmax", "qkvo").parameters == softmax
    assert predicted("siamese", "qkvo").parameters == siamese
    assert predicted("siamese", "qkv").weights == bare


@pytest.mark.parametrize(
    ("sides", "size"),
    [
        ((224, 320), "20.6"),  # fpn1 of a detector, one image
        ((16, 64, 64), "17.2"),  # the finest decoder of a restoration patch
        ((8, 32, 32), "0.27"),
        ((64, 128), "0.27"),  # a stereo crop
        ((136, 240), "4.3"),  # a whole stereo frame
    ],
)
def test_one_softmax_map(sides: tuple[int, ...], size: str) -> None:
    coefficients = cost.predict("softmax", channels=8, sides=sides).coefficients or 0
    assert f"{4 * coefficients / GIGA:.{len(size.partition('.')[2])}f}" == size
