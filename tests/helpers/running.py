"""Run parts of the tests as processes of their own, and say how many passed in how many minutes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
COUNT = re.compile(r"(\d+) (passed|failed|error|errors|skipped|xfailed)\b")


def run(name: str, arguments: Sequence[str], settings: Mapping[str, str] = {}) -> tuple[str, bool]:
    """Run pytest; return a line of a table, and whether tests ran and all passed.

    Args:
        name: First column of the line.
        arguments: For pytest.
        settings: Environment variables, over those there are.
    """
    environment = {"OMP_NUM_THREADS": "1", **os.environ, **settings}
    command = [sys.executable, "-m", "pytest", "-q", *arguments]
    started = time.monotonic()
    last = ""
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True) as running:
        for printed in running.stdout or ():
            print(f"{name}: {printed}", end="", flush=True)  # several may run side by side
            last = printed.strip() or last
    minutes = (time.monotonic() - started) / 60
    counts = {what: int(number) for number, what in COUNT.findall(last)}
    told = ", ".join(f"{number:,} {what}" for what, number in counts.items()) or last
    line, good = f"| {name} | {told} | {minutes:.1f} |", running.returncode == 0 and counts.get("passed", 0) > 0
    print(line, flush=True)
    return line, good


def report(first_column: str, rows: Sequence[tuple[str, bool]]) -> None:
    """Print the table, and end the process with an error unless all passed."""
    print(f"\n| {first_column} | tests | minutes |\n|---|---|---|", *(line for line, _ in rows), sep="\n")
    sys.exit(not all(good for _, good in rows))
