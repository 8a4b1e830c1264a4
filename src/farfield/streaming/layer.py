"""A bare attention over a grid in tiles: one pass summarizes, one responds."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from farfield._checks import ShapeError
from farfield.nn import GridAttention
from farfield.ops.grid import Gathered, Pool
from farfield.ops.slots import Summary
from farfield.streaming.aliasing import refuse_aliasing
from farfield.streaming.arguments import check_volume, positions_a_side
from farfield.streaming.arrays import Layout, Region, Source, layout_of
from farfield.streaming.drafting import SUMMARY_SHARE, free_bytes
from farfield.streaming.driving import Stream, Tiled, progress_of
from farfield.streaming.formats import Wanted
from farfield.streaming.geometry import cores, positions_of, rounded_up
from farfield.streaming.listening import device_of, dtype_of, width
from farfield.streaming.merging import Merged, is_grid, summary_bytes
from farfield.streaming.outputs import box_index, check_path, numpy_dtype, output_for
from farfield.streaming.progress import begun_tile, identity_of

# Bytes of a grid that a tile has by default: a response takes a few times as much.
TILE = 2**24


def respond_whole(
    layer: GridAttention,
    grid: Any,
    *,
    context: Any = None,
    mask: Any = None,
    context_mask: Any = None,
    tile: int | Sequence[int | None] | None = None,
    out: str | Path | Any | None = None,
    quiet: bool = False,
) -> Any:
    """Let every position of a grid attend to all of it, or to a context, in constant memory: `layer(grid)` over tiles.

    The first pass reads tiles and merges their summaries, the second lets each tile respond to the whole. What a position
    hears does not depend on how the grid was cut.

    Args:
        layer: The attention.
        grid: Anything with `shape` and slicing, `(channels, *size)` or `(batch, channels, *size)`; its rank is the
            number of numbers in `tile`, else told by which axis has the layer's channels, the second one first.
        context: Answers, as `layer(grid, context)`; with as many axes before its sides.
        mask: The grid's valid positions, True where valid, an array with the grid's axes without channels.
        context_mask: The context's.
        tile: Positions a side of a tile; None for a side that is not cut; by default slabs of 16 MiB.
        out: A path ending in .npy, .zarr, .tif or .tiff that does not exist yet, an array that takes slices, or None:
            an array in memory. What was begun at a path and killed goes on where it was. An array must be able to hold
            the response, and must hold nothing that is read.
        quiet: Whether to show no progress on the standard error.

    Returns:
        What was written, with the grid's axes.

    Raises:
        ShapeError: If grid, context, masks or output do not fit.
        ValueError: If the layer's norm is in training, or what it reads is not finite; if the summary, which for
            softmax and softmax_pooled is the grid, takes more than half of the free memory; if out is where an input
            is; if what is unfinished at the path is of something else, or its progress is damaged.
        TypeError: If what is read is no array, tile is no whole numbers, or out is of a dtype that would cut the
            response.
        FileExistsError: If the path exists, or is a link; if a folder is in the way that was not made here.
        BlockingIOError: If another process is writing to it.
        PermissionError: If its folder may not be written.
        OSError: If the disk is full, or a file that is read was cut short; finished tiles are kept.

    Cost:
        Two reads of the grid and one write (with a context or of sums that ask, one read more); the MACs of
        `layer(grid)`; a tile and a summary in memory.

    Example:
        >>> import numpy as np, torch
        >>> from farfield.nn import GridAttention
        >>> from farfield.streaming import respond_whole
        >>> layer, grid = GridAttention(8, "factorized_gaussian"), np.random.rand(8, 30, 20, 10).astype("float32")
        >>> with torch.no_grad():
        ...     whole = layer(torch.from_numpy(grid)[None])[0]
        >>> np.allclose(respond_whole(layer, grid, tile=(16, 16, 10), quiet=True), whole, atol=1e-5)
        True
    """
    inputs = {"grid": grid, "context": context, "mask": mask, "mask of the context": context_mask}
    for name, given in inputs.items():
        if given is not None or name == "grid":
            check_volume("respond_whole", name, given)
    if tile is not None:
        tile = positions_a_side("respond_whole", "tile", tile, 1, optional=True)
    refuse_aliasing("respond_whole", out, inputs)
    path = Path(out) if isinstance(out, str | Path) else None
    if path is not None:
        check_path("respond_whole", path, None)
        tile = begun_tile("respond_whole", path, None) if tile is None else tile
    if layer.training and layer.coefficient_norm is not None:
        raise ValueError("respond_whole: batch norm in training needs the whole grid; fix: layer.eval().")
    query_volume = Volume(layer, grid, mask, layout_for(layer, grid, tile), tile, "grid")
    key_volume = query_volume
    if context is not None:
        spatial_dims = len(context.shape) - (len(grid.shape) - query_volume.layout.spatial_dims)
        key_volume = Volume(
            layer, context, context_mask, layout_of("respond_whole", context.shape, spatial_dims), None, "context"
        )
    elif context_mask is not None:
        raise ValueError("respond_whole: context_mask is the mask of a context, and there is none; fix: mask=….")
    channels, dtype = width(layer), dtype_of(layer)
    shape = query_volume.layout.shape(query_volume.source.batch, channels, query_volume.source.size)
    wanted = Wanted(
        shape,
        numpy_dtype(dtype),
        query_volume.layout.axes(channels, query_volume.layout.spatial_dims),
        query_volume.positions,
    )
    output = output_for("respond_whole", out, wanted, grid, None)
    read = [each for each in (grid, context, mask, context_mask) if each is not None]
    identity = partial(identity_of, layer, read, (query_volume.positions, key_volume.positions, str(path)))
    progress = progress_of("respond_whole", output, identity, query_volume.positions, None)
    volumes = {**query_volume.tiled(), **key_volume.tiled()}
    merged = [Merged(layer, "respond_whole")]
    return Response(query_volume, key_volume, Stream("respond_whole", output, progress, merged, volumes)).run(quiet)


def layout_for(layer: GridAttention, grid: Any, tile: object) -> Layout:
    """Which axes a grid has, told by the numbers of tile, else by the axis that has the layer's channels."""
    shape = tuple(grid.shape)
    if isinstance(tile, Sequence):
        return layout_of("respond_whole", shape, len(tile))
    for leading in (2, 1):
        if len(shape) > leading and shape[leading - 1] == layer.channels:
            return layout_of("respond_whole", shape, len(shape) - leading)
    raise ShapeError(
        f"respond_whole: a grid is (channels, *size) or (batch, channels, *size) with the layer's {layer.channels} "
        f"channels, got shape {shape}; fix: another layer, or a view of the grid."
    )


