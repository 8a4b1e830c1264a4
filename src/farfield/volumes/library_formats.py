"""HDF5, NIfTI and MRC files and folders of planes, each by its own library; a missing one is named with its extra."""

from __future__ import annotations

import contextlib
import fnmatch
import gzip
import itertools
import json
import math
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from farfield._checks import load_library
from farfield.volumes.file_name import FileArray, FileName, Opened
from farfield.volumes.image_metadata import ImageMetadata, known, parse_length
from farfield.volumes.labelled_arrays import read_attributes
from farfield.volumes.tiff_metadata import read_tiff_metadata
from farfield.volumes.tiff_parts import check_codecs, check_parts, check_planes, listed

# Suffixes of files that are planes of a folder, and are read by tifffile or Pillow.
_TIFF_PLANES, _OTHER_PLANES = (".tif", ".tiff"), (".png", ".bmp", ".jpg", ".jpeg")


# ---- HDF5 ------------------------------------------------------------------------------------------------------------
def open_hdf5(file: FileName) -> Opened:
    """Open a dataset of an HDF5 file; the only one of numbers in a file if none is named."""
    h5py = load_library("h5py", "hdf5", "an HDF5 file")
    opened = h5py.File(file.path, "r")
    names: list[str] = []

    def visit(name: str, each: Any) -> None:
        if isinstance(each, h5py.Dataset) and each.dtype.kind in "bfiu" and len(each.shape or ()) > 1:
            names.append(name)

    opened.visititems(visit)
    name = file.dataset or (names[0] if len(names) == 1 else "")
    _refuse_links(file, h5py, opened, name)
    found = opened.get(name) if name else None
    if not isinstance(found, h5py.Dataset) or not found.shape:
        if not names:
            raise file.error("it has no arrays of two axes or more")
        what = f'no array "{name}", and ' if name else ""
        raise file.error(
            f'it has {what}the arrays {listed(names)}; fix: open_volume("{file.path}::{names[0]}"), for example'
        )
    _check_filters(file, h5py, found)
    return found, _read_hdf5_metadata(found)


def _refuse_links(file: FileName, h5py: Any, opened: Any, name: str) -> None:
    """Refuse a dataset in another file, and a virtual one of which a part is: HDF5 opens whatever file is named."""
    names = [name]
    for here in names:  # which grows by the sources of a virtual dataset
        _refuse_link(file, h5py, opened, here)
        found = opened.get(here)
        if not isinstance(found, h5py.Dataset):
            continue
        if found.external:  # which HDF5 seeks in the folder of the process
            raise file.error(f'"{here}" is in "{found.external[0][0]}"; fix: write its numbers into the file')
        for source in found.virtual_sources() if found.is_virtual else ():
            if source.file_name != ".":
                raise file.error(f'"{here}" has parts in "{source.file_name}"; fix: open that file')
            if "%" in source.dset_name:  # in whose place HDF5 puts numbers, of datasets that are not known
                raise file.error(f'"{here}" has parts in datasets "{source.dset_name}"; fix: copy it into one')
            # One that leads back to itself would end the process that reads it.
            inner = opened.get(source.dset_name)
            if isinstance(inner, h5py.Dataset) and inner.is_virtual:
                raise file.error(f'"{here}" has parts in "{source.dset_name}", which is virtual too; fix: copy it')
            names.append(source.dset_name)


def _refuse_link(file: FileName, h5py: Any, opened: Any, name: str) -> None:
    """Refuse a path of which a part is a link to another place."""
    parts = [part for part in name.split("/") if part not in ("", ".")]
    for end in range(1, len(parts) + 1):
        here = "/".join(parts[:end])
        link = opened.get(here, getlink=True)
        if link is not None and not isinstance(link, h5py.HardLink):
            raise file.error(f'"{here}" is a link to "{link.path}"; fix: open what it leads to')


def _check_filters(file: FileName, h5py: Any, dataset: Any) -> None:
    """Refuse a dataset whose compression is not installed, which would be known only when it is read."""
    created = dataset.id.get_create_plist()
    for number in range(created.get_nfilters()):
        code, _, _, name = created.get_filter(number)
        if not h5py.h5z.filter_avail(code):
            named = name.decode(errors="replace") or f"filter {code}"
            raise file.error(
                f"its chunks are compressed by {named}, which HDF5 does not have; fix: pip install hdf5plugin, and "
                "import hdf5plugin before"
            )


def _read_hdf5_metadata(dataset: Any) -> ImageMetadata:
    """Read the axes that ilastik or the dimension scales name, and the voxel size that several programs write."""
    count, attributes = len(dataset.shape), dataset.attrs
    letters = [str(each.label)[:1].upper() for each in dataset.dims]
    with contextlib.suppress(KeyError, TypeError, ValueError):
        letters = [str(each["key"]).upper() for each in json.loads(attributes["axistags"])["axes"]]
    is_named = len(letters) == count and set(letters) <= set("TCZYX") and len(set(letters)) == count
    sizes = np.ravel(attributes.get("element_size_um", ()))  # of Fiji and ilastik
    if len(sizes) != 3:
        return read_attributes(attributes, count, letters if is_named else None)
    if not is_named:
        letters = list("ZYX"[-count:]) if count in (2, 3) else ["Q"] * count
    spacing = known(list("ZYX"), map(parse_length, sizes))
    units = dict.fromkeys(spacing, "micrometer")
    return ImageMetadata("".join(letters), spacing, units).with_axes("".join(letters))


