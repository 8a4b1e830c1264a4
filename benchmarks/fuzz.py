"""Draw random calls of every operator, by function, module and tiles; compare each with an explicit float64 matrix.

Compared are responses and gradients, or second derivatives.

    python benchmarks/fuzz.py --cases 100000 --out fuzz.json

A case is determined by its number, so a wrong one can be run again alone: `--first 4711 --cases 1`. An interrupted run
continues after the cases in `--out`. `tests/helpers/fuzzing.py` defines what is drawn and the tolerated error;
`tests/test_fuzz.py` runs the first cases in every test run. With kernels built, half of the cases run them.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from farfield.cost.measuring import device_name
from farfield.ops.fast import kernels
from helpers.fuzzing import Outcome, check, draw

# Number of cases between two writes to the disk.
BLOCK = 250
# What is counted of the cases.
COUNTED = ("form", "operator", "dtype", "layout", "second", "broken", "content", "weighted")


def run(first: int, cases: int, out: Path) -> dict[str, Any]:
    """Run the cases that are not in `out` yet, and write it after each block."""
    state: dict[str, Any] = {"first": first, "done": 0, "seconds": 0.0, "counts": {}, "wrong": []}
    if out.is_file():
        state = json.loads(out.read_text(encoding="utf-8"))
        if state["first"] != first:
            raise SystemExit(f"fuzz: {out} began at case {state['first']}, not {first}; fix: another --out.")
    counts = collections.Counter(state["counts"])
    while state["done"] < cases:
        started = time.monotonic()
        for index in range(first + state["done"], first + min(cases, state["done"] + BLOCK)):
            drawn, outcome = draw(index), attempt(index)
            counts.update((outcome.kind, *(f"{name}={getattr(drawn, name)}" for name in COUNTED)))
            if outcome.kind == "wrong":
                state["wrong"].append({"index": index, "text": outcome.text, "case": repr(drawn)})
                print(f"{index}: {outcome.text}\n  {drawn}", flush=True)
            state["done"] += 1
        state["counts"], state["seconds"] = dict(counts), state["seconds"] + time.monotonic() - started
        new = out.with_name(f"{out.name}.new")
        new.write_text(json.dumps(state, indent=1), encoding="utf-8")
        os.replace(new, out)
    return state


def attempt(index: int) -> Outcome:
    """Check a case; an exception counts as a wrong result."""
    try:
        return check(draw(index))
    except Exception as error:  # noqa: BLE001
        return Outcome("wrong", f"{type(error).__name__}: {error}")


def main() -> None:
    """Run the cases and print the counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=1000, help="number of cases")
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--out", type=Path, default=Path("fuzz.json"), help="results and progress")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    state = run(arguments.first, arguments.cases, arguments.out)
    print(f"torch {torch.__version__}, {device_name(torch.device('cpu'))}, kernels: {kernels.problem() or 'built'}")
    print(f"{state['done']} cases, {state['seconds'] / 60:.1f} minutes, {len(state['wrong'])} wrong")
    print(", ".join(f"{name} {count}" for name, count in sorted(state["counts"].items())))
    sys.exit(bool(state["wrong"]))


if __name__ == "__main__":
    main()
