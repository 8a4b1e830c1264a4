"""FA's introduction, §3.4, Tables 8-12, Figures 4-5 and conclusion: memory and computation that come out by formula."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import pytest
import torch

from farfield import cost, nn
from farfield_papers import theory

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


def fa(operator: str, size: tuple[int, ...], channels: int = 64) -> cost.Cost:
    """FA's typical setting, half the channels in keys and queries; the dot product stands for its non-local module."""
    return cost.predict(
        operator, channels=channels, size=size, project="qkv", inner_channels=channels // 2, convention="FA"
    )


def ratios(size: tuple[int, ...], channels: int) -> tuple[float, float]:
    """How many times more memory and computation the conventional module takes."""
    dense, linear = fa("dot", size, channels), fa("factorized", size, channels)
    return dense.activation_bytes / linear.activation_bytes, dense.macs / linear.macs


# ---- introduction ----------------------------------------------------------------------------------------------------
def test_128_by_128() -> None:
    found = fa("softmax", (128, 128))
    assert found.activation_bytes > 1 * GIGA  # "over 1 GB"
    assert f"{found.activation_bytes / GIGA:.2f}" == "1.09"
    assert theory.predict_module("CA-dot", channels=64, positions=128**2).activation_bytes == found.activation_bytes
    assert found.coefficients == 128**4
    # "over 50 GMACC", where 1 MACC is one multiplication or one addition: two a MACs.
    assert 50 * GIGA < 2 * found.macs < 53 * GIGA


def test_64_by_64_by_32() -> None:
    found = fa("softmax", (64, 64, 32))
    assert 68 * GIGA < found.activation_bytes < 69 * GIGA  # "over 68 GB"
    assert f"{found.activation_bytes / GIGA:.1f}" == "68.9"
    assert (
        theory.predict_module("CA-dot", channels=64, positions=64 * 64 * 32).activation_bytes == found.activation_bytes
    )
    assert 3.2e12 < 2 * found.macs < 3.4e12  # "over 3.2 TMACC"


# ---- §3.4 ------------------------------------------------------------------------------------------------------------
def test_64_by_64() -> None:
    memory, computation = ratios((64, 64), 64)
    assert f"{memory:.0f}x" == "17x"
    assert f"{int(computation)}x" == "32x"


def test_256_by_256() -> None:
    found = fa("dot", (256, 256))
    assert f"{4 * (found.coefficients or 0) / GIGA:.1f} GB" == "17.2 GB"
    # Here 1 MACC has to be one MACs.
    assert f"{int(found.macs / GIGA)} GMACC" == "412 GMACC"
    small = fa("dot", (64, 64))
    linear = fa("factorized", (256, 256))
    assert linear.activation_bytes < small.activation_bytes
    assert linear.macs < small.macs


def test_28_by_28_by_4() -> None:
    # "2x" of both needs c = 1024; the volume of that network has 512 channels.
    assert [f"{ratio:.0f}x" for ratio in ratios((28, 28, 4), 1024)] == ["2x", "2x"]
    assert [f"{ratio:.1f}x" for ratio in ratios((28, 28, 4), 512)] == ["2.5x", "3.7x"]


def test_64_by_64_by_32_ratios() -> None:
    # "32x less memory and 1025x less computation" are of different c.
    assert [f"{ratio:.0f}x" for ratio in ratios((64, 64, 32), 64)] == ["513x", "1025x"]
    assert [f"{ratio:.0f}x" for ratio in ratios((64, 64, 32), 1024)] == ["33x", "65x"]


@pytest.mark.parametrize(
    ("size", "channels", "ratio"),
    [((64, 64), 64, "32.33"), ((28, 28, 4), 512, "3.40"), ((64, 64, 32), 64, "1024.33"), ((64, 64, 32), 1024, "64.33")],
)
def test_computation_with_the_factor_that_table_9_lacks(size: tuple[int, ...], channels: int, ratio: str) -> None:
    # (2kc + c²)s in place of 2(2kc + c²)s in Table 9's row CA-dot: one MACs of the maps counted as one MACC.
    dense, linear = fa("dot", size, channels), fa("factorized", size, channels)
    maps = 2 * channels**2 * math.prod(size)
    assert f"{(2 * dense.macs - maps) / (2 * linear.macs):.2f}" == ratio


# ---- Tables 9-11 by the modules of this library, as far as they are not misprinted (papers/docs/printed-numbers.md) --
SIZES = list(itertools.product((12, 64), (8, 24), (16, 40), (1, 4), (30, 200)))


