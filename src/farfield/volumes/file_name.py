"""A file that is opened, with what is read of it, and the array that reads it by another library."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from farfield._refusals import refusal
from farfield.volumes.axes_view import SlicedArray, as_slice
from farfield.volumes.image_metadata import ImageMetadata

Opened = tuple[Any, ImageMetadata]
# How many images warnings list.
_SHOWN = 8


class FileName(NamedTuple):
    """What is read: a file, a folder or an address; of the datasets or the images in it, which; and at which level."""

    path: Path | str
    dataset: str
    level: int
    series: int | None

    def choose_level(self, count: int) -> int:
        """Return the level; refuse one that the file has not."""
        if count == 1 and self.level:
            raise refusal(ValueError, f'"{self.path}" has no levels, got level={self.level}; fix: level=0.')
        if not 0 <= self.level < count:
            raise refusal(
                ValueError, f'"{self.path}" has {count} levels, got level={self.level}; fix: 0 to {count - 1}.'
            )
        return self.level

    def choose_series(self, described: Sequence[str]) -> int:
        """Return the image to read of several, each of which is described; the first by default, with a warning."""
        count = len(described)
        if self.series is not None and not 0 <= self.series < count:
            fix = "series=0" if count == 1 else f"0 to {count - 1}"
            raise refusal(ValueError, f'"{self.path}" has {count} series, got series={self.series}; fix: {fix}.')
        if self.series is None and count > 1:
            others = "".join(f"\n  series {index}  {each}" for index, each in enumerate(described[:_SHOWN]))
            warnings.warn(
                f'open_volume: "{self.path}" has {count} images, of which series 0 is read.{others}'
                f"{'…' * (count > _SHOWN)}\n"
                f"  fix: open_volume(path, series=0) if that is the one, another number for another.",
                stacklevel=6,
            )
        return self.series or 0

    def error(self, problem: str) -> ValueError:
        """Return the error of a file that cannot be read."""
        return refusal(ValueError, f'cannot read "{self.path}": {problem.removesuffix(".")}.')


class FileArray(SlicedArray):
    """An array in files, of which `read_part` returns the part of a slice an axis; `chunks` are decoded at once."""

    def __init__(
        self,
        files: Sequence[Path],
        shape: Sequence[int],
        dtype: Any,
        read_part: Callable[[tuple[slice, ...]], Any],
        chunks: tuple[int, ...] | None = None,
    ) -> None:
        self.files, self.shape, self.dtype = files, tuple(map(int, shape)), np.dtype(dtype)
        self.read_part, self.chunks = read_part, chunks

    def read(self, wanted: Sequence[range]) -> np.ndarray:
        part = np.asarray(self.read_part(tuple(map(as_slice, wanted))))
        if part.shape != tuple(map(len, wanted)):
            raise ValueError(f"only {part.shape} of {tuple(map(len, wanted))} positions were read")
        return part


def unknown_axes(array: Any) -> ImageMetadata:
    """Return metadata that has a letter for each axis of an array and nothing else."""
    return ImageMetadata("Q" * len(array.shape))
