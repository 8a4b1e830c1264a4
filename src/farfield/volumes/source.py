"""Volumes on disk or in memory: their axes, and reading regions of them."""

from __future__ import annotations

import contextlib
import math
import mmap
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from farfield._checks import ShapeError
from farfield._refusals import refusal
from farfield.volumes.aliasing import places
from farfield.volumes.axes_view import AxesView
from farfield.volumes.chunk_cache import keep_chunks
from farfield.volumes.scaling import Scale, apply_scale

Span = tuple[int, int]  # first index and the index after the last
Region = tuple[Span, ...]  # one span per spatial dim

MODES = ("reflect", "replicate", "constant")
# float32 holds all whole numbers up to this.
WHOLE = 2**24


def size_of(region: Sequence[Span]) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in region)


def overlap(one: Sequence[Span], other: Sequence[Span]) -> Region | None:
    """Return what two regions have in common; None if that is nothing."""
    both = []
    for (start, stop), (first, last) in zip(one, other, strict=True):
        if start >= last or first >= stop:  # most tiles, along the first axis
            return None
        both.append((max(start, first), min(stop, last)))
    return tuple(both)


def index_within(region: Sequence[Span], outer: Sequence[Span]) -> tuple[slice, ...]:
    """Return the index of a region in what begins where another one does."""
    return tuple(slice(start - first, stop - first) for (start, stop), (first, _) in zip(region, outer, strict=True))


