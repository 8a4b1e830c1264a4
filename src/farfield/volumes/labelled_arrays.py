"""Names and coordinates of xarray's arrays and the matrices of MONAI's tensors, read and given to results.

Neither library is imported: an array that has their attributes has its library loaded.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from farfield.volumes.image_metadata import ImageMetadata, parse_unit

_NAMES = {"time": "T", "channel": "C", "band": "C", "depth": "Z", "lat": "Y", "latitude": "Y", "row": "Y"}
_NAMES |= {"plane": "Z", "lon": "X", "longitude": "X", "column": "X", "col": "X"}


def _is_meta_tensor(array: Any) -> bool:
    matrix = getattr(array, "affine", None)
    return (
        isinstance(array, Tensor) and hasattr(array, "as_tensor") and isinstance(matrix, Tensor) and matrix.dim() == 2
    )


def _is_data_array(array: Any) -> bool:
    return all(hasattr(array, name) for name in ("dims", "coords", "attrs", "shape"))


def read_labels(array: Any) -> tuple[Any, ImageMetadata | None]:
    """Return the array that has the numbers, and what is known of its axes; None for others than theirs."""
    if _is_meta_tensor(array):
        return array.as_tensor(), _read_matrix(array)
    return array, _read_coordinates(array) if _is_data_array(array) else None


def _read_matrix(tensor: Any) -> ImageMetadata | None:
    """Read the matrix from a tensor's positions to millimeters; its axes are called Z, Y, X in their order."""
    matrix = tensor.affine.detach().cpu().numpy().astype(float)
    letters, is_batch = "ZYX"[-(len(matrix) - 1) :], bool(getattr(tensor, "is_batch", False))
    # MONAI's tensors have channels, and may have a matrix of other axes.
    if tensor.dim() != 1 + is_batch + len(letters):
        return None
    affine = {letter: tuple(map(float, matrix[:-1, place])) for place, letter in enumerate(letters)}
    spacing = {letter: float(np.linalg.norm(step)) for letter, step in affine.items()}
    affine["origin"] = tuple(map(float, matrix[:-1, -1]))
    units = dict.fromkeys(spacing, "millimeter")
    return ImageMetadata("I" * is_batch + "C" + letters, spacing, units, affine=affine)


def _read_coordinates(array: Any) -> ImageMetadata:
    """Read the letters of named axes, the distance of evenly spaced coordinates, and names of channels."""
    names = [str(name).lower() for name in array.dims]
    axes = "".join(_NAMES.get(name, name.upper() if name in tuple("tczyx") else "Q") for name in names)
    channels: tuple[str, ...] = ()
    units: dict[str, str] = {}
    spacing, origin = dict[str, float](), dict[str, float]()
    for name, letter in zip(array.dims, axes, strict=True):
        given = np.asarray(array.coords[name]) if name in array.coords else np.empty(0)
        if letter == "C" and given.dtype.kind in "UO":
            channels = tuple(map(str, given))
        steps = np.diff(given.astype(float)) if given.dtype.kind in "iuf" else np.empty(0)
        if letter in "TZYX" and len(steps) and steps[0] and np.allclose(steps, steps[0]):
            spacing[letter], origin[letter] = abs(float(steps.mean())), float(given[0])
            unit = parse_unit(array.coords[name].attrs.get("units"))
            units |= {letter: unit} if unit else {}
    return ImageMetadata(axes, spacing, units, {letter: each for letter, each in origin.items() if each}, channels)


def label_result(volume: Any, result: Any, metadata: ImageMetadata) -> Any:
    """Return a result with the names, coordinates or matrix of the volume, if that has any."""
    if _is_meta_tensor(volume) and isinstance(result, Tensor):
        if "origin" not in metadata.affine:  # the tensor's matrix is of other axes
            return result
        letters = "".join(letter for letter in metadata.axes if letter in metadata.affine)
        return type(volume)(result, affine=metadata.matrix(letters))
    if not _is_data_array(volume) or not isinstance(result, np.ndarray):
        return result
    own = _read_coordinates(volume)
    known = dict(zip(own.axes, volume.dims, strict=True))
    names = [
        known.get(letter, "channel" if letter == "C" else f"axis{place}") for place, letter in enumerate(metadata.axes)
    ]
    coords = {}
    for name, letter, length in zip(names, metadata.axes, result.shape, strict=True):
        if name not in volume.coords:
            continue
        given, steps = volume.coords[name], (own.spacing.get(letter), metadata.spacing.get(letter))
        moved = metadata.origin.get(letter, 0.0) - own.origin.get(letter, 0.0)
        if None not in steps and (moved or steps[0] != steps[1] or len(given) != length):
            numbers = np.asarray(given, float)
            sign = 1 if numbers[1] > numbers[0] else -1  # which a spacing has not
            coords[name] = name, numbers[0] + sign * (moved + steps[1] * np.arange(length)), given.attrs
        elif len(given) == length:
            coords[name] = given
    return type(volume)(result, dims=names, coords=coords)
