"""One attention layer over a grid in tiles: one pass summarizes, the last responds."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from farfield._checks import ShapeError, shape_error
from farfield._refusals import door, refusal
from farfield.nn import GridAttention
from farfield.nn.devices import device_of, dtype_of, free_bytes
from farfield.ops.grid import Pool
from farfield.streaming import layers
from farfield.streaming.arguments import Cores, arrange_letters, parse_positions, refuse_large_summary, round_up_tile
from farfield.streaming.engines.cluster import check_cluster, run_on_cluster
from farfield.streaming.engines.local import run_local
from farfield.streaming.passes import Pass, Run
from farfield.streaming.progress import Stream, find_unfinished, refuse_shared
from farfield.streaming.records import Record, empty_record
from farfield.volumes.aliasing import refuse_aliasing
from farfield.volumes.axes_view import order_axes
from farfield.volumes.checks import check_volume
from farfield.volumes.image_metadata import ImageMetadata
from farfield.volumes.levels import OutputSpec
from farfield.volumes.sink import ArrayOutput, FileOutput, box_index, numpy_dtype, output_for
from farfield.volumes.source import AxisLayout, Region, VolumeSource, parse_layout, size_of
from farfield.volumes.volume import describe_output, split_volume

# Bytes of a tile by default; computing its response takes a few times as much memory.
_TILE = 2**24


@door("respond_whole")
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
    client: Any = None,
) -> Any:
    """Compute `layer(grid)` in tiles, so that memory is constant; positions attend to the whole grid or to a context.

    The first pass over the tiles merges their summaries, the second lets each tile respond to the merged summary. The
    result does not depend on how the grid is cut.

    Args:
        layer: The attention.
        grid: Anything with `shape` and slicing, `(channels, *size)` or `(batch, channels, *size)`. If `tile` is a
            sequence, its length is the number of spatial dims; otherwise channels are the second axis if that has as
            many as the layer, or else the first. Of a `Volume` with the letter C they are where that is.
        context: Where keys and values come from, as in `layer(grid, context)`; with batch and channels as `grid`.
        mask: True at the valid positions of the grid; its shape is that of the grid without channels.
        context_mask: The same for the context.
        tile: Size of the grid's tiles: one number, or one per spatial dim, None for those that are not cut; rounded up
            to multiples of the windows of pooled keys; by default slabs of 16 MiB, as always for a context.
        out: A path as that of `predict_whole` that does not exist yet, an array that takes slices, or None: an array
            in memory. A call with a path that was killed resumes when it is repeated. An array must have the
            response's shape and a dtype that can hold it, and must not share memory or a file with an input.
        quiet: Whether to show no progress on standard error.
        client: A `dask.distributed.Client`, whose workers run the tiles; see `predict_whole`.

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
    if client is not None:
        check_cluster(client, out)
    if tile is not None:
        tile = parse_positions("tile", tile, 1, optional=True)
    inputs = {"grid": grid, "context": context, "mask": mask, "context_mask": context_mask}
    call = _Call(layer, {name: each for name, each in inputs.items() if each is not None or name == "grid"}, tile)
    given, _, _ = call.ordered
    refuse_aliasing(out, given)
    path = Path(out) if isinstance(out, str | Path) else None
    call.identity, saved = find_unfinished(path, None, layer, given)
    call.shared = refuse_shared(path, saved, several=client is not None)
    if tile is None and saved is not None:
        call.tile = tuple(saved["positions"])
    output = output_for("respond_whole", out, call.spec, given["grid"], None, dtype_of(layer))
    tile_of_keys = size_of(call.volumes[call.keys][1][0])
    call.identity["tile or halo"] = repr((call.spec.box, tile_of_keys, str(path and path.absolute())))
    stream, run = call.connect(output)
    with closing(stream):
        stream.open(run)
        return run_local(stream, quiet) if client is None else run_on_cluster(client, call, stream, quiet)


