"""Volumes in files, opened with their axes, voxel size and channels; nothing is loaded before it is sliced."""

from __future__ import annotations

import json
import operator
import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from farfield._checks import ShapeError
from farfield.volumes.axes_view import AxesView
from farfield.volumes.image_metadata import SPACE, ImageMetadata, sorted_axes
from farfield.volumes.ome_zarr import read_images
from farfield.volumes.source import AxisLayout
from farfield.volumes.tiff_metadata import read_tiff_metadata
from farfield.volumes.tiff_parts import check_parts, check_planes, describe_series

# How many images warnings list.
SHOWN = 8


class Volume:
    """An array, and what is known of its axes: `predict_whole` carries voxel size, units and channels to its output.

    It has the shape, the dtype and the slices of the array.

    Args:
        array: Anything with `shape`, `dtype` and slicing.
        metadata: Its axes, with a letter for each, and their voxel size.

    Raises:
        ShapeError: If the metadata has another number of axes.

    Example:
        >>> from farfield.volumes import ImageMetadata, Volume
        >>> image = Volume(np.zeros((64, 64), "uint8"), ImageMetadata("YX", {"Y": 0.1, "X": 0.1}))
        >>> image.shape, image.metadata.spacing["X"]
        ((64, 64), 0.1)
    """

    def __init__(self, array: Any, metadata: ImageMetadata) -> None:
        if len(metadata.axes) != len(array.shape):
            raise ShapeError(
                f'Volume: metadata has the axes "{metadata.axes}", and the array the shape {tuple(array.shape)}; '
                "fix: a letter for each axis of the array."
            )
        self.array, self.metadata = array, metadata

    @property
    def shape(self) -> tuple[int, ...]:
        """The array's shape."""
        return tuple(self.array.shape)

    @property
    def dtype(self) -> Any:
        """The array's dtype."""
        return self.array.dtype

    def __getitem__(self, index: Any) -> Any:
        """Return a part of the array."""
        return self.array[index]

    def __len__(self) -> int:
        """Return the length of the first axis."""
        return self.shape[0]


def split_volume(volume: Any) -> tuple[ImageMetadata | None, Any]:
    """Return the metadata of a `Volume` and its array; None and the array for any other."""
    return (volume.metadata, volume.array) if isinstance(volume, Volume) else (None, volume)


def describe_output(
    metadata: ImageMetadata | None,
    layout: AxisLayout,
    channels: int,
    output_channels: int,
    axis_scales: Sequence[tuple[int, Fraction] | None] | None = None,
) -> ImageMetadata:
    """Return the metadata of an output: the axes of the volume, with a voxel size that fits the output's positions."""
    # `axis_scales`: for each spatial axis of the volume the axis of the output that it becomes, counted with batch and
    # channels, and the output's positions per position of the volume; None for one that the output has not.
    if axis_scales is None:
        axis_scales = [(axis + 2, Fraction(1)) for axis in range(layout.spatial_dims)]
    scales = [each for each in axis_scales if each is not None]
    letters = list(layout.axes(output_channels, len(scales)))
    if metadata is None:
        return ImageMetadata("".join(letters))
    space = len(letters) - len(scales)
    ratios = {}
    for letter, each in zip(metadata.axes[-layout.spatial_dims :], axis_scales, strict=True):
        if each is not None and letter in SPACE + "T":
            axis, ratio = each
            letters[space + axis - 2] = letter
            ratios[letter] = float(ratio)
    if layout.batch and metadata.axes[0] == "T":
        letters[0] = "T"
    names = metadata.channels if channels == output_channels else ()
    axes = "".join(letters)
    return replace(metadata.with_axes(axes), channels=names).resampled(ratios)


