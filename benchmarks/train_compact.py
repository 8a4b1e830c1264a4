"""Train the compact networks on one dataset with equal budgets, several seeds each: a table and a picture of curves.

    python benchmarks/train_compact.py cifar10 --root data/cifar10 --width 0.5 --epochs 15 --subset 20000
    python benchmarks/train_compact.py imagenette --root data/imagenette --width 0.5 --epochs 15
    python benchmarks/train_compact.py imagenette --list             # the runs, and which are done
    python benchmarks/train_compact.py imagenette --collect          # the table and the picture again, from the logs

Each run is one `farfield fit` of the dataset's recipe in a folder of its own; finished runs are not run again, and a
killed run resumes. Networks are those of farfield.models and those of benchmarks/zeroed.py.
"""

from __future__ import annotations

import argparse
import csv
import importlib
import os
import statistics
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from training import fit, minutes

from farfield import models
from farfield.cost import count

RECIPES = Path(__file__).parent.parent / "recipes"
NETWORKS = ["mobilenet_v2", "kanet_qkv", "kanet_kv", "sanet", "zeroed.kanet_qkv", "zeroed.sanet"]
SIZE = {"imagenette": 128, "cifar10": 32}
STRIDES = {"imagenette": (2, 2, 2, 2, 2), "cifar10": (1, 1, 2, 2, 2)}
# Batch of the timed steps, and number of turns of each network.
TIMED_BATCH, TURNS = 16, 9


def train(arguments: argparse.Namespace, network: str, seed: int, folder: Path) -> None:
    """Run one `farfield fit`, or what is left of it; leave a finished run unchanged."""
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
    if not finished(folder):
        fit(RECIPES / f"{arguments.dataset}.yaml", folder, options, arguments.more)
        (folder / "finished").touch()


def finished(folder: Path) -> bool:
    """Whether a run is finished."""
    return (folder / "finished").exists()


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


def curve(folder: Path) -> list[tuple[int, float]]:
    """Read (epoch from 1, validation accuracy) of a run's newest log."""
    (log,) = sorted(folder.glob("version_*/metrics.csv"))[-1:]
    with log.open() as lines:
        rows = list(csv.DictReader(lines))
    return [(int(row["epoch"]) + 1, float(row["val/accuracy"])) for row in rows if row.get("val/accuracy")]


def table(runs: dict[str, list[Path]], arguments: argparse.Namespace) -> str:
    """Format mean and spread of the last epoch's accuracy, and a network's MACs and times, as a Markdown table."""
    side = SIZE[arguments.dataset]
    nets = {name: build(name, arguments) for name in runs}
    step = times(nets, side)
    lines = [
        f"| network | accuracy of each seed, % | mean, % | spread, points | MACs | a step, beside "
        f"`{next(iter(runs))}` | minutes of a core |",
        "|---|---|---|---|---|---|---|",
    ]
    for network, folders in runs.items():
        last = [100 * curve(folder)[-1][1] for folder in folders]
        each = ", ".join(f"{value:.1f}" for value in last)
        spread = f"{max(last) - min(last):.1f}" if len(last) > 1 else "one seed"
        took = ", ".join(f"{minutes(folder):.0f}" for folder in folders)
        entries = [
            f"`{network}`",
            each,
            f"{statistics.mean(last):.1f}",
            spread,
            f"{macs(nets[network], side) / 1e6:.1f} m",
        ]
        lines.append(f"| {' | '.join([*entries, f'{step[network]:.2f}', took])} |")
    return "\n".join(lines)


def picture(runs: dict[str, list[Path]], title: str, file: Path) -> None:
    """Draw validation accuracy against epochs, one colour per network, one line per seed."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6.4, 4.0), layout="constrained")
    for colour, (network, folders) in enumerate(runs.items()):
        for index, folder in enumerate(folders):
            epochs, accuracies = zip(*curve(folder), strict=True)
            label = network if index == 0 else None
            axes.plot(epochs, [100 * value for value in accuracies], color=f"C{colour}", label=label, marker=".")
    axes.set(xlabel="epoch", ylabel="validation accuracy, %", title=title)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(file, dpi=150)


def list_runs(folders: dict[str, list[Path]]) -> str:
    """Format the list of all runs, with those that are finished marked."""
    runs = [run for seeds in zip(*folders.values(), strict=True) for run in seeds]
    return "\n".join(f"{'done' if finished(run) else 'to do':6} {run}" for run in runs)


def main() -> None:
    """Train what is not trained yet, then print the table and draw the curves of the finished runs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dataset", choices=list(SIZE))
    parser.add_argument("--root", help="folder with train/ and val/")
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
    parser.add_argument("--list", action="store_true", help="train nothing, list the runs")
    parser.add_argument("--collect", action="store_true", help="train nothing, print the table")
    parser.add_argument("more", nargs="*", help="further arguments of farfield fit, after --")
    arguments = parser.parse_args()
    here, paths = str(Path(__file__).parent), os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = here if paths is None else os.pathsep.join([here, paths])  # for zeroed
    title = arguments.name or arguments.dataset
    folders = {
        name: [arguments.runs / f"{title}-{name}-{seed}" for seed in arguments.seeds] for name in arguments.networks
    }
    if arguments.list:
        print(list_runs(folders))
        return
    if not arguments.collect:
        for index, seed in enumerate(arguments.seeds):  # a whole table of one seed before the next
            for network, runs in folders.items():
                train(arguments, network, seed, runs[index])
    done = {name: [run for run in runs if finished(run)] for name, runs in folders.items()}
    done = {name: runs for name, runs in done.items() if runs}
    print(table(done, arguments))
    file = arguments.runs / f"{title}.png"
    picture(done, f"{arguments.dataset}, {arguments.epochs} epochs, width {arguments.width}", file)
    print(f"curves: {file}")


if __name__ == "__main__":
    main()
