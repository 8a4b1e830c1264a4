"""Volumes in files, opened with their axes, voxel size and channels; nothing is loaded before it is sliced."""

from __future__ import annotations

import itertools
import math
import operator
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from farfield._checks import ShapeError
from farfield._refusals import door, refusal
from farfield.volumes.axes_view import AxesView, basic_index, crop_array
from farfield.volumes.image_metadata import ORDER, SPACE, ImageMetadata, sorted_axes
from farfield.volumes.labelled_arrays import read_labels
from farfield.volumes.place import Place
from farfield.volumes.readers import open_file
from farfield.volumes.source import AxisLayout


class Volume:
    """An array, and what is known of its axes: `predict_whole` carries voxel size, units and channels to its output.

    It has the shape, the dtype and the slices of the array; `numpy.asarray` reads all of it. One that `open_volume`
    opened pickles as its path, and is opened again.

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
        if not isinstance(metadata, ImageMetadata) or not hasattr(array, "shape"):
            got = f"{type(array).__name__} and {metadata!r:.60}"
            fix = 'Volume(array, ImageMetadata("YX")), and open_volume(path) of a file'
            raise TypeError(f"Volume: it takes an array and its ImageMetadata, got {got}; fix: {fix}.")
        if len(metadata.axes) != len(array.shape):
            raise ShapeError(
                f'Volume: metadata has the axes "{metadata.axes}", and the array the shape {tuple(array.shape)}; '
                "fix: a letter for each axis of the array."
            )
        self.array, self.metadata = array, metadata
        # How `open_volume` was called, and what was taken of it since; None for other arrays.
        self._opened: tuple[Any, ...] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The array's shape."""
        return tuple(self.array.shape)

    @property
    def dtype(self) -> Any:
        """The array's dtype."""
        return self.array.dtype

    @property
    def ndim(self) -> int:
        """Number of axes of the array; with `size`, what layers of napari ask for."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of positions of the array, over all axes."""
        return math.prod(self.shape)

    def __getitem__(self, index: Any) -> Any:
        """Return a part of the array."""
        return self.array[index]

    @door("Volume.crop")
    def crop(self, region: Any) -> Volume:
        """Return a part, of which nothing is read yet, with its own voxel size and origin, and names of channels.

        Args:
            region: Letter of an axis -> its first index and the one after its last, or a slice; or integers and slices
                of all axes, as in `numpy.s_[2:4, :, 0]`.

        Raises:
            ValueError: If there is no such axis, or it does not have these positions.
            IndexError: If an index is none of these, or outside.

        Example:
            >>> stack = Volume(np.zeros((9, 64, 64), "uint8"), ImageMetadata("ZYX", {"Z": 0.3}))
            >>> part = stack.crop({"Z": (2, 4), "X": slice(None, 32)})
            >>> part.shape, part.metadata.origin
            ((2, 64, 32), {'Z': 0.6})
        """
        index = self._parse_region(region) if isinstance(region, Mapping) else region
        pairs = list(zip(self.metadata.axes, basic_index(index, self.shape), strict=True))
        letters = "".join(letter for letter, each in pairs if not isinstance(each, int))
        # An axis that is left out still tells where the others lie in the world; of one of several it is not known.
        parts = {
            letter: range(each, each + 1) if isinstance(each, int) else each
            for letter, each in pairs
            if self.metadata.axes.count(letter) == 1
        }
        part = Volume(crop_array(self.array, index), self.metadata.cropped(parts).with_axes(letters))
        part._opened = self._opened and (*self._opened, index)
        return part

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        """Read all of it, as an array of NumPy."""
        if isinstance(self.array, Tensor):
            whole = self.array.detach().cpu().numpy()
        else:
            whole = np.asanyarray(self.array[(slice(None),) * len(self.shape)])
        return np.array(whole, dtype, copy=copy, subok=True)

    def __reduce__(self) -> Any:
        """Pickle what `open_volume` opened as the call that opens it again, and any other as its array."""
        return (_open_again, self._opened) if self._opened else (Volume, (self.array, self.metadata))

    def _parse_region(self, region: Mapping[str, slice | Sequence[int]]) -> tuple[slice, ...]:
        """Return the index of a region that is given by letters."""
        axes, index = self.metadata.axes, [slice(None)] * len(self.shape)
        for letter, given in region.items():
            named = letter.upper() if isinstance(letter, str) and len(letter) == 1 else None
            if named is None or axes.count(named) != 1:
                raise refusal(
                    ValueError,
                    f'the axes are "{axes}", got a region along {letter!r}; fix: a letter that is once among them.',
                )
            place = axes.index(named)
            part, length = _parse_part(letter, given), self.shape[place]
            bounds = [each for each in (part.start, part.stop) if each is not None]
            if not range(length)[part] or any(not -length <= each <= length for each in bounds):
                raise refusal(
                    ValueError,
                    f"there are {length} positions along {letter}, got the region {given}; fix: from 0 to {length}.",
                )
            index[place] = part
        return tuple(index)

    def __len__(self) -> int:
        """Return the length of the first axis."""
        return self.shape[0]


