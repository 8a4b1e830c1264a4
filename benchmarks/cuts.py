"""What ends of passes are chosen by: measured seconds of a MAC and a byte, and plans of a slide by the disk allowed.

    python benchmarks/cuts.py --constants             # those in farfield/streaming/cuts.py: a quiet core, a minute
    python benchmarks/cuts.py --slide 100000          # plans alone, no tile runs: half a minute

The slide is one of a pathology scanner, of so many positions along each axis, and the network
`segmentation_models_pytorch.Unet("resnet34")`, whose norms sum over nothing. Hours are the planned MACs and bytes by
the constants, on one core.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import segmentation_models_pytorch as smp
import torch
import torch.nn.functional as F
from torch import nn

from farfield.streaming import Tiles, cuts, plan_whole
from farfield.streaming.blocks import Blocks
from farfield.streaming.plan import own_box
from farfield.streaming.store import StoredInFile

# Bytes of a tile, and of disk.
MEMORY, DISKS = (2**29, 2**31), (0, 200 * 10**9, 10**12, 10**13)
BLOCK = 256


def seconds_of(function: Callable[[], object], repeats: int = 9) -> float:
    """Return the median CPU seconds of a function, after a first call."""
    function()
    taken = []
    for _ in range(repeats):
        started = time.process_time()
        function()
        taken.append(time.process_time() - started)
    return statistics.median(taken)


def print_constants() -> None:
    """Print the seconds of a MAC, of a byte that an operation gives, and of one that is stored or read."""
    torch.set_num_threads(1)
    for channels, length in ((32, 256), (64, 128), (128, 64)):
        grid, kernel = torch.rand(1, channels, length, length), torch.rand(channels, channels, 3, 3)
        taken = seconds_of(lambda grid=grid, kernel=kernel: F.conv2d(grid, kernel, padding=1))
        print(f"a MAC of {channels} channels: {taken / (kernel.numel() * length**2):.1e} s")
    grid = torch.rand(1, 64, BLOCK, BLOCK)
    print(f"a byte that a norm gives: {seconds_of(lambda: F.instance_norm(grid)) / grid.nbytes:.1e} s")
    network = nn.Conv2d(1, 64, 3, padding=1).eval()
    plan = plan_whole(network, (4 * BLOCK, 4 * BLOCK), tile=BLOCK)
    labelled, output = plan.labelled, plan.labelled.graph.output
    info, blocks = labelled.graph.info(output), Blocks(labelled, labelled.layouts[output], plan.cores, 4)
    with tempfile.TemporaryDirectory() as folder:
        value = StoredInFile(Path(folder) / "value", "value", info, blocks, torch.device("cpu"))
        boxes = [own_box(plan, output, tile) or () for tile in plan.cores]
        for name, function in (
            ("that is stored, in a new file", lambda index: value.write(index, boxes[index], grid)),
            ("that is stored, in a file that is there", lambda index: value.write(index, boxes[index], grid)),
            ("that is read", lambda index: value.read(index, boxes[index])),
        ):
            started = time.process_time()
            for index in range(len(plan.cores)):
                function(index)
            print(f"a byte {name}: {(time.process_time() - started) / blocks.total:.1e} s")
        value.close()


def print_slide(length: int) -> None:
    """Print the plans of a slide."""
    network = smp.Unet("resnet34", encoder_weights=None, classes=2).eval()
    print("| disk, GB | memory, MiB | tile | passes | MiB a tile | MACs | stored at once, GB | hours |\n|" + "---|" * 8)
    for disk in DISKS:
        for memory in MEMORY:
            plan = plan_whole(network, (3, length, length), tile=Tiles(memory=memory, disk=disk))
            row = [f"{disk / 1e9:,.0f}", f"{memory >> 20:,}", f"{plan.tile[0]}²", str(len(plan.passes))]
            row += [f"{plan.tile_bytes >> 20:,}", f"{plan.recomputed:.2f}", f"{plan.stored_bytes / 1e9:,.0f}"]
            print(f"| {' | '.join(row)} | {cuts.estimate_seconds(plan) / 3600:,.1f} |", flush=True)


def main() -> None:
    """Print what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--constants", action="store_true")
    parser.add_argument("--slide", type=int, metavar="LENGTH", help="positions along each axis")
    options = parser.parse_args()
    if options.constants:
        print_constants()
    if options.slide:
        print_slide(options.slide)


if __name__ == "__main__":
    main()
