"""Run the numerical tests as other processors would: `make test-everywhere`.

Each switch makes a library choose the code that it has for another processor, or changes the number of threads, or runs
the compiled kernels. A table at the end says how many tests each ran.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
SWITCHES = {
    "as it is": {},
    "MKL_CBWR=COMPATIBLE": {"MKL_CBWR": "COMPATIBLE"},
    "MKL_CBWR=AVX2": {"MKL_CBWR": "AVX2"},
    "ATEN_CPU_CAPABILITY=default": {"ATEN_CPU_CAPABILITY": "default"},
    "ONEDNN_MAX_CPU_ISA=AVX2": {"ONEDNN_MAX_CPU_ISA": "AVX2"},
    "two threads": {"OMP_NUM_THREADS": "2"},
    "kernels": {"FARFIELD_TEST_KERNELS": "1"},
}
# What computes, and not what reads files, prints or draws.
TESTS = ["tests/ops", "tests/nn", "tests/papers", "tests/sharding", "tests/test_fuzz.py", "tests/test_maps.py"]
TESTS += ["tests/test_theory.py", "tests/streaming/test_predict_whole.py", "tests/streaming/test_respond_whole.py"]
TESTS += ["tests/models/test_fuse.py", "tests/models/test_compact.py", "tests/models/test_bert.py"]
# The short form, which every `make test` runs after the whole suite.
SHORT = ["tests/ops/test_precision.py", "tests/ops/test_masks.py", "tests/nn/test_norm.py", "tests/test_fuzz.py"]
SHORT_SWITCHES = ["MKL_CBWR=COMPATIBLE", "ATEN_CPU_CAPABILITY=default", "two threads"]
COUNT = re.compile(r"(\d+) (passed|failed|error|errors|skipped)\b")


def run(name: str, tests: list[str], jobs: int) -> tuple[str, bool]:
    """Run the tests under a switch; return its line of the table, and whether all passed."""
    environment = {"OMP_NUM_THREADS": "1", **os.environ, **SWITCHES[name]}
    command = [sys.executable, "-m", "pytest", "-q", "-n", str(jobs), *tests]
    started = time.monotonic()
    done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    minutes, last = (time.monotonic() - started) / 60, done.stdout.strip().rpartition("\n")[2]
    if done.returncode != 0:
        print(done.stdout)
    counts = {what: int(number) for number, what in COUNT.findall(last)}
    told = ", ".join(f"{number:,} {what}" for what, number in counts.items()) or last
    good = done.returncode == 0 and counts.get("passed", 0) > 0
    return f"| {name} | {told} | {minutes:.1f} |", good


def main() -> None:
    """Run all switches, or those named, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("switches", nargs="*", choices=[*SWITCHES, []], help="which; all by default")
    parser.add_argument("--short", action="store_true", help="the few tests and switches of `make test`")
    parser.add_argument("--jobs", type=int, default=2, help="test processes side by side")
    arguments = parser.parse_args()
    names = arguments.switches or (SHORT_SWITCHES if arguments.short else list(SWITCHES))
    rows = []
    with tempfile.TemporaryDirectory() as cache:
        if "kernels" in names:
            os.environ["XDG_CACHE_HOME"] = cache
            subprocess.run([sys.executable, "-m", "farfield.cli", "kernels", "--build"], cwd=ROOT, check=True)
        for name in names:
            rows.append(run(name, SHORT if arguments.short else TESTS, arguments.jobs))
            print(rows[-1][0], flush=True)
    print("\n| switch | tests | minutes |\n|---|---|---|", *(line for line, _ in rows), sep="\n")
    sys.exit(not all(good for _, good in rows))


if __name__ == "__main__":
    main()