def _parse_part(letter: str, given: Any) -> slice:
    """Return the part of an axis, a slice or two indices, as a slice of integers."""
    try:
        start, stop, step = (given.start, given.stop, given.step) if isinstance(given, slice) else (*given, None)
        limits = [None if each is None else operator.index(each) for each in (start, stop, step)]
        if limits[2] == 0:
            raise ValueError
    except (TypeError, ValueError):
        raise refusal(
            ValueError,
            f"the region along {letter} must be its first index and the one after its last, or a slice, got "
            f'{given!r:.60}; fix: {{"{letter}": (0, 4)}}, for example.',
        ) from None
    return slice(*limits)


def is_reopened(volume: Volume) -> bool:
    """Whether a volume pickles as the call that opened it."""
    return volume._opened is not None


def is_pyramid(volume: Any) -> bool:
    """Whether a volume is a list of arrays of which each has fewer positions than the one before it."""
    if not isinstance(volume, list) or len(volume) < 2 or not all(hasattr(each, "shape") for each in volume):
        return False
    shapes = [tuple(each.shape) for each in volume]
    decreases = all(math.prod(one) > math.prod(other) for one, other in itertools.pairwise(shapes))
    return decreases and len(set(map(len, shapes))) == 1


def split_volume(volume: Any) -> tuple[ImageMetadata | None, Any]:
    """Return the metadata of a `Volume`, or of an array of xarray or MONAI, and its array; else None and the array.

    Of a list of levels, as viewers take them, those of the first, which is the finest.
    """
    volume = volume[0] if is_pyramid(volume) else volume
    if isinstance(volume, Volume):
        return volume.metadata, volume.array
    array, metadata = read_labels(volume)
    return metadata, array


def describe_output(
    metadata: ImageMetadata | None,
    layout: AxisLayout,
    channels: int,
    output_channels: int,
    axis_places: Sequence[tuple[int, Place] | None] | None = None,
    spatial_dims: int | None = None,
) -> ImageMetadata:
    """Return the metadata of an output: the axes of the volume, and where the output's positions stand along them."""
    # `axis_places`: for each spatial axis of the volume the axis of the output that it becomes, counted with batch and
    # channels, and the place of its positions; None for one that the output has not, whose spatial dims are given.
    if axis_places is None:
        axis_places = [(axis + 2, Place()) for axis in range(layout.spatial_dims)]
    count = layout.spatial_dims if spatial_dims is None else spatial_dims
    letters = list(layout.axes(output_channels, count))
    if metadata is None:
        return ImageMetadata("".join(letters))
    space = len(letters) - count
    along = {each[0] for each in axis_places if each is not None}
    letters[space:] = [each if place + 2 in along else "Q" for place, each in enumerate(letters[space:])]
    places = {}
    for letter, each in zip(metadata.axes[-layout.spatial_dims :], axis_places, strict=True):
        if each is not None and letter in SPACE + "T":
            axis, places[letter] = each
            letters[space + axis - 2] = letter
    for place in range(layout.batch):
        letters[place] = metadata.axes[place] if metadata.axes[place] in "TZ" else letters[place]
    names = metadata.channels if channels == output_channels else ()
    axes = "".join(letters)
    return replace(metadata.with_axes(axes), channels=names, nodata=None).placed(places)


