"""KAN Table 2 and SAN Table 2: every entry that comes out by formula, as printed."""

from __future__ import annotations

import pytest

from farfield import cost
from farfield.cost.formulas import PAPERS

# (operator, side): MACs, cost saving, memory, memory saving. 8 channels; MACs of one sample with the value map, memory
# of a batch of 8.
KAN_TABLE_2 = {
    ("softmax", 14): ("0.63m", "0.00%", "5.2MB", "0.00%"),
    ("softmax_pooled", 14): ("0.16m", "75.00%", "1.5MB", "71.65%"),
    ("kronecker_kv", 14): ("0.09m", "85.71%", "0.9MB", "82.03%"),
    ("kronecker_qkv", 14): ("0.01m", "97.71%", "0.3MB", "95.06%"),
    ("softmax", 28): ("9.88m", "0.00%", "79.9MB", "0.00%"),
    ("softmax_pooled", 28): ("2.47m", "75.00%", "20.7MB", "74.13%"),
    ("kronecker_kv", 28): ("0.71m", "92.86%", "6.5MB", "91.88%"),
    ("kronecker_qkv", 28): ("0.05m", "99.46%", "0.9MB", "98.85%"),
    ("softmax", 56): ("157.55m", "0.00%", "1,262.6MB", "0.00%"),
    ("softmax_pooled", 56): ("39.39m", "75.00%", "318.7MB", "74.76%"),
    ("kronecker_kv", 56): ("5.62m", "96.43%", "48.2MB", "96.18%"),
    ("kronecker_qkv", 56): ("0.21m", "99.87%", "3.4MB", "99.73%"),
}
# Cut off where all others are rounded: 5.627 million.
KAN_CUT = {("kronecker_kv", 56)}
# Within 0.3 % but not to the digit; papers/docs/printed-numbers.md says why.
KAN_MEMORY_NEARLY = {("softmax", 28), ("softmax", 56)}
KAN_MEMORY_SAVING_NEARLY = {
    ("softmax_pooled", 14),
    ("kronecker_kv", 14),
    ("kronecker_qkv", 14),
    ("softmax_pooled", 28),
    ("kronecker_kv", 28),
}

# (operator, side, channels): MACs, memory, memory saving. No value map; batch 32 is inferred.
SAN_TABLE_2 = {
    ("softmax", 14, 64): ("4.92m", "20.97MB", "0.00%"),
    ("softmax_pooled", 14, 64): ("1.23m", "8.39MB", "59.99%"),
    ("averaged", 14, 64): ("1.61m", "5.24MB", "75.01%"),
    ("siamese", 14, 64): ("0.05m", "4.29MB", "79.54%"),
    ("softmax", 28, 128): ("157.35m", "301.99MB", "0.00%"),
    ("softmax_pooled", 28, 128): ("39.34m", "100.66MB", "66.67%"),
    ("averaged", 28, 128): ("25.69m", "37.75MB", "87.50%"),
    ("siamese", 28, 128): ("0.40m", "33.88MB", "88.78%"),
    ("softmax", 56, 256): ("5,035.26m", "5.04GB", "0.00%"),
    ("softmax_pooled", 56, 256): ("1,258.82m", "1.34GB", "73.38%"),
    ("averaged", 56, 256): ("411.04m", "0.28GB", "94.34%"),
    ("siamese", 56, 256): ("3.21m", "0.26GB", "94.65%"),
}


def kan(row: str, side: int, batch: int = 1) -> cost.Cost:
    return cost.predict(row, channels=8, size=(side, side), batch=batch, convention="paper")


def san(row: str, side: int, channels: int, batch: int = 1) -> cost.Cost:
    return cost.predict(row, channels=channels, size=(side, side), batch=batch, project="", convention="SAN")


def saving(small: float, large: float) -> str:
    return f"{100 * (1 - small / large):.2f}%"


def truncated(number: float, digits: int) -> float:
    return int(number * 10**digits) / 10**digits


