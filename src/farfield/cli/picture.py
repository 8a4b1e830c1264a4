"""The picture of `farfield demo`: what one cell of a photograph attends to, by operator."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import matplotlib as mpl
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from numpy.typing import NDArray
from skimage import color, filters, transform
from sklearn.datasets import load_sample_image
from torch import Tensor

from farfield import cost
from farfield.maps import attention_row
from farfield.nn import GridAttention
from farfield.tasks.checkpoints import written

PAPER, INK, FAINT, ACCENT, TROUGH = "#101216", "#f4f1ea", "#98a0ad", "#ff9f4a", "#2a2e37"
COLD = LinearSegmentedColormap.from_list("cold", ["#06080d", "#12355b", "#3f7fc0"])
# Where the bars of the costs start: below the cheapest operator, a round number of multiply-adds.
CHEAP = 1e5
CREDIT = "Photograph: vultilion, CC BY 2.0, with scikit-learn"
SIDES, SHARPNESS = (64, 96), 14.0
# On a petal of the small dahlia at the lower edge: what it attends to lies far away.
CELL = (60, 57)
SAYS = {
    "softmax": "every cell, weighed by its likeness",
    "softmax_pooled": "the largest of every 2 × 2 cells",
    "kronecker_kv": "the means of all rows and columns",
    "kronecker_qkv": "means ask, and means answer",
    "averaged": "products with all cells, of both signs",
    "factorized_gaussian": "a map for each channel, mixed by the cell",
    "siamese": "the sum of two scores, its own and theirs",
}


class Panel(NamedTuple):
    """One operator's part of the picture: its row of the attention matrix, and its multiply-adds."""

    name: str
    weights: NDArray[np.float64]
    madds: int


def write(path: Path, cell: Sequence[int] = CELL, sides: Sequence[int] = SIDES) -> None:
    """Write the picture, whole or not at all: a photograph with the asking cell, and what it takes from where."""
    photograph = load_sample_image("flower.jpg") / 255.0
    grid = features(photograph, sides)
    figure = draw(photograph, [panel(name, grid, cell) for name in SAYS], cell)
    with written(path) as file:
        figure.savefig(file, format="png", facecolor=PAPER)


def features(photograph: NDArray[np.float64], sides: Sequence[int]) -> Tensor:
    """Describe the surroundings of each cell by colour and contrast at two scales, and by nothing that tells its place.

    Each description has length √SHARPNESS and stands twice, once negated: products are SHARPNESS · cosine, and each
    channel is large where one property is.
    """
    lab = color.rgb2lab(photograph)
    blurred = [filters.gaussian(lab, width, channel_axis=-1) for width in (3, 12)]
    light = lab[..., 0]
    edges = np.log1p(filters.gaussian(filters.sobel(light), 5))
    contrast = np.log1p(np.abs(filters.gaussian(light**2, 8) - filters.gaussian(light, 8) ** 2))
    stacked = np.concatenate([*blurred, edges[..., None], contrast[..., None]], -1)
    cells = transform.resize(stacked, (*sides, stacked.shape[-1]), anti_aliasing=True)
    cells = (cells - cells.mean((0, 1))) / cells.std((0, 1))
    cells *= np.sqrt(SHARPNESS / 2) / np.linalg.norm(cells, axis=-1, keepdims=True)
    return torch.from_numpy(np.concatenate([cells, -cells], -1)).float().permute(2, 0, 1)[None]


def panel(name: str, grid: Tensor, cell: Sequence[int]) -> Panel:
    """Take one operator's attention row at the cell, and its cost by formula."""
    attention = GridAttention(grid.shape[1], name)
    if attention.weight is not None:
        # Nothing is trained here: the direction in which the cells differ most stands for a learned one.
        direction = torch.linalg.eigh(grid.flatten(2)[0].cov()).eigenvectors[:, -1]
        with torch.no_grad():
            attention.weight.copy_(direction * (direction @ grid[0, :, cell[0], cell[1]]).sign())
    weights = attention_row(attention, grid, cell)[0].sum(0).double().numpy()
    return Panel(name, weights, cost.predict(name, channels=grid.shape[1], sides=grid.shape[2:]).madds)


