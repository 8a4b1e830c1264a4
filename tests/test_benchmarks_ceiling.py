"""The ceiling: samples are as documented, networks of a seed start as one function, comparisons find effects."""

from __future__ import annotations

import functools
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Generator, Tensor

SEED = 3


@pytest.fixture
def tasks(benchmarks_on_path: None, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The tasks, with photographs and streets of noise."""
    module = __import__("ceiling_tasks")
    images = torch.rand(40, 3, 32, 32, generator=Generator().manual_seed(0))
    labels = torch.randint(module.CLASSES, (6, 24, 32), generator=Generator().manual_seed(1))
    labels[:, :2] = module.IGNORED
    monkeypatch.setattr(module, "photographs", lambda *_: images)
    stacks = [torch.rand(7, 80, 90, generator=Generator().manual_seed(2)) for _ in range(2)]
    # In place of what the drawing function holds.
    fits = module.TASKS["stacks"]._replace(draw=functools.partial(module.draw_noisy, lambda *_: stacks))
    monkeypatch.setitem(module.TASKS, "stacks", fits)
    monkeypatch.setattr(module, "streets", lambda *_: (images.new_ones(6, 3, *module.STREET), labels))
    return module


@pytest.fixture
def ceiling(benchmarks_on_path: None) -> ModuleType:
    return __import__("ceiling")


def draw(tasks: ModuleType, name: str, training: bool = True, count: int = 8) -> Any:
    return tasks.TASKS[name].draw(Path(), training, count, Generator().manual_seed(SEED))


@pytest.mark.parametrize("name", ["restoration", "stacks", "mosaic", "colour", "hidden"])
@pytest.mark.parametrize("training", [True, False])
def test_samples_fit_the_task(tasks: ModuleType, ceiling: ModuleType, name: str, training: bool) -> None:
    task, (inputs, wanted) = tasks.TASKS[name], draw(tasks, name, training)
    assert inputs.shape == (8, task.inputs, *task.size)
    outputs = ceiling.pooled_outputs(ceiling.Network("none", task), tasks.Batch(inputs, wanted))
    assert outputs.shape == (8, task.outputs, *wanted.shape[-2:])
    again = draw(tasks, name, training)
    assert torch.equal(inputs, again.inputs)
    assert torch.equal(wanted.nan_to_num(9), again.wanted.nan_to_num(9))


@pytest.mark.parametrize("name", ["restoration", "stacks"])
def test_what_is_asked_of_noisy_crops_is_the_noise(tasks: ModuleType, name: str) -> None:
    inputs, wanted = draw(tasks, name, count=40)
    clean = inputs - torch.nn.functional.pixel_shuffle(wanted, 2)
    assert clean.min() > -1e-6
    assert clean.max() < 1 + 1e-6
    # A standard deviation over 163,840 values is within four of its own deviations.
    assert abs(float(wanted.std()) / tasks.NOISE - 1) < 4 / (2 * wanted.numel()) ** 0.5


def test_the_photographs_of_training_and_test_share_no_pixel(tasks: ModuleType) -> None:
    from skimage import data

    for name, *parts in zip(tasks.TEXTURES, tasks.textures(Path(), True), tasks.textures(Path(), False), strict=True):
        rows, columns = getattr(data, name)().shape
        assert sum(part.shape[2] for part in parts) == columns // 2
        assert all(min(part.shape[1:]) >= tasks.CROP for part in parts)
        assert {part.shape[1] for part in parts} == {rows // 2}


def test_tiles_that_are_asked_for_have_a_twin_far_away_and_others_have_none(
    tasks: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Each photograph is of one hue, so that moves change nothing; brightness and contrast keep the hue.
    angles = torch.arange(40) / 40 * 2 * torch.pi
    hues = 0.5 + 0.2 * torch.stack([(angles + turn * torch.pi / 3).cos() for turn in (0, 2, 4)], 1)
    hues = hues[..., None, None].expand(-1, -1, 32, 32)
    monkeypatch.setattr(tasks, "photographs", lambda *_: hues)
    inputs, wanted = draw(tasks, "mosaic", count=20)
    side = tasks.SIDE
    tiles = inputs.unfold(2, side, side).unfold(3, side, side)
    assert (tiles - tiles[..., :1, :1]).abs().max() < 1e-6
    colours = tiles[..., 0, 0].flatten(2).movedim(1, 2)  # n, tiles, 3
    direction = torch.nn.functional.normalize(colours - colours.mean(2, keepdim=True), dim=2)
    same = (direction @ direction.mT > 1 - 1e-4) & ~torch.eye(16, dtype=torch.bool)
    assert torch.equal(same.any(2).long(), wanted.flatten(1))
    assert (wanted.flatten(1).sum(1) == 2 * tasks.TWINS).all()
    for one, other in same.nonzero()[:, 1:].tolist():
        assert max(abs(one // 4 - other // 4), abs(one % 4 - other % 4)) >= 2


def test_colour_is_shown_in_one_square_and_asked_elsewhere(tasks: ModuleType) -> None:
    inputs, wanted = draw(tasks, "colour")
    grey, shown, inside = inputs[:, :1], inputs[:, 1:3], inputs[:, 3:]
    assert inside.flatten(1).sum(1).tolist() == [64] * 8
    assert (shown * (1 - inside)).abs().max() == 0
    # Nothing is asked in the square, and what is asked elsewhere is the mean of a colour less the grey.
    asked = torch.nn.functional.avg_pool2d(inside, 2) == 0
    assert torch.equal(~wanted.isnan(), asked.expand_as(wanted))
    assert asked.flatten(1).sum(1).tolist() == [240] * 8
    assert wanted[asked.expand_as(wanted)].abs().max() < 1
    assert grey.shape == (8, 1, 32, 32)


def test_hidden_pixels_are_hidden_and_nothing_else_is_asked(tasks: ModuleType) -> None:
    inputs, wanted = draw(tasks, "hidden")
    hidden = inputs[:, 3]
    assert hidden.flatten(1).sum(1).tolist() == [40 * 40] * 8
    assert (inputs[:, :3] * hidden[:, None]).abs().max() == 0
    assert (inputs[:, :3] + hidden[:, None] == 1).all()
    asked = (wanted != tasks.IGNORED).repeat_interleave(4, 1).repeat_interleave(4, 2)
    assert not (asked & (hidden == 0)).any()


def test_scores_are_percent_of_what_is_asked_and_decibels(tasks: ModuleType) -> None:
    wanted = torch.tensor([[[0, 1], [2, tasks.IGNORED]]])
    outputs = torch.nn.functional.one_hot(torch.tensor([[[0, 1], [1, 1]]]), 3).movedim(-1, 1).float()
    assert tasks.score_samples(outputs, wanted).tolist() == pytest.approx([200 / 3])
    values = torch.full((1, 1, 2, 2), 0.1)
    assert tasks.score_samples(torch.zeros(1, 1, 2, 2), values).tolist() == pytest.approx([20.0])
    values[..., 0] = torch.nan
    assert tasks.score_samples(torch.zeros(1, 1, 2, 2), values).tolist() == pytest.approx([20.0])
    zeros = torch.zeros(1, 1, 2, 2, requires_grad=True)
    loss = tasks.compute_loss(zeros, values)
    assert loss.item() == pytest.approx(0.01)
    loss.backward()
    assert zeros.grad is not None
    assert torch.allclose(zeros.grad[..., 0], torch.zeros(2))
    assert torch.allclose(zeros.grad[..., 1], torch.full((2,), -0.1))


@pytest.mark.parametrize("contestant", ["softmax", "deeper", "flare, attention_for", "kronecker_qkv"])
def test_networks_of_a_seed_start_as_one_function(tasks: ModuleType, ceiling: ModuleType, contestant: str) -> None:
    nets = []
    for name in ("none", contestant):
        torch.manual_seed(SEED)
        nets.append(ceiling.Network(name, tasks.TASKS["mosaic"]).eval())
    inputs = draw(tasks, "mosaic").inputs
    assert torch.equal(nets[0](inputs), nets[1](inputs))


def line(ceiling: ModuleType, network: str, seed: int, scores: Tensor) -> dict[str, Any]:
    rate = ceiling.TASKS["mosaic"].rate
    values = {"task": "mosaic", "network": network, "seed": seed, "rate": rate, "steps": 800, "seconds": 1.0}
    return values | {"score": float(scores.mean()), "samples": ceiling.encode(scores.numpy())}


def test_comparisons_are_of_the_same_samples_and_seeds(ceiling: ModuleType) -> None:
    drawn = Generator().manual_seed(0)
    difficulty = 20 * torch.randn(500, generator=drawn)
    effects = {1: 0.1, 2: -0.2, 3: 0.0}
    none, better = (
        [line(ceiling, name, seed, 60 + difficulty + own + step) for seed, own in effects.items()]
        for name, step in (("none", 0.0), ("softmax", 3.0))
    )
    networks = {"none": none, "softmax": better}
    found = ceiling.compare("softmax", "none", networks)
    assert found.mean == pytest.approx(3, abs=1e-3)
    assert found.above
    # Samples differ by 20, what is added to each does not: only seeds remain, with 4 degrees of freedom. Student's
    # quantiles at 97.5 and 80 % are 2.776 and 0.941.
    variance = np.var(list(effects.values()), ddof=1)
    assert found.seen == pytest.approx((2.776 + 0.941) * (2 * variance / 3) ** 0.5, rel=0.02)
    assert not ceiling.compare("none", "softmax", networks).above
    assert not ceiling.compare("softmax", "none", {"none": none, "softmax": better[:1]}).above


def test_without_samples_their_errors_have_nothing_in_common(ceiling: ModuleType) -> None:
    scores = {"none": (70.0, 71.0), "softmax": (72.0, 73.0)}
    networks = {
        name: [{"seed": seed, "score": each, "images": 100} for seed, each in enumerate(values)]
        for name, values in scores.items()
    }
    # Two seeds of two networks: a variance of 0.5, two degrees of freedom. A share of 71.5 % of 100 images, twice.
    deviation = (2 * 0.5 / 2 + 2 * 71.5 * 28.5 / 100) ** 0.5
    found = ceiling.compare("softmax", "none", networks)
    assert found.seen == pytest.approx((4.303 + 1.061) * deviation, rel=1e-3)
    assert not found.above


@pytest.mark.parametrize(("last", "above"), [(71.0, True), (69.9, False)])
def test_each_seed_must_agree(ceiling: ModuleType, last: float, above: bool) -> None:
    # The seeds of all other networks agree to the digit, so that the mean alone would be above in both cases.
    scores = {"none": (70.0,) * 3, "softmax": (80.0, 80.0, last)} | {str(each): (60.0,) * 3 for each in range(20)}
    networks = {
        name: [{"seed": seed, "score": each, "images": 10**6} for seed, each in enumerate(values)]
        for name, values in scores.items()
    }
    found = ceiling.compare("softmax", "none", networks)
    assert found.mean > found.seen
    assert found.above is above


def test_runs_of_other_steps_are_another_table(ceiling: ModuleType) -> None:
    lines = [line(ceiling, name, seed, torch.full((4,), 60.0)) for name in ("none", "softmax") for seed in (1, 2)]
    short = line(ceiling, "softmax", 1, torch.full((4,), 50.0)) | {"steps": 10}
    grouped = ceiling.group([*lines, short], 800)
    assert [each["score"] for each in grouped["mosaic"]["softmax"]] == [60.0, 60.0]
    assert ceiling.group([*lines, short], 10) == {}


def test_runs_are_recorded_once_and_tables_name_them(
    tasks: ModuleType, ceiling: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    small = tasks.TASKS["mosaic"]._replace(batch=2, tested=4)
    monkeypatch.setitem(tasks.TASKS, "mosaic", small)
    record, picture = tmp_path / "ceiling.jsonl", tmp_path / "ceiling.png"
    words = ["ceiling.py", "--root", str(tmp_path), "--out", str(record), "--tasks", "mosaic", "--steps", "10"]
    words += ["--only", "none", "deeper", "softmax", "--seeds", "1", "2", "--picture", str(picture)]
    monkeypatch.setattr(sys, "argv", words)
    ceiling.main()
    lines = [json.loads(each) for each in record.read_text().splitlines()]
    assert [(each["network"], each["seed"]) for each in lines] == [
        (name, seed) for seed in (1, 2) for name in ("none", "deeper", "softmax")
    ]
    for each in lines:
        assert len(ceiling.samples(each)) == 4
        assert ceiling.samples(each).mean() == pytest.approx(each["score"], abs=0.05)
    shown = capsys.readouterr().out
    assert "| mosaic, points | 16 × 16 | " in shown
    assert f"{lines[0]['score']:.2f}, {lines[3]['score']:.2f}" in shown
    before = record.read_bytes()
    ceiling.main()
    assert record.read_bytes() == before
    assert picture.stat().st_size > 5000


def test_times_are_of_each_network(
    tasks: ModuleType, ceiling: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setitem(tasks.TASKS, "mosaic", tasks.TASKS["mosaic"]._replace(batch=2))
    words = ["ceiling.py", "--root", ".", "--tasks", "mosaic", "--only", "none", "averaged", "--times"]
    monkeypatch.setattr(sys, "argv", words)
    ceiling.main()
    rows = [row.split("|") for row in capsys.readouterr().out.splitlines()]
    assert [row[1].strip() for row in rows] == ["mosaic", "---", "`none`", "`averaged`"]
    assert all(float(row[2]) > 0 for row in rows[2:])
    assert rows[2][3].strip() == "1.00"
