"""File formats of outputs: how a file is made, how it is opened again, and where its voxel size is written."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from farfield.volumes import ome_zarr
from farfield.volumes.image_metadata import ImageMetadata
from farfield.volumes.tiff_metadata import (
    IMAGEJ_AXES,
    OME_DTYPES,
    fits_imagej,
    georeference_tags,
    imagej_options,
    ome_options,
)

Mode = Literal["r", "r+"]

# Most bytes of a chunk of a zarr array, which is one file. Only axes of even length are halved, so a chunk whose axes
# all have odd lengths may be larger.
CHUNK = 2**24


class OutputSpec(NamedTuple):
    """Description of an output."""

    shape: tuple[int, ...]
    dtype: np.dtype
    tile: tuple[int, ...]  # size of the tiles that are written, one number per spatial dim
    metadata: ImageMetadata  # its axes and voxel size

    @property
    def nbytes(self) -> int:
        """Bytes of the array."""
        return math.prod(self.shape) * self.dtype.itemsize


def make_npy(path: Path, spec: OutputSpec) -> Any:
    """Make a memory-mapped NumPy file."""
    return np.lib.format.open_memmap(path, mode="w+", dtype=spec.dtype, shape=spec.shape)


def open_npy(path: Path, spec: OutputSpec, mode: Mode) -> Any:
    """Open a NumPy file as a memory map."""
    return np.lib.format.open_memmap(path, mode=mode)


# ---- TIFF ------------------------------------------------------------------------------------------------------------
def is_ome(path: Path, spec: OutputSpec) -> bool:
    """Whether a TIFF file is an OME-TIFF: by its name, or because ImageJ's format does not hold what is known of it."""
    named = path.name.lower().endswith((".ome.tif", ".ome.tiff"))
    if spec.metadata.georeference:
        return named
    return named or (spec.metadata.is_known and not is_imagej(path, spec) and refuse_ome(path, spec) is None)


def is_imagej(path: Path, spec: OutputSpec) -> bool:
    """Whether a TIFF file is one of ImageJ: if its name is not that of an OME-TIFF, and its voxel size is known."""
    named = path.name.lower().endswith((".ome.tif", ".ome.tiff"))
    return not named and fits_imagej(spec.metadata, spec.shape, spec.dtype.name, spec.nbytes)


def refuse_tiff(path: Path, spec: OutputSpec) -> str | None:
    """Return why TIFF cannot hold an array; None if it can."""
    if spec.dtype == np.bool_:
        return f"TIFF has no {spec.dtype}"
    return refuse_ome(path, spec) if is_ome(path, spec) else None


def refuse_ome(path: Path, spec: OutputSpec) -> str | None:
    """Return why OME-TIFF cannot hold an array; None if it can."""
    if spec.dtype.name not in OME_DTYPES:
        return f"OME-TIFF has no {spec.dtype}"
    axes = spec.metadata.axes
    if {"I", "T"} <= set(axes) or len(set(axes)) < len(axes):
        return f'OME-TIFF has no place for the axes "{axes}"'
    return None


def imagej_order(spec: OutputSpec) -> list[int]:
    """Return the axes of an array in the order of ImageJ, in which channels follow z."""
    return sorted(range(len(spec.shape)), key=lambda axis: IMAGEJ_AXES.index(spec.metadata.axes[axis]))


def make_tiff(path: Path, spec: OutputSpec) -> Any:
    """Make an uncompressed, memory-mapped TIFF file: one of ImageJ, an OME-TIFF, or a plain one."""
    import tifffile

    options: dict[str, Any] = {"dtype": spec.dtype, "photometric": "minisblack"}
    if is_imagej(path, spec):
        shape = [spec.shape[axis] for axis in imagej_order(spec)]
        tifffile.memmap(path, shape=shape, **options, **imagej_options(spec.metadata, spec.shape))
        return open_tiff(path, spec, "r+")
    options["extratags"] = georeference_tags(spec.metadata)
    if is_ome(path, spec):
        options |= ome_options(spec.metadata, spec.shape, spec.dtype.name)
    else:
        options["metadata"] = {"axes": spec.metadata.axes}
    return tifffile.memmap(path, shape=spec.shape, bigtiff=spec.nbytes > 2**31, **options)


def open_tiff(path: Path, spec: OutputSpec, mode: Mode) -> Any:
    """Open an uncompressed TIFF file as a memory map."""
    import tifffile

    array = tifffile.memmap(path, mode=mode)
    if is_imagej(path, spec):
        order = imagej_order(spec)
        return array.reshape([spec.shape[axis] for axis in order]).transpose(np.argsort(order))
    # tifffile leaves out axes of length 1 in OME-TIFF.
    return array.reshape(spec.shape) if array.size == math.prod(spec.shape) else array


# ---- zarr ------------------------------------------------------------------------------------------------------------
def chunk_lengths(spec: OutputSpec) -> list[int]:
    """Return the chunks of a zarr array: no larger than a tile, so that few chunks are written twice."""
    leading = len(spec.shape) - len(spec.tile)
    # Times and planes are written one after the other.
    chunks = [
        *(
            1 if letter in "TZ" else length
            for letter, length in zip(spec.metadata.axes, spec.shape[:leading], strict=False)
        ),
        *(min(positions, length) for positions, length in zip(spec.tile, spec.shape[leading:], strict=True)),
    ]
    while math.prod(chunks) * spec.dtype.itemsize > CHUNK and any(length % 2 == 0 for length in chunks):
        axis = max((length, axis) for axis, length in enumerate(chunks) if length % 2 == 0)[1]
        chunks[axis] //= 2
    return chunks


