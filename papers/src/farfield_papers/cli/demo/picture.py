"""The picture of `farfield demo`: the attention row of one position of a photograph, by each operator."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from numpy.typing import NDArray
from skimage import color, transform
from sklearn.datasets import load_sample_image
from torch import Tensor

from farfield import cost
from farfield.maps import attention_row
from farfield.nn import GridAttention
from farfield_papers.cli.explore.features import CREDIT, features, set_learned
from farfield_papers.tasks.checkpoints import written

_PAPER, _INK, _FAINT, _ACCENT, _TROUGH = "#101216", "#f4f1ea", "#98a0ad", "#ff9f4a", "#2a2e37"
_COLD = LinearSegmentedColormap.from_list("cold", ["#06080d", "#12355b", "#3f7fc0"])
# Where the bars of the costs start: below the cheapest operator, a round number of MACs.
_CHEAP = 1e5
_SIZE = (64, 96)
# On a petal of the small dahlia at the lower edge: what it attends to lies far away.
_POSITION = (60, 57)
CAPTIONS = {
    "softmax": "all positions, weighted by similarity",
    "softmax_pooled": "the maximum of each 2 × 2 positions",
    "kronecker_kv": "the means of all rows and columns",
    "kronecker_qkv": "axis means attend to axis means",
    "averaged": "products with all positions, of both signs",
    "factorized_gaussian": "one map per channel, mixed per position",
    "siamese": "the sum of the query's and the key's score",
}


class _Panel(NamedTuple):
    """One operator's part of the picture: its row of the attention matrix, and its MACs."""

    name: str
    weights: NDArray[np.float64]
    macs: int


def write(path: Path, position: Sequence[int] = _POSITION, size: Sequence[int] = _SIZE) -> None:
    """Write the picture atomically: a photograph with the query position, and its attention row by each operator."""
    photograph = load_sample_image("flower.jpg") / 255.0
    grid = features(photograph, size)
    figure = _draw(photograph, [_panel(name, grid, position) for name in CAPTIONS], position)
    with written(path) as file:
        figure.savefig(file, format="png", facecolor=_PAPER)


def _panel(name: str, grid: Tensor, position: Sequence[int]) -> _Panel:
    """Compute the attention row of one operator at the position, and its cost by formula."""
    attention = GridAttention(grid.shape[1], name)
    set_learned(attention, grid, position)
    weights = attention_row(attention, grid, position)[0].sum(0).double().numpy()
    return _Panel(name, weights, cost.predict(name, channels=grid.shape[1], size=grid.shape[2:]).macs)


def _draw(photograph: NDArray[np.float64], panels: Sequence[_Panel], position: Sequence[int]) -> Figure:
    columns = (len(panels) + 2) // 2
    figure = Figure(figsize=(4.15 * columns, 8.7), dpi=150)
    axes = figure.subplots(2, columns).ravel()
    figure.subplots_adjust(left=0.02, right=0.98, top=0.82, bottom=0.12, wspace=0.07, hspace=0.4)
    figure.text(0.02, 0.935, "What one petal attends to", color=_INK, fontsize=23, weight="bold")
    (h, w), most = panels[0].weights.shape, max(one.macs for one in panels)
    subtitle = f"The query is the marked position, keys and values are all {h} × {w} positions; "
    subtitle += "all operators get the same features of colour and contrast."
    figure.text(0.02, 0.893, subtitle, color=_FAINT, fontsize=12.5)
    _show_photograph(axes[0], photograph, position, (h, w))
    for axis, one in zip(axes[1:], panels, strict=False):
        _show_panel(axis, photograph, one, position, most)
    note = "Glow: weight of each position, relative to the largest but 0.2 % of its panel; blue: negative weights.     "
    note += f"Bars: MACs of one pass, value projection included, on a log scale from {millions(_CHEAP)}."
    figure.text(0.02, 0.03, note, color=_FAINT, fontsize=10)
    figure.text(0.98, 0.893, CREDIT, color=_FAINT, fontsize=10, ha="right")
    return figure


def _show_photograph(axis: Axes, photograph: NDArray[np.float64], position: Sequence[int], size: Sequence[int]) -> None:
    axis.imshow(photograph)
    _mark(axis, photograph, position, size)
    axis.set_axis_off()
    _label(axis, "photograph", "", "the query is the marked position")


def _show_panel(axis: Axes, photograph: NDArray[np.float64], one: _Panel, position: Sequence[int], most: int) -> None:
    """Show one operator's weights as a glow over the darkened photograph, and the logarithm of its MACs as a bar."""
    height, width = photograph.shape[:2]
    dark = color.rgb2gray(photograph)[..., None] * np.array([0.26, 0.28, 0.33])
    glow = transform.resize(one.weights / np.quantile(np.abs(one.weights), 0.998), (height, width), order=3)
    strength = np.clip(np.abs(glow), 0, 1)[..., None]
    warm = mpl.colormaps["inferno"](0.1 + 0.85 * strength[..., 0])
    colours = np.where(glow[..., None] > 0, warm, _COLD(strength[..., 0]))[..., :3]
    axis.imshow(np.clip(dark * (1 - 0.8 * strength) + colours * strength**0.8, 0, 1))
    _mark(axis, photograph, position, one.weights.shape)
    axis.set_axis_off()
    _label(axis, one.name, millions(one.macs), CAPTIONS[one.name])
    share = np.log(max(one.macs / _CHEAP, 1)) / np.log(most / _CHEAP)
    for length, colour in ((1.0, _TROUGH), (share, _ACCENT)):
        axis.add_patch(
            Rectangle((0, -0.035), length, 0.016, transform=axis.transAxes, color=colour, clip_on=False, lw=0)
        )


def _mark(axis: Axes, photograph: NDArray[np.float64], position: Sequence[int], size: Sequence[int]) -> None:
    y, x = (
        (index + 0.5) * length / side for index, length, side in zip(position, photograph.shape, size, strict=False)
    )
    for colour, width in (("black", 3.6), ("white", 1.8)):
        axis.plot(x, y, "o", markersize=11, markerfacecolor="none", markeredgecolor=colour, markeredgewidth=width)


def _label(axis: Axes, name: str, price: str, caption: str) -> None:
    axis.text(0, 1.04, name, color=_INK, fontsize=14, weight="bold", transform=axis.transAxes)
    axis.text(1, 1.04, price, color=_ACCENT, fontsize=11, ha="right", transform=axis.transAxes)
    axis.text(0, -0.13, caption, color=_FAINT, fontsize=11, transform=axis.transAxes)


def millions(number: float) -> str:
    """Format a number in millions, with three digits."""
    return f"{number / 1e6:.3g} million" if number < 1e9 else f"{number / 1e6:,.0f} million"
