"""Checks of volumes that users give: arrays of numbers, without masked positions."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from farfield._refusals import refusal
from farfield.volumes.source import without_mask

# What takes the place of images of libraries that are no arrays, or whose axes come in another order.
_METADATA = "farfield.volumes.ImageMetadata"
_HANDLES = {
    "cloudvolume": f'farfield.volumes.Volume(volume, {_METADATA}("XYZC", dict(zip("XYZ", map(float, '
    'volume.resolution))), dict.fromkeys("XYZ", "nanometer")))',
    "SimpleITK": "farfield.volumes.Volume(SimpleITK.GetArrayViewFromImage(volume), "
    f'{_METADATA}("ZYX", dict(zip("XYZ", volume.GetSpacing())), dict.fromkeys("ZYX", "millimeter")))',
    "torchio": 'volume.data of an image, subject["t1"].data for example: (channels, x, y, z)',
    "openslide": "farfield.volumes.open_volume(path), or of formats other than TIFF a level in memory, "
    "numpy.moveaxis(numpy.asarray(volume.read_region((0, 0), 0, volume.dimensions))[..., :3], -1, 0)",
    "nibabel": "farfield.volumes.open_volume(path)",
}


def refuse_handle(name: str, volume: Any) -> None:
    """Refuse an image of a library that is no array of numbers in the order of axes here, with the line that is."""
    kind = type(volume)
    line = _HANDLES.get(kind.__module__.partition(".")[0])
    if line is not None and "arrayproxy" not in kind.__module__:
        raise refusal(TypeError, f"{name} must be an array, got {kind.__name__}; fix: {line}.")


def check_volume(caller: str, name: str, volume: Any) -> None:
    """Refuse an object that is no array of numbers, such as a list, a path or a network, or has masked positions."""
    if type(volume).__module__.partition(".")[0] == "h5py" and not volume:
        raise refusal(
            ValueError,
            f"the HDF5 file of {name} is closed; fix: call {caller} while it is open, or "
            'farfield.volumes.open_volume("file.h5::dataset").',
        )
    if hasattr(volume, "shape") and hasattr(volume, "__getitem__"):
        check_numbers(name, volume)
        if isinstance(volume, Tensor) and (volume.is_quantized or volume.layout != torch.strided):
            kind, fix = ("quantized", "dequantize") if volume.is_quantized else ("sparse", "to_dense")
            raise refusal(TypeError, f"{name} must be a dense tensor, got a {kind} one; fix: {name}.{fix}().")
        if getattr(volume, "is_meta", False):
            raise refusal(ValueError, f"{name} is on the device meta, without values; fix: a tensor on another device.")
        if np.ma.is_masked(volume):
            without_mask(volume)
        return
    if isinstance(volume, nn.Module):
        fix = f"the network first, {caller}(model, volume)"
    elif isinstance(volume, str | bytes) or hasattr(volume, "__fspath__"):
        fix = "open it first, farfield.volumes.open_volume(path)"
    else:
        fix = "numpy.asarray(…)"
    raise refusal(
        TypeError, f"{name} must be an array, with a shape and slices, got {type(volume).__name__}; fix: {fix}."
    )


def check_numbers(name: str, volume: Any) -> None:
    """Raise TypeError for an array whose dtype is known and is not that of booleans, integers or floats."""
    dtype = getattr(volume, "dtype", None)
    # One of tensorstore compares with its own kind alone.
    dtype = getattr(dtype, "numpy_dtype", dtype)
    kind = dtype.kind if isinstance(dtype, np.dtype) else "c" if getattr(dtype, "is_complex", False) else "f"
    if kind not in "bfiu":
        fix = f"the magnitude, abs({name})" if kind == "c" else f'an array of one of these, {name}.astype("float32")'
        raise refusal(TypeError, f"{name} must hold booleans, integers or floats, got {dtype}; fix: {fix}.")
