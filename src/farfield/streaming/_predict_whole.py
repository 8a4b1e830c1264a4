"""A whole network over a volume in tiles: passes that summarize for its attentions, and one pass that writes."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from farfield.nn import GridAttention
from farfield.nn.tracing import EnoughError
from farfield.ops.grid import Gathered
from farfield.ops.slots import Summary
from farfield.streaming._plan_whole import StreamingPlan, plan_whole
from farfield.streaming.aliasing import refuse_aliasing
from farfield.streaming.arguments import check_volume
from farfield.streaming.file_formats import OutputSpec
from farfield.streaming.geometry import count_positions, enlarge_region, index_within
from farfield.streaming.resume import compute_identity, saved_tile
from farfield.streaming.runner import Stream, TiledVolume, make_progress
from farfield.streaming.sink import box_index, check_path, numpy_dtype, output_for
from farfield.streaming.source import Region, VolumeSource
from farfield.streaming.summaries import MergedSummary
from farfield.streaming.trace import device_of, dtype_of, replace_attention_forward, response_channels


def predict_whole(
    model: nn.Module,
    volume: Any,
    *,
    tile: int | Sequence[int | None] | None = None,
    halo: int | Sequence[int] | None = None,
    pad: str | None = None,
    out: str | Path | Any | None = None,
    overwrite: bool = False,
    quiet: bool = False,
) -> Any:
    """Predict a volume tile by tile, with the result of `model(volume)`: attention is global over the whole volume.

    Tiles overlap by the receptive field of the convolutions, so the result does not depend on where tiles are cut. Each
    attention is summarized over all tiles before any tile responds to it: n attentions that depend on each other take
    n + 1 passes over the volume, of which the first passes run only the first layers. With a path as `out`, a call that
    was killed resumes when it is repeated, and ends with the same file.

    Args:
        model: Network in eval mode, from one grid `(batch, channels, *size)` to one.
        volume: Anything with `shape` and slicing (arrays of NumPy, zarr and h5py, tensors of torch): `(*size)` of one
            channel, `(channels, *size)` or `(batch, channels, *size)`, depending on the number of spatial dims. That
            is the number of integers in `tile`, or else that of the model's first convolution.
        tile: Size of the tiles that are written, without halo: one number, or one per spatial dim, None for those that
            are not cut; rounded up to multiples of the strides; by default the largest that memory allows.
        halo: Positions that a tile reads on each side of what it writes; by default found by running the model on
            small grids.
        pad: "reflect", "replicate" or "constant": the volume is padded to multiples of the strides, half on each end,
            and positions of the output that stand for padding alone are cropped. By default the model must take the
            volume's size.
        out: A path ending in .npy, .zarr, .tif or .tiff, an array that takes slices, or None: an array in memory. An
            array must have a dtype that can hold the result, and must not share memory or a file with the volume.
        overwrite: Whether an existing or unfinished file at the path is replaced: a file, or a folder that is one zarr
            array and nothing else.
        quiet: Whether to print neither the plan nor the progress on standard error.

    Returns:
        The result, with the volume's axes (several channels always have an axis): an array of the volume's kind, the
        user's array, or the file at the path, opened for reading.

    Raises:
        ValueError: If the model is in training mode, has a layer other than attention that needs the whole grid, or
            gets a number that is not finite as input of an attention; if the volume changes meanwhile; if out shares
            memory or a file with the volume; if the unfinished file at the path belongs to another call, or its
            progress is damaged.
        TypeError: If the volume is no array, tile or halo have numbers that are no integers, or out has a dtype to
            which the result cannot be cast.
        FileExistsError: If the path exists, or is a link; if the folder for the unfinished file was not made by
            farfield.
        BlockingIOError: If another process is writing to the path.
        PermissionError: If its folder is not writable.
        OSError: If the disk is full, or the volume's file became shorter; finished tiles are kept.

    Cost:
        `plan_whole(...).recomputed` times the MACs of `model(volume)`; the memory of one tile. The summary of softmax
        or softmax_pooled attention is its grid, which must fit in half of the free memory; dot attention runs as
        factorized attention, which is equal.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from farfield.nn import GridAttention
        >>> from farfield.streaming import predict_whole
        >>> attention = GridAttention(8, "siamese")
        >>> net = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), attention, nn.Conv2d(8, 1, 3, padding=1))
        >>> image = torch.randn(1, 100, 90)
        >>> whole = predict_whole(net.eval(), image, tile=32, quiet=True)
        >>> torch.allclose(whole, net(image[None])[0], atol=1e-5)
        True
    """
    check_volume("predict_whole", "volume", volume)
    refuse_aliasing("predict_whole", out, {"volume": volume})
    path = Path(out) if isinstance(out, str | Path) else None
    if path is not None:
        check_path("predict_whole", path, overwrite)
        tile = saved_tile("predict_whole", path, overwrite) if tile is None else tile
    plan = plan_whole(model, volume.shape, tile=tile, halo=halo, pad=pad)
    if not quiet:
        print("\n".join(plan.lines()), file=sys.stderr)
    source = VolumeSource(
        volume, plan.layout, device_of(model), dtype_of(model), padding=plan.padding, mode=pad or "reflect"
    )
    shape = plan.layout.shape(source.batch, plan.output.channels, [stop - start for start, stop in plan.kept])
    axes = plan.layout.axes(plan.output.channels, len(plan.kept))
    spec = OutputSpec(shape, numpy_dtype(plan.output.dtype), axes, plan.written)
    output = output_for("predict_whole", out, spec, volume, overwrite)
    identity = partial(compute_identity, model, [volume], (plan.tile, plan.passes, plan.padding, pad, str(path)))
    progress = make_progress("predict_whole", output, identity, plan.tile, overwrite)
    return Prediction(
        model, plan, Stream("predict_whole", output, progress, [], {"volume": TiledVolume(source, plan.cores)})
    ).run(quiet)


class Prediction:
    """A network's passes over the tiles of a volume.

    Args:
        model: The network.
        plan: The plan.
        stream: Input, output and progress.
    """

    def __init__(self, model: nn.Module, plan: StreamingPlan, stream: Stream) -> None:
        self.model, self.plan, self.stream = model, plan, stream
        if len(plan.passes) > 1:
            stream.merged = [MergedSummary(call.attention, call.grid.name) for call in plan.calls]
        self.summaries: dict[int, tuple[Summary, Gathered | None]] = {}
        self.call, self.core, self.region = 0, plan.cores[0], plan.cores[0]

    def run(self, quiet: bool) -> Any:
        """Run the remaining passes."""
        passes = [("volume", partial(self.run_tile, each.calls, each.halo)) for each in self.plan.passes]
        return self.stream.run(passes, quiet)

    def run_tile(self, calls: Sequence[int], halo: Any, index: int, core: Region) -> None:
        """Run a tile as far as the pass needs, and write the result in the last pass."""
        self.core, self.call = core, 0
        self.region = enlarge_region(self.plan.least, halo.around(core, self.plan.size), self.plan.size)
        grid = self.stream.read("volume", index, self.region)
        read = [self.plan.calls[call].grid for call in calls] or [self.plan.output.grid]
        if not any(count_positions(network_grid.part(core, self.plan.size)) for network_grid in read):
            return
        try:
            self.write(self.run_with_summaries(grid, calls) if self.stream.merged else self.model(grid))
        except EnoughError:
            return

    def run_with_summaries(self, grid: Tensor, calls: Sequence[int]) -> Tensor:
        """Run the network: each attention responds to its summary, or is summarized if that is what the pass is for."""

        def forward(path: str, attention: GridAttention, own: Tensor, mask: Tensor | None) -> Tensor:
            call, self.call = self.call, self.call + 1
            if call in calls:
                self.summarize(call, own, mask)
                if call == calls[-1]:
                    raise EnoughError
            elif not calls or self.stream.merged[call].parts:
                return self.respond(call, own, mask)
            return own.new_zeros(own.shape[0], response_channels(attention), *own.shape[2:])

        with replace_attention_forward(self.model, forward):
            return self.model(grid)

    def summarize(self, call: int, grid: Tensor, mask: Tensor | None) -> None:
        """Add a tile's own positions to the summary of an attention."""
        network_grid, merged = self.plan.calls[call].grid, self.stream.merged[call]
        part = network_grid.part(self.core, self.plan.size)
        if not count_positions(part):
            return
        positions = index_within(part, network_grid.part(self.region, self.plan.size))
        own, valid = grid[positions], None if mask is None else mask[positions]
        origin = tuple(start for start, _ in part)
        merged.add(own, valid, origin, network_grid.size)
        merged.add_query_sums(own, valid, origin, network_grid.size)

    def respond(self, call: int, grid: Tensor, mask: Tensor | None) -> Tensor:
        """Compute the response of all positions that a tile reads to the summary of the whole."""
        network_grid, merged = self.plan.calls[call].grid, self.stream.merged[call]
        if call not in self.summaries:
            self.summaries[call] = merged.whole(grid.device)
        summary, query_sums = self.summaries[call]
        origin = tuple(start for start, _ in network_grid.part(self.region, self.plan.size))
        return merged.attention.respond(
            grid, summary, mask=mask, origin=origin, size=network_grid.size, query_sums=query_sums
        )

    def write(self, output: Tensor) -> None:
        """Write a tile's own positions, without padding."""
        plan, own = self.plan, self.plan.output.grid.part(self.core, self.plan.size)
        kept = zip(own, plan.kept, strict=True)
        part = tuple((max(start, low), min(stop, high)) for (start, stop), (low, high) in kept)
        if any(start >= stop for start, stop in part):
            return
        box = output[index_within(part, plan.output.grid.part(self.region, plan.size))]
        target = tuple((start - low, stop - low) for (start, stop), (low, _) in zip(part, plan.kept, strict=True))
        shape = plan.layout.shape(output.shape[0], plan.output.channels, box.shape[2:])
        self.stream.write(box_index(shape, target), box.reshape(shape))
