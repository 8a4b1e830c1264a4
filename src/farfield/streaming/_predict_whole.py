"""A whole network over a volume in tiles: passes that summarize for its global layers, then one pass that writes."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from farfield._fingerprint import fingerprint
from farfield._refusals import door
from farfield.nn.devices import device_of, dtype_of
from farfield.nn.tracing import looks_at_a_copy
from farfield.streaming.adapt import Reduce, one_grid
from farfield.streaming.arguments import Tiles, arrange_volumes, check_network, parse_tiles, refuse_meta
from farfield.streaming.check import RegionCheck, run_check
from farfield.streaming.masks import mask_plan
from farfield.streaming.passes import ReadVolume, Store, TiledRun, WriteOutput
from farfield.streaming.plan import PatchPlan
from farfield.streaming.planning import Planner
from farfield.streaming.progress import Pass, Saved, Stream, find_unfinished
from farfield.streaming.recording import run_patch
from farfield.streaming.skipping import find_skipped, layout_of_mask, open_mask
from farfield.streaming.spans import Box, Span, box_shape
from farfield.streaming.streaming_plan import StreamingPlan, check_plan
from farfield.volumes.aliasing import refuse_aliasing
from farfield.volumes.file_formats import OutputSpec
from farfield.volumes.image_metadata import ImageMetadata
from farfield.volumes.labelled_arrays import label_result
from farfield.volumes.sink import FileOutput, numpy_dtype, output_for
from farfield.volumes.source import AxisLayout, VolumeSource, parse_layout
from farfield.volumes.volume import describe_output


@looks_at_a_copy
@door("predict_whole")
def predict_whole(
    model: nn.Module,
    volume: Any,
    *,
    tile: int | Sequence[int | None] | Tiles | None = None,
    pad: str | None = None,
    reduce: Reduce = None,
    out: str | Path | Any | None = None,
    overwrite: bool = False,
    quiet: bool = False,
    plan: StreamingPlan | None = None,
    mask: Any = None,
    fill: float = 0.0,
) -> Any:
    """Predict a volume tile by tile, with the result of `model(volume)`: attention and norms see the whole volume.

    The network is recorded once, at the volume's size and without numbers. What a tile reads follows from the rule of
    each operation, so the result does not depend on where tiles are cut. Each attention is summarized over all tiles
    before any tile responds to it, and so is each norm, mean or other sum over positions: n of them that depend on each
    other take n + 1 passes. What later passes need of earlier ones is stored, in memory or on disk, or computed again.
    With a path as `out`, a call that was killed resumes when it is repeated, and ends with the same file.

    Args:
        model: Network in eval mode, from one grid `(batch, channels, *size)` to one; `MeanOverFlips` of one averages
            over flips of the volume. It may take several grids of one size as its arguments, and return several, in a
            dict, tuple or list.
        volume: Anything with `shape` and slicing (arrays of NumPy, zarr and h5py, tensors of torch): `(*size)` of one
            channel, `(channels, *size)` or `(batch, channels, *size)`, depending on the number of spatial dims. That
            is the length of `tile` if it is a sequence, or else that of the model's first convolution. For a model of
            several inputs a tuple of these, in the order of its arguments and of one size. Letters of a
            `farfield.volumes.Volume`, whatever their order, tell its axes: those of T, Z, Y, X that the network does
            not have are samples, such as the planes of a stack for a 2-D network.
        tile: Size of the tiles that are written, without halo: one number, or one per spatial dim, None for those that
            are not cut; rounded up to multiples of the strides; by default the largest that memory allows. `Tiles`
            also has the memory of a tile, the disk space of values that are stored between passes, the halo of
            operations without a rule, and what norms see.
        pad: "reflect", "replicate" or "constant": the volume is padded to multiples of the strides, half on each end,
            and positions of the output that stand for padding alone are cropped. By default the model must take the
            volume's size.
        reduce: "argmax" or "softmax" over the channels, or a function from an output grid `(batch, channels, *size)` to
            one of the same batch and size. It is applied to each tile before it is written, so that the output that it
            reduces never exists as a whole. Labels are of the smallest dtype that holds them, uint8 up to 256 classes.
        out: A path ending in .npy, .zarr, .tif or .tiff, an array that takes slices, or None: an array in memory. An
            array must have the result's shape and a dtype that can hold it, and must not share memory or a file with
            the volume.
        overwrite: Whether what exists at the path is replaced (a file, or a folder that is one zarr array and nothing
            else), and so is an unfinished file of another call. An unfinished file of this call is resumed.
        quiet: Whether to print neither the plan nor the progress on standard error.
        plan: What `plan_whole` returned for this network and a volume of this shape, in place of `tile` and `pad`.
            It reduces as it was planned. Parameters and buffers are those that `model` has now.
        mask: True at the valid positions of the volume, False where it holds nothing: an array `(*size)` for all
            samples or `(batch, *size)`, or the path of one. Norms, means, maxima, attention and all other sums over
            positions leave out those that are not valid; of a coarser grid a position is valid if any of those that it
            stands for is. Convolutions, and pooling of small windows, read `fill` there. Tiles without a valid position
            are skipped. It is read tile by tile, once before the first pass and then as the volume is.
        fill: The number that the network reads where the mask is False, whatever the volume holds there, NaN included.

    Returns:
        The result, with the volume's axes (several channels always have an axis); 0 where all that a position stands
        for is not valid. Without `out` a tensor on the volume's device if the volume is a tensor, else an array of
        NumPy (with the matrix of a tensor of MONAI, the names and coordinates of an array of xarray), or a dict or
        tuple of these as the model returns several; otherwise the user's array, or the file at the path, opened for
        reading. An array or file has several outputs as channels, one after the other; `open_volume` reads their names
        in a file.

    Raises:
        ValueError: If the model is in training mode or does not take the volume's size; if an operation does not run in
            tiles (`farfield.streaming.labels.GraphError`); if tiles differ from the network on the region of the volume
            that is checked before the first pass (`farfield.streaming.check.TilesDifferError`);
            if what is summarized is not finite; if the summary of an
            attention, or its keys and values, take too much memory; if shapes do not fit (`ShapeError`); if the volume
            changes meanwhile; if `reduce` is over channels and there is one channel, or it changes the size of a grid;
            if `plan` is of another network or shape, or beside arguments that it has itself; if an operation over
            positions cannot leave any out, or norms see tiles alone, beside `mask`; if there is `fill` and no mask;
            if out shares memory or a file with the volume, or is a path with another suffix; if the unfinished file
            at the path belongs to another call, or its progress is damaged; if a file of stored values is changed
            meanwhile.
        TypeError: If the volume is no array of booleans, integers or floats, tile or halo have numbers that are no
            integers, `reduce` is no function, `mask` is of floats, `fill` is no number, the model takes another number
            of grids or does not return grids of one size, or out has a dtype to which the result cannot be cast.
        LookupError: If `pad` or `reduce` is unknown.
        FileNotFoundError: If the folder of the path does not exist.
        FileExistsError: If the path exists and `overwrite` is False, or is a link or a folder that is not replaced; if
            the folder for the unfinished file was not made by farfield.
        BlockingIOError: If another process is writing to the path.
        PermissionError: If the folder of the path is not writable.
        OSError: If the disk is full, or the volume's file became shorter; finished tiles are kept.

    Cost:
        `plan_whole(...).recomputed` times the MACs of `model(volume)`: once, and little more for halos, where all that
        later passes need is stored; about n/2 times for n norms in series where nothing is. The memory of one tile, of
        the summaries and of values that are stored in memory.
        The summary of softmax or softmax_pooled attention is its grid, which must fit in half of the free memory; of
        torch's `scaled_dot_product_attention` keys and values of all positions are stored, in memory or on disk. dot
        attention runs as factorized attention, which is equal.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from farfield.nn import GridAttention
        >>> from farfield.streaming import plan_whole, predict_whole
        >>> attention = GridAttention(8, "siamese")
        >>> net = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), attention, nn.Conv2d(8, 1, 3, padding=1))
        >>> image = torch.randn(1, 100, 90)
        >>> whole = predict_whole(net.eval(), image, tile=32, quiet=True)
        >>> torch.allclose(whole, net(image[None])[0], atol=1e-5)
        True

        A plan that is made once, for several volumes:

        >>> plan = plan_whole(net, image.shape, tile=32)
        >>> images = torch.randn(3, 1, 100, 90)
        >>> results = [predict_whole(net, each, plan=plan, quiet=True) for each in images]
        >>> torch.allclose(torch.stack(results), net(images), atol=1e-5)
        True

        A volume whose right half holds nothing:

        >>> valid = torch.arange(90).expand(100, 90) < 45
        >>> numbers = image.where(valid, torch.nan)
        >>> whole = predict_whole(net, numbers, tile=15, mask=valid, quiet=True)
        >>> bool(whole[:, valid].isfinite().all()), bool(whole[:, ~valid].any())
        (True, False)
    """
    path, tiles = Path(out) if isinstance(out, str | Path) else None, parse_tiles(tile)
    known, volumes, layouts = arrange_volumes("predict_whole", model, tiles, volume)
    mask = open_mask(mask, fill)
    masks = {} if mask is None else {"mask": mask}
    refuse_aliasing(out, volumes | masks)
    identity, saved = find_unfinished(path, overwrite, model, volumes | masks)
    check_network(model, "model", "predict_whole(model, …)")
    if plan is None:
        shapes = [each.shape for each in volumes.values()]
        planned = Planner(model, shapes, tiles, pad, reduce, path, saved, layouts).plan()
    else:
        planned = check_plan(plan, volumes, tile, pad, reduce, layouts).bind("predict_whole", model)
    refuse_meta(device := device_of(model))
    sources, masked, skips = _read_volumes(planned, model, volumes, layouts), planned, None
    if masks:
        sources |= _read_mask(planned, mask, next(iter(volumes.values())).shape, device)
        graph = mask_plan(planned.graph_plan, model)
        masked = replace(planned, graph_plan=graph, passes=graph.passes)
        skipped = find_skipped(graph, sources["mask"], planned.samples)
        identity["mask or fill"], skips = f"{fill!r} {fingerprint(skipped)}", skipped.item
    if not quiet:
        print(masked, file=sys.stderr)
        if masks:
            empty = skipped[:, -1]
            print(f"{empty.sum():,} of {empty.size:,} tiles have no valid position: skipped", file=sys.stderr)
    graph = masked.graph_plan
    spec = _make_spec(known, planned, next(iter(sources.values())).channels)
    output = output_for("predict_whole", out, spec, next(iter(volumes.values())), overwrite)
    halo = planned.graph_plan.labelled.halo
    settings = (planned.tile, halo, planned.patch_size, planned.stored, planned.on_disk, str(path))
    identity |= {
        "tile or halo": repr(settings),
        "pad or reduce": f"{planned.pad} {planned.padding} {planned.reduction}",
        # Summaries and stored values are known by their node, and another version may record other nodes.
        "version of torch": torch.__version__,
    }
    resumed = Saved(planned.tile, planned.stored, planned.on_disk)
    tiled = {name: (source, planned.cores) for name, source in sources.items()}
    stream = Stream(output, identity, resumed, tiled)
    folder = output.folder if isinstance(output, FileOutput) else None
    with (
        closing(stream),
        closing(Store(graph, planned.on_disk, folder, device)) as store,
        _outside_inference(device),
    ):
        if (stream.stage, stream.tile) == (0, 0):
            _check_region(planned, model, stream, fill, quiet)
        on_patch = partial(run_patch, graph) if isinstance(graph, PatchPlan) else None
        run = TiledRun(graph, on_patch, store, *_connect(stream, planned, fill), skips)
        passes = [
            Pass(len(planned.cores), partial(run.run_task, number), each.macs)
            for number, each in enumerate(masked.passes * planned.samples)
        ]
        result = stream.run(passes, run, quiet)
    if out is not None:
        return result
    result = planned.outputs.split(result, planned.layout.batch, planned.layout.channels)
    return result if isinstance(volume, tuple) else label_result(volume, result, spec.metadata)


def _read_volumes(
    plan: StreamingPlan, model: nn.Module, volumes: Mapping[str, Any], layouts: Sequence[AxisLayout | None]
) -> dict[str, VolumeSource]:
    spatial_dims, padding, mode = plan.layout.spatial_dims, plan.padding, plan.pad or "reflect"
    sources = {}
    for (name, array), known in zip(volumes.items(), layouts, strict=True):
        layout = known or parse_layout(array.shape, spatial_dims)
        sources[name] = VolumeSource(array, layout, device_of(model), dtype_of(model), padding=padding, mode=mode)
    return sources


def _read_mask(plan: StreamingPlan, mask: Any, shape: Sequence[int], device: torch.device) -> dict[str, VolumeSource]:
    layout = layout_of_mask(mask, plan.layout, shape, plan.samples < plan.output.shape[0])
    # Padding is valid where the border is, so that a mask of all positions changes nothing.
    mode = "reflect" if plan.pad == "reflect" else "replicate"
    return {"mask": VolumeSource(mask, layout, device, torch.bool, padding=plan.padding, mode=mode)}


def _make_spec(known: ImageMetadata | None, plan: StreamingPlan, channels: int) -> OutputSpec:
    output = plan.output
    shape = plan.layout.shape(output.shape[0], output.shape[1], [stop - start for start, stop in output.kept])
    metadata = describe_output(known, plan.layout, channels, output.shape[1], output.scales)
    if plan.outputs.names:
        metadata = replace(metadata, channels=plan.outputs.channel_names())
    return OutputSpec(shape, numpy_dtype(output.dtype), output.written, metadata)


def _check_region(plan: StreamingPlan, model: nn.Module, stream: Stream, fill: float, quiet: bool) -> None:
    if not isinstance(plan.check, RegionCheck):
        return
    sources, sample = [source for source, _ in stream.volumes.values()], 0 if plan.samples > 1 else None
    mask = stream.volumes["mask"][0] if "mask" in stream.volumes else None

    def finish(output: Any) -> Tensor:
        return one_grid(model, plan.size, output)[0]

    def read(volume: int, region: tuple[Span, ...]) -> Tensor:
        grid = sources[volume].read(region, sample)
        return grid if mask is None else grid.where(mask.read(region, sample), fill)

    # Tiles are compared with the network as it is, which has no mask, on a volume that is filled.
    with torch.no_grad():
        problem = run_check(plan.check, model, finish, plan.size, read)
    if problem and not quiet:
        print(f"not checked: {problem}", file=sys.stderr)


@contextmanager
def _outside_inference(device: torch.device) -> Iterator[None]:
    """Leave `torch.inference_mode`, whose tensors cannot be used in it and outside, and make tensors on a device."""
    # Each call of torch within a device takes microseconds longer.
    with torch.inference_mode(False), nullcontext() if device == torch.get_default_device() else device:
        yield


def _connect(stream: Stream, plan: StreamingPlan, fill: float) -> tuple[ReadVolume, WriteOutput]:
    """Return how passes read boxes of the volumes, and write those of the output, without what stands for padding."""
    names, kept, apart = list(stream.volumes), plan.output.kept, plan.samples > 1

    def read(sample: int, volume: int, index: int, box: Box) -> Tensor:
        place = index, tuple(spans[0] for spans in box[2:]), sample if apart else None
        grid = stream.read(names[volume], *place)
        if "mask" not in names or names[volume] == "mask":
            return grid
        return grid.where(stream.read("mask", *place), fill)

    def write(sample: int, box: Box, numbers: Tensor | None) -> None:
        if numbers is None:
            if isinstance(stream.output, FileOutput):  # of zeros from the start
                return
            numbers = torch.zeros(box_shape(box), dtype=plan.output.dtype)
        spans = [spans[0] for spans in box[2:]]
        both = [(max(start, low), min(stop, high)) for (start, stop), (low, high) in zip(spans, kept, strict=True)]
        if any(start >= stop for start, stop in both):
            return
        inside, target = (
            tuple(slice(start - first, stop - first) for (start, stop), (first, _) in zip(both, origin, strict=True))
            for origin in (spans, kept)
        )
        part = numbers[(slice(None), slice(None), *inside)]
        shape = plan.layout.shape(part.shape[0], part.shape[1], part.shape[2:])
        leading = [slice(None)] * (len(shape) - len(target))
        if apart:
            leading[: plan.layout.batch] = plan.layout.index_sample(sample)
        stream.write((*leading, *target), part.reshape(shape))

    return read, write