def open_volume(
    path: str | Path, *, channel: int | Sequence[int] | None = None, level: int = 0, series: int | None = None
) -> Volume:
    """Open an image or a volume for reading, with its voxel size: TIFF, OME-TIFF, zarr, OME-Zarr or NumPy.

    Axes come in the order time, channels, z, y, x, whatever their order in the file. Time and channels of length 1 are
    left out, so that a stack is `(z, y, x)`; a file of several times has an axis of channels in any case.

    Args:
        path: A TIFF file, a folder that is a zarr array or an image of OME-Zarr 0.4 or 0.5, or a .npy file.
        channel: Index of the channel to read, or several, in that order; None for all.
        level: Level of an OME-Zarr pyramid; 0 is the finest.
        series: Index of the image in a file of several, such as a scan and its thumbnail; None takes the first, with a
            warning that lists the others.

    Returns:
        The volume. Its array is mapped into memory where the file allows that, or else read as it is sliced.

    Raises:
        TypeError: If it is no path.
        FileNotFoundError: If there is no such file.
        ValueError: If the file is of another format, or damaged; if planes of it are missing; if it names files outside
            its folder as its parts; if it has no such channel, level or series.

    Example:
        >>> import tempfile, tifffile
        >>> from farfield.volumes import open_volume
        >>> folder = tempfile.TemporaryDirectory()
        >>> path = f"{folder.name}/stack.tif"
        >>> described = {"axes": "ZYX", "spacing": 0.3, "unit": "um"}
        >>> stack = np.zeros((4, 8, 8), "uint8")
        >>> tifffile.imwrite(path, stack, imagej=True, resolution=(10, 10), metadata=described)
        >>> stack = open_volume(path)
        >>> stack.shape, stack.metadata.spacing["Z"], stack.metadata.units["Z"]
        ((4, 8, 8), 0.3, 'micrometer')
        >>> folder.cleanup()
    """
    _check_path(path)
    file = Path(path)
    if not os.path.lexists(file):
        raise FileNotFoundError(f'open_volume: there is no "{file}"; fix: the path of a file, or of a zarr folder.')
    suffix = file.suffix.lower()
    if level and suffix not in (".zarr", ""):
        raise ValueError(f'open_volume: "{file}" has no levels, got level={level}; fix: level=0.')
    if suffix in READERS:
        array, metadata = READERS[suffix](file, series)
    elif file.is_dir():
        array, metadata = open_zarr_volume(file, level, series)
    else:
        *others, last = READERS
        raise ValueError(
            f'open_volume: "{file}" is neither a {", ".join(others)} or {last} file nor a folder of zarr; '
            "fix: open it by its own library: predict_whole takes any array with a shape and slices, and "
            "farfield.volumes.Volume(array, metadata) states its voxel size too."
        )
    return arrange(file, array, metadata, channel)


def _check_path(path: Any) -> None:
    if not isinstance(path, str | os.PathLike):
        fix = "predict_whole takes it as it is" if hasattr(path, "shape") else "a string, or a pathlib.Path"
        raise TypeError(f"open_volume: path must be the path of a file, got {type(path).__name__}; fix: {fix}.")


def choose_series(file: Path, described: Sequence[str], series: int | None) -> int:
    """Return the index of the image to read of a file; the first by default, with a warning if there are others."""
    count = len(described)
    if series is not None and not 0 <= series < count:
        fix = "series=0" if count == 1 else f"0 to {count - 1}"
        raise ValueError(f'open_volume: "{file}" has {count} series, got series={series}; fix: {fix}.')
    if series is None and count > 1:
        others = "".join(f"\n  series {index}  {each}" for index, each in enumerate(described[:SHOWN]))
        warnings.warn(
            f'open_volume: "{file}" has {count} images, of which series 0 is read.{others}{"…" * (count > SHOWN)}\n'
            f"  fix: open_volume(path, series=0) if that is the one, another number for another.",
            stacklevel=4,
        )
    return series or 0


def open_tiff_volume(file: Path, series: int | None) -> tuple[Any, ImageMetadata]:
    """Open a series of a TIFF file: mapped into memory where it lies in one piece, else by tifffile's zarr."""
    import tifffile
    import zarr

    try:
        with tifffile.TiffFile(file) as opened:
            check_parts(opened)
            index = choose_series(file, [describe_series(each) for each in opened.series], series)
            check_planes(opened, index)
            metadata, chosen = read_tiff_metadata(opened, index), opened.series[index]
            shape, in_one_piece = chosen.shape, chosen.dataoffset is not None
        if in_one_piece:
            return tifffile.memmap(file, series=index, mode="r").reshape(shape), metadata
        store = tifffile.imread(file, aszarr=True, series=index, level=0)
        return zarr.open_array(store, mode="r"), metadata
    # tifffile raises all kinds of errors for damaged files.
    except Exception as error:
        if isinstance(error, OSError) or "open_volume: " in str(error):
            raise
        reason = str(error).removesuffix(".") or type(error).__name__
        raise ValueError(f'open_volume: cannot read "{file}": {reason}.') from error


def open_npy_volume(file: Path, series: int | None) -> tuple[Any, ImageMetadata]:
    """Open a NumPy file, of whose axes nothing is known."""
    choose_series(file, [""], series)
    array = np.load(file, mmap_mode="r")
    return array, ImageMetadata("Q" * array.ndim)