@door("open_volume")
def open_volume(
    path: str | Path,
    *,
    channel: int | Sequence[int] | None = None,
    level: int = 0,
    series: int | None = None,
    axes: str | None = None,
    region: Mapping[str, slice | Sequence[int]] | None = None,
) -> Volume:
    """Open an image or a volume for reading, with its voxel size; nothing of it is loaded before it is sliced.

    Axes come in the order time, channels, z, y, x, whatever their order in the file. Time and channels of length 1 are
    left out, so that a stack is `(z, y, x)`; a file of several times has an axis of channels in any case. Samples of a
    colour image are its channels. A plain array of zarr or HDF5 has the axes that its dimensions or attributes name
    (`dimension_names`, `_ARRAY_DIMENSIONS`, `axis_names`), and the voxel size of `voxel_size` or `resolution`, with
    `offset` and `units`.

    Args:
        path: A TIFF file or one of its relatives (.svs, .btf, .lsm, .ndpi, .qptiff); a folder, a .zip file or an
            address of a folder, such as `https://…`, that is a zarr array or an image of OME-Zarr 0.1 to 0.5; a folder
            of planes, by the numbers in their names; a .npy, NIfTI or MRC file; an HDF5 file, `"file.h5::dataset"` of
            several.
        channel: Index of the channel to read, or several, in that order; None for all.
        level: Level of a pyramid; 0 is the finest.
        series: Index of the image in a file of several, such as a scan and its thumbnail; None takes the first, with a
            warning that lists the others.
        axes: A letter for each axis of the array in the file, in its order, where the file names none or wrong ones.
        region: The part that is opened: letter of an axis -> its first index and the one after its last, or a slice.

    Returns:
        The volume. Its array is mapped into memory where the file allows that, or else read as it is sliced. Its origin
        is that of the region, in the middle of the first position; its voxel size is that of the level.

    Raises:
        TypeError: If it is no path.
        FileNotFoundError: If there is no such file.
        ImportError: If the format needs a library of another extra; the text has the line to install it.
        ValueError: If the file is of another format, or damaged; if planes of it are missing; if it names files outside
            its folder as its parts; if it has no such channel, level, series, axes or region.

    Cost:
        Reads the headers of the file, or of each file in a folder of planes.

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
        >>> part = open_volume(path, region={"Z": (2, 4)})
        >>> part.shape, part.metadata.origin["Z"]
        ((2, 8, 8), 0.6)
        >>> folder.cleanup()
    """
    _check_options(axes, channel=channel, level=level, series=series)
    array, metadata = open_file(path, level, series)
    if axes is not None:
        letters = axes.upper()
        is_strange = any(each not in ORDER + "S" or (letters.count(each) > 1 and each != "Q") for each in letters)
        if is_strange or len(letters) != len(array.shape):
            raise refusal(
                ValueError,
                f'"{path}" has the shape {tuple(array.shape)}, got axes="{axes}"; fix: a letter for each '
                "of its axes, in their order: T, C, Z, Y, X, and Q for others.",
            )
        metadata = replace(metadata, axes=letters).with_axes(letters)
    volume = arrange(path, array, metadata, channel)
    # The series that was chosen, so that the warning about others comes once.
    options = {"channel": channel, "level": level, "series": series or 0, "axes": axes}
    given = os.fspath(path)
    volume._opened = ({"path": given if "://" in given else os.path.abspath(given), **options},)
    return volume if region is None else volume.crop(region)


