"""The power of runs: simulated experiments find the stated difference in four of five, and shares are counted."""

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


def test_shares_are_counted_where_the_images_are_kept(power: ModuleType) -> None:
    runs = [("a", "f0"), ("a", "e1"), ("b", "0f"), ("b", "1e")]
    lines = [{"network": network, "right": right, "images": 8} for network, right in runs]
    assert power.image_shares(lines) == ((8 + 6 + 6 + 8) / 4 / 8, 2 / 8)
    assert power.image_shares(lines[:2]) is None


def test_a_row_for_each_record(tmp_path: Path) -> None:
    record = tmp_path / "runs.jsonl"
    runs = [("plain", 0.70), ("plain", 0.72), ("attention", 0.71), ("attention", 0.73)]
    lines = [{"network": network, "seed": seed, "accuracies": [0.5, mean]} for seed, (network, mean) in enumerate(runs)]
    record.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    command = [sys.executable, str(BENCHMARKS / "power.py"), f"{record}:5000"]
    row = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1]
    assert [cell.strip() for cell in row.strip("|").split("|")][:4] == ["runs", "5,000", "2, 4", "1.4"]
