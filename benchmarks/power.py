"""What could the runs in a record have seen? The smallest difference of two networks that seeds and images can show.

    python benchmarks/power.py benchmarks/records/cifar10.jsonl:5000 benchmarks/records/imagenette.jsonl:600

A record has lines of JSON with a network, a seed and an accuracy; after the colon stands the number of images. Two
networks are compared by the difference of their mean accuracies over s seeds each, on the same n images. Were the
training and the images drawn again, its variance would be

    2 σ² / s  +  (d − e) / n

with σ² the variance of a network over its seeds, pooled over all networks of the record; d the share of images that one
of the two has right and the other wrong, and e that share for two seeds of one network, which σ² counts already. A
two-sided test at 5 % finds a difference of 1.96 + 0.84 of these deviations in four of five experiments.

Where lines keep which images were right (`benchmarks/train_compact.py` does), d and e are counted; without, the second
term lies between 0 and 2 p (1 − p) / n, as if the errors of networks of accuracy p had nothing in common.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

LEVEL, POWER = 0.05, 0.8
# Of ImageNet: KANet 72.9 %, without attention 72.1 % (KAN Table 5).
PAPERS = 0.008
Lines = Sequence[dict[str, Any]]


class Spread(NamedTuple):
    """What differences of networks are measured against: shares of 1."""

    seeds: float  # variance of a network's accuracy over its seeds
    images: float  # d − e, times 1/n the variance by the images


def smallest_difference(spread: Spread, images: int, seeds: int) -> float:
    """Return the smallest difference of accuracies that so many images and seeds of each network can show."""
    normal = statistics.NormalDist()
    deviations = normal.inv_cdf(1 - LEVEL / 2) + normal.inv_cdf(POWER)
    return deviations * math.sqrt(2 * spread.seeds / seeds + spread.images / images)


def seeds_needed(spread: Spread, images: int, difference: float) -> int | None:
    """Return how many seeds show a difference; None if so few images cannot."""
    unit = smallest_difference(Spread(0.0, spread.images), images, 1)
    if unit >= difference:
        return None
    return math.ceil(smallest_difference(Spread(spread.seeds, 0.0), images, 1) ** 2 / (difference**2 - unit**2))


def pooled_variance(lines: Lines, score: str) -> float:
    """Return the variance over seeds, pooled over the networks with several."""
    networks = [[number(line[score]) for line in each] for each in by_network(lines).values() if len(each) > 1]
    if not networks:
        raise SystemExit("power: no network has two seeds; fix: run another seed.")
    freedom = sum(len(each) - 1 for each in networks)
    return sum(statistics.variance(each) * (len(each) - 1) for each in networks) / freedom


def image_shares(lines: Lines) -> tuple[float, float] | None:
    """Return the mean of d, over pairs of networks, and of e, over pairs of seeds; None if images are not kept."""
    kept = [line for line in lines if "right" in line]
    pairs = list(itertools.combinations(kept, 2))
    apart = {same: [differ(a, b) for a, b in pairs if (a["network"] == b["network"]) is same] for same in (False, True)}
    if not apart[False] or not apart[True]:
        return None
    return statistics.mean(apart[False]), statistics.mean(apart[True])


def differ(one: Mapping[str, Any], other: Mapping[str, Any]) -> float:
    """Return the share of images that one run has right and the other wrong."""
    return (int(one["right"], 16) ^ int(other["right"], 16)).bit_count() / one["images"]


def by_network(lines: Lines) -> dict[str, list[dict[str, Any]]]:
    """Group lines by network, or by what else a record compares."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for line in lines:
        groups.setdefault(line.get("network") or line["variant"], []).append(line)
    return groups


def number(value: Any) -> float:
    """Return a score, or the last of those after each epoch."""
    return float(value[-1] if isinstance(value, list) else value)


def describe(name: str, lines: Lines, images: int) -> Iterable[str]:
    """Return the cells of a record's row."""
    score = next(key for key in ("accuracies", "held", "accuracy") if key in lines[0])
    mean = statistics.mean(number(line[score]) for line in lines)
    shares = image_shares([line | {"images": images} for line in lines])
    most = 2 * mean * (1 - mean)
    ranges = (0.0, most) if shares is None else (max(0.0, shares[0] - shares[1]),)
    spreads = [Spread(pooled_variance(lines, score), each) for each in ranges]
    networks = by_network(lines)
    yield from (name, f"{images:,}", f"{len(networks)}, {len(lines)}", f"{100 * spreads[0].seeds ** 0.5:.1f}")
    yield f"at most {100 * most:.0f}" if shares is None else " and ".join(f"{100 * each:.1f}" for each in shares)
    for seeds in (1, 3, 10):
        yield " to ".join(f"{100 * smallest_difference(each, images, seeds):.1f}" for each in spreads)
    needed = [seeds_needed(each, images, PAPERS) for each in spreads]
    yield " to ".join("never" if each is None else f"{each:,}" for each in needed)


def main() -> None:
    """Print a table with a row for each record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("records", nargs="+", metavar="FILE:IMAGES", help="a record and its number of images")
    parser.add_argument("--only", nargs="+", metavar="KEY=VALUE", default=[], help="lines with these values alone")
    options = parser.parse_args()
    wanted = [each.partition("=") for each in options.only]
    print(
        "| record | images | networks, runs | σ, points | d and e, % | 1 seed sees, points | 3 seeds | 10 seeds "
        f"| seeds for {100 * PAPERS:.1f} points |\n|---|---|---|---|---|---|---|---|---|"
    )
    for record in options.records:
        file, _, images = record.rpartition(":")
        lines = [json.loads(line) for line in Path(file).read_text(encoding="utf-8").splitlines()]
        lines = [line for line in lines if all(str(line.get(key)) == value for key, _, value in wanted)]
        print(f"| {' | '.join(describe(Path(file).stem, lines, int(images)))} |")


if __name__ == "__main__":
    main()
