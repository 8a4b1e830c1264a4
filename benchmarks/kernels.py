"""Time of the CPU kernels and of the equations they replace, in copies of the grid: the table of docs/performance.md.

    farfield kernels --build
    python benchmarks/kernels.py
    python benchmarks/kernels.py --tiny             # small grids, to check that everything runs

Operators without projections, one head. Every number is from a race with a copy, after the responses and gradients were
compared with the equation in float64; races with and without kernels run in turns.
"""

from __future__ import annotations

import argparse
import os
import statistics
from unittest import mock

import torch
from contestants import attention_of, ours
from race import copy_of_the_grid, keep_freed_memory, machine, race, times_as_long

from farfield.ops.fast.kernels import SWITCH

NAMES = ("siamese", "kronecker_qkv")
SHAPES = ((8, 256, 56, 56), (1, 64, 256, 256), (8, 64, 56, 56), (2, 64, 16, 32, 32), (1, 64, 1024, 1024))
TINY = ((1, 32, 7, 9),)


def copies(name: str, shape: tuple[int, ...], *, kernels: bool, backward: bool) -> float:
    """Return the time of an operator divided by that of a copy of the grid."""
    torch.manual_seed(0)
    with mock.patch.dict(os.environ, {SWITCH: str(int(kernels))}):
        contestants = [copy_of_the_grid(), ours(attention_of(name, shape[1], project=""))]
        rows = race(contestants, torch.randn(shape), backward=backward, repeats=3)
    times = times_as_long(rows, name, "copy")
    if times is None:
        raise SystemExit(f"kernels.py: {name} on {shape} is wrong by {rows[1]['error']:.1e}")
    return times


def entry(name: str, shape: tuple[int, ...], *, backward: bool, rounds: int) -> str:
    """Format the copies of the equations → those of the kernels."""
    turns = [[copies(name, shape, kernels=on, backward=backward) for on in (False, True)] for _ in range(rounds)]
    return " → ".join(f"{statistics.median(each):.2f}" for each in zip(*turns, strict=True))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="one small grid")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    keep_freed_memory()
    shapes = TINY if arguments.tiny else SHAPES
    print(f"| copies | {' | '.join('×'.join(str(side) for side in shape) for shape in shapes)} |")
    print("|---|" + "---|" * len(shapes))
    for name in NAMES:
        for backward in (False, True):
            entries = [entry(name, shape, backward=backward, rounds=arguments.rounds) for shape in shapes]
            print(f"| `{name}`, forward{' and backward' * backward} | {' | '.join(entries)} |", flush=True)
    print(machine(torch.device("cpu")))


if __name__ == "__main__":
    main()