@pytest.mark.parametrize("entry", KAN_TABLE_2, ids=str)
def test_kan_table_2_macs(entry: tuple[str, int]) -> None:
    printed_macs, printed_saving, _, _ = KAN_TABLE_2[entry]
    macs = kan(*entry).macs
    assert f"{truncated(macs / 1e6, 2) if entry in KAN_CUT else macs / 1e6:.2f}m" == printed_macs
    assert saving(macs, kan("softmax", entry[1]).macs) == printed_saving


@pytest.mark.parametrize("entry", KAN_TABLE_2, ids=str)
def test_kan_table_2_memory(entry: tuple[str, int]) -> None:
    printed = KAN_TABLE_2[entry][2]
    size = kan(*entry, batch=8).activation_bytes / 1e6
    if entry in KAN_MEMORY_NEARLY:
        assert f"{size:,.1f}MB" != printed
        assert size == pytest.approx(float(printed.removesuffix("MB").replace(",", "")), rel=3e-3)
    else:
        assert f"{size:,.1f}MB" == printed


@pytest.mark.parametrize("entry", KAN_TABLE_2, ids=str)
def test_kan_table_2_memory_saving(entry: tuple[str, int]) -> None:
    printed = KAN_TABLE_2[entry][3]
    ours = saving(kan(*entry).activation_bytes, kan("softmax", entry[1]).activation_bytes)
    if entry in KAN_MEMORY_SAVING_NEARLY:
        assert ours != printed
        assert float(ours.removesuffix("%")) == pytest.approx(float(printed.removesuffix("%")), abs=0.3)
    else:
        assert ours == printed


@pytest.mark.parametrize("entry", SAN_TABLE_2, ids=str)
def test_san_table_2_macs(entry: tuple[str, int, int]) -> None:
    assert f"{san(*entry).macs / 1e6:,.2f}m" == SAN_TABLE_2[entry][0]


@pytest.mark.parametrize("entry", [entry for entry in SAN_TABLE_2 if entry != ("softmax", 56, 256)], ids=str)
def test_san_table_2_memory(entry: tuple[str, int, int]) -> None:
    printed = SAN_TABLE_2[entry][1]
    size = san(*entry, batch=32).activation_bytes
    # Megabytes are rounded, gigabytes truncated.
    ours = f"{size / 1e6:.2f}MB" if printed.endswith("MB") else f"{truncated(size / 1e9, 2):.2f}GB"
    assert ours == printed


@pytest.mark.parametrize("entry", SAN_TABLE_2, ids=str)
def test_san_table_2_memory_saving(entry: tuple[str, int, int]) -> None:
    row, side, channels = entry
    printed = SAN_TABLE_2[entry][2]
    if side == 56:
        # The printed 5.04 GB is not reproduced; 5.042 is the one value with which all three savings come out.
        size, whole = san(*entry, batch=32).activation_bytes, 5.042e9
        assert row == "softmax" or saving(size, whole) == printed
    else:  # of the printed entries
        size, whole = (float(SAN_TABLE_2[name, side, channels][1].removesuffix("MB")) for name in (row, "softmax"))
        assert saving(size, whole) == printed


def test_batches_multiply() -> None:
    for row in {row for paper in PAPERS.values() for row in paper.rows}:
        one, eight = (cost.predict(row, channels=8, size=(14, 14), batch=batch, convention="paper") for batch in (1, 8))
        assert (eight.macs, eight.coefficients) == (8 * one.macs, 8 * (one.coefficients or 0))
        assert (eight.parameters, eight.weights) == (one.parameters, one.weights)


@pytest.mark.parametrize("side", [14, 28, 56])
def test_what_executes_is_what_kan_counts(side: int) -> None:
    # KAN maps the values of keys only, before or after the average: the same number.
    for row in ("softmax", "softmax_pooled", "kronecker_kv", "kronecker_qkv", "kronecker_qkv_literal"):
        assert cost.predict(row, channels=8, size=(side, side)).macs == kan(row, side).macs


def test_what_executes_is_less_than_san_counts_with_a_value_map() -> None:
    for row in ("averaged", "siamese", "siamese_ones", "siamese_local"):
        ours, printed = (
            cost.predict(row, channels=64, size=(28, 28), convention=c).macs for c in ("farfield", "paper")
        )
        assert ours < 0.7 * printed