@pytest.mark.parametrize(("c", "b", "m", "h", "s"), SIZES)
def test_table_9(c: int, b: int, m: int, h: int, s: int) -> None:
    """Memory in numbers (4 bytes), computation in multiplications and additions (2 a MACs); k = b."""

    def found(operator: str, project: str, width: int | None, heads: int) -> tuple[int, int]:
        attention = module(operator, c, project=project, inner=b, width=width, heads=heads)
        predicted = cost.predict(attention, size=(s,), convention="FA")
        return predicted.activation_bytes // 4, 2 * predicted.macs

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
    found = cost.predict(half, size=(s,), convention="FA")
    assert found.activation_bytes / 4 == 4 * c * s + c**2 / (4 * h)
    assert 2 * found.macs == (4 * c**2 + c**2 / h) * s
    quarter = module("factorized", c, project="qkvo", inner=c // 4, width=c // 4, heads=h)
    found = cost.predict(quarter, size=(s,), convention="FA")
    assert found.activation_bytes / 4 == 3 * c * s + c**2 / (16 * h)
    assert 2 * found.macs == (2 * c**2 + c**2 / (4 * h)) * s
    dense = module("dot", c, project="qkvo", inner=c // 4, width=c // 4, heads=h)
    assert cost.predict(dense, size=(s,), convention="FA").activation_bytes / 4 == 3 * c * s + h * s**2
    plain = module("factorized", c, project="qkv", inner=c // 2)
    found = cost.predict(plain, size=(s,), convention="FA")
    assert (found.activation_bytes / 4, 2 * found.macs) == (4 * c * s + c**2 / 2, 6 * c**2 * s)


# ---- Tables 8-12 by `predict_module`, every printed entry ------------------------------------------------------------
# Name -> Factorized, Value bottleneck, Multi-head, Pointwise Feedforward.
TABLE_8 = {
    "FA-dot": (True, False, False, False),
    "CA-dot": (False, False, False, False),
    "FA-bot": (True, True, False, False),
    "CA-bot": (False, True, False, False),
    "FA-multi": (True, True, True, False),
    "CA-multi": (False, True, True, False),
    "FA-Tfm": (True, True, True, True),
    "CA-Tfm": (False, True, True, True),
}


def test_table_8() -> None:
    for name, entries in TABLE_8.items():
        architecture = theory.MODULES[name]
        assert (architecture.operator == "factorized", *architecture[1:]) == entries, name
    assert set(theory.MODULES) - set(TABLE_8) == {"ResBlock", "ResBlock-bot"}


# Name -> memory and computation as printed; k = b. Slips of print: what has to be added to the computation.
TABLE_9 = {
    "ResBlock": ("5*c*s", "36*c**2*s"),
    "ResBlock-bot": ("(4*m + 3*c)*s", "(4*m*c + 18*m**2)*s"),
    "FA-dot": ("(2*b + 3*c)*s + b*c", "(8*b*c + 2*c**2)*s"),
    "CA-dot": ("(2*b + 3*c)*s + s**2", "(2*b*c + c**2)*s + (2*b + 2*c)*s**2"),
    "FA-bot": ("(2*b + 2*m + 2*c)*s + b*m", "(4*b*c + 4*m*c + 4*b*m)*s"),
    "CA-bot": ("(2*b + 2*m + 2*c)*s + s**2", "(4*b*c + 4*m*c)*s + (2*b + 2*m)*s**2"),
    "FA-multi": ("(2*b + 2*m + 2*c)*s + b*m/h", "(4*b*c + 4*m*c + 4*b*m/h)*s"),
    "CA-multi": ("(2*b + 2*m + 2*c)*s + h*s**2", "(4*b*c + 4*m*c)*s + (2*h*b + 2*m)*s**2"),
    "FA-Tfm": ("(2*b + 2*m + 6*c)*s + b*m/h", "(4*b*c + 4*m*c + 4*b*m/h*h + 5*c**2)*s"),
    "CA-Tfm": ("(2*b + 2*m + 6*c)*s + h*s**2", "(4*b*c + 4*m*c + 5*c**2)*s + (2*b + 2*m)*s**2"),
}
SLIPS_9 = {
    "CA-dot": "(2*b*c + c**2)*s",  # lacks the factor 2 of all other rows
    "CA-multi": "(2*b - 2*h*b)*s**2",  # 2hk for 2k: heads divide the channels
    "FA-Tfm": "11*c**2*s + 4*b*m/h*s - 4*b*m*s",  # 5c² for 16c², and an h too many
    "CA-Tfm": "11*c**2*s",  # 5c² for 16c²
}
# Tables 10 and 11: basis, keys and values have half, and a quarter, of the channels.
TABLE_10 = {
    "ResBlock": ("5*c*s", "36*c**2*s"),
    "ResBlock-bot": ("5*c*s", "13/2*c**2*s"),
    "FA-dot": ("4*c*s + c**2/2", "6*c**2*s"),
    "CA-dot": ("4*c*s + s**2", "2*c**2*s + 3*c*s**2"),
    "FA-bot": ("4*c*s + c**2/4", "5*c**2*s"),
    "CA-bot": ("4*c*s + s**2", "4*c**2*s + 2*c*s**2"),
    "FA-multi": ("4*c*s + c**2/(4*h)", "(4*c**2 + c**2/h)*s"),
    "CA-multi": ("4*c*s + h*s**2", "4*c*s + (h*c + c)*s**2"),
}
SLIPS_10 = {
    "CA-dot": "2*c**2*s",  # from Table 9
    "CA-multi": "4*c**2*s - 4*c*s + (c - h*c)*s**2",  # 4cs for 4c²s, and h from Table 9
}
# FA-Tfm's computation is garbled: read c²/(4h) + 7c².
TABLE_11 = {
    "FA-multi": ("3*c*s + c**2/(16*h)", "(2*c**2 + c**2/(4*h))*s"),
    "CA-multi": ("3*c*s + h*s**2", "2*c**2*s + (h*c/2 + m/2)*s**2"),
    "FA-Tfm": ("7*c*s + c**2/(16*h)", "(c**2/(4*h) + 7*c**2)*s"),
    "CA-Tfm": ("7*c*s + h*s**2", "7*c**2*s + c*s**2"),
}
SLIPS_11 = {
    "CA-multi": "(c/2 - h*c/2 + c/2 - m/2)*s**2",  # m/2 for c/2, and h from Table 9
    "FA-Tfm": "11*c**2*s",
    "CA-Tfm": "11*c**2*s",
}
TABLES = [(TABLE_9, SLIPS_9, None), (TABLE_10, SLIPS_10, 2), (TABLE_11, SLIPS_11, 4)]


@pytest.mark.parametrize(("c", "h", "s"), [(64, 1, 30), (64, 4, 200), (128, 8, 77)])
@pytest.mark.parametrize(
    ("name", "printed", "slip", "part"),
    [pytest.param(name, entries, slips.get(name, "0"), part, id=f"{9 + place}-{name}")
     for place, (table, slips, part) in enumerate(TABLES) for name, entries in table.items()],
)  # fmt: skip
def test_tables_9_to_11(
    name: str, printed: tuple[str, str], slip: str, part: int | None, c: int, h: int, s: int
) -> None:
    b, m = (c // part, c // part) if part else (40, 24)
    found = theory.predict_module(name, channels=c, positions=s, basis=b, width=m, heads=h)
    sizes = {"b": b, "c": c, "m": m, "h": h, "s": s}
    memory, computation = (eval(entry, sizes) for entry in printed)
    assert found.activation_bytes == 4 * memory
    assert 2 * found.macs == computation + eval(slip, sizes)


def test_the_page_says_how_many_entries_come_out() -> None:
    page = (Path(__file__).parents[2] / "docs" / "printed-numbers.md").read_text(encoding="utf-8")
    entries, slips = (sum(len(each[place]) for each in TABLES) for place in (0, 1))
    assert f"| FA Tables 9–11 | memory {entries} of {entries}, computation {entries - slips} of {entries} |" in page


TABLE_12 = {"ResBlock": 1, "ResBlock-bot": 1}
TABLE_12 |= {name: 1 if name.startswith("FA") else 2 for name in TABLE_8}


@pytest.mark.parametrize(("name", "power"), TABLE_12.items())
def test_table_12(name: str, power: int) -> None:
    found = [theory.predict_module(name, channels=64, positions=s, heads=4) for s in (10**6, 2 * 10**6)]
    for small, large in (
        [each.activation_bytes for each in found],
        [each.macs for each in found],
    ):
        assert large / small == pytest.approx(2**power, rel=1e-3)


@pytest.mark.parametrize("name", TABLE_8)
def test_modules_have_the_weights_of_the_layers_here(name: str) -> None:
    architecture = theory.MODULES[name]
    row = "factorized" if architecture.operator == "factorized" else "dot"
    if architecture.feedforward:  # a Transformer's maps keep the channels
        made: torch.nn.Module = nn.TransformerLayer(32, row, heads=4)
        norms = 4 * 32
    else:
        project, width = ("qkvo", 12) if architecture.bottleneck else ("qkv", None)
        heads = 4 if architecture.multi_head else 1
        made, norms = module(row, 32, project=project, inner=16, width=width, heads=heads), 0
    options = {"basis": 32, "width": 32} if architecture.feedforward else {"basis": 16, "width": 12}
    found = theory.predict_module(name, channels=32, positions=9, heads=4, **options)
    assert found.parameters == sum(parameter.numel() for parameter in made.parameters()) - norms


def test_modules_that_do_not_exist() -> None:
    with pytest.raises(LookupError, match=r'predict_module: no module "FA-Tmf"; nearest: FA-Tfm'):
        theory.predict_module("FA-Tmf", channels=64, positions=9)
    with pytest.raises(ValueError, match=r"positions .* 1, got 0"):
        theory.predict_module("FA-dot", channels=64, positions=0)
    with pytest.raises(ValueError, match=r"heads=3 .*32 channels of basis"):
        theory.predict_module("FA-multi", channels=64, positions=9, heads=3)


# ---- Figure 5: BERT --------------------------------------------------------------------------------------------------
def test_a_bert_of_8192_tokens_is_impractical_with_conventional_attention_alone() -> None:
    layer = {"channels": 768, "positions": 8192, "basis": 768, "width": 768, "heads": 12}
    dense, linear = (12 * theory.predict_module(name, **layer).activation_bytes / GIGA for name in ("CA-Tfm", "FA-Tfm"))
    assert dense > 40  # more than any GPU had then
    assert linear < 4


# ---- conclusion: BERT ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("tokens", "activations", "with_parameters"), [(512, "43.8", "19.1"), (128, "12.5", "1.4")])
def test_bert_saves_20_percent_only_with_its_parameters(tokens: int, activations: str, with_parameters: str) -> None:
    layers, parameters = 12, 109_482_240
    dense, linear = (
        layers
        * (
            cost.predict(module(row, 768, project="qkvo", heads=12), size=(tokens,), convention="FA").activation_bytes
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
        return cost.predict(attention, size=(14, 20)).parameters

    assert parameters("qkv") == whole
    assert parameters("qkvo") == reprojected
    assert parameters("qkvo", channels // 2) == half
    assert parameters("qkvo", 64) == narrow


def test_stereo_modules() -> None:
    whole, narrow = (module("factorized_gaussian", 128, project="qkvo", inner=64, width=width) for width in (None, 64))
    assert cost.predict(whole, size=(64, 128)).parameters == 49_536
    assert cost.predict(narrow, size=(64, 128)).parameters == 33_088


@pytest.mark.parametrize(
    ("channels", "softmax", "siamese", "bare"),
    [(128, 66_048, 66_176, 49_280), (64, 16_640, 16_704, 12_352), (32, 4_224, 4_256, 3_104)],
)
def test_restoration_modules(channels: int, softmax: int, siamese: int, bare: int) -> None:
    def predicted(operator: str, project: str) -> cost.Cost:
        return cost.predict(operator, channels=channels, size=(4, 16, 16), project=project)

    assert predicted("softmax", "qkvo").parameters == softmax
    assert predicted("siamese", "qkvo").parameters == siamese
    assert predicted("siamese", "qkv").weights == bare


@pytest.mark.parametrize(
    ("size", "gigabytes"),
    [
        ((224, 320), "20.6"),  # fpn1 of a detector, one image
        ((16, 64, 64), "17.2"),  # the finest decoder of a restoration patch
        ((8, 32, 32), "0.27"),
        ((64, 128), "0.27"),  # a stereo crop
        ((136, 240), "4.3"),  # a whole stereo frame
    ],
)
def test_one_softmax_map(size: tuple[int, ...], gigabytes: str) -> None:
    coefficients = cost.predict("softmax", channels=8, size=size).coefficients or 0
    assert f"{4 * coefficients / GIGA:.{len(gigabytes.partition('.')[2])}f}" == gigabytes
