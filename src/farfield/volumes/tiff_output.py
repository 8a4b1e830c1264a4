"""TIFF files of outputs, by tifffile: one of ImageJ, an OME-TIFF or a plain one, in tiles and with coarser levels."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from farfield.volumes.axes_view import AxesView
from farfield.volumes.chunk_cache import keep_chunks
from farfield.volumes.file_name import FileName, Opened
from farfield.volumes.geotiff_output import choose_nodata, refuse_geotiff, write_geotiff
from farfield.volumes.levels import Mode, OutputSpec, open_tiles, thin_box
from farfield.volumes.ome_zarr import pyramid_factors
from farfield.volumes.readers import open_tiff as read_tiff
from farfield.volumes.tiff_metadata import (
    IMAGEJ_AXES,
    OME_DTYPES,
    describe_ome,
    fits_imagej,
    georeference_tags,
    imagej_options,
)
from farfield.volumes.volume import Volume

# Positions of a tile along Y and X.
TILE = 512


def is_named_ome(path: Path) -> bool:
    return path.name.lower().endswith((".ome.tif", ".ome.tiff"))


def is_geotiff(path: Path, spec: OutputSpec) -> bool:
    """Whether a TIFF file is a GeoTIFF: if its name is not that of an OME-TIFF, and it is known where it lies."""
    planes = spec.metadata.axes[-2:] == "YX" and len(spec.shape) <= 3
    return planes and not is_named_ome(path) and bool(georeference_tags(spec.metadata))


def is_ome(path: Path, spec: OutputSpec) -> bool:
    """Whether a TIFF file is an OME-TIFF: by its name, or because no other format holds what is known of it."""
    others = is_geotiff(path, spec) or is_imagej(path, spec)
    return is_named_ome(path) or (spec.metadata.is_known and not others and refuse_ome(spec) is None)


def choose_outside(path: Path | None, spec: OutputSpec) -> float | None:
    """Return the number that stands in a file where a mask is False; None for a file that states none."""
    if path is None or path.suffix.lower() not in (".tif", ".tiff") or not is_geotiff(path, spec):
        return None
    return choose_nodata(spec.dtype)


def is_imagej(path: Path, spec: OutputSpec) -> bool:
    """Whether a TIFF file is one of ImageJ: if its name is not that of an OME-TIFF, and its voxel size is known."""
    return not is_named_ome(path) and fits_imagej(spec.metadata, spec.shape, spec.dtype.name, spec.nbytes)


def fit_tiff(path: Path, spec: OutputSpec) -> OutputSpec:
    """Return the array in the file: booleans as numbers of 8 bits, chunks of few planes, levels where it has tiles."""
    spec = spec._replace(dtype=np.dtype("uint8")) if spec.dtype == np.bool_ else spec
    if not is_imagej(path, spec) and not is_geotiff(path, spec):  # GDAL makes levels by itself
        spec = spec._replace(factors=pyramid_factors(spec.shape, spec.metadata, letters="YX"))
    return spec._replace(box=thin_box(spec))


def refuse_tiff(path: Path, spec: OutputSpec) -> str | None:
    """Return why TIFF cannot hold an array; None if it can."""
    if set(spec.metadata.axes) <= set("IC"):
        return "TIFF holds images, and the result has no size"
    if is_geotiff(path, spec):
        return refuse_geotiff(spec)
    return refuse_ome(spec) if is_ome(path, spec) else None


def refuse_ome(spec: OutputSpec) -> str | None:
    """Return why OME-TIFF cannot hold an array; None if it can."""
    if spec.dtype.name not in OME_DTYPES:
        return f"OME-TIFF has no {spec.dtype}"
    axes = spec.metadata.axes
    if {"I", "T"} <= set(axes) or len(set(axes)) < len(axes):
        return f'OME-TIFF has no place for the axes "{axes}"'
    return None


def open_tiff(path: Path, spec: OutputSpec, mode: Mode) -> Any:
    """Open the tiles beside a file, or the finished file for reading."""
    return open_tiles(path, spec)[0] if mode == "r+" else arrange_axes(read_tiff(FileName(path, "", 0, 0)), spec)


def arrange_axes(opened: Opened, spec: OutputSpec) -> Volume:
    """Return the array in a finished file with the axes of the output."""
    array, metadata = opened
    wanted, own = spec.metadata.axes, metadata.axes.replace("S", spec.metadata.axes[0])  # several bands
    if "I" in wanted:  # OME-TIFF has no other place for samples
        own = own.replace("T", "I")
    left_out = [length for letter, length in zip(own, array.shape, strict=True) if letter not in wanted]
    if own != wanted and set(left_out) <= {1}:
        array = AxesView(array, [own.find(each) if each in own else None for each in wanted], {})
    return Volume(array, spec.metadata)


def complete_tiff(path: Path, spec: OutputSpec) -> None:
    """Write the file from the tiles beside it."""
    import tifffile

    levels = [keep_chunks(level) for level in open_tiles(path, spec)]
    if is_geotiff(path, spec):
        write_geotiff(path, spec, levels[0])
        return
    if is_imagej(path, spec):
        # Channels follow z.
        order = sorted(range(len(spec.shape)), key=lambda axis: IMAGEJ_AXES.index(spec.metadata.axes[axis]))
        finest = AxesView(levels[0], order, {})
        with tifffile.TiffWriter(path, imagej=True) as file:
            options = imagej_options(spec.metadata, spec.shape) | {"photometric": "minisblack"}
            file.write(_cut(finest, finest.shape[-2:]), shape=finest.shape, dtype=spec.dtype, **options)
        return
    is_ome_file = is_ome(path, spec)
    metadata: dict[str, Any] = {"axes": spec.metadata.axes}
    if is_ome_file:
        metadata = describe_ome(spec.metadata, spec.shape, spec.dtype.name)
    # Levels are a third of the finest at most, and what is compressed can become longer.
    with tifffile.TiffWriter(path, bigtiff=spec.nbytes > 2**31, ome=is_ome_file) as file:
        first: dict[str, Any] = {"subifds": len(spec.factors), "metadata": metadata}
        first["extratags"] = georeference_tags(spec.metadata)
        for level, options in zip(levels, [first, *[{"subfiletype": 1}] * len(spec.factors)], strict=True):
            tile = [min(TILE, -(-length // 16) * 16) for length in level.shape[-2:]]
            file.write(
                _cut(level, tile),
                shape=level.shape,
                dtype=spec.dtype,
                tile=tile,
                compression="zlib",
                photometric="minisblack",
                **options,
            )


def _cut(array: Any, tile: Sequence[int]) -> Iterator[np.ndarray]:
    """Yield the tiles of each plane of an array, one plane after the other."""
    height, width = array.shape[-2:]
    for place in np.ndindex(*array.shape[:-2]):
        for top, left in itertools.product(range(0, height, tile[0]), range(0, width, tile[1])):
            spans = (slice(top, min(top + tile[0], height)), slice(left, min(left + tile[1], width)))
            yield np.ascontiguousarray(array[(*place, *spans)])
