"""Layers of napari as volumes and volumes as layers, and what is typed and read in the widget; napari is not needed."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np

from farfield.volumes import ImageMetadata, Volume
from farfield.volumes.image_metadata import parse_unit

# What errors say in arguments of Python -> the same with the fields of the widget.
_FIELDS = {
    r"^(predict_whole|plan_whole|open_volume|open_model|open_package|restore|find_seams|Job|preview): ": "",
    r'\bout="([^"]*)"': r"the output \1",
    r"(or )?overwrite=True": r"\1tick Overwrite",
    r"\btrust=True\b": "farfield predict --bioimageio with --trust",
    r"\btile=(\d+)": r"Tile \1",
    r"\brepeat the call": "press Start again",
}


def volume_of(layer: Any) -> Volume:
    """Return the numbers of an image layer, of several levels the finest, with letters for its axes and its scale.

    Letters are those of the labels of its axes or of its file, else C, Z, Y, X, the last ones.
    """
    data = layer.data[0] if layer.multiscale else layer.data
    axes = "YXC" if layer.rgb and data.ndim == 3 else "TCZYX"[-data.ndim :]
    if isinstance(data, Volume):
        return data if _is_known(data.metadata.axes) else Volume(data.array, replace(data.metadata, axes=axes))
    labels = "".join(layer.axis_labels).upper()
    axes = labels if len(labels) == data.ndim and _is_known(labels) else axes
    known = ImageMetadata(axes)
    for letter, scale, unit, start in zip(axes, layer.scale, layer.units, layer.translate, strict=False):
        name = parse_unit(unit)
        if letter != "C" and (name or scale != 1):
            spacing, origin = {**known.spacing, letter: float(scale)}, {**known.origin, letter: float(start)}
            known = replace(known, spacing=spacing, origin=origin)
        if letter != "C" and name:
            known = replace(known, units={**known.units, letter: name})
    return Volume(data, known)


def _is_known(axes: str) -> bool:
    return set(axes) <= set("TCZYXS") and len(set(axes)) == len(axes)


def layer_options(metadata: ImageMetadata) -> dict[str, Any]:
    """Return the arguments of a layer for a volume: scale, units, place and names of its axes."""
    return {
        "scale": [metadata.spacing.get(letter, 1.0) for letter in metadata.axes],
        "translate": [metadata.origin.get(letter, 0.0) for letter in metadata.axes],
        "units": [metadata.units.get(letter, "pixel") for letter in metadata.axes],
        "axis_labels": list(metadata.axes.lower()),
    }


def position_of(viewer: Any, layer: Any, volume: Volume) -> dict[str, int]:
    """Return where a viewer is in the volume of a layer: at its sliders, and in the middle of what it shows."""
    # napari 0.9 moved the camera.
    camera = viewer.scene.camera if hasattr(viewer, "scene") else viewer.camera
    point, shown = list(viewer.dims.point), viewer.dims.displayed
    for axis, center in zip(shown, camera.center[-len(shown) :], strict=True):
        point[axis] = center
    places = zip(volume.metadata.axes, np.rint(layer.world_to_data(point)), volume.shape, strict=False)
    return {letter: int(np.clip(at, 0, length - 1)) for letter, at, length in places}


def word_error(error: BaseException) -> str:
    """Return an error as a sentence that names the fields of the widget in place of arguments of Python."""
    text = "\n".join([str(error) or type(error).__name__, *getattr(error, "__notes__", [])])
    for pattern, wording in _FIELDS.items():
        text = re.sub(pattern, wording, text)
    return text[:1].upper() + text[1:]


def parse_tile(text: str) -> int | list[int] | None:
    """Return the size of tiles that was typed: nothing, one number, or one for each axis."""
    words = re.findall(r"[^\s,×]+", text)
    if not all(map(str.isdecimal, words)):
        raise ValueError(f'Tile is "{text}"; fix: 64, or 16, 64, 64, or nothing for the largest.')
    sizes = list(map(int, words))
    return sizes if len(sizes) > 1 else sizes[0] if sizes else None
