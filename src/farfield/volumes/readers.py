"""What opens the files of each format: arrays that are read as they are sliced, and what is known of their axes."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from farfield._checks import load_library
from farfield._refusals import is_refusal, refusal
from farfield.volumes.axes_view import AxesView
from farfield.volumes.file_name import FileName, Opened, unknown_axes
from farfield.volumes.image_metadata import ImageMetadata
from farfield.volumes.labelled_arrays import read_attributes
from farfield.volumes.library_formats import list_planes, open_hdf5, open_mrc, open_nifti, open_planes
from farfield.volumes.ome_zarr import read_images
from farfield.volumes.place import Place, stretch
from farfield.volumes.tiff_metadata import read_tiff_metadata, stated_axes
from farfield.volumes.tiff_parts import check_codecs, check_parts, check_planes, describe_series

TIFF_SUFFIXES = (".tif", ".tiff", ".btf", ".tf8", ".tf2", ".svs", ".lsm", ".ndpi", ".qptiff", ".scn", ".stk", ".bif")
# A folder with one of these files is a zarr array or group.
_ZARR = ("zarr.json", ".zgroup", ".zarray", ".zattrs")


def open_file(path: Any, level: int, series: int | None) -> Opened:
    """Open a file by the reader of its format; see `open_volume`."""
    if not isinstance(path, str | os.PathLike):
        fix = "predict_whole takes it as it is" if hasattr(path, "shape") else "a string, or a pathlib.Path"
        raise refusal(TypeError, f"path must be the path of a file, got {type(path).__name__}; fix: {fix}.")
    file, reader = _find_reader(os.fspath(path), level, series)
    try:
        return reader(file)
    # Libraries raise all kinds of errors for damaged files; those of the system have a number.
    except Exception as error:
        told = is_refusal(error) or isinstance(error, ImportError)
        if told or (isinstance(error, OSError) and error.errno is not None):
            raise
        raise file.error(str(error) or type(error).__name__) from error


def _find_reader(text: str, level: int, series: int | None) -> tuple[FileName, Callable[[FileName], Opened]]:
    """Return a file, with its dataset, and the reader of its format."""
    if "://" in text:
        load_library("fsspec", "remote", "an address")
        return FileName(text, "", level, series), _open_zarr
    name, _, dataset = (text, "", "") if os.path.lexists(text) else text.partition("::")
    file = Path(name)
    is_there = os.path.lexists(file)
    # What is not there may be a pattern of the names of planes.
    if not is_there and not (set(file.name) & set("*?[") and list_planes(file)):
        raise refusal(FileNotFoundError, f'there is no "{file}"; fix: the path of a file, or of a zarr folder.')
    suffix = max((each for each in READERS if file.name.lower().endswith(each)), key=len, default="")
    reader = READERS.get(suffix)
    if file.is_dir() or not is_there:
        reader = _open_zarr if is_zarr(file) else open_planes
    if reader is None:
        raise refusal(
            ValueError,
            f'"{file}" is of no format that is read, such as .tif, .zarr or .npy; fix: open it by its own '
            "library: predict_whole takes any array with a shape and slices, and farfield.volumes.Volume(array, "
            "metadata) states its voxel size too.",
        )
    place = FileName(file, dataset, level, series)
    # What is neither blocks whoever opens it, until something is written to it.
    if is_there and not file.is_file() and not file.is_dir():
        raise refusal(ValueError, f'"{file}" is neither a file nor a folder; fix: a copy of it in a file.')
    if dataset and reader is not open_hdf5:
        raise refusal(ValueError, f'"{file}" has no datasets, got "{dataset}"; fix: the path alone.')
    if reader not in (open_tiff, _open_zarr, _open_zip):  # the others have one array
        place.choose_level(1)
        place.choose_series([""])
    return place, reader


def is_zarr(path: Path) -> bool:
    """Whether a path is a folder of zarr."""
    return path.is_dir() and any((path / name).is_file() for name in _ZARR)


# ---- NumPy and TIFF --------------------------------------------------------------------------------------------------
def _open_npy(file: FileName) -> Opened:
    array = np.load(file.path, mmap_mode="r")
    return array, unknown_axes(array)


def open_tiff(file: FileName) -> Opened:
    """Open a level of a series of a TIFF file: mapped into memory where it lies in one piece, else by zarr."""
    import tifffile
    import zarr

    with tifffile.TiffFile(file.path) as opened:
        check_parts(opened)
        index = file.choose_series([describe_series(each) for each in opened.series])
        level = file.choose_level(len(opened.series[index].levels))
        check_planes(opened, index, level)
        whole, axes = opened.series[index], stated_axes(opened, index)
        metadata, chosen, own = read_tiff_metadata(opened, index, axes), whole.levels[level], whole.axes.upper()
        check_codecs(chosen)
    places = {letter: _place(*pair) for letter, *pair in zip(own, chosen.shape, whole.shape, strict=True)}
    array: Any
    if chosen.dataoffset is not None:
        array = tifffile.memmap(file.path, series=index, level=level, mode="r").reshape(chosen.shape)
    else:
        array = zarr.open_array(tifffile.imread(file.path, aszarr=True, series=index, level=level), mode="r")
    if axes != own:  # tifffile leaves out axes of length 1
        array = AxesView(array, [own.find(each) if each in own else None for each in axes], {})
    return array, metadata.placed(places)


def _place(positions: int, whole: int) -> Place:
    """Return the place of a level: each position is n where it has the n-th of them, rounded either way."""
    factor = max(1, round(whole / max(1, positions)))
    return stretch(factor, 1) if positions in (whole // factor, -(-whole // factor)) else stretch(whole, positions)


# ---- zarr ------------------------------------------------------------------------------------------------------------
def _open_zarr(file: FileName, store: Any = None, inside: str = "") -> Opened:
    """Open a zarr array, or a level of an image of OME-Zarr."""
    import zarr

    from farfield.volumes.bounded_zarr import FolderStore, bound_chunks

    try:
        if store is None:
            store = FolderStore(file.path, read_only=True) if isinstance(file.path, Path) else file.path
        opened: Any = zarr.open(store, path=inside or None, mode="r")
        images = read_images(opened.attrs) if isinstance(opened, zarr.Group) else []
    # zarr raises all kinds of errors for folders that are none of its own.
    except Exception as error:
        raise refusal(ValueError, f'cannot read "{file.path}" as zarr: {error or type(error).__name__}.') from error
    if isinstance(opened, zarr.Array):
        file.choose_level(1)
        file.choose_series([""])
        bound_chunks(opened)
        return opened, read_array_metadata(opened)
    if not images:
        parts = sorted(name for name, _ in opened.members())
        named = f'one of its parts, "{os.path.join(file.path, parts[0])}" for example' if parts else "an image"
        raise refusal(ValueError, f'"{file.path}" is a group of zarr that is no image; fix: {named}.')
    _, levels = images[file.choose_series([f'"{name}" of {len(levels)} levels' for name, levels in images])]
    level = file.choose_level(len(levels))
    array = opened.get(str(levels[level].path))
    if not isinstance(array, zarr.Array):
        raise refusal(
            ValueError,
            f'"{file.path}" names "{levels[level].path}" as its level {level}, which is no array in it; '
            "fix: write or download it again.",
        )
    bound_chunks(array)
    return array, levels[level].metadata_for(array.ndim)


def read_array_metadata(array: Any) -> ImageMetadata:
    """Read what farfield writes into the attributes of a zarr array, or the names and sizes that others write."""
    try:
        read = ImageMetadata(**json.loads(json.dumps(dict(array.attrs["farfield"]))))
        affine = {letter: tuple(map(float, step)) for letter, step in read.affine.items()}
        read = replace(read, channels=tuple(read.channels), affine=affine)
        return read if len(read.axes) == array.ndim else unknown_axes(array)
    except (AttributeError, KeyError, TypeError, ValueError):
        with suppress(TypeError, ValueError):
            return read_attributes(array.attrs, array.ndim, getattr(array.metadata, "dimension_names", None))
        return unknown_axes(array)


def _open_zip(file: FileName) -> Opened:
    """Open a zipped zarr; refuse one whose entries hold more than chunks do."""
    import zipfile

    from farfield.volumes.bounded_zarr import ArchiveStore, check_entries

    with zipfile.ZipFile(file.path) as archive:
        entries = archive.infolist()
    check_entries(file.path, entries)
    # A folder that was zipped as such is the only one in its file.
    first = sorted({entry.filename.split("/")[0] for entry in entries if "/" in entry.filename})
    is_root = any(entry.filename in _ZARR for entry in entries)
    store = ArchiveStore(file.path, mode="r")
    try:
        return _open_zarr(file, store, "" if is_root or len(first) != 1 else first[0])
    except Exception:
        if store._is_open:
            store.close()
        raise


# Suffix -> what opens such files; `file_formats.FORMATS` are those of outputs.
READERS: dict[str, Callable[[FileName], Opened]] = {
    **dict.fromkeys(TIFF_SUFFIXES, open_tiff),
    ".npy": _open_npy,
    ".zip": _open_zip,
    **dict.fromkeys((".h5", ".hdf5", ".he5", ".ims", ".nwb"), open_hdf5),
    **dict.fromkeys((".nii", ".nii.gz"), open_nifti),
    **dict.fromkeys((".mrc", ".map", ".rec", ".st", ".ali"), open_mrc),
}
