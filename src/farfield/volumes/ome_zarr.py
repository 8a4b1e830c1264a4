"""OME-Zarr: reading versions 0.1 to 0.5, and writing 0.5 with the levels of a pyramid beside each tile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from farfield.volumes.image_metadata import SPACE, ImageMetadata, known, parse_length, parse_unit

VERSION = "0.5"
# The last level of a pyramid has no axis of space longer than this.
SMALLEST = 256
# Colours of channels, as viewers use them by default.
COLORS = ("00FF00", "FF00FF", "00FFFF", "FFFF00", "FF0000", "0000FF")


class Level(NamedTuple):
    path: str  # name of its array in the group
    metadata: ImageMetadata  # its axes and voxel size

    def metadata_for(self, dims: int) -> ImageMetadata:
        """Return the metadata of an array of so many axes; without their letters if these are others."""
        return self.metadata if len(self.metadata.axes) == dims else ImageMetadata("Q" * dims)


# ---- reading ---------------------------------------------------------------------------------------------------------
def read_images(attributes: Mapping[str, Any]) -> list[tuple[str, list[Level]]]:
    """Read the name and the levels of each image from the attributes of its group; none if the group is no image."""
    described = attributes.get("ome", attributes)
    channels = [str(channel.get("label", "")) for channel in described.get("omero", {}).get("channels", [])]
    return [(str(image.get("name", "")), read_levels(image, channels)) for image in described.get("multiscales") or []]


def read_levels(image: Mapping[str, Any], channels: Sequence[str]) -> list[Level]:
    # Versions 0.1 and 0.2 have no axes, which are always these; 0.3 has their names alone.
    given = [{"name": axis} if isinstance(axis, str) else axis for axis in image.get("axes", "tczyx")]
    axes = "".join(map(axis_letter, given))
    units = known(axes, [parse_unit(axis.get("unit")) or axis.get("unit") for axis in given])
    levels = []
    for level in image["datasets"]:
        steps = [*level.get("coordinateTransformations", []), *image.get("coordinateTransformations", [])]
        names = tuple(channels) if any(channels) else ()
        scale_and_origin = compose(steps, len(axes))
        if scale_and_origin is None:
            levels.append(Level(level["path"], ImageMetadata(axes, channels=names)))
            continue
        scale, origin = scale_and_origin
        spacing = known(axes, map(parse_length, scale))
        spacing.pop("C", None)
        # A scale of 1 without a unit is what the format demands where nothing is known.
        spacing = {letter: each for letter, each in spacing.items() if each != 1 or letter in units}
        places = {letter: float(each) for letter, each in zip(axes, origin, strict=True) if each}
        levels.append(Level(level["path"], ImageMetadata(axes, spacing, units, places, names)))
    return levels


def axis_letter(axis: Mapping[str, str]) -> str:
    """Return the letter of an axis: by its type for channels and time, by its name for those of space."""
    named = {"channel": "C", "time": "T"}.get(axis.get("type", ""), axis["name"].upper())
    return named if named in ("C", "T", *SPACE) else "Q"


def compose(steps: Sequence[Mapping[str, Any]], dims: int) -> tuple[np.ndarray, np.ndarray] | None:
    """Return the scale and the translation of coordinate transformations that are applied one after the other.

    None if they are none, or have others among them, such as an affine one: nothing is known then.
    """
    scale, origin, scaled = np.ones(dims), np.zeros(dims), False
    for step in steps:
        if step["type"] == "scale" and _has_length(step.get("scale"), dims):
            scale, origin, scaled = scale * step["scale"], origin * step["scale"], True
        elif step["type"] == "translation" and _has_length(step.get("translation"), dims):
            origin = origin + step["translation"]
        elif step["type"] == "sequence":
            inner = compose(step.get("transformations", ()), dims)
            if inner is None:
                return None
            scale, origin, scaled = scale * inner[0], origin * inner[0] + inner[1], True
        elif step["type"] != "identity":
            return None
    return (scale, origin) if scaled else None


def _has_length(numbers: object, dims: int) -> bool:
    return isinstance(numbers, Sequence) and len(numbers) == dims


# ---- the levels of a pyramid -----------------------------------------------------------------------------------------
def pyramid_factors(shape: Sequence[int], metadata: ImageMetadata, letters: str = SPACE) -> list[tuple[int, ...]]:
    """Return for each level after the first by which factor, 1 or 2, each axis is halved from the one before."""
    axes, sizes, factors = metadata.axes, list(shape), []
    spacing = {letter: metadata.spacing.get(letter, 1.0) for letter in axes if letter in letters}
    if set(spacing) - set(metadata.spacing):
        spacing = dict.fromkeys(spacing, 1.0)
    space = [place for place, letter in enumerate(axes) if letter in letters]
    while max((sizes[place] for place in space), default=0) > SMALLEST:
        finest = min(spacing[axes[place]] for place in space if sizes[place] > 1)
        # Axes whose positions are at least twice as far apart as the finest are not halved, so that voxels become
        # cubes.
        halved = [place for place in space if sizes[place] > 1 and spacing[axes[place]] < 2 * finest]
        factors.append(tuple(2 if place in halved else 1 for place in range(len(axes))))
        for place in halved:
            sizes[place], spacing[axes[place]] = -(-sizes[place] // 2), 2 * spacing[axes[place]]
    return factors


def halve(box: np.ndarray, factors: Sequence[int], average: bool) -> np.ndarray:
    """Return a box with each axis halved whose factor is 2: means of neighbours, or the first of them for labels."""
    if not average:
        return box[tuple(slice(None, None, factor) for factor in factors)]
    total = box.astype(np.float64)
    for axis, factor in enumerate(factors):
        if factor == 2:
            first, second = (total[(slice(None),) * axis + (slice(start, None, 2),)] for start in (0, 1))
            joined = first.copy()
            # Those that have a second one after them; the last of an odd length stands for itself. The order is fixed.
            paired = (slice(None),) * axis + (slice(0, second.shape[axis]),)
            joined[paired] = (first[paired] + second) / 2
            total = joined
    return total.astype(box.dtype)


def fill(finer: Any, coarser: Any, index: tuple[slice, ...], factors: Sequence[int]) -> None:
    """Write a chunk of a level from the level before it: numbers are averaged, integers are labels."""
    read = tuple(slice(span.start * factor, span.stop * factor) for span, factor in zip(index, factors, strict=True))
    coarser[index] = halve(np.asarray(finer[read]), factors, coarser.dtype.kind == "f")


# ---- writing ---------------------------------------------------------------------------------------------------------
def refuse_axes(metadata: ImageMetadata) -> str | None:
    """Return why OME-Zarr cannot hold these axes; None if it can."""
    space = sum(letter in SPACE for letter in metadata.axes)
    if space < 2:
        return "it holds images of two or three axes of space"
    if (
        len(set(metadata.axes)) < len(metadata.axes)
        or set(metadata.axes) & set("Q")
        or {"I", "T"} <= set(metadata.axes)
    ):
        return f'it has no place for the axes "{metadata.axes}"'
    if "ZC" in metadata.axes:
        return "its channels come before z, and planes one after the other have them behind it"
    return None


def describe_image(
    name: str, metadata: ImageMetadata, factors: Sequence[Sequence[int]], average: bool
) -> dict[str, Any]:
    kinds = {"T": "time", "I": "time", "C": "channel"}
    axes = []
    for letter in metadata.axes:
        axis = {"name": "t" if letter == "I" else letter.lower(), "type": kinds.get(letter, "space")}
        axes.append(axis | ({"unit": metadata.units[letter]} if letter in metadata.units else {}))
    scale = np.array([metadata.spacing.get(letter, 1.0) for letter in metadata.axes])
    place = metadata.origin or _find_origin(metadata)
    origin = np.array([place.get(letter, 0.0) for letter in metadata.axes])
    datasets = []
    for level, each in enumerate([np.ones(len(scale)), *np.cumprod(np.array(factors, float), 0)] if factors else [1.0]):
        # Means lie in the middle of the positions that they stand for.
        moved = origin + (scale * (each - 1) / 2 if average else 0.0)
        steps: list[dict[str, Any]] = [{"type": "scale", "scale": [float(step) for step in scale * each]}]
        if moved.any():
            steps.append({"type": "translation", "translation": [float(step) for step in moved]})
        datasets.append({"path": str(level), "coordinateTransformations": steps})
    method = "the mean of those" if average else "the first of those"
    described = {
        "name": name,
        "axes": axes,
        "datasets": datasets,
        "type": "mean" if average else "nearest",
        "metadata": {"description": f"a position of a level is {method} that it stands for in the level before it"},
    }
    return {"ome": {"version": VERSION, "multiscales": [described]}}


def _find_origin(metadata: ImageMetadata) -> Mapping[str, float]:
    """Return where the first position of NIfTI's matrix lies, if its steps are those along the axes and no others."""
    first = dict(zip("XYZ", metadata.affine.get("origin", ()), strict=False))
    for place, letter in enumerate(first):
        length = metadata.spacing.get(letter, 1.0)
        step = np.eye(len(first))[place] * length
        # The header has them in float32.
        if not np.allclose(metadata.affine.get(letter, step), step, rtol=1e-5, atol=1e-5 * length):
            return {}
    return {} if metadata.georeference else first


def describe_channels(names: Sequence[str], smallest: np.ndarray) -> dict[str, Any]:
    """Return OMERO's attributes of channels: their names, colours, and the range of values on the coarsest level."""
    channels = []
    for place, name in enumerate(names):
        values = smallest[place]
        low, high = float(values.min()), float(values.max())
        window = {"min": low, "max": high, "start": low, "end": high}
        color = COLORS[place % len(COLORS)] if len(names) > 1 else "FFFFFF"
        channels.append({"label": name, "color": color, "active": True, "window": window})
    return {"channels": channels}
