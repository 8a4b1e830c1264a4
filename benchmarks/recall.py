"""Recall on grids: how many pairs of a key and a value can each operator hold?

    python benchmarks/recall.py --out recall.jsonl
    python benchmarks/recall.py --out large.jsonl --size 16,16 8,8,8 --pairs 4 16 64 --only softmax "softmax, scale 1"
    python benchmarks/recall.py --collect recall.jsonl large.jsonl --picture recall.svg        # runs nothing

Each sample has some keys, all different, and a random value for each. Key and value are neighbours in a grid that is
blank elsewhere; each key appears a second time, with a question mark to its right, where the network must return the
key's value. After an embedding and two 3×3 convolutions, and before a third, one module mixes distant positions: an
operator, a large convolution, or none. A run is a line of JSON; finished runs are not run again. Several processes can
share the work by options, each with a file of its own.

What the task leaves open was decided before the first run:

- A place is two neighbours along the last axis, the first at an even index. Pairs, and keys with question marks, are
  at random places, all different, so that nothing overlaps. A pair needs two places: 16 pairs fit in 8×8, 64 in
  16×16, 128 in 8×8×8. Grids of one and three spatial dims have convolutions of 3 and 3×3×3.
- Every key is queried once: a sample has as many question marks as pairs, and each counts the same.
- There are 8 keys up to 4 pairs and twice as many keys as pairs above. There are 4 values for any number of pairs, so
  that chance, 25 %, is the same for the whole curve and only what must be remembered grows. Symbols are the blank,
  keys, values and the question mark: 14 for 4 pairs.
- Without recall a network can be better than chance: the most frequent value of a sample, returned everywhere, is right
  at 53 % with 4 pairs. The table and the picture have this line beside chance.
- Every step has a new batch. The 2,048 test samples are the same for all runs of a size and number of pairs.
  With one seed every operator gets the same batches, and the network around it starts with the same weights.
- Operators have one head and all four projections (`siamese_local`, which uses no keys, three). Softmax and Kronecker
  operators are scaled by 1/√c; the others have no scale. "softmax, scale 1" is softmax as the papers print it.
- "convolution" is depthwise with batch norm and ReLU, then pointwise, and added to its input; as with the operators,
  the last weights start at zero. Its kernel is the largest with no more weights than their projections: 13×13, which
  with the three convolutions around it connects all positions of 8×8, or 5×5×5.
- "HyenaND" is MONAI's mixer (`pip install monai[hyena]`) as it is: a gated convolution as long as the grid, through
  Fourier transforms. Its last weights start at zero too. It has 23,008 weights, `factorized_gaussian` 16,640.
- AdamW decays all weights; the one-cycle schedule is torch's, with its momentum. All sizes have 1,200 steps unless
  `--steps` is given; runs of different steps are not mixed. Convolutions before a batch norm have no bias.
- The best rate is the one with the best mean accuracy over the seeds, among the rates with the most seeds. A number of
  pairs is held if that mean is at least 90 %. Seconds are core seconds of training and test.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import platform
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))

from recall_curves import curves_by_size, draw_picture, table
from recall_task import CONTESTANTS, Network, Task, evaluate, train

import farfield

STEPS, PAIRS, RATES, SEEDS = 1200, (2, 4, 8, 16), (1e-3, 3e-3, 1e-2), (1, 2, 3)
# The keys that identify a run.
IDENTITY = ("operator", "size", "pairs", "rate", "seed", "steps")


# ---- runs ------------------------------------------------------------------------------------------------------------
def run(contestant: str, task: Task, rate: float, seed: int, steps: int) -> dict[str, Any]:
    """Train and test one network."""
    torch.manual_seed(seed)
    started, net = time.process_time(), Network(contestant, task)
    train(net, task, rate, steps, seed)
    accuracy, loss = evaluate(net, task)
    line = describe(contestant, task, rate, seed, steps)
    # JSON has no number for the loss of a diverged run.
    line |= {"accuracy": round(accuracy, 5), "loss": round(loss, 5) if math.isfinite(loss) else None}
    versions = {"farfield": farfield.__version__, "torch": torch.__version__, "python": platform.python_version()}
    return line | {"seconds": round(time.process_time() - started, 1), "versions": versions}


def describe(contestant: str, task: Task, rate: float, seed: int, steps: int) -> dict[str, Any]:
    """Return the keys and values that identify this run in its line of JSON."""
    values = (contestant, list(task.size), task.pairs, rate, seed, steps)
    return dict(zip(IDENTITY, values, strict=True))


def identity(line: dict[str, Any]) -> str:
    """Return a text that is equal for lines of the same run."""
    return json.dumps([line[key] for key in IDENTITY])


def read(file: Path) -> list[dict[str, Any]]:
    """Read the lines of a file, if there is one; an incomplete last line is skipped."""
    lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def run_missing(options: argparse.Namespace) -> None:
    """Run what the options select and the file does not have; all operators run with one seed before the next."""
    lines = read(options.out)
    # Without an incomplete last line.
    options.out.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    done = {identity(line) for line in lines}
    every = itertools.product(options.seeds, options.size, options.pairs, options.rates, options.only)
    runs = [(name, Task(size, pairs), rate, seed, options.steps) for seed, size, pairs, rate, name in every]
    todo = [each for each in runs if identity(describe(*each)) not in done]
    for each in todo[: options.limit]:
        line = json.dumps(run(*each))
        with options.out.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
        print(line, flush=True)


# ---- the command -----------------------------------------------------------------------------------------------------
def grid_size(text: str) -> tuple[int, ...]:
    """Parse the size of a grid, such as 8,8."""
    size = tuple(int(part) for part in text.split(","))
    if not 1 <= len(size) <= 3 or min(size) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size of one to three numbers, such as 8,8")
    return size


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="lines of JSON; the runs in it are not run again")
    parser.add_argument(
        "--only", nargs="+", choices=CONTESTANTS, default=CONTESTANTS, help="which operators; all by default"
    )
    parser.add_argument("--size", nargs="+", type=grid_size, default=[(8, 8)], metavar="8,8", help="default: 8,8")
    parser.add_argument("--pairs", nargs="+", type=int, default=PAIRS, help=f"default: {PAIRS}")
    parser.add_argument("--rates", nargs="+", type=float, default=RATES, help=f"default: {RATES}")
    parser.add_argument("--seeds", nargs="+", type=int, default=SEEDS, help=f"default: {SEEDS}")
    parser.add_argument("--steps", type=int, default=STEPS, help="default: %(default)s")
    parser.add_argument("--limit", type=int, help="run at most so many runs")
    parser.add_argument(
        "--collect", nargs="+", type=Path, metavar="FILE", help="run nothing, print the table of these files"
    )
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw the curves, as .svg or .png")
    options = parser.parse_args()
    if not options.out and not options.collect:
        parser.error("give --out FILE to write runs, or --collect FILE… to read them")
    for size, pairs in itertools.product(options.size, options.pairs):
        if not 1 <= pairs <= Task(size, pairs).places // 2:
            parser.error(f"{pairs} pairs: from 1 to {Task(size, pairs).places // 2} fit in a grid of {size}")
    return options


def main() -> None:
    """Run the missing runs, or only read files; print the table."""
    options = parse()
    if not options.collect:
        run_missing(options)
    lines = [line for file in options.collect or [options.out] for line in read(file)]
    # A run that is in two files counts once.
    sizes = curves_by_size(list({identity(line): line for line in lines}.values()))
    print("\n\n".join(table(title, curves) for title, curves in sizes.items()))
    if options.picture:
        draw_picture(sizes, options.picture)


if __name__ == "__main__":
    main()
