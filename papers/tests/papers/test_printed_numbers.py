"""papers/docs/printed-numbers.md says what does not come out, and our value: it must not say what the code does not."""

from __future__ import annotations

import re
from decimal import Decimal
from pathlib import Path

import pytest
import torch

from farfield import cost, nn
from papers_helpers.printed import millions, network

PAGE = Path(__file__).parents[2] / "docs" / "printed-numbers.md"


def table(header: str) -> dict[str, list[str]]:
    """First entry -> the other entries of the table with this header."""
    text = PAGE.read_text(encoding="utf-8")
    block = text[text.index(header) :].split("\n\n")[0]
    rows = [[entry.strip(" `") for entry in line.strip("|").split("|")] for line in block.splitlines()[2:]]
    return {first: rest for first, *rest in rows}


def kan(row: str, side: int, batch: int = 8) -> cost.Cost:
    return cost.predict(row, channels=8, size=(side, side), batch=batch, convention="paper")


def kan_memory(row: str, side: int) -> str:
    return f"{kan(row, side).activation_bytes / 1e6:,.1f}MB"


def kan_saving(row: str, side: int) -> str:
    return f"{100 * (1 - kan(row, side).activation_bytes / kan('softmax', side).activation_bytes):.2f}%"


def fa(operator: str, size: tuple[int, ...], channels: int) -> cost.Cost:
    return cost.predict(
        operator, channels=channels, size=size, project="qkv", inner_channels=channels // 2, convention="FA"
    )


def fa_ratio(what: str, size: tuple[int, ...], channels: int, digits: int = 1) -> str:
    dense, linear = (getattr(fa(row, size, channels), what) for row in ("dot", "factorized"))
    return f"{dense / linear:.{digits}f}x"


