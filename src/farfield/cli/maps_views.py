"""What `farfield maps` shows: a network's layers, rows of attention, basis masks, the norms' scales over training."""

from __future__ import annotations

from collections.abc import Sequence, Sized
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from matplotlib.figure import Figure
from PIL import Image, ImageOps
from torch import Tensor, nn

from farfield import maps
from farfield._checks import unknown
from farfield.cli.maps_figures import COLOURS, PANELS, Heat, Photograph, draw_masks, draw_rows, draw_scales
from farfield.cli.maps_network import PREFIX, Trained, checkpoints, newest
from farfield.cli.output import Row, joined
from farfield.maps import Layer
from farfield.maps.health import PARTS
from farfield.tasks.checkpoints import read

# What a photograph is shown at, at most, in pixels.
SHOWN = 800
WEIGHTS = "Each panel has a scale of its own; blue: negative. 1/N: what each position weighs in a mean. "


class View(NamedTuple):
    """What is shown: rows of numbers under a title, what is said below them, and a figure if there is one."""

    title: str
    rows: list[Row]
    notes: Sequence[str] = ()
    figure: Figure | None = None


# ---- what is looked at -----------------------------------------------------------------------------------------------
def read_photograph(path: Path) -> Photograph:
    """Read a photograph the way up that a viewer shows it."""
    try:
        with Image.open(path) as file:
            image = ImageOps.exif_transpose(file).convert("RGB")
    except FileNotFoundError as error:
        raise FileNotFoundError(f"there is no image {path}.") from error
    # Pillow's readers raise whatever a damaged file makes them.
    except Exception as error:
        raise ValueError(f"{path} is no image that can be read: {error}.") from error
    small = image.copy()
    small.thumbnail((SHOWN, SHOWN))
    pixels, shown = (torch.from_numpy(np.array(one)).permute(2, 0, 1) for one in (image, small))
    return Photograph(path, image.height, image.width, pixels, shown / 255)


def attention(trained: Trained, photograph: Photograph, side: int | None) -> dict[str, Layer]:
    """Every attention of a network, with the grid that it sees of a photograph."""
    found = maps.layers(trained.network, trained.prepare(photograph.pixels, side))
    check_found(trained.network, found)
    return found


def check_found(network: nn.Module, found: Sized) -> None:
    """Refuse a network without attention."""
    if not len(found):
        kind = getattr(network, "name", type(network).__name__)
        fix = "a network with attention (farfield models), or farfield.insert to put some into this one."
        raise ValueError(f"{kind} has no GridAttention that runs; fix: {fix}")


def is_image(layer: Layer) -> bool:
    """Whether a layer's positions, those that ask and those that answer, lie over an image."""
    return layer.grid.dim() == 4 and (layer.context is None or layer.context.dim() == 4)


def finest(found: dict[str, Layer]) -> str | None:
    """The first of the layers with the most positions over an image."""
    positions = {name: layer.grid[0, 0].numel() for name, layer in found.items() if is_image(layer)}
    return max(positions, key=lambda name: positions[name], default=None)


def chosen(found: dict[str, Layer], name: str | None) -> str:
    """The layer that is asked for, or the finest one."""
    if name is not None and name not in found:
        raise unknown("--layer", "attention layer", name, found)
    name = name or finest(found) or next(iter(found))
    if not is_image(found[name]):
        size = tuple(found[name].grid.shape[2:])
        fix = "farfield.maps.attention_row takes grids of any number of spatial dims."
        raise ValueError(f"{name} sees a grid of size {size}, which does not lie over an image; fix: {fix}")
    return name


def listing(found: dict[str, Layer], photograph: Photograph, side: int, source: str) -> View:
    """List the attention of a network."""
    rows: list[Row] = [
        {
            "layer": name,
            "operator": layer.attention.operator_name,
            "heads": layer.attention.heads,
            "channels": layer.attention.channels,
            "size": list(layer.grid.shape[2:]),
        }
        for name, layer in found.items()
    ]
    notes = [f"Grids of {photograph.path.name}, its shorter side resized to {side} pixels, normalised {source}."]
    notes.append(f"--position ROW,COLUMN and --basis look into {finest(found)}, or the --layer that you name.")
    return View("Attention layers", rows, notes)