def make_zarr(path: Path, spec: OutputSpec) -> Any:
    """Make a zarr array of version 3; what is known of its axes is in its attributes."""
    import zarr

    # What is not known is left out where 0.2, which reads no other fields, has none of it.
    known = {
        name: each for name, each in asdict(spec.metadata).items() if each or name not in ("affine", "georeference")
    }
    attributes: Any = {"farfield": known} if spec.metadata.is_known else None
    chunks = tuple(chunk_lengths(spec))
    return zarr.create_array(str(path), shape=spec.shape, chunks=chunks, dtype=spec.dtype, attributes=attributes)


def open_zarr(path: Path, spec: OutputSpec, mode: Mode) -> Any:
    """Open a zarr array."""
    import zarr

    return zarr.open_array(str(path), mode=mode)


def pyramid_of(group: Any, spec: OutputSpec) -> ome_zarr.Pyramid:
    """Return the levels of a group of OME-Zarr as one output."""
    factors = ome_zarr.pyramid_factors(spec.shape, spec.metadata)
    return ome_zarr.Pyramid([group[str(level)] for level in range(len(factors) + 1)], factors)


def make_ome_zarr(path: Path, spec: OutputSpec) -> Any:
    """Make an image of OME-Zarr with all levels of its pyramid; a chunk has one channel."""
    import zarr

    factors = ome_zarr.pyramid_factors(spec.shape, spec.metadata)
    average = spec.dtype.kind == "f"
    name = path.name.removesuffix(path.suffix).removesuffix(".ome")
    attributes = ome_zarr.describe_image(name, spec.metadata, factors, average)
    group = zarr.create_group(str(path), attributes=attributes)
    leading = len(spec.shape) - len(spec.tile)
    single = spec._replace(shape=(1,) * leading + spec.shape[leading:])
    shape, chunks = list(spec.shape), chunk_lengths(single)
    names = [axis["name"] for axis in attributes["ome"]["multiscales"][0]["axes"]]
    for level, factor in enumerate([(1,) * len(shape), *factors]):
        shape = [-(-length // each) for length, each in zip(shape, factor, strict=True)]
        lengths = tuple(map(min, chunks, shape))
        group.create_array(str(level), shape=shape, chunks=lengths, dtype=spec.dtype, dimension_names=names)
    return pyramid_of(group, spec)


def open_ome_zarr(path: Path, spec: OutputSpec, mode: Mode) -> Any:
    """Open an image of OME-Zarr: the array of its finest level, or, for writing, all levels of its pyramid."""
    import zarr

    group = zarr.open_group(str(path), mode=mode)
    if mode == "r":
        return group["0"]
    pyramid = pyramid_of(group, spec)
    pyramid.refresh_all()
    return pyramid


def complete_ome_zarr(path: Path, spec: OutputSpec) -> None:
    """Write what is known of channels only when all is written: the range of their values."""
    import zarr

    axis, count = spec.metadata.axes.find("C"), len(spec.metadata.channels)
    if count == 0 or count != (spec.shape[axis] if axis >= 0 else 1):
        return
    group: Any = zarr.open_group(str(path), mode="r+")
    last = len(ome_zarr.pyramid_factors(spec.shape, spec.metadata))
    coarsest = np.asarray(group[str(last)][:])
    by_channel = np.moveaxis(coarsest, axis, 0) if axis >= 0 else coarsest[None]
    channels = ome_zarr.describe_channels(spec.metadata.channels, by_channel)
    group.attrs["ome"] = {**group.attrs["ome"], "omero": channels}


def refuse_ome_zarr(path: Path, spec: OutputSpec) -> str | None:
    """Return why OME-Zarr cannot hold an array; None if it can."""
    reason = ome_zarr.refuse_axes(spec.metadata)
    return reason and f"OME-Zarr cannot hold it: {reason}"


def hold_all(path: Path, spec: OutputSpec) -> None:
    """Refuse nothing: the format holds arrays of any dtype and axes."""


def leave(path: Path, spec: OutputSpec) -> None:
    """Do nothing: the file is complete when all tiles are written."""


class Format(NamedTuple):
    """How files of a format are made and opened."""

    make: Callable[[Path, OutputSpec], Any]
    open: Callable[[Path, OutputSpec, Mode], Any]
    # One memory map: its disk space is reserved at once, as writing to one on a full disk kills the process.
    mapped: bool
    refuse: Callable[[Path, OutputSpec], str | None] = hold_all  # why the format cannot hold the array; None if it can
    complete: Callable[[Path, OutputSpec], None] = leave  # called when all tiles are written


FORMATS = {
    ".npy": Format(make_npy, open_npy, True),
    ".zarr": Format(make_zarr, open_zarr, False),
    ".tif": Format(make_tiff, open_tiff, True, refuse_tiff),
    ".tiff": Format(make_tiff, open_tiff, True, refuse_tiff),
}
OME_ZARR = Format(make_ome_zarr, open_ome_zarr, False, refuse_ome_zarr, complete_ome_zarr)


def find_format(path: Path) -> Format | None:
    """Return the format of a path by its suffix, None for unknown ones; `.ome.zarr` is OME-Zarr."""
    return OME_ZARR if path.name.lower().endswith(".ome.zarr") else FORMATS.get(path.suffix.lower())
