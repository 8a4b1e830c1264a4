"""Run drawn networks in tiles and count those that differ from the untiled network, and those that are refused.

    python benchmarks/drawn_networks.py --count 2000
    python benchmarks/drawn_networks.py --count 2000 --values normal skewed bytes --stored memory disk
    python benchmarks/drawn_networks.py --count 3000 --predictions

The second runs every network six times, and prints a line for each kind of numbers in the volume and each place where
values are stored between passes. By default the seed chooses both. The third calls `predict_whole`, in float64, on
networks that mix samples, read some channels, or depend on places, on whole, long or complex numbers. One thread; each
combination takes minutes.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from helpers.drawn_networks import KINDS, STORED, VALUES, Outcome, compare, draw_network
from helpers.drawn_predictions import compare_prediction, draw_prediction


def main() -> None:
    """Run the networks and print what differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--each", action="store_true", help="one kind at a time, in place of several")
    parser.add_argument("--values", nargs="+", choices=VALUES, default=[None], help="numbers of the volume")
    parser.add_argument("--stored", nargs="+", choices=STORED, default=[None], help="where values are stored")
    parser.add_argument("--predictions", action="store_true", help="predict_whole, on what breaks assumptions of tiles")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    seeds = range(arguments.first, arguments.first + arguments.count)
    if arguments.predictions:
        report("predictions", ((seed, compare_prediction(seed), draw_prediction(seed)[2]) for seed in seeds))
        return
    print(f"{len(KINDS)} kinds of layers", flush=True)
    for values, stored in itertools.product(arguments.values, arguments.stored):
        run(seeds, values, stored, arguments.each)


def run(seeds: range, values: str | None, stored: str | None, each: bool) -> None:
    """Run the networks of these seeds, and print a summary."""
    drawn = ((seed, [sorted(KINDS)[seed % len(KINDS)]] if each else None) for seed in seeds)
    runs = ((seed, compare(seed, own, values=values, stored=stored), draw_network(seed, own)[2]) for seed, own in drawn)
    report(f"values {values or 'by seed'}, stored {stored or 'by seed'}", runs)


def report(name: str, runs: Iterable[tuple[int, Outcome, list[str]]]) -> None:
    """Print each network that is not right, why networks were refused, and a summary."""
    results, reasons, started, seen = Counter(), Counter(), time.process_time(), set[str]()
    for seed, outcome, chosen in runs:
        results[outcome.result] += 1
        seen.update(chosen)
        if outcome.result != "right":
            print(f"{seed} {outcome.result}: {', '.join(chosen)}: {outcome.reason}", flush=True)
        if outcome.result == "refused":
            reasons[outcome.reason] += 1
    for reason, count in reasons.most_common():
        print(f"{count} times refused: {reason}")
    counts = ", ".join(f"{count} {result}" for result, count in results.most_common())
    print(f"{name}: {counts}; {len(seen)} kinds; {time.process_time() - started:.0f} CPU seconds", flush=True)


if __name__ == "__main__":
    main()
