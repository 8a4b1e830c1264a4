"""Recall on grids: its samples are as documented, runs are not repeated, tables and pictures show them."""

from __future__ import annotations

import importlib.util
import itertools
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Generator, Tensor, nn

from farfield.ops import OPERATORS

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
# Size, and pairs: two for which there are 8 keys, a full grid, an odd side, one and three spatial dims.
TASKS = [((8, 8), 2), ((8, 8), 4), ((8, 8), 16), ((5, 7), 7), ((40,), 5), ((8, 8, 8), 16), ((3, 4, 5), 12)]


@pytest.fixture(autouse=True)
def few_samples(monkeypatch: pytest.MonkeyPatch, benchmarks_on_path: None) -> None:
    """Train and test on few samples."""
    monkeypatch.setattr(module("recall_task"), "BATCH", 4)
    monkeypatch.setattr(module("recall_task"), "TESTED", 16)


def module(name: str) -> ModuleType:
    return __import__(name)


def draw(size: tuple[int, ...], pairs: int, count: int = 50, seed: int = 1) -> tuple[Any, Any]:
    task = module("recall_task").Task(size, pairs)
    return task, module("recall_task").draw_samples(task, count, Generator().manual_seed(seed))


# ---- samples ---------------------------------------------------------------------------------------------------------
def read_sample(task: Any, grid: Tensor) -> tuple[dict[int, int], dict[int, int]]:
    """Of one sample, by a walk over its places: key -> value, and key -> flat index of its question mark."""
    given: dict[int, int] = {}
    queried: dict[int, int] = {}
    rows = grid.reshape(-1, task.size[-1]).tolist()
    for index, row in enumerate(rows):
        for column in range(0, len(row) - 1, 2):
            left, right = row[column : column + 2]
            assert (left == 0) == (right == 0)
            if left == 0:
                continue
            assert 1 <= left <= task.keys < right < task.symbols
            if right == task.symbols - 1:
                assert left not in queried
                queried[left] = index * len(row) + column + 1
            else:
                assert left not in given
                given[left] = right - task.keys - 1
        assert len(row) % 2 == 0 or row[-1] == 0
    return given, queried


@pytest.mark.parametrize(("size", "pairs"), TASKS)
def test_every_question_has_its_keys_value(size: tuple[int, ...], pairs: int) -> None:
    task, samples = draw(size, pairs)
    assert samples.grid.shape == (50, *size)
    assert task.symbols == 2 + task.keys + 4
    assert task.keys == (8 if pairs <= 4 else 2 * pairs)
    for grid, marks, values in zip(*samples, strict=True):
        given, queried = read_sample(task, grid)
        assert len(given) == len(queried) == len(set(marks.tolist())) == pairs
        by_place = dict(zip(marks.tolist(), values.tolist(), strict=True))
        assert {place: given[key] for key, place in queried.items()} == by_place


def test_samples_vary_and_repeat_with_their_seed() -> None:
    samples = draw((8, 8), 4, count=4000)[1]
    for same, drawn in zip(draw((8, 8), 4, count=4000)[1], samples, strict=True):
        assert torch.equal(same, drawn)
    assert not torch.equal(draw((8, 8), 4, count=4000, seed=2)[1].grid, samples.grid)
    # Each value, key and place as often as another: 6 standard deviations of a count.
    marks = torch.bincount(samples.marks.flatten(), minlength=64).view(8, 8)
    assert not marks[:, ::2].any()
    symbols = torch.bincount(samples.grid.flatten())
    for counts, share in ((samples.values.flatten().bincount(), 1 / 4), (marks[:, 1::2], 1 / 32)):
        assert (counts - 16000 * share).abs().max() < 6 * (16000 * share) ** 0.5
    assert (symbols[1:9] - 4000).abs().max() < 6 * 4000**0.5
    assert symbols[-1] == 16000


class Oracle(nn.Module):
    """Scores by a walk over each sample, or by its most frequent value."""

    def __init__(self, task: Any, counts: bool) -> None:
        super().__init__()
        self.task, self.counts = task, counts

    def forward(self, grid: Tensor) -> Tensor:
        scores = torch.zeros(len(grid), 4, grid[0].numel())
        for sample, row in zip(grid, scores, strict=True):
            given, queried = read_sample(self.task, sample)
            if self.counts:
                row += torch.bincount(torch.tensor(list(given.values())), minlength=4)[:, None]
            else:
                for key, place in queried.items():
                    row[given[key], place] = 1
        return scores.view(len(grid), 4, *self.task.size)


