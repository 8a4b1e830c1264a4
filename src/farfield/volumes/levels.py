"""The array of an output, and the coarser levels of it in a group of zarr: shapes, chunks, and what writes them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from farfield.volumes import ome_zarr
from farfield.volumes.image_metadata import SPACE, ImageMetadata

Mode = Literal["r", "r+"]

# Most bytes of a chunk of a zarr array, which is one file. Only axes of even length are halved, so a chunk whose axes
# all have odd lengths may be larger.
CHUNK = 2**24
# Most bytes of the planes whose chunks are read for one of them.
PLANES = 2**26


class OutputSpec(NamedTuple):
    shape: tuple[int, ...]
    dtype: np.dtype
    box: tuple[int, ...]  # what a tile writes: one after the other from 0, in whole chunks of zarr
    metadata: ImageMetadata  # its axes and voxel size
    factors: Sequence[tuple[int, ...]] = ()  # of each coarser level: by what each axis is divided from the one before

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def chunk_lengths(spec: OutputSpec) -> list[int]:
    """Return the chunks of a zarr array, which divide what a tile writes: no chunk is written by two tiles."""
    chunks = list(map(min, spec.box, spec.shape))
    while math.prod(chunks) * spec.dtype.itemsize > CHUNK and any(length % 2 == 0 for length in chunks):
        axis = max((length, axis) for axis, length in enumerate(chunks) if length % 2 == 0)[1]
        chunks[axis] //= 2
    return chunks


def level_shapes(spec: OutputSpec) -> list[tuple[int, ...]]:
    """Return the shape of each level of an image, from the finest."""
    shapes = [spec.shape]
    for factors in spec.factors:
        shapes.append(tuple(-(-length // each) for length, each in zip(shapes[-1], factors, strict=True)))
    return shapes


def chunks_of_levels(spec: OutputSpec) -> list[tuple[int, ...]]:
    """Return the chunks of each level of an image: a plane or stack of one channel."""
    single = [length if letter in SPACE else 1 for letter, length in zip(spec.metadata.axes, spec.box, strict=True)]
    chunks = chunk_lengths(spec._replace(box=tuple(single)))
    return [tuple(map(min, chunks, shape)) for shape in level_shapes(spec)]


def grids_of_levels(spec: OutputSpec) -> list[tuple[int, ...]]:
    """Return the number of chunks along each axis, for each level but the finest."""
    pairs = list(zip(level_shapes(spec), chunks_of_levels(spec), strict=True))[1:]
    return [tuple(-(-length // chunk) for length, chunk in zip(*each, strict=True)) for each in pairs]


def make_levels(group: Any, spec: OutputSpec, **options: Any) -> Any:
    """Make the array of each level in a group of zarr, and return the finest."""
    for level, (shape, chunks) in enumerate(zip(level_shapes(spec), chunks_of_levels(spec), strict=True)):
        group.create_array(str(level), shape=shape, chunks=chunks, dtype=spec.dtype, **options)
    return group["0"]


def write_level(path: Path, spec: OutputSpec, level: int, place: int) -> None:
    """Write a chunk of a level, which follows from the level before it."""
    import zarr

    group: Any = zarr.open_group(str(path), mode="r+")
    chunks = chunks_of_levels(spec)[level]
    starts = np.unravel_index(place, grids_of_levels(spec)[level - 1])
    index = tuple(slice(int(at) * chunk, int(at + 1) * chunk) for at, chunk in zip(starts, chunks, strict=True))
    ome_zarr.fill(group[str(level - 1)], group[str(level)], index, spec.factors[level - 1])


# ---- tiles of a file that is written in one go -----------------------------------------------------------------------
def thin_box(spec: OutputSpec) -> tuple[int, ...]:
    """Return the box of a tile with few planes along Z: a file is written plane by plane, and chunks are read whole."""
    box, plane = list(spec.box), spec.nbytes // math.prod(spec.shape[:-2])
    place = spec.metadata.axes.find("Z")
    while place >= 0 and box[place] > 1 and box[place] * plane > PLANES:
        box[place] = 1 if box[place] % 2 else box[place] // 2
    return tuple(box)


def tiles_beside(path: Path) -> Path:
    """Return the group in which the tiles of a file are until all are there."""
    return path.parent / "tiles"


def make_tiles(path: Path, spec: OutputSpec) -> Any:
    """Make an empty file, and the group beside it that has its tiles and levels."""
    import zarr

    path.touch()
    return make_levels(zarr.create_group(str(tiles_beside(path)), overwrite=True), spec)


def open_tiles(path: Path, spec: OutputSpec) -> list[Any]:
    """Open the levels of the tiles beside a file, from the finest, for reading and writing."""
    import zarr

    group: Any = zarr.open_group(str(tiles_beside(path)), mode="r+")
    return [group[str(level)] for level in range(1 + len(spec.factors))]