def _check_options(axes: Any, **numbers: Any) -> None:
    """Refuse numbers that are none, and letters that are no text."""
    for name, given in numbers.items():
        several = given if name == "channel" and np.ndim(given) else [0 if given is None else given]
        if not all(hasattr(each, "__index__") for each in several):
            raise refusal(TypeError, f"{name} must be a whole number, got {given!r:.60}; fix: {name}=0, for example.")
    if axes is not None and not isinstance(axes, str):
        raise refusal(TypeError, f'axes must be a text of letters, got {axes!r:.60}; fix: axes="YX", for example.')


def _open_again(options: dict[str, Any], *indices: Any) -> Volume:
    """Open a volume that was pickled, and take the same part."""
    volume = open_volume(**options)
    for index in indices:
        volume = volume.crop(index)
    return volume


def arrange(file: str | Path, array: Any, metadata: ImageMetadata, channel: int | Sequence[int] | None) -> Volume:
    """Return a volume whose axes are in order, with some channels; see `open_volume`."""
    array, metadata, channel = take_samples(f'"{file}"', array, metadata, channel)
    axes = metadata.axes
    place = axes.find("C")
    count = array.shape[place] if place >= 0 else 1
    # An index of any type, such as NumPy's, or several.
    given: Any = range(count) if channel is None else channel
    chosen = [operator.index(each) for each in ([given] if np.ndim(given) == 0 else given)]
    if not chosen or any(not 0 <= each < count for each in chosen):
        raise refusal(
            ValueError, f'"{file}" has {count} channels, got channel={channel}; fix: a number from 0 to {count - 1}.'
        )
    metadata = metadata.with_channels(chosen, count)
    several_times = any(letter == "T" and array.shape[axis] > 1 for axis, letter in enumerate(axes))
    # Times and channels of length 1 are left out; several times keep an axis of channels.
    left_out = [axis for axis, letter in enumerate(axes) if letter == "T" and not several_times]
    left_out += [place] if len(chosen) == 1 and place >= 0 and not several_times else []
    order: list[int | None] = [axis for axis in sorted_axes(axes) if axis not in left_out]
    letters = "".join(axes[axis] for axis in sorted_axes(axes) if axis not in left_out)
    if several_times and not set(letters) & set("CQ"):
        order.insert(letters.index("T") + 1, None)
        letters = letters.replace("T", "TC")
    taken: dict[int, list[int]] = {axis: [0] for axis in left_out}
    if place >= 0 and (place in left_out or chosen != list(range(count))):
        taken[place] = chosen
    if taken or order != list(range(len(array.shape))):
        array = AxesView(array, order, taken)
    return Volume(array, metadata.with_axes(letters))


def take_channels(path: Path, volume: Volume, channel: int | Sequence[int]) -> Volume:
    """Return some channels of a volume that `open_volume` opened at a path with all of them, as it does itself."""
    part = arrange(path, volume.array, volume.metadata, channel)
    part._opened = volume._opened and ({**volume._opened[0], "channel": channel},)
    return part


def take_samples(name: str, array: Any, metadata: ImageMetadata, channel: Any = None) -> tuple[Any, ImageMetadata, Any]:
    """Return an array whose samples of colour are its channels, its metadata, and the channels that are still to take.

    A file of several channels of several samples has one axis too many: an index of a channel takes its samples.
    """
    axes = metadata.axes
    if "S" not in axes or "C" not in axes:
        return array, replace(metadata, axes=axes.replace("S", "C")), channel
    samples, channels = (array.shape[axes.index(letter)] for letter in "SC")
    taken = 0
    if samples > 1 and channels > 1:
        if channel is None or np.ndim(channel) or not 0 <= operator.index(channel) < channels:
            raise refusal(
                ValueError,
                f"{name} has {channels} channels of {samples} samples each, and a volume has one axis for both; fix: "
                f"one of the channels, channel=0 of open_volume for example.",
            )
        taken, channel = operator.index(channel), None
    left_out = axes.index("S" if samples == 1 else "C")
    letters = (axes[:left_out] + axes[left_out + 1 :]).replace("S", "C")
    return crop_array(array, (*[slice(None)] * left_out, taken)), metadata.with_axes(letters), channel
