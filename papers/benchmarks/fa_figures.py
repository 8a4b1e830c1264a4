"""Draw FA's Figures 4 and 5 again: lines by the paper's formulas, points measured here as far as they fit.

    python papers/benchmarks/fa_figures.py 4  # one module on 64 channels, against the grid: docs/images/fa-figure-4.png
    python papers/benchmarks/fa_figures.py 5      # BERT base, against the tokens: docs/images/fa-figure-5.png
    python papers/benchmarks/fa_figures.py 5 --measure memory  # counted: no quiet machine; also: time, no

Points are stored in the folder of runs, one per line; a stored point is not measured again. Memory is what a forward
pass saves for its backward pass, without the parameters, which is nearest to the paper's sum over the arrays of a pass.
Time is that of a forward and a backward pass.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from farfield import cost
from farfield.nn import GridAttention
from farfield_papers import models, theory

IMAGES = Path(__file__).parents[2] / "docs" / "images"
GIGA = 1e9
# The paper's two modules, and attention by torch's kernel, which stores no N×N matrix but still takes N² time.
NAMES = {"dot": "conventional", "factorized": "factorized", "softmax": "conventional, fused softmax"}
COLOURS = {"dot": "tab:red", "factorized": "tab:blue", "softmax": "tab:gray"}
Point = dict[str, Any]
Lines = dict[str, tuple[str, str, list[cost.Cost]]]


# ---- figure 4: one module --------------------------------------------------------------------------------------------
SIZE = [16, 32, 64, 128, 256, 512]
# The largest sizes that fit into about 10 GB: the conventional module keeps several N×N matrices.
LARGEST_SIDE = {"dot": 128, "factorized": 512}


def module_lines() -> Lines:
    """Compute the paper's costs of a module on grids of 64 channels."""
    return {
        f"formula: {NAMES[operator]}": (
            *(COLOURS[operator], "-"),
            [theory.predict_module(name, channels=64, positions=side**2) for side in SIZE],
        )
        for operator, name in (("dot", "CA-dot"), ("factorized", "FA-dot"))
    }


def module_of(operator: str, side: int) -> tuple[torch.nn.Module, torch.Tensor]:
    """Build a module and its input."""
    attention = GridAttention(64, operator, project="qkv", inner_channels=32)
    return attention, torch.randn(1, 64, side, side, requires_grad=True)


# ---- figure 5: BERT --------------------------------------------------------------------------------------------------
LENGTHS = [128, 256, 512, 1024, 2048, 4096, 8192]
LARGEST_LENGTH = {"dot": 1024, "softmax": 4096, "factorized": 4096}
SHAPES = {"base": (12, 768, 12), "large": (24, 1024, 16)}


def bert_lines() -> Lines:
    """Compute the paper's costs of all layers of a BERT: FA-Tfm or CA-Tfm with as many channels in basis and values."""
    lines: Lines = {}
    for shape, (layers, channels, heads) in SHAPES.items():
        for operator, name in (("dot", "CA-Tfm"), ("factorized", "FA-Tfm")):
            sizes: dict[str, Any] = {"channels": channels, "basis": channels, "width": channels, "heads": heads}
            each = [theory.predict_module(name, positions=length, **sizes) for length in LENGTHS]
            whole = [cost.Cost(layers * one.macs, 0, 0, layers * one.activation_bytes) for one in each]
            lines[f"formula: {shape}, {NAMES[operator]}"] = (COLOURS[operator], "-" if shape == "base" else "--", whole)
    return lines


class MaskedBert(torch.nn.Module):
    """BERT base, without dropout, that predicts about 15 % of the words of one text."""

    def __init__(self, operator: str, length: int) -> None:
        super().__init__()
        operator = "factorized_gaussian" if operator == "factorized" else operator
        self.network = models.bert_base(operator, positions=length, dropout=0.0)
        self.chosen = torch.rand(1, length) < 0.15

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        """Return the logits of those words."""
        return self.network(words, chosen=self.chosen)


def bert_of(operator: str, length: int) -> tuple[torch.nn.Module, torch.Tensor]:
    """Build a BERT and its input."""
    return MaskedBert(operator, length), torch.randint(30522, (1, length))


class Figure(NamedTuple):
    """What is drawn, and how it is measured.

    Attributes:
        sizes: The sizes on the horizontal axis.
        label: Format of the label of a size.
        lines: Returns label -> colour, dash and the paper's costs.
        largest: Operator -> the largest size that is measured.
        make: Builds a module and its input of a size.
        long: From this size on, one run is timed instead of three.
    """

    sizes: list[int]
    label: str
    lines: Callable[[], Lines]
    largest: dict[str, int]
    make: Callable[[str, int], tuple[torch.nn.Module, torch.Tensor]]
    long: int


