"""Train small SAGANs on CIFAR-10 with and without attention, equal budgets: a table, and samples as a picture.

    python papers/benchmarks/gan.py train --root data/cifar10 --classifier runs/cifar10-mobilenet_v2-1/version_0
    python papers/benchmarks/gan.py table                                 # the table again, from what is finished
    python papers/benchmarks/gan.py picture --picture samples.png         # samples of each, one class per column

Each run is one `farfield fit` of recipes/sagan_cifar10.yaml in a folder of its own; a finished run is not run again,
and a killed one resumes. There is no Inception network here, so the metrics are not FID but a kernel distance
(torchmetrics) between the features of samples and of held-out images in a small classifier of CIFAR-10, and the share
of samples that the classifier assigns to the class they were drawn for. Both depend on the classifier: compare them
only within one table.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from training import processor_minutes

RECIPE = Path(__file__).parent.parent / "recipes" / "sagan_cifar10.yaml"
OPERATORS = ["softmax_pooled", "none", "factorized_gaussian"]
# Number of subsets over which the kernel distance is averaged, each a quarter of the samples.
SUBSETS = 50
# Number of rows of samples in a picture.
ROWS = 6


def run(command: str, *options: str) -> None:
    """Run a command of farfield; its output goes to the log."""
    subprocess.run([sys.executable, "-m", "farfield", command, *options], check=True)


def train(folder: Path, root: Path, classifier: Path, samples: int, options: list[str]) -> None:
    """Fit one network, draw samples, and write the metrics and the core minutes."""
    result = folder / "result.json"
    if result.exists():
        return
    operator, seed = folder.name.rsplit("-", 1)
    common = ["--config", str(RECIPE), "--data.root", str(root), "--trainer.default_root_dir", str(folder)]
    common += ["--model.network.operator", "null" if operator == "none" else operator]
    resumed = ["--ckpt_path", "last"] if list(folder.glob("version_*/checkpoints/last.ckpt")) else []
    before = processor_minutes()
    run("fit", *common, *options, "--seed_everything", seed, *resumed)
    # The minutes of a resumed run are not known: only those of its last part are measured.
    spent = {} if resumed else {"processor_minutes": round(processor_minutes() - before, 1)}
    drawn = folder / "samples"
    if not drawn.exists():
        drawing = ["--data.samples", str(samples), "--predictions.path", str(drawn)]
        run("predict", *common, *options, *drawing, "--ckpt_path", "last")
    steps = torch.load(next(folder.glob("version_*/checkpoints/last.ckpt")), weights_only=True)["global_step"]
    values = measure(drawn, root, classifier)
    # Steps of both optimizers are counted.
    result.write_text(json.dumps({"steps": steps // 2, **spent, **values}, indent=2) + "\n")


class Features(nn.Module):
    """A classifier's pooled features of `uint8` images, normalised as in its training."""

    def __init__(self, classifier: Path) -> None:
        super().__init__()
        from farfield_papers import models

        net: Any = models.from_pretrained(classifier)
        self.head, self.body = net.classifier, net
        net.reset_classifier(0)

    def forward(self, images: Tensor) -> Tensor:
        """Return the features, computed in parts to save memory."""
        from farfield_papers.data.classify import IMAGENET

        mean, deviation = (torch.tensor(colour)[:, None, None] for colour in IMAGENET)
        with torch.no_grad():
            parts = [self.body((part / 255 - mean) / deviation) for part in images.split(250)]
        return torch.cat(parts)


