"""Run drawn networks in tiles and count those that differ from the untiled network, and those that are refused.

python benchmarks/drawn_networks.py --count 2000
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from helpers.drawn_networks import KINDS, compare, draw_network


def main() -> None:
    """Run the networks and print what differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--each", action="store_true", help="one kind at a time, in place of several")
    arguments = parser.parse_args()
    results, reasons = Counter(), Counter()
    torch.set_num_threads(1)
    for seed in range(arguments.first, arguments.first + arguments.count):
        kinds = [sorted(KINDS)[seed % len(KINDS)]] if arguments.each else None
        outcome = compare(seed, kinds)
        results[outcome.result] += 1
        if outcome.result != "right":
            chosen = draw_network(seed, kinds)[2]
            print(f"{seed} {outcome.result}: {', '.join(chosen)}: {outcome.reason}", flush=True)
        if outcome.result == "refused":
            reasons[outcome.reason] += 1
    print(f"{len(KINDS)} kinds of layers;", ", ".join(f"{count} {name}" for name, count in results.most_common()))
    for reason, count in reasons.most_common():
        print(f"{count} times refused: {reason}")


if __name__ == "__main__":
    main()
