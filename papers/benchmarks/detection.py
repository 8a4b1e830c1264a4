"""Train a small Mask R-CNN on nuclei and balloons, with attention at different places: a table and a picture.

    python papers/benchmarks/detection.py --dsb2018 data/dsb2018 --balloon data/balloon
    python papers/benchmarks/detection.py --dsb2018 data/dsb2018 --places none fpn_all --seeds 1
    python papers/benchmarks/detection.py --dsb2018 data/dsb2018 --balloon data/balloon --collect

Each run is one `farfield fit` of recipes/dsb2018.yaml or balloon.yaml in a folder of its own. Finished runs are not run
again, and a run that was killed resumes from its last epoch. The table has the last epoch of finished runs, and not the
best one, which would be selected on the same images that it is measured on.
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from training import fit, minutes

from farfield_papers import models
from farfield_papers.data.detect import read_image_tensor
from farfield_papers.data.readers.coco import decode_masks
from farfield_papers.tasks.detect import list_entries
from farfield_papers.tasks.writers.detections import draw_detections

RECIPES = Path(__file__).parent.parent / "recipes"
SETS = ("dsb2018", "balloon")
PLACES = ["none", "fpn_all"]
# Below this average precision of boxes a network is marked as under-trained.
FLOOR = 0.2
# The images of the picture, by their index among the validation images.
SHOWN = (0, 5, 11)


def train(arguments: argparse.Namespace, name: str, place: str, seed: int, folder: Path) -> None:
    """Run one `farfield fit`, or what is left of it; leave a finished run as it is."""
    if (folder / "finished").exists():
        return
    options = {
        "model.network.attention": json.dumps([] if place == "none" else place.split("+")),
        "data.root": getattr(arguments, name),
        "data.workers": arguments.workers,
        "trainer.max_epochs": arguments.epochs,
        "seed_everything": seed,
    }
    fit(RECIPES / f"{name}.yaml", folder, options)
    # Lightning also ends with status 0 when it is stopped before the last epoch is measured.
    if measured(folder):
        (folder / "finished").touch()


def measured(folder: Path) -> list[dict[str, str]]:
    """Read the epochs of a run that were measured."""
    (log,) = sorted(folder.glob("version_*/metrics.csv"))[-1:]
    with log.open() as lines:
        return [row for row in csv.DictReader(lines) if row.get("val/box_ap")]


def last(folder: Path) -> dict[str, float]:
    """Read the metrics of the last epoch, and the core minutes."""
    row = measured(folder)[-1]
    return {name: float(row[f"val/{name}"]) for name in ("box_ap", "mask_ap", "box_ap50")} | {
        "minutes": minutes(folder)
    }


def table(runs: dict[tuple[str, str], list[Path]]) -> str:
    """Lay out average precision of boxes and masks in percent, and the minutes, as Markdown."""
    lines = [
        "| images | attention | parameters | box AP of each seed | mean | mask AP of each seed | mean | box AP50 "
        "| core minutes |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for (name, place), folders in runs.items():
        results = [last(folder) for folder in folders]
        boxes, masks, loose = ([100 * each[key] for each in results] for key in ("box_ap", "mask_ap", "box_ap50"))
        net = models.from_pretrained(next(folders[0].glob("version_*")))
        mean = statistics.mean(boxes)
        entries = [name, place + ("" if mean >= 100 * FLOOR else " (under-trained)")]
        entries += [f"{sum(weight.numel() for weight in net.parameters()):,}"]
        entries += [", ".join(f"{value:.1f}" for value in boxes), f"{mean:.1f}"]
        entries += [", ".join(f"{value:.1f}" for value in masks), f"{statistics.mean(masks):.1f}"]
        entries += [f"{statistics.mean(loose):.1f}", ", ".join(f"{each['minutes']:.1f}" for each in results)]
        lines.append(f"| {' | '.join(entries)} |")
    return "\n".join(lines)


def as_detections(objects: list[dict[str, Any]], masks: Tensor) -> dict[str, Tensor]:
    """Convert annotations to the detections of a network, with scores of 1."""
    boxes = torch.tensor([each["bbox"] for each in objects], dtype=torch.float32).reshape(-1, 4)
    boxes[:, 2:] += boxes[:, :2]
    sure = torch.ones(len(objects))
    return {"boxes": boxes, "labels": sure.long(), "scores": sure, "masks": masks}


def picture(root: Path, runs: dict[str, Path], file: Path) -> None:
    """Draw some validation images: the annotations, and the detections of each network."""
    import matplotlib.pyplot as plt

    annotations = json.loads((root / "annotations" / "instances_val.json").read_text())
    images = [annotations["images"][place] for place in SHOWN if place < len(annotations["images"])]
    nets = {place: models.from_pretrained(next(folder.glob("version_*"))) for place, folder in runs.items()}
    figure, grid = plt.subplots(len(images), 1 + len(nets), squeeze=False, layout="constrained")
    figure.set_size_inches(3 * (1 + len(nets)), 3 * len(images))
    for row, image in zip(grid, images, strict=True):
        path = root / "val" / image["file_name"]
        there = [each for each in annotations["annotations"] if each["image_id"] == image["id"]]
        masks = decode_masks(there, image["height"], image["width"])[:, None].float()
        panels = {"annotated": list_entries(as_detections(there, masks))}
        with torch.no_grad():
            for place, net in nets.items():
                panels[f"detected, attention: {place}"] = list_entries(net([read_image_tensor(path).float() / 255])[0])
        for axes, (title, entries) in zip(row, panels.items(), strict=True):
            axes.imshow(draw_detections(str(path), entries, ["nucleus"], 0.5).permute(1, 2, 0))
            axes.set_title(title, fontsize=9)
            axes.axis("off")
    figure.savefig(file, dpi=80)


def main() -> None:
    """Train what is not trained yet, then print the table and draw the detections of the finished runs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dsb2018", type=Path, help="folder of the nuclei; skipped if not given")
    parser.add_argument("--balloon", type=Path, help="folder of the balloons; skipped if not given")
    parser.add_argument("--places", nargs="+", default=PLACES, help="none, fpn_all, fpn1, fpn_all+res4 and so on")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--workers", type=int)
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    parser.add_argument("--collect", action="store_true", help="train nothing")
    arguments = parser.parse_args()
    folders = {
        (name, place): [arguments.runs / f"{name}-{place}-{seed}" for seed in arguments.seeds]
        for name in SETS
        if getattr(arguments, name)
        for place in arguments.places
    }
    if not arguments.collect:
        for index, seed in enumerate(arguments.seeds):  # a whole table of one seed before the next
            for (name, place), runs in folders.items():
                train(arguments, name, place, seed, runs[index])
    finished = {key: [run for run in runs if (run / "finished").exists()] for key, runs in folders.items()}
    finished = {key: runs for key, runs in finished.items() if runs}
    print(table(finished))
    nuclei = {place: runs[0] for (name, place), runs in finished.items() if name == "dsb2018"}
    if nuclei:
        file = arguments.runs / "nuclei.png"
        picture(arguments.dsb2018, nuclei, file)
        print(f"picture: {file}")


if __name__ == "__main__":
    main()
