"""Train drawn networks in tiles, and count those whose loss, gradients or buffers are not the untiled network's.

    python benchmarks/drawn_training.py --count 1000
    python benchmarks/drawn_training.py --first 500 --count 500 --record benchmarks/records/drawn_training.jsonl

Each seed draws a network of up to four of 92 kinds of layers, a volume, a tile, and one of five losses, which is
recorded with the network at even seeds. In float64 a network is *right* up to 1e-10 of the largest number of each
gradient; *refused* with the reason; *torch's own* where the loss changes as the gradients in tiles say and not as those
of the untiled network do; *cancelled* where last bits of parameters, the volume or what layers return move the untiled
gradients as far; or *wrong*. In float32 the gradients in tiles are right up to twice as far from float64 as the untiled
ones. The script ends with status 1 where any network is wrong. One thread; a thousand take about five minutes.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from collections import Counter, defaultdict
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from helpers.drawn_networks import draw_network
from helpers.drawn_training import compare_training


def main() -> None:
    """Train the networks and print what is not right."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--record", type=Path, help="file to which the counts are added, as a line of JSON")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # of padding, and of roots at 0
    seeds: dict[str, dict[str, list[int]]] = {"float64": defaultdict(list), "float32": defaultdict(list)}
    started = time.process_time()
    for seed in range(arguments.first, arguments.first + arguments.count):
        outcome = compare_training(seed)
        for dtype, result in zip(seeds, outcome[:2], strict=True):
            seeds[dtype][result].append(seed)
        if {*outcome[:2]} != {"right"}:
            kinds = ", ".join(draw_network(seed)[2])
            print(f"{seed} {outcome.result}, float32 {outcome.single}: {kinds}: {outcome.reason}", flush=True)
    for dtype, each in seeds.items():
        counts = Counter({result: len(own) for result, own in each.items()})
        print(f"{dtype}: {', '.join(f'{count} {result}' for result, count in counts.most_common())}")
        print(f"{dtype}, wrong: {each['wrong'] or 'none'}")
    print(f"{time.process_time() - started:.0f} CPU seconds")
    if arguments.record:
        others = {dtype: {name: own for name, own in each.items() if name != "right"} for dtype, each in seeds.items()}
        row = {"first": arguments.first, "count": arguments.count, "torch": torch.__version__.partition("+")[0]} | {
            dtype: {"right": len(seeds[dtype]["right"])} | own for dtype, own in others.items()
        }
        with arguments.record.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
    if seeds["float64"]["wrong"] or seeds["float32"]["wrong"]:
        sys.exit(1)


if __name__ == "__main__":
    main()
