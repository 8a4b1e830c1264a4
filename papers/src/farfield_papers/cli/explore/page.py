"""The page as one HTML file: numbers, photograph, styles and scripts inside it."""

from __future__ import annotations

import base64
import html
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from torch import Tensor

from farfield._files import open_replacement
from farfield._operators import FACTS
from farfield.ops.table import OPERATORS
from farfield_papers.cli.explore.panels import SIZES, PageContent, costs_of, engine_entry

_HERE = Path(__file__).parent
# Longest side of the photograph in the page, in pixels.
_SHOWN = 640


def write(content: PageContent, path: Path) -> None:
    """Write the page, completely or not at all."""
    with open_replacement(path) as file:
        file.write(render(content).encode())


def render(content: PageContent) -> str:
    parts = {
        "style": _source("page.css"),
        "engine": _source("engine.js"),
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
    """Return the numbers of the page; equal arrays of queries and keys stand in it once."""
    arrays: list[dict[str, Any]] = []

    def place_of(tensor: Tensor) -> int:
        array = _encode(tensor)
        if array not in arrays:
            arrays.append(array)
        return arrays.index(array)

    panels: list[dict[str, Any]] = []
    for panel in content.panels:
        macs, size = costs_of(panel)
        facts = FACTS[panel.operator]
        panels.append(
            {
                "name": panel.name,
                "text": html.escape(panel.text, quote=False),
                "arguments": html.escape(panel.arguments, quote=False),
                "head": panel.head,
                "slots": f"Slots per head: {facts.slots}. The summaries of tiles are {facts.merging}.",
                "operator": engine_entry(OPERATORS[panel.operator]),
                "queries": place_of(panel.queries),
                "keys": place_of(panel.keys),
                "macs": macs,
                "bytes": size,
            }
        )
    every = [number for panel in panels for number in panel["macs"]]
    height, width = content.size
    return {
        "size": [height, width],
        "position": height // 2 * width + width // 2,
        "photograph": f"data:image/jpeg;base64,{_jpeg(content)}",
        "note": html.escape(content.note, quote=False),
        "arrays": arrays,
        "panels": panels,
        "sizes": SIZES,
        "shown": 56,
        "least": min(every) / 2,
        "most": max(every),
    }


def _encode(tensor: Tensor) -> dict[str, Any]:
    """Return `(channels, positions)` as 16-bit whole numbers with a scale per channel: off by 2^-16 of its largest."""
    rows = tensor.double().numpy()
    scales = np.abs(rows).max(1) / (2**15 - 1)
    scales[scales == 0] = 1
    whole = np.rint(rows / scales[:, None]).astype("<i2")
    return {"scales": scales.tolist(), "data": base64.b64encode(whole.tobytes()).decode()}


def _jpeg(content: PageContent) -> str:
    image = Image.fromarray(content.photograph)
    image.thumbnail((_SHOWN, _SHOWN))
    file = io.BytesIO()
    image.save(file, "JPEG", quality=82)
    return base64.b64encode(file.getvalue()).decode()
