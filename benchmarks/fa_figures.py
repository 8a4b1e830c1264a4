"""Draw FA's Figures 4 and 5 again: lines by the paper's formulas, points measured here as far as they fit.

    python benchmarks/fa_figures.py 4      # one module on 64 channels, against the grid: docs/images/fa-figure-4.png
    python benchmarks/fa_figures.py 5      # BERT base, against the tokens: docs/images/fa-figure-5.png
    python benchmarks/fa_figures.py 5 --measure no     # the lines, with the points that were measured before

Points lie beside the picture's place in the folder of runs as JSON, one a line, with the hardware; a point that is
there is not measured again. Memory is the most bytes of tensors alive at once in a forward and a backward pass, the
paper's a sum over the arrays of a forward pass: that both grow alike is what the picture can show.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from farfield import cost, models
from farfield.nn import GridAttention

IMAGES = Path(__file__).parent.parent / "docs" / "images"
GIGA = 1e9
# The paper's two, and attention by torch's kernel, which keeps no N×N matrix and takes N² time none the less.
NAMES = {"dot": "conventional", "factorized": "factorized", "softmax": "conventional, fused softmax"}
COLOURS = {"dot": "tab:red", "factorized": "tab:blue", "softmax": "tab:gray"}
Point = dict[str, Any]


# ---- figure 4: one module --------------------------------------------------------------------------------------------
SIDES = [16, 32, 64, 128, 256, 512]
# What fits beside everything else into some 10 GB: the conventional module keeps several N×N matrices.
LARGEST_SIDE = {"dot": 128, "softmax": 128, "factorized": 512}


def module_lines(operator: str) -> list[cost.Cost]:
    """The paper's costs of a module on grids of 64 channels."""
    name = "FA-dot" if operator == "factorized" else "CA-dot"
    return [cost.predict_module(name, channels=64, cells=side**2) for side in SIDES]


def module_points() -> list[tuple[str, int, Callable[[], cost.Measurement]]]:
    """What can be measured, the smallest first: operator, side, how."""
    return [
        (operator, side, lambda operator=operator, side=side: measured_module(operator, side))
        for side in SIDES
        for operator, largest in LARGEST_SIDE.items()
        if side <= largest
    ]


def measured_module(operator: str, side: int) -> cost.Measurement:
    """A forward and a backward pass on one grid."""
    attention = GridAttention(64, operator, project="qkv", inner_channels=32)
    grid = torch.randn(1, 64, side, side, requires_grad=True)
    return cost.measure(attention, grid, backward=True, repeats=3 if side <= 128 else 1, warm_up=1)


# ---- figure 5: BERT --------------------------------------------------------------------------------------------------
LENGTHS = [128, 256, 512, 1024, 2048, 4096, 8192]
LARGEST_LENGTH = {"dot": 1024, "softmax": 4096, "factorized": 4096}
SHAPES = {"base": (12, 768, 12), "large": (24, 1024, 16)}


def bert_lines(operator: str, shape: str) -> list[cost.Cost]:
    """The paper's costs of all layers of a BERT: FA-Tfm or CA-Tfm with as many channels in basis and values."""
    layers, channels, heads = SHAPES[shape]
    name = "FA-Tfm" if operator == "factorized" else "CA-Tfm"
    found = []
    for length in LENGTHS:
        one = cost.predict_module(name, channels=channels, cells=length, basis=channels, width=channels, heads=heads)
        found.append(cost.Cost(layers * one.madds, 0, 0, layers * one.activation_bytes))
    return found


def bert_points() -> list[tuple[str, int, Callable[[], cost.Measurement]]]:
    """What can be measured, the smallest first: operator, tokens, how."""
    return [
        (operator, length, lambda operator=operator, length=length: measured_bert(operator, length))
        for length in LENGTHS
        for operator, largest in LARGEST_LENGTH.items()
        if length <= largest
    ]


def measured_bert(operator: str, length: int) -> cost.Measurement:
    """A training step of BERT base on one text, a seventh of whose words are hidden; without dropout."""
    row = "factorized_gaussian" if operator == "factorized" else operator
    net = models.bert_base(row, positions=length, dropout=0.0)
    words, chosen = torch.randint(30522, (1, length)), torch.rand(1, length) < 0.15

    def step(words: torch.Tensor) -> torch.Tensor:
        for parameter in net.parameters():
            parameter.grad = None
        return net(words, chosen=chosen)

    return cost.measure(step, words, backward=True, repeats=1, warm_up=1 if length <= 512 else 0)