# ---- NIfTI and MRC ---------------------------------------------------------------------------------------------------
# How many times as long as a file what deflate has packed can be at most.
_DEFLATED = 1032
NIFTI_UNITS = {"mm": "millimeter", "micron": "micrometer", "meter": "meter", "sec": "second", "msec": "millisecond"}


def open_nifti(file: FileName) -> Opened:
    """Open a NIfTI file, whose axes x, y, z, time, channels come the first one fastest."""
    nibabel = load_library("nibabel", "nifti", "a NIfTI file")
    path = Path(file.path)
    packed, size = path.name.lower().endswith(".gz"), path.stat().st_size
    with gzip.open(path) if packed else path.open("rb") as opened:
        start = opened.read(540)
    kinds = {348: nibabel.Nifti1Header, 540: nibabel.Nifti2Header}
    length = next((each for each in kinds if start[:4] in (each.to_bytes(4, "little"), each.to_bytes(4, "big"))), 0)
    if not length or len(start) < length:
        raise file.error("it has no header of NIfTI, so its file type is not known")
    header = kinds[length](start[:length])
    if not header["magic"].item().startswith(b"n+"):
        raise file.error("its numbers are in another file; fix: convert it to one file")
    # Its extensions, which can be of any size, are not read.
    numbers = nibabel.arrayproxy.ArrayProxy(path, header)
    shape = tuple(map(int, numbers.shape))
    stored = math.prod(shape) * numbers.dtype.itemsize + int(numbers.offset)
    if size * (_DEFLATED if packed else 1) < stored:
        raise file.error(f"it ends after {size:,} of {stored:,} bytes; fix: write or copy it again")
    axes = "XYZTC"[: len(shape)] if len(shape) <= 5 else "Q" * len(shape)
    unit, time_unit = header.get_xyzt_units()
    letters = axes.strip("CQ")
    spacing = known(letters, map(parse_length, header.get_zooms()[: len(letters)]))
    given = {letter: NIFTI_UNITS.get(time_unit if letter == "T" else unit) for letter in spacing}
    # A zoom of 1 without a unit is what the format has where nothing is known.
    spacing = {letter: each for letter, each in spacing.items() if given[letter] or each != 1}
    units = {letter: each for letter, each in given.items() if each and letter in spacing}
    matrix = np.asarray(header.get_best_affine(), float)
    steps = {letter: tuple(map(float, matrix[:3, place])) for place, letter in enumerate("XYZ") if letter in axes}
    steps["origin"] = tuple(map(float, matrix[:3, 3]))
    metadata = ImageMetadata(axes, spacing, units, {}, (), steps)
    dtype = numbers.dtype if (numbers.slope, numbers.inter) == (1, 0) else np.dtype("float64")  # scaled when read
    # A packed file is unpacked from its start each time.
    return FileArray([path], shape, dtype, numbers.__getitem__, shape if packed else None), metadata


def open_mrc(file: FileName) -> Opened:
    """Open an MRC or CCP4 file, mapped into memory; its unit is the angstrom."""
    mrcfile = load_library("mrcfile", "mrc", "an MRC file")
    with mrcfile.mmap(file.path, mode="r") as opened:
        header, shape, dtype = opened.header, opened.data.shape, opened.data.dtype
        offset = header.nbytes + opened.extended_header.nbytes
        stacked = "I" if opened.is_image_stack() or opened.is_volume_stack() else ""
        order = [int(header[name]) for name in ("maps", "mapr", "mapc")]
        sizes = {letter: parse_length(opened.voxel_size[letter.lower()]) for letter in "ZYX"}
        start = {letter: float(header.origin[letter.lower()]) for letter in "ZYX"}
    letters = "".join("XYZ"[each - 1] for each in order) if sorted(order) == [1, 2, 3] else "ZYX"
    axes = stacked + letters[-(len(shape) - len(stacked)) :]
    spacing = {letter: each for letter, each in sizes.items() if each is not None and letter in axes}
    origin = {letter: each for letter, each in start.items() if each and letter in spacing}
    array = np.memmap(file.path, dtype, "r", offset, shape)
    return array, ImageMetadata(axes, spacing, dict.fromkeys(spacing, "angstrom"), origin)


# ---- folders of planes -----------------------------------------------------------------------------------------------
def list_planes(folder: Path) -> list[Path]:
    """List the files that are images, of a folder or of a pattern, by the numbers in their names; no hidden ones."""
    planes = [
        path
        for path in (folder.iterdir() if folder.is_dir() else folder.parent.glob(folder.name))
        if path.suffix.lower() in _TIFF_PLANES + _OTHER_PLANES and not path.name.startswith(".") and path.is_file()
    ]

    def number(path: Path) -> tuple[list[str | int], str]:
        parts = [int(each) if each.isdecimal() else each for each in re.split(r"(\d+)", path.name.lower())]
        return parts, path.name  # of names that differ in zeros and capitals alone, always the same order

    return sorted(planes, key=number)


