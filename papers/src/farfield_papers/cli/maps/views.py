"""The views of `farfield maps`: layers, health, attention rows and basis masks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from matplotlib.figure import Figure
from PIL import Image, ImageOps
from torch import Tensor

from farfield import maps
from farfield._checks import unknown
from farfield._refusals import put_name
from farfield.cli.output import Row, joined
from farfield.maps import Layer
from farfield.maps.health import PARTS
from farfield.maps.layer import place_on_image, tokens_before
from farfield.volumes.readers import READERS
from farfield_papers.cli.loaded_network import LoadedNetwork
from farfield_papers.cli.maps.figures import COLOURS, PANELS, Heat, Photograph, draw_masks, draw_rows

# The largest height or width of a shown photograph, in pixels.
_SHOWN = 800
_WEIGHTS = "All panels have one colour scale; blue: negative. 1/N: the weight of each position in a mean."


class View(NamedTuple):
    """A result: rows of numbers under a title, notes below them, and a figure if there is one."""

    title: str
    rows: list[Row]
    notes: Sequence[str] = ()
    figure: Figure | None = None


def read_photograph(path: Path) -> Photograph:
    """Read a photograph and rotate it by its EXIF orientation; raise if it is missing or cannot be read."""
    try:
        with Image.open(path) as file:
            if file.format == "TIFF" and (planes := getattr(file, "n_frames", 1)) > 1:
                raise ValueError(f"it has {planes} planes")
            image = ImageOps.exif_transpose(file).convert("RGB")
    except FileNotFoundError as error:
        raise FileNotFoundError(f"there is no image {path}.") from error
    except IsADirectoryError as error:
        raise ValueError(f"{path} is a folder; fix: one of the images in it.") from error
    # On a damaged file Pillow's readers raise any kind of error.
    except Exception as error:
        fix = "a photograph" + ": of a volume, one plane saved as one" * path.name.lower().endswith(tuple(READERS))
        raise ValueError(f"{path} cannot be read as an image: {error}; fix: {fix}.") from error
    small = image.copy()
    small.thumbnail((_SHOWN, _SHOWN))
    pixels, shown = (torch.from_numpy(np.array(one)).permute(2, 0, 1) for one in (image, small))
    return Photograph(path, image.height, image.width, pixels, shown / 255)


def _size_of(layer: Layer) -> tuple[int, ...]:
    """Return the size of the query grid of a layer, or of the patches that its tokens are."""
    return layer.patches or tuple(layer.grid.shape[2:])


def _is_image(layer: Layer) -> bool:
    """Return whether the query grid and the context of a layer both have two spatial dims, those of an image."""
    if layer.patches is not None:
        return len(layer.patches) == 2
    return layer.grid.dim() == 4 and (layer.context is None or layer.context.dim() == 4)


def _finest(layers: dict[str, Layer]) -> str | None:
    """Return the first of the layers with the most positions over an image; None if no layer has such positions."""
    positions = {name: math.prod(_size_of(layer)) for name, layer in layers.items() if _is_image(layer)}
    return max(positions, key=lambda name: positions[name], default=None)


def select_layer(layers: dict[str, Layer], name: str | None) -> str:
    """Return the name of the requested layer, or of the finest one; raise if there is no such layer over an image."""
    if name is not None and name not in layers:
        raise put_name("--layer", unknown("attention layer", name, layers))
    name = name or _finest(layers) or next(iter(layers))
    if not _is_image(layers[name]):
        size = _size_of(layers[name])
        fix = "farfield.maps.layer_row takes grids of any number of spatial dims."
        raise ValueError(f"{name} gets a grid of size {size}, which does not lie over an image; fix: {fix}")
    return name


def list_layers(layers: dict[str, Layer], photograph: Photograph, side: int, source: str) -> View:
    rows: list[Row] = [
        {
            "layer": name,
            "operator": layer.attention.operator_name,
            "heads": layer.attention.heads,
            "channels": layer.attention.channels,
            "size": list(_size_of(layer)),
        }
        for name, layer in layers.items()
    ]
    notes = [f"Grids of {photograph.path.name}, its shorter side resized to {side} pixels, normalised {source}."]
    notes.append(f"--position ROW,COLUMN and --basis show {_finest(layers)}; --layer selects another.")
    before = [tokens_before(layer, layer.grid.shape[2]) for layer in layers.values() if layer.patches is not None]
    if any(before):
        notes.append("Sizes are those of patches. --token 0 shows the class token, which has no place in the image.")
    return View("Attention layers", rows, notes)


def measure_health(trained: LoadedNetwork, photograph: Photograph, side: int | None) -> View:
    """Measure the responses and gradients of the attention layers of a network on a photograph."""
    side = side or trained.side
    layers = maps.health(trained.network, _quarters(trained.prepare(photograph.pixels, 2 * side)))
    rows: list[Row] = [
        {
            **{name: value for name, value in one._asdict().items() if name != "gradients"},
            **{part: one.gradients.get(part) for part in PARTS},
        }
        for one in layers
    ]
    mode = "training" if trained.network.training else "eval"
    notes = [f"In {mode} mode on the quarters of {photograph.path.name}, their shorter side resized to {side} pixels."]
    notes.append(
        "response: its deviation over positions, as a share of the grid's; constant: the share equal at all positions."
    )
    notes.append(
        f"{', '.join(PARTS)}: gradient by weight, as a share of the layer's largest; "
        "host: gradient of the inputs, as a share of the response's."
    )
    notes.append("identity: measured after output.reset_parameters(); cut: no gradient reaches the response.")
    return View("Health of the attention", rows, notes)


def _quarters(image: Tensor) -> Tensor:
    """Split an image into a batch of four, because batch norm in training makes the means of a single image 0."""
    height, width = (length // 2 for length in image.shape[2:])
    parts = image[..., : 2 * height, : 2 * width].unflatten(3, (2, width)).unflatten(2, (2, height))
    return parts.permute(0, 2, 4, 1, 3, 5).flatten(0, 2)


def show_rows(
    name: str, layer: Layer, photograph: Photograph, queries: Sequence[tuple[int, int] | int], head: int | None
) -> View:
    """Show the attention row of each query, a pixel's position or a token (FA Figure 2)."""
    _check_head(name, layer, head)
    heats, numbers = [], []
    for index, query in enumerate(queries):
        where, label, position = _describe_query(name, layer, photograph, query)
        weights = maps.layer_row(layer, position)[0]
        weights = weights.mean(0) if head is None else weights[head]
        numbers.append({**where, **_extremes(weights), "row": weights.tolist()})
        pixel = None if isinstance(query, int) else query
        heats.append(
            Heat(weights * weights.numel(), f"{label}\n{_span(weights)}", pixel, COLOURS[index % len(COLOURS)])
        )
    one = f"head {head} of {layer.attention.heads}" if head is not None else "the average of its heads"
    heading = f"{_describe(name, layer)} · {'one head' if layer.attention.heads == 1 else one}"
    figure = draw_rows(photograph, heats, heading, f"{_WEIGHTS} Pixels: row, column from the top left.")
    return View("Attention rows", [{"layer": name, "head": head} | row for row in numbers], [heading], figure)


