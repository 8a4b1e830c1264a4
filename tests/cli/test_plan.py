"""`farfield plan` as text, JSON and CSV, and its errors."""

from __future__ import annotations

import csv
import io
import json
from typing import Any

import pytest

from farfield import cost
from farfield.cli import main
from farfield.cli.values import parse_bytes
from farfield.ops import OPERATORS


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Any:
    def run(text: str) -> str:
        main(["plan", *text.split()])
        return capsys.readouterr().out

    return run


@pytest.mark.long
def test_plan_as_json(run: Any) -> None:
    options = "--channels 16 --size 12,10 --batch 2 --heads 2 --project qkvo --memory 100kB --backward --no-time"
    rows = json.loads(run(f"{options} --json"))
    expected = cost.plan(channels=16, size=(12, 10), batch=2, heads=2, project="qkvo", memory=100_000, backward=True)
    assert [row["operator"] for row in rows] == list(OPERATORS)
    for row, plan in zip(rows, expected, strict=True):
        assert row == {
            "operator": plan.operator,
            "fits": plan.fits,
            "macs_forward": plan.forward.macs,
            "bytes_forward": plan.forward.bytes,
            "seconds_forward": None,
            "macs_training": plan.training.macs,
            "bytes_training": plan.training.bytes,
            "seconds_training": None,
            "cheaper_macs": plan.cheaper_macs,
            "cheaper_bytes": plan.cheaper_bytes,
        }
    assert {row["fits"] for row in rows} == {True, False}


@pytest.mark.long
def test_plan_for_people(run: Any) -> None:
    text = run("--channels 16 --size 12,10 --memory 60KiB --no-time")
    title = "16 channels, 1 head, projections v, batch 1, a forward pass in 0.06MB"
    assert text.startswith(f"Operators on 12 × 10 positions, {title}")
    lines = {line.split()[0]: line.split() for line in text.splitlines() if line.split()[:1]}
    assert lines["siamese"][1] == "yes"
    assert lines["dot"][1] == "no"
    assert " time " not in text
    assert "N = 25" in text  # averaged: N > 16
    text = run("--channels 16 --size 4 --no-time")
    assert " fits " not in text


@pytest.mark.long
def test_plan_with_times(run: Any) -> None:
    rows = list(csv.DictReader(io.StringIO(run("--channels 8 --size 6,6 --csv"))))
    assert all(float(row["seconds_forward"]) > 0 and float(row["seconds_training"]) > 0 for row in rows)
    text = run("--channels 8 --size 6,6")
    assert "Time: estimated from a short run on cpu." in text
    assert "ms" in text


@pytest.mark.long
def test_where_nothing_fits_tiles_are_named(run: Any) -> None:
    size = "--channels 16 --size 12,10 --no-time"
    assert "In tiles most do" in run(f"{size} --memory 1kB")
    assert "In tiles" not in run(f"{size} --memory 100kB")


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("8GiB", 8 << 30),
        ("8 GiB", 8 << 30),
        ("1.5MB", 1_500_000),
        ("24G", 24 * 10**9),
        ("24gb", 24 * 10**9),
        ("512K", 512_000),
        ("4096B", 4096),
        ("1000000", 10**6),
        ("2e9", 2 * 10**9),
        ("1TB", 10**12),
    ],
)
def test_memory(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ("--size 4", "required: --channels"),
        ("--channels 8", "required: --size"),
        (
            "--channels 8 --size 4 --memory lots",
            "--memory: 'lots' is not a memory size: a number and a unit, such as 24G",
        ),
        ("--channels 8 --size 4 --memory 24", "--memory: '24' is 24 bytes, as it has no unit; fix: 24G, "),
        ("--channels 8 --size 4 --memory 8Go", "--memory: '8Go' is not a memory size"),
        ("--channels 8 --size 4 --memory 0", "--memory: '0' is not a memory size"),
        ("--channels 8 --size 4,0", "--size: '4,0' is not a size"),
        ("--channels 8 --size 4 --heads 3", "farfield plan: cost.plan: heads=3 does not divide the 8 channels of the"),
        ("--channels 8 --size 4 --project x", "farfield plan: cost.plan: project='x' must be letters of"),
        ("--channels 8 --size 4 --device abacus", '--device: no device "abacus"; it has cpu, cuda, mps, xpu.'),
    ],
)
def test_plan_refuses(capsys: pytest.CaptureFixture[str], options: str, text: str) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["plan", *options.split()])
    assert stopped.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert text in captured.err
    assert "Traceback" not in captured.err
