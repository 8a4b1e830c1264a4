"""NIfTI files of outputs, by nibabel, with the matrix of the input."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from farfield._checks import install_command, load_library
from farfield.volumes.axes_view import AxesView
from farfield.volumes.chunk_cache import keep_chunks
from farfield.volumes.file_name import FileName
from farfield.volumes.image_metadata import UNITS, ImageMetadata
from farfield.volumes.levels import Mode, OutputSpec, open_tiles, thin_box
from farfield.volumes.library_formats import NIFTI_UNITS, open_nifti
from farfield.volumes.tiff_output import arrange_axes

# Of the axes of an array, the last of which lies next to each other in a file.
_ORDER = "CTZYX"
# What the header's first version has as the length of an axis.
_LONGEST = 2**15 - 1


def fit_nifti(path: Path, spec: OutputSpec) -> OutputSpec:
    """Return the array in the file: booleans as numbers of 8 bits, chunks of few planes."""
    dtype = np.dtype("uint8") if spec.dtype == np.bool_ else spec.dtype
    return spec._replace(dtype=dtype, box=thin_box(spec))


def refuse_nifti(path: Path, spec: OutputSpec) -> str | None:
    """Return why NIfTI cannot hold an array; None if it can."""
    axes = spec.metadata.axes
    try:
        nibabel = load_library("nibabel", "nifti", "a NIfTI file")
    except ImportError:
        return f"NIfTI needs nibabel ({install_command('nifti')})"
    try:
        nibabel.Nifti1Header().set_data_dtype(spec.dtype)
    except nibabel.spatialimages.HeaderDataError:
        return f"NIfTI has no {spec.dtype}"
    if not {"X", "Y"} <= set(axes) <= set(_ORDER) or len(set(axes)) < len(axes):
        return f'NIfTI has no place for the axes "{axes}"'
    return None


def open_nifti_output(path: Path, spec: OutputSpec, mode: Mode) -> Any:
    """Open the tiles beside a file, or the finished file for reading."""
    return open_tiles(path, spec)[0] if mode == "r+" else arrange_axes(open_nifti(FileName(path, "", 0, 0)), spec)


def complete_nifti(path: Path, spec: OutputSpec) -> None:
    """Write the file from the tiles beside it, plane by plane: nibabel itself writes what is in memory."""
    from nibabel.openers import ImageOpener

    axes = spec.metadata.axes
    order = sorted(range(len(axes)), key=lambda axis: _ORDER.index(axes[axis]))
    tiles = AxesView(keep_chunks(open_tiles(path, spec)[0]), order, {})
    with ImageOpener(str(path), "wb") as file:
        _describe(spec).write_to(file)
        for place in np.ndindex(*tiles.shape[:-2]):
            file.write(np.ascontiguousarray(tiles[place]).tobytes())


def _describe(spec: OutputSpec) -> Any:
    """Return the header of a file."""
    import nibabel

    metadata, sizes = spec.metadata, dict(zip(spec.metadata.axes, spec.shape, strict=True))
    # Axes behind the last one that there is are left out.
    first = min(_ORDER.index(letter) for letter in sizes)
    shape = [sizes.get(letter, 1) for letter in reversed(_ORDER[first:])]
    kind = nibabel.Nifti1Image if max(shape) <= _LONGEST else nibabel.Nifti2Image
    matrix, unit = _find_matrix(metadata)
    header = kind(np.broadcast_to(np.zeros((), spec.dtype), shape), matrix, dtype=spec.dtype).header
    symbols = {name: symbol for symbol, name in NIFTI_UNITS.items()}
    times = symbols.get(metadata.units.get("T", ""), "unknown")
    header.set_xyzt_units(symbols.get(unit, "unknown"), times)
    if "T" in metadata.spacing and times != "unknown":
        header.set_zooms([*header.get_zooms()[:3], metadata.spacing["T"], *header.get_zooms()[4:]])
    header.set_slope_inter(1, 0)
    header.set_data_offset(header.single_vox_offset)
    return header


def _find_matrix(metadata: ImageMetadata) -> tuple[np.ndarray, str]:
    """Return the matrix from positions along x, y and z to the world, and its unit; "" where none is known."""
    letters = "".join(letter for letter in metadata.axes if letter in "ZYX")
    matrix, known = np.eye(4), metadata.in_one_unit(letters)
    if len(metadata.affine.get("origin", ())) == 3:
        for column, name in enumerate(("X", "Y", "Z", "origin")):
            matrix[:3, column] = metadata.affine.get(name, matrix[:3, column])
        return matrix, known[0] if known else ""
    unit, scale = known[0] if known else "", 1.0
    if unit and unit not in NIFTI_UNITS.values():
        unit, scale = "micrometer", UNITS[unit].amount / UNITS["micrometer"].amount
    for place, letter in enumerate("XYZ"):
        matrix[place, place] = scale * metadata.spacing.get(letter, 1.0)
        matrix[place, 3] = scale * metadata.origin.get(letter, 0.0)
    return matrix, unit
