"""Train the compact networks on one dataset with equal budgets, several seeds each: a table and a picture of curves.

    python benchmarks/train_compact.py imagenette --root data/imagenette --width 0.5 --epochs 10
    python benchmarks/train_compact.py cifar10 --root data/cifar10 --width 0.5 --epochs 10 --subset 10000
    python benchmarks/train_compact.py imagenette --collect          # the table and the picture again, from the logs

Each run is one `farfield fit` of the dataset's recipe in a folder of its own; runs that are finished are not run again.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import subprocess
import sys
import time
from pathlib import Path

RECIPES = Path(__file__).parent.parent / "recipes"
NETWORKS = ["kanet_qkv", "sanet", "attnnet_averaged", "mobilenet_v2"]


def train(arguments: argparse.Namespace, network: str, seed: int, folder: Path) -> None:
    """Run one `farfield fit` and note the minutes it took; a finished run is left as it is."""
    if (folder / "minutes").exists():
        return
    command = [sys.executable, "-m", "farfield.cli", "fit", "--config", str(RECIPES / f"{arguments.dataset}.yaml")]
    options = {
        "data.root": arguments.root,
        "data.batch_size": arguments.batch_size,
        "model.learning_rate": arguments.learning_rate,
        "model.network": network,
        "model.network.width": arguments.width,
        "trainer.max_epochs": arguments.epochs,
        "trainer.default_root_dir": folder,
        "seed_everything": seed,
        "data.subset": arguments.subset,
    }
    for name, value in options.items():
        if value is not None:
            command += [f"--{name}", str(value)]
    started = time.monotonic()
    subprocess.run(command, check=True)
    (folder / "minutes").write_text(f"{(time.monotonic() - started) / 60:.1f}\n")


def curve(folder: Path) -> list[tuple[int, float]]:
    """Read (epoch from 1, validation accuracy) of a run's newest log."""
    (log,) = sorted(folder.glob("version_*/metrics.csv"))[-1:]
    with log.open() as lines:
        rows = list(csv.DictReader(lines))
    return [(int(row["epoch"]) + 1, float(row["val/accuracy"])) for row in rows if row.get("val/accuracy")]


def table(runs: dict[str, list[Path]]) -> str:
    """Lay out mean and spread of the last epoch's accuracy, and the minutes, as Markdown."""
    lines = [
        "| network | accuracy of each seed, % | mean, % | spread, points | minutes a run |",
        "|---|---|---|---|---|",
    ]
    for network, folders in runs.items():
        last = [100 * curve(folder)[-1][1] for folder in folders]
        minutes = [(folder / "minutes").read_text().strip() for folder in folders]
        each = ", ".join(f"{value:.1f}" for value in last)
        spread = f"{max(last) - min(last):.1f}" if len(last) > 1 else "one seed"
        lines.append(f"| `{network}` | {each} | {statistics.mean(last):.1f} | {spread} | {', '.join(minutes)} |")
    return "\n".join(lines)


def picture(runs: dict[str, list[Path]], title: str, file: Path) -> None:
    """Draw validation accuracy against epochs, one colour a network, one line a seed."""
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


def main() -> None:
    """Train what is not trained yet, then print the table and draw the curves of what is finished."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dataset", choices=["imagenette", "cifar10"])
    parser.add_argument("--root", help="folder with train/ and val/")
    parser.add_argument("--networks", nargs="+", default=NETWORKS)
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--width", type=float, default=1.0)
    parser.add_argument("--batch-size", type=int)
    parser.add_argument("--learning-rate", type=float)
    parser.add_argument("--subset", type=int, help="number of training images, stratified; all by default")
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    parser.add_argument("--collect", action="store_true", help="train nothing")
    arguments = parser.parse_args()
    folders = {
        name: [arguments.runs / f"{arguments.dataset}-{name}-{seed}" for seed in arguments.seeds]
        for name in arguments.networks
    }
    if not arguments.collect:
        for index, seed in enumerate(arguments.seeds):  # a whole table of one seed before the next
            for network, runs in folders.items():
                train(arguments, network, seed, runs[index])
    finished = {name: [run for run in runs if (run / "minutes").exists()] for name, runs in folders.items()}
    finished = {name: runs for name, runs in finished.items() if runs}
    print(table(finished))
    file = arguments.runs / f"{arguments.dataset}.png"
    picture(finished, f"{arguments.dataset}, {arguments.epochs} epochs, width {arguments.width}", file)
    print(f"curves: {file}")


if __name__ == "__main__":
    main()
