"""Run drawn networks in tiles and count those that differ from the untiled network, and those that are refused.

    python benchmarks/drawn_networks.py --count 2000
    python benchmarks/drawn_networks.py --count 2000 --values normal skewed bytes --stored memory disk

The second runs every network six times, and prints a line for each kind of numbers in the volume and each place where
values are stored between passes. By default the seed chooses both. One thread; each combination takes minutes.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections import Counter
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from helpers.drawn_networks import KINDS, STORED, VALUES, compare, draw_network


def main() -> None:
    """Run the networks and print what differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--each", action="store_true", help="one kind at a time, in place of several")
    parser.add_argument("--values", nargs="+", choices=VALUES, default=[None], help="numbers of the volume")
    parser.add_argument("--stored", nargs="+", choices=STORED, default=[None], help="where values are stored")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    seeds = range(arguments.first, arguments.first + arguments.count)
    print(f"{len(KINDS)} kinds of layers", flush=True)
    for values, stored in itertools.product(arguments.values, arguments.stored):
        run(seeds, values, stored, arguments.each)


def run(seeds: range, values: str | None, stored: str | None, each: bool) -> None:
    """Run the networks of these seeds, and print each that is not right, why networks were refused, and a summary."""
    results, reasons, started, seen = Counter(), Counter(), time.process_time(), set[str]()
    for seed in seeds:
        kinds = [sorted(KINDS)[seed % len(KINDS)]] if each else None
        outcome, chosen = compare(seed, kinds, values=values, stored=stored), draw_network(seed, kinds)[2]
        results[outcome.result] += 1
        seen.update(chosen)
        if outcome.result != "right":
            print(f"{seed} {outcome.result}: {', '.join(chosen)}: {outcome.reason}", flush=True)
        if outcome.result == "refused":
            reasons[outcome.reason] += 1
    for reason, count in reasons.most_common():
        print(f"{count} times refused: {reason}")
    name = f"values {values or 'by seed'}, stored {stored or 'by seed'}"
    counts = ", ".join(f"{count} {result}" for result, count in results.most_common())
    print(f"{name}: {counts}; {len(seen)} kinds; {time.process_time() - started:.0f} CPU seconds", flush=True)


if __name__ == "__main__":
    main()
