"""The page as one HTML file: numbers, pictures, styles and the script inside it."""

from __future__ import annotations

import base64
import html
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from farfield._files import open_replacement
from farfield._operators import FACTS
from farfield_papers.cli.explore.panels import SIZES, HeadPanel, PageContent, costs_of, query_axes

_HERE = Path(__file__).parent
# Longest side of the photograph in the page, in pixels.
_SHOWN = 640
# Shades of each sign that a drawn weight has: the k-th is a weight of (k / SHADES)² of the largest.
SHADES = 16


def _ramp(*stops: int) -> NDArray[np.uint8]:
    """Return the colours and opacities of the shades 0 to SHADES, between colours that are evenly spread."""
    share, places = np.arange(SHADES + 1) / SHADES, np.linspace(0, 1, len(stops))
    colours = [np.interp(share, places, [stop >> bits & 255 for stop in stops]) for bits in (16, 8, 0)]
    return np.rint(np.stack([*colours, 255 * share], 1)).astype(np.uint8)


# Those of positive weights, then those of negative ones, as in page.css.
_COLOURS = np.concatenate([_ramp(0x16181D, 0x7A1D6D, 0xE8602C, 0xFCF3A5), _ramp(0x16181D, 0x12355B, 0x6FB1FF)[1:]])


def write(content: PageContent, path: Path) -> None:
    """Write the page, completely or not at all."""
    with open_replacement(path) as file:
        file.write(render(content).encode())


def render(content: PageContent) -> str:
    parts = {
        "style": _source("page.css"),
        "page": _source("page.js"),
        "intro": html.escape(content.intro),
        "credit": html.escape(content.credit),
        "channels": str(content.panels[0].channels),
        # A script ends at "</", wherever it stands.
        "data": json.dumps(_data_of(content)).replace("</", "<\\/"),
    }
    text = _source("page.html")
    for name, part in parts.items():
        text = text.replace("{{" + name + "}}", part)
    return text


def _source(name: str) -> str:
    return (_HERE / name).read_text(encoding="utf-8")


def _data_of(content: PageContent) -> dict[str, Any]:
    """Return what the script of the page reads; equal pictures stand in it once."""
    pictures: dict[str, int] = {}
    panels = [_data_of_panel(panel, pictures) for panel in content.panels]
    every = [number for panel in panels for number in panel["macs"]]
    rows, columns = query_axes(content.size)
    return {
        "size": content.size,
        "rows": rows,
        "columns": columns,
        "photograph": f"data:image/jpeg;base64,{_jpeg(content)}",
        "note": html.escape(content.note, quote=False),
        "pictures": list(pictures),
        "panels": panels,
        "sizes": SIZES,
        "shown": 56,
        "least": min(every) / 2,
        "most": max(every),
    }


def _data_of_panel(panel: HeadPanel, pictures: dict[str, int]) -> dict[str, Any]:
    """Return what the page says of a panel, with the places of its pictures, which are added to the others."""
    places = [
        None if maps is None else pictures.setdefault(_draw(maps), len(pictures)) for maps in (panel.rows, panel.basis)
    ]
    macs, size = costs_of(panel)
    facts = FACTS[panel.operator]
    return {
        "name": panel.name,
        "text": html.escape(panel.text, quote=False),
        "arguments": html.escape(panel.arguments, quote=False),
        "head": panel.head,
        "slots": f"Slots per head: {facts.slots}. The summaries of tiles are {facts.merging}.",
        "rows": places[0],
        "weights": [f"{float(row.min()):.2g} to {float(row.max()):.2g}" for row in panel.rows],
        "basis": places[1],
        "bases": 0 if panel.basis is None else len(panel.basis),
        "macs": macs,
        "bytes": size,
    }


def _draw(maps: Tensor) -> str:
    """Return maps `(n, height, width)` below each other as an image; the larger a weight, the more opaque it is."""
    shades = shade(maps.double().numpy())
    image = Image.fromarray(shades.reshape(-1, shades.shape[-1]))
    image.putpalette(_COLOURS[:, :3].tobytes())
    file = io.BytesIO()
    image.save(file, "PNG", optimize=True, transparency=_COLOURS[:, 3].tobytes())
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def shade(maps: NDArray[np.float64]) -> NDArray[np.uint8]:
    """Return the shade of each weight, relative to the largest of its map; those of negative weights follow SHADES."""
    largest = np.abs(maps).max((1, 2), keepdims=True)
    # Weights that are 0 but for rounding are drawn as 0.
    largest[largest * maps[0].size < 1e-3] = 1
    shades = np.rint(SHADES * np.sqrt(np.abs(maps) / largest)).astype(np.uint8)
    return np.where((maps < 0) & (shades > 0), shades + SHADES, shades).astype(np.uint8)


def _jpeg(content: PageContent) -> str:
    image = Image.fromarray(content.photograph)
    image.thumbnail((_SHOWN, _SHOWN))
    file = io.BytesIO()
    image.save(file, "JPEG", quality=82)
    return base64.b64encode(file.getvalue()).decode()
