"""Time the CPU kernels as an installation has them against the same sources compiled for this processor alone.

    python benchmarks/native.py                   # needs a C++ compiler; about three minutes
    python benchmarks/native.py --turns 2 --tiny

The default library has each loop for three instruction sets and selects one when it is loaded; the other library is
compiled with -march=native. Two processes, one for each, run the same case in turns of 50 ms, so that other load of the
machine affects both alike. A ratio is that of the medians, above 1 where the default is slower; the norms of the
responses are compared first.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from contestants import attention_of
from race import keep_freed_memory, machine

from farfield.cost.measuring import TURN, step, timed, turn
from farfield.ops.fast import kernels

ROOT = Path(__file__).resolve().parents[1]
NAMES = ("siamese", "kronecker_qkv", "averaged", "factorized_gaussian")
SHAPES, TINY = ((8, 256, 56, 56), (1, 64, 256, 256)), ((1, 32, 7, 9),)
# The best instruction set of the default library, whose loops are compiled for this processor in the other one.
NATIVE = (
    "import hatch_build as h; h.LEVELS = dict.fromkeys(h.LEVELS, ['-march=native']); h.build(h.SOURCES / h.LIBRARY)"
)
# Relative distance of two responses: other instructions round products and sums otherwise.
TOLERANCE = 1e-5


def cases(shapes: tuple[tuple[int, ...], ...]) -> list[tuple[str, tuple[int, ...], bool]]:
    """Return the operators, shapes and directions."""
    return [(name, shape, backward) for name in NAMES for shape in shapes for backward in (False, True)]


def serve(shapes: tuple[tuple[int, ...], ...]) -> None:
    """For each index of a case that is read, print the seconds of a turn and the norm of the response."""
    keep_freed_memory()
    if not kernels.run():
        raise SystemExit("native.py: the kernels do not run here; `farfield kernels` prints why")
    cpu, now = torch.device("cpu"), ""
    for line in sys.stdin:
        if line != now:
            name, shape, backward = cases(shapes)[int(line)]
            torch.manual_seed(0)
            attention, grid = attention_of(name, shape[1], project=""), torch.randn(shape).requires_grad_(backward)
            norm = float(attention(grid).detach().double().norm())
            run, now = step(attention, [grid], backward), line
            runs = math.ceil(TURN / min(timed(run, cpu) for _ in range(3)))
        print(json.dumps([turn(run, cpu, runs), norm]), flush=True)


class Process:
    """A process that measures the package of a folder."""

    def __init__(self, source: Path, tiny: bool) -> None:
        command = [sys.executable, __file__, "--one", str(source), *(["--tiny"] if tiny else [])]
        environment, pipe = os.environ | {"PYTHONPATH": str(source)}, subprocess.PIPE
        self.process = subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, text=True)

    def turn(self, case: int) -> tuple[float, float]:
        """Return the seconds of a turn and the norm of the response."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{case}\n")
        self.process.stdin.flush()
        if not (line := self.process.stdout.readline()):
            raise SystemExit("native.py: a process failed")
        seconds, norm = json.loads(line)
        return seconds, norm


def main() -> None:
    """Build, measure in turns, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=25, help="turns of each library, 2 at least")
    parser.add_argument("--tiny", action="store_true", help="one small grid, to check that everything runs")
    parser.add_argument("--one", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.turns < 2:
        parser.error("--turns: the middle half of the turns needs 2 of them at least; fix: --turns 25")
    shapes = TINY if arguments.tiny else SHAPES
    if arguments.one:
        if not Path(kernels.__file__).is_relative_to(arguments.one):
            raise SystemExit(f"native.py: it should have measured {arguments.one}, and measured {kernels.__file__}")
        serve(shapes)
        return
    ratios = []
    print("| default ÷ native | medians | middle half of the turns |\n|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder).resolve()
        shutil.copytree(ROOT / "src", copy / "src", ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "hatch_build.py", copy)
        subprocess.run([sys.executable, "-c", NATIVE], cwd=copy, check=True)
        default, native = (Process(each / "src", arguments.tiny) for each in (ROOT, copy))
        for case, (name, shape, backward) in enumerate(cases(shapes)):
            turns = [(default.turn(case), native.turn(case)) for _ in range(arguments.turns)]
            if any(abs(ours[1] - theirs[1]) > TOLERANCE * theirs[1] for ours, theirs in turns):
                raise SystemExit(f"native.py: {name} on {shape}: the responses differ")
            one, other = ([each[which][0] for each in turns] for which in (0, 1))
            ratios.append(statistics.median(one) / statistics.median(other))
            low, _, high = statistics.quantiles([a / b for a, b in zip(one, other, strict=True)], n=4)
            what = f"{name}, {'×'.join(map(str, shape))}, forward{' and backward' * backward}"
            print(f"| {what} | {ratios[-1]:.3f} | {low:.2f} to {high:.2f} |", flush=True)
        for each in (default, native):
            each.process.communicate()
    print(f"| mean of {len(ratios)} | {statistics.mean(ratios):.3f} | |\n\n{machine(torch.device('cpu'))}")


if __name__ == "__main__":
    main()