@dataclass
class _Call:
    """A call of `respond_whole`, which can be sent to another process: the layer, and what it reads, by name."""

    model: GridAttention
    inputs: dict[str, Any]
    tile: Any
    identity: dict[str, str] = field(default_factory=dict)
    shared: bool = False
    caller = "respond_whole"

    @cached_property
    def ordered(self) -> tuple[dict[str, Any], ImageMetadata | None, int | None]:
        """The inputs with channels in their place, what is known of the grid, and its spatial dims if known."""
        split = {name: split_volume(volume) for name, volume in self.inputs.items()}
        _check(self.model, {name: array for name, (_, array) in split.items()})
        return _order_inputs(self.model, split, self.tile)

    @cached_property
    def layout(self) -> AxisLayout:
        """The axes of the grid."""
        given, _, spatial_dims = self.ordered
        grid = given["grid"]
        return parse_layout(grid.shape, spatial_dims) if spatial_dims else _find_layout(self.model, grid, self.tile)

    @cached_property
    def volumes(self) -> dict[str, tuple[VolumeSource, Sequence[Region]]]:
        """What is read, with its tiles."""
        layer, (given, _, _) = self.model, self.ordered
        volumes = _open_grid("grid", layer, given["grid"], given.get("mask"), self.layout, self.tile)
        if "context" in given:
            grid, context = given["grid"], given["context"]
            leading = len(grid.shape) - self.layout.spatial_dims
            layout = parse_layout(context.shape, len(context.shape) - leading)
            volumes |= _open_grid("context", layer, context, given.get("context_mask"), layout, None)
            if volumes["context"][0].batch != volumes["grid"][0].batch:
                problem, fix = "grid and context must have the same batch.", "repeat the smaller one."
                raise shape_error(problem, fix, grid=grid, context=context)
        return volumes

    @property
    def keys(self) -> str:
        """Where keys and values come from."""
        return "context" if "context" in self.inputs else "grid"

    @cached_property
    def spec(self) -> OutputSpec:
        layer, (source, tiles) = self.model, self.volumes["grid"]
        channels = layer.value_channels if layer.output is None else layer.channels
        shape, positions = self.layout.shape(source.batch, channels, source.size), size_of(tiles[0])
        metadata = describe_output(self.ordered[1], self.layout, source.channels, channels)
        lettered = list(zip(metadata.axes, shape, strict=True))[: len(shape) - len(positions)]
        # Each time and plane is a chunk.
        box = (*(1 if letter in "TZ" else length for letter, length in lettered), *positions)
        return OutputSpec(shape, numpy_dtype(dtype_of(layer)), box, metadata)

    @property
    def tile_bytes(self) -> int:
        """The memory of a tile, its projections and its response."""
        source, tiles = self.volumes["grid"]
        return 4 * source.batch * source.channels * source.dtype.itemsize * math.prod(size_of(tiles[0]))

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what follows from the arguments."""
        return {each.name: getattr(self, each.name) for each in fields(self)}

    def sent(self, convert: Callable[[str, Any], Any]) -> _Call:
        return replace(self, inputs={name: convert(name, each) for name, each in self.inputs.items()})

    def bind(self) -> _Call:
        """Return the call, after it was sent."""
        return self

    def connect(self, output: FileOutput | ArrayOutput) -> tuple[Stream, _Response]:
        """Return the tasks, and what runs them."""
        planned = {"positions": size_of(self.volumes["grid"][1][0]), "shared": self.shared}
        stream = Stream(output, self.identity, planned, self.volumes)
        return stream, _Response(self.model, self.keys, stream)

    def surroundings(self) -> AbstractContextManager[None]:
        return nullcontext()


def _check(layer: GridAttention, given: Mapping[str, Any]) -> None:
    """Refuse what is no attention in evaluation, and inputs that are no arrays or do not go together."""
    if not isinstance(layer, GridAttention):
        raise refusal(
            TypeError,
            f"layer must be a GridAttention, got {type(layer).__name__}; "
            f"fix: predict_whole(model, volume) for a whole network.",
        )
    for name, volume in given.items():
        check_volume("respond_whole", name, volume)
    if "context_mask" in given and "context" not in given:
        raise refusal(
            ValueError,
            "got context_mask but no context; fix: give the context too, or, for the mask of the grid, "
            "mask= instead of context_mask=.",
        )
    if layer.training and layer.coefficient_norm is not None:
        raise refusal(ValueError, "batch norm in training needs the whole grid; fix: layer.eval().")
    if problem := layers.find_dependence(layer):
        raise refusal(ValueError, f"{problem}.")


def _order_inputs(
    layer: GridAttention, split: Mapping[str, tuple[ImageMetadata | None, Any]], tile: object
) -> tuple[dict[str, Any], ImageMetadata | None, int | None]:
    """Return the inputs with channels where their letters say, the grid's metadata, and its spatial dims if known."""
    given, known = {name: array for name, (_, array) in split.items()}, split["grid"][0]
    samples = spatial_dims = None
    for name, mask in (("grid", "mask"), ("context", "context_mask")):
        metadata, array = split.get(name, (None, None))
        if metadata is None or not set(metadata.axes) & {"C", "S"}:
            continue
        axes, space = metadata.axes, [letter for letter in "TZYX" if letter in metadata.axes]
        if samples is None:  # a time or a plane before channels is a sample, as (batch, channels, *size)
            is_sample = axes[0] in "TZ" and axes[1] in "CS"
            samples = len(space) - len(tile) if name == "grid" and isinstance(tile, Sequence) else int(is_sample)
        given[name], metadata, layout = arrange_letters(name, array, metadata, layer, len(space) - samples)
        if layout is None:
            continue
        masked, valid = split.get(mask, (None, None))
        if masked is not None and sorted(masked.axes) == sorted(space):
            given[mask] = order_axes(valid, [masked.axes.index(letter) for letter in space])
        if name == "grid":
            known, spatial_dims = metadata, layout.spatial_dims
    return given, known, spatial_dims