def _find_stacks(planes: Sequence[Path]) -> dict[str, list[str]]:
    """Return the numbers of planes, by the pattern of their names: * is the last number that differs."""
    alike: dict[str, list[list[str]]] = {}
    for path in planes:
        alike.setdefault(re.sub(r"\d+", "0", path.name), []).append(re.split(r"(\d+)", path.name))
    stacks: dict[str, list[str]] = {}
    for names in alike.values():
        place = max((place for place, own in enumerate(zip(*names, strict=True)) if len(set(own)) > 1), default=1)
        for parts in names:
            pattern = "".join("*" if at == place else part for at, part in enumerate(parts))
            stacks.setdefault(pattern, []).append("".join(parts[place : place + 1]))
    return stacks


def _check_names(file: FileName, planes: Sequence[Path]) -> None:
    """Refuse planes whose names differ in more than one number, and so are of several stacks, and those with a gap."""
    stacks, names = _find_stacks(planes), [path.name for path in planes]
    if len(stacks) > 1:
        # * may stand for more than a number.
        given = [(each.replace("*", one), own) for each, own in stacks.items() for one in ("*", "[0-9]" * len(own[0]))]
        exact = (each for each, own in given if len(fnmatch.filter(names, each)) == len(own) > 1)
        fix = next((f'open_volume("{planes[0].parent / each}")' for each in exact), "a folder for each")
        raise file.error(f"its planes are those of {len(stacks)} stacks, {listed(list(stacks))}; fix: {fix}")
    for pattern, numbers in stacks.items():
        for one, other in itertools.pairwise(numbers):
            if int(other) != int(one) + 1:
                missing = f'"{pattern.replace("*", str(int(one) + 1).zfill(len(one)))}" is missing'
                raise file.error(
                    f"{missing if int(other) > int(one) else 'two names have one number'}, between {one} and {other}; "
                    "fix: put it there, or number the planes anew, without gaps"
                )


def open_planes(file: FileName) -> Opened:
    """Open a folder of images of one size and dtype as a stack; only the planes that are sliced are read."""
    planes = list_planes(Path(file.path))
    if not planes:
        fix = "a folder with zarr.json or .zarray, or with planes, .tif or .png for example"
        raise file.error(f"it has no zarr array and no images; fix: {fix}")
    _check_names(file, planes)
    described = [_describe_plane(file, plane) for plane in planes]
    shape, dtype, metadata = described[0]
    for plane, (other, kind, _) in zip(planes, described, strict=True):
        if (other, kind) != (shape, dtype):
            raise file.error(
                f'"{planes[0].name}" has the size {shape} of {dtype}, and "{plane.name}" {other} of {kind}; fix: '
                "planes of one size and dtype in a folder"
            )
    read = partial(_read_planes, planes, shape)
    array = FileArray(planes, (len(planes), *shape), dtype, read, (1, *shape))
    return array, metadata.with_axes("Z" + metadata.axes)


def _describe_plane(file: FileName, path: Path) -> tuple[tuple[int, ...], np.dtype, ImageMetadata]:
    """Return the size, the dtype and what is known of an image, from its header."""
    try:
        if path.suffix.lower() in _TIFF_PLANES:
            import tifffile

            with tifffile.TiffFile(path) as opened:
                check_parts(opened)
                check_planes(opened)
                check_codecs(opened.series[0])
                metadata = read_tiff_metadata(opened)
                shape, dtype = opened.series[0].shape, opened.series[0].dtype
        else:
            image_module = load_library("PIL.Image", "planes", "a folder of PNG or JPEG files")
            with image_module.open(path) as image:
                sample = np.asarray(image_module.new(image.mode, (1, 1)))
                shape, dtype = (image.height, image.width, *sample.shape[2:]), sample.dtype
                metadata = ImageMetadata("YXS"[: len(shape)])
    # Both libraries raise all kinds of errors for damaged files.
    except Exception as error:
        if isinstance(error, ImportError):
            raise
        raise file.error(f'"{path.name}": {error or type(error).__name__}') from error
    if len(metadata.axes.replace("S", "")) != 2:
        raise file.error(f'"{path.name}" has the axes "{metadata.axes}" {tuple(shape)}, and is no plane')
    return tuple(shape), np.dtype(dtype), metadata


def _read_planes(planes: Sequence[Path], shape: tuple[int, ...], spans: tuple[slice, ...]) -> np.ndarray:
    """Read the same part of some planes."""
    parts = []
    for path in planes[spans[0]]:
        if path.suffix.lower() in _TIFF_PLANES:
            import tifffile

            plane = tifffile.imread(path)
        else:
            with load_library("PIL.Image", "planes", "a folder of PNG or JPEG files").open(path) as image:
                plane = np.asarray(image)
        if plane.shape != shape:
            raise ValueError(f'"{path.name}" has the size {plane.shape} now, not {shape}')
        parts.append(plane[spans[1:]])
    return np.stack(parts)