class AxisLayout(NamedTuple):
    """The axes of an array: those of samples, which may have letters, of channels, and the spatial axes."""

    batch: int
    channels: bool
    spatial_dims: int
    samples: tuple[tuple[str, int], ...] = ()

    def batch_and_channels(self, shape: Sequence[int]) -> tuple[int, int]:
        """Return the numbers of samples and channels of an array of this shape."""
        return math.prod(shape[: self.batch]), (shape[self.batch] if self.channels else 1)

    def shape(self, batch: int, channels: int, size: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of an array with these axes; several channels get an axis even if `channels` is False."""
        lengths = tuple(length for _, length in self.samples)
        samples = lengths if lengths and math.prod(lengths) == batch else (batch,) * self.batch
        return (*samples, *(channels,) * (self.channels or channels > 1), *size)

    def index_sample(self, sample: int) -> tuple[slice, ...]:
        """Return the index, along the axes of samples, of one of them, which are counted with the last axis fastest."""
        if not self.samples:
            return (slice(sample, sample + 1),) * self.batch
        places = np.unravel_index(sample, [length for _, length in self.samples])
        return tuple(slice(int(place), int(place) + 1) for place in places)

    def axes(self, channels: int, spatial_dims: int) -> str:
        """Return the letters of the axes of an array whose shape `shape` returns, as TIFF files name them."""
        size = "TZYX"[4 - spatial_dims :] if spatial_dims <= 4 else "Q" * spatial_dims
        return "I" * self.batch + "C" * (self.channels or channels > 1) + size


def parse_layout(shape: Sequence[int], spatial_dims: int) -> AxisLayout:
    """Find the axes of an array of a number of spatial dims; refuse fewer axes, three more, and an empty one."""
    leading = len(shape) - spatial_dims
    if leading not in (0, 1, 2):
        raise refusal(
            ShapeError,
            f"a volume with {spatial_dims} spatial dims is (*size), (channels, *size) or "
            f"(batch, channels, *size), got shape {tuple(shape)}; fix: tile with one number per spatial dim, or a "
            f"slice of the volume.",
        )
    if 0 in shape:
        raise refusal(ShapeError, f"the volume has an empty axis, shape {tuple(shape)}; fix: leave that volume out.")
    return AxisLayout(int(leading == 2), leading >= 1, spatial_dims)


class VolumeSource:
    """A volume that is read region by region.

    Args:
        array: Anything with `shape` and slicing.
        layout: Its axes.
        device: Device of the grids that are read.
        dtype: Their dtype; bool for a mask.
        padding: How many positions are padded before and after each spatial axis; None pads none.
        mode: How they are padded, one of `MODES`.
        caller: The function that a warning names.
    """

    def __init__(
        self,
        array: Any,
        layout: AxisLayout,
        device: torch.device,
        dtype: torch.dtype,
        *,
        padding: Sequence[Span] | None = None,
        mode: str = "reflect",
        caller: str = "predict_whole",
    ) -> None:
        self.caller = caller
        self.array, self.layout, self.device, self.dtype, self.mode = keep_chunks(array), layout, device, dtype, mode
        self.shape = tuple(int(length) for length in array.shape)
        self.padding = tuple(padding) if padding is not None else ((0, 0),) * layout.spatial_dims
        self.rounds = False  # whether there was a warning
        self.scale: Scale | None = None
        self.batch, self.channels = layout.batch_and_channels(self.shape)

    @property
    def size(self) -> tuple[int, ...]:
        """The spatial size, padding included."""
        own = self.shape[len(self.shape) - self.layout.spatial_dims :]
        return tuple(length + before + after for length, (before, after) in zip(own, self.padding, strict=True))

    def read(self, region: Region, sample: int | None = None, tile: int | None = None) -> Tensor:
        """Read a region as `load` does, to the device."""
        return self.load(region, sample, tile).to(self.device)

    def load(self, region: Region, sample: int | None = None, tile: int | None = None) -> Tensor:
        """Read a region, indices of the padded volume, of one sample or all: a grid `(batch, channels, *size)`.

        `tile` is the index of the tile that it is read for, which errors name.
        """
        own = self.shape[len(self.shape) - self.layout.spatial_dims :]
        indices = [
            np.arange(start - before, stop - before)
            for (start, stop), (before, _) in zip(region, self.padding, strict=True)
        ]
        mapped = [source_indices(index, length, self.mode) for index, length in zip(indices, own, strict=True)]
        slices = [slice(int(index.min()), int(index.max()) + 1) for index in mapped]
        grid = self.to_grid(self.box(slices, sample, tile))
        for axis, (index, unpadded, length) in enumerate(zip(mapped, indices, own, strict=True)):
            if (index != unpadded).any():
                grid = grid.index_select(axis + 2, torch.from_numpy(index - index.min()).to(grid.device))
                if self.mode == "constant":
                    outside = np.flatnonzero((unpadded < 0) | (unpadded >= length))
                    grid = grid.index_fill(axis + 2, torch.from_numpy(outside).to(grid.device), 0)
        return grid

    def box(self, slices: Sequence[slice], sample: int | None = None, tile: int | None = None) -> Any:
        """Return a box of the array, without padding: a view of a tensor, or else a copy in memory."""
        leading = (slice(None),) * (len(self.shape) - self.layout.spatial_dims)
        if sample is not None and self.layout.batch:
            leading = (*self.layout.index_sample(sample), *leading[self.layout.batch :])
        check_mapping(self.array)
        try:
            box: Any = self.array[(*leading, *slices)]
        # Codecs and libraries of files raise all kinds of errors for damaged chunks.
        except Exception as error:
            what = f"{'a region' if tile is None else f'tile {tile}'}, positions "
            what += " × ".join(f"{each.start}:{each.stop}" for each in slices)
            raise explain_error(error, self.array, self.caller, what) from error
        if isinstance(box, Tensor):
            return box
        box = without_mask(box)
        if box.dtype.kind not in "bfiu":
            raise refusal(
                TypeError,
                f"a volume must hold booleans, integers or floats, got {box.dtype}; fix: an array of "
                f'one of these, such as volume.astype("float32").',
            )
        if box.dtype.kind in "iu" and box.dtype.itemsize > 2 and self.dtype == torch.float32:
            self.warn_of_rounding(box)
        # As the grids: boolean, classes, float64 or float32.
        kinds = {torch.bool: np.bool_, torch.int64: np.int64, torch.float64: np.float64}
        box = np.array(box, dtype=kinds.get(self.dtype, np.float32), order="C")
        release(self.array)
        return box

    def warn_of_rounding(self, box: np.ndarray) -> None:
        """Warn, once, of whole numbers that float32 rounds, if a box has any."""
        if not self.rounds and box.size and (box.max() > WHOLE or box.min() < -WHOLE):
            self.rounds = True
            warnings.warn(
                f"{self.caller}: the volume has whole numbers from {box.min():,} to {box.max():,}, and the network's "
                f"float32 rounds those beyond {WHOLE:,}: labels among them become one; fix: model.double(), or labels "
                "that are numbered anew.",
                stacklevel=2,
            )

    def to_grid(self, box: Any) -> Tensor:
        """Return a box as a grid `(batch, channels, *size)`, where the box is."""
        grid = torch.as_tensor(box)
        grid = grid.reshape(-1, self.channels, *grid.shape[grid.dim() - self.layout.spatial_dims :])
        grid = grid if self.scale is None else apply_scale(grid, self.scale)
        return narrowed(grid, self.dtype)


def explain_error(error: Exception, array: Any, caller: str, what: str) -> Exception:
    """Return the error of a volume of which a part cannot be read, with the file that it is in, if it is in one."""
    file = None
    with contextlib.suppress(Exception):
        file = next((place.file for place in places(array) if place.file is not None), None)
    reason = str(error).removesuffix(".") or type(error).__name__
    if file is None or isinstance(error, MemoryError):
        error.add_note(f"{caller}: this is why {what}, cannot be read.")
        return error
    kind = ValueError if isinstance(error, ValueError) else OSError
    # An error with a fix, such as a library to install, has a better one.
    fix = "" if "; fix: " in reason else "; fix: write or download the file again"
    return refusal(kind, f'cannot read {what}, of "{file}": {reason}{fix}.')


def without_mask(part: Any) -> np.ndarray:
    """Return a part of a volume as an array of NumPy; refuse masked positions, whose numbers are none to use."""
    array = np.asanyarray(part)
    if np.ma.is_masked(array):
        raise refusal(
            ValueError,
            f"{np.ma.count_masked(array):,} of {array.size:,} positions that were read are masked "
            "(numpy.ma), and their numbers would be used as if they were not; fix: numpy.ma.filled(volume[:], number), "
            "with a number that the network takes for positions without a value.",
        )
    return np.asarray(array)


def narrowed(grid: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a grid of the dtype of a network; refuse finite numbers that float16 makes infinite."""
    converted = grid.to(dtype)
    if dtype == torch.float16 and grid.dtype != dtype and (converted.isinf() & grid.isfinite()).any():
        raise refusal(
            ValueError,
            f"the volume has numbers from {grid.min():g} to {grid.max():g}, and the network is of float16, "
            f"which ends at {torch.finfo(dtype).max:g}; fix: model.float(), or model.bfloat16().",
        )
    return converted


def source_indices(index: np.ndarray, length: int, mode: str) -> np.ndarray:
    """Return the indices that are read for `index`, which is below 0 or at least `length` in the padding of an axis."""
    if mode == "reflect" and length > 1:
        index = np.abs(index) % (2 * length - 2)
        return np.minimum(index, 2 * length - 2 - index)
    return index.clip(0, length - 1)


def check_mapping(array: Any) -> None:
    """Refuse a memory-mapped file that has become shorter since it was mapped: reading it would kill the process."""
    mapped = find_memmap(array)
    if mapped is not None and mapped._mmap.size() < len(mapped._mmap):
        raise refusal(
            OSError,
            f'the file "{mapped.filename}" had {len(mapped._mmap):,} bytes or more when it was opened, and '
            f"has {mapped._mmap.size():,} now; fix: write the file again, open it and repeat the call.",
        )


def find_memmap(array: Any) -> Any:
    """Return the NumPy memory map that an array is, or is a view of; None if it is neither."""
    while isinstance(array, AxesView):
        array = array.array
    while array is not None and not isinstance(getattr(array, "_mmap", None), mmap.mmap):
        array = getattr(array, "base", None) if isinstance(array, np.ndarray) else None
    return array


def release(array: Any) -> None:
    """Release the pages of a memory-mapped file, which count as resident memory until then; skip other arrays."""
    array = find_memmap(array)
    # Releasing the pages of a copy-on-write map would lose what was written to them.
    if array is not None and getattr(array, "mode", "c") != "c" and hasattr(mmap, "MADV_DONTNEED"):
        with contextlib.suppress(OSError, ValueError):
            array._mmap.madvise(mmap.MADV_DONTNEED)
