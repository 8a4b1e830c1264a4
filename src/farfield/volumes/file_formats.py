"""File formats of outputs: how a file is made, how it is opened again, and where its voxel size is written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from farfield.volumes import ome_zarr
from farfield.volumes.levels import Mode, OutputSpec, chunk_lengths, make_levels, make_tiles, tiles_beside
from farfield.volumes.nifti_output import complete_nifti, fit_nifti, open_nifti_output, refuse_nifti
from farfield.volumes.ome_labels import find_image, fit_labels, list_labels, make_labels, refuse_labels
from farfield.volumes.tiff_output import complete_tiff, fit_tiff, open_tiff, refuse_tiff


def make_npy(path: Path, spec: OutputSpec) -> Any:
    """Make a memory-mapped NumPy file."""
    return np.lib.format.open_memmap(path, mode="w+", dtype=spec.dtype, shape=spec.shape)


def open_npy(path: Path, spec: OutputSpec, mode: Mode) -> Any:
    """Open a NumPy file as a memory map."""
    return np.lib.format.open_memmap(path, mode=mode)


# ---- zarr ------------------------------------------------------------------------------------------------------------
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


def fit_ome_zarr(path: Path, spec: OutputSpec) -> OutputSpec:
    return spec._replace(factors=ome_zarr.pyramid_factors(spec.shape, spec.metadata))


def make_ome_zarr(path: Path, spec: OutputSpec) -> Any:
    """Make an image of OME-Zarr with all levels of its pyramid, and return the finest."""
    import zarr

    name = path.name.removesuffix(path.suffix).removesuffix(".ome")
    attributes = ome_zarr.describe_image(name, spec.metadata, spec.factors, average=spec.dtype.kind == "f")
    group = zarr.create_group(str(path), attributes=attributes)
    names = [axis["name"] for axis in attributes["ome"]["multiscales"][0]["axes"]]
    return make_levels(group, spec, dimension_names=names)


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
    coarsest = np.asarray(group[str(len(spec.factors))][:])
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
    mapped: bool = False
    # Why the format cannot hold the array; None if it can.
    refuse: Callable[[Path, OutputSpec], str | None] = lambda path, spec: None
    complete: Callable[[Path, OutputSpec], None] = lambda path, spec: None  # called when all tiles are written
    # The array as the format holds it, with the factors of its coarser levels, which are written after all tiles.
    fit: Callable[[Path, OutputSpec], OutputSpec] = lambda path, spec: spec
    # Where the group of zarr with the levels is, until the file is complete.
    group: Callable[[Path], Path] = lambda path: path
    folder: bool = False
    enter: Callable[[Path], None] = lambda path: None  # called when the file has its path


TIFF = Format(make_tiles, open_tiff, False, refuse_tiff, complete_tiff, fit_tiff, tiles_beside)
NIFTI = Format(make_tiles, open_nifti_output, False, refuse_nifti, complete_nifti, fit_nifti, tiles_beside)
OME_ZARR = Format(make_ome_zarr, open_ome_zarr, False, refuse_ome_zarr, complete_ome_zarr, fit_ome_zarr, folder=True)
LABELS = Format(make_labels, open_ome_zarr, refuse=refuse_labels, fit=fit_labels, folder=True, enter=list_labels)
FORMATS = {
    ".npy": Format(make_npy, open_npy, True),
    ".zarr": Format(make_zarr, open_zarr, folder=True),
    ".tif": TIFF,
    ".tiff": TIFF,
    ".nii": NIFTI,
    ".nii.gz": NIFTI,
}


def find_format(path: Path) -> Format | None:
    """Return the format of a path by its place and its suffix, None for unknown ones; `.ome.zarr` is OME-Zarr."""
    if find_image(path) is not None:
        return LABELS
    if path.name.lower().endswith(".ome.zarr"):
        return OME_ZARR
    return next((each for suffix, each in FORMATS.items() if path.name.lower().endswith(suffix)), None)


def has_chunks(out: object) -> bool:
    """Whether an output is a path whose tiles are written in chunks, each in a file, as several processes need it."""
    found = find_format(Path(out)) if isinstance(out, str | Path) else None
    return found is not None and not found.mapped
