"""Whether networks that were trained on patches are better with a volume's statistics, a patch's, or constant ones.

    python papers/benchmarks/tile_statistics.py --root data/care3d --out benchmarks/records/tile_statistics.jsonl
    python papers/benchmarks/tile_statistics.py --out benchmarks/records/tile_statistics.jsonl --collect

Two 3-D U-Nets with instance norms are trained on patches, each with the statistics of its own: a small one to restore
simulated low light, near bright positions; and MONAI's DynUNet, as nnU-Net's, with 8 channels at first, to find the
foreground of noisy stacks, by nnU-Net's rules: each stack scaled by its mean and deviation, every third patch at
foreground, Dice and cross entropy. Nobody has labelled these stacks, so foreground is where the clean stack is brighter
than Otsu's threshold. CARE's U-Net (`models.unet_care`) has no statistics, and so gives one result.

Then stacks that were held out run with the statistics of the whole stack, with those of what each tile reads, in tiles
of several sizes, with constants, averaged over patches of the training (`freeze_statistics`), and in MONAI's sliding
window of the patch's size, with half an overlap. Measured are CARE's PSNR and SSIM, or Dice, the step at borders of
tiles (how much neighbours across one differ, by how much they do elsewhere; for the whole and constants at the borders
of the first tiles), CPU seconds, and what `find_seams` says. `restoration.py make` makes the stacks. A run is a
line of JSON; finished runs are not run again, and `--weights FOLDER` keeps trained weights for the next time.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tifffile
import torch
from monai.inferers import sliding_window_inference
from monai.losses import DiceCELoss
from monai.networks.nets import DynUNet
from numpy.typing import NDArray
from skimage.filters import threshold_otsu
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, DataLoader, Dataset

from farfield.streaming import Tiles, find_seams, freeze_statistics, plan_whole, predict_whole
from farfield_papers.data.patches import Patches
from farfield_papers.tasks.metrics import care_metrics

CONDITIONS = ("condition_1", "condition_2", "condition_3")
# Positions of the training's patches over which statistics are averaged.
FROZEN = 2**22
# The stacks in which foreground is learned, from how many planes; what is after these is held out, with a gap.
FOREGROUND, PLANES, GAP = ("blastocyst_dapi.tif", "flybrain.tif"), 80, 4
Size = tuple[int | None, ...]
Samples = Dataset[tuple[Tensor, Tensor]]
# What is held out: its name, the input, and how a result is scored.
Held = tuple[str, NDArray[np.float32], Callable[[NDArray[Any]], dict[str, float]]]


# ---- networks --------------------------------------------------------------------------------------------------------
def convolve(inputs: int, outputs: int) -> nn.Sequential:
    """Return two convolutions, each with an instance norm."""
    layers: list[nn.Module] = []
    for channels in (inputs, outputs):
        layers += [
            nn.Conv3d(channels, outputs, 3, padding=1),
            nn.InstanceNorm3d(outputs, affine=True),
            nn.LeakyReLU(0.01),
        ]
    return nn.Sequential(*layers)


class SmallUNet(nn.Module):
    """A U-Net of two sizes with six instance norms, whose output is added to its input."""

    def __init__(self, channels: int = 16) -> None:
        super().__init__()
        self.fine, self.coarse = convolve(1, channels), convolve(channels, 2 * channels)
        self.down, self.up = nn.MaxPool3d(2), nn.ConvTranspose3d(2 * channels, channels, 2, 2)
        self.last, self.output = convolve(2 * channels, channels), nn.Conv3d(channels, 1, 1)

    def forward(self, grid: Tensor) -> Tensor:
        """Restore a grid."""
        fine = self.fine(grid)
        both = torch.cat([fine, self.up(self.coarse(self.down(fine)))], 1)
        return grid + self.output(self.last(both))


# ---- restoration -----------------------------------------------------------------------------------------------------
def find_patches(root: Path, patch: Sequence[int], seed: int) -> Samples:
    """Return patches of all training stacks, noisy and clean."""
    pairs = [
        Patches(
            f"{condition}/{path.name}",
            tifffile.imread(root / "train" / condition / path.name),
            tifffile.imread(path),
            patch,
            512,
            seed,
        )
        for condition in CONDITIONS
        for path in sorted((root / "train" / "GT").glob("*.tif"))
    ]
    return ConcatDataset(pairs)


def hold_out(root: Path, condition: str) -> Iterator[Held]:
    """Iterate over stacks to restore."""
    for path in sorted((root / "test" / "GT").glob("*.tif")):
        truth = tifffile.imread(path)
        noisy = tifffile.imread(root / "test" / condition / path.name).astype(np.float32)
        low, high = np.percentile(noisy, (2, 99.8))

        def score(restored: NDArray[Any], truth: NDArray[Any] = truth) -> dict[str, float]:
            return dict(zip(("psnr", "ssim"), care_metrics(truth, restored)[:2], strict=True))

        yield path.stem, ((noisy - low) / (high - low)).astype(np.float32), score


# ---- segmentation ----------------------------------------------------------------------------------------------------
class ForegroundPatches(Dataset[tuple[Tensor, Tensor]]):
    """Patches of stacks and their foreground: every third is at a position of the foreground, the others anywhere."""

    def __init__(self, pairs: Sequence[tuple[NDArray[Any], NDArray[Any]]], patch: Sequence[int], seed: int) -> None:
        random = np.random.default_rng(seed)
        places = [np.flatnonzero(foreground) for _, foreground in pairs]
        self.patches: list[tuple[Tensor, Tensor]] = []
        for number in range(2048):
            pair = random.integers(len(pairs))
            stack, foreground = pairs[pair]
            room = np.subtract(stack.shape, patch)
            corner = random.integers(room + 1)
            if number % 3 == 0:
                place = random.choice(places[pair])
                corner = np.clip(np.unravel_index(place, stack.shape) - np.floor_divide(patch, 2), 0, room)
            cut = tuple(slice(start, start + side) for start, side in zip(corner, patch, strict=True))
            # Views of the stacks.
            self.patches.append((torch.from_numpy(stack[cut])[None], torch.from_numpy(foreground[cut])[None]))

    def __len__(self) -> int:
        return len(self.patches)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        stack, foreground = self.patches[index]
        return stack, foreground.float()


def read_foreground(root: Path, part: str, name: str, condition: str, planes: slice) -> tuple[Any, Any]:
    """Read planes of a noisy stack, scaled to mean 0 and deviation 1, and where the clean one is foreground."""
    clean = tifffile.imread(root / part / "GT" / name)
    noisy = tifffile.imread(root / part / condition / name)[planes].astype(np.float32)
    return (noisy - noisy.mean()) / noisy.std(), clean[planes] > threshold_otsu(clean)


def find_foreground(root: Path, patch: Sequence[int], seed: int) -> Samples:
    """Return patches of the training's planes."""
    pairs = [
        read_foreground(root, "train", name, condition, slice(PLANES))
        for name in FOREGROUND
        for condition in CONDITIONS
    ]
    return ForegroundPatches(pairs, patch, seed)


