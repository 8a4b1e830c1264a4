"""Train U-Nets without and with attention on simulated low light, equal budgets, several seeds: a table.

    python papers/benchmarks/restoration.py make --volumes care3d/volumes --root data/care3d  # pairs from clean stacks
    python papers/benchmarks/restoration.py train --root data/care3d
    python papers/benchmarks/restoration.py table                           # the table again, from what is finished
    python papers/benchmarks/restoration.py seams --root data/care3d  # in tiles: as a whole, and as a sliding window

Each run is one `farfield fit` of recipes/care3d.yaml in a folder of its own, and one `farfield test` of its best epoch
on stacks that were held out of training. Finished runs are not run again; a killed run resumes.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
from training import processor_minutes

RECIPE = Path(__file__).parent.parent / "recipes" / "care3d.yaml"
OPERATORS = ["none", "averaged", "siamese", "kronecker_kv", "kronecker_qkv", "factorized_gaussian"]
# Number of photons at the brightest positions.
CONDITIONS = {"condition_1": 40, "condition_2": 15, "condition_3": 5}
HELD_BACK = "nuclei_small"
FLOOR = 3.0


def make(volumes: Path, root: Path) -> None:
    """Write pairs: the clean stack, between grey levels 100 and 260, and simulated images of few photons.

    `light = clip((volume - p1) / (p99.9 - p1), 0)`, `clean = 100 + 160 light`,
    `noisy = 100 + 160 / peak (Poisson(light peak + 0.3) - 0.3) + N(0, 3)`. The blastocysts are smoothed first, as they
    are noisy themselves. One whole stack is held out of training.
    """
    import tifffile
    from scipy.ndimage import gaussian_filter

    for place, path in enumerate(sorted(volumes.glob("*.tif"))):
        volume = tifffile.imread(path).astype(np.float64)
        if path.stem.startswith("blastocyst"):
            volume = gaussian_filter(volume, 0.7)
        low, high = np.percentile(volume, (1, 99.9))
        light = np.clip((volume - low) / (high - low), 0, None)
        random = np.random.default_rng(place)
        stacks = {"GT": 100 + 160 * light}
        for name, peak in CONDITIONS.items():
            photons = random.poisson(light * peak + 0.3) - 0.3
            stacks[name] = 100 + 160 / peak * photons + random.normal(0, 3, light.shape)
        part = root / ("test" if path.stem == HELD_BACK else "train")
        for name, stack in stacks.items():
            (part / name).mkdir(parents=True, exist_ok=True)
            whole = np.clip(np.rint(stack), 0, 65535).astype(np.uint16)
            tifffile.imwrite(part / name / path.name, whole, imagej=True, metadata={"axes": "ZYX"})
        print(f"{path.name}: {part.name}, {' x '.join(map(str, volume.shape))}")


def run(command: str, *options: str) -> str:
    """Run a command of farfield; return its output."""
    words = [sys.executable, "-m", "farfield", command, *options]
    done = subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True)
    return done.stdout


def train(folder: Path, root: Path, operator: str, seed: int, options: list[str]) -> None:
    """Fit and test one network, and write the metrics and the core minutes."""
    result = folder / "result.json"
    if result.exists():
        return
    common = ["--config", str(RECIPE), "--data.root", str(root), "--trainer.default_root_dir", str(folder)]
    common += ["--model.network.operator", "null" if operator == "none" else operator, *options]
    started = processor_minutes()
    resumed = ["--ckpt_path", "last"] if list(folder.glob("version_*/checkpoints/last.ckpt")) else []
    run("fit", *common, "--seed_everything", str(seed), *resumed)
    minutes = processor_minutes() - started
    measured = subprocess.run(
        [sys.executable, __file__, "measure", "--root", str(root), "--runs", str(folder)],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    values = json.loads(measured.stdout.splitlines()[-1])
    # The minutes of a resumed run are not known: only those of its last part are measured.
    spent = {} if resumed else {"processor_minutes": round(minutes, 1)}
    result.write_text(json.dumps({**spent, **values}, indent=2) + "\n")


def measure(folder: Path, root: Path) -> dict[str, float]:
    """Test the best epoch of a run on the held-out stacks."""
    from lightning.pytorch import Trainer

    from farfield_papers import models
    from farfield_papers.data.restore import StackPairs
    from farfield_papers.tasks.restore import Restore

    [version] = folder.glob("version_*")
    module = Restore(models.from_pretrained(version))
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = Trainer(accelerator="cpu", default_root_dir=folder, enable_checkpointing=False, **quiet)
    [values] = trainer.test(module, StackPairs(str(root), sources=list(CONDITIONS)), verbose=False)
    return {name.removeprefix("test/"): round(value, 4) for name, value in values.items()}


def table(runs: dict[str, list[Path]]) -> str:
    """Format PSNR before and after, for each condition the mean over the seeds, as a Markdown table."""
    heads = "".join(f" {name.replace('_', ' ')}, dB |" for name in CONDITIONS)
    lines = [f"| operator |{heads} mean, dB | gain of each seed, dB | spread, dB | SSIM | minutes of a core |"]
    lines.append("|---|" + "---|" * (len(CONDITIONS) + 5))
    results = {
        name: [json.loads((run / "result.json").read_text()) for run in folders] for name, folders in runs.items()
    }
    before = next(iter(results.values()))[0]
    each = "".join(f" {before[f'{name}/psnr_before']:.2f} |" for name in CONDITIONS)
    lines.append(f"| the noisy stacks |{each} {before['psnr_before']:.2f} | | | {before['ssim_before']:.3f} | |")
    for name, measured in results.items():
        each = "".join(f" {statistics.mean(run[f'{name_}/psnr'] for run in measured):.2f} |" for name_ in CONDITIONS)
        gains = [run["psnr"] - run["psnr_before"] for run in measured]
        spread = f"{max(gains) - min(gains):.2f}" if len(gains) > 1 else "one seed"
        note = "" if min(gains) >= FLOOR else " (under-trained)"
        mean, ssim = (statistics.mean(run[what] for run in measured) for what in ("psnr", "ssim"))
        minutes = ", ".join(f"{run['processor_minutes']:.1f}" for run in measured if "processor_minutes" in run)
        gained = ", ".join(f"{gain:.2f}" for gain in gains)
        lines.append(f"| `{name}`{note} |{each} {mean:.2f} | {gained} | {spread} | {ssim:.3f} | {minutes} |")
    return "\n".join(lines)


def seams(runs: dict[str, list[Path]], root: Path, tile: tuple[int, int, int]) -> str:
    """Format as a Markdown table how much tiled results differ from the stack restored in one piece.

    Tiles are combined with attention over the whole stack, and in a plain sliding window of the same tiles and overlap,
    where attention is global only within a tile. Values are in per cent of the range of the restored stack; a step is
    the change of the sliding window's difference from one position to the next, across a tile border and elsewhere.
    """
    import tifffile

    from farfield.streaming import plan_whole
    from farfield_papers import models
    from farfield_papers.tasks.restore_stack import ScaledNetwork, find_grey_levels, restore

    stack = tifffile.imread(root / "test" / "condition_3" / f"{HELD_BACK}.tif").astype(np.float32)
    lines = ["| operator | as a whole, most, % | sliding, mean, % | most, % | step at a border, % | elsewhere, % |"]
    lines.append("|---|---|---|---|---|---|")
    for name, folders in runs.items():
        for folder in folders:
            [version] = folder.glob("version_*")
            network = models.from_pretrained(version).eval()
            whole = restore(network, stack, tile=max(stack.shape))
            scaled = ScaledNetwork(network, [find_grey_levels(stack)]).eval()
            window = sliding(scaled, stack, plan_whole(scaled, stack.shape, tile=tile, pad="reflect"))
            percent = 100 / np.ptp(whole)
            exact = percent * np.abs(restore(network, stack, tile=tile) - whole).max()
            off = percent * (window - whole)
            border, elsewhere = steps(off, tile, [-side % 4 // 2 for side in stack.shape])
            entries = [f"{exact:.1e}", f"{np.abs(off).mean():.2g}", f"{np.abs(off).max():.2g}"]
            entries += [f"{border:.2g}", f"{elsewhere:.2g}"]
            lines.append(f"| `{name}`, {folder.name.rpartition('-')[2]} | {' | '.join(entries)} |")
    return "\n".join(lines)


def sliding(network: Any, stack: np.ndarray, plan: Any) -> np.ndarray:
    """Restore a stack tile by tile, each tile with the halo of a plan, independent of the other tiles."""
    import torch

    grid = torch.from_numpy(np.pad(stack, plan.padding, mode="reflect"))[None, None]
    restored = torch.empty_like(grid)
    halo = plan.halo
    # The strides divide the tile and the padded stack.
    multiples = list(map(math.gcd, plan.tile, plan.size))
    with torch.inference_mode():
        for core in plan.cores:
            pairs = zip(halo.around(core, plan.size), multiples, strict=True)
            region = [(start // each * each, -(-stop // each) * each) for (start, stop), each in pairs]
            part = network(grid[(..., *(slice(*span) for span in region))])
            own = (slice(start - first, stop - first) for (start, stop), (first, _) in zip(core, region, strict=True))
            restored[(..., *(slice(*span) for span in core))] = part[(..., *own)]
    return restored[(0, 0, *(slice(*span) for span in plan.kept))].numpy()


def steps(field: np.ndarray, tile: tuple[int, ...], before: list[int]) -> tuple[float, float]:
    """Return the mean change from one position to the next, across tile borders and elsewhere."""
    at_border, elsewhere = [], []
    for axis, (positions, padded) in enumerate(zip(tile, before, strict=True)):
        change = np.abs(np.diff(field, axis=axis))
        border = (np.arange(1, field.shape[axis]) + padded) % positions == 0
        at_border.append(np.compress(border, change, axis).ravel())
        elsewhere.append(np.compress(~border, change, axis).ravel())
    return float(np.concatenate(at_border).mean()), float(np.concatenate(elsewhere).mean())


def main() -> None:
    """Make, train or tabulate."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["make", "train", "measure", "table", "seams"])
    parser.add_argument("--volumes", type=Path, help="folder of clean stacks (make)")
    parser.add_argument("--root", type=Path, default=Path("data/care3d"))
    parser.add_argument("--runs", type=Path, default=Path("runs/restoration"))
    parser.add_argument("--operators", nargs="+", default=OPERATORS)
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--tile", type=int, nargs=3, default=(40, 32, 32), help="positions that a tile writes (seams)")
    arguments, options = parser.parse_known_args()
    if arguments.action == "make":
        make(arguments.volumes, arguments.root)
        return
    if arguments.action == "measure":
        print(json.dumps(measure(arguments.runs, arguments.root)))
        return
    folders = {name: [arguments.runs / f"{name}-{seed}" for seed in arguments.seeds] for name in arguments.operators}
    if arguments.action == "train":
        for index, seed in enumerate(arguments.seeds):  # a whole table of one seed before the next
            for name, runs in folders.items():
                train(runs[index], arguments.root, name, seed, options)
    finished = {name: [run for run in runs if (run / "result.json").exists()] for name, runs in folders.items()}
    finished = {name: runs for name, runs in finished.items() if runs}
    if arguments.action == "seams":
        print(seams(finished, arguments.root, tuple(arguments.tile)))
    else:
        print(table(finished))


if __name__ == "__main__":
    main()
