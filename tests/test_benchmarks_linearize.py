"""The benchmarks of linear transformers: their controls are what they say, runs are resumed and recorded once."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Generator, Tensor, nn


@pytest.fixture
def cct(benchmarks_on_path: None, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = __import__("linearize_cct")
    for name, value in {"CHANNELS": 16, "HEADS": 2, "LAYERS": 2, "BATCH": 4, "EPOCHS": 4}.items():
        monkeypatch.setattr(module, name, value)
    return module


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """Folders of ten classes: six images to train on, two held out."""
    from PIL import Image

    drawn = np.random.default_rng(0)
    for part, number in (("train", 6), ("val", 2)):
        for name in "abcdefghij":
            folder = tmp_path / "images" / part / name
            folder.mkdir(parents=True)
            for place in range(number):
                Image.fromarray(drawn.integers(256, size=(32, 32, 3), dtype=np.uint8)).save(folder / f"{place}.jpg")
    return tmp_path / "images"


def test_moved_images_are_parts_of_the_padded_image_or_of_its_mirror(cct: ModuleType) -> None:
    images = torch.rand(20, 3, 32, 32, generator=Generator().manual_seed(0))
    moved = cct.augment(images, Generator().manual_seed(1))
    assert moved.shape == images.shape
    padded = nn.functional.pad(images, (4, 4, 4, 4))
    for one, image in zip(moved, padded, strict=True):
        windows = [each.unfold(1, 32, 1).unfold(2, 32, 1).permute(1, 2, 0, 3, 4) for each in (image, image.flip(2))]
        assert any((window == one).flatten(2).all(2).any() for window in windows)


def test_a_teacher_that_was_interrupted_ends_as_one_that_was_not(
    cct: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    images, classes = torch.rand(12, 3, 32, 32), torch.arange(12) % 10
    whole = cct.train_teacher(images, classes, tmp_path / "whole", 1)

    def stop(*_: Any) -> Tensor:
        raise KeyboardInterrupt

    drawn, augment = [], cct.augment

    def augment_until(some: Tensor, generator: Generator) -> Tensor:
        drawn.append(1)
        return stop() if len(drawn) == 8 else augment(some, generator)  # in the third of four epochs of three steps

    monkeypatch.setattr(cct, "augment", augment_until)
    with pytest.raises(KeyboardInterrupt):
        cct.train_teacher(images, classes, tmp_path / "parts", 1)
    drawn.extend([1] * 10)
    resumed = cct.train_teacher(images, classes, tmp_path / "parts", 1)
    for one, other in zip(whole.state_dict().values(), resumed.state_dict().values(), strict=True):
        assert torch.equal(one, other)


def test_without_attention_positions_meet_only_at_the_end(cct: ModuleType) -> None:
    torch.manual_seed(0)
    teacher = cct.CompactTransformer().eval()
    student = cct.CompactTransformer().eval()
    student.load_state_dict(teacher.state_dict())
    for layer in student.encoder.layers:
        nn.init.zeros_(layer.self_attn.out_proj.weight)
    cct.fit_without(student, teacher, [torch.rand(4, 3, 32, 32) for _ in range(3)], 20, 3e-4)
    image = torch.rand(1, 3, 32, 32)
    moved = image.clone()
    moved[..., :8, :8] += 1
    # Two convolutions and two poolings reach 9 pixels: the last row of tokens sees none of the first eight.
    differs = (student.encode(image) - student.encode(moved)).abs().amax(2).view(8, 8)
    assert differs[0, 0] > 0
    assert differs[5:].max() == 0
    assert (teacher.encode(image) - teacher.encode(moved)).abs().amax(2).view(8, 8)[5:].max() > 0


@pytest.mark.long
def test_runs_are_recorded_once_and_the_table_has_the_teachers_share(
    cct: ModuleType, images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    record = tmp_path / "cct.jsonl"
    words = ["linearize_cct.py", "--root", str(images), "--runs", str(tmp_path / "runs"), "--out", str(record)]
    words += ["--steps", "4", "--only", "teacher", "factorized_gaussian", "responses of zero, rate 0.001"]
    monkeypatch.setattr(sys, "argv", words)
    cct.main()
    lines = [json.loads(each) for each in record.read_text().splitlines()]
    assert [each["operator"] for each in lines] == ["teacher", "factorized_gaussian", "responses of zero, rate 0.001"]
    # Of twenty images.
    assert all(round(20 * each["accuracy"], 6).is_integer() for each in lines)
    assert "untrained" in lines[1]
    before = record.read_bytes()
    cct.main()
    assert record.read_bytes() == before
    assert "factorized_gaussian" in capsys.readouterr().out


@pytest.mark.parametrize(("script", "record"), [("linearize", "minilm"), ("linearize_cct", "cct")])
def test_the_page_has_the_rows_of_the_record(
    script: str, record: str, benchmarks_on_path: None, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    root = Path(__file__).parents[1]
    file = root / "benchmarks" / "records" / f"{record}.jsonl"
    monkeypatch.setattr(sys, "argv", [script, "--collect", str(file)])
    __import__(script).main()
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert len(rows) > 5
    page = (root / "docs" / "guide" / "replace.md").read_text(encoding="utf-8").splitlines()
    assert [row for row in rows if row not in page] == []
