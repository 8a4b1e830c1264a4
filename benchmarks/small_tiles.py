"""What a tile costs beside its numbers: a small network with a norm, in as many tiles of 8 × 8, to the end.

    python benchmarks/small_tiles.py --tiles 100000

Milliseconds and bytes are those of all passes together, of one tile. Bytes are what the process has taken of memory
that is its own (Linux), from the first task on, at most; volume, stored value and output are in files. `--profile`
prints where the time goes.
"""

from __future__ import annotations

import argparse
import contextlib
import cProfile
import pstats
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn
from tqdm import tqdm

from farfield.streaming import Tiles, predict_whole, use_progress_bar

TILE = 8
# Tiles between two looks at the memory.
STEP = 500


def own_bytes() -> int:
    """Return the bytes of memory of this process alone."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("RssAnon")).split()[1])


class Watch(tqdm):
    """A progress bar that looks at the memory."""

    first = most = count = 0

    def update(self, units: float = 1) -> None:
        """Count a tile."""
        Watch.count += 1
        if Watch.count % STEP == 1:
            Watch.most = max(Watch.most, own_bytes())
            Watch.first = Watch.first or Watch.most


def main() -> None:
    """Run what the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiles", type=int, default=100_000)
    parser.add_argument("--profile", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    count = round(arguments.tiles**0.5)
    layers = nn.Conv2d(1, 2, 3, padding=1), nn.InstanceNorm2d(2), nn.ReLU(), nn.Conv2d(2, 1, 3, padding=1)
    network, profile = nn.Sequential(*layers).eval(), cProfile.Profile()
    with tempfile.TemporaryDirectory() as name:
        file = Path(name) / "volume.npy"
        np.save(file, np.random.default_rng(0).random((1, count * TILE, count * TILE), "float32"))
        volume = np.load(file, mmap_mode="r")
        started, spent = time.monotonic(), time.process_time()
        with use_progress_bar(Watch), profile if arguments.profile else contextlib.nullcontext():
            predict_whole(network, volume, tile=Tiles(TILE, disk=10**12), out=Path(name) / "out.npy", quiet=True)
        seconds, spent = time.monotonic() - started, time.process_time() - spent
    taken = max(Watch.most, own_bytes()) - Watch.first
    print("| tiles | ms | CPU ms | bytes |\n|---|---|---|---|")
    print(
        f"| {count**2:,} | {1000 * seconds / count**2:.2f} | {1000 * spent / count**2:.2f} | {taken / count**2:.0f} |"
    )
    if arguments.profile:
        pstats.Stats(profile).sort_stats("cumtime").print_stats(60)


if __name__ == "__main__":
    main()
