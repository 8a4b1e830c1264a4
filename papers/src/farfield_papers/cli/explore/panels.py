"""The panels of the page: operators on features of a photograph, or heads of a layer of a trained network."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.datasets import load_sample_image
from torch import Tensor

from farfield import cost, maps
from farfield._operators import FACTS
from farfield.nn.attention import GridAttention
from farfield.ops.latent import flare
from farfield.ops.table import OPERATORS
from farfield_papers.cli.explore.features import CREDIT, features, set_learned
from farfield_papers.cli.loaded_network import load
from farfield_papers.cli.maps.views import read_photograph, select_layer

_LATENTS = 16  # of operators that have some: each is a basis that is drawn
SIZES = (7, 14, 28, 56, 112, 224, 448)
# Queries on the longer side of the grid: the page has a row of each query, and grows with their number.
_QUERIES = 8


class HeadPanel(NamedTuple):
    name: str
    text: str  # what it is, in a line
    arguments: str  # of the functions of `maps` that compute it, in Python
    head: int  # its index among the heads
    operator: str
    channels: int  # of the grid, for the cost
    rows: Tensor  # `(queries, height, width)`, the weights of all positions for each query
    basis: Tensor | None  # `(slots, height, width)`, of operators that have one


class PageContent(NamedTuple):
    photograph: NDArray[np.uint8]  # `(height, width, 3)`, 8-bit
    credit: str  # whose it is
    intro: str  # what the panels have in common
    note: str  # what the names in the arguments of panels are
    size: tuple[int, int]  # height and width of the grid
    panels: list[HeadPanel]


def panels_of_features(image: Path | None, operators: Sequence[str], longer: int) -> PageContent:
    """Return a panel for each operator, on untrained features: a photograph's colours, edges and contrast."""
    photograph, credit = _read(image)
    height, width = photograph.shape[:2]
    size = tuple(max(2, round(longer * side / max(height, width))) for side in (height, width))
    grid = features(photograph / 255.0, size)
    panels = [_panel_of_features(name, grid) for name in operators]
    intro = "Each panel is one operator. All get the same features of the photograph: colours, edges, contrast."
    imports = (
        "import torch; from farfield import maps; from farfield.nn import GridAttention; from farfield.ops import flare"
    )
    note = f"{imports}; grid: the features, {tuple(grid.shape)}"
    return PageContent(photograph, credit, intro, note, (size[0], size[1]), panels)


def _panel_of_features(name: str, grid: Tensor) -> HeadPanel:
    latents = name == "flare"
    module = GridAttention(grid.shape[1], flare(_LATENTS) if latents else name)
    set_learned(module, grid, [length // 2 for length in grid.shape[2:]])
    operator = f"flare({_LATENTS})" if latents else f'"{name}"'
    arguments = f"GridAttention({grid.shape[1]}, {operator}), grid"
    note = "; the features sum to 0, and so do its scores" if OPERATORS[name].score == "ones" else ""
    note = f"; {_LATENTS} latents here, and {OPERATORS[name].slots} in the cost" if latents else note
    return HeadPanel(name, _text_of(name) + note, arguments, 0, name, grid.shape[1], *_heads_of(module, grid)[0])


def panels_of_layer(image: Path | None, model: str, layer: str | None, longer: int) -> PageContent:
    """Return a panel for each head of a layer of a trained network."""
    photograph, credit = _read(image)
    trained = load(model)
    image_of_network = trained.prepare(torch.from_numpy(photograph).permute(2, 0, 1), None)
    attentions = maps.layers(trained.network, image_of_network)
    name = select_layer(attentions, layer)
    module, grid = attentions[name].attention, attentions[name].grid
    if attentions[name].context is not None:
        raise ValueError(
            f"{name} has keys that do not come from its queries' grid, as those of a transformer or of a context, "
            f"and the page has one grid; fix: farfield maps --layer {name}, or another --layer."
        )
    check_shown(name, module, grid, longer)
    operator, arguments = module.operator_name, f'*maps.layers(network, image)["{name}"][:2]'
    text = f"{operator}, {_text_of(operator)}"
    panels = [
        HeadPanel(f"head {number}", text, arguments, number, operator, module.channels, *head)
        for number, head in enumerate(_heads_of(module, grid))
    ]
    intro, note = (
        f"Each panel is one head of {name}.",
        "import torch; from farfield import maps; image: what the network was called with",
    )
    return PageContent(photograph, credit, intro, note, (grid.shape[2], grid.shape[3]), panels)


def _read(image: Path | None) -> tuple[NDArray[np.uint8], str]:
    """Return a photograph `(height, width, 3)`, 8-bit, and whose it is; None is a flower that scikit-learn ships."""
    if image is None:
        return np.array(load_sample_image("flower.jpg")), CREDIT
    return read_photograph(image).pixels.permute(1, 2, 0).numpy(), ""


def check_shown(name: str, module: GridAttention, grid: Tensor, longer: int) -> None:
    """Refuse a layer whose slots and cost are not known, or whose grid is too large."""
    if module.operator_name not in OPERATORS:
        raise ValueError(
            f"{name} has an operator of your own, whose cost the page does not know; fix: another --layer."
        )
    if (longest := max(grid.shape[2:])) > longer:
        size, fix = "×".join(map(str, grid.shape[2:])), f", or --size {longest}" if longest <= 64 else ""
        raise ValueError(f"{name} has a grid of {size}, longer than --size {longer}; fix: a coarser --layer{fix}.")


def query_axes(size: tuple[int, int]) -> list[list[int]]:
    """Return the rows and the columns at which the page has queries, evenly spread."""
    step = max(1, round(max(size) / _QUERIES))
    return [list(range(min(step, length) // 2, length, step)) for length in size]


def _heads_of(module: GridAttention, grid: Tensor) -> list[tuple[Tensor, Tensor | None]]:
    """Return the attention rows of each head for all queries of the page, and the basis of its slots."""
    queries = itertools.product(*query_axes((grid.shape[2], grid.shape[3])))
    rows = torch.stack([maps.attention_row(module, grid, position)[0] for position in queries], 1)
    if module.operator.basis is None:
        return [(each, None) for each in rows]
    return list(zip(rows, maps.basis_masks(module, grid)[0], strict=True))


def _text_of(operator: str) -> str:
    """Return an operator's equation and slots in a line."""
    facts = FACTS[operator]
    return f"{facts.source}; slots: {facts.slots}"


def costs_of(panel: HeadPanel) -> tuple[list[int], list[int]]:
    """Return the MACs and the bytes of a forward pass on square grids of SIZES, without projections."""
    costs = [cost.predict(panel.operator, channels=panel.channels, size=(side, side)) for side in SIZES]
    return [each.macs for each in costs], [each.activation_bytes for each in costs]
