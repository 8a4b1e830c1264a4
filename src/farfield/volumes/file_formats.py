"""File formats of outputs: how a file is made, how it is opened again, and where its voxel size is written."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from farfield.volumes import ome_zarr
from farfield.volumes.image_metadata import SPACE, ImageMetadata
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
    shape: tuple[int, ...]
    dtype: np.dtype
    box: tuple[int, ...]  # what a tile writes: one after the other from 0, in whole chunks of zarr
    metadata: ImageMetadata  # its axes and voxel size

    @property
    def nbytes(self) -> int:
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
    if set(spec.metadata.axes) <= set("IC"):
        return "TIFF holds images, and the result has no size"
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
    """Return the chunks of a zarr array, which divide what a tile writes: no chunk is written by two tiles."""
    chunks = list(map(min, spec.box, spec.shape))
    while math.prod(chunks) * spec.dtype.itemsize > CHUNK and any(length % 2 == 0 for length in chunks):
        axis = max((length, axis) for axis, length in enumerate(chunks) if length % 2 == 0)[1]
        chunks[axis] //= 2
    return chunks


def make_zarr(path: Path, spec: OutputSpec) -> Any:
    """Make a zarr array of version 3; what is known of its axes is in its attributes."""
    import zarr

    # What is not known is left out where 0.2, which reads no other fields, has none of it.
    known = {
        name: each
        for name, each in asdict(spec.metadata).items()
        if each or name not in ("affine", "georeference", "nodata")
    }
    attributes: Any = {"farfield": known} if spec.metadata.is_known else None
    chunks = tuple(chunk_lengths(spec))
    return zarr.create_array(str(path), shape=spec.shape, chunks=chunks, dtype=spec.dtype, attributes=attributes)


def open_zarr(path: Path, spec: OutputSpec, mode: Mode) -> Any:
    import zarr

    return zarr.open_array(str(path), mode=mode)


def level_shapes(spec: OutputSpec) -> list[tuple[int, ...]]:
    """Return the shape of each level of an image of OME-Zarr, from the finest."""
    shapes = [spec.shape]
    for factors in ome_zarr.pyramid_factors(spec.shape, spec.metadata):
        shapes.append(tuple(-(-length // each) for length, each in zip(shapes[-1], factors, strict=True)))
    return shapes


def chunks_of_levels(spec: OutputSpec) -> list[tuple[int, ...]]:
    """Return the chunks of each level of an image of OME-Zarr: a plane or stack of one channel."""
    single = [length if letter in SPACE else 1 for letter, length in zip(spec.metadata.axes, spec.box, strict=True)]
    chunks = chunk_lengths(spec._replace(box=tuple(single)))
    return [tuple(map(min, chunks, shape)) for shape in level_shapes(spec)]


def grids_of_levels(spec: OutputSpec) -> list[tuple[int, ...]]:
    """Return the number of chunks along each axis, for each level but the finest."""
    pairs = list(zip(level_shapes(spec), chunks_of_levels(spec), strict=True))[1:]
    return [tuple(-(-length // chunk) for length, chunk in zip(*each, strict=True)) for each in pairs]


def write_level(path: Path, spec: OutputSpec, level: int, place: int) -> None:
    """Write a chunk of a level of an image of OME-Zarr, which follows from the level before it."""
    import zarr

    group: Any = zarr.open_group(str(path), mode="r+")
    chunks = chunks_of_levels(spec)[level]
    starts = np.unravel_index(place, grids_of_levels(spec)[level - 1])
    index = tuple(slice(int(at) * chunk, int(at + 1) * chunk) for at, chunk in zip(starts, chunks, strict=True))
    factors = ome_zarr.pyramid_factors(spec.shape, spec.metadata)[level - 1]
    ome_zarr.fill(group[str(level - 1)], group[str(level)], index, factors)


def make_ome_zarr(path: Path, spec: OutputSpec) -> Any:
    """Make an image of OME-Zarr with all levels of its pyramid, and return the finest."""
    import zarr

    factors = ome_zarr.pyramid_factors(spec.shape, spec.metadata)
    name = path.name.removesuffix(path.suffix).removesuffix(".ome")
    attributes = ome_zarr.describe_image(name, spec.metadata, factors, average=spec.dtype.kind == "f")
    group = zarr.create_group(str(path), attributes=attributes)
    names = [axis["name"] for axis in attributes["ome"]["multiscales"][0]["axes"]]
    for level, (shape, chunks) in enumerate(zip(level_shapes(spec), chunks_of_levels(spec), strict=True)):
        group.create_array(str(level), shape=shape, chunks=chunks, dtype=spec.dtype, dimension_names=names)
    return group["0"]


def open_ome_zarr(path: Path, spec: OutputSpec, mode: Mode) -> Any:
    """Open the finest level of an image of OME-Zarr."""
    import zarr

    return zarr.open_group(str(path), mode=mode)["0"]


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


class Format(NamedTuple):
    """How files of a format are made and opened."""

    make: Callable[[Path, OutputSpec], Any]
    open: Callable[[Path, OutputSpec, Mode], Any]
    # One memory map: its disk space is reserved at once, as writing to one on a full disk kills the process.
    mapped: bool
    # Why the format cannot hold the array; None if it can.
    refuse: Callable[[Path, OutputSpec], str | None] = lambda path, spec: None
    complete: Callable[[Path, OutputSpec], None] = lambda path, spec: None  # called when all tiles are written
    # The number of chunks along each axis of coarser levels, which are written after all tiles.
    levels: Callable[[OutputSpec], list[tuple[int, ...]]] = lambda spec: []


FORMATS = {
    ".npy": Format(make_npy, open_npy, True),
    ".zarr": Format(make_zarr, open_zarr, False),
    ".tif": Format(make_tiff, open_tiff, True, refuse_tiff),
    ".tiff": Format(make_tiff, open_tiff, True, refuse_tiff),
}
OME_ZARR = Format(make_ome_zarr, open_ome_zarr, False, refuse_ome_zarr, complete_ome_zarr, grids_of_levels)


def find_format(path: Path) -> Format | None:
    """Return the format of a path by its suffix, None for unknown ones; `.ome.zarr` is OME-Zarr."""
    return OME_ZARR if path.name.lower().endswith(".ome.zarr") else FORMATS.get(path.suffix.lower())