def hold_out_foreground(root: Path, condition: str) -> Iterator[Held]:
    """Iterate over stacks to segment: another stack, and other planes of one of the training's."""
    others = [("test", path.name, slice(None)) for path in sorted((root / "test" / "GT").glob("*.tif"))]
    for part, name, planes in (*others, ("train", FOREGROUND[0], slice(PLANES + GAP, None))):
        noisy, foreground = read_foreground(root, part, name, condition, planes)
        # Nothing beyond multiples of the network's strides: what is compared is the network of the same positions.
        inside = tuple(slice(length // 4 * 4) for length in noisy.shape)
        noisy, foreground = noisy[inside], foreground[inside]

        def score(logits: NDArray[Any], foreground: NDArray[Any] = foreground) -> dict[str, float]:
            found = logits > 0
            return {"dice": 2 * (found & foreground).sum() / (found.sum() + foreground.sum())}

        yield Path(name).stem, noisy, score


# ---- training --------------------------------------------------------------------------------------------------------
class Problem(NamedTuple):
    """A network, what it learns on patches, and the tiles in which it runs."""

    make: Callable[[], nn.Module]
    samples: Callable[[Path, Sequence[int], int], Samples]
    loss: Callable[[Tensor, Tensor], Tensor]
    held: Callable[[Path, str], Iterator[Held]]
    patch: tuple[int, ...]
    batch: int
    steps: int
    # Own positions; the first tiles read, with their halo, about as many positions as a patch has.
    tiles: tuple[Size, ...]


PROBLEMS = {
    "restoration": Problem(
        SmallUNet,
        find_patches,
        nn.functional.l1_loss,
        hold_out,
        (16, 32, 32),
        4,
        400,
        ((4, 16, 16), (8, 32, 32), (16, 64, 64)),
    ),
    "segmentation": Problem(
        lambda: DynUNet(3, 1, 1, [3] * 3, [1, 2, 2], [2, 2], (8, 16, 32)),
        find_foreground,
        DiceCELoss(sigmoid=True, batch=True),
        hold_out_foreground,
        (32, 64, 64),
        2,
        200,
        ((None, 28, 28), (None, 64, 64)),
    ),
}


def train(problem: Problem, samples: Samples, steps: int) -> nn.Module:
    """Train the network on patches."""
    network = problem.make()
    optimizer = torch.optim.AdamW(network.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps)
    done, start = 0, time.process_time()
    while done < steps:
        for source, target in DataLoader(samples, problem.batch, shuffle=True, drop_last=True):
            loss = problem.loss(network(source), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            done += 1
            if done % 50 == 0:
                print(f"step {done}, loss {loss:.4f}, {time.process_time() - start:.0f} seconds of a core", flush=True)
            if done == steps:
                break
    return network


# ---- measurement -----------------------------------------------------------------------------------------------------
def find_step(grid: NDArray[Any], tile: Size) -> float:
    """Return how much neighbours across borders of tiles differ, by how much they do elsewhere."""
    across, elsewhere = [], []
    for axis, own in enumerate(tile):
        if own is None or own >= grid.shape[axis]:
            continue
        steps = np.abs(np.diff(grid, axis=axis))
        borders = np.arange(steps.shape[axis]) % own == own - 1
        across.append(np.compress(borders, steps, axis).mean())
        elsewhere.append(np.compress(~borders, steps, axis).mean())
    return float(np.mean(across) / np.mean(elsewhere)) if across else 1.0


Run = Callable[[NDArray[np.float32]], NDArray[Any]]


def each_way(problem: Problem, network: nn.Module, patches: Tensor) -> Iterator[tuple[str, Size, Run]]:
    """Iterate over the ways to run a network: what it is called, the distance of borders, from stack to result."""

    def run(network: nn.Module, tiles: Tiles) -> Run:
        return lambda stack: predict_whole(network, stack, tile=tiles, pad="reflect", quiet=True)

    whole = Tiles((None,) * len(problem.patch))
    yield "whole", problem.tiles[0], run(network, whole)
    yield "frozen", problem.tiles[0], run(freeze_statistics(network, patches), whole)
    for size in problem.tiles:
        yield f"tile {size}", size, run(network, Tiles(size, statistics="tile"))

    def slide(stack: NDArray[np.float32]) -> NDArray[Any]:
        grid = torch.from_numpy(stack)[None, None]
        with torch.no_grad():
            result: Tensor = sliding_window_inference(grid, problem.patch, 1, network, overlap=0.5, mode="gaussian")
        return result[0, 0].numpy()

    yield "window", tuple(side // 2 for side in problem.patch), slide


def measure(
    problem: Problem, network: nn.Module, patches: Tensor, root: Path, conditions: Sequence[str]
) -> Iterator[dict[str, Any]]:
    """Iterate over held-out stacks: scores, steps and seconds of each way, and what `find_seams` says."""
    ways = list(each_way(problem, network, patches))
    for condition in conditions:
        for name, stack, score in problem.held(root, condition):
            found = {"input": {**score(stack), "step": find_step(stack, problem.tiles[0])}}
            for way, borders, run in ways:
                start = time.process_time()
                result = run(stack).squeeze()
                found[way] = {
                    "seconds": time.process_time() - start,
                    **score(result),
                    "step": find_step(result, borders),
                }
                if way.startswith("tile"):
                    plan = plan_whole(network, stack.shape, tile=Tiles(borders, statistics="tile"), pad="reflect")
                    found[way]["reads"] = plan.patch_size
            seams = find_seams(network, stack, problem.tiles[0], patches[:32])
            report = {"choice": seams.choice, "distances": seams.distances(), "mismatch": seams.mismatch}
            yield {"stack": name, "condition": condition, "size": stack.shape, "ways": found, "seams": report}


def table(lines: Sequence[dict[str, Any]]) -> str:
    """Format the mean over seeds as a Markdown table, with each seed in brackets."""
    rows = ["| network | stack | way | score | step | s | `find_seams` |", "|---|---|---|---|---|---|---|"]
    by_stack: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for line in lines:
        for held in line["held"]:
            by_stack.setdefault((line["network"], f"{held['stack']}, {held['condition']}"), []).append(held)
    for (network, stack), seeds in by_stack.items():
        # The first runs had no such report.
        choices = ", ".join(each["seams"]["choice"] for each in seeds if "seams" in each)
        for way in seeds[0]["ways"]:
            own = [each["ways"][way] for each in seeds]
            scores = []
            for key in own[0].keys() & {"psnr", "ssim", "dice"}:
                numbers = [each[key] for each in own]
                scores.append(f"{key} {np.mean(numbers):.3f} ({', '.join(f'{each:.3f}' for each in numbers)})")
            step, seconds = (np.mean([each.get(key, 0) for each in own]) for key in ("step", "seconds"))
            reads = f", reads {own[0]['reads']}" if "reads" in own[0] else ""
            numbers = f"{', '.join(sorted(scores))} | {step:.2f} | {seconds:.1f} | {choices}"
            rows.append(f"| {network} | {stack} | {way}{reads} | {numbers} |")
    return "\n".join(rows)


def main() -> None:
    """Train and measure what is missing, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, help="folder with train and test")
    parser.add_argument("--out", type=Path, required=True, help="lines of JSON")
    parser.add_argument("--collect", action="store_true", help="run nothing")
    parser.add_argument("--networks", nargs="+", choices=PROBLEMS, default=list(PROBLEMS))
    parser.add_argument("--seeds", type=int, nargs="+", default=(1, 2))
    parser.add_argument("--steps", type=int, help="by default 400, of the segmentation 200")
    parser.add_argument(
        "--conditions", nargs="+", choices=CONDITIONS, default=CONDITIONS[:2], help="of held-out stacks"
    )
    parser.add_argument("--weights", type=Path, help="folder of trained weights")
    options = parser.parse_args()
    torch.set_num_threads(1)
    lines = [json.loads(line) for line in options.out.read_text().splitlines()] if options.out.is_file() else []
    done = {(line["network"], line["seed"]) for line in lines}
    todo = [(name, seed) for name in options.networks for seed in options.seeds if (name, seed) not in done]
    for name, seed in [] if options.collect else todo:
        problem = PROBLEMS[name]
        samples, steps = problem.samples(options.root, problem.patch, seed), options.steps or problem.steps
        weights = options.weights and options.weights / f"{name}-{seed}-{steps}.pt"
        torch.manual_seed(seed)
        if weights and weights.exists():
            network = problem.make()
            network.load_state_dict(torch.load(weights, weights_only=True))
        else:
            network = train(problem, samples, steps)
        if weights:
            torch.save(network.state_dict(), weights)
        torch.manual_seed(seed)
        patches, _ = next(iter(DataLoader(samples, FROZEN // math.prod(problem.patch), shuffle=True)))
        held = list(measure(problem, network.eval(), patches, options.root, options.conditions))
        lines.append({"network": name, "seed": seed, "steps": steps, "held": held})
        with options.out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(lines[-1]) + "\n")
    print(table(lines))


if __name__ == "__main__":
    main()