def _find_layout(layer: GridAttention, grid: Any, tile: object) -> AxisLayout:
    """Find the axes of a grid from the length of `tile`, or else from the axis that has the layer's channels."""
    shape = tuple(grid.shape)
    if isinstance(tile, Sequence):
        return parse_layout(shape, len(tile))
    for leading in (2, 1):
        if len(shape) > leading and shape[leading - 1] == layer.channels:
            return parse_layout(shape, len(shape) - leading)
    raise refusal(
        ShapeError,
        f"a grid is (channels, *size) or (batch, channels, *size) with the layer's {layer.channels} "
        f"channels, got shape {shape}; fix: a layer of the grid's channels, or channels in that place, e.g. by "
        f"numpy.moveaxis(grid, -1, 0).",
    )


def _open_grid(
    name: str,
    layer: GridAttention,
    array: Any,
    mask: Any,
    layout: AxisLayout,
    tile: int | Sequence[int | None] | None,
) -> dict[str, tuple[VolumeSource, Sequence[Region]]]:
    """Return a grid and its mask, by name, with their tiles, which are rounded up to the windows of pooled keys."""
    device = device_of(layer)
    source = VolumeSource(array, layout, device, dtype_of(layer), caller="respond_whole")
    if source.channels != layer.channels:
        raise refusal(
            ShapeError,
            f"{name} must have the layer's {layer.channels} channels, got {source.channels} in "
            f"shape {tuple(array.shape)} with {layout.spatial_dims} spatial dims; fix: tile with one number per "
            f"spatial dim of the grid, or a {name} of {layer.channels} channels.",
        )
    size, pool = source.size, layer.operator.keys_from.gather
    if tile is None:  # slabs of the first axis; if one of one index is larger than `_TILE`, the next is cut too
        slab, room = list(size), _TILE // (source.batch * source.channels * source.dtype.itemsize)
        for axis, length in enumerate(size):
            slab[axis] = min(length, max(1, room // math.prod(slab[:axis] + slab[axis + 1 :])))
        tile = slab
    windows = pool.windows(len(size)) if isinstance(pool, Pool) else (1,) * len(size)
    tiles = Cores(size, round_up_tile(tile, size, windows))
    if mask is None:
        return {name: (source, tiles)}
    _check_mask(name, mask, (*array.shape[: layout.batch], *size))
    masks = VolumeSource(mask, layout._replace(channels=False), device, torch.bool, caller="respond_whole")
    return {name: (source, tiles), _mask_of(name): (masks, tiles)}


def _mask_of(name: str) -> str:
    return f"mask of the {name}"


def _check_mask(name: str, mask: Any, expected: tuple[int, ...]) -> None:
    dtype = str(getattr(mask, "dtype", ""))
    if "float" in dtype:
        raise refusal(
            TypeError,
            f"the mask of {name} must be boolean, True where a position is valid, got {dtype}; "
            f"fix: mask > 0, or mask == 0 if it is additive, 0 and -inf.",
        )
    if tuple(mask.shape) != expected:
        raise refusal(
            ShapeError,
            f"the mask of {name} must have shape {expected}, got {tuple(mask.shape)}; "
            f"fix: one value per position, without channels.",
        )


class _Response(Run):
    """Passes over a grid and what keys and values come from: the "context", or the "grid" itself if there is none."""

    def __init__(self, layer: GridAttention, keys: str, stream: Stream) -> None:
        self.attention, self.keys, self.stream = layers.make_streamable(layer), keys, stream
        self.whole: Any = None

    @property
    def passes(self) -> list[Pass]:
        """The passes: with a context, queries that come from sums of the grid get one of their own."""
        summaries = [(self.keys, True, self.keys == "grid")]
        if self.keys != "grid" and not self.attention.operator.queries_from.side_by_side:
            summaries.append(("grid", False, True))
        each_pass = [(name, partial(self.summarize, name, *of)) for name, *of in summaries] + [("grid", self.respond)]
        volumes = self.stream.volumes
        return [
            Pass(len(volumes[name][1]), task, math.prod(volumes[name][0].size), lambda key: layers.merge_attention)
            for name, task in each_pass
        ]

    def read(self, name: str, index: int) -> tuple[Tensor, dict[str, Any]]:
        """Read a tile; return it with its mask, origin and size as `summarize` and `respond` take them."""
        source, tiles = self.stream.volumes[name]
        is_masked, core = _mask_of(name) in self.stream.volumes, tiles[index]
        mask = self.stream.read(_mask_of(name), index, core)[:, 0] if is_masked else None
        place = {"mask": mask, "origin": tuple(start for start, _ in core), "size": source.size}
        return self.stream.read(name, index, core), place

    def summarize(self, name: str, of_keys: bool, of_queries: bool, index: int) -> Record:
        tile, place = self.read(name, index)
        parts = layers.summarize_attention(self.attention, tile, of_keys=of_keys, of_queries=of_queries, **place)
        if index == 0 and of_keys and layers.has_grid_summary(self.attention):
            size = layers.summary_bytes(parts[0]) * len(self.stream.volumes[name][1])
            operator = f"the summary of {self.attention.operator_name}"
            refuse_large_summary(operator, size, free_bytes(tile.device))
        if not layers.are_numbers(parts):
            fix = f"a {'mask' if name == 'grid' else 'context_mask'} that is False there"
            raise layers.not_finite("respond_whole", place["origin"], name, fix)
        return empty_record() | {"parts": {"attention": parts}}

    def respond(self, index: int) -> Record:
        tile, place = self.read("grid", index)
        if self.whole is None:
            each = [self.stream.parts_of(number)["attention"] for number in range(len(self.passes) - 1)]
            parts = functools.reduce(layers.merge_attention, each)
            is_masked = _mask_of(self.keys) in self.stream.volumes
            self.whole = layers.finish_attention(parts, tile.device, complete=not is_masked)
        summary, sums = self.whole
        response = self.attention.respond(tile, summary, **place, query_sums=sums)
        layout = self.stream.volumes["grid"][0].layout
        shape = layout.shape(response.shape[0], response.shape[1], response.shape[2:])
        self.stream.write(self.find_written(0, index), response.reshape(shape))
        return empty_record()

    def find_written(self, number: int, index: int) -> tuple[slice, ...]:
        return box_index(self.stream.output.array.shape, self.stream.volumes["grid"][1][index])
