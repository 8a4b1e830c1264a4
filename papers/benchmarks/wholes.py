"""What training on wholes is worth: patches, patches with constant statistics, and wholes, at equal positions seen.

    python papers/benchmarks/wholes.py --root data --out benchmarks/records/wholes.jsonl
    python papers/benchmarks/wholes.py --out benchmarks/records/wholes.jsonl --collect

Two tasks: classes of CamVid's images at 352 × 480, and the restoration of stacks of 32 × 128 × 128 with simulated low
light (`care3d/README.txt` has the formula) in four volumes, whose last planes are held out. The network is MONAI's
DynUNet with instance norms, alone and with attention behind its bottleneck (`attention_for`). Each step sees as many
positions as a whole has, in any way of training:

- patches: one whole cut into random patches, each of another image, with the statistics of each patch;
- frozen: the same, and for the second half of the steps with constants (`freeze_statistics` over 64 patches);
- whole: one image, with its own statistics. Gradients of the first step are compared with those of `WholeNetwork`
  in tiles; the others are untiled, as these sizes have room and the gradients are the same.

What is held out is predicted whole, in MONAI's sliding window of the patch's size with half an overlap, and frozen.
Optimizer, rate, steps and flips are equal in all. A run is a line of JSON; finished runs are not run again.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tifffile
import torch
import torch.nn.functional as F
from monai.inferers import sliding_window_inference
from monai.networks.nets import DynUNet
from PIL import Image
from torch import Tensor, nn

from farfield import WholeNetwork, insert
from farfield.nn import attention_for
from farfield.streaming import freeze_statistics

NETWORKS, TRAININGS, PREDICTIONS = (
    ("norms", "attention"),
    ("patches", "frozen", "whole"),
    ("whole", "windows", "frozen"),
)
CLASSES, VOID = 11, 255
Pair = tuple[Tensor, Tensor]


class Task(NamedTuple):
    """What is learned, and how a result is scored."""

    train: Sequence[Pair]
    held: Sequence[Pair]
    size: tuple[int, ...]
    patch: tuple[int, ...]
    channels: tuple[int, int]
    filters: tuple[int, ...]
    loss: Callable[[Tensor, Tensor], Tensor]
    score: Callable[[Sequence[Pair]], dict[str, float]]


# ---- tasks -----------------------------------------------------------------------------------------------------------
class CamVid(Sequence[Pair]):
    """Images and classes of one split, cut to a height of 352 about their middle."""

    def __init__(self, root: Path, split: str) -> None:
        self.root = root / "VOCdevkit/CamVid"
        self.names = (self.root / f"ImageSets/Segmentation/{split}.txt").read_text(encoding="utf-8").split()

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int) -> Pair:  # type: ignore[override]
        name = self.names[index]
        image = np.asarray(Image.open(self.root / f"JPEGImages/{name}.jpg"), np.float32)[4:356]
        classes = np.asarray(Image.open(self.root / f"SegmentationClass/{name}.png"), np.int64)[4:356]
        return torch.from_numpy(image).permute(2, 0, 1) / 127.5 - 1, torch.from_numpy(classes)


def score_classes(results: Sequence[Pair]) -> dict[str, float]:
    """Return the accuracy over positions, and the mean intersection over union of the classes."""
    counts = torch.zeros(CLASSES, CLASSES)
    for scores, classes in results:
        seen = classes != VOID
        places = classes[seen] * CLASSES + scores.argmax(0)[seen]
        counts += places.bincount(minlength=CLASSES**2).view(CLASSES, CLASSES)
    right = counts.diagonal()
    union = counts.sum(0) + counts.sum(1) - right
    return {"accuracy": float(right.sum() / counts.sum()), "iou": float((right / union.clamp_min(1)).mean())}


def darken(volume: np.ndarray, peak: float, random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Return a noisy and a clean stack, in units of the range between two percentiles of the clean one."""
    low, high = np.percentile(volume, (1, 99.9))
    clean = np.clip((volume - low) / (high - low), 0, None)
    noisy = (random.poisson(clean * peak + 0.3) - 0.3) / peak + random.normal(0, 3 / 160, clean.shape)
    return noisy.astype(np.float32), clean.astype(np.float32)


