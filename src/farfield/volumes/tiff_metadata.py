"""Voxel size, units and channels in TIFF files: those of OME-TIFF and of ImageJ, by tifffile."""

from __future__ import annotations

import re
import uuid
from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from xml.etree import ElementTree

import numpy as np

from farfield.volumes.image_metadata import UNITS, ImageMetadata, known, parse_length, parse_unit

# OME's unit for distances of which no unit is known.
UNITLESS = "reference frame"
# What ImageJ can hold.
IMAGEJ_AXES, IMAGEJ_DTYPES, IMAGEJ_BYTES = "TZCYX", ("uint8", "uint16", "float32"), 2**31
# Longer planes are better read in tiles and at coarser levels, which it does not have.
IMAGEJ_SIDE = 4096
# The axes of an image of which tifffile leaves out some, in its description in OME-XML.
_STATED = re.compile(r"axes ([A-Z]+)")
# Numbers of GeoTIFF's tags, with their types: what describes the world; steps, tied points and the matrix.
_GEO_KEYS, _GEO_STEPS = {34735: "H", 34736: "d", 34737: "s"}, (33550, 33922, 34264)
OME_DTYPES = ("int8", "int16", "int32", "uint8", "uint16", "uint32", "float32", "float64", "complex64", "complex128")


def read_tiff_metadata(file: Any, index: int = 0, axes: str | None = None) -> ImageMetadata:
    """Read the metadata of a series of images, by its index, of a `tifffile.TiffFile`, with its axes or others."""
    series = file.series[index]
    axes = axes or series.axes.upper()
    if file.is_ome:
        return read_ome(find_ome_image(file, index), axes)
    if file.is_imagej and index == 0:
        return read_imagej(file.imagej_metadata or {}, series.keyframe, axes)
    sizes = _read_voxel_size(file, series.keyframe) if index == 0 else {}
    spacing = {letter: each for letter, each in sizes.items() if letter in axes}
    units, names = dict.fromkeys(spacing, "micrometer"), _read_band_names(series.keyframe)
    metadata = ImageMetadata(axes, spacing, units, {}, names, nodata=_read_nodata(series.keyframe))
    # The resolution of other files is that of a printed page.
    return metadata if spacing else read_georeference(series.keyframe, metadata)


def _read_voxel_size(file: Any, page: Any) -> dict[str, float]:
    """Read the voxel size, in micrometers, that an LSM file or a scan of Aperio has."""
    sizes: dict[str, Any] = {}
    if file.is_lsm:
        meters = file.lsm_metadata or {}
        sizes = {letter: 1e6 * float(meters.get(f"VoxelSize{letter}", 0.0)) for letter in "ZYX"}
    elif file.is_svs:
        found = re.search(r"\|\s*MPP\s*=\s*([\d.]+)", page.description)
        sizes = dict.fromkeys("YX", found[1]) if found else {}
    return known(list(sizes), map(parse_length, sizes.values()))


def stated_axes(file: Any, index: int) -> str:
    """Return the axes that a file of farfield had when it was written; tifffile leaves out those of length 1."""
    axes = str(file.series[index].axes).upper()
    found = _STATED.fullmatch(str(find_ome_image(file, index).get("Description", ""))) if file.is_ome else None
    return found[1] if found and "".join(letter for letter in found[1] if letter in axes) == axes else axes


# ---- GeoTIFF ---------------------------------------------------------------------------------------------------------
def read_georeference(page: Any, metadata: ImageMetadata) -> ImageMetadata:
    """Return metadata with the steps in the world, and its description, of a GeoTIFF; as it is for others."""
    tags = {code: page.tags.valueof(code) for code in (*_GEO_KEYS, *_GEO_STEPS)}
    if tags[34735] is None or not {"Y", "X"} <= set(metadata.axes):
        return metadata
    scale, tied, matrix = ([float(each) for each in np.ravel(tags[code] or ())] for code in _GEO_STEPS)
    if len(matrix) == 16:
        steps = {"X": (matrix[0], matrix[4]), "Y": (matrix[1], matrix[5]), "origin": (matrix[3], matrix[7])}
    elif len(scale) >= 2 and len(tied) == 6:
        column, row, _, x, y, _ = tied
        steps = {"X": (scale[0], 0.0), "Y": (0.0, -scale[1])}
        steps["origin"] = (x - column * scale[0], y + row * scale[1])
    else:
        return metadata
    kept = {
        str(code): value if isinstance(value := tags[code], str) else np.ravel(value).tolist()
        for code in _GEO_KEYS
        if tags[code] is not None
    }
    return replace(metadata, affine=steps, georeference=kept)