FIGURES = {
    "4": Figure(SIZE, "{}²", module_lines, LARGEST_SIDE, module_of, 128),
    "5": Figure(LENGTHS, "{:,}", bert_lines, LARGEST_LENGTH, bert_of, 1024),
}
KINDS = ["kept_bytes", "seconds"]
WHAT: dict[str, list[str]] = {"all": KINDS, "memory": KINDS[:1], "time": KINDS[1:], "no": []}


# ---- points and pictures ---------------------------------------------------------------------------------------------
def measure(figure: Figure, kinds: list[str], largest: int | None, file: Path) -> None:
    """Measure the points that are not in the file yet, the smallest first, and append them line by line."""
    known = {(point["operator"], point["size"], kind) for point in read(file) for kind in KINDS if kind in point}
    file.parent.mkdir(parents=True, exist_ok=True)
    for size in figure.sizes:
        for operator, last in figure.largest.items():
            for kind in kinds:
                if size > min(last, largest or last) or (operator, size, kind) in known:
                    continue
                torch.manual_seed(0)
                module, given = figure.make(operator, size)
                point: Point = {"operator": operator, "size": size}
                if kind == "kept_bytes":
                    point[kind] = cost.saved_bytes(module, given)
                else:
                    repeats = 3 if size < figure.long else 1
                    measured = cost.measure(module, given, backward=True, repeats=repeats, warm_up=1)
                    point |= {kind: measured.seconds, "device": measured.device}
                with file.open("a") as lines:
                    lines.write(json.dumps(point) + "\n")
                print(json.dumps(point), flush=True)


def read(file: Path) -> list[Point]:
    """Read the points that were measured."""
    return [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []


def of(points: list[Point], operator: str, key: str, factor: float) -> tuple[list[int], list[float]]:
    """Return the sizes and the scaled values of one operator's points."""
    mine = sorted(
        (point["size"], factor * point[key]) for point in points if point["operator"] == operator and key in point
    )
    return [size for size, _ in mine], [value for _, value in mine]


def draw(figure: Figure, points: list[Point], file: Path) -> None:
    """Draw memory, computation and time."""
    import matplotlib.pyplot as plt

    sizes = figure.sizes
    drawing, (memory, computation, time) = plt.subplots(1, 3, figsize=(13, 4.4), layout="constrained")
    for label, (colour, dash, costs) in figure.lines().items():
        style = {"color": colour, "linestyle": dash, "label": label}
        memory.plot(sizes, [each.activation_bytes / GIGA for each in costs], **style)
        computation.plot(sizes, [2 * each.macs / GIGA for each in costs], **style)
    for operator, name in NAMES.items():
        if operator not in figure.largest:
            continue
        style = {"color": COLOURS[operator], "label": f"measured: {name}"}
        for axes, key, factor, dash in ((memory, "kept_bytes", 1 / GIGA, "o"), (time, "seconds", 1.0, "o-")):
            at, values = of(points, operator, key, factor)
            if at:
                axes.plot(at, values, dash, **style)
    titles = (
        "memory, GB (points: kept for backward)",
        "computation, GMACC (2 per MAC)",
        "time, forward and backward, s",
    )
    for axes, title in zip((memory, computation, time), titles, strict=True):
        if not axes.lines:  # time, of which the paper has no formula and nothing was measured
            axes.set_axis_off()
            continue
        axes.set(xscale="log", yscale="log", title=title)
        axes.set_xticks(sizes, [figure.label.format(size) for size in sizes])
        axes.set_xticks([], minor=True)
        axes.grid(alpha=0.3, which="both")
    handles = {
        label: handle
        for axes in (memory, time)
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    drawing.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    devices = {point["device"] for point in points if "device" in point}
    points_of = f" Points: {', '.join(devices)}" if devices else ""
    drawing.suptitle(f"Lines: the paper's formulas.{points_of}", fontsize=9)
    file.parent.mkdir(parents=True, exist_ok=True)
    drawing.savefig(file, dpi=120)
    plt.close(drawing)


def main() -> None:
    """Measure what is missing, and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("figure", choices=list(FIGURES))
    parser.add_argument("--measure", choices=[*WHAT], default="all", help="which missing points are measured")
    parser.add_argument("--largest", type=int, help="largest side or length that is measured")
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    parser.add_argument("--picture", type=Path, help="docs/images/fa-figure-4.png or -5.png by default")
    arguments = parser.parse_args()
    figure, file = FIGURES[arguments.figure], arguments.runs / f"fa-figure-{arguments.figure}.jsonl"
    picture = arguments.picture or IMAGES / f"fa-figure-{arguments.figure}.png"
    measure(figure, WHAT[arguments.measure], arguments.largest, file)
    draw(figure, read(file), picture)
    print(f"picture: {picture}")


if __name__ == "__main__":
    main()
