"""A whole network over a volume in tiles: passes that summarize for its global layers, then one pass that writes."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from farfield._checks import ShapeError, check_network
from farfield._fingerprint import fingerprint
from farfield._refusals import door, refusal
from farfield.nn.devices import device_of, dtype_of
from farfield.nn.tracing import looks_at_a_copy
from farfield.streaming._plan_whole import plan_volumes
from farfield.streaming.adapt import Reduce
from farfield.streaming.arguments import OF_WINDOWS, Tiles, arrange_volumes, parse_layouts, parse_tiles, refuse_meta
from farfield.streaming.engines.cluster import check_cluster, run_on_cluster
from farfield.streaming.engines.local import run_local
from farfield.streaming.engines.parts import Part, check_part, plan_in_turns, run_part
from farfield.streaming.graph import Info
from farfield.streaming.plan import StreamingPlan, describe_graph
from farfield.streaming.prediction import Prediction
from farfield.streaming.progress import find_unfinished, refuse_shared
from farfield.streaming.skipping import check_fill, choose_mask, open_mask
from farfield.volumes.aliasing import refuse_aliasing
from farfield.volumes.labelled_arrays import label_result
from farfield.volumes.scaling import parse_scale
from farfield.volumes.sink import FileOutput, output_for
from farfield.volumes.source import AxisLayout

# Seconds from which on it is said how long a prediction takes, and units.
_LONG, _UNITS = 10, (("day", 86400), ("hour", 3600), ("minute", 60))


@partial(looks_at_a_copy, scripted=True)
@door("predict_whole", OF_WINDOWS)
def predict_whole(  # noqa: PLR0913  (each is a choice of its own)
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
    client: Any = None,
    part: Part | None = None,
    mask: Any = None,
    fill: float = 0.0,
    scale: Any = None,
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
            dict, dataclass, tuple or list; one grid in any of these is one grid. It may also return what sums over the
            whole: vectors `(batch, n)` or numbers, alone, or numbers beside grids.
        volume: Anything with `shape` and slicing (arrays of NumPy, zarr and h5py, tensors of torch): `(*size)` of one
            channel, `(channels, *size)` or `(batch, channels, *size)`, depending on the number of spatial dims. That is
            the length of `tile` if it is a sequence, or else that of the model's first convolution; without one a
            volume of four or five axes is read as `model(volume)` reads it. For a model of several inputs a tuple of
            these, in the order of its arguments and of one size. Letters of a `farfield.volumes.Volume`, whatever their
            order, tell its axes: those of T, Z, Y, X that the network does not have are samples, such as the planes of
            a stack for a 2-D network.
        tile: Size of the tiles that are written, without halo: one number, or one per spatial dim, None for those that
            are not cut; rounded up to multiples of the strides; by default the largest that memory allows. `Tiles`
            also has the memory of a tile, the disk space of values that are stored between passes, the halo of
            operations without a rule, and what norms see.
        pad: "reflect", "replicate" or "constant": the volume is padded to multiples of the strides, half on each end,
            and positions of the output that stand for padding alone are cropped. By default the model must take the
            volume's size.
        reduce: "argmax" or "softmax" over the channels, a number above which a channel is 1 and else 0, as uint8 (0.5
            for probabilities, 0.0 for logits), or a function from an output grid `(batch, channels, *size)` to
            one of the same batch and size. It is applied to each tile before it is written, so that the output that it
            reduces never exists as a whole. Labels are of the smallest dtype that holds them, uint8 up to 256 classes.
            `{"out": "argmax"}` takes one of several outputs by its key or place, and `{"out": None}` as it is.
        out: A path ending in .npy, .zarr, .ome.zarr, .tif, .ome.tif, .nii or .nii.gz; `image.ome.zarr/labels/NAME` for
            labels inside an image; an array that takes slices; or None: an array in memory. An array must have the
            result's shape and a dtype that can hold it, and must not share memory or a file with the volume. TIFF is in
            tiles with coarser levels, GeoTIFF with the bands' names and a number for where `mask` is False.
        overwrite: Whether what exists at the path is replaced (a file, or a folder that is one zarr array and nothing
            else), and so is an unfinished file of another call. An unfinished file of this call is resumed.
        quiet: Whether to print neither the plan nor the progress on standard error.
        plan: What `plan_whole` returned for this network and a volume of this shape, in place of `tile` and `pad`.
            It reduces as it was planned. Parameters and buffers are those that `model` has now; a model that runs other
            operations than it did, because of an attribute, a hook or a number that it reads in Python, is refused.
        client: A `dask.distributed.Client`, whose workers run the tiles: the result is that of one process, byte for
            byte on processors of one kind. They must see the folder of `out`, a path and not of .npy, by the same
            path, and a volume is best one of `open_volume`, which each worker opens itself.
        part: The share of this process, where several are started by hand or as an array of jobs, with the same other
            arguments and a path, not of .npy; the call returns None, and one of `Part.parse("reduce")` the result.
        mask: True at the valid positions of the volume, False where it holds nothing: an array `(*size)` for all
            samples or `(batch, *size)`, or the path of one; of another size if it and the volume have voxel sizes, such
            as a `Volume` drawn on a thumbnail, which begins where the volume does unless it has an origin. "alpha":
            where the last of two or four channels, which the network does not see, is not 0. "nodata": positions where
            no channel has the number that the volume's file states to be none, as GeoTIFF can; that is also what is
            taken, with a warning, where a file states one. Norms, means, maxima, attention and all other sums over
            positions leave out those that are not valid; of a coarser grid a position is valid if any of those that it
            stands for is. Convolutions, and pooling of small windows, read `fill` there. Tiles without a valid position
            are skipped. It is read tile by tile, once before the first pass and then as the volume is.
        fill: The number that the network reads where the mask is False, whatever the volume holds there, NaN included.
        scale: A pair `(low, high)` of what becomes 0 and 1 where the volume is read, each a number or one a channel:
            `percentiles(volume, [1, 99.8])` of `farfield.volumes`, or `(mean, mean + std)` of its `mean_and_std`. Of
            several inputs a tuple of pairs, None for one that is read as it is.

    Returns:
        The result, in the network's dtype or that of the caller's autocast (float32 for bfloat16, where it is no
        tensor), with the volume's axes (several channels always have an axis); 0 where all that a position stands for
        is not valid. Without `out` a tensor on the volume's device if the volume is a tensor, else an array of NumPy
        (with the matrix of a tensor of MONAI, the names and coordinates of an array of xarray), or a dict or tuple of
        these as the model returns several; otherwise the user's array, or the file at the path, opened for reading. An
        array or file has several outputs as channels, one after the other; `open_volume` reads their names in a file.
        Of a vector or number it has an axis of numbers.

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
            integers, `reduce` is no function or the model returns no grid to reduce, `mask` is of floats, `fill` is no
            number, the model takes another number of grids or does not return grids of one size, or out has a dtype
            to which the result cannot be cast or is a file of images where there is none.
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
    if client is not None:
        check_cluster(client, out)
    if part is not None:
        check_part(part, out)
    path, tiles = Path(out) if isinstance(out, str | Path) else None, parse_tiles(tile)
    volume, mask = choose_mask(mask, volume)
    known, volumes, layouts = arrange_volumes("predict_whole", model, tiles, volume)
    check_fill(fill, mask is not None)
    opened = volumes if mask is None else volumes | {"mask": open_mask(mask, volume, (known, volumes, layouts))}
    refuse_aliasing(out, opened)
    check_network(model, "model", "predict_whole(model, …)")
    refuse_meta(device_of(model))
    find = partial(find_unfinished, path, overwrite, model, opened)
    with nullcontext(find()) if part is None else plan_in_turns(path, part, overwrite, find) as (identity, saved):
        shared = refuse_shared(path, saved, several=client is not None or part is not None)
        if plan is None:
            infos = [Info(tuple(each.shape), dtype_of(model, *volumes.values())) for each in volumes.values()]
            planned = plan_volumes(model, list(zip(infos, layouts, strict=True)), tiles, pad, reduce, path, saved)
        else:
            planned = _check_plan(plan, volumes, tile, pad, reduce, layouts).bind("predict_whole", model)
        # Values that several processes read are in files.
        planned = replace(planned, on_disk=planned.on_disk or (shared and bool(planned.stored)))
        if mask is not None and planned.outputs.has_answers and planned.outputs.names and planned.kept:
            raise refusal(
                ValueError,
                "mask leaves positions of the output at 0, and a number beside a grid is one for all of them; fix: "
                "reduce={key: None} for each output alone.",
            )
        scales = parse_scale(scale, planned.channels)
        prediction = Prediction(model, planned, tiles, volume, identity, shared, mask, fill, path, scales)
        prediction.arranged = known, volumes, layouts
        prediction.identity |= _identify(prediction, path)
        if mask is not None:
            prediction.opened_mask = opened["mask"]
            prediction.identity["mask or fill"] = f"{float(fill)} {fingerprint(prediction.skipped)}"
        if scale is not None:
            prediction.identity["scale"] = fingerprint(scales)
        if not quiet:
            print(prediction, file=sys.stderr)
        like = next(iter(volumes.values()))
        output = output_for("predict_whole", out, prediction.spec, like, overwrite, planned.output_dtype)
        stream, run = prediction.connect(output)
        if planned.doubts and known is not None and (known.spacing or known.affine):
            letters = known.axes[-len(planned.size) :]
            doubts = "; ".join(f"along {letters[axis]} {each}" for axis, each in planned.doubts.items())
            stream.warn(f"predict_whole: the place of the output is uncertain: {doubts}.")
        if part is not None and isinstance(output, FileOutput):
            stream.join(output, run)
    with closing(stream), prediction.surroundings():
        if part is not None:
            return run_part(part, stream, quiet)
        if not stream.open(run):
            prediction.check_region(stream.threads, stream.warn)
            if not quiet and prediction.seconds >= _LONG:
                print(f"about {describe_seconds(prediction.seconds)} at this speed", file=sys.stderr)
        result = run_local(stream, quiet) if client is None else run_on_cluster(client, prediction, stream, quiet)
    if out is not None:
        return result
    result = planned.outputs.split(result, planned.layout.batch, planned.layout.channels)
    if isinstance(volume, tuple) or planned.outputs.channels:
        return result
    return label_result(volume, result, prediction.spec.metadata)


def describe_seconds(seconds: float) -> str:
    """Return a duration in the unit of which it has at least two, and at most 120."""
    unit, count = next(((name, seconds / own) for name, own in _UNITS if seconds >= 2 * own), ("second", seconds))
    return f"{count:.0f} {unit}s"


def _check_plan(
    plan: Any,
    volumes: Mapping[str, Any],
    tile: Any,
    pad: str | None,
    reduce: Reduce,
    known: Sequence[AxisLayout | None],
) -> StreamingPlan:
    """Return a plan that was given; refuse one of other volumes, or beside what it has itself."""
    if not isinstance(plan, StreamingPlan):
        raise refusal(TypeError, f"plan must be what plan_whole returns, got {type(plan).__name__}; fix: plan=None.")
    if tile is not None or pad is not None:
        raise refusal(ValueError, "got tile or pad beside plan, which has both; fix: give them to plan_whole.")
    if reduce is not None and fingerprint(reduce) != plan.reduction:
        raise refusal(ValueError, "got another reduce than plan was made with; fix: give it to plan_whole.")
    layouts = parse_layouts([each.shape for each in volumes.values()], plan.layout.spatial_dims, known)
    size = [length - sum(positions) for length, positions in zip(plan.size, plan.padding, strict=True)]
    plan = replace(plan, layout=known[0]) if known and known[0] else plan  # a plan knows no letters
    planned = plan.layout.shape(plan.batch, plan.channels[0], size)
    first = tuple(next(iter(volumes.values())).shape)
    pairs = zip(layouts, volumes.values(), strict=True)
    if first != planned or tuple(own.batch_and_channels(each.shape)[1] for own, each in pairs) != plan.channels:
        raise refusal(
            ShapeError,
            f"plan is of volumes of another shape.\n  planned  {planned}\n  got      {first}\n"
            "  fix: plan_whole(model, volume.shape).",
        )
    return plan


def _identify(prediction: Prediction, path: Path | None) -> dict[str, str]:
    plan, model, graph = prediction.plan, prediction.model, prediction.plan.labelled.graph
    halo = plan.labelled.halo
    named = {name for name, _ in [*model.named_parameters(), *model.named_buffers()]}
    others = [tensor for name, tensor in graph.constants.items() if name not in named]
    return {
        "path": str(path and path.absolute()),
        "tile or halo": repr((plan.tile, halo, plan.patch_size)),
        "memory or disk": repr((plan.stored, plan.cuts, plan.on_disk)),
        "stored precision": str(graph.stored),
        "pad or reduce": f"{plan.pad} {plan.padding} {plan.reduction}",
        # Hooks, and what is read from around the model, are in it alone.
        "graph of the model": fingerprint([describe_graph(graph.nodes), others]),
        # Summaries and stored values are known by their node, and another version may record other nodes.
        "version of torch": torch.__version__,
    }