class Volume:
    """A grid that is read in tiles, with its mask.

    Args:
        layer: The attention that reads it.
        array: The grid.
        mask: Its valid positions.
        layout: Its axes.
        tile: As the caller gave it.
        name: For errors.
    """

    def __init__(
        self,
        layer: GridAttention,
        array: Any,
        mask: Any,
        layout: Layout,
        tile: int | Sequence[int | None] | None,
        name: str,
    ) -> None:
        self.layout, self.name = layout, name
        self.source = Source(array, layout, device_of(layer), dtype_of(layer))
        if self.source.channels != layer.channels:
            raise ShapeError(
                f"respond_whole: {name} must have the layer's {layer.channels} channels, got {self.source.channels} in "
                f"shape {tuple(array.shape)} with {layout.spatial_dims} sides; fix: one number of tile a side."
            )
        self.mask: Source | None = None
        if mask is not None:
            expected = (*array.shape[: layout.batch], *self.source.size)
            if tuple(mask.shape) != expected:
                raise ShapeError(
                    f"respond_whole: the mask of {name} must have shape {expected}, got {tuple(mask.shape)}."
                )
            self.mask = Source(mask, Layout(layout.batch, False, layout.spatial_dims), self.source.device, torch.bool)
        self.positions = tile_positions(layer, self.source, tile)
        self.tiles = cores(self.source.size, self.positions)

    def tiled(self) -> dict[str, Tiled]:
        """The grid and its mask, by name."""
        found = {self.name: Tiled(self.source, self.tiles)}
        return found if self.mask is None else {**found, f"mask of the {self.name}": Tiled(self.mask, self.tiles)}


