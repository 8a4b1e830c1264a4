"""Train DeepLab on CamVid with different output layers, equal budgets and several seeds: a table and a picture.

    python papers/benchmarks/segmentation.py --root data/camvid/VOCdevkit/CamVid --weights model.safetensors
    python papers/benchmarks/segmentation.py --outputs aspp softmax --seeds 1
    python papers/benchmarks/segmentation.py --collect          # the table and the picture again, from the logs

Each run is one `farfield fit` of recipes/camvid.yaml in a folder of its own. Finished runs are not run again, and a run
that was killed resumes from its last epoch. The table has the last epoch of finished runs, and not the best one, which
would be selected on the same images that it is measured on.
"""

from __future__ import annotations

import argparse
import csv
import statistics
from pathlib import Path

from training import fit, minutes

from farfield_papers import models

RECIPE = Path(__file__).parent.parent / "recipes" / "camvid.yaml"
OUTPUTS = ["plain", "averaged", "siamese", "kronecker_kv", "kronecker_qkv", "factorized_gaussian"]
# Below this mean IoU a network is marked as under-trained.
FLOOR = 0.35


def train(arguments: argparse.Namespace, output: str, seed: int, folder: Path) -> None:
    """Run one `farfield fit`, or what is left of it; leave a finished run as it is."""
    if (folder / "finished").exists():
        return
    options = {
        "model.network.output": output,
        "model.network.weights": arguments.weights,
        "data.root": arguments.root,
        "data.workers": arguments.workers,
        "trainer.max_epochs": arguments.epochs,
        "seed_everything": seed,
    }
    fit(RECIPE, folder, options)
    (folder / "finished").touch()


def curve(folder: Path) -> list[tuple[int, float, float]]:
    """Read (epoch from 1, mean IoU, pixel accuracy) of a run's newest log."""
    (log,) = sorted(folder.glob("version_*/metrics.csv"))[-1:]
    with log.open() as lines:
        rows = [row for row in csv.DictReader(lines) if row.get("val/miou")]
    return [(int(row["epoch"]) + 1, float(row["val/miou"]), float(row["val/accuracy"])) for row in rows]


def parameters(output: str) -> int:
    """Count the parameters of an output layer in the recipe's network."""
    net = models.deeplab_compact("mobilenet_v2", output, num_classes=11, width=0.5, output_stride=16)
    return sum(parameter.numel() for parameter in net.head.parameters())


def table(runs: dict[str, list[Path]]) -> str:
    """Format mean and spread of the last epoch's mean IoU, and the minutes, as a Markdown table."""
    lines = [
        "| output layer | its parameters | mean IoU of each seed | mean | spread | pixel accuracy | core minutes |",
        "|---|---|---|---|---|---|---|",
    ]
    for output, folders in runs.items():
        last = [curve(folder)[-1] for folder in folders]
        overlaps, accuracies = [miou for _, miou, _ in last], [accuracy for _, _, accuracy in last]
        mean, spread = statistics.mean(overlaps), max(overlaps) - min(overlaps)
        name = f"`{output}`" + ("" if mean >= FLOOR else " (under-trained)")
        entries = [name, f"{parameters(output):,}", ", ".join(f"{miou:.3f}" for miou in overlaps), f"{mean:.3f}"]
        entries += [f"{spread:.3f}" if len(last) > 1 else "one seed", f"{statistics.mean(accuracies):.3f}"]
        entries += [", ".join(f"{minutes(folder):.1f}" for folder in folders)]
        lines.append(f"| {' | '.join(entries)} |")
    return "\n".join(lines)


def picture(runs: dict[str, list[Path]], file: Path) -> None:
    """Draw validation mean IoU against epochs, one colour per output layer, one line per seed."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7.6, 4.0), layout="constrained")
    for colour, (output, folders) in enumerate(runs.items()):
        for index, folder in enumerate(folders):
            epochs, overlaps, _ = zip(*curve(folder), strict=True)
            label = output if index == 0 else None
            axes.plot(epochs, overlaps, color=f"C{colour}", label=label, marker=".")
    axes.set(xlabel="epoch", ylabel="validation mean IoU", title="CamVid, MobileNetV2 0.5 at 240x180 pixels")
    axes.grid(alpha=0.3)
    figure.legend(frameon=False, loc="outside right upper")
    figure.savefig(file, dpi=150)


def main() -> None:
    """Train what is not trained yet, then print the table and draw the curves of the finished runs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", help="folder of CamVid with JPEGImages, SegmentationClass and ImageSets")
    parser.add_argument(
        "--weights", help="weights of a classifier trained by recipes/imagenette.yaml; random if not given"
    )
    parser.add_argument("--outputs", nargs="+", default=OUTPUTS)
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--workers", type=int)
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    parser.add_argument("--collect", action="store_true", help="train nothing")
    arguments = parser.parse_args()
    folders = {
        name: [arguments.runs / f"camvid-{name}-{seed}" for seed in arguments.seeds] for name in arguments.outputs
    }
    if not arguments.collect:
        for index, seed in enumerate(arguments.seeds):  # a whole table of one seed before the next
            for output, runs in folders.items():
                train(arguments, output, seed, runs[index])
    finished = {name: [run for run in runs if (run / "finished").exists()] for name, runs in folders.items()}
    finished = {name: runs for name, runs in finished.items() if runs}
    print(table(finished))
    file = arguments.runs / "camvid.png"
    picture(finished, file)
    print(f"curves: {file}")


if __name__ == "__main__":
    main()