# ---- points and pictures ---------------------------------------------------------------------------------------------
def measure(points: list[tuple[str, int, Callable[[], cost.Measurement]]], file: Path) -> None:
    """Measure what is not in the file yet, and add it line by line."""
    known = {(point["operator"], point["size"]) for point in read(file)}
    file.parent.mkdir(parents=True, exist_ok=True)
    for operator, size, run in points:
        if (operator, size) in known:
            continue
        torch.manual_seed(0)
        found = run()
        point = {"operator": operator, "size": size, "seconds": found.seconds, "peak_bytes": found.peak_bytes}
        point["device"] = found.device
        with file.open("a") as lines:
            lines.write(json.dumps(point) + "\n")
        print(f"{operator}, {size}: {found.seconds:.3f} s, {found.peak_bytes / GIGA:.3f} GB", flush=True)


def read(file: Path) -> list[Point]:
    """The points that were measured."""
    return [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []


def of(points: list[Point], operator: str, key: str, factor: float) -> tuple[list[int], list[float]]:
    """Sizes and numbers of one operator's points."""
    mine = sorted((point["size"], factor * point[key]) for point in points if point["operator"] == operator)
    return [size for size, _ in mine], [value for _, value in mine]


def draw(points: list[Point], lines: dict[str, Any], sizes: list[int], labels: list[str], file: Path) -> None:
    """Draw memory, computation and time; `lines`: label -> (colour, dash, costs)."""
    import matplotlib.pyplot as plt

    figure, (memory, computation, time) = plt.subplots(1, 3, figsize=(13, 4.4), layout="constrained")
    for label, (colour, dash, costs) in lines.items():
        style = {"color": colour, "linestyle": dash, "label": label}
        memory.plot(sizes, [each.activation_bytes / GIGA for each in costs], **style)
        computation.plot(sizes, [2 * each.madds / GIGA for each in costs], **style)
    for operator, name in NAMES.items():
        style = {"color": COLOURS[operator], "label": f"measured: {name}"}
        memory.plot(*of(points, operator, "peak_bytes", 1 / GIGA), "o", **style)
        time.plot(*of(points, operator, "seconds", 1.0), "o-", **style)
    titles = ("memory, GB", "computation, GMACC (2 a multiply-add)", "time of a training step, s")
    for axes, title in zip((memory, computation, time), titles, strict=True):
        axes.set(xscale="log", yscale="log", title=title)
        axes.set_xticks(sizes, labels)
        axes.set_xticks([], minor=True)
        axes.grid(alpha=0.3, which="both")
    handles = {
        label: handle
        for axes in (memory, time)
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    if points:
        figure.suptitle(f"Lines: the paper's formulas. Points: {points[0]['device']}", fontsize=9)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=120)
    plt.close(figure)


def main() -> None:
    """Measure what is missing, and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("figure", choices=["4", "5"])
    parser.add_argument("--measure", choices=["yes", "no"], default="yes", help="whether missing points are measured")
    parser.add_argument("--largest", type=int, help="largest side or length that is measured")
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    parser.add_argument("--picture", type=Path, help="docs/images/fa-figure-4.png or -5.png by default")
    arguments = parser.parse_args()
    file = arguments.runs / f"fa-figure-{arguments.figure}.jsonl"
    picture = arguments.picture or IMAGES / f"fa-figure-{arguments.figure}.png"
    if arguments.measure == "yes":
        points = module_points() if arguments.figure == "4" else bert_points()
        measure([point for point in points if point[1] <= (arguments.largest or point[1])], file)
    if arguments.figure == "4":
        lines = {f"formula: {NAMES[row]}": (COLOURS[row], "-", module_lines(row)) for row in ("dot", "factorized")}
        draw(read(file), lines, SIDES, [f"{side}²" for side in SIDES], picture)
    else:
        lines = {
            f"formula: {shape}, {NAMES[row]}": (COLOURS[row], "-" if shape == "base" else "--", bert_lines(row, shape))
            for shape in SHAPES
            for row in ("dot", "factorized")
        }
        draw(read(file), lines, LENGTHS, [f"{length:,}" for length in LENGTHS], picture)
    print(f"picture: {picture}")


if __name__ == "__main__":
    main()
