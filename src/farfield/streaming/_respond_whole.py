"""One attention layer over a grid in tiles: one pass summarizes, the last responds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from farfield._checks import ShapeError, shape_error
from farfield._fingerprint import fingerprint
from farfield.nn import GridAttention
from farfield.nn.devices import device_of, dtype_of, free_bytes
from farfield.ops.grid import Gathered, Pool
from farfield.ops.slots import Summary
from farfield.streaming.arguments import parse_positions
from farfield.streaming.geometry import cores, count_positions, round_up
from farfield.streaming.resume import compute_identity, saved_plan
from farfield.streaming.runner import Stream, TiledVolume, make_progress
from farfield.streaming.summaries import SUMMARY_SHARE, MergedSummary, has_grid_summary, summary_bytes
from farfield.volumes.aliasing import refuse_aliasing
from farfield.volumes.checks import check_volume
from farfield.volumes.file_formats import OutputSpec
from farfield.volumes.sink import box_index, check_path, numpy_dtype, output_for
from farfield.volumes.source import AxisLayout, Region, VolumeSource, parse_layout
from farfield.volumes.volume import describe_output, split_volume

# Bytes of a tile by default; computing its response takes a few times as much memory.
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
    """Compute `layer(grid)` in tiles, so that memory is constant; positions attend to the whole grid or to a context.

    The first pass over the tiles merges their summaries, the second lets each tile respond to the merged summary. The
    result does not depend on how the grid is cut.

    Args:
        layer: The attention.
        grid: Anything with `shape` and slicing, `(channels, *size)` or `(batch, channels, *size)`. If `tile` is a
            sequence, its length is the number of spatial dims; otherwise channels are the second axis if that has as
            many as the layer, or else the first.
        context: Where keys and values come from, as in `layer(grid, context)`; with batch and channels as `grid`.
        mask: True at the valid positions of the grid; its shape is that of the grid without channels.
        context_mask: The same for the context.
        tile: Size of the grid's tiles: one number, or one per spatial dim, None for those that are not cut; rounded up
            to multiples of the windows of pooled keys; by default slabs of 16 MiB, as always for a context.
        out: A path ending in .npy, .zarr, .tif or .tiff that does not exist yet, an array that takes slices, or None:
            an array in memory. A call with a path that was killed resumes when it is repeated. An array must have the
            response's shape and a dtype that can hold it, and must not share memory or a file with an input.
        quiet: Whether to show no progress on standard error.

    Returns:
        The response, with the grid's axes. Without `out` a tensor on the grid's device if the grid is a tensor, else an
        array of NumPy; otherwise the user's array, or the file at the path, opened for reading.

    Raises:
        ShapeError: If the shapes of grid, context, masks, tile and output do not fit.
        ValueError: If the layer's norm is in training mode, or an input is not finite; if the summary, which for
            softmax and softmax_pooled is the grid, takes more than half of the free memory; if there is a
            `context_mask` and no context; if an input changes meanwhile; if out shares memory or a file with an input,
            or is a path with another suffix; if the unfinished file at the path belongs to another call, or its
            progress is damaged.
        TypeError: If the layer is no `GridAttention`, an input no array of booleans, integers or floats, a mask of
            floats, or tile has numbers that are no integers, or
            out has a dtype to which the response cannot be cast.
        FileNotFoundError: If the folder of the path does not exist.
        FileExistsError: If the path exists, or is a link; if the folder for the unfinished file was not made by
            farfield.
        BlockingIOError: If another process is writing to the path.
        PermissionError: If the folder of the path is not writable.
        OSError: If the disk is full, or an input file became shorter; finished tiles are kept.

    Cost:
        Two reads of the grid and one write; with a context one read of each, and one more of the grid if queries come
        from sums; the MACs of `layer(grid)`, or `layer(grid, context)`; the memory of a tile and a summary.

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
    known, grid = split_volume(grid)
    inputs = {"grid": grid, "context": context, "mask": mask, "context_mask": context_mask}
    if not isinstance(layer, GridAttention):
        raise TypeError(
            f"respond_whole: layer must be a GridAttention, got {type(layer).__name__}; "
            f"fix: predict_whole(model, volume) for a whole network."
        )
    given = {name: volume for name, volume in inputs.items() if volume is not None or name == "grid"}
    for name, volume in given.items():
        check_volume("respond_whole", name, volume)
    if tile is not None:
        tile = parse_positions("respond_whole", "tile", tile, 1, optional=True)
    refuse_aliasing("respond_whole", out, inputs)
    path, known_layer = Path(out) if isinstance(out, str | Path) else None, ""
    if path is not None:
        check_path("respond_whole", path, None)
        known_layer = fingerprint(layer)
        saved = saved_plan("respond_whole", path, None, known_layer, given)
        tile = saved.tile if tile is None and saved is not None else tile
    if layer.training and layer.coefficient_norm is not None:
        raise ValueError("respond_whole: batch norm in training needs the whole grid; fix: layer.eval().")
    query_volume = MaskedGrid(layer, grid, mask, infer_layout(layer, grid, tile), tile, "grid")
    key_volume = query_volume
    if context is not None:
        spatial_dims = len(context.shape) - (len(grid.shape) - query_volume.layout.spatial_dims)
        key_volume = MaskedGrid(
            layer, context, context_mask, parse_layout("respond_whole", context.shape, spatial_dims), None, "context"
        )
        if key_volume.source.batch != query_volume.source.batch:
            raise shape_error(
                "respond_whole",
                "grid and context must have the same batch.",
                "repeat the smaller one.",
                grid=grid,
                context=context,
            )
    elif context_mask is not None:
        raise ValueError(
            "respond_whole: got context_mask but no context; fix: give the context too, or, for the mask of the grid, "
            "mask= instead of context_mask=."
        )
    channels, dtype = layer.value_channels if layer.output is None else layer.channels, dtype_of(layer)
    shape = query_volume.layout.shape(query_volume.source.batch, channels, query_volume.source.size)
    metadata = describe_output(known, query_volume.layout, query_volume.source.channels, channels)
    spec = OutputSpec(shape, numpy_dtype(dtype), query_volume.positions, metadata)
    output = output_for("respond_whole", out, spec, grid, None)
    identity = compute_identity(known_layer, given, (query_volume.positions, key_volume.positions, str(path)))
    progress = make_progress("respond_whole", output, identity, query_volume.positions, None)
    volumes = {**query_volume.tiled_volumes(), **key_volume.tiled_volumes()}
    merged = MergedSummary(layer, "respond_whole")
    stream = Stream("respond_whole", output, progress, [merged], volumes)
    return Response(query_volume, key_volume, stream, merged).run(quiet)


