"""The benchmarks of the papers as a user runs them, on tiny data."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

from farfield.nn import GridAttention
from farfield.ops import OPERATORS
from farfield.ops.fast import kernels

pytestmark = pytest.mark.usefixtures("benchmarks_on_path")

ROOT = Path(__file__).parents[2]
BENCHMARKS, RECORDS = ROOT / "papers" / "benchmarks", ROOT / "benchmarks" / "records"


def module(name: str) -> ModuleType:
    return __import__(name)


def main(monkeypatch: pytest.MonkeyPatch, script: str, *arguments: str) -> None:
    """Run a script as `run` does, in this process: loading torch again would be most of it."""
    monkeypatch.setattr(sys, "argv", [script, *arguments])
    module(script.removesuffix(".py")).main()


def run(script: str, *arguments: str) -> str:
    command = [sys.executable, str(BENCHMARKS / script), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_the_documented_starts_are_those_of_the_record(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    main(monkeypatch, "starts.py", "--out", str(RECORDS / "starts.jsonl"), "--collect")
    rows, page = capsys.readouterr().out.splitlines(), (ROOT / "docs" / "guide" / "insert.md").read_text("utf-8")
    assert len(rows) == 2 + len(OPERATORS)
    assert [row for row in rows if row not in page] == []


@pytest.mark.long
def test_starts_are_measured_in_every_form() -> None:
    starts = module("starts")
    lines = [{"grid": "noise"} | line for line in starts.measure(torch.randn(2, 16, 6, 5).relu())]
    assert len(lines) == len(OPERATORS) * len(starts.FORMS) * len(starts.SEEDS)
    assert all(0 < line["varies"] <= 1 for line in lines if line["form"] == "`attention_for`")
    assert len(starts.table(lines).splitlines()) == 2 + len(OPERATORS)


def test_a_sliding_window_is_the_whole_but_for_attention() -> None:
    import numpy as np

    from farfield.streaming import plan_whole, predict_whole
    from farfield_papers import models

    restoration = module("restoration")
    stack = np.random.default_rng(0).random((6, 45, 47), dtype=np.float32)
    stack += np.linspace(0, 4, 47, dtype=np.float32)  # brighter to one side
    tile = (8, 16, 16)
    for operator, seams in ((None, False), ("siamese", True)):
        net = models.unet_care(operator, depth=1, first_channels=4).eval()
        for part in net.modules():
            if isinstance(part, GridAttention):
                nn.init.normal_(part.output.weight, std=0.3)
        result = restoration.sliding(net, stack, plan_whole(net, stack.shape, tile=tile, pad="reflect"))
        whole = predict_whole(net, stack, pad="reflect", quiet=True)
        assert result.shape == stack.shape
        off = result - whole
        assert (np.abs(off).max() > 1e-3 * np.ptp(whole)) == seams
    # A field that is constant in each tile, the padded positions before it counted, changes at borders alone.
    field = np.broadcast_to((np.arange(47) + 1) // 16, stack.shape).astype(np.float32)
    border, elsewhere = restoration.steps(field, (8, 48, 16), [0, 0, 1])
    assert (border, elsewhere) == (1, 0)


def test_three_statistics_are_tabled_from_their_records(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("monai")
    main(monkeypatch, "tile_statistics.py", "--out", str(RECORDS / "tile_statistics.jsonl"), "--collect")
    rows = [re.split(r" *\| *", row) for row in capsys.readouterr().out.splitlines()[2:]]
    networks = {row[1] for row in rows}
    assert networks == {"restoration", "segmentation"}
    for network in networks:
        assert {"input", "whole", "frozen"} <= {row[3] for row in rows if row[1] == network}
    # A mean, and two seeds.
    assert all(re.fullmatch(r"(\w+ [\d.]+ \([\d.]+, [\d.]+\)(, )?)+", row[4]) for row in rows)


@pytest.mark.long
def test_norms_of_kernels() -> None:
    if kernels.problem() is not None:
        pytest.skip("kernels: not built")
    header, _, *lines = [line for line in run("layer_kernels.py", "--tiny").splitlines() if line.startswith("|")]
    assert header == "| torch ÷ kernel | 1×32×7×9 |"
    entries = dict(line.strip("| ").split(" | ") for line in lines)
    assert list(entries) == list(module("layer_kernels").ORDERS)
    assert all(float(entry) > 0 for entry in entries.values())


@pytest.mark.long
def test_training_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "steps.json"
    options = ["--networks", "kanet_qkv", "--batch", "2", "--side", "32", "--repeats", "1", "--json", str(file)]
    monkeypatch.setattr(sys, "argv", ["training_steps.py", *options])
    steps = module("training_steps")
    steps.main()
    result = json.loads(file.read_text(encoding="utf-8"))
    rows = result["rows"]
    assert [(row["name"], row["dtype"]) for row in rows] == [("kanet_qkv", "float32"), ("kanet_qkv", "bfloat16")]
    assert all(row["seconds"] > 0 and row["peak_bytes"] > 1e6 and row["error"] <= steps.TOLERANCE for row in rows)
    assert capsys.readouterr().out.count("| `kanet_qkv` |") == 2
    assert "| `kanet_qkv` | float32 | " in "\n".join(module("gpu_page").training_steps(result, whole=True))


@pytest.mark.long
def test_a_network_that_is_wrong_on_the_device_gets_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = module("training_steps")
    right, calls = steps.outcome, []

    def wrong(*arguments: object) -> tuple[torch.Tensor, torch.Tensor]:
        classes, gradients = right(*arguments)
        calls.append(1)
        return classes, gradients * (1.001 if len(calls) == 2 else 1)

    monkeypatch.setattr(steps, "outcome", wrong)
    with pytest.raises(SystemExit, match=r"mobilenet_v2 on cpu is wrong by 1\.0e-03"):
        steps.check("mobilenet_v2", torch.device("cpu"))
