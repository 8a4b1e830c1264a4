"""The power of runs: simulated experiments find the stated difference in four of five, and variances are counted."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
EXPERIMENTS = 4000


@pytest.fixture
def power(benchmarks_on_path: None) -> ModuleType:
    return __import__("power")


@pytest.mark.parametrize(("deviation", "apart", "images", "seeds"), [(0.015, 0.0, 5000, 3), (0.004, 0.2, 600, 5)])
def test_four_of_five_experiments_find_the_smallest_difference(
    power: ModuleType, deviation: float, apart: float, images: int, seeds: int
) -> None:
    spread = power.Spread(deviation**2, apart)
    difference = power.smallest_difference(spread, images, seeds)
    drawn = np.random.default_rng(0)
    # Of each image how much more often one network has it right: apart/2 of them always, as many never.
    by_image = drawn.multinomial(images, [apart / 2, apart / 2, 1 - apart], EXPERIMENTS) @ [1, -1, 0] / images
    by_seed = drawn.normal(0, deviation, (EXPERIMENTS, 2, seeds)).mean(2) @ [1, -1]
    error = math.sqrt(2 * deviation**2 / seeds + apart / images)
    found = np.mean(np.abs(difference + by_image + by_seed) > 1.96 * error)
    # Three standard deviations of a share of 4,000.
    assert abs(found - 0.8) < 3 * math.sqrt(0.8 * 0.2 / EXPERIMENTS) + 0.002


def test_the_seeds_that_are_needed_show_the_difference_and_one_less_does_not(power: ModuleType) -> None:
    spread = power.Spread(0.015**2, 0.02)
    seeds = power.seeds_needed(spread, 5000, 0.01)
    assert power.smallest_difference(spread, 5000, seeds) <= 0.01 < power.smallest_difference(spread, 5000, seeds - 1)
    assert power.seeds_needed(power.Spread(0.015**2, 0.2), 600, 0.008) is None


def test_variances_are_counted_where_the_images_are_kept(power: ModuleType) -> None:
    # Of 8 images. Two runs that differ in k of them, in as many to either side, have a variance of k/8 · 100².
    a, b = ("f0", "e1"), ("0f", "1e")
    networks = [[{"right": right, "images": 8} for right in each] for each in (a, b)]
    assert power.sample_variances(networks) == pytest.approx((100**2 * (8 + 6 + 6 + 8) / 4 / 8, 100**2 * 2 / 8))
    assert power.sample_variances(networks[:1]) is None


def test_variances_are_counted_of_the_scores_of_samples(power: ModuleType) -> None:
    drawn = np.random.default_rng(0)
    difficulty, change = 9 * drawn.normal(size=500), 2 * drawn.normal(size=500)
    seeds = [0.5 * drawn.normal(size=500) for _ in range(4)]
    scores = [[difficulty + seeds[0], difficulty + seeds[1]], [difficulty + change + seed for seed in seeds[2:]]]
    networks = [[{"samples": power.encode(each)} for each in network] for network in scores]
    d, e = power.sample_variances(networks)
    assert d == pytest.approx(np.mean([(x - y).var() for x in scores[0] for y in scores[1]]), rel=0.01)
    # What is added to all samples alike is not of the samples; a variance of 500 has a deviation of 6 %.
    assert d - e == pytest.approx(4, rel=4 * (2 / 500) ** 0.5)
    assert e == pytest.approx(0.5, rel=4 * (2 / 500) ** 0.5)


def test_other_steps_and_rates_are_no_other_seeds(power: ModuleType) -> None:
    line = {"network": "none", "rate": 0.1, "steps": 800, "score": 70.0}
    changes = [{}, {}, {"steps": 300}, {"rate": 0.2}]
    assert power.group([line | change for change in changes]) == {"": [[line, line]]}


@pytest.mark.long
def test_a_row_for_each_record_and_task(tmp_path: Path, power: ModuleType) -> None:
    record, tasks = tmp_path / "runs.jsonl", tmp_path / "tasks.jsonl"
    runs = [("plain", 0.70), ("plain", 0.72), ("attention", 0.71), ("attention", 0.73), ("once", 0.1)]
    lines = [{"network": network, "seed": seed, "accuracies": [0.5, mean]} for seed, (network, mean) in enumerate(runs)]
    record.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    scores = {"colour": [20.0, 20.2], "mosaic": [50.0, 52.0]}
    each = [(task, value, np.full(4, value)) for task, values in scores.items() for value in values]
    lines = [
        {"task": task, "network": "none", "rate": power.TASKS[task].rate, "score": value, "samples": power.encode(all_)}
        for task, value, all_ in each
    ]
    tasks.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    command = [sys.executable, str(BENCHMARKS / "power.py"), f"{record}:5000", str(tasks)]
    rows = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[2:]
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    assert [each[:4] for each in cells] == [
        ["runs, points", "5,000", "2, 4", "1.41"],
        ["colour, dB", "4", "1, 2", "0.14"],
        ["mosaic, points", "4", "1, 2", "1.41"],
    ]
    # Of one network nothing is known of what samples add to a difference.
    assert [each[4:] for each in cells[1:]] == [["–"] * 5] * 2
    assert cells[0][4].startswith("at most ")
    assert (
        cells[0][5]
        == f"{(1.96 + 0.8416) * (2 * 2) ** 0.5:.2f} to {(1.96 + 0.8416) * (4 + 2 * 71.5 * 28.5 / 5000) ** 0.5:.2f}"
    )
    refused = subprocess.run([*command[:2], str(record)], capture_output=True, text=True)
    assert refused.returncode == 1
    assert "fix: " in refused.stderr