# ---- health ----------------------------------------------------------------------------------------------------------
def measured(trained: Trained, photograph: Photograph, side: int | None) -> View:
    """How loud the attention of a network is on a photograph, and what it learns from."""
    side = side or trained.side
    found = maps.health(trained.network, quarters(trained.prepare(photograph.pixels, 2 * side)))
    check_found(trained.network, found)
    rows: list[Row] = [
        {
            **{name: value for name, value in one._asdict().items() if name != "gradients"},
            **{part: one.gradients.get(part) for part in PARTS},
        }
        for one in found
    ]
    mode = "training" if trained.network.training else "eval"
    notes = [f"In {mode} mode on the quarters of {photograph.path.name}, their shorter side resized to {side} pixels."]
    notes.append(
        "response: its deviation over positions, as a share of the grid's; constant: what all positions share."
    )
    notes.append(
        f"{', '.join(PARTS)}: gradient by weight, as a share of the layer's largest; host: what is handed back."
    )
    notes.append("identity: measured behind output.reset_parameters(); cut: no gradient comes from what follows.")
    return View("Health of the attention", rows, notes)


def quarters(image: Tensor) -> Tensor:
    """Four images of one: batch norm in training makes the means of a single one 0."""
    height, width = (length // 2 for length in image.shape[2:])
    parts = image[..., : 2 * height, : 2 * width].unflatten(3, (2, width)).unflatten(2, (2, height))
    return parts.permute(0, 2, 4, 1, 3, 5).flatten(0, 2)


# ---- rows ------------------------------------------------------------------------------------------------------------
def rows(name: str, layer: Layer, photograph: Photograph, pixels: Sequence[tuple[int, int]], head: int | None) -> View:
    """What the position of each pixel takes from all positions: FA's Figure 2."""
    check_head(name, layer, head)
    heats, told = [], []
    for index, asks in enumerate(pixels):
        position = position_of(asks, photograph, layer)
        weights = maps.attention_row(
            layer.attention,
            layer.grid,
            position,
            context=layer.context,
            mask=layer.mask,
            context_mask=layer.context_mask,
        )[0]
        weights = weights.mean(0) if head is None else weights[head]
        told.append({"pixel": list(asks), "position": list(position), **extremes(weights), "row": weights.tolist()})
        label = f"row {asks[0]}, column {asks[1]}\n{span(weights)}"
        heats.append(Heat(weights, label, asks, COLOURS[index % len(COLOURS)]))
    one = f"head {head} of {layer.attention.heads}" if head is not None else "the average of its heads"
    heading = f"{named(name, layer)} · {'one head' if layer.attention.heads == 1 else one}"
    figure = draw_rows(photograph, heats, heading, f"{WEIGHTS} Pixels: row, column from the top left.")
    return View("Attention rows", [{"layer": name, "head": head} | row for row in told], [heading], figure)


def position_of(asks: tuple[int, int], photograph: Photograph, layer: Layer) -> tuple[int, int]:
    """The position of a layer's grid that a pixel of the photograph lies in."""
    (row, column), (height, width) = asks, layer.grid.shape[2:]
    if row >= photograph.height or column >= photograph.width:
        fix = f"from 0,0 to {photograph.height - 1},{photograph.width - 1}."
        if row < photograph.width and column < photograph.height:
            fix = f"the row comes first: --position {column},{row}."
        raise ValueError(
            f"--position {row},{column} does not lie in {photograph.path.name}, which has {photograph.height} rows and "
            f"{photograph.width} columns of pixels; fix: {fix}"
        )
    return row * height // photograph.height, column * width // photograph.width


def check_head(name: str, layer: Layer, head: int | None) -> None:
    """Refuse a head that a layer does not have."""
    heads = layer.attention.heads
    if head is not None and head >= heads:
        raise ValueError(f"--head {head}: {name} has {heads}; fix: --head 0 to {heads - 1}, or leave it out.")


def extremes(weights: Tensor) -> Row:
    """The sum, smallest and largest of some weights."""
    return {"sum": float(weights.sum()), "smallest": float(weights.min()), "largest": float(weights.max())}


def span(weights: Tensor) -> str:
    """The largest weight, and the smallest if it is negative, as multiples of what a position weighs in a mean."""
    low, high = (float(bound) * weights.numel() for bound in (weights.min(), weights.max()))
    return f"{low:.3g} to {high:.3g} times 1/N" if low < 0 else f"up to {high:.3g} times 1/N"


def named(name: str, layer: Layer) -> str:
    """A layer, for people."""
    return f"{name} · {layer.attention.operator_name} · {joined(list(layer.grid.shape[2:]))} positions"


# ---- basis masks -----------------------------------------------------------------------------------------------------
def masks(
    name: str, seen: Sequence[Layer], photographs: Sequence[Photograph], head: int | None, slots: list[int] | None
) -> View:
    """What the slots are made of, a photograph a row: FA's Figure 7."""
    check_head(name, seen[0], head)
    told: list[Row] = []
    drawn = []
    for layer, photograph in zip(seen, photographs, strict=True):
        grid, mask = (layer.grid, layer.mask) if layer.context is None else (layer.context, layer.context_mask)
        found = maps.basis_masks(layer.attention, grid, mask=mask)[0]  # (h, r, y, x)
        heats = []
        for place in places(found, head, slots):
            weights, where = found[place], {"layer": name, "image": str(photograph.path)}
            told.append(where | {"head": place[0], "slot": place[1], **extremes(weights), "mask": weights.tolist()})
            heats.append(Heat(weights, f"head {place[0]}, slot {place[1]}\n{span(weights)}"))
        drawn.append((photograph, heats))
    heading = f"{named(name, seen[0])} · {len(heats)} of {found.shape[0] * found.shape[1]} basis masks"
    return View("Basis masks", told, [heading], draw_masks(drawn, heading, WEIGHTS))


def places(found: Tensor, head: int | None, slots: list[int] | None) -> list[tuple[int, int]]:
    """The heads and slots that are shown."""
    heads, every = found.shape[:2]
    for slot in slots or []:
        if slot >= every:
            raise ValueError(f"--slot {slot}: a head has {every} slots; fix: --slot 0 to {every - 1}, or leave it out.")
    chosen = [(one, slot) for one in (range(heads) if head is None else [head]) for slot in slots or range(every)]
    return chosen if slots else chosen[:PANELS]


# ---- norms -----------------------------------------------------------------------------------------------------------
def scales(model: str) -> View:
    """The norms' learned scales in each checkpoint of a run."""
    files = checkpoints(newest(Path(model).expanduser()))
    if not files:
        raise ValueError(f"--norms reads the checkpoints (*.ckpt) of a run, and {model} has none.")
    states = {}
    for checkpoint in map(read, files):
        states[int(checkpoint.get("epoch", 0)) + 1] = maps.norm_scales(checkpoint["state_dict"])
    epochs = sorted(states)
    if not states[epochs[0]]:
        raise ValueError(f"no attention in {files[0]} has a norm; fix: GridAttention(coefficient_norm=True).")
    found = {
        name.removeprefix(PREFIX): np.stack([states[epoch][name].double().numpy() for epoch in epochs])
        for name in states[epochs[0]]
    }
    told: list[Row] = [
        {
            "epoch": epoch,
            "layer": name,
            "mean": float(values[index].mean()),
            "smallest": float(values[index].min()),
            "largest": float(values[index].max()),
            "scales": values[index].tolist(),
        }
        for index, epoch in enumerate(epochs)
        for name, values in found.items()
    ]
    heading = "Learned scales of the norms inside attention over the epochs"
    lines = "One line a head where products are normed, one a channel where responses are; all start at 1."
    keep = "For a point an epoch: farfield fit --checkpoint.save_top_k=-1 --checkpoint.filename '{epoch}'"
    return View("Scales of the norms", told, [keep] * (len(epochs) < 3), draw_scales(epochs, found, heading, lines))
