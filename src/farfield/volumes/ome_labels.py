"""Labels inside an image of OME-Zarr 0.4 or 0.5, `image.ome.zarr/labels/NAME`, listed there and marked as labels."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np

from farfield.volumes.levels import OutputSpec, make_levels
from farfield.volumes.ome_zarr import describe_image, read_images, refuse_axes

_VERSIONS = ("0.4", "0.5")


def find_image(path: Path) -> Any:
    """Return the group of zarr that is an image, in whose folder `labels` a path is; None if it is in none."""
    folder = path.absolute().parent
    if folder.name != "labels" or not any((folder.parent / name).is_file() for name in ("zarr.json", ".zattrs")):
        return None
    import zarr

    group = zarr.open(str(folder.parent), mode="r")
    return group if isinstance(group, zarr.Group) and read_images(group.attrs) else None


def _version_of(image: Any) -> str:
    described = image.attrs.get("ome", image.attrs)
    return str(described.get("version", described["multiscales"][0].get("version", "")))


def fit_labels(path: Path, spec: OutputSpec) -> OutputSpec:
    """Return the array as labels hold it, with a level for each of the image."""
    image, factors = find_image(path), []
    levels = read_images(image.attrs)[0][1]
    shapes = [dict(zip(each.metadata.axes, image[each.path].shape, strict=True)) for each in levels]
    for finer, coarser in itertools.pairwise(shapes):
        ratios = {letter: max(1, round(length / coarser[letter])) for letter, length in finer.items()}
        factors.append(tuple(ratios.get(letter, 1) for letter in spec.metadata.axes))
    dtype = np.dtype("uint8") if spec.dtype == np.bool_ else spec.dtype
    return spec._replace(dtype=dtype, factors=factors)


def refuse_labels(path: Path, spec: OutputSpec) -> str | None:
    """Return why an image cannot hold an array as its labels; None if it can."""
    if spec.dtype.kind not in "iu":
        return f"labels are whole numbers, and the result is of {spec.dtype}"
    if (version := _version_of(find_image(path))) not in _VERSIONS:
        return f"the image is of OME-Zarr {version}, and labels are written into {' and '.join(_VERSIONS)}"
    reason = refuse_axes(spec.metadata)
    return reason and f"OME-Zarr cannot hold it: {reason}"


def make_labels(path: Path, spec: OutputSpec) -> Any:
    """Make the labels with all levels, and return the finest; `path` is in a folder beside the labels' place."""
    import zarr

    image = find_image(path.parent)
    described = describe_image(path.name, spec.metadata, spec.factors, average=False)["ome"]
    described["image-label"] = {"source": {"image": "../../"}}
    names = [axis["name"] for axis in described["multiscales"][0]["axes"]]
    if _version_of(image) == "0.5":
        group = zarr.create_group(str(path), attributes={"ome": described})
        return make_levels(group, spec, dimension_names=names)
    from numcodecs import Blosc  # type: ignore[import-untyped]

    del described["version"]
    for each in (described["multiscales"][0], described["image-label"]):
        each["version"] = "0.4"
    group = zarr.create_group(str(path), zarr_format=2, attributes=described)
    separated = {"name": "v2", "separator": "/"}
    return make_levels(group, spec, chunk_key_encoding=separated, compressors=Blosc())


def list_labels(path: Path) -> None:
    """List all labels of an image in the group that they are in."""
    import zarr

    image = find_image(path)
    is_new = _version_of(image) == "0.5"
    labels = zarr.open_group(str(path.parent), mode="a", zarr_format=image.metadata.zarr_format)
    # What another process lists meanwhile may replace this list; then that process finds these labels too.
    while set(there := _find_labels(path.parent)) - set(listed := _read_list(labels)):
        names = {"labels": [*listed, *(name for name in there if name not in listed)]}
        labels.attrs.update({"ome": {"version": "0.5", **names}} if is_new else names)
        labels = zarr.open_group(str(path.parent), mode="r+")


def _read_list(labels: Any) -> list[str]:
    return list(labels.attrs.get("ome", labels.attrs).get("labels", []))


def _find_labels(folder: Path) -> list[str]:
    described = [file for name in ("zarr.json", ".zattrs") for file in folder.glob(f"*/{name}")]
    return sorted(file.parent.name for file in described if '"image-label"' in file.read_text(encoding="utf-8"))
