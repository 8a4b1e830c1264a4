"""Kill predictions in tiles at calls by which they write, resume them, and compare the bytes of the files.

    python benchmarks/faults.py --kills 1000
    python benchmarks/faults.py --programs 10000 --seed 0

Kills go round the formats, and for each format through all calls that change files, whole and half done. Programs are
those of `tests/helpers/prediction_machine.py`: calls with other weights and plans, kills, errors of the disk, damage,
two processes and a clock that goes back, five steps each. The first that fails ends the run with the shortest that
fails. Linux on x86-64 alone. `tests/streaming/test_faults.py` and `test_machine.py` run a part in every test run.
"""

from __future__ import annotations

import argparse
import itertools
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import torch
from hypothesis.stateful import run_state_machine_as_test
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from farfield.streaming import predict_whole
from helpers import faults
from helpers.prediction_machine import SUFFIXES, Predictions, content, plans_made_once
from helpers.streamed_nets import attention, settled

# Programs that are drawn with one seed. More of them take longer each: a program is drawn as unlike the earlier ones.
PART = 50


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


def run_kills(kills: int) -> None:
    """Kill predictions, resume them, and exit with 1 if a byte is wrong."""
    torch.set_num_threads(1)
    near, last = nn.Conv2d(1, 6, 3, padding=1), nn.Conv2d(6, 1, 3, padding=1)
    net = settled(nn.Sequential(near, attention("factorized_gaussian"), last))
    volume = np.random.default_rng(0).random((20, 24), "float32")

    def predict(out: Path) -> None:
        predict_whole(net, volume, tile=(10, 8), out=out, quiet=True)

    started, done, finished, wrong, rounds = time.monotonic(), 0, 0, 0, 0
    with tempfile.TemporaryDirectory() as name, plans_made_once():
        folder = Path(name)
        want = {}
        for suffix in SUFFIXES:
            predict(folder / f"plain{suffix}")
            want[suffix] = content(folder / f"plain{suffix}")
        place = dict.fromkeys(SUFFIXES, 0)
        while done < kills:
            suffix = SUFFIXES[rounds % len(SUFFIXES)]
            rounds += 1
            out = folder / str(rounds) / f"out{suffix}"
            out.parent.mkdir()
            action = "torn" if rounds % 2 else "kill"
            at = faults.at(place[suffix], action)
            outcome = faults.run(lambda out=out: predict(out), out.parent, at)
            place[suffix] = place[suffix] + 1 if outcome.kind == "killed" else 0
            done += outcome.kind == "killed"
            state = out.with_name(f"{out.name}.unfinished") / "progress.zip"
            if out.exists() and not state.exists():
                finished += outcome.kind == "killed"
            else:
                predict(out)
            if content(out) != want[suffix] or outcome.outside:
                wrong += 1
                print(f"wrong: {suffix}, {action} at {place[suffix] - 1}, {outcome.outside}", flush=True)
            shutil.rmtree(out.parent)
    seconds = time.monotonic() - started
    print(f"{done} kills ({finished} after the file was complete), {seconds:.0f} s, {wrong} wrong")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