def draw(photograph: NDArray[np.float64], panels: Sequence[Panel], cell: Sequence[int]) -> Figure:
    """Lay the panels out in two rows, the photograph first."""
    columns = (len(panels) + 2) // 2
    figure = Figure(figsize=(4.15 * columns, 8.7), dpi=150)
    axes = figure.subplots(2, columns).ravel()
    figure.subplots_adjust(left=0.02, right=0.98, top=0.82, bottom=0.12, wspace=0.07, hspace=0.4)
    figure.text(0.02, 0.935, "What one petal attends to", color=INK, fontsize=23, weight="bold")
    (h, w), most = panels[0].weights.shape, max(one.madds for one in panels)
    subtitle = (
        f"The marked cell asks, all {h} × {w} cells answer, by the same features of colour and contrast everywhere."
    )
    figure.text(0.02, 0.893, subtitle, color=FAINT, fontsize=12.5)
    show_photograph(axes[0], photograph, cell, (h, w))
    for axis, one in zip(axes[1:], panels, strict=False):
        show_panel(axis, photograph, one, cell, most)
    note = "Glow: the weight of each cell, relative to the largest of its panel; blue: negative weights.     "
    note += f"Bars: multiply-adds of one pass, value map included, on a log scale from {millions(CHEAP)}."
    figure.text(0.02, 0.03, note, color=FAINT, fontsize=10)
    figure.text(0.98, 0.03, CREDIT, color=FAINT, fontsize=10, ha="right")
    return figure


def show_photograph(axis: Axes, photograph: NDArray[np.float64], cell: Sequence[int], sides: Sequence[int]) -> None:
    """Show the photograph with the marked cell."""
    axis.imshow(photograph)
    mark(axis, photograph, cell, sides)
    axis.set_axis_off()
    label(axis, "photograph", "", "the marked cell asks")


def show_panel(axis: Axes, photograph: NDArray[np.float64], one: Panel, cell: Sequence[int], most: int) -> None:
    """Show one operator's weights as a glow over the darkened photograph, and its cost as a bar."""
    height, width = photograph.shape[:2]
    dark = color.rgb2gray(photograph)[..., None] * np.array([0.26, 0.28, 0.33])
    glow = transform.resize(one.weights / np.quantile(np.abs(one.weights), 0.998), (height, width), order=3)
    strength = np.clip(np.abs(glow), 0, 1)[..., None]
    warm = mpl.colormaps["inferno"](0.1 + 0.85 * strength[..., 0])
    colours = np.where(glow[..., None] > 0, warm, COLD(strength[..., 0]))[..., :3]
    axis.imshow(np.clip(dark * (1 - 0.8 * strength) + colours * strength**0.8, 0, 1))
    mark(axis, photograph, cell, one.weights.shape)
    axis.set_axis_off()
    label(axis, one.name, millions(one.madds), SAYS[one.name])
    share = np.log(max(one.madds / CHEAP, 1)) / np.log(most / CHEAP)
    for length, colour in ((1.0, TROUGH), (share, ACCENT)):
        axis.add_patch(
            Rectangle((0, -0.035), length, 0.016, transform=axis.transAxes, color=colour, clip_on=False, lw=0)
        )


def mark(axis: Axes, photograph: NDArray[np.float64], cell: Sequence[int], sides: Sequence[int]) -> None:
    """Ring the asking cell."""
    y, x = ((index + 0.5) * size / side for index, size, side in zip(cell, photograph.shape, sides, strict=False))
    for colour, width in (("black", 3.6), ("white", 1.8)):
        axis.plot(x, y, "o", markersize=11, markerfacecolor="none", markeredgecolor=colour, markeredgewidth=width)


def label(axis: Axes, name: str, price: str, says: str) -> None:
    """Write the name and the price above a panel, what answers below."""
    axis.text(0, 1.04, name, color=INK, fontsize=14, weight="bold", transform=axis.transAxes)
    axis.text(1, 1.04, price, color=ACCENT, fontsize=11, ha="right", transform=axis.transAxes)
    axis.text(0, -0.13, says, color=FAINT, fontsize=11, transform=axis.transAxes)


def millions(number: float) -> str:
    """Write a number in millions, with three digits."""
    return f"{number / 1e6:.3g} million" if number < 1e9 else f"{number / 1e6:,.0f} million"
