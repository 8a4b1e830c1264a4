"""Results of benchmarks/recall.py: accuracy against the number of pairs, as a table and as a picture."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any, NamedTuple

from recall_task import CONTESTANTS, VALUES, counted

# The least accuracy at which a number of pairs is held.
HELD = 0.9


# ---- the table -------------------------------------------------------------------------------------------------------
class Point(NamedTuple):
    """The accuracies of an operator for a number of pairs at its best rate, one per seed."""

    rate: float
    accuracies: list[float]

    @property
    def mean(self) -> float:
        """The mean over the seeds."""
        return statistics.mean(self.accuracies)

    def __str__(self) -> str:
        """Format the mean, the least and the greatest accuracy, in percent."""
        mean, least, most = (f"{100 * each:.1f}" for each in (self.mean, min(self.accuracies), max(self.accuracies)))
        return mean if len(self.accuracies) == 1 else f"{mean} ({least}–{most})"


# Operator, in the order of CONTESTANTS -> number of pairs -> point.
Curves = dict[str, dict[int, Point]]


def curves_by_size(lines: list[dict[str, Any]]) -> dict[str, Curves]:
    """Return the curves of each grid size and number of steps, by title."""
    result = {}
    for _, size, steps in sorted({(len(line["size"]), tuple(line["size"]), line["steps"]) for line in lines}):
        mine = [line for line in lines if (tuple(line["size"]), line["steps"]) == (size, steps)]
        names = sorted({line["operator"] for line in mine}, key=CONTESTANTS.index)
        title = f"{' × '.join(map(str, size))}, {steps:,} steps"
        result[title] = {name: curve([line for line in mine if line["operator"] == name]) for name in names}
    return result


def curve(lines: list[dict[str, Any]]) -> dict[int, Point]:
    """Return the points of one operator at one size."""
    every = sorted({line["pairs"] for line in lines})
    return {pairs: best([line for line in lines if line["pairs"] == pairs]) for pairs in every}


def best(lines: list[dict[str, Any]]) -> Point:
    """Return the accuracies of the best rate, among the rates with the most seeds."""
    rates = sorted({line["rate"] for line in lines})
    points = [Point(rate, [line["accuracy"] for line in lines if line["rate"] == rate]) for rate in rates]
    return max(points, key=lambda point: (len(point.accuracies), point.mean))


def held(points: dict[int, Point]) -> str:
    """Return in words how many pairs an operator holds."""
    enough = [pairs for pairs, point in points.items() if point.mean >= HELD]
    if not enough:
        return f"fewer than {min(points)}"
    return f"{max(enough)} or more" if max(enough) == max(points) else str(max(enough))


def table(title: str, curves: Curves) -> str:
    """Format the curves of one size as a Markdown table."""
    every = every_number(curves)
    rows = [f"{title}: right, in %, by pairs", ""]
    rows.append("| | " + " | ".join(map(str, every)) + " | pairs held | best rates | seeds |")
    rows.append("|---" * (len(every) + 4) + "|")
    for name, points in curves.items():
        entries = [str(points.get(pairs, "-")) for pairs in every]
        rates, seeds = zip(*((f"{point.rate:g}", str(len(point.accuracies))) for point in points.values()), strict=True)
        entries += [held(points), *(each[0] if len(set(each)) == 1 else ", ".join(each) for each in (rates, seeds))]
        rows.append(f"| {name} | " + " | ".join(entries) + " |")
    for name, shares in (("most frequent value", map(counted, every)), ("chance", [1 / VALUES] * len(every))):
        rows.append(f"| {name} | " + " | ".join(f"{100 * share:.1f}" for share in shares) + " | | | |")
    return "\n".join(rows)


def every_number(curves: Curves) -> list[int]:
    """Return all numbers of pairs that were run."""
    return sorted({pairs for points in curves.values() for pairs in points})


# ---- the picture -----------------------------------------------------------------------------------------------------
# Okabe and Ito's colours, distinguishable with any colour vision; without yellow, which is pale on white.
COLOURS = ["#000000", "#E69F00", "#56B4E9", "#009E73", "#0072B2", "#D55E00", "#CC79A7"]
LINES = [("-", "o"), ("--", "s"), (":", "^"), ("-.", "D")]


def draw_picture(sizes: dict[str, Curves], file: Path) -> None:
    """Draw the curves of each size with more than one number of pairs: means, and bars from least to greatest."""
    from matplotlib.figure import Figure

    sizes = {title: curves for title, curves in sizes.items() if len(every_number(curves)) > 1}
    # The legend has a line for each curve, and two more.
    height = max(4.8, 0.23 * (2 + max(map(len, sizes.values()))) + 0.3)
    figure = Figure(figsize=(4.6 * len(sizes) + 2.2, height), layout="constrained")
    panels = figure.subplots(1, len(sizes), sharey=True, squeeze=False)[0]
    for axes, (title, curves) in zip(panels, sizes.items(), strict=True):
        for name, points in curves.items():
            draw_curve(axes, name, points)
        every = every_number(curves)
        axes.plot(every, [100 * counted(pairs) for pairs in every], color="grey", ls=":", label="most frequent value")
        axes.axhline(100 / VALUES, color="grey", ls="--", label="chance")
        axes.set(title=title, xlabel="pairs", xscale="log", ylim=(0, 104))
        axes.set_xticks(every, [str(pairs) for pairs in every])
        axes.set_xticks([], minor=True)
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("right, %")
    handles = {
        label: handle for axes in panels for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.legend(handles.values(), handles.keys(), loc="outside right upper", frameon=False, handlelength=4)
    figure.savefig(file, dpi=150)


def draw_curve(axes: Any, name: str, points: dict[int, Point]) -> None:
    """Draw one operator, in the same style in every picture, slightly shifted so that equal curves can be seen."""
    index = CONTESTANTS.index(name)
    line, marker = LINES[index // len(COLOURS) % len(LINES)]
    shift = 1 + 0.006 * (index - len(CONTESTANTS) / 2)
    means = [100 * point.mean for point in points.values()]
    below = [mean - 100 * min(point.accuracies) for mean, point in zip(means, points.values(), strict=True)]
    above = [100 * max(point.accuracies) - mean for mean, point in zip(means, points.values(), strict=True)]
    style = {"color": COLOURS[index % len(COLOURS)], "ls": line, "marker": marker, "markersize": 5, "lw": 1.5}
    axes.errorbar([pairs * shift for pairs in points], means, [below, above], label=name, **style)
