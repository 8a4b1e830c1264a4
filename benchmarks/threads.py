"""Wall time of a network untiled and in tiles, on 1 and 2 cores, quiet and with a busy process a core.

    python benchmarks/threads.py
    python benchmarks/threads.py --network UNet --length 64 --tile 32 --rounds 1 --json threads.json

Each way of running is compared with the untiled network before it is timed, and tiles with each other byte for byte.
Ways run in turns; a time is the median of the rounds. Tiles run by a plan that is made before: a run binds it, and
checks a region. By default as many run at once as there are cores. Cores are chosen by `taskset`, in a process of their
own.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from monai.networks.nets import BasicUNet, UNet
from torch import Tensor, nn

from farfield.streaming import Tiles, plan_whole, predict_whole

NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "UNet": lambda: UNet(3, 1, 2, (16, 32, 64), (2, 2), norm="instance"),
    "BasicUNet": lambda: BasicUNet(3, 1, 2),
}
BUSY = "while True: pass"


def ways(network: nn.Module, volume: Tensor, tile: int) -> dict[str, Callable[[], Tensor]]:
    """Return the ways to run a network on a volume, by name."""

    def in_tiles(workers: int | None) -> Callable[[], Tensor]:
        plan = plan_whole(network, volume.shape, tile=Tiles(tile, disk=0, workers=workers))
        return lambda: predict_whole(network, volume, plan=plan, quiet=True)

    @torch.no_grad()
    def untiled() -> Tensor:
        return network(volume[None])[0]

    return {"untiled": untiled, "one at a time": in_tiles(1), "by default": in_tiles(None)}


def check(results: dict[str, Tensor]) -> float:
    """Return how far tiles are from the untiled network, relative to its largest number; refuse wrong ones."""
    whole, one, two = results.values()
    off = ((one - whole).abs().max() / whole.abs().max()).item()
    digests = {hashlib.sha256(each.numpy().tobytes()).hexdigest() for each in (one, two)}
    if off > 1e-4 or len(digests) > 1:
        raise SystemExit(f"wrong: tiles are off by {off:.1e}, with {len(digests)} different results")
    return off


def measure(name: str, length: int, tile: int, rounds: int) -> dict[str, Any]:
    """Return the median seconds of each way on the cores of this process."""
    torch.manual_seed(0)
    network, volume = NETWORKS[name]().eval(), torch.rand(1, *(length,) * 3)
    functions, seconds = ways(network, volume, tile), dict[str, list[float]]()
    off = check({way: run() for way, run in functions.items()})
    for _ in range(rounds):
        for way, run in functions.items():
            start = time.perf_counter()
            run()
            seconds.setdefault(way, []).append(time.perf_counter() - start)
    return {"off": off, **{way: statistics.median(each) for way, each in seconds.items()}}


def measure_on(cores: list[int], busy: bool, arguments: list[str]) -> dict[str, Any]:
    """Measure in a process of its own on some cores, with a busy process on each or without."""
    listed = ",".join(map(str, cores))
    burning = [subprocess.Popen(["taskset", "-c", str(core), sys.executable, "-c", BUSY]) for core in cores if busy]
    try:
        environment = os.environ | {"OMP_NUM_THREADS": str(len(cores))}
        command = ["taskset", "-c", listed, sys.executable, __file__, "--here", *arguments]
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    finally:
        for process in burning:
            process.kill()
            process.wait()
    return json.loads(done.stdout)


def main() -> None:
    """Print the table, as Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", choices=NETWORKS, action="append", help="all by default")
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--tile", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cores", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the numbers to this file")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    names = given.network or list(NETWORKS)
    if given.here:
        warnings.simplefilter("ignore")
        print(json.dumps(measure(names[0], given.length, given.tile, given.rounds)))
        return
    rows, available = [], sorted(os.sched_getaffinity(0))
    for name in names:
        for cores in given.cores:
            for busy in (False, True):
                numbers = [("--length", given.length), ("--tile", given.tile), ("--rounds", given.rounds)]
                arguments = ["--network", name, *(str(part) for pair in numbers for part in pair)]
                found = measure_on(available[:cores], busy, arguments)
                rows.append({"network": name, "cores": cores, "around": "busy" if busy else "quiet", **found})
    times = ("untiled", "one at a time", "by default")
    heads = ["network", "cores", "around", *(f"{way}, s" for way in times), *(f"{way} ÷ untiled" for way in times[1:])]
    print(f"{given.length}³ positions, tiles of {given.tile}³\n")
    print(f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}")
    for row in rows:
        numbers = [row[way] for way in times] + [row[way] / row["untiled"] for way in times[1:]]
        first = f"{row['network']} | {row['cores']} | {row['around']}"
        print(f"| {first} | {' | '.join(f'{number:.2f}' for number in numbers)} |")
    if given.json:
        given.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
