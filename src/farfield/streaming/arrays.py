"""Volumes as they lie on disk or in memory: which axes they have, and how a region of one is read."""

from __future__ import annotations

import contextlib
import mmap
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from farfield._checks import ShapeError

Span = tuple[int, int]  # first index and the one after the last
Region = tuple[Span, ...]  # one span a side

MODES = ("reflect", "replicate", "constant")


class Layout(NamedTuple):
    """Which axes an array has: perhaps a batch, perhaps channels, and its sides.

    Attributes:
        batch: Whether the first axis counts samples.
        channels: Whether the axis before the sides counts channels.
        spatial_dims: Number of spatial dims.
    """

    batch: bool
    channels: bool
    spatial_dims: int

    def without_positions(self, shape: Sequence[int]) -> tuple[int, int]:
        """Samples and channels of an array of this shape."""
        return (shape[0] if self.batch else 1), (shape[self.batch] if self.channels else 1)

    def shape(self, batch: int, channels: int, size: Sequence[int]) -> tuple[int, ...]:
        """The shape of an array with these axes; of more than one channel it has that axis anyway."""
        leading = (batch,) * self.batch + (channels,) * (self.channels or channels > 1)
        return (*leading, *size)

    def axes(self, channels: int, spatial_dims: int) -> str:
        """Letters of the axes of such an array, as TIFF files name them."""
        size = "TZYX"[-spatial_dims:] if spatial_dims <= 4 else "Q" * spatial_dims
        return "I" * self.batch + "C" * (self.channels or channels > 1) + size


def layout_of(caller: str, shape: Sequence[int], spatial_dims: int) -> Layout:
    """Say which axes an array has, its rank known; refuse one that has too few or too many, or an empty one."""
    beyond = len(shape) - spatial_dims
    if beyond not in (0, 1, 2):
        raise ShapeError(
            f"{caller}: a volume of {spatial_dims} sides is (*size), (channels, *size) or (batch, channels, *size), "
            f"got shape {tuple(shape)}; fix: one number of tile a side, or a slice of the volume."
        )
    if 0 in shape:
        raise ShapeError(f"{caller}: the volume has an empty side, shape {tuple(shape)}; fix: leave it out.")
    return Layout(beyond == 2, beyond >= 1, spatial_dims)


class Source:
    """A volume that is read region by region.

    Args:
        array: Anything with `shape` and slicing.
        layout: Its axes.
        device: Where regions go.
        dtype: What they become, if the volume is no mask.
        padding: Positions before and after each side that are made and not read.
        mode: How they are made.
    """

    def __init__(
        self,
        array: Any,
        layout: Layout,
        device: torch.device,
        dtype: torch.dtype,
        *,
        padding: Sequence[Span] | None = None,
        mode: str = "reflect",
    ) -> None:
        self.array, self.layout, self.device, self.dtype, self.mode = array, layout, device, dtype, mode
        self.shape = tuple(int(side) for side in array.shape)
        self.padding = tuple(padding) if padding is not None else ((0, 0),) * layout.spatial_dims
        self.batch, self.channels = layout.without_positions(self.shape)

    @property
    def size(self) -> tuple[int, ...]:
        """Sides with what is padded."""
        own = self.shape[len(self.shape) - self.layout.spatial_dims :]
        return tuple(side + before + after for side, (before, after) in zip(own, self.padding, strict=True))

    def read(self, region: Region) -> Tensor:
        """Read a region as a grid `(batch, channels, *size)`."""
        own = self.shape[len(self.shape) - self.layout.spatial_dims :]
        indices = [
            np.arange(start - before, stop - before)
            for (start, stop), (before, _) in zip(region, self.padding, strict=True)
        ]
        mapped = [inside(index, side, self.mode) for index, side in zip(indices, own, strict=True)]
        slices = [slice(int(index.min()), int(index.max()) + 1) for index in mapped]
        grid = self.to_grid(self.box(slices))
        for axis, (index, wanted, side) in enumerate(zip(mapped, indices, own, strict=True)):
            if (index != wanted).any():
                grid = grid.index_select(axis + 2, torch.from_numpy(index - index.min()).to(grid.device))
                if self.mode == "constant":
                    outside = np.flatnonzero((wanted < 0) | (wanted >= side))
                    grid = grid.index_fill(axis + 2, torch.from_numpy(outside).to(grid.device), 0)
        return grid

    def box(self, slices: Sequence[slice]) -> Any:
        """Copy a box out of the array; what it maps into memory is let go again."""
        leading = (slice(None),) * (len(self.shape) - self.layout.spatial_dims)
        check_mapping(self.array)
        box: Any = self.array[(*leading, *slices)]
        if isinstance(box, Tensor):
            return box
        box = np.asarray(box)
        if box.dtype.kind not in "bfiu":
            raise TypeError(f'a volume must hold numbers, got {box.dtype}; fix: volume.astype("float32").')
        kind = np.bool_ if self.dtype == torch.bool else np.float64 if self.dtype == torch.float64 else np.float32
        box = np.array(box, dtype=kind, order="C")
        release(self.array)
        return box

    def to_grid(self, box: Any) -> Tensor:
        """A box with the axes of a grid, on the device."""
        grid = torch.as_tensor(box)
        grid = grid.reshape(self.batch, self.channels, *grid.shape[grid.dim() - self.layout.spatial_dims :])
        return grid.to(device=self.device, dtype=self.dtype)


def inside(index: np.ndarray, side: int, mode: str) -> np.ndarray:
    """Where the positions of a side are read, those that are padded included."""
    if mode == "reflect" and side > 1:
        index = np.abs(index) % (2 * side - 2)
        return np.minimum(index, 2 * side - 2 - index)
    return index.clip(0, side - 1)


def checksum(grid: Tensor) -> int:
    """A checksum of numbers, by which a change of them is noticed."""
    return zlib.crc32(grid.detach().to("cpu", torch.float32).numpy().tobytes())


def check_mapping(array: Any) -> None:
    """Refuse to read a file mapped into memory that is shorter than when it was mapped: the process would be killed.

    Raises:
        OSError: If it is.
    """
    mapped = mapped_file(array)
    if mapped is not None and mapped._mmap.size() < len(mapped._mmap):
        raise OSError(
            f'the file "{mapped.filename}" had {len(mapped._mmap):,} bytes or more when it was opened, and has '
            f"{mapped._mmap.size():,} now; fix: write it anew, open it and call again."
        )


def mapped_file(array: Any) -> Any:
    """The array by which NumPy mapped a file into memory, of which this is a view or all; None if it is not."""
    while array is not None and not isinstance(getattr(array, "_mmap", None), mmap.mmap):
        array = getattr(array, "base", None) if isinstance(array, np.ndarray) else None
    return array


def release(array: Any) -> None:
    """Let go of the pages of a file mapped into memory, which count as resident until then."""
    array = mapped_file(array)
    # What was written to a private copy of a file would be lost.
    if array is not None and getattr(array, "mode", "c") != "c" and hasattr(mmap, "MADV_DONTNEED"):
        with contextlib.suppress(OSError, ValueError):
            array._mmap.madvise(mmap.MADV_DONTNEED)
