"""The panels of the page: operators on features of a photograph, or heads of a layer of a trained network."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.datasets import load_sample_image
from torch import Tensor

from farfield import cost, maps
from farfield._operators import FACTS
from farfield.maps.inputs import read_call, read_query, with_running_statistics
from farfield.nn.attention import GridAttention
from farfield.ops.engine import summarize_grid
from farfield.ops.grid import ALL, AXES, NORMALIZED_AXES, POOLED
from farfield.ops.latent import flare
from farfield.ops.projection import project_keys
from farfield.ops.table import OPERATORS, Operator
from farfield_papers.cli.explore.features import CREDIT, features, set_learned
from farfield_papers.cli.loaded_network import load
from farfield_papers.cli.maps.views import read_photograph, select_layer

# Of operators that have some: their scores of all positions are in the page, 64 would be most of it.
_LATENTS = 16
SIZES = (7, 14, 28, 56, 112, 224, 448)
# Names of the sources of keys and queries in engine.js.
_SOURCES = {ALL: "all", AXES: "axes", NORMALIZED_AXES: "axes", POOLED: "windows"}


class HeadPanel(NamedTuple):
    name: str
    text: str  # what it is, in a line
    arguments: str  # of the functions of `maps` that compute it, in Python
    head: int  # its index among the heads
    operator: str
    channels: int  # of the grid, for the cost
    queries: Tensor  # `(d, positions)`, with the scale of the products in them
    keys: Tensor  # `(d, positions)`


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
    (queries, keys), *_ = _heads_of(module, grid)
    operator = f"flare({_LATENTS})" if latents else f'"{name}"'
    arguments = f"GridAttention({grid.shape[1]}, {operator}), grid"
    note = "; the features sum to 0, and so do its scores" if OPERATORS[name].score == "ones" else ""
    note = f"; {_LATENTS} latents here, and {OPERATORS[name].slots} in the cost" if latents else note
    return HeadPanel(name, _text_of(name) + note, arguments, 0, name, grid.shape[1], queries, keys)


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
    panels = [
        HeadPanel(
            f"head {number}", f"{operator}, {_text_of(operator)}", arguments, number, operator, module.channels, *head
        )
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
    """Refuse a layer whose rows are not made of queries and keys of positions, or whose grid is too large."""
    if module.operator_name not in OPERATORS:
        raise ValueError(f"{name} has an operator of your own, which the page cannot compute; fix: another --layer.")
    if module.operator.keys_from == POOLED and module.key is not None:
        raise ValueError(f"{name} projects keys after pooling, which the page cannot do; fix: another --layer.")
    if (longest := max(grid.shape[2:])) > longer:
        size, fix = "×".join(map(str, grid.shape[2:])), f", or --size {longest}" if longest <= 64 else ""
        raise ValueError(f"{name} has a grid of {size}, longer than --size {longer}; fix: a coarser --layer{fix}.")


def _heads_of(module: GridAttention, grid: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Return queries and keys `(d, positions)` of each head, or their scores, in float32."""
    # Of positions also where keys or queries are sums, as the projections are linear. Norms of products multiply the
    # queries by their running statistics; those of responses are left out, as in `maps.attention_row`.
    positions = replace(module.operator, keys_from=ALL, queries_from=ALL)
    with torch.no_grad(), with_running_statistics(module):
        call = read_call(module, grid, grid.dtype)._replace(operator=positions)
        gathered = ALL.gather(grid.float(), None, None)
        queries, _ = read_query(call, gathered, summarize_grid(call, grid.float()))
        keys = project_keys(call, gathered) if positions.reads_keys else queries
    return list(zip(queries[0], keys[0], strict=True))


def _text_of(operator: str) -> str:
    """Return an operator's equation and slots in a line."""
    facts = FACTS[operator]
    return f"{facts.source}; slots: {facts.slots}"


def engine_entry(operator: Operator) -> dict[str, Any]:
    """Return an operator as engine.js takes it: the names of its functions, features and sources."""
    features = getattr(operator.basis, "map", None)
    return {
        "coefficients": _name_of(operator.coefficients),
        "basis": _name_of(operator.basis),
        "features": _name_of(features),
        "one": getattr(operator.basis, "one", False),
        "epsilon": getattr(operator.coefficients, "epsilon", 0.0),
        "per": _name_of(operator.per),
        "keys_from": _SOURCES[operator.keys_from],
        "queries_from": _SOURCES[operator.queries_from],
        "normalized": operator.queries_from.normalize is not None,
    }


def _name_of(function: Any) -> str | None:
    """Return the name of a function, or of the class of one with options; None stays."""
    return None if function is None else getattr(function, "__name__", type(function).__name__)


def costs_of(panel: HeadPanel) -> tuple[list[int], list[int]]:
    """Return the MACs and the bytes of a forward pass on square grids of SIZES, without projections."""
    costs = [cost.predict(panel.operator, channels=panel.channels, size=(side, side)) for side in SIZES]
    return [each.macs for each in costs], [each.activation_bytes for each in costs]