def _read_nodata(page: Any) -> float | None:
    """Read the number that is none from GDAL's tag; None without one, and where no number of the dtype is it."""
    try:
        number = float(page.tags.valueof(42113))
    except (TypeError, ValueError):
        return None
    if page.dtype.kind == "f":
        return float(np.array(number).astype(page.dtype))
    limits = np.iinfo(page.dtype) if page.dtype.kind in "iu" else None
    return number if limits and number.is_integer() and limits.min <= number <= limits.max else None


def _read_band_names(page: Any) -> tuple[str, ...]:
    """Read the names of bands from GDAL's tag; none where it is damaged, or has none."""
    try:
        items = ElementTree.fromstring(page.tags.valueof(42112) or "<GDALMetadata/>").iter("Item")
        named = {int(each.get("sample", -1)): each.text or "" for each in items if each.get("role") == "description"}
    except (ElementTree.ParseError, TypeError, ValueError):
        return ()
    return tuple(named.get(band, "") for band in range(page.samplesperpixel)) if any(named.values()) else ()


def georeference_tags(metadata: ImageMetadata) -> list[tuple[int, str, int, Any, bool]]:
    """Return the tags of a GeoTIFF, as `tifffile` takes them; none where no georeference is known."""
    if not metadata.georeference or not {"X", "Y", "origin"} <= set(metadata.affine):
        return []
    (a, d), (b, e), (c, f) = (metadata.affine[letter] for letter in ("X", "Y", "origin"))
    if b == d == 0 and a > 0 > e:
        tags: list[Any] = [(33550, "d", 3, (a, -e, 0.0), True), (33922, "d", 6, (0.0, 0.0, 0.0, c, f, 0.0), True)]
    else:
        rows = (a, b, 0.0, c, d, e, 0.0, f, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0)
        tags = [(34264, "d", 16, rows, True)]
    for code, value in metadata.georeference.items():
        kind = _GEO_KEYS[int(code)]
        tags.append((int(code), kind, 0 if kind == "s" else len(value), value, True))
    return tags


# ---- OME and ImageJ --------------------------------------------------------------------------------------------------


def find_ome_image(file: Any, index: int) -> dict[str, Any]:
    """Return the entry in OME-XML of a series; an empty one where it is damaged, or not known which it is."""
    import tifffile

    try:
        entries = tifffile.xml2dict(file.ome_metadata)["OME"]["Image"]
    except (KeyError, TypeError, ValueError, IndexError, ElementTree.ParseError):
        return {}
    images = [each for each in as_list(entries) if isinstance(each, dict)]
    if len(images) == len(file.series):
        return images[index]
    # Images of which the file has no planes are entries too, but tifffile makes no series of them.
    named = [image for image in images if image.get("Name") == file.series[index].name]
    return named[0] if len(named) == 1 else {}


def as_list(entries: Any) -> list[Any]:
    """Return several entries, or the only one, as a list."""
    return list(entries) if isinstance(entries, list | tuple) else [entries]


def read_ome(image: dict[str, Any], axes: str) -> ImageMetadata:
    """Read the physical sizes and the channels from an image's entry in OME-XML; nothing where that is damaged."""
    pixels = image.get("Pixels")
    if not isinstance(pixels, dict):
        return ImageMetadata(axes)
    keys = {**{letter: f"PhysicalSize{letter}" for letter in "ZYX"}, "T": "TimeIncrement"}
    spacing = known(list(keys), [parse_length(pixels.get(key)) for key in keys.values()])
    usual = {"T": "s"}
    given = {letter: pixels.get(f"{keys[letter]}Unit", usual.get(letter, "µm")) for letter in spacing}
    units = known(list(given), [parse_unit(unit) for unit in given.values()])
    entries = as_list(pixels.get("Channel", []))
    names = [str(entry.get("Name", "")) if isinstance(entry, dict) else "" for entry in entries]
    return ImageMetadata(axes, spacing, units, {}, tuple(names) if any(names) else ()).with_axes(axes)


