"""Train small BERTs with different attention on a folder of text, at equal steps: tables and a picture.

    python papers/benchmarks/masked_lm.py train --root data/text --epochs 1
    python papers/benchmarks/masked_lm.py table            # the table and the picture again, from what is finished
    python papers/benchmarks/masked_lm.py lengths          # time and memory of a training step at 128 to 4,096 tokens

Each run is one `farfield fit` of recipes/text.yaml in a folder of its own. Finished runs are not run again, and a run
that was killed resumes from its last epoch. The table has the last epoch on text that was held out of training; all
networks of a seed get the same blocks with the same words masked.
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
from pathlib import Path

import torch
from training import fit, minutes

from farfield import cost
from farfield_papers import models

RECIPE = Path(__file__).parent.parent / "recipes" / "text.yaml"
OPERATORS = ["softmax", "factorized_gaussian"]
LENGTHS = [128, 256, 512, 1024, 2048, 4096]
# `dot` forms the N×N matrix that the paper counts; `softmax` runs torch's kernel, which does not store it.
MEASURED = ["softmax", "dot", "factorized_gaussian"]


def train(folder: Path, operator: str, seed: int, options: list[str]) -> None:
    """Run one `farfield fit`, or what is left of it; leave a finished run as it is."""
    if (folder / "finished").exists():
        return
    fit(RECIPE, folder, {"model.network.operator": operator, "seed_everything": seed}, options)
    (folder / "finished").touch()


def rows_of(folder: Path) -> list[dict[str, str]]:
    """Read the log of a run's newest version."""
    (log,) = sorted(folder.glob("version_*/metrics.csv"))[-1:]
    with log.open() as lines:
        return list(csv.DictReader(lines))


def steps_of(folder: Path) -> int:
    """Return the number of steps of a run."""
    return max(int(row["step"]) for row in rows_of(folder)) + 1


def table(runs: dict[str, list[Path]]) -> str:
    """Format loss, perplexity and accuracy of the last epoch, and the minutes, as a Markdown table."""
    lines = [
        "| operator | steps | loss of each seed | mean | spread | perplexity | words predicted, % | core minutes |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for operator, folders in runs.items():
        last = [[row for row in rows_of(folder) if row.get("val/loss")][-1] for folder in folders]
        losses = [float(row["val/loss"]) for row in last]
        entries = [f"`{operator}`", f"{steps_of(folders[0]):,}", ", ".join(f"{loss:.3f}" for loss in losses)]
        entries += [f"{statistics.mean(losses):.3f}"]
        entries += [f"{max(losses) - min(losses):.3f}" if len(losses) > 1 else "one seed"]
        entries += [", ".join(f"{float(row['val/perplexity']):.0f}" for row in last)]
        entries += [", ".join(f"{100 * float(row['val/accuracy']):.1f}" for row in last)]
        entries += [", ".join(f"{minutes(folder):.1f}" for folder in folders)]
        lines.append(f"| {' | '.join(entries)} |")
    return "\n".join(lines)


def picture(runs: dict[str, list[Path]], file: Path) -> None:
    """Draw training loss, averaged over 50 steps, and validation loss, one colour per operator."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6.4, 4.0), layout="constrained")
    for colour, (operator, folders) in enumerate(runs.items()):
        for index, folder in enumerate(folders):
            rows = rows_of(folder)
            trained = [(int(row["step"]), float(row["train/loss_step"])) for row in rows if row.get("train/loss_step")]
            means = [
                (trained[place][0], statistics.mean(loss for _, loss in trained[place - 4 : place + 1]))
                for place in range(4, len(trained))
            ]
            axes.plot(*zip(*means, strict=True), color=f"C{colour}", alpha=0.4, linewidth=0.8)
            held = [(int(row["step"]), float(row["val/loss"])) for row in rows if row.get("val/loss")]
            label = f"{operator}, held-out" if index == 0 else None
            axes.plot(*zip(*held, strict=True), "o-", color=f"C{colour}", label=label)
    axes.set(xlabel="step", ylabel="loss of masked words", title="Small BERTs on the text corpus; thin: training")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(file, dpi=150)


def lengths(file: Path, repeats: int) -> None:
    """Measure a training step of the recipe's network on one text of each length, in turns; write and print it."""
    rows = []
    for length in LENGTHS:
        words = torch.randint(4096, (1, length))
        chosen = torch.rand(1, length) < 0.15
        steps = {name: (Step(name, length), words, chosen) for name in MEASURED}
        costs = cost.compare(steps, backward=True, repeats=repeats)
        for name, measured in costs.items():
            rows.append({"length": length, "operator": name, "seconds": measured.seconds})
            rows[-1] |= {"peak_bytes": measured.peak_bytes, "device": measured.device}
            print(json.dumps(rows[-1]), flush=True)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(rows, indent=1))


class Step(torch.nn.Module):
    """A network that returns the logits of chosen tokens."""

    def __init__(self, operator: str, length: int) -> None:
        super().__init__()
        self.network = models.bert_small(operator, vocabulary=4096, positions=length, dropout=0.0)

    def forward(self, words: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        return self.network(words, chosen=chosen)


def table_of_lengths(file: Path) -> str:
    """Format milliseconds and megabytes by length as a Markdown table."""
    rows = json.loads(file.read_text())
    by = {(row["operator"], row["length"]): row for row in rows}
    sizes = sorted({row["length"] for row in rows})
    lines = [f"| | {' | '.join(f'{length:,}' for length in sizes)} |", "|---|" + "---|" * len(sizes)]
    for unit, key, factor in (("ms", "seconds", 1e3), ("MB", "peak_bytes", 1e-6)):
        for name in MEASURED:
            entries = [f"{factor * by[name, length][key]:,.0f}" for length in sizes]
            lines.append(f"| `{name}`, {unit} | {' | '.join(entries)} |")
    return "\n".join([*lines, "", rows[0]["device"]])


def main() -> None:
    """Run one of the three commands; `train` ends with the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["train", "table", "lengths"])
    parser.add_argument("--root", default="data/text", help="folder of text files")
    parser.add_argument("--operators", nargs="+", default=OPERATORS)
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--repeats", type=int, default=5, help="number of turns of each measurement")
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    arguments = parser.parse_args()
    measured = arguments.runs / "text-lengths.json"
    if arguments.command == "lengths":
        lengths(measured, arguments.repeats)
        print(table_of_lengths(measured))
        return
    runs = {name: [arguments.runs / f"text-{name}-{seed}" for seed in arguments.seeds] for name in arguments.operators}
    if arguments.command == "train":
        options = ["--data.root", arguments.root]
        options += [] if arguments.epochs is None else ["--trainer.max_epochs", str(arguments.epochs)]
        for index, seed in enumerate(arguments.seeds):  # a whole table of one seed before the next
            for operator, folders in runs.items():
                train(folders[index], operator, seed, options)
    finished = {name: [run for run in folders if (run / "finished").exists()] for name, folders in runs.items()}
    finished = {name: folders for name, folders in finished.items() if folders}
    print(table(finished))
    file = arguments.runs / "text.png"
    picture(finished, file)
    print(f"curves: {file}")


if __name__ == "__main__":
    main()
