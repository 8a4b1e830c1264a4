"""Benchmarks of training on wholes: drawn networks, and a class that is decided far apart."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from helpers.drawn_training import Training

pytestmark = pytest.mark.usefixtures("benchmarks_on_path")


@pytest.fixture
def far_apart(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = __import__("far_apart")
    monkeypatch.setattr(module, "TESTED", 16)
    return module


def test_spots_stand_in_opposite_corners_and_the_label_compares_their_colours(far_apart: ModuleType) -> None:
    images, same = far_apart.draw_images(32, torch.Generator().manual_seed(0))
    assert 0 < same.sum() < 32
    # Of blocks of positions, the two of most colour: noise is averaged out.
    blocks = torch.nn.functional.avg_pool2d(images, 16).clamp(min=0.7) - 0.7
    for image, label in zip(blocks, same, strict=True):
        top, bottom = image[:, :8].amax((1, 2)), image[:, 8:].amax((1, 2))
        assert (top.argmax() == bottom.argmax()) == bool(label)
        left, right = (half.amax((0, 1, 2)) for half in (image[..., :8], image[..., 8:]))
        assert min(left, right) > 0


def test_runs_are_recorded_and_not_run_again(
    far_apart: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    record = tmp_path / "far_apart.jsonl"
    arguments = ["far_apart.py", "--steps", "1", "--record", str(record), "--poolings", "mean", "attention pooling"]
    monkeypatch.setattr(sys, "argv", arguments)
    far_apart.main()
    rows = [json.loads(line) for line in record.read_text().splitlines()]
    assert [(row["pooling"], row["seed"]) for row in rows] == [("mean", 0), ("attention pooling", 0)]
    far_apart.main()
    assert len(record.read_text().splitlines()) == 2
    monkeypatch.setattr(sys, "argv", ["far_apart.py", "--collect", str(record)])
    far_apart.main()
    assert "| 1 | mean |" in capsys.readouterr().out


def test_every_network_runs_and_has_gradients(far_apart: ModuleType) -> None:
    images, same = far_apart.draw_images(2, torch.Generator().manual_seed(0))
    for pooling in far_apart.POOLINGS:
        network = far_apart.make_network(pooling)
        torch.nn.functional.cross_entropy(network(images), same).backward()
        assert all(each.grad is not None for each in network.parameters()), pooling


# ---- drawn networks --------------------------------------------------------------------------------------------------
def test_drawn_networks_are_counted_and_a_wrong_one_ends_the_script_with_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script, record = __import__("drawn_training"), tmp_path / "record.jsonl"
    outcomes = {7: Training("right", "right", ""), 8: Training("cancelled", "right", "off by 1e-9")}
    monkeypatch.setattr(script, "compare_training", outcomes.get)
    monkeypatch.setattr(sys, "argv", ["drawn_training.py", "--first", "7", "--count", "2", "--record", str(record)])
    script.main()
    assert json.loads(record.read_text())["float64"] == {"right": 1, "cancelled": [8], "wrong": []}
    outcomes[8] = Training("wrong", "right", "off by 1")
    with pytest.raises(SystemExit, match="1"):
        script.main()
    assert "float64, wrong: [8]" in capsys.readouterr().out