def _describe_query(
    name: str, layer: Layer, photograph: Photograph, query: tuple[int, int] | int
) -> tuple[Row, str, tuple[int, int] | int]:
    """Return the numbers and the text of a query, a pixel or a token, and its position for `maps.layer_row`."""
    if not isinstance(query, int):
        position = _position_of(query, photograph, layer)
        where: Row = {"pixel": list(query), "position": list(position), "token": None}
        return where, f"row {query[0]}, column {query[1]}", position
    before = 0 if layer.patches is None else tokens_before(layer, layer.grid.shape[2])
    if query >= before:
        has = f"{before} tokens before its patches; fix: --token 0" if before else "none; fix: --position ROW,COLUMN"
        raise ValueError(f"--token {query} is a token before the patches, such as a class token, and {name} has {has}.")
    return {"pixel": None, "position": None, "token": query}, f"token {query}", query


def _position_of(pixel: tuple[int, int], photograph: Photograph, layer: Layer) -> tuple[int, int]:
    (row, column), (height, width) = pixel, _size_of(layer)
    if row >= photograph.height or column >= photograph.width:
        fix = f"from 0,0 to {photograph.height - 1},{photograph.width - 1}."
        if row < photograph.width and column < photograph.height:
            fix = f"the row comes first: --position {column},{row}."
        raise ValueError(
            f"--position {row},{column} does not lie in {photograph.path.name}, which has {photograph.height} rows and "
            f"{photograph.width} columns of pixels; fix: {fix}"
        )
    return row * height // photograph.height, column * width // photograph.width


def _check_head(name: str, layer: Layer, head: int | None) -> None:
    heads = layer.attention.heads
    if head is not None and head >= heads:
        raise ValueError(f"--head {head}: {name} has {heads}; fix: --head 0 to {heads - 1}, or leave it out.")


def _extremes(weights: Tensor) -> Row:
    return {"sum": float(weights.sum()), "smallest": float(weights.min()), "largest": float(weights.max())}


def _span(weights: Tensor) -> str:
    """Format the largest weight, and the smallest if it is negative, as multiples of 1/N, the weight in a mean."""
    low, high = (float(bound) * weights.numel() for bound in (weights.min(), weights.max()))
    return f"{low:.3g} to {high:.3g} times 1/N" if low < 0 else f"up to {high:.3g} times 1/N"


def _describe(name: str, layer: Layer) -> str:
    return f"{name} · {layer.attention.operator_name} · {joined(list(_size_of(layer)))} positions"


def show_masks(
    name: str, layers: Sequence[Layer], photographs: Sequence[Photograph], head: int | None, slots: list[int] | None
) -> View:
    """Show the basis masks of the slots, one row of panels per photograph (FA Figure 7)."""
    _check_head(name, layers[0], head)
    numbers: list[Row] = []
    drawn = []
    for layer, photograph in zip(layers, photographs, strict=True):
        grid, mask = (layer.grid, layer.mask) if layer.context is None else (layer.context, layer.context_mask)
        masks = place_on_image(layer, maps.basis_masks(layer.attention, grid, mask=mask))[0]  # (h, r, y, x)
        heats = []
        for one, slot in _select_slots(masks, head, slots):
            weights, where = masks[one, slot], {"layer": name, "image": str(photograph.path)}
            numbers.append(where | {"head": one, "slot": slot, **_extremes(weights), "mask": weights.tolist()})
            heats.append(Heat(weights * weights.numel(), f"head {one}, slot {slot}\n{_span(weights)}"))
        drawn.append((photograph, heats))
    heading = f"{_describe(name, layers[0])} · {len(heats)} of {masks.shape[0] * masks.shape[1]} basis masks"
    return View("Basis masks", numbers, [heading], draw_masks(drawn, heading, _WEIGHTS))


def _select_slots(masks: Tensor, head: int | None, slots: list[int] | None) -> list[tuple[int, int]]:
    heads, every = masks.shape[:2]
    for slot in slots or []:
        if slot >= every:
            raise ValueError(f"--slot {slot}: a head has {every} slots; fix: --slot 0 to {every - 1}, or leave it out.")
    pairs = [(one, slot) for one in (range(heads) if head is None else [head]) for slot in slots or range(every)]
    return pairs if slots else pairs[:PANELS]
