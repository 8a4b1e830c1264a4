"""What a process needs to run tasks of `predict_whole`; it can be sent to another one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, fields, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from farfield._fingerprint import fingerprint
from farfield._refusals import refusal
from farfield.nn.devices import device_of
from farfield.ops.modes import autocast_dtype, use_threads, without_tf32
from farfield.streaming.adapt import one_grid
from farfield.streaming.arguments import Tiles, arrange_volumes, axis_spans
from farfield.streaming.check import RegionCheck, run_check
from farfield.streaming.cuts import scale_seconds
from farfield.streaming.masks import mask_plan
from farfield.streaming.passes import Skips, Store, TiledRun
from farfield.streaming.plan import StreamingPlan, own_box
from farfield.streaming.progress import Stream
from farfield.streaming.skipping import find_skipped, layout_of_mask, open_mask
from farfield.streaming.spans import Box, box_shape
from farfield.volumes.image_metadata import ImageMetadata
from farfield.volumes.levels import OutputSpec, chunk_lengths
from farfield.volumes.scaling import Scale
from farfield.volumes.sink import ArrayOutput, FileOutput, numpy_dtype
from farfield.volumes.source import AxisLayout, Region, VolumeSource, index_within, overlap, parse_layout, size_of
from farfield.volumes.tiff_output import choose_outside
from farfield.volumes.volume import describe_output


@dataclass
class Prediction:
    """A call of `predict_whole`: the network, its plan, and the volume.

    Attributes:
        model: The network.
        plan: Its plan, bound to it.
        tiles: The argument `tile`.
        volume: The argument, from which `arranged` follows.
        identity: Fingerprints of all that the result depends on.
        shared: Whether several processes run its tasks.
        mask: The argument.
        fill: The argument.
        path: The argument `out`, where it is a path.
        scale: The argument, of each volume.
        found: Which tiles are skipped, if that is known before the mask is read.
        autocast: The dtype in which autocast computed where the call was made.
    """

    model: nn.Module
    plan: StreamingPlan
    tiles: Tiles
    volume: Any
    identity: dict[str, str]
    shared: bool = False
    mask: Any = None
    fill: float = 0.0
    path: Path | None = None
    scale: Sequence[Scale | None] = ()
    found: np.ndarray | None = None
    autocast: torch.dtype | None = None
    caller = "predict_whole"

    def __post_init__(self) -> None:
        # About how long it takes, as the check of a region shows; 0 where it is not known.
        self.seconds = 0.0
        self.autocast = self.autocast or autocast_dtype(torch.empty(0, device=device_of(self.model)))

    @cached_property
    def arranged(self) -> tuple[ImageMetadata | None, dict[str, Any], list[AxisLayout | None]]:
        """What is known of the volume, its arrays by name, and their axes."""
        return arrange_volumes("predict_whole", self.model, self.tiles, self.volume)

    @cached_property
    def opened_mask(self) -> Any:
        return open_mask(self.mask, self.volume, self.arranged)

    @cached_property
    def sources(self) -> dict[str, VolumeSource]:
        """The volumes, as they are read, and the mask."""
        _, volumes, layouts = self.arranged
        spatial_dims, padding, mode = self.plan.layout.spatial_dims, self.plan.padding, self.plan.pad or "reflect"
        graph = self.plan.labelled.graph
        device, dtype = device_of(self.model), graph.info(graph.inputs[0]).dtype
        sources = {
            name: VolumeSource(
                array, known or parse_layout(array.shape, spatial_dims), device, dtype, padding=padding, mode=mode
            )
            for (name, array), known in zip(volumes.items(), layouts, strict=True)
        }
        for source, scale in zip(sources.values(), self.scale, strict=False):
            source.scale = scale
        if self.mask is not None:
            mask, shape = self.opened_mask, next(iter(sources.values())).shape
            layout = layout_of_mask(mask, self.plan.layout, shape, self.plan.samples < self.plan.batch)
            # Padding is valid where the border is, so that a mask of all positions changes nothing.
            mode = "reflect" if mode == "reflect" else "replicate"
            sources["mask"] = VolumeSource(mask, layout, device, torch.bool, padding=padding, mode=mode)
        return sources

    @cached_property
    def masked(self) -> StreamingPlan:
        """The plan by which tiles run: with the mask."""
        return self.plan if self.mask is None else mask_plan(self.plan, self.model, self.outside or 0)

    @cached_property
    def skipped(self) -> np.ndarray:
        """Which tiles each pass skips, `(samples, passes, tiles)`."""
        return find_skipped(self.masked, self.sources["mask"], self.plan.samples) if self.found is None else self.found

    @cached_property
    def spec(self) -> OutputSpec:
        plan, layout, (batch, channels, *_) = self.plan, self.plan.output_layout, self.plan.output_shape
        shape, dims = layout.shape(batch, channels, size_of(plan.kept)), len(plan.kept)
        # The part that the first tile writes.
        first = plan.labelled.core(plan.labelled.layouts[plan.labelled.graph.output], plan.cores[0])[2:]
        written = [
            min(spans[0][1] - spans[0][0], high - low) for spans, (low, high) in zip(first, plan.kept, strict=True)
        ]
        box = [*shape[: len(shape) - dims], *written]
        if plan.samples > 1:
            box[: layout.batch] = [1] * layout.batch
        given = next(iter(self.sources.values())).channels
        metadata = describe_output(self.arranged[0], layout, given, channels, plan.places, dims)
        if plan.outputs.names:
            metadata = replace(metadata, channels=plan.outputs.channel_names())
        spec = OutputSpec(shape, numpy_dtype(plan.output_dtype), tuple(box), metadata)
        nodata = None if self.mask is None else choose_outside(self.path, spec)
        if nodata is not None and plan.reduction == fingerprint("argmax") and nodata < _count_classes(plan):
            nodata = None  # with 256 classes each number of a byte is one
        return spec._replace(metadata=replace(metadata, nodata=nodata))

    @property
    def outside(self) -> float | None:
        """What the output has where the mask is False, if the file states it."""
        return self.spec.metadata.nodata

    @property
    def tile_bytes(self) -> int:
        """The most memory that a task takes, beside the parameters of the network."""
        return self.masked.tile_bytes

    def __str__(self) -> str:
        """Return the plan, and how many tiles are skipped, as text."""
        if self.mask is None:
            return str(self.plan)
        empty = self.skipped[:, -1]
        return f"{self.masked}\n{empty.sum():,} of {empty.size:,} tiles have no valid position: skipped"

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what follows from the arguments."""
        return {each.name: getattr(self, each.name) for each in fields(self)}

    def sent(self, convert: Callable[[str, Any], Any]) -> Prediction:
        several = self.volume if isinstance(self.volume, tuple) else None
        sent = tuple(convert(f"volume-{each}", own) for each, own in enumerate(several or (self.volume,)))
        mask, found = (None, None) if self.mask is None else (convert("mask", self.mask), self.skipped)
        return replace(self, volume=sent if several else sent[0], mask=mask, found=found)

    def bind(self) -> Prediction:
        """Return the prediction with its plan bound to the network, after it was sent."""
        with self._autocast():
            return replace(self, plan=self.plan.bind("predict_whole", self.model))

    def connect(self, output: FileOutput | ArrayOutput) -> tuple[Stream, TiledRun]:
        """Return what reads boxes of the volumes and writes those of the output, and the tasks in between."""
        plan, masked = self.plan, self.masked
        if self.shared:
            _check_chunks(masked, self.spec)
        tiled = {name: (source, plan.cores) for name, source in self.sources.items()}
        planned = {each: getattr(plan, each) for each in ("stored", "cuts", "on_disk", "threads")}
        planned |= {"positions": plan.tile, "shared": self.shared}
        stream = Stream(output, self.identity, planned, tiled)
        folder = output.folder if isinstance(output, FileOutput) else None
        store = Store(masked, folder, shared=self.shared)

        def read(sample: int, volume: int, index: int, box: Box) -> Tensor:
            return self.read_box(lambda name, *place: stream.read(name, index, *place), sample, volume, box)

        def locate(sample: int, box: Box) -> tuple[slice, ...]:
            both = overlap([spans[0] for spans in box[2:]], plan.kept)
            if both is None:  # it stands for padding
                return ()
            leading = [slice(None)] * (len(self.spec.shape) - len(both))
            if plan.samples > 1:
                leading[: plan.layout.batch] = plan.layout.index_sample(sample)
            return (*leading, *index_within(both, plan.kept))

        def write(sample: int, box: Box, numbers: Tensor | None) -> None:
            if numbers is None:
                if isinstance(output, FileOutput) and self.outside is None:  # of zeros from the start
                    return
                numbers = torch.full(box_shape(box), self.outside or 0, dtype=plan.output_dtype)
            spans = [spans[0] for spans in box[2:]]
            if (both := overlap(spans, plan.kept)) is None:
                return
            part = numbers[(slice(None), slice(None), *index_within(both, spans))]
            shape = plan.output_layout.shape(part.shape[0], part.shape[1], part.shape[2:])
            stream.write(locate(sample, box), part.reshape(shape))

        skips: Skips = (lambda *_: False) if self.mask is None else self.skipped.item
        run = TiledRun(masked, store, read, write, stream.parts_of, skips, locate)
        run.surroundings = self.surroundings
        return stream, run

    @contextmanager
    def surroundings(self) -> Iterator[None]:
        """Leave `torch.inference_mode`, whose tensors cannot be used in it and outside; make tensors on a device."""
        device = device_of(self.model)
        # Each call of torch within a device takes microseconds longer.
        on_device = nullcontext() if device == torch.get_default_device() else device
        with torch.inference_mode(False), self._autocast(), on_device:
            yield

    def _autocast(self) -> AbstractContextManager[None]:
        """Return the context in which a call was made that was sent."""
        device = device_of(self.model)
        return nullcontext() if self.autocast is None else torch.autocast(device.type, self.autocast)

    def check_region(self, threads: int, warn: Callable[[str], object]) -> None:
        """Compare tiles with the network itself on a region of the volume; warn if that is not possible."""
        plan, model = self.plan, self.model
        # The first and the last sample are one batch.
        shape = (min(plan.samples, 2) * plan.batch // plan.samples, *plan.size)
        problem = plan.check if plan.cut else ""
        if isinstance(check := plan.check, RegionCheck):
            # Tiles are compared with the network as it is, without the mask, on a volume that is filled.
            read = partial(self.read_box, lambda name, region, sample: self.sources[name].read(region, sample))

            def note_seconds(seconds: float) -> None:
                self.seconds = scale_seconds(seconds, check.plan, plan)

            with torch.no_grad(), use_threads(threads), without_tf32():
                problem = run_check(
                    check,
                    model,
                    lambda output: one_grid(model, shape, output, plan.outputs.taken)[0],
                    plan.size,
                    read,
                    plan.samples,
                    warn,
                    note_seconds,
                )
        if problem:
            warn(f"predict_whole: tiles are not checked: {problem}.")

    def read_box(self, read: Callable[[str, Region, int | None], Tensor], sample: int, volume: int, box: Box) -> Tensor:
        """Read a box of a volume, of a sample that runs by itself, filled where the mask is False."""
        names = list(self.sources)
        place = tuple(spans[0] for spans in box[2:]), sample if self.plan.samples > 1 else None
        grid = read(names[volume], *place)
        if self.mask is not None and names[volume] != "mask":
            grid = grid.where(read("mask", *place), self.fill)
        # All channels are read, as a checksum is of all.
        return grid[tuple(slice(*spans[0]) for spans in box[:2])]


def _check_chunks(plan: StreamingPlan, spec: OutputSpec) -> None:
    """Refuse tiles that write parts of chunks: two processes would overwrite each other's."""
    kept = plan.kept
    first, chunks = plan.cores[0], chunk_lengths(spec)[len(spec.shape) - len(kept) :]
    for axis, pair in enumerate(zip(plan.size, plan.tile, strict=True)):
        for span in axis_spans(*pair):
            box = own_box(plan, plan.labelled.graph.output, (*first[:axis], span, *first[axis + 1 :]))
            starts = [spans[0][0] - low for spans, (low, _) in zip(box[2:], kept, strict=True)] if box else []
            if any(start > 0 and start % chunk for start, chunk in zip(starts, chunks, strict=False)):
                raise refusal(
                    ValueError,
                    "tiles do not write whole chunks, and processes would overwrite each other's: with a mask or "
                    'statistics="tile", pad= moves them; fix: a volume of a size that the strides divide, or one '
                    "process.",
                )


def _count_classes(plan: StreamingPlan) -> int:
    """Return of how many channels the labels of an output are the places."""
    graph = plan.labelled.graph
    *_, scores = (graph.info(node.inputs[0]) for node in graph.nodes if node.op == "aten.argmax.default")
    return scores.shape[1]