def infer_layout(layer: GridAttention, grid: Any, tile: object) -> AxisLayout:
    """Find the axes of a grid from the length of `tile`, or else from the axis that has the layer's channels.

    Raises:
        ShapeError: If there is no such axis, or the grid's number of axes does not fit `tile`.
    """
    shape = tuple(grid.shape)
    if isinstance(tile, Sequence):
        return parse_layout("respond_whole", shape, len(tile))
    for leading in (2, 1):
        if len(shape) > leading and shape[leading - 1] == layer.channels:
            return parse_layout("respond_whole", shape, len(shape) - leading)
    raise ShapeError(
        f"respond_whole: a grid is (channels, *size) or (batch, channels, *size) with the layer's {layer.channels} "
        f"channels, got shape {shape}; fix: a layer of the grid's channels, or channels in that place, e.g. by "
        f"numpy.moveaxis(grid, -1, 0)."
    )


class MaskedGrid:
    """A grid that is read in tiles, with its mask.

    Args:
        layer: The attention.
        array: The grid.
        mask: Array that is True at its valid positions, or None.
        layout: Its axes.
        tile: The argument of `respond_whole`; None for slabs.
        name: "grid" or "context"; errors name it.

    Raises:
        ShapeError: If the grid's channels or the mask's shape do not fit.
    """

    def __init__(
        self,
        layer: GridAttention,
        array: Any,
        mask: Any,
        layout: AxisLayout,
        tile: int | Sequence[int | None] | None,
        name: str,
    ) -> None:
        self.layout, self.name = layout, name
        self.source = VolumeSource(array, layout, device_of(layer), dtype_of(layer), caller="respond_whole")
        if self.source.channels != layer.channels:
            raise ShapeError(
                f"respond_whole: {name} must have the layer's {layer.channels} channels, got {self.source.channels} in "
                f"shape {tuple(array.shape)} with {layout.spatial_dims} spatial dims; fix: tile with one number per "
                f"spatial dim of the grid, or a {name} of {layer.channels} channels."
            )
        self.mask: VolumeSource | None = None
        if mask is not None:
            dtype = str(getattr(mask, "dtype", ""))
            if "float" in dtype:
                raise TypeError(
                    f"respond_whole: the mask of {name} must be boolean, True where a position is valid, got {dtype}; "
                    f"fix: mask > 0, or mask == 0 if it is additive, 0 and -inf."
                )
            expected = (*array.shape[: layout.batch], *self.source.size)
            if tuple(mask.shape) != expected:
                raise ShapeError(
                    f"respond_whole: the mask of {name} must have shape {expected}, got {tuple(mask.shape)}; "
                    f"fix: one value per position, without channels."
                )
            mask_layout = AxisLayout(layout.batch, False, layout.spatial_dims)
            self.mask = VolumeSource(mask, mask_layout, self.source.device, torch.bool, caller="respond_whole")
        self.positions = tile_positions(layer, self.source, tile)
        self.tiles = cores(self.source.size, self.positions)

    def tiled_volumes(self) -> dict[str, TiledVolume]:
        """Return the grid and its mask, by name."""
        volumes = {self.name: TiledVolume(self.source, self.tiles)}
        if self.mask is not None:
            volumes[f"mask of the {self.name}"] = TiledVolume(self.mask, self.tiles)
        return volumes