def read_imagej(described: dict[str, Any], page: Any, axes: str) -> ImageMetadata:
    """Read ImageJ's description and the resolution of its first page; a unit such as "pixel" is no voxel size."""
    unit = parse_unit(described.get("unit"))
    names = {"Z": "zunit", "Y": "yunit", "X": "unit"}
    units = {letter: parse_unit(described.get(name)) or unit for letter, name in names.items()}
    distances = {
        "Z": parse_length(abs(described.get("spacing", 0.0))),
        "Y": pixel_size(page, "YResolution"),
        "X": pixel_size(page, "XResolution"),
    }
    spacing = {letter: each for letter, each in distances.items() if each is not None and units[letter] is not None}
    interval = parse_length(described.get("finterval"))
    if interval is not None:
        spacing["T"], units["T"] = interval, parse_unit(described.get("tunit", "sec")) or "second"
    kept = {letter: units[letter] for letter in spacing}
    channels, labels = int(described.get("channels", 1)), described.get("Labels") or []
    # A label belongs to a plane, and the planes of the channels follow each other: names repeat if they are channels'.
    names_channels = (
        channels > 1 and len(labels) >= channels and labels == labels[:channels] * (len(labels) // channels)
    )
    return ImageMetadata(
        axes, spacing, known(list(kept), kept.values()), {}, tuple(labels[:channels]) if names_channels else ()
    ).with_axes(axes)


def pixel_size(page: Any, tag: str) -> float | None:
    """Return the distance of pixels from a tag that has pixels per unit as a fraction; None if there is none."""
    value = page.tags.valueof(tag)
    if not isinstance(value, Sequence) or len(value) != 2 or not value[0]:
        return None
    return parse_length(value[1] / value[0])


# ---- writing ---------------------------------------------------------------------------------------------------------
def fits_imagej(metadata: ImageMetadata, shape: Sequence[int], dtype: str, nbytes: int) -> bool:
    """Whether ImageJ's format holds an array and its voxel size."""
    space = "".join(letter for letter in metadata.axes if letter in "ZYX")
    return (
        set(metadata.axes) <= set(IMAGEJ_AXES)
        and {"X", "Y"} <= set(metadata.axes)
        and len(set(metadata.axes)) == len(shape)
        and dtype in IMAGEJ_DTYPES
        and nbytes <= IMAGEJ_BYTES
        and max(shape[-2:]) <= IMAGEJ_SIDE
        and metadata.in_one_unit(space) is not None
    )


def imagej_options(metadata: ImageMetadata, shape: Sequence[int]) -> dict[str, Any]:
    """Return the arguments of `write` for ImageJ; the axes have to be in the order of `IMAGEJ_AXES`."""
    sizes = dict(zip(metadata.axes, shape, strict=True))
    unit, spacing = metadata.in_one_unit("".join(letter for letter in "ZYX" if letter in sizes)) or ("", {})
    described: dict[str, Any] = {"unit": "micron" if unit == "micrometer" else UNITS[unit].symbol}
    described["axes"] = "".join(letter for letter in IMAGEJ_AXES if letter in sizes)
    if "Z" in spacing:
        described["spacing"] = spacing["Z"]
    if "T" in metadata.spacing and metadata.units.get("T", "") in UNITS:
        described["finterval"] = metadata.spacing["T"] * UNITS[metadata.units["T"]].amount
    if len(metadata.channels) == sizes.get("C", 1):
        described["Labels"] = list(metadata.channels) * (sizes.get("T", 1) * sizes.get("Z", 1))
    return {"resolution": (1 / spacing["X"], 1 / spacing["Y"]), "metadata": described}


def describe_ome(metadata: ImageMetadata, shape: Sequence[int], dtype: str) -> dict[str, Any]:
    """Return what `tifffile` writes into the description of an OME-TIFF."""
    axes = metadata.axes if "T" in metadata.axes else metadata.axes.replace("I", "T")
    described: dict[str, Any] = {"axes": axes}
    for letter, key in {"Z": "PhysicalSizeZ", "Y": "PhysicalSizeY", "X": "PhysicalSizeX", "T": "TimeIncrement"}.items():
        unit = metadata.units.get(letter, "")
        # Time has no unit for unknown ones.
        if letter in metadata.spacing and (letter != "T" or unit in UNITS):
            described[key] = metadata.spacing[letter]
            described[f"{key}Unit"] = UNITS[unit].symbol if unit in UNITS else UNITLESS
    if metadata.channels and len(metadata.channels) == dict(zip(metadata.axes, shape, strict=True)).get("C"):
        described["Channel"] = {"Name": list(metadata.channels)}
    if 1 in shape:
        described["Description"] = f"axes {axes}"
    # Not random: a call that was killed and repeated ends with the same bytes.
    described["UUID"] = str(uuid.uuid5(uuid.NAMESPACE_OID, repr((metadata, tuple(shape), dtype))))
    return described
