"""Does attention help, where, by how much, and what could the runs have seen? The first table of docs/results.md.

    python benchmarks/results.py --picture docs/images/results-front.png

Trains nothing: it reads benchmarks/records. Each row compares a network with attention with one without; on the tasks
of benchmarks/ceiling.py that is the better of the two controls. The rule is that of the same script: the variance over
seeds is pooled over all networks of the record and task; samples are paired where the record keeps them, and else the
errors of two networks count as if they had nothing in common; levels are divided by the number of networks of that
record and task but one.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import power
from ceiling import CONTROLS, STEPS, compare, mean_score, signed, subtract
from ceiling import group as group_tasks
from ceiling_tasks import TASKS

RECORDS = Path(__file__).parent / "records"
TITLES = {
    "mosaic": "twins in a mosaic",
    "colour": "colour of a grey image",
    "hidden": "classes of a hidden part",
    "restoration": "noise on textures",
    "stacks": "noise on stacks",
}
QUADRATIC = ("softmax", "softmax_pooled", "dot")
Networks = dict[str, list[dict[str, Any]]]


class Row(NamedTuple):
    """A comparison: what is asked, where, with which attention and against what."""

    task: str
    record: str
    network: str
    other: str


# In the order of the table; those of the ceiling follow, softmax first.
PAPERS = [
    Row("classes of CIFAR-10, KANet", "cifar10", "kanet_qkv", "zeroed.kanet_qkv"),
    Row("classes of CIFAR-10, KANet", "cifar10", "kanet_kv", "zeroed.kanet_qkv"),
    Row("classes of CIFAR-10, SANet as printed", "cifar10", "literal.sanet", "zeroed.sanet"),
    Row("recall of 8 pairs on 8 × 8", "recall", "softmax", "convolution"),
]


def networks_of(name: str) -> Networks:
    """Return the runs of a record of accuracies by network, of each the rate with most seeds."""
    images = {"cifar10": 5000, "recall": 2048}[name]
    lines = [
        line
        for line in power.read_lines(RECORDS / f"{name}.jsonl")
        if line.get("pairs", 8) == 8 and line.get("size", [8, 8]) == [8, 8]
    ]
    found: Networks = {}
    for each in power.group(lines)[""]:
        runs = [line | {"score": power.score(line), "images": images} for line in each]
        network = runs[0].get("network") or runs[0]["operator"]
        found[network] = max(found.get(network, []), runs, key=len)
    return found


def rows_of_tasks(tasks: dict[str, Networks]) -> Iterator[Row]:
    """Yield a row for softmax on each task, and for the best operator of linear cost where some were tried."""
    for task, networks in tasks.items():
        best = sorted(networks, key=lambda name: -mean_score(networks[name]))
        control = next(name for name in best if name in CONTROLS)
        linear = [name for name in best if name not in CONTROLS and name.split(",")[0] not in QUADRATIC]
        whole = [name for name in linear if len(networks[name]) >= len(networks[control])]
        for name in (*(["softmax"] if "softmax" in networks else []), *whole[:1]):
            yield Row(TITLES[task], task, name, control)


def verdict(row: Row, networks: Networks) -> str:
    """Say whether attention helps: above what could be by chance, below it, or neither."""
    if compare(row.network, row.other, networks).above:
        return "yes"
    return "no, it costs" if compare(row.other, row.network, networks).above else "not seen"


def format_row(row: Row, networks: Networks) -> str:
    """Format a row of the table."""
    found, unit = compare(row.network, row.other, networks), unit_of(row)
    sides = [f"`{name}` {mean_score(networks[name]):.1f}" for name in (row.network, row.other)]
    each = ", ".join(signed(difference) for difference in subtract(networks[row.network], networks[row.other]))
    cells = [row.task, *sides, f"{signed(found.mean)} {unit}", each, f"{found.seen:.2f}"]
    return f"| {' | '.join([*cells, verdict(row, networks)])} |"


def unit_of(row: Row) -> str:
    """Return the unit of a row's scores."""
    return TASKS[row.record].unit if row.record in TASKS else "points"


def draw(rows: Sequence[tuple[Row, Networks]], file: Path) -> None:
    """Draw the differences of each seed, over what could be seen, in grey; recall has an axis of its own."""
    import matplotlib.pyplot as plt

    parts: dict[str, list[tuple[Row, Networks]]] = {"points": [], "recall": [], "dB": []}
    for row, networks in rows:
        parts["recall" if row.record == "recall" else unit_of(row)].append((row, networks))
    figure, places = plt.subplot_mosaic(
        [["points", "dB"], ["recall", "dB"]],
        figsize=(11, 3.6),
        height_ratios=[len(parts["points"]), 1],
        layout="constrained",
    )
    for name, part in parts.items():
        place = places[name]
        for height, (row, networks) in enumerate(part):
            seen = compare(row.network, row.other, networks).seen
            place.barh(height, 2 * seen, left=-seen, color="0.88")
            points = subtract(networks[row.network], networks[row.other])
            place.plot(points, [height] * len(points), "o", color="C0", markersize=4.5)
        place.axvline(0, color="0.4", lw=0.8)
        labels = [f"{row.task}: {row.network.removeprefix('literal.')}" for row, _ in part]
        place.set(yticks=range(len(part)), yticklabels=labels)
        place.invert_yaxis()
    for name in ("recall", "dB"):
        places[name].set(xlabel=f"with attention − without, {'dB' if name == 'dB' else 'points'}")
    figure.savefig(file, dpi=150)


def main() -> None:
    """Print the table, and draw the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw the differences, as .svg or .png")
    options = parser.parse_args()
    tasks = group_tasks(power.read_lines(RECORDS / "ceiling.jsonl"), STEPS)
    sources = {name: networks_of(name) for name in ("cifar10", "recall")} | tasks
    rows = [(row, sources[row.record]) for row in (*PAPERS, *rows_of_tasks(tasks))]
    heads = ["asked", "with attention", "without", "difference", "of each seed", "could see", "helps"]
    print(f"| {' | '.join(heads)} |\n{'|---' * len(heads)}|", *(format_row(*each) for each in rows), sep="\n")
    if options.picture:
        draw(rows, options.picture)


if __name__ == "__main__":
    main()