def tile_positions(
    layer: GridAttention, source: VolumeSource, tile: int | Sequence[int | None] | None
) -> tuple[int, ...]:
    """Return the size of the tiles, rounded up to the windows of pooled keys.

    By default tiles are slabs of the first axis; if a slab of one index is larger than TILE, the next axis is cut too.
    """
    pool = layer.operator.keys_from.gather
    spatial_dims = source.layout.spatial_dims
    windows = pool.windows(spatial_dims) if isinstance(pool, Pool) else (1,) * spatial_dims
    if tile is not None:
        requested = (tile,) * source.layout.spatial_dims if isinstance(tile, int) else tile
        positions = [length if own is None else own for own, length in zip(requested, source.size, strict=True)]
    else:
        positions = list(source.size)
        room = TILE // (source.batch * source.channels * source.dtype.itemsize)
        for axis in range(len(positions)):
            others = count_positions(tuple((0, length) for length in positions[:axis] + positions[axis + 1 :]))
            positions[axis] = min(positions[axis], max(1, room // others))
    return tuple(
        min(length, round_up(own, window)) for own, length, window in zip(positions, source.size, windows, strict=True)
    )


class Response:
    """Computes the response of one attention layer to a grid in tiles, in two or three passes; `run` starts them.

    Args:
        query_volume: The grid that queries come from.
        key_volume: The grid that keys and values come from: the context, or `query_volume` if there is none.
        stream: Reads the inputs, writes the output, and saves the progress.
        merged: The summary of the layer, which is the stream's only one.
    """

    def __init__(self, query_volume: MaskedGrid, key_volume: MaskedGrid, stream: Stream, merged: MergedSummary) -> None:
        self.query_volume, self.key_volume, self.stream, self.merged = query_volume, key_volume, stream, merged
        self.whole: tuple[Summary, Gathered | None] | None = None

    def run(self, quiet: bool) -> Any:
        """Run the passes: summarize, add the query sums of a grid with a context if queries come from sums, respond."""
        passes = [(self.key_volume.name, self.summarize)]
        if self.query_volume is not self.key_volume and not self.merged.attention.operator.queries_from.side_by_side:
            passes.append((self.query_volume.name, self.add_query_sums))
        return self.stream.run([*passes, (self.query_volume.name, self.respond)], quiet)

    def read(self, volume: MaskedGrid, index: int, core: Region) -> tuple[Tensor, dict[str, Any]]:
        """Read a tile; return it with its mask, origin and size as `summarize` and `respond` take them."""
        tile = self.stream.read(volume.name, index, core)
        mask = None if volume.mask is None else self.stream.read(f"mask of the {volume.name}", index, core)[:, 0]
        return tile, {"mask": mask, "origin": tuple(start for start, _ in core), "size": volume.source.size}

    def summarize(self, index: int, core: Region) -> None:
        """Add a tile's keys and values, and its query sums if there is no context."""
        tile, place = self.read(self.key_volume, index, core)
        self.merged.add(tile, **place)
        if self.query_volume is self.key_volume:
            self.merged.add_query_sums(tile, **place)
        if index == 0:
            self.check_size(len(self.key_volume.tiles))

    def add_query_sums(self, index: int, core: Region) -> None:
        """Add a tile's query sums."""
        tile, place = self.read(self.query_volume, index, core)
        self.merged.add_query_sums(tile, **place)

    def respond(self, index: int, core: Region) -> None:
        """Compute and write the response of a tile."""
        tile, place = self.read(self.query_volume, index, core)
        self.whole = self.whole or self.merged.whole(tile.device)
        summary, query_sums = self.whole
        response = self.merged.attention.respond(tile, summary, **place, query_sums=query_sums)
        shape = self.query_volume.layout.shape(response.shape[0], response.shape[1], response.shape[2:])
        self.stream.write(box_index(shape, core), response.reshape(shape))

    def check_size(self, tiles: int) -> None:
        """Refuse an attention whose summary has a slot for each key, if that takes too much of the free memory.

        Args:
            tiles: The number of tiles of the keys, by which the summary of the first is multiplied.

        Raises:
            ValueError: If the summary takes more than SUMMARY_SHARE of it.
        """
        size, free = summary_bytes(self.merged.parts[0], None) * tiles, free_bytes(self.query_volume.source.device)
        if has_grid_summary(self.merged.attention) and size > SUMMARY_SHARE * free:
            raise ValueError(
                f"respond_whole: the summary of {self.merged.attention.operator_name} is its grid, about "
                f"{size:,} bytes, and may take half of the {free:,} bytes that are free; fix: an operator that "
                f"compresses, such as factorized_gaussian."
            )
