"""A whole network over a volume in tiles: summary passes for its attentions, and one pass that writes."""

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
from farfield.streaming.aliasing import refuse_aliasing
from farfield.streaming.arguments import check_volume
from farfield.streaming.arrays import Region, Source
from farfield.streaming.driving import Stream, Tiled, progress_of
from farfield.streaming.formats import Wanted
from farfield.streaming.geometry import at_least, inner, positions_of
from farfield.streaming.listening import answering, device_of, dtype_of, width
from farfield.streaming.merging import Merged
from farfield.streaming.outputs import box_index, check_path, numpy_dtype, output_for
from farfield.streaming.planning import Plan, plan_whole
from farfield.streaming.progress import begun_tile, identity_of


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
    """Predict a volume tile by tile, exactly as `model(volume)` would, attention over the whole volume included.

    Tiles overlap by as much as convolutions see, so that what a tile writes does not depend on where it was cut. Each
    attention is summarized over all tiles before any tile responds to it: n attentions that hear of each other take
    n + 1 passes over the volume, of which the first ones run only the first layers. What is asked for with `out=` a
    path can be killed and called again; it goes on where it was and ends with the same file.

    Args:
        model: In eval mode, from one grid `(batch, channels, *size)` to one.
        volume: Anything with `shape` and slicing (NumPy's, zarr's, h5py's arrays, torch's tensors): `(*size)` of one
            channel, `(channels, *size)` or `(batch, channels, *size)`; which of them, the number of spatial dims decides,
            and that is how many numbers `tile` has, else the rank of the model's first convolution.
        tile: Positions a side that a tile writes, rounded up to what the strides divide; halos are read beside it. None for
            a side that is not cut; by default the largest that memory allows.
        halo: Positions a side that a tile reads beyond what it writes; by default found by running the model on small
            grids.
        pad: "reflect", "replicate" or "constant": the sides are padded to what the strides divide, half on each end,
            and the output is cropped by what was padded, in whole positions of it. Without it the model must take the sides
            as they are.
        out: A path ending in .npy, .zarr, .tif or .tiff, an array that takes slices, or None: an array in memory. An
            array must be able to hold the result, and must hold nothing that is read.
        overwrite: Whether what exists at the path, finished or not, is replaced: a file, or a folder that is one zarr
            array and nothing else.
        quiet: Whether to say nothing of the plan and the progress on the standard error.

    Returns:
        What was written, with the volume's axes (more than one channel has an axis anyway): an array of its kind, the
        caller's, or for a path the file, opened for reading.

    Raises:
        ValueError: If the model is in training, has a layer beside attention that needs the whole grid, or reads a
            number that is not finite; if the volume changed; if out is where the volume is; if what is unfinished at
            the path is of something else, or its progress is damaged.
        TypeError: If the volume is no array, tile or halo are no whole numbers, or out is of a dtype that would cut the
            result.
        FileExistsError: If the path exists, or is a link; if a folder is in the way that was not made here.
        BlockingIOError: If another process is writing to it.
        PermissionError: If its folder may not be written.
        OSError: If the disk is full, or the volume's file was cut short; finished tiles are kept.

    Cost:
        `plan_whole(...).recomputed` times the MACs of `model(volume)`; the memory of one tile. A summary of
        softmax or softmax_pooled attention is its grid, which must fit in half of the free memory; dot attention is
        run as factorized, which is equal.

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
        tile = begun_tile("predict_whole", path, overwrite) if tile is None else tile
    plan = plan_whole(model, volume.shape, tile=tile, halo=halo, pad=pad)
    if not quiet:
        print("\n".join(plan.lines()), file=sys.stderr)
    source = Source(volume, plan.layout, device_of(model), dtype_of(model), padding=plan.padding, mode=pad or "reflect")
    shape = plan.layout.shape(source.batch, plan.output.channels, [stop - start for start, stop in plan.kept])
    axes = plan.layout.axes(plan.output.channels, len(plan.kept))
    wanted = Wanted(shape, numpy_dtype(plan.output.dtype), axes, plan.written)
    output = output_for("predict_whole", out, wanted, volume, overwrite)
    identity = partial(identity_of, model, [volume], (plan.tile, plan.passes, plan.padding, pad, str(path)))
    progress = progress_of("predict_whole", output, identity, plan.tile, overwrite)
    return Prediction(
        model, plan, Stream("predict_whole", output, progress, [], {"volume": Tiled(source, plan.cores)})
    ).run(quiet)


class Prediction:
    """A network's passes over the tiles of a volume.

    Args:
        model: The network.
        plan: What to do.
        stream: What is read, written and remembered.
    """

    def __init__(self, model: nn.Module, plan: Plan, stream: Stream) -> None:
        self.model, self.plan, self.stream = model, plan, stream
        if len(plan.passes) > 1:
            stream.merged = [Merged(call.attention, call.grid.name) for call in plan.calls]
        self.answers: dict[int, tuple[Summary, Gathered | None]] = {}
        self.call, self.core, self.region = 0, plan.cores[0], plan.cores[0]

    def run(self, quiet: bool) -> Any:
        """Run the passes that are left."""
        passes = [("volume", partial(self.take, each.calls, each.halo)) for each in self.plan.passes]
        return self.stream.run(passes, quiet)

    def take(self, calls: Sequence[int], halo: Any, index: int, core: Region) -> None:
        """Run a tile as far as the pass needs."""
        self.core, self.call = core, 0
        self.region = at_least(self.plan.least, halo.around(core, self.plan.size), self.plan.size)
        grid = self.stream.read("volume", index, self.region)
        read = [self.plan.calls[call].grid for call in calls] or [self.plan.output.grid]
        if not any(positions_of(placed.part(core, self.plan.size)) for placed in read):
            return
        try:
            self.write(self.listened(grid, calls) if self.stream.merged else self.model(grid))
        except EnoughError:
            return

    def listened(self, grid: Tensor, calls: Sequence[int]) -> Tensor:
        """Run the network with its attentions answered from summaries, or heard in the pass that is for them."""

        def answer(path: str, attention: GridAttention, own: Tensor, mask: Tensor | None) -> Tensor:
            call, self.call = self.call, self.call + 1
            if call in calls:
                self.hear(call, own, mask)
                if call == calls[-1]:
                    raise EnoughError
            elif not calls or self.stream.merged[call].parts:
                return self.respond(call, own, mask)
            return own.new_zeros(own.shape[0], width(attention), *own.shape[2:])

        with answering(self.model, answer):
            return self.model(grid)

    def hear(self, call: int, grid: Tensor, mask: Tensor | None) -> None:
        """Summarize a tile's own positions."""
        placed, merged = self.plan.calls[call].grid, self.stream.merged[call]
        part = placed.part(self.core, self.plan.size)
        if not positions_of(part):
            return
        positions = inner(part, placed.part(self.region, self.plan.size))
        own, valid = grid[positions], None if mask is None else mask[positions]
        origin = tuple(start for start, _ in part)
        merged.add(own, valid, origin, placed.size)
        merged.ask(own, valid, origin, placed.size)

    def respond(self, call: int, grid: Tensor, mask: Tensor | None) -> Tensor:
        """Let what a tile reads respond to the whole."""
        placed, merged = self.plan.calls[call].grid, self.stream.merged[call]
        if call not in self.answers:
            self.answers[call] = merged.whole(grid.device)
        summary, query_sums = self.answers[call]
        origin = tuple(start for start, _ in placed.part(self.region, self.plan.size))
        return merged.attention.respond(
            grid, summary, mask=mask, origin=origin, size=placed.size, query_sums=query_sums
        )

    def write(self, found: Tensor) -> None:
        """Write a tile's own positions, without what was padded."""
        plan, own = self.plan, self.plan.output.grid.part(self.core, self.plan.size)
        kept = zip(own, plan.kept, strict=True)
        part = tuple((max(start, low), min(stop, high)) for (start, stop), (low, high) in kept)
        if any(start >= stop for start, stop in part):
            return
        box = found[inner(part, plan.output.grid.part(self.region, plan.size))]
        target = tuple((start - low, stop - low) for (start, stop), (low, _) in zip(part, plan.kept, strict=True))
        shape = plan.layout.shape(found.shape[0], plan.output.channels, box.shape[2:])
        self.stream.write(box_index(shape, target), box.reshape(shape))
