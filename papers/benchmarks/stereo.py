"""Train a small PSMNet without and with attention on scenes of Middlebury, equal budgets, several seeds: a table.

    python papers/benchmarks/stereo.py train --root middlebury_sceneflow
    python papers/benchmarks/stereo.py train --root middlebury_sceneflow --only Teddy --runs runs/one  # to overfit it
    python papers/benchmarks/stereo.py table                                    # the table again, from what is finished
    python papers/benchmarks/stereo.py picture --root middlebury_sceneflow      # images, true and predicted disparities

Each run is one `farfield fit` of recipes/middlebury.yaml in a folder of its own. Its weights after the last step, not
the best ones on the held-out scene, are measured on that scene and on those it was trained on. Finished runs are not
run again; a killed run resumes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

import torch
import yaml
from training import processor_minutes

RECIPE = Path(__file__).parent.parent / "recipes" / "middlebury.yaml"
OPERATORS = ["none", "factorized_gaussian"]
# Above this end-point error on its training scenes, in pixels, a network is marked as under-trained.
FLOOR = 3.0


def train(folder: Path, root: Path, held_out: list[str], operator: str, seed: int, options: list[str]) -> None:
    """Fit and measure one network, and write the metrics and the core minutes."""
    result = folder / "result.json"
    if result.exists():
        return
    words = [sys.executable, "-m", "farfield", "fit", "--config", str(RECIPE), "--data.root", str(root)]
    words += ["--trainer.default_root_dir", str(folder), "--seed_everything", str(seed)]
    words += ["--data.held_out", json.dumps(held_out)]
    words += ["--model.network.operator", "null" if operator == "none" else operator, *options]
    resumed = list(folder.glob("version_*/checkpoints/last.ckpt"))
    started = processor_minutes()
    subprocess.run([*words, *(["--ckpt_path", "last"] if resumed else [])], check=True)
    # The minutes of a resumed run are not known: only those of its last part are measured.
    spent = {} if resumed else {"processor_minutes": round(processor_minutes() - started, 1)}
    result.write_text(json.dumps({**spent, **measure(folder, root, held_out)}, indent=2) + "\n")


def trained(folder: Path) -> torch.nn.Module:
    """Build the network of a run, with its weights after the last step, in eval mode in its task."""
    from farfield_papers import models
    from farfield_papers.tasks.checkpoints import read
    from farfield_papers.tasks.stereo import Stereo

    [version] = folder.glob("version_*")
    module = Stereo(models.from_pretrained(version))
    module.load_state_dict(read(version / "checkpoints" / "last.ckpt")["state_dict"])
    return module.eval()


def held_back(root: Path, only: str | None) -> list[str]:
    """Return the scenes that are not trained on: those of the recipe, or all but one."""
    from farfield_papers.data.readers.stereo import list_frames

    if only is None:
        return yaml.safe_load(RECIPE.read_text(encoding="utf-8"))["data"]["init_args"]["held_out"]
    return sorted({frame.left.parents[1].name for frame in list_frames(root)} - {only})


def scenes(root: Path, held_out: list[str]) -> dict[str, list[tuple[torch.Tensor, ...]]]:
    """Read the whole scenes: the training scenes, and the held-out ones."""
    from farfield_papers.data.readers.stereo import list_frames
    from farfield_papers.data.stereo import normalize_pair, read_frame

    frames = list_frames(root)
    back = [frame for frame in frames if not frame.names.isdisjoint(held_out)]
    parts = {"trained": [frame for frame in frames if frame not in back], "back": back}
    return {name: [read_frame(normalize_pair, True, frame) for frame in part] for name, part in parts.items()}


def measure(folder: Path, root: Path, held_out: list[str]) -> dict[str, float]:
    """Measure a run on its training scenes and on the held-out ones."""
    module, result = trained(folder), {}
    for part, pairs in scenes(root, held_out).items():
        module.errors.reset()
        for left, right, disparity in pairs:
            with torch.inference_mode():
                module.errors.update(module(left[None], right[None])[:, -1], disparity[None])
        result |= {f"{part}/{name}": round(float(value), 4) for name, value in module.errors.compute().items()}
    return result


def table(runs: dict[str, list[Path]]) -> str:
    """Format the errors on the training scenes and on the held-out scene as a Markdown table."""
    heads = ["attention", "EPE, scenes trained on, px", "mean", "above 3 px", "EPE, scene held out, px", "mean"]
    heads += ["spread, px", "above 3 px", "minutes of a core"]
    lines = [f"| {' | '.join(heads)} |", "|---|" + "---|" * (len(heads) - 1)]
    for name, folders in runs.items():
        results = [json.loads((run / "result.json").read_text()) for run in folders]
        entries = []
        for part in ("trained", "back"):
            each = [run[f"{part}/epe"] for run in results]
            entries += [", ".join(f"{value:.2f}" for value in each), f"{statistics.mean(each):.2f}"]
            if part == "back":
                entries.append(f"{max(each) - min(each):.2f}" if len(each) > 1 else "one seed")
            entries.append(f"{100 * statistics.mean(run[f'{part}/error_3px'] for run in results):.0f} %")
        under = max(run["trained/epe"] for run in results) > FLOOR
        minutes = ", ".join(f"{run['processor_minutes']:.1f}" for run in results if "processor_minutes" in run)
        name = f"{name if name == 'none' else f'`{name}`'}{' (under-trained)' * under}"
        lines.append(f"| {' | '.join([name, *entries, minutes or 'not counted'])} |")
    return "\n".join(lines)


def picture(runs: dict[str, list[Path]], root: Path, held_out: list[str], file: Path) -> None:
    """Draw a training scene and the held-out one: left image, true and predicted disparities in one colour scale."""
    import matplotlib.pyplot as plt

    from farfield_papers.data.classify import IMAGENET
    from farfield_papers.tasks.writers.disparities import colour_disparities

    name, folders = list(runs.items())[-1]
    module, pairs = trained(folders[0]), scenes(root, held_out)
    shown = {"trained on": pairs["trained"][0], "held out": pairs["back"][0]}
    figure, axes = plt.subplots(len(shown), 3, figsize=(9, 5.2), layout="constrained")
    mean, deviation = (torch.tensor(values)[:, None, None] for values in IMAGENET)
    for row, (what, (left, right, truth)) in zip(axes, shown.items(), strict=True):
        with torch.inference_mode():
            predicted = module(left[None], right[None])[0, -1]
        known = truth < module.max_disparity
        largest, error = float(truth[known].max()), float((predicted - truth)[known].abs().mean())
        panels = [(left * deviation + mean).clamp(0, 1).permute(1, 2, 0).numpy()]
        panels += [colour_disparities(part.numpy(), largest).convert("RGB") for part in (truth, predicted)]
        titles = [f"left image, {what}", f"true, 0 to {largest:.0f} px", f"predicted ({name}), EPE {error:.2f} px"]
        for place, panel, title in zip(row, panels, titles, strict=True):
            place.imshow(panel)
            place.set_title(title, fontsize=9)
            place.axis("off")
    figure.savefig(file, dpi=110)


def main() -> None:
    """Train, tabulate or draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["train", "table", "picture"])
    parser.add_argument("--root", type=Path, default=Path("data/middlebury_sceneflow"))
    parser.add_argument("--runs", type=Path, default=Path("runs/stereo"))
    parser.add_argument("--operators", nargs="+", default=OPERATORS)
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--only", help="the only training scene; by default all but those the recipe holds out")
    parser.add_argument("--picture", type=Path, default=Path("stereo.png"))
    arguments, options = parser.parse_known_args()
    folders = {name: [arguments.runs / f"{name}-{seed}" for seed in arguments.seeds] for name in arguments.operators}
    if arguments.action == "train":
        for index, seed in enumerate(arguments.seeds):  # a whole table of one seed before the next
            for name, runs in folders.items():
                train(runs[index], arguments.root, held_back(arguments.root, arguments.only), name, seed, options)
    finished = {name: [run for run in runs if (run / "result.json").exists()] for name, runs in folders.items()}
    finished = {name: runs for name, runs in finished.items() if runs}
    if arguments.action == "picture":
        picture(finished, arguments.root, held_back(arguments.root, arguments.only), arguments.picture)
    else:
        print(table(finished))


if __name__ == "__main__":
    main()
