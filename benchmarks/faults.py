"""Kill predictions in tiles at calls by which they write, resume them, and compare the bytes of the files.

    python benchmarks/faults.py --kills 1000

Kills go round the formats, and for each format through all calls that change files, whole and half done. Linux on
x86-64 alone. `tests/streaming/test_faults.py` runs a part in every test run.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from farfield.streaming import _predict_whole, predict_whole
from helpers import faults
from helpers.streamed_nets import attention, settled

SUFFIXES = (".npy", ".tif", ".zarr")


def content(path: Path) -> dict[str, bytes]:
    """Return the bytes of every file at a path."""
    files = [path] if path.is_file() else sorted(each for each in path.rglob("*") if each.is_file())
    return {str(each.relative_to(path)): each.read_bytes() for each in files}


def main() -> None:
    """Run the kills and print the counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=1000, help="number of kills")
    kills = parser.parse_args().kills
    torch.set_num_threads(1)
    near, last = nn.Conv2d(1, 6, 3, padding=1), nn.Conv2d(6, 1, 3, padding=1)
    net = settled(nn.Sequential(near, attention("factorized_gaussian"), last))
    volume, plan = np.random.default_rng(0).random((20, 24), "float32"), _predict_whole.make_plan
    made = plan("predict_whole", net, volume.shape, (10, 8), None, None)
    _predict_whole.make_plan = lambda *arguments: made  # the same for all, and most of the time

    def predict(out: Path) -> None:
        predict_whole(net, volume, tile=(10, 8), out=out, quiet=True)

    started, done, finished, wrong, rounds = time.monotonic(), 0, 0, 0, 0
    with tempfile.TemporaryDirectory() as name:
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
