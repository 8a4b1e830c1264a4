"""What could the runs in a record have seen? The smallest difference of two networks that seeds and samples can show.

    python benchmarks/power.py benchmarks/records/cifar10.jsonl:5000 benchmarks/records/ceiling.jsonl
    python benchmarks/power.py benchmarks/records/recall.jsonl:2048 --only pairs=8 "size=[8, 8]"

A record has lines of JSON with a network, a seed and a score, in points (a hundredth of an accuracy) or in dB; each
"task" in it is a row. Two networks are compared by the difference of their mean scores over s seeds each, on the same n
samples. Were the training and the samples drawn again, its variance would be

    2 σ² / s  +  (d − e) / n

with σ² the variance of a network over its seeds, pooled over all networks with several; d the variance over samples of
the difference of two networks, and e that for two seeds of one network, which σ² counts already. A two-sided test at
5 % finds a difference of 1.96 + 0.84 of these deviations in four of five experiments, where σ is known that well.

Where lines keep the score of each sample, or which images were right, d and e are counted. Without, the second term
lies between 0 and 2 p (1 − p) / n, as if the errors of networks of accuracy p had nothing in common. The number of
samples stands after a colon where lines do not keep their scores. Networks with one seed count for nothing.
"""

from __future__ import annotations

import argparse
import base64
import itertools
import json
import math
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from ceiling_tasks import TASKS

LEVEL, POWER = 0.05, 0.8
# A difference to look for. Points of ImageNet: KANet 72.9 %, without attention 72.1 % (KAN Table 5).
WANTED = {"points": 0.8, "dB": 0.05}
Lines = Sequence[dict[str, Any]]


class Spread(NamedTuple):
    """What differences of networks are measured against, in squares of points or dB."""

    seeds: float  # variance of a network's score over its seeds
    samples: float  # d − e, times 1/n the variance by the samples


def smallest_difference(spread: Spread, samples: int, seeds: int) -> float:
    """Return the smallest difference of scores that so many samples and seeds of each network can show."""
    normal = statistics.NormalDist()
    deviations = normal.inv_cdf(1 - LEVEL / 2) + normal.inv_cdf(POWER)
    return deviations * math.sqrt(2 * spread.seeds / seeds + spread.samples / samples)


def seeds_needed(spread: Spread, samples: int, difference: float) -> int | None:
    """Return how many seeds show a difference; None if so few samples cannot."""
    unit = smallest_difference(Spread(0.0, spread.samples), samples, 1)
    if unit >= difference:
        return None
    return math.ceil(smallest_difference(Spread(spread.seeds, 0.0), samples, 1) ** 2 / (difference**2 - unit**2))


def pooled_variance(networks: Sequence[Lines]) -> float:
    """Return the variance over seeds, pooled over the networks."""
    freedom = sum(len(lines) - 1 for lines in networks)
    return sum(statistics.variance(map(score, lines)) * (len(lines) - 1) for lines in networks) / freedom


def sample_variances(networks: Sequence[Lines]) -> tuple[float, float] | None:
    """Return the mean of d, over pairs of networks, and of e, over pairs of seeds; None if samples are not kept."""
    kept = [(place, each) for place, lines in enumerate(networks) for each in map(samples, lines) if each is not None]
    apart: dict[bool, list[float]] = {False: [], True: []}
    for (place, one), (other_place, other) in itertools.combinations(kept, 2):
        apart[place == other_place].append(float((one - other).var()))
    if not apart[False] or not apart[True]:
        return None
    return statistics.mean(apart[False]), statistics.mean(apart[True])


def samples(line: Mapping[str, Any]) -> np.ndarray | None:
    """Return the score of each sample, in points or dB, if the line has them."""
    if "right" in line:
        return 100.0 * np.array(list(f"{int(line['right'], 16):0{line['images']}b}"), float)
    return decode(line["samples"]) if "samples" in line else None


def encode(scores: np.ndarray) -> str:
    """Return numbers in half precision, in base 64."""
    return base64.b64encode(scores.astype("<f2").tobytes()).decode()


def decode(text: str) -> np.ndarray:
    """Read what `encode` has returned."""
    return np.frombuffer(base64.b64decode(text), "<f2").astype(np.float64)