def read_stacks(root: Path, size: tuple[int, ...], held: bool) -> list[Pair]:
    """Return stacks of the first planes of each volume, or of its last ones, noisy and clean."""
    random, pairs = np.random.default_rng(1 if held else 0), []
    for path in sorted((root / "care3d/volumes").glob("*.tif")):
        volume = tifffile.imread(path).astype(np.float32)
        planes = size[0]
        if any(side < least for side, least in zip(volume.shape, (2 * planes, *size[1:]), strict=True)):
            continue
        # Rows of planes that are held out are the last; of the others none comes nearer than four planes.
        starts = [len(volume) - planes] if held else list(range(0, len(volume) - 2 * planes - 3, planes // 2)) or [0]
        for start, peak in product(starts, (40, 15, 5)):
            noisy, clean = darken(volume[start : start + planes], peak, random)
            rows = (
                [0, volume.shape[1] - size[1]]
                if held
                else random.integers(0, np.subtract(volume.shape, size)[1] + 1, 2)
            )
            columns = [0, volume.shape[2] - size[2]] if held else random.integers(0, volume.shape[2] - size[2] + 1, 2)
            for row, column in zip(rows, columns, strict=True):
                cut = (slice(None), slice(row, row + size[1]), slice(column, column + size[2]))
                pairs.append((torch.from_numpy(noisy[cut].copy())[None], torch.from_numpy(clean[cut].copy())[None]))
    return pairs


def score_stacks(results: Sequence[Pair]) -> dict[str, float]:
    """Return the mean of the ratio of peak signal to noise, in dB, over stacks; the peak is 1."""
    errors = [float(F.mse_loss(restored, clean)) for restored, clean in results]
    return {"psnr": statistics.fmean(-10 * np.log10(error) for error in errors)}


def make_task(name: str, root: Path) -> Task:
    """Return a task with its data."""
    if name == "classes":
        images = CamVid(root, "val")
        return Task(
            train=CamVid(root, "train"),
            # Neighbours in the video are nearly equal.
            held=[images[index] for index in range(0, len(images), 3)],
            size=(352, 480),
            patch=(88, 120),
            channels=(3, CLASSES),
            filters=(16, 32, 64, 96),
            loss=lambda scores, classes: F.cross_entropy(scores, classes, ignore_index=VOID),
            score=score_classes,
        )
    size = (32, 128, 128)
    return Task(
        train=read_stacks(root, size, held=False),
        held=read_stacks(root, size, held=True),
        size=size,
        patch=(16, 64, 64),
        channels=(1, 1),
        filters=(8, 16, 32),
        loss=F.mse_loss,
        score=score_stacks,
    )


# ---- networks --------------------------------------------------------------------------------------------------------
def make_network(task: Task, kind: str) -> nn.Module:
    """Return nnU-Net's network in MONAI's form, with attention or without."""
    sizes, dims = len(task.filters), len(task.size)
    network = DynUNet(
        dims,
        *task.channels,
        kernel_size=[3] * sizes,
        strides=[1] + [2] * (sizes - 1),
        upsample_kernel_size=[2] * (sizes - 1),
        filters=task.filters,
        norm_name=("instance", {"affine": True}),
    )
    if kind == "attention":
        insert(network, "bottleneck", attention_for, example=torch.zeros(1, task.channels[0], *task.patch))
    return network


# ---- training --------------------------------------------------------------------------------------------------------
def draw(pairs: Sequence[Pair], size: tuple[int, ...], number: int, random: np.random.Generator) -> Pair:
    """Return boxes of a size, each of another pair, at random places, half of them flipped along the last axis."""
    boxes = []
    for index in random.choice(len(pairs), number, replace=number > len(pairs)):
        pair = pairs[index]
        corner = [random.integers(have - side + 1) for have, side in zip(pair[0].shape[1:], size, strict=True)]
        cut = (..., *(slice(start, start + side) for start, side in zip(corner, size, strict=True)))
        flip = random.integers(2)
        boxes.append([each[cut].flip(-1) if flip else each[cut] for each in pair])
    grids, wanted = zip(*boxes, strict=True)
    return torch.stack(grids), torch.stack(wanted)


def compare(network: nn.Module, task: Task, batch: Pair) -> float:
    """Return how far gradients in tiles are from the untiled ones in float64, relative to the largest number."""
    network, found = copy.deepcopy(network).double(), []
    grid, wanted = batch[0].double(), batch[1] if task.channels[1] == CLASSES else batch[1].double()
    for each in (network, WholeNetwork(network, tile=tuple(side // 2 for side in task.size))):
        network.zero_grad()
        task.loss(each(grid), wanted).backward()
        found.append([value.grad.clone() for value in network.parameters() if value.grad is not None])
    largest = max(float(value.abs().max()) for value in found[0])
    return max(float((one - other).abs().max()) for one, other in zip(*found, strict=True)) / largest


def train(task: Task, network: nn.Module, way: str, steps: int, seed: int) -> tuple[nn.Module, float]:
    """Train a network; return what is to be predicted with, and how far the gradients of tiles were."""
    random, off = np.random.default_rng(seed), 0.0
    size = task.size if way == "whole" else task.patch
    number = int(np.prod(task.size) // np.prod(size))
    optimizer = torch.optim.AdamW(network.parameters(), 2e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps, pct_start=0.1)
    for step in range(steps):
        batch = draw(task.train, size, number, random)
        if way == "frozen" and step == steps // 2:
            frozen = freeze_statistics(network.eval(), draw(task.train, size, 64, random)[0])
            # The copy's parameters are trained on, each with what the optimizer knows of it.
            for old, new in zip(network.parameters(), frozen.parameters(), strict=True):
                optimizer.state[new] = optimizer.state.pop(old)
            optimizer.param_groups[0]["params"] = list(frozen.parameters())
            network = frozen.train()
        if way == "whole" and step == 0:
            off = compare(network, task, batch)
        optimizer.zero_grad()
        task.loss(network(batch[0]), batch[1]).backward()
        optimizer.step()
        schedule.step()
    return network.eval(), off


def predict(task: Task, network: nn.Module, way: str) -> dict[str, float]:
    """Return the scores of what is held out."""

    def respond(grid: Tensor) -> Any:
        if way == "windows":
            return sliding_window_inference(grid, task.patch, 4, network, overlap=0.5)
        return network(grid)

    with torch.inference_mode():
        return task.score([(respond(grid[None])[0], wanted) for grid, wanted in task.held])


def run(task: Task, name: str, kind: str, way: str, seed: int, steps: int) -> dict[str, object]:
    """Train once, and predict in all ways."""
    torch.manual_seed(seed)
    start = time.process_time()
    network, off = train(task, make_network(task, kind), way, steps, seed)
    row: dict[str, object] = {"task": name, "network": kind, "trained": way, "seed": seed, "steps": steps}
    row |= {"seconds": round(time.process_time() - start, 1), "off": off}
    patches = draw(task.train, task.patch, 64, np.random.default_rng(0))[0]
    for prediction in PREDICTIONS:
        if way == "frozen":
            if prediction == "frozen":
                row[prediction] = predict(task, network, "whole")
            continue
        each = freeze_statistics(network, patches) if prediction == "frozen" else network
        row[prediction] = predict(task, each, prediction)
    return row


def collect(path: Path) -> None:
    """Print means over seeds, and their deviations, as Markdown."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    print("| task | network | trained on | predicted | seeds | score | CPU seconds |\n|---|---|---|---|---|---|---|")
    for task, kind, way, prediction in product(("classes", "stacks"), NETWORKS, TRAININGS, PREDICTIONS):
        found = [each for each in rows if (each["task"], each["network"], each["trained"]) == (task, kind, way)]
        found = [each for each in found if prediction in each]
        if not found:
            continue
        cells = []
        for measure in found[0][prediction]:
            values = [each[prediction][measure] for each in found]
            spread = statistics.stdev(values) if len(values) > 1 else float("nan")
            cells.append(f"{measure} {statistics.fmean(values):.3f} ± {spread:.3f}")
        seconds = statistics.median(each["seconds"] for each in found)
        print(f"| {task} | {kind} | {way} | {prediction} | {len(found)} | {', '.join(cells)} | {seconds:.0f} |")


def compare_ways(path: Path) -> None:
    """Print what wholes give beyond patches, by seed, and the least that so many seeds could have seen, as Markdown."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    normal = statistics.NormalDist()
    print("\n| task | network | wholes less | difference | of each seed | could see |\n|---|---|---|---|---|---|")
    for (task, measure), kind in product((("classes", "accuracy"), ("stacks", "psnr")), NETWORKS):
        own = [each for each in rows if (each["task"], each["network"]) == (task, kind)]
        scores: dict[tuple[str, str], dict[int, float]] = {}
        for pair in (("whole", "whole"), ("patches", "windows"), ("patches", "whole"), ("frozen", "frozen")):
            found = {each["seed"]: each[pair[1]][measure] for each in own if each["trained"] == pair[0]}
            if len(found) > 1:
                scores[pair] = found
        if ("whole", "whole") not in scores:
            continue
        # Two means over s seeds each; a test at 5 % finds this difference in four of five experiments.
        seeds, spread = (
            min(map(len, scores.values())),
            statistics.fmean(map(statistics.variance, map(dict.values, scores.values()))),
        )
        seen = (normal.inv_cdf(0.975) + normal.inv_cdf(0.8)) * (2 * spread / seeds) ** 0.5
        wholes = scores.pop(("whole", "whole"))
        for (trained, predicted), found in scores.items():
            each = [wholes[seed] - found[seed] for seed in sorted(wholes.keys() & found.keys())]
            cells = ", ".join(f"{number:+.3f}" for number in each)
            other = f"{trained}, predicted {predicted}"
            print(f"| {task} | {kind} | {other} | {statistics.fmean(each):+.3f} | {cells} | {seen:.3f} |")


def main() -> None:
    """Run what is not in the record yet."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, help="folder with VOCdevkit and care3d")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tasks", nargs="+", choices=("classes", "stacks"), default=["classes", "stacks"])
    parser.add_argument("--steps", type=int, nargs="+", default=[500, 150], help="steps of each task")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--collect", action="store_true", help="print the table")
    options = parser.parse_args()
    if options.collect:
        collect(options.out)
        compare_ways(options.out)
        return
    torch.set_num_threads(1)
    done = set()
    if options.out.exists():
        rows = [json.loads(line) for line in options.out.read_text(encoding="utf-8").splitlines()]
        done = {(each["task"], each["network"], each["trained"], each["seed"]) for each in rows}
    tasks = {name: make_task(name, options.root) for name in options.tasks}
    for kind, seed, name, way in product(NETWORKS, range(options.seeds), tasks, TRAININGS):
        if (name, kind, way, seed) in done:
            continue
        row = run(tasks[name], name, kind, way, seed, options.steps[options.tasks.index(name)])
        with options.out.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(row) + "\n")
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