# Suffix -> `(file, series) -> array, metadata`, for reading; `file_formats.FORMATS` are those of outputs.
READERS: dict[str, Callable[[Path, int | None], tuple[Any, ImageMetadata]]] = {
    ".tif": open_tiff_volume,
    ".tiff": open_tiff_volume,
    ".npy": open_npy_volume,
}


def open_zarr_volume(file: Path, level: int, series: int | None) -> tuple[Any, ImageMetadata]:
    """Open a zarr array, or a level of an image of OME-Zarr."""
    import zarr

    from farfield.volumes.bounded_zarr import bound_chunks

    try:
        opened = zarr.open(str(file), mode="r")
        images = read_images(opened.attrs) if isinstance(opened, zarr.Group) else []
    # zarr raises all kinds of errors for folders that are none of its own.
    except Exception as error:
        reason = str(error).removesuffix(".") or type(error).__name__
        planes = sorted(each.name for each in file.iterdir() if each.suffix.lower() in (".tif", ".tiff"))
        fix = f'; fix: one file of it, "{file / planes[0]}", or numpy.stack of all of them' if planes else ""
        raise ValueError(f'open_volume: cannot read "{file}" as zarr: {reason}{fix}.') from error
    if isinstance(opened, zarr.Array):
        if level:
            raise ValueError(f'open_volume: "{file}" is one array without levels, got level={level}; fix: level=0.')
        choose_series(file, [""], series)
        bound_chunks(opened)
        return opened, read_array_metadata(opened)
    if not images:
        inside = sorted(name for name, _ in opened.members())
        named = f'one of its parts, "{file / inside[0]}" for example' if inside else "an image"
        raise ValueError(f'open_volume: "{file}" is a group of zarr that is no image; fix: {named}.')
    names = [f'"{name}" of {len(levels)} levels' for name, levels in images]
    _, levels = images[choose_series(file, names, series)]
    if not 0 <= level < len(levels):
        raise ValueError(
            f'open_volume: "{file}" has {len(levels)} levels, got level={level}; fix: 0 to {len(levels) - 1}.'
        )
    array = opened.get(levels[level].path)
    if not isinstance(array, zarr.Array):
        raise ValueError(
            f'open_volume: "{file}" names "{levels[level].path}" as its level {level}, which is no array in it; '
            "fix: write or download it again."
        )
    bound_chunks(array)
    return array, levels[level].metadata


def read_array_metadata(array: Any) -> ImageMetadata:
    """Read the metadata that farfield writes into the attributes of a zarr array; unknown axes for other arrays."""
    unknown = ImageMetadata("Q" * array.ndim)
    try:
        read = ImageMetadata(**json.loads(json.dumps(dict(array.attrs["farfield"]))))
        return replace(read, channels=tuple(read.channels)) if len(read.axes) == array.ndim else unknown
    except (KeyError, TypeError, ValueError):
        return unknown


def arrange(file: Path, array: Any, metadata: ImageMetadata, channel: int | Sequence[int] | None) -> Volume:
    """Return a volume whose axes are in order, with some channels; see `open_volume`."""
    axes = metadata.axes.replace("S", "C") if "C" not in metadata.axes else metadata.axes
    metadata = replace(metadata, axes=axes)
    place = axes.find("C")
    count = array.shape[place] if place >= 0 else 1
    # An index of any type, such as NumPy's, or several.
    given: Any = range(count) if channel is None else channel
    chosen = [operator.index(each) for each in ([given] if np.ndim(given) == 0 else given)]
    if not chosen or any(not 0 <= each < count for each in chosen):
        raise ValueError(
            f'open_volume: "{file}" has {count} channels, got channel={channel}; fix: a number from 0 to {count - 1}.'
        )
    metadata = metadata.with_channels(chosen, count)
    several_times = any(letter == "T" and array.shape[axis] > 1 for axis, letter in enumerate(axes))
    # Times and channels of length 1 are left out; several times keep an axis of channels.
    left_out = [axis for axis, letter in enumerate(axes) if letter == "T" and not several_times]
    left_out += [place] if len(chosen) == 1 and place >= 0 and not several_times else []
    order: list[int | None] = [axis for axis in sorted_axes(axes) if axis not in left_out]
    letters = "".join(axes[axis] for axis in sorted_axes(axes) if axis not in left_out)
    if several_times and "C" not in letters:
        order.insert(letters.index("T") + 1, None)
        letters = letters.replace("T", "TC")
    taken: dict[int, list[int]] = {axis: [0] for axis in left_out}
    if place >= 0 and (place in left_out or chosen != list(range(count))):
        taken[place] = chosen
    if taken or order != list(range(len(array.shape))):
        array = AxesView(array, order, taken)
    return Volume(array, metadata.with_axes(letters))
