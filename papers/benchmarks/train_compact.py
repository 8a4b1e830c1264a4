"""Train the compact networks on one dataset with equal budgets, several seeds each: a table and a picture of curves.

    python papers/benchmarks/train_compact.py cifar10 --root data/cifar10 --width 0.5 --epochs 15 --subset 20000
    python papers/benchmarks/train_compact.py imagenette --root data/imagenette --width 0.5 --epochs 15
    python papers/benchmarks/train_compact.py imagenette --list             # the runs, and which are done
    python papers/benchmarks/train_compact.py cifar10 --epochs 6 … --record benchmarks/records/cifar10.jsonl --collect

Each run is one `farfield fit` of the dataset's recipe in a folder of its own; a killed run resumes. A finished run is a
line of the record, with its accuracies, and is not run again, also where its folder is not. Several processes can share
the work by `--networks` and `--seeds`, with one record. `--collect` makes the table and the picture of all runs in the
record that have the same dataset, width, epochs and other options. Networks are those of farfield_papers.models and of
papers/benchmarks/zeroed.py and papers/benchmarks/literal.py.
"""

from __future__ import annotations

import argparse
import csv
import importlib
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from training import fit, minutes

import farfield
from farfield.cost import count
from farfield_papers import models

RECIPES = Path(__file__).parent.parent / "recipes"
NETWORKS = ["mobilenet_v2", "kanet_qkv", "kanet_kv", "sanet", "literal.sanet", "zeroed.kanet_qkv", "zeroed.sanet"]
SIZE = {"imagenette": 128, "cifar10": 32}
STRIDES = {"imagenette": (2, 2, 2, 2, 2), "cifar10": (1, 1, 2, 2, 2)}
# Batch of the timed steps, and number of turns of each network.
TIMED_BATCH, TURNS = 16, 9
# Styles of the lines of seeds 1, 2, 3 and on.
LINES = ("-", "--", ":")
# The options that identify the runs of one table; a run is one network and seed of them.
IDENTITY = ("dataset", "width", "epochs", "subset", "batch_size", "learning_rate", "more")
Record = dict[tuple[str, int], dict[str, Any]]