def score(line: Mapping[str, Any]) -> float:
    """Return a network's score in points or dB: of several, that after the last epoch."""
    if "score" in line:
        return float(line["score"])
    value = next(line[key] for key in ("accuracies", "held", "accuracy") if key in line)
    return 100 * float(value[-1] if isinstance(value, list) else value)


def group(lines: Lines) -> dict[str, list[list[dict[str, Any]]]]:
    """Return the runs of each task and network, or of what else a record compares, where there are several seeds."""
    tasks: dict[str, dict[tuple[Any, ...], list[dict[str, Any]]]] = {}
    for line in lines:
        if line.get("task") in TASKS and line["rate"] != TASKS[line["task"]].rate:
            continue  # tried, and not taken
        name = next(line[key] for key in ("network", "variant", "operator") if key in line)
        kind = name, line.get("rate"), line.get("steps")
        tasks.setdefault(line.get("task", ""), {}).setdefault(kind, []).append(line)
    found = {task: [each for each in networks.values() if len(each) > 1] for task, networks in tasks.items()}
    return {task: networks for task, networks in found.items() if networks}


def bound(lines: Lines) -> float:
    """Return the largest d − e of points where samples are not kept: their errors have nothing in common."""
    mean = statistics.mean(map(score, lines))
    return 2 * mean * (100 - mean)


def describe(name: str, networks: Sequence[Lines], number: int) -> Iterable[str]:
    """Return the cells of a row."""
    lines = [line for each in networks for line in each]
    unit = TASKS[name].unit if name in TASKS else "points"
    kept = any(samples(line) is not None for line in lines)
    variances = sample_variances(networks)
    seeds = pooled_variance(networks)
    yield from (f"{name}, {unit}", f"{number:,}", f"{len(networks)}, {len(lines)}", f"{seeds**0.5:.2f}")
    if kept and variances is None:  # of one network alone
        yield from ("–",) * 5
        return
    ranges = (0.0, bound(lines)) if variances is None else (max(0.0, variances[0] - variances[1]),)
    yield f"at most {ranges[1] ** 0.5:.0f}" if variances is None else " and ".join(f"{x**0.5:.1f}" for x in variances)
    spreads = [Spread(seeds, each) for each in ranges]
    for some in (1, 3, 10):
        yield " to ".join(f"{smallest_difference(each, number, some):.2f}" for each in spreads)
    needed = [seeds_needed(each, number, WANTED[unit]) for each in spreads]
    yield " to ".join("never" if each is None else f"{each:,}" for each in needed)


def read_lines(file: Path) -> list[dict[str, Any]]:
    """Read the lines of a record, if there is one; an incomplete last line is skipped."""
    lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def read(file: Path, wanted: Sequence[str], images: str) -> list[dict[str, Any]]:
    """Read the lines of a record that have the wanted values."""
    lines = read_lines(file)
    pairs = [each.partition("=") for each in wanted]
    lines = [line for line in lines if all(str(line.get(key)) == value for key, _, value in pairs)]
    return [line | {"images": int(images)} for line in lines] if images else lines


def main() -> None:
    """Print a table with a row for each record, or for each task of a record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("records", nargs="+", metavar="FILE[:SAMPLES]", help="a record and its number of samples")
    parser.add_argument("--only", nargs="+", metavar="KEY=VALUE", default=[], help="lines with these values alone")
    options = parser.parse_args()
    wanted = " or ".join(f"{each} {unit}" for unit, each in WANTED.items())
    print(
        "| record | samples | networks, runs | σ of seeds | a sample, of two networks and of two seeds "
        f"| 1 seed sees | 3 seeds | 10 seeds | seeds for {wanted} |\n|---|---|---|---|---|---|---|---|---|"
    )
    for record in options.records:
        file, images = re.fullmatch(r"(.*?)(?::(\d+))?", record).groups()
        tasks = group(read(Path(file), options.only, images))
        if not tasks:
            raise SystemExit(f"power: no network of {file} has two seeds; fix: run another seed.")
        for task, networks in tasks.items():
            kept = "samples" in networks[0][0]
            if kept is bool(images):
                fix = f"{file}, which keeps its samples" if kept else f"{file}:NUMBER, with the number of samples"
                raise SystemExit(f"power: {record} does not say how many samples there are; fix: {fix}.")
            number = len(samples(networks[0][0])) if kept else int(images)
            print(f"| {' | '.join(describe(task or Path(file).stem, networks, number))} |")


if __name__ == "__main__":
    main()
