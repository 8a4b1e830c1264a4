"""Kill predictions in tiles at calls by which they write, resume them, and compare the bytes of the files.

    python benchmarks/faults.py --kills 1000
    python benchmarks/faults.py --programs 10000 --seed 0

Kills go round the formats and what is stored between passes, and for each through the calls that change files, whole
and half done; half of the calls that go on find as much free disk as is drawn. Programs are those of
`farfield.testing.predictions`: calls with other weights and plans, kills, errors of the disk, damage, two processes and
a clock that goes back, five steps each. The first that fails ends the run with the shortest that fails. Linux on x86-64
alone. `tests/streaming/test_faults.py` and `test_machine.py` run a part in every test run.
"""

from __future__ import annotations

import argparse
import itertools
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import hypothesis
import torch
from hypothesis.stateful import run_state_machine_as_test

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from farfield.streaming import _plan_whole, _predict_whole, choosing
from farfield.testing import faults
from farfield.testing.predictions import (
    SUFFIXES,
    TILES,
    Key,
    Predictions,
    content,
    dear_halos,
    plans_made_once,
    predict,
    undisturbed,
)

# Programs that are drawn with one seed. More of them take longer each: a program is drawn as unlike the earlier ones.
PART = 50
# Kills of one case go through its calls in such steps, and then from the next call on.
STEP = 7
# What is killed: with values in memory between passes, with values on disk, with keys and values on disk, and passes
# that end where halos cost more than to store; the last two as far as free disk allows.
KEYS = (Key(0, TILES[0]), Key(0, TILES[2]), Key(2, TILES[2]), Key(3, TILES[2]), Key(0, TILES[1]), Key(3, TILES[1]))
# Free bytes of a disk: none, less than values take, just enough for some, and more than for all.
FREE = (0, 100, 1000, 4000, 10**5, 10**12)


def run_programs(programs: int, first: int) -> None:
    """Run programs of the machine in parts of PART, and print the counts after each part."""
    started, counts = time.monotonic(), {"programs": 0, "calls": 0}

    class Counted(Predictions):
        def check(self, *arguments: Any, **named: Any) -> None:
            counts["calls"] += 1
            super().check(*arguments, **named)

        def teardown(self) -> None:
            super().teardown()
            counts["programs"] += 1

    settings = hypothesis.settings(
        max_examples=min(PART, programs),
        stateful_step_count=5,
        deadline=None,
        database=None,
        phases=[hypothesis.Phase.generate, hypothesis.Phase.shrink],
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    torch.set_num_threads(1)
    with plans_made_once():
        for seed in itertools.count(first):
            if counts["programs"] >= programs:
                break
            run_state_machine_as_test(hypothesis.seed(seed)(Counted), settings=settings)
            seconds = time.monotonic() - started
            print(f"{counts['programs']} programs, {counts['calls']} calls, {seconds:.0f} s, seed {seed}", flush=True)


def main() -> None:
    """Run the kills, or the programs, and print the counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=1000, help="number of kills")
    parser.add_argument("--programs", type=int, help="number of programs, which are run in place of kills")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first part of programs")
    arguments = parser.parse_args()
    if arguments.programs:
        run_programs(arguments.programs, arguments.seed)
    else:
        run_kills(arguments.kills)


@contextmanager
def free_disk(free: int) -> Iterator[None]:
    """Have so many bytes of free disk, and plan each call anew."""
    disk = mock.patch.object(choosing.shutil, "disk_usage", return_value=SimpleNamespace(free=free))
    with disk, mock.patch.object(_predict_whole, "plan_volumes", _plan_whole.plan_volumes):
        yield


def run_kills(kills: int) -> None:
    """Kill predictions, resume them, and exit with 1 if a byte is wrong."""
    torch.set_num_threads(1)
    cases = list(itertools.product(SUFFIXES, KEYS))
    place, done, finished, wrong, rounds = dict.fromkeys(cases, 0), 0, 0, 0, 0
    started, drawn = time.monotonic(), random.Random(0)
    with tempfile.TemporaryDirectory() as name, plans_made_once(), dear_halos():
        while done < kills:
            case = suffix, key = cases[rounds % len(cases)]
            action = "torn" if rounds // len(cases) % 2 else "kill"
            rounds += 1
            out = Path(name) / str(rounds) / f"out{suffix}"
            out.parent.mkdir()
            undisturbed(key, out.name)  # so that it is planned before the process forks
            at = faults.at(place[case], action)
            outcome = faults.run(lambda key=key, out=out: predict(key, out), out.parent, at)
            killed = outcome.kind == "killed"
            place[case] = place[case] + STEP if killed else (place[case] + 1) % STEP
            done += killed
            if out.exists() and not (out.with_name(f"{out.name}.unfinished") / "progress.zip").exists():
                finished += killed
            else:
                with free_disk(drawn.choice(FREE)) if drawn.random() < 0.5 else nullcontext():
                    predict(key, out)
            if content(out) != undisturbed(key, out.name) or outcome.outside:
                wrong += 1
                print(f"wrong: {key}, {suffix}, {action} at {outcome.calls[-1]}, {outcome.outside}", flush=True)
            shutil.rmtree(out.parent)
    seconds = time.monotonic() - started
    print(f"{done} kills ({finished} after the file was complete), {seconds:.0f} s, {wrong} wrong")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
