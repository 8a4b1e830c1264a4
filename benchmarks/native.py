"""Time the CPU kernels as an installation has them against the same sources compiled for this processor alone.

    python benchmarks/native.py                   # needs a C++ compiler; about five minutes
    python benchmarks/native.py --turns 1 --tiny

The default library has each loop for three instruction sets and selects one when it is loaded; the other library is
compiled with -march=native. Each is measured in its own processes, in turns; a time is a process's median, and the
ratio is that of the shortest times, above 1 where the default is slower. The norms of the responses are compared first.
"""

from __future__ import annotations

import argparse
import json
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

from farfield import cost
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


def measure(shapes: tuple[tuple[int, ...], ...], repeats: int) -> dict[str, list[float]]:
    """Return for each case the seconds and the norm of the response."""
    keep_freed_memory()
    if not kernels.run():
        raise SystemExit("native.py: the kernels do not run here; `farfield kernels` prints why")
    results = {}
    for name in NAMES:
        for shape in shapes:
            torch.manual_seed(0)
            attention = attention_of(name, shape[1], project="")
            for backward in (False, True):
                grid = torch.randn(shape).requires_grad_(backward)
                row = cost.compare({name: (attention, grid)}, backward=backward, repeats=repeats)[name]
                norm = float(attention(grid).detach().double().norm())
                results[f"{name}, {'×'.join(map(str, shape))}, forward{' and backward' * backward}"] = [
                    row.seconds,
                    norm,
                ]
    return results


def in_process(source: Path, arguments: argparse.Namespace) -> dict[str, list[float]]:
    """Measure the package of a folder in a process of its own."""
    command = [sys.executable, __file__, "--one", str(source), *(["--tiny"] if arguments.tiny else [])]
    environment = os.environ | {"PYTHONPATH": str(source)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"native.py: a process failed:\n{done.stderr}")
    return dict(json.loads(done.stdout.splitlines()[-1]))


def main() -> None:
    """Build, measure in turns, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=5, help="processes of each library")
    parser.add_argument("--tiny", action="store_true", help="one small grid, to check that everything runs")
    parser.add_argument("--one", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    shapes, repeats = (TINY, 1) if arguments.tiny else (SHAPES, 5)
    if arguments.one:
        if not Path(kernels.__file__).is_relative_to(arguments.one):
            raise SystemExit(f"native.py: it should have measured {arguments.one}, and measured {kernels.__file__}")
        print(json.dumps(measure(shapes, repeats)))
        return
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder).resolve()
        shutil.copytree(ROOT / "src", copy / "src", ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "hatch_build.py", copy)
        subprocess.run([sys.executable, "-c", NATIVE], cwd=copy, check=True)
        turns = [[in_process(each / "src", arguments) for each in (ROOT, copy)] for _ in range(arguments.turns)]
    print("| default ÷ native | shortest times | range of turns |\n|---|---|---|")
    fastest = []
    for case, (_, expected) in turns[0][0].items():
        times = [[one[case][0] for one in turn] for turn in turns]
        if any(abs(one[case][1] - expected) > TOLERANCE * expected for turn in turns for one in turn):
            raise SystemExit(f"native.py: {case}: the responses differ")
        ratios = [default / native for default, native in times]
        default, native = (min(each) for each in zip(*times, strict=True))
        fastest.append(default / native)
        print(f"| {case} | {fastest[-1]:.3f} | {min(ratios):.2f} to {max(ratios):.2f} |")
    print(f"| mean of {len(fastest)} | {statistics.mean(fastest):.3f} | |\n\n{machine(torch.device('cpu'))}")


if __name__ == "__main__":
    main()
