"""A training step on a whole volume, untiled, with checkpoints and in tiles: CPU seconds, memory, gradients.

    python benchmarks/training_wholes.py --network BasicUNet --length 128 --tile 64
    python benchmarks/training_wholes.py --network BasicUNet --length 256 --tile 64 --ways tiles
    python benchmarks/training_wholes.py --network Unet attention --length 1024 --tile 256
    python benchmarks/training_wholes.py --network BasicUNet --length 128 --tile 64 --limit 1200

Each way runs in a process of its own, which makes one step at a small length first. Seconds are CPU seconds of one
thread, medians of `--repeats` steps; MiB are how much the process's own memory (RssAnon, looked at each 10 ms) grows
at most over that after the small step, the volume and its labels included; pages of files are the system's to take.
*off* is the largest difference of a gradient of a parameter to that of the untiled network, relative to the largest
number of all; where `--ways` begins with `"untiled, float64"`, to that. `checkpoints` recomputes each child of the
network in the backward pass (`torch.utils.checkpoint`); `tiles, files` stores values between passes in files, and
`all in tiles, files` has the loss in tiles too. With `--limit` each process may take so many MiB of data, and a way
that needs more says so.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import recorded
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from farfield import WholeNetwork
from farfield.streaming import Tiles

WAYS = ("untiled", "checkpoints", "tiles", "tiles, files", "all in tiles, files")
PRECISE = "untiled, float64"
MEBIBYTE = 2**20
# Length of the step that a process makes first: twice a stride of 32.
WARM = 64


def make_network(name: str) -> nn.Module:
    """Return a network in training mode, the same each time."""
    torch.manual_seed(0)
    return recorded.NETWORKS[name].make().train()


def add_checkpoints(network: nn.Module) -> nn.Module:
    """Run each child of a network again in the backward pass."""
    for child in network.children():
        child.forward = partial(checkpoint, child.forward, use_reentrant=False)  # type: ignore[method-assign]
    return network


def make_step(way: str, name: str, tile: int, length: int) -> tuple[nn.Module, Callable[[], float]]:
    """Return a network, and a function that computes its gradients and returns the loss."""
    network, row = make_network(name), recorded.NETWORKS[name]
    volume = torch.randn(1, row.channels, *(length,) * row.dims)
    labels = (volume[:, 0] > 0).long()
    disk = Tiles(tile, disk=10**12)
    if way == PRECISE:
        network, volume = network.double(), volume.double()
    run = {
        PRECISE: lambda: network,
        "untiled": lambda: network,
        "checkpoints": lambda: add_checkpoints(network),
        "tiles": lambda: WholeNetwork(network, tile=Tiles(tile, disk=0)),
        "tiles, files": lambda: WholeNetwork(network, tile=disk),
        "all in tiles, files": lambda: WholeNetwork(network, tile=disk, loss=F.cross_entropy),
    }[way]()

    def step() -> float:
        network.zero_grad()
        loss = run(volume, labels) if way == "all in tiles, files" else F.cross_entropy(run(volume), labels)
        loss.backward()
        return loss.item()

    return network, step


def resident(name: str) -> int:
    """Return bytes of memory of this process."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(name))


def measure(way: str, options: argparse.Namespace) -> dict[str, Any]:
    """Return the seconds, the memory and the loss of steps in this process, and save the gradients."""
    torch.set_num_threads(1)
    make_step(way, options.network[0], options.tile, WARM)[1]()
    ctypes.CDLL(None).malloc_trim(0)
    before, seconds = resident("RssAnon"), []
    network, step = make_step(way, options.network[0], options.tile, options.length)
    peak, done = [0], threading.Event()

    def watch() -> None:
        while not done.wait(0.01):
            peak[0] = max(peak[0], resident("RssAnon"))

    threading.Thread(target=watch, daemon=True).start()
    if options.limit:
        resource.setrlimit(resource.RLIMIT_DATA, (resident("VmData") + options.limit * MEBIBYTE,) * 2)
    try:
        for _ in range(options.repeats):
            start = time.process_time()
            loss = step()
            seconds.append(time.process_time() - start)
    except RuntimeError as error:
        if "memory" not in str(error):
            raise
        return {"seconds": None}
    done.set()
    torch.save({name: each.grad for name, each in network.named_parameters()}, options.gradients)
    return {"seconds": statistics.median(seconds), "memory": peak[0] - before, "loss": loss}


def measure_apart(way: str, arguments: list[str], gradients: Path) -> dict[str, Any]:
    """Measure in a process of its own."""
    command = [sys.executable, __file__, *arguments, "--ways", way, "--gradients", str(gradients)]
    return json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines()[-1])


def compare(own: Path, other: Path) -> float:
    """Return how far gradients are apart, relative to the largest number of the second."""
    got, want = (torch.load(each, weights_only=True) for each in (own, other))
    # Of all of them: those of biases before norms are rounding alone.
    largest = max(float(each.abs().max()) for each in want.values())
    return max(float((got[name] - each).abs().max()) for name, each in want.items()) / largest


def main() -> None:
    """Print the table, as Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", choices=recorded.NETWORKS, nargs="+", default=["BasicUNet"])
    parser.add_argument("--length", type=int, default=96)
    parser.add_argument("--tile", type=int, default=48)
    parser.add_argument("--ways", choices=(PRECISE, *WAYS), nargs="+", default=list(WAYS))
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--limit", type=int, help="MiB of data that a process may take beyond what it has")
    parser.add_argument("--gradients", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.gradients:
        print(json.dumps(measure(options.ways[0], options)))
        return
    print("| network | positions | way | CPU seconds | ÷ untiled | MiB | ÷ untiled | loss | off |\n|" + "---|" * 9)
    for name in options.network:
        numbers = {"--length": options.length, "--tile": options.tile, "--repeats": options.repeats}
        numbers |= {"--limit": options.limit} if options.limit else {}
        arguments = ["--network", name, *(str(part) for pair in numbers.items() for part in pair)]
        size = f"{options.length}{'²³'[recorded.NETWORKS[name].dims - 2]}"
        with tempfile.TemporaryDirectory() as folder:
            files = {way: Path(folder) / way for way in options.ways}
            first: dict[str, Any] = {}
            reference = PRECISE if PRECISE in options.ways else "untiled"
            for way, file in files.items():
                row = measure_apart(way, arguments, file)
                if row["seconds"] is None:
                    print(f"| {name} | {size} | {way} | does not fit | | | | | |", flush=True)
                    continue
                first = row if way == "untiled" else first
                ratios = [f"{row[key] / first[key]:.2f}" if first else "" for key in ("seconds", "memory")]
                off = f"{compare(file, files[reference]):.0e}" if way != reference and files[reference].exists() else ""
                numbers_of = (f"{row['seconds']:.1f}", ratios[0], f"{row['memory'] / MEBIBYTE:,.0f}", ratios[1])
                print(f"| {name} | {size} | {way} | {' | '.join(numbers_of)} | {row['loss']:.6f} | {off} |", flush=True)


if __name__ == "__main__":
    main()