def measure(drawn: Path, root: Path, classifier: Path) -> dict[str, float]:
    """Compare samples with held-out images: the kernel distance, and the share classified as they were drawn."""
    from torchmetrics.image.kid import KernelInceptionDistance

    features, random = Features(classifier), np.random.default_rng(0)
    classes = sorted(path.name for path in (root / "val").iterdir())
    samples = images_of(sorted(drawn.glob("[0-9]*.png")))
    held, trained = (
        images_of([*random.choice(sorted(root.glob(f"{part}/*/*")), len(samples), replace=False)])
        for part in ("val", "train")
    )
    values = {}
    for name, images in {"distance": samples, "distance_of_training_images": trained}.items():
        torch.manual_seed(0)
        metric = KernelInceptionDistance(feature=features, subsets=SUBSETS, subset_size=len(samples) // 4)
        metric.update(held, real=True)
        metric.update(images, real=False)
        mean, spread = metric.compute()
        values |= {name: round(float(mean), 4), f"{name}_spread": round(float(spread), 4)}
    with torch.no_grad():
        predicted = features.head(features(samples)).argmax(1)
    labels = torch.arange(len(samples)) % len(classes)
    return values | {"recognised": round(float((predicted == labels).float().mean()), 4)}


def images_of(paths: list[Path]) -> Tensor:
    """Read images of one size."""
    return torch.stack([torch.from_numpy(np.array(Image.open(path).convert("RGB"))).permute(2, 0, 1) for path in paths])


def table(results: dict[str, dict[str, float]]) -> str:
    """Format the metrics as a Markdown table."""
    lines = [
        "| attention | steps | kernel distance | assigned to its class, % | minutes of a core |",
        "|---|---|---|---|---|",
    ]
    for name, result in results.items():
        distance = f"{result['distance']:.4f} ± {result['distance_spread']:.4f}"
        minutes = result.get("processor_minutes", "not counted")
        lines.append(f"| `{name}` | {result['steps']} | {distance} | {100 * result['recognised']:.1f} | {minutes} |")
    any_of = next(iter(results.values()), None)
    if any_of:
        distance = "{distance_of_training_images:.4f} ± {distance_of_training_images_spread:.4f}".format(**any_of)
        lines.append(f"| training images | | {distance} | | |")
    return "\n".join(lines)


def picture(runs: dict[str, Path], file: Path) -> None:
    """Draw the first samples of each run, not selected, one class per column."""
    import matplotlib.pyplot as plt

    from farfield_papers.tasks.generate import arrange_images

    figure, axes = plt.subplots(1, len(runs), figsize=(4.2 * len(runs), 3), squeeze=False, layout="constrained")
    for place, (name, folder) in zip(axes[0], runs.items(), strict=True):
        paths = sorted((folder / "samples").glob("[0-9]*.png"))[: ROWS * 10]
        place.imshow(arrange_images(images_of(paths), 10).numpy(), interpolation="nearest")
        place.set_title(name.replace("-", ", seed "), fontsize=9)
        place.axis("off")
    figure.savefig(file, dpi=130)


def main() -> None:
    """Train, tabulate or draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["train", "table", "picture"])
    parser.add_argument("--root", type=Path, default=Path("data/cifar10"))
    parser.add_argument("--classifier", type=Path, help="folder of a classifier of the same images (train)")
    parser.add_argument("--runs", type=Path, default=Path("runs/gan"))
    parser.add_argument("--operators", nargs="+", default=OPERATORS)
    parser.add_argument("--seeds", nargs="+", type=int, default=[1])
    parser.add_argument("--samples", type=int, default=2000, help="number of samples that are measured (train)")
    parser.add_argument("--picture", type=Path, default=Path("samples.png"))
    arguments, options = parser.parse_known_args()
    # A whole table of one seed before the next.
    folders = [arguments.runs / f"{name}-{seed}" for seed in arguments.seeds for name in arguments.operators]
    if arguments.action == "train":
        for folder in folders:
            train(folder, arguments.root, arguments.classifier, arguments.samples, options)
    finished = {folder.name: folder for folder in folders if (folder / "result.json").exists()}
    if arguments.action == "picture":
        picture(finished, arguments.picture)
    else:
        print(table({key: json.loads((folder / "result.json").read_text()) for key, folder in finished.items()}))


if __name__ == "__main__":
    main()