def bert_saving() -> str:
    """Of the 12 layers' activations and the parameters, base, 512 tokens, in numbers."""
    with torch.device("meta"):
        layers = {row: nn.GridAttention(768, row, project="qkvo", heads=12) for row in ("dot", "factorized")}
    held = {
        row: 12 * (cost.predict(layer, size=(512,), convention="FA").activation_bytes // 4)
        for row, layer in layers.items()
    }
    whole = held["dot"] + 12 * 4 * 768 * 512 + 109_482_240
    return f"{100 * (held['dot'] - held['factorized']) / whole:.1f}%"


def san_memory() -> str:
    found = cost.predict("softmax", channels=256, size=(56, 56), batch=32, project="", convention="SAN")
    return f"{found.activation_bytes / 1e9:.2f}GB"


def ratios(slow: str, *fast: str) -> str:
    """Speed-ups, of printed milliseconds."""
    return ", ".join(f"{Decimal(slow) / Decimal(each):.1f}×" for each in fast)


def ours() -> dict[str, str]:
    fewer = {name: network("mobilenet_v2").weights - network(name).weights for name in ("kanet_kv", "sanet")}
    return {
        "KAN Table 2, MACs of KAO_KV, 56²": f"{kan('kronecker_kv', 56, batch=1).macs / 1e6:.2f}m",
        "KAN Table 2, memory of Attn, 28²": kan_memory("softmax", 28),
        "KAN Table 2, memory of Attn, 56²": kan_memory("softmax", 56),
        "KAN Table 2, memory saving of Attn+Pool, 14²": kan_saving("softmax_pooled", 14),
        "KAN Table 2, memory saving of KAO_KV, 14²": kan_saving("kronecker_kv", 14),
        "KAN Table 2, memory saving of KAO_QKV, 14²": kan_saving("kronecker_qkv", 14),
        "KAN Table 2, memory saving of Attn+Pool, 28²": kan_saving("softmax_pooled", 28),
        "KAN Table 2, memory saving of KAO_KV, 28²": kan_saving("kronecker_kv", 28),
        "KAN Table 2, speed-ups at 14²": ratios("5.8", "2.0", "1.7", "0.8"),
        "KAN Table 2, speed-ups of KAO_KV and KAO_QKV, 28²": ratios("72.4", "7.1", "1.7"),
        "KAN Table 2, speed-up of KAO_QKV, 56²": ratios("1541.1", "5.1"),
        "KAN §4.3, parameters less than MobileNetV2": millions(fewer["kanet_kv"], 2),
        "KAN Table 5, parameters of KANet w/o KAO": millions(network("kanet_without_attention").weights, 2),
        "KAN Table 5, MACs of KANet w/o KAO": millions(network("kanet_without_attention").macs),
        "SAN Table 2, memory of Attn, 56² × 256": san_memory(),
        "SAN Tables 3 and 4, MACs of SANet": millions(network("sanet").macs),
        "SAN Table 4, MACs of SENet": millions(network("senet").macs),
        "SAN Table 6, parameters of SANet w/o SAO": millions(network("sanet_without_attention").weights, 2),
        "SAN Table 6, parameters of MobileNetV2+SAO": millions(network("mobilenet_v2_siamese").weights, 2),
        "SAN §3.4, parameters less than MobileNetV2": millions(fewer["sanet"], 2),
        "SAN §3.4, MACs less than MobileNetV2": millions(network("mobilenet_v2").macs - network("sanet").macs),
        "FA §3.4, 256 × 256": f"{int(2 * fa('dot', (256, 256), 64).macs / 1e9)} GMACC",
        "FA §3.4, memory, 28 × 28 × 4": fa_ratio("activation_bytes", (28, 28, 4), 512),
        "FA §3.4, computation, 28 × 28 × 4": fa_ratio("macs", (28, 28, 4), 512),
        "FA §3.4, memory, 64 × 64 × 32": fa_ratio("activation_bytes", (64, 64, 32), 64, digits=0),
        "FA conclusion, memory that BERT saves": bert_saving(),
    }


def test_what_does_not_come_out_is_what_the_page_says() -> None:
    rows = table("| where | printed | ours | why |")
    assert {where: row[1] for where, row in rows.items()} == ours()
    assert all(row[0] != row[1] and row[2] for row in rows.values())


@pytest.mark.long
def test_the_networks_of_the_page() -> None:
    rows = table("| network | weights |")
    assert len(rows) == 14
    for name, row in rows.items():
        printed, executed = network(name), network(name, "farfield")
        assert row == [f"{printed.weights:,}", f"{printed.macs / 1e6:.2f} M", f"{executed.macs / 1e6:.2f} M"]


def test_exact_differences_in_the_reasons() -> None:
    whys = {where: row[2] for where, row in table("| where | printed | ours | why |").items()}
    assert f"{kan('kronecker_kv', 56, batch=1).macs:,}" in whys["KAN Table 2, MACs of KAO_KV, 56²"]
    for where, name in (("KAN §4.3", "kanet_kv"), ("SAN §3.4", "sanet")):
        fewer = network("mobilenet_v2").weights - network(name).weights
        assert f"{fewer:,}" in whys[f"{where}, parameters less than MobileNetV2"]
    assert f"{network('mobilenet_v2_siamese').weights:,}" in whys["SAN Table 6, parameters of MobileNetV2+SAO"]
    fewer = network("mobilenet_v2").macs - network("sanet").macs
    assert f"{fewer / 1e6:.2f}" in whys["SAN §3.4, MACs less than MobileNetV2"]


@pytest.mark.parametrize("kind", ["parameters", "MACs"])
def test_the_row_without_attention_repeats_the_one_above_it(kind: str) -> None:
    row = table("| where | printed | ours | why |")[f"KAN Table 5, {kind} of KANet w/o KAO"]
    other = network("mobilenet_v2_kronecker_kv")
    assert row[0] == (millions(other.weights, 2) if kind == "parameters" else millions(other.macs))


def test_a_wrong_page_is_noticed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    wrong = tmp_path / "printed-numbers.md"
    wrong.write_text(re.sub("3.34m", "3.35m", PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    monkeypatch.setitem(globals(), "PAGE", wrong)
    with pytest.raises(AssertionError):
        test_what_does_not_come_out_is_what_the_page_says()
