"""The figures of `farfield maps`, after FA's Figures 2 and 7, and the norms' scales over training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from torch import Tensor

from farfield.maps import overlay
from farfield.tasks.checkpoints import written

# Of the positions that ask: to be told apart by people who see colours differently, and on any photograph.
COLOURS = ("#ff3b30", "#34c759", "#2f7bff", "#ffd60a", "#d65cff", "#ff9f0a", "#40e0ff", "#ff7eb6")
INK, FAINT = "#1b1d21", "#6b7280"
PANELS = 6


class Photograph(NamedTuple):
    """A photograph.

    Attributes:
        path: Its file.
        height: Its rows of pixels.
        width: Its columns of pixels.
        pixels: `uint8` `(3, height, width)`.
        shown: Its colours `(3, y, x)` in 0..1, smaller if it is large.
    """

    path: Path
    height: int
    width: int
    pixels: Tensor
    shown: Tensor


class Heat(NamedTuple):
    """One heat map: weights `(h, w)`, what is written above it, and the pixel that asks, with its colour."""

    weights: Tensor
    label: str
    pixel: tuple[int, int] | None = None
    colour: str = INK


def draw_rows(photograph: Photograph, heats: Sequence[Heat], title: str, note: str) -> Figure:
    """FA's Figure 2: the photograph with the positions that ask, then what each of them attends to."""
    columns = len(heats) + 1 if len(heats) < 4 else 3
    figure, axes = panels(-(-(len(heats) + 1) // columns), columns, photograph.height / photograph.width, title, note)
    positions = axes.ravel()
    show(positions[0], photograph, photograph.shown, "the positions that ask")
    for heat, axis in zip(heats, positions[1:], strict=False):
        show(axis, photograph, overlay(photograph.shown, heat.weights), heat.label)
        mark(positions[0], heat)
        mark(axis, heat)
    return figure


def draw_masks(rows: Sequence[tuple[Photograph, Sequence[Heat]]], title: str, note: str) -> Figure:
    """FA's Figure 7: a photograph a row, and what its slots are made of in columns."""
    tallest = max(photograph.height / photograph.width for photograph, _ in rows)
    figure, axes = panels(len(rows), len(rows[0][1]) + 1, tallest, title, note)
    for (photograph, heats), positions in zip(rows, axes, strict=True):
        show(positions[0], photograph, photograph.shown, photograph.path.name)
        for heat, axis in zip(heats, positions[1:], strict=True):
            show(axis, photograph, overlay(photograph.shown, heat.weights), heat.label)
    return figure


def draw_scales(epochs: Sequence[int], scales: Mapping[str, np.ndarray], title: str, note: str) -> Figure:
    """The learned scales of each layer's norm `(epochs, scales)` over the epochs, one line a scale."""
    columns = min(5, len(scales))
    figure, axes = panels(-(-len(scales) // columns), columns, 0.75, title, note)
    for (name, values), axis in zip(scales.items(), axes.ravel(), strict=False):
        axis.set_axis_on()
        axis.plot(epochs, values, color="#2f7bff", alpha=max(0.25, values.shape[1] ** -0.5), linewidth=1.2)
        axis.axhline(1, color=FAINT, linewidth=0.7, linestyle=":")
        axis.set_title(name, fontsize=8, color=INK)
        axis.tick_params(labelsize=7, colors=FAINT)
        axis.spines[:].set_color(FAINT)
    limits = [bound for values in scales.values() for bound in (values.min(), values.max(), 1.0)]
    margin = 0.05 * (max(limits) - min(limits)) or 0.05
    for axis in axes.ravel()[: len(scales)]:
        axis.set_ylim(min(limits) - margin, max(limits) + margin)
    return figure


def panels(rows: int, columns: int, aspect: float, title: str, note: str) -> tuple[Figure, np.ndarray]:
    """An empty figure of panels of one aspect, a title above them and a note below."""
    width = 2.6
    size = (max(columns, 3) * width, rows * (width * aspect + 0.45) + 0.6)
    figure = Figure(figsize=size, dpi=110, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, x=0.01, ha="left", fontsize=11, color=INK, weight="bold")
    figure.supxlabel(note, x=0.01, ha="left", fontsize=7.5, color=FAINT)
    axes = figure.subplots(rows, columns, squeeze=False)
    for axis in axes.ravel():
        axis.set_axis_off()
    return figure, axes


def show(axis: Axes, photograph: Photograph, colours: Tensor, label: str) -> None:
    """Show an image in the photograph's own pixels, a line of text above it."""
    axis.imshow(colours.permute(1, 2, 0).numpy(), extent=(0, photograph.width, photograph.height, 0))
    axis.set_title(label, fontsize=8, color=INK)


def mark(axis: Axes, heat: Heat) -> None:
    """Mark the pixel that asks."""
    if heat.pixel is not None:
        row, column = heat.pixel
        axis.plot(column + 0.5, row + 0.5, "o", markersize=7, color=heat.colour, markeredgecolor="white", clip_on=False)


def write(figure: Figure, path: Path) -> None:
    """Write a figure, whole or not at all, in the format of its suffix."""
    formats = figure.canvas.get_supported_filetypes()
    suffix = path.suffix.removeprefix(".").lower()
    if suffix not in formats:
        raise ValueError(
            f"--output {path}: a figure cannot be {path.suffix or 'without a suffix'}; it can be .png, .pdf, .svg."
        )
    with written(path) as file:
        figure.savefig(file, format=suffix, facecolor="white")