# ---- runs and their record -------------------------------------------------------------------------------------------
def train(arguments: argparse.Namespace, network: str, seed: int) -> None:
    """Run one `farfield fit`, or what is left of it, and add it to the record, unless it is there."""
    if (network, seed) in read(arguments):
        return
    folder = arguments.runs / f"{arguments.name or arguments.dataset}-{network}-{seed}"
    options = {
        "data.root": arguments.root,
        "data.batch_size": arguments.batch_size,
        "data.workers": arguments.workers,
        "model.learning_rate": arguments.learning_rate,
        "model.network": network,
        "model.network.width": arguments.width,
        "trainer.max_epochs": arguments.epochs,
        "seed_everything": seed,
        "data.subset": arguments.subset,
    }
    fit(RECIPES / f"{arguments.dataset}.yaml", folder, options, arguments.more)
    versions = {"farfield": farfield.__version__, "torch": torch.__version__, "python": platform.python_version()}
    line = identity(arguments) | {"network": network, "seed": seed}
    line |= {"accuracies": accuracies(folder), "minutes": round(minutes(folder), 1), "versions": versions}
    line["right"] = classified_rightly(folder, Path(arguments.root) / "val")
    arguments.record.parent.mkdir(parents=True, exist_ok=True)
    with arguments.record.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def identity(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the options that all runs of a table share."""
    return {name: getattr(arguments, name) for name in IDENTITY}


def read(arguments: argparse.Namespace) -> Record:
    """Read the finished runs with these options: (network, seed) -> line."""
    if not arguments.record.exists():
        return {}
    lines = [json.loads(line) for line in arguments.record.read_text(encoding="utf-8").splitlines()]
    wanted = identity(arguments)
    return {(line["network"], line["seed"]): line for line in lines if wanted.items() <= line.items()}


def accuracies(folder: Path) -> list[float]:
    """Read the validation accuracy after each epoch from a run's newest log."""
    (log,) = sorted(folder.glob("version_*/metrics.csv"))[-1:]
    with log.open() as lines:
        rows = list(csv.DictReader(lines))
    return [round(float(row["val/accuracy"]), 5) for row in rows if row.get("val/accuracy")]


def classified_rightly(folder: Path, images: Path) -> str:
    """Classify images in folders by class with a run's last weights; which are right, in the order of their paths.

    Bits, the first image's the highest, in hexadecimal digits: `benchmarks/power.py` compares networks by image.
    """
    (run,) = sorted(folder.glob("version_*"))[-1:]
    table = folder / "predictions.csv"
    options = ["--ckpt_path", str(run / "checkpoints" / "last.ckpt"), "--data.predict", str(images)]
    command = [sys.executable, "-m", "farfield", "predict", "--config", str(run / "config.yaml"), *options]
    subprocess.run([*command, "--predictions.path", str(table)], check=True)
    with table.open(encoding="utf-8") as lines:
        rows = sorted((row["path"], row["class"]) for row in csv.DictReader(lines))
    right = [Path(path).parts[-2] == name for path, name in rows]
    return f"{int(''.join('01'[each] for each in right), 2):0{math.ceil(len(right) / 4)}x}"


# ---- the table and the picture ---------------------------------------------------------------------------------------
def build(name: str, arguments: argparse.Namespace) -> nn.Module:
    """Build the network of a run, untrained."""
    module, _, function = name.rpartition(".")
    maker = getattr(importlib.import_module(module) if module else models, function)
    return maker(num_classes=10, width=arguments.width, strides=STRIDES[arguments.dataset])


def macs(net: nn.Module, side: int) -> int:
    """Count the MACs of one image."""
    return count(net.eval(), (1, 3, side, side)).macs


def times(nets: dict[str, nn.Module], side: int) -> dict[str, float]:
    """Return the time of a training step of each divided by that of the first: medians of steps taken in turn."""
    images, labels = torch.randn(TIMED_BATCH, 3, side, side), torch.randint(10, (TIMED_BATCH,))
    taken: dict[str, list[float]] = {name: [] for name in nets}
    for _ in range(TURNS + 1):  # the first is not counted
        for name, net in nets.items():
            started = time.perf_counter()
            F.cross_entropy(net.train()(images), labels).backward()
            taken[name].append(time.perf_counter() - started)
    medians = {name: statistics.median(each[1:]) for name, each in taken.items()}
    first = next(iter(medians.values()))
    return {name: median / first for name, median in medians.items()}


def table(runs: Mapping[str, list[dict[str, Any]]], arguments: argparse.Namespace) -> str:
    """Format mean and spread of the last epoch's accuracy, and a network's MACs and times, as a Markdown table."""
    side = SIZE[arguments.dataset]
    nets = {name: build(name, arguments) for name in runs}
    step = times(nets, side)
    lines = [
        f"| network | accuracy of each seed, % | mean, % | spread, points | MACs | a step, beside "
        f"`{next(iter(runs))}` | minutes of a core |",
        "|---|---|---|---|---|---|---|",
    ]
    for network, seeds in runs.items():
        last = [100 * line["accuracies"][-1] for line in seeds]
        each = ", ".join(f"{value:.1f}" for value in last)
        spread = f"{max(last) - min(last):.1f}" if len(last) > 1 else "one seed"
        took = ", ".join(f"{line['minutes']:.0f}" for line in seeds)
        entries = [
            f"`{network}`",
            each,
            f"{statistics.mean(last):.1f}",
            spread,
            f"{macs(nets[network], side) / 1e6:.1f} m",
        ]
        lines.append(f"| {' | '.join([*entries, f'{step[network]:.2f}', took])} |")
    return "\n".join(lines)


def picture(runs: Mapping[str, list[dict[str, Any]]], title: str, file: Path) -> None:
    """Draw validation accuracy against epochs, one colour per network, one style of line per seed."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8.4, 4.2), layout="constrained")
    for colour, (network, seeds) in enumerate(runs.items()):
        for index, line in enumerate(seeds):
            percents = [100 * value for value in line["accuracies"]]
            label = network if index == 0 else None
            style = LINES[(line["seed"] - 1) % len(LINES)]
            axes.plot(range(1, len(percents) + 1), percents, style, color=f"C{colour}", label=label, marker=".")
    for seed in sorted({line["seed"] for seeds in runs.values() for line in seeds}):
        axes.plot([], [], LINES[(seed - 1) % len(LINES)], color="gray", label=f"seed {seed}")
    axes.set(xlabel="epoch", ylabel="validation accuracy, %", title=title)
    axes.grid(alpha=0.3)
    figure.legend(loc="outside right upper", frameon=False)
    figure.savefig(file, dpi=150)


def main() -> None:
    """Train what is not trained yet, then print the table and draw the curves of the finished runs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dataset", choices=list(SIZE))
    parser.add_argument("--root", help="folder with train/ and val/, for training")
    parser.add_argument("--networks", nargs="+", default=NETWORKS)
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--width", type=float, default=1.0)
    parser.add_argument("--batch-size", type=int)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--learning-rate", type=float)
    parser.add_argument("--subset", type=int, help="number of training images, stratified; all by default")
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    parser.add_argument("--name", help="name of the runs' folders and the picture; the dataset by default")
    parser.add_argument("--record", type=Path, help="the record; default: NAME.jsonl in the folder of the runs")
    parser.add_argument("--list", action="store_true", help="train nothing, list the runs")
    parser.add_argument("--collect", action="store_true", help="train nothing, print the table")
    parser.add_argument("more", nargs="*", help="further arguments of farfield fit, after --")
    arguments = parser.parse_args()
    here, paths = str(Path(__file__).parent), os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = here if paths is None else os.pathsep.join([here, paths])  # for zeroed and literal
    title = arguments.name or arguments.dataset
    arguments.record = arguments.record or arguments.runs / f"{title}.jsonl"
    # A whole table of one seed before the next.
    runs = [(network, seed) for seed in arguments.seeds for network in arguments.networks]
    if arguments.list:
        record = read(arguments)
        print("\n".join(f"{'done' if run in record else 'to do':6} {run[0]}, seed {run[1]}" for run in runs))
        return
    if not arguments.collect:
        for network, seed in runs:
            train(arguments, network, seed)
    record = read(arguments)
    done = {name: [record[name, seed] for seed in arguments.seeds if (name, seed) in record] for name, _ in runs}
    done = {name: lines for name, lines in done.items() if lines}
    if not done:
        parser.exit(1, f"{parser.prog}: {arguments.record} has no finished run with these options.\n")
    print(table(done, arguments))
    arguments.runs.mkdir(parents=True, exist_ok=True)
    file = arguments.runs / f"{title}.png"
    picture(done, f"{arguments.dataset}, {arguments.epochs} epochs, width {arguments.width}", file)
    print(f"curves: {file}")


if __name__ == "__main__":
    main()