@pytest.mark.parametrize(("size", "pairs"), [((8, 8), 4), ((4, 4, 4), 8)])
def test_recall_is_right_and_counting_is_as_right_as_its_line(
    size: tuple[int, ...], pairs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tasks = module("recall_task")
    monkeypatch.setattr(tasks, "TESTED", 1000)
    task = tasks.Task(size, pairs)
    assert tasks.evaluate(Oracle(task, counts=False), task)[0] == 1
    right, loss = tasks.evaluate(Oracle(task, counts=True), task)
    assert right == pytest.approx(tasks.counted(pairs), abs=4 * (0.25 / 1000) ** 0.5)
    assert loss > 0


def test_the_line_of_counting_is_the_expected_largest_share() -> None:
    counted = module("recall_task").counted
    for pairs in (1, 2, 4):
        every = itertools.product(range(4), repeat=pairs)
        shares = [np.bincount(values).max() / pairs for values in every]
        assert counted(pairs) == pytest.approx(np.mean(shares), abs=0.003)


# ---- networks --------------------------------------------------------------------------------------------------------
def contestants() -> list[str]:
    """All contestants, but one whose package may not be installed."""
    installed = importlib.util.find_spec("nvsubquadratic") is not None
    return [name for name in module("recall_task").CONTESTANTS if installed or name != "HyenaND"]


def test_every_contestant_begins_as_the_same_network() -> None:
    tasks = module("recall_task")
    task, samples = draw((6, 6), 3, count=2)
    assert set(OPERATORS) < set(tasks.CONTESTANTS)
    outputs = []
    for name in contestants():
        torch.manual_seed(3)
        outputs.append(tasks.Network(name, task).eval()(samples.grid))
    assert outputs[0].shape == (2, 4, 6, 6)
    assert all(torch.equal(output, outputs[0]) for output in outputs)


def test_scales_and_projections() -> None:
    make = module("recall_task").make_mixer
    scaled = {name for name in OPERATORS if make(name, 2).scale == 1 / 8}
    assert scaled == {"softmax", "softmax_pooled", "kronecker_kv", "kronecker_qkv", "kronecker_qkv_literal"}
    assert make("softmax, scale 1", 2).scale == 1
    for name in OPERATORS:
        mixer = make(name, 2)
        assert all((mixer.value, mixer.output))
        assert (mixer.key is None) == (name == "siamese_local")
        assert (mixer.query is None) == (name == "flare")
    attention = sum(weight.numel() for weight in make("softmax", 2).parameters())
    for dims, size in ((2, 13), (3, 5)):
        convolution = make("convolution", dims)
        assert convolution.depthwise.kernel_size == (size,) * dims
        assert sum(weight.numel() for weight in convolution.parameters()) < 1.01 * attention


def test_only_question_marks_are_scored() -> None:
    tasks = module("recall_task")
    task, samples = draw((4, 6), 3, count=5)
    net = tasks.Network("none", task).eval()
    scores = net(samples.grid).flatten(2)
    result = tasks.scores_at_marks(net, samples)
    for sample, pair in itertools.product(range(5), range(3)):
        assert torch.equal(result[sample, :, pair], scores[sample, :, samples.marks[sample, pair]])


@pytest.mark.parametrize("size", [(12,), (4, 4), (2, 4, 4)], ids=str)
def test_every_contestant_learns(size: tuple[int, ...]) -> None:
    tasks = module("recall_task")
    task = tasks.Task(size, 2)
    for name in contestants():
        net = tasks.Network(name, task)
        # At the first step only the output has a gradient: it is zero.
        tasks.train(net, task, 1e-2, 2, seed=1)
        for weight, parameter in net.mixer.named_parameters():
            assert parameter.grad.any() or weight.endswith("bias"), (name, weight)


# ---- runs ------------------------------------------------------------------------------------------------------------
def main(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> None:
    monkeypatch.setattr(sys, "argv", ["recall.py", *map(str, arguments)])
    module("recall").main()


def test_a_run_is_a_line_and_is_not_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "recall.jsonl"
    options = ["--out", out, "--only", "siamese", "none", "--size", "4,4", "--pairs", 2, "--rates", 0.01, "--steps", 8]
    main(monkeypatch, *options, "--seeds", 1, "--limit", 1)
    assert "| siamese | " in capsys.readouterr().out
    text = out.read_text()
    line = json.loads(text)
    same = {"operator": "siamese", "size": [4, 4], "pairs": 2, "rate": 0.01, "seed": 1, "steps": 8}
    assert line == line | same
    assert 0 <= line["accuracy"] <= 1 < line["loss"] + 1
    assert set(line["versions"]) == {"farfield", "torch", "python"}
    assert line["seconds"] >= 0
    with out.open("a") as file:
        file.write('{"operator": "non')
    main(monkeypatch, *options, "--seeds", 1, 2)
    lines = [json.loads(each) for each in out.read_text().splitlines()]
    assert json.dumps(lines[0]) + "\n" == text
    assert [(each["operator"], each["seed"]) for each in lines] == [
        *(("siamese", 1), ("none", 1)),
        *(("siamese", 2), ("none", 2)),
    ]
    again = module("recall").run("siamese", module("recall_task").Task((4, 4), 2), 0.01, 1, 8)
    assert again | {"seconds": 0} == line | {"seconds": 0}
    assert lines[2]["loss"] != line["loss"]


def test_what_cannot_be_run_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for options, text in (
        (["--out", tmp_path / "a", "--pairs", 17], "17 pairs: from 1 to 16 fit in a grid of (8, 8)"),
        (["--out", tmp_path / "a", "--size", "8,8,8,8"], "not a size of one to three numbers"),
        ([], "give --out FILE to write runs"),
    ):
        with pytest.raises(SystemExit):
            main(monkeypatch, *options)
        assert text in capsys.readouterr().err
    assert not (tmp_path / "a").exists()


def test_the_loss_of_a_run_that_diverged_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module("recall"), "evaluate", lambda net, task: (0.25, float("nan")))
    line = module("recall").run("none", module("recall_task").Task((4, 4), 2), 0.01, 1, 2)
    assert json.loads(json.dumps(line, allow_nan=False))["loss"] is None


# ---- tables and pictures ---------------------------------------------------------------------------------------------
def line(operator: str, pairs: int, rate: float, seed: int, accuracy: float, **other: Any) -> dict[str, Any]:
    same = {"operator": operator, "size": [8, 8], "pairs": pairs, "rate": rate, "seed": seed, "steps": 1200}
    return same | {"accuracy": accuracy} | other


LINES = [
    *(line("softmax", 4, 0.001, seed, accuracy) for seed, accuracy in ((1, 0.9), (2, 0.99), (3, 1.0))),
    *(line("softmax", 4, 0.003, seed, accuracy) for seed, accuracy in ((1, 0.98), (2, 0.97), (3, 0.99))),
    # Better, but of one seed.
    line("softmax", 4, 0.01, 1, 1.0),
    line("softmax", 8, 0.01, 1, 0.7),
    line("none", 4, 0.001, 1, 0.42),
    line("siamese", 16, 0.001, 1, 0.95, size=[4, 4, 4]),
    line("siamese", 16, 0.001, 1, 0.85, size=[4, 4, 4], steps=5000),
]


def write(folder: Path, **files: list[dict[str, Any]]) -> list[Path]:
    for name, lines in files.items():
        (folder / name).write_text("".join(json.dumps(each) + "\n" for each in lines))
    return [folder / name for name in files]


def test_the_table_has_each_best_rate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # The second file repeats a run of the first.
    main(monkeypatch, "--collect", *write(tmp_path, first=LINES[:5], second=LINES[4:]))
    first, second, third = capsys.readouterr().out.split("steps: ")[1:]
    assert "| | 4 | 8 | pairs held | best rates | seeds |\n" in first
    assert "| softmax | 98.0 (97.0–99.0) | 70.0 | 4 | 0.003, 0.01 | 3, 1 |\n" in first
    assert "| none | 42.0 | - | fewer than 4 | 0.001 | 1 |\n" in first
    assert "| most frequent value | 53.1 | 4" in first
    assert "| chance | 25.0 | 25.0 | | | |\n" in first
    assert "8 × 8, 1,200 steps: right, in %, by pairs" not in second
    assert "| siamese | 95.0 | 16 or more | 0.001 | 1 |" in second
    assert "| siamese | 85.0 | fewer than 16 |" in third


@pytest.mark.parametrize("kind", ["png", "svg"])
def test_the_picture_shows_every_curve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    from PIL import Image

    picture = tmp_path / f"recall.{kind}"
    # Two sizes in LINES have one number of pairs, which is no curve: those are in the table alone.
    lines = [*LINES, line("siamese", 4, 0.001, 1, 0.52)]
    main(monkeypatch, "--collect", *write(tmp_path, lines=lines), "--picture", picture)
    curves, names = module("recall_curves"), module("recall_task").CONTESTANTS
    colours = [curves.COLOURS[names.index(name) % len(curves.COLOURS)] for name in ("softmax", "none", "siamese")]
    if kind == "svg":
        text = picture.read_text()
        assert all(colour.lower() in text.lower() for colour in colours)
        assert all(f"<!-- {label} -->" in text for label in ("softmax", "chance", "most frequent value", "pairs"))
        assert "8 × 8" in text
        assert "4 × 4 × 4" not in text
        return
    pixels = np.asarray(Image.open(picture).convert("RGB")).reshape(-1, 3)
    for colour in colours:
        assert (pixels == [int(colour[start : start + 2], 16) for start in (1, 3, 5)]).all(1).sum() > 100, colour


def test_no_two_contestants_look_the_same() -> None:
    curves, names = module("recall_curves"), module("recall_task").CONTESTANTS
    assert len(names) <= len(curves.COLOURS) * len(curves.LINES)
    assert len(set(names)) == len(names)
