"""Layers of napari as volumes and volumes as layers, and what is typed and read in the widget; napari is not needed."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from farfield.volumes import ImageMetadata, Volume
from farfield.volumes.image_metadata import parse_unit

# What errors say in arguments of Python -> the same with the fields of the widget.
_FIELDS = {
    r"^(predict_whole|plan_whole|open_(volume|model|network|package)|restore|find_seams|Job|preview): ": "",
    r"(or )?overwrite=True": r"\1tick Overwrite",
    r"\btile=(\d+)": r"Tile \1",
    r"\brepeat the call": "press Start again",
    r"--network ": "",
    r"--weights FILE": "Weights",
    r"\btrust=True": "farfield predict with --trust",
}


def volume_of(layer: Any) -> Volume:
    """Return the numbers of an image layer, of several levels the finest, with letters for its axes and its scale.

    Letters are those of the labels of its axes or of its file, else T, C, Z, Y, X, the last ones; of colors T, Z, Y, X
    and C.
    """
    data = layer.data[0] if layer.multiscale else layer.data
    color = "C" if layer.rgb else ""
    axes = "TZYX"[-(data.ndim - 1) :] + color if color else "TCZYX"[-data.ndim :]
    if isinstance(data, Volume):
        return data if _is_known(data.metadata.axes) else Volume(data.array, replace(data.metadata, axes=axes))
    labels = "".join(layer.axis_labels).upper() + color
    axes = labels if len(labels) == data.ndim and _is_known(labels) else axes
    if len(axes) != data.ndim:
        text = f"the layer has {data.ndim} axes, {tuple(data.shape)}; fix: a layer of at most {len(axes)}."
        raise ValueError(text)
    known = ImageMetadata(axes)
    for letter, scale, unit, start in zip(axes, layer.scale, layer.units, layer.translate, strict=False):
        name = parse_unit(unit)
        if letter != "C" and (name or scale != 1):
            known = replace(known, spacing={**known.spacing, letter: float(scale)})
        if letter != "C" and (letter in known.spacing or start != 0):
            known = replace(known, origin={**known.origin, letter: float(start)})
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


class Affine(NamedTuple):
    """How coordinates of a volume, by scale and place, become those of the world: rotated or sheared, for example."""

    axes: str
    matrix: np.ndarray  # on coordinates along the axes, and 1

    def along(self, axes: str) -> np.ndarray:
        """Return the matrix for other axes, of which those that are new stay as they are."""
        matrix, shared = np.eye(len(axes) + 1), [letter for letter in axes if letter in self.axes]
        new = [*map(axes.index, shared), len(axes)]
        own = [*map(self.axes.index, shared), len(self.axes)]
        matrix[np.ix_(new, new)] = self.matrix[np.ix_(own, own)]
        return matrix


def find_affine(layer: Any, known: ImageMetadata) -> Affine:
    """Return how a layer lies in the world, beyond the scale and place of its volume."""
    dims = len(layer.scale)
    axes, start = known.axes[:dims], np.array(layer.world_to_data(np.zeros(dims)))
    to_data, to_place = np.eye(dims + 1), np.eye(dims + 1)
    to_data[:dims, :dims] = np.transpose([layer.world_to_data(step) - start for step in np.eye(dims)])
    to_data[:dims, dims] = start
    options = layer_options(known.with_axes(axes))
    to_place[:dims, :dims], to_place[:dims, dims] = np.diag(options["scale"]), options["translate"]
    matrix, same = np.linalg.inv(to_place @ to_data), np.eye(dims + 1)
    return Affine(axes, np.where(np.isclose(matrix, same), same, matrix))


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
