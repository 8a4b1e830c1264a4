"""Run a plan on volumes: read them, write the output, save the progress, and resume from it."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from farfield._fingerprint import fingerprint
from farfield.nn.devices import device_of, dtype_of
from farfield.streaming.passes import TiledRun
from farfield.streaming.resume import Progress, compute_identity
from farfield.streaming.runner import Stream, TiledVolume, make_progress
from farfield.streaming.spans import Box
from farfield.streaming.store import Store
from farfield.streaming.streaming_plan import StreamingPlan
from farfield.volumes.file_formats import OutputSpec
from farfield.volumes.image_metadata import ImageMetadata
from farfield.volumes.sink import FileOutput, numpy_dtype, output_for
from farfield.volumes.source import VolumeSource, parse_layout
from farfield.volumes.volume import describe_output


def run_plan(
    plan: StreamingPlan,
    model: nn.Module,
    volumes: Mapping[str, Any],
    known: ImageMetadata | None,
    out: Any,
    overwrite: bool,
    quiet: bool,
) -> Any:
    """Predict volumes by a plan; the arguments are those of `predict_whole`.

    Args:
        plan: The plan.
        model: The network.
        volumes: Name -> volume.
        known: Axes and voxel size of the first volume; None if they are not known.
        out: The argument of `predict_whole`.
        overwrite: The argument of `predict_whole`.
        quiet: The argument of `predict_whole`.
    """
    caller, graph = "predict_whole", plan.bind("predict_whole", model)
    sources = read_volumes(plan, model, volumes)
    spec = make_spec(known, plan, next(iter(sources.values())).channels)
    output = output_for(caller, out, spec, next(iter(volumes.values())), overwrite)
    path = str(out) if isinstance(out, str | Path) else ""
    settings = (plan.tile, plan.halo, plan.patch_size, plan.stored, plan.on_disk, path)
    identity = compute_identity(fingerprint(model) if path else "", volumes, settings) | {
        "pad or reduce": f"{plan.pad} {plan.padding} {plan.reduction}",
        # Summaries and stored values are known by their node, and another version may record other nodes.
        "version of torch": torch.__version__,
    }
    progress = make_progress(caller, output, identity, plan.tile, overwrite, plan.stored, plan.on_disk)
    tiled = {name: TiledVolume(source, plan.cores) for name, source in sources.items()}
    stream = Stream(caller, output, progress, [], tiled)
    names, device = list(sources), device_of(model)

    def read(sample: int, volume: int, index: int, box: Box) -> Tensor:
        region = tuple(spans[0] for spans in box[2:])
        return stream.read(names[volume], index, region, sample if plan.samples > 1 else None)

    def write(sample: int, box: Box, numbers: Tensor) -> None:
        write_output(stream, plan, sample, box, numbers)

    folder = output.folder if isinstance(output, FileOutput) else None
    run = TiledRun(graph, plan.patches, Store(caller, graph, plan.on_disk, folder, device), read, write)
    restart_if_lost(caller, progress, run)
    stream.merged = [run]
    passes = [(names[0], partial(run_tile, run, number)) for number in range(plan.samples * len(plan.passes))]
    with closing(run.store), outside_inference(device):
        result = stream.run(passes, quiet)
    return result if out is not None else plan.outputs.split(result, int(plan.layout.batch), plan.layout.channels)


def run_tile(run: TiledRun, number: int, index: int, core: object) -> None:
    """Run a task; the tile's own positions follow from its index."""
    run.run_task(number, index)


def restart_if_lost(caller: str, progress: Progress, run: TiledRun) -> None:
    """Begin anew, with a warning, where what earlier passes stored is not there any more."""
    if progress.summaries and not run.holds(progress.summaries[-1], progress.stage, progress.tile):
        warnings.warn(
            f'{caller}: "{progress.folder}" does not hold any more what passes stored for later ones; all run again.',
            stacklevel=4,
        )
        progress.restart()


@contextmanager
def outside_inference(device: torch.device) -> Iterator[None]:
    """Leave `torch.inference_mode`, whose tensors cannot be used in it and outside, and make tensors on a device."""
    with torch.inference_mode(False), device:
        yield


def read_volumes(plan: StreamingPlan, model: nn.Module, volumes: Mapping[str, Any]) -> dict[str, VolumeSource]:
    """Return what reads the volumes of a plan."""
    return {
        name: VolumeSource(
            array,
            parse_layout("predict_whole", array.shape, plan.layout.spatial_dims),
            device_of(model),
            dtype_of(model),
            padding=plan.padding,
            mode=plan.pad or "reflect",
        )
        for name, array in volumes.items()
    }


def make_spec(known: ImageMetadata | None, plan: StreamingPlan, channels: int) -> OutputSpec:
    """Return the description of the output of a plan.

    Args:
        known: Axes and voxel size of the volume; None if they are not known.
        plan: The plan.
        channels: Number of channels of the first volume.
    """
    output = plan.output
    shape = plan.layout.shape(output.shape[0], output.shape[1], [stop - start for start, stop in output.kept])
    metadata = describe_output(known, plan.layout, channels, output.shape[1], output.scales)
    if plan.outputs.names:
        metadata = replace(metadata, channels=plan.outputs.channel_names())
    return OutputSpec(shape, numpy_dtype(output.dtype), output.written, metadata)


def write_output(stream: Stream, plan: StreamingPlan, sample: int, box: Box, numbers: Tensor) -> None:
    """Write a box of the output, without the positions that stand for padding alone."""
    spans: Sequence[tuple[int, int]] = [spans[0] for spans in box[2:]]
    pairs = zip(spans, plan.output.kept, strict=True)
    part = [(max(start, low), min(stop, high)) for (start, stop), (low, high) in pairs]
    if any(start >= stop for start, stop in part):
        return
    inside = tuple(slice(start - first, stop - first) for (start, stop), (first, _) in zip(part, spans, strict=True))
    target = tuple(
        slice(start - low, stop - low) for (start, stop), (low, _) in zip(part, plan.output.kept, strict=True)
    )
    kept = numbers[(slice(None), slice(None), *inside)]
    shape = plan.layout.shape(kept.shape[0], kept.shape[1], kept.shape[2:])
    leading: list[slice] = [slice(None)] * (len(shape) - len(target))
    if plan.samples > 1:
        leading[0] = slice(sample, sample + 1)
    stream.write((*leading, *target), kept.reshape(shape))