def tile_positions(layer: GridAttention, source: Source, tile: int | Sequence[int | None] | None) -> tuple[int, ...]:
    """Positions a side of a tile: by default slabs of the first side, and where one slice is too much, of the next."""
    pool = layer.operator.keys_from.gather
    windows = (1,) * source.layout.spatial_dims
    if isinstance(pool, Pool):
        windows = (pool.size,) * source.layout.spatial_dims if isinstance(pool.size, int) else pool.size
    if tile is not None:
        wanted = (tile,) * source.layout.spatial_dims if isinstance(tile, int) else tile
        positions = [side if own is None else own for own, side in zip(wanted, source.size, strict=True)]
    else:
        positions = list(source.size)
        room = TILE // (source.batch * source.channels * source.dtype.itemsize)
        for axis in range(len(positions)):
            others = positions_of(tuple((0, side) for side in positions[:axis] + positions[axis + 1 :]))
            positions[axis] = min(positions[axis], max(1, room // others))
    return tuple(
        min(side, rounded_up(own, window)) for own, side, window in zip(positions, source.size, windows, strict=True)
    )


class Response:
    """The passes of a bare attention.

    Args:
        query_volume: The grid.
        key_volume: The context, or the grid again.
        stream: What is read, written and remembered.
    """

    def __init__(self, query_volume: Volume, key_volume: Volume, stream: Stream) -> None:
        self.query_volume, self.key_volume, self.stream = query_volume, key_volume, stream
        self.merged = stream.merged[0]
        self.whole: tuple[Summary, Gathered | None] | None = None

    def run(self, quiet: bool) -> Any:
        """Summarize, gather what asks if sums do, respond."""
        passes = [(self.key_volume.name, self.summarize)]
        if self.query_volume is not self.key_volume and not self.merged.attention.operator.queries_from.side_by_side:
            passes.append((self.query_volume.name, self.ask))
        return self.stream.run([*passes, (self.query_volume.name, self.respond)], quiet)

    def read(self, volume: Volume, index: int, core: Region) -> tuple[Tensor, dict[str, Any]]:
        """Read a tile, and its mask and where it lies as `summarize` and `respond` take them."""
        tile = self.stream.read(volume.name, index, core)
        mask = None if volume.mask is None else self.stream.read(f"mask of the {volume.name}", index, core)[:, 0]
        return tile, {"mask": mask, "origin": tuple(start for start, _ in core), "size": volume.source.size}

    def summarize(self, index: int, core: Region) -> None:
        """Add a tile that answers, and asks if it is the grid itself."""
        tile, place = self.read(self.key_volume, index, core)
        self.merged.add(tile, **place)
        if self.query_volume is self.key_volume:
            self.merged.ask(tile, **place)
        if index == 0:
            self.check_size(len(self.key_volume.tiles))

    def ask(self, index: int, core: Region) -> None:
        """Add a tile that asks with sums."""
        tile, place = self.read(self.query_volume, index, core)
        self.merged.ask(tile, **place)

    def respond(self, index: int, core: Region) -> None:
        """Let a tile respond and write it."""
        tile, place = self.read(self.query_volume, index, core)
        self.whole = self.whole or self.merged.whole(tile.device)
        summary, query_sums = self.whole
        found = self.merged.attention.respond(tile, summary, **place, query_sums=query_sums)
        shape = self.query_volume.layout.shape(found.shape[0], found.shape[1], found.shape[2:])
        self.stream.write(box_index(shape, core), found.reshape(shape))

    def check_size(self, tiles: int) -> None:
        """Refuse an attention whose summary is its grid, where that is too large."""
        size, free = summary_bytes(self.merged.parts[0], None) * tiles, free_bytes(self.query_volume.source.device)
        if is_grid(self.merged.attention) and size > SUMMARY_SHARE * free:
            raise ValueError(
                f"respond_whole: the summary of {self.merged.attention.operator_name} is its grid, about "
                f"{size:,} bytes, and {free:,} are free; fix: an operator that compresses, such as factorized_gaussian."
            )
