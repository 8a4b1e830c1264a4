"""Layers of napari as volumes, volumes as layers, and errors as the widget words them. Nothing here imports napari."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from farfield.volumes import ImageMetadata, Volume
from farfield.volumes.image_metadata import parse_unit

# What an error says in arguments of Python -> the same with the fields of the widget.
_FIELDS = {
    r"^(predict_whole|plan_whole|open_volume|open_model|restore|find_seams|Job|preview|SeamReport\.plot): ": "",
    r'out="([^"]*)"': r"the output \1",
    r"or overwrite=True|overwrite=True": "or tick Overwrite",
    r"(?:tile=)?Tiles\(…, disk=(\d+)\)": "a disk with that much room for the output",
    r"tile=(\d+)": r"Tile \1",
    r"repeat the call": "press Plan again",
    r"call it with the same": "start it with the same",
}


def volume_of(layer: Any) -> Volume:
    """Return the numbers of an image layer as a volume, with its scale and units; the finest level of several.

    A layer that `open_volume` opened is that volume, with what its file says.
    """
    data = layer.data[0] if layer.multiscale else layer.data
    if isinstance(data, Volume):
        return data
    axes = "YXC" if layer.rgb and data.ndim == 3 else "TCZYX"[-data.ndim :]
    labels = "".join(layer.axis_labels).upper()
    if set(labels) <= set("TCZYX") and len(set(labels)) == len(labels) == data.ndim:
        axes = labels
    spacing: dict[str, float] = {}
    units: dict[str, str] = {}
    origin: dict[str, float] = {}
    for letter, scale, unit, start in zip(axes, layer.scale, layer.units, layer.translate, strict=False):
        name = parse_unit(unit)
        if letter != "C" and (name or scale != 1):
            spacing[letter] = float(scale)
            units |= {letter: name} if name else {}
            origin |= {letter: float(start)} if start else {}
    return Volume(data, ImageMetadata(axes, spacing, units, origin))


def layer_options(metadata: ImageMetadata, start: Mapping[str, int] | None = None) -> dict[str, Any]:
    """Return the arguments of a layer for a volume: scale, units, place and names of its axes.

    Args:
        metadata: That of the volume.
        start: Letter -> first position, of a part of a volume whose voxel size is not known.
    """
    axes, first = metadata.axes, start or {}
    return {
        "scale": [metadata.spacing.get(letter, 1.0) for letter in axes],
        "translate": [metadata.origin.get(letter, float(first.get(letter, 0))) for letter in axes],
        "units": [metadata.units.get(letter, "pixel") for letter in axes],
        "axis_labels": [letter.lower() for letter in axes],
    }


def position_of(viewer: Any, layer: Any, axes: str) -> dict[str, int]:
    """Return where a viewer is in a layer, by the letters of its axes: its sliders, and the middle of what it shows."""
    # napari 0.9 moved the camera.
    camera = viewer.scene.camera if hasattr(viewer, "scene") else viewer.camera
    point, shown = list(viewer.dims.point), viewer.dims.displayed
    for axis, center in zip(shown, camera.center[-len(shown) :], strict=True):
        point[axis] = center
    index = np.rint(layer.world_to_data(point)).astype(int)
    shape = (layer.data[0] if layer.multiscale else layer.data).shape
    return {letter: int(np.clip(at, 0, length - 1)) for letter, at, length in zip(axes, index, shape, strict=False)}


def word_error(error: BaseException) -> str:
    """Return an error as sentences with the names of the widget's fields in place of arguments of Python."""
    text = "\n".join([str(error) or type(error).__name__, *getattr(error, "__notes__", [])])
    for pattern, wording in _FIELDS.items():
        text = re.sub(pattern, wording, text)
    return text[:1].upper() + text[1:]


def parse_tile(text: str) -> int | list[int | None] | None:
    """Return the size of tiles that was typed: nothing, one number, or one for each axis, - for one that is not cut."""
    words = re.split(r"[\s,×x]+", text.strip()) if text.strip() else []
    try:
        sizes = [None if word == "-" else int(word) for word in words]
    except ValueError:
        raise ValueError(f'Tile is "{text}"; fix: 64, or 16, 64, 64, or nothing for the largest.') from None
    return None if not sizes else sizes[0] if len(sizes) == 1 else sizes
