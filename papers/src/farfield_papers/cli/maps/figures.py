"""The figures of `farfield maps`: attention rows (FA Figure 2) and basis masks (FA Figure 7)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.cm import ScalarMappable
from matplotlib.colors import ListedColormap, Normalize
from matplotlib.figure import Figure
from torch import Tensor

from farfield.maps import overlay
from farfield.maps.overlays import full_weight
from farfield_papers.tasks.checkpoints import written

# Colours of the query positions: distinguishable with colour vision deficiency, and on any photograph.
COLOURS = ("#ff3b30", "#34c759", "#2f7bff", "#ffd60a", "#d65cff", "#ff9f0a", "#40e0ff", "#ff7eb6")
_INK, _FAINT = "#1b1d21", "#6b7280"
PANELS = 6


class Photograph(NamedTuple):
    path: Path
    height: int
    width: int
    pixels: Tensor  # `uint8` `(3, height, width)`
    shown: Tensor  # its colours `(3, y, x)` in 0..1, reduced in size if it is large


class Heat(NamedTuple):
    """A heat map: weights `(h, w)` as multiples of 1/N, the text above it, the pixel of the query with its colour."""

    weights: Tensor
    label: str
    pixel: tuple[int, int] | None = None
    colour: str = _INK


def draw_rows(photograph: Photograph, heats: Sequence[Heat], title: str, note: str) -> Figure:
    """Draw the photograph with the query positions, then the attention row of each (FA Figure 2)."""
    columns = len(heats) + 1 if len(heats) < 4 else 3
    figure, axes = panels(-(-(len(heats) + 1) // columns), columns, photograph.height / photograph.width, title, note)
    positions, full = axes.ravel(), max(full_weight(heat.weights) for heat in heats)
    _show(positions[0], photograph, photograph.shown, "the query positions")
    for heat, axis in zip(heats, positions[1:], strict=False):
        _show(axis, photograph, overlay(photograph.shown, heat.weights, full=full), heat.label)
        _mark(positions[0], heat)
        _mark(axis, heat)
    _add_colour_bar(figure, axes, heats, full)
    return figure


def draw_masks(rows: Sequence[tuple[Photograph, Sequence[Heat]]], title: str, note: str) -> Figure:
    """Draw one row of panels per photograph: the photograph, then its basis masks (FA Figure 7)."""
    tallest = max(photograph.height / photograph.width for photograph, _ in rows)
    figure, axes = panels(len(rows), len(rows[0][1]) + 1, tallest, title, note)
    every = [heat for _, heats in rows for heat in heats]
    full = max(full_weight(heat.weights) for heat in every)
    for (photograph, heats), positions in zip(rows, axes, strict=True):
        _show(positions[0], photograph, photograph.shown, photograph.path.name)
        for heat, axis in zip(heats, positions[1:], strict=True):
            _show(axis, photograph, overlay(photograph.shown, heat.weights, full=full), heat.label)
    _add_colour_bar(figure, axes, every, full)
    return figure


def panels(rows: int, columns: int, aspect: float, title: str, note: str) -> tuple[Figure, np.ndarray]:
    """Make a figure of empty panels of one aspect, with a title above them and a note below."""
    width = 2.6
    size = (max(columns, 3) * width, rows * (width * aspect + 0.45) + 0.6)
    figure = Figure(figsize=size, dpi=110, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, x=0.01, ha="left", fontsize=11, color=_INK, weight="bold")
    figure.supxlabel(note, x=0.01, ha="left", fontsize=7.5, color=_FAINT)
    axes = figure.subplots(rows, columns, squeeze=False)
    for axis in axes.ravel():
        axis.set_axis_off()
    return figure, axes


def _show(axis: Axes, photograph: Photograph, colours: Tensor, label: str) -> None:
    """Show an image with the photograph's pixels as its coordinates, and a line of text above it."""
    axis.imshow(colours.permute(1, 2, 0).numpy(), extent=(0, photograph.width, photograph.height, 0))
    axis.set_title(label, fontsize=8, color=_INK)


def _add_colour_bar(figure: Figure, axes: np.ndarray, heats: Sequence[Heat], full: float) -> None:
    """Add the one scale of all heat maps: the colours of their weights over a grey photograph."""
    low = -full if any(bool((heat.weights < 0).any()) for heat in heats) else 0.0
    colours = overlay(torch.full((3, 1, 256), 0.5), torch.linspace(low, full, 256)[None], full=full)
    scale = ScalarMappable(Normalize(low, full), ListedColormap(colours[:, 0].T.numpy()))
    bar = figure.colorbar(scale, ax=axes, extend="both" if low else "max", fraction=0.03, pad=0.02)
    bar.set_label("weight, times 1/N", fontsize=8, color=_INK)
    bar.ax.tick_params(labelsize=7, colors=_FAINT)


def _mark(axis: Axes, heat: Heat) -> None:
    if heat.pixel is not None:
        row, column = heat.pixel
        axis.plot(column + 0.5, row + 0.5, "o", markersize=7, color=heat.colour, markeredgecolor="white", clip_on=False)


def write(figure: Figure, path: Path) -> None:
    """Write a figure atomically, in the format of its suffix; refuse a suffix of no such format."""
    formats = figure.canvas.get_supported_filetypes()
    suffix = path.suffix.removeprefix(".").lower()
    if suffix not in formats:
        ending = f"as {path.suffix}" if path.suffix else "without a suffix"
        raise ValueError(f"--output {path}: a figure cannot be written {ending}; fix: .png, .pdf or .svg.")
    with written(path) as file:
        figure.savefig(file, format=suffix, facecolor="white")
