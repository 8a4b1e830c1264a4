"""Names, coordinates and attributes that arrays have: of xarray and zarr, and the matrices of MONAI's tensors.

No library is imported: an array that has the attributes of one has it loaded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from farfield.volumes.image_metadata import ImageMetadata, known, parse_length, parse_unit, restrict

_NAMES = {"time": "T", "channel": "C", "band": "C", "depth": "Z", "lat": "Y", "latitude": "Y", "row": "Y"}
_NAMES |= {"plane": "Z", "lon": "X", "longitude": "X", "column": "X", "col": "X"}


def name_axes(names: Sequence[Any]) -> str:
    """Return the letters of named axes, Q for others; of all where two have one letter."""
    lowered = [str(name).lower().rstrip("^") for name in names]  # ^ marks channels in electron microscopy
    axes = "".join(_NAMES.get(name, name.upper() if name in tuple("tczyx") else "Q") for name in lowered)
    letters = axes.replace("Q", "")
    return axes if len(set(letters)) == len(letters) else "Q" * len(axes)


def read_attributes(attributes: Mapping[str, Any], dims: int, names: Sequence[Any] | None = None) -> ImageMetadata:
    """Read the names of axes and the voxel size that zarr, xarray and pipelines of electron microscopy write."""
    named = np.ravel(attributes.get("_ARRAY_DIMENSIONS", attributes.get("axis_names", names or ()))).tolist()
    steps = _parse_numbers(attributes.get("voxel_size", attributes.get("resolution", ())))
    axes = name_axes(named) if len(named) == dims else "Q" * dims
    if len(named) != dims and len(steps) in (2, 3) and dims - len(steps) in (0, 1):
        axes = ("C" + "ZYX"[-len(steps) :])[-dims:]
    letters = axes[dims - len(steps) :]
    if not 0 < len(steps) == len(letters):
        return ImageMetadata(axes)
    given = [parse_unit(unit) for unit in np.ravel(attributes.get("units", ()))][-len(letters) :]
    units = known(letters, given) if len(given) == len(letters) else {}
    # A step of 1 without a unit is written where nothing is known.
    sizes = known(letters, map(parse_length, steps))
    spacing = {letter: each for letter, each in sizes.items() if letter in units or each != 1}
    starts = _parse_numbers(attributes.get("offset", ()))
    origin = {letter: each for letter, each in zip(letters, starts, strict=False) if each}
    return ImageMetadata(axes, restrict(spacing, "TZYX"), restrict(units, "TZYX"), restrict(origin, "TZYX"))


def _parse_numbers(given: Any) -> list[float]:
    try:
        return list(np.ravel(np.asarray(given, float)).tolist())
    except (TypeError, ValueError):
        return []


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
    axes = name_axes(array.dims)
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
    own, lengths = _read_coordinates(volume), dict(zip(volume.dims, volume.shape, strict=True))
    named = {letter: name for letter, name in zip(own.axes, volume.dims, strict=True) if letter != "Q"}
    names = []
    for place, letter in enumerate(metadata.axes):
        # Axes without a letter are in their order, the last ones those of the result.
        back = place - result.ndim
        keeps = back + len(own.axes) >= 0 and own.axes[back] == "Q" and volume.shape[back] == result.shape[place]
        other = volume.dims[back] if keeps else "channel" if letter == "C" else f"axis{place}"
        names.append(named.get(letter, other))
    kept, coords = set(), {}
    for name, letter, length in zip(names, metadata.axes, result.shape, strict=True):
        kept |= {name} if lengths.get(name) == length else set()
        if name not in volume.coords or letter not in own.spacing.keys() & metadata.spacing.keys():
            continue
        given, step = volume.coords[name], metadata.spacing[letter]
        moved = metadata.origin.get(letter, 0.0) - own.origin.get(letter, 0.0)
        if moved or step != own.spacing[letter] or name not in kept:
            kept -= {name}
            numbers = np.asarray(given, float)
            sign = 1 if numbers[1] > numbers[0] else -1  # which a spacing has not
            coords[name] = name, numbers[0] + sign * (moved + step * np.arange(length)), given.attrs
    coords |= {name: given for name, given in volume.coords.items() if set(given.dims) <= kept}
    return type(volume)(result, dims=names, coords=coords, name=volume.name, attrs=volume.attrs)
