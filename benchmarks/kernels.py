"""Time of the CPU kernels and of the equations they replace, in copies of the grid: the table of docs/kernels.md.

    python benchmarks/kernels.py
    python benchmarks/kernels.py --cases            # with projections, masks, norms, channels-last, bfloat16, float16
    python benchmarks/kernels.py --tiny             # small grids, to check that everything runs

Operators without projections, one head. Every number is from a race with a copy, after the responses and gradients were
compared with the equation in float64; races with and without kernels run in turns. The cases are those of paths.py:
how many times as long the equations take and, in brackets, the kernels in copies of the grid, forward / forward and
backward, the medians of turns.
"""

from __future__ import annotations

import argparse
import os
import statistics
from unittest import mock

import torch
from contestants import attention_of, ours
from paths import CASES, Case
from race import copy_of_the_grid, keep_freed_memory, machine, race, times_as_long
from torch import Tensor, nn

from farfield import cost
from farfield.nn import GridAttention
from farfield.ops import OPERATORS
from farfield.ops.fast.kernels import SWITCH

NAMES = ("siamese", "kronecker_qkv")
SHAPES = ((8, 256, 56, 56), (1, 64, 256, 256), (8, 64, 56, 56), (2, 64, 16, 32, 32), (1, 64, 1024, 1024))
TINY = ((1, 32, 7, 9),)
IN_CASES = ("kronecker_kv", "kronecker_qkv", "siamese", "averaged", "factorized_gaussian")
SHAPE_OF_CASES = (8, 64, 56, 56)


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


# ---- cases -----------------------------------------------------------------------------------------------------------
class Switched(nn.Module):
    """Attention with kernels or without, forward and in the backward pass that follows."""

    def __init__(self, attention: GridAttention, mask: Tensor | None, *, kernels: bool) -> None:
        super().__init__()
        self.attention, self.mask, self.kernels = attention, mask, str(int(kernels))

    def forward(self, grid: Tensor) -> Tensor:
        """Attend."""
        os.environ[SWITCH] = self.kernels
        return self.attention(grid, mask=self.mask)


class Copy(nn.Module):
    """A copy of the grid."""

    def forward(self, grid: Tensor) -> Tensor:
        """Copy."""
        return grid.clone()


def ratios(name: str, case: Case, shape: tuple[int, ...], repeats: int) -> str:
    """Format how many times as long the equations take, and the kernels in copies, forward / forward and backward."""
    options = {"project": OPERATORS[name].projections(case.project), "coefficient_norm": case.normed}
    attention = GridAttention(shape[1], name, **options).to(case.dtype)
    grid = torch.randn(shape).to(case.dtype)
    grid = grid.contiguous(memory_format=torch.channels_last) if case.wide else grid
    mask = torch.rand(shape[0], *shape[2:]) > 0.2 if case.masked else None
    texts, copy = [], 0.0
    for backward in (False, True):
        grid.requires_grad_(backward)
        runs: dict[str, tuple[nn.Module, Tensor]] = {
            str(on): (Switched(attention, mask, kernels=on), grid) for on in (False, True)
        }
        with torch.set_grad_enabled(backward):
            plain, ours_own = (run[0](run[1]) for run in runs.values())
            bound = max(1.2e-4, 4 * torch.finfo(case.dtype).eps)
            if (plain - ours_own).float().norm() > bound * plain.float().norm():
                raise SystemExit(f"kernels.py: {name}, {case.name}: kernels and equations differ")
            if not backward:
                runs["copy"] = Copy(), grid
            rows = cost.compare(runs, backward=backward, repeats=repeats)
        copy = copy or rows["copy"].seconds
        texts.append(f"{rows['False'].seconds / rows['True'].seconds:.2f} ({rows['True'].seconds / copy:.1f})")
    return " / ".join(texts)


def print_cases(shape: tuple[int, ...], repeats: int) -> None:
    """Print the table of the cases."""
    keep_freed_memory()
    print(f"| equations ÷ kernels (copies), {'×'.join(map(str, shape))} | {' | '.join(case.name for case in CASES)} |")
    print("|---|" + "---|" * len(CASES))
    for name in IN_CASES:
        print(f"| `{name}` | {' | '.join(ratios(name, case, shape, repeats) for case in CASES)} |", flush=True)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="one small grid")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cases", action="store_true", help="the table of cases in place of that of sizes")
    arguments = parser.parse_args()
    if arguments.cases:
        print_cases(TINY[0] if arguments.tiny else SHAPE_OF_CASES, 1 if arguments.tiny else 7)
    else:
        print_sizes(TINY if arguments.tiny else SHAPES, arguments.rounds)
    print(machine(torch.device("cpu")))


def print_sizes(shapes: tuple[tuple[int, ...], ...], rounds: int) -> None:
    """Print the table of sizes."""
    keep_freed_memory()
    print(f"| copies | {' | '.join('×'.join(str(side) for side in shape) for shape in shapes)} |")
    print("|---|" + "---|" * len(shapes))
    for name in NAMES:
        for backward in (False, True):
            entries = [entry(name, shape, backward=backward, rounds=rounds) for shape in shapes]
            print(f"| `{name}`, forward{' and backward' * backward} | {' | '.join(entries)} |", flush=True)


if __name__ == "__main__":
    main()
