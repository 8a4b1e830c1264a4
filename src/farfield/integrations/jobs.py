"""A prediction of a volume by a trained model: planned, tried out on a block, run, stopped and resumed."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from farfield._refusals import door, refusal
from farfield.integrations.trained_models import OpenedModel
from farfield.nn.devices import dtype_of
from farfield.nn.tracing import looks_at_a_copy
from farfield.streaming import StreamingPlan, Tiles, predict_whole, use_progress_bar
from farfield.streaming._plan_whole import plan_volumes
from farfield.streaming.adapt import Reduce
from farfield.streaming.arguments import arrange_volumes, parse_tiles
from farfield.streaming.graph import Info
from farfield.streaming.places import RecordedNetwork
from farfield.streaming.prediction import Prediction
from farfield.streaming.progress import find_unfinished
from farfield.streaming.skipping import choose_mask, open_mask
from farfield.volumes import ImageMetadata, Volume
from farfield.volumes.aliasing import find_shared
from farfield.volumes.place import Place
from farfield.volumes.sink import to_numpy
from farfield.volumes.source import Region, VolumeSource
from farfield.volumes.unfinished import STATE, unfinished_folder

_Result = TypeVar("_Result")
# Positions along each axis of the block that a preview predicts, by the number of spatial dims, and for other numbers.
_BLOCK, _LEAST = {1: 4096, 2: 256, 3: 64}, 16


class Job:
    """A prediction of one volume by one model to one path; the same job goes on where an earlier one was stopped.

    Args:
        model: The model, from `open_network` or `open_model`.
        volume: The volume, with a letter for each axis; a tuple for a model of several inputs.
        out: The path that is written: .zarr, .ome.zarr, .tif, .ome.tif or .npy.
        tile: As of `predict_whole`.
        pad: As of `predict_whole`; None pads where the network takes no other size, by reflection.
        reduce: As of `predict_whole`; None for the model's own.
        overwrite: Whether what exists at the path is replaced.
        mask: As of `predict_whole`.

    Attributes:
        text: What the model is.
        given: The volume, as it was given.
        network: The network, as the model prepared it for the volume.
        volume: What it takes.
        mask: Where the volume is valid, as `predict_whole` takes it; alpha is no part of `volume`.
        plan: What will run, known before it does: `print(job.plan)`.
        is_begun: Whether an unfinished prediction of this job is beside the path, with which `run` goes on.

    Raises:
        ValueError, TypeError, OSError: As `predict_whole`, before anything is written.

    Cost:
        Records the network, seconds at most; a model that is scaled by the volume reads it once.

    Example:
        >>> from farfield.integrations.trained_models import open_model
        >>> from farfield.volumes import open_volume
        >>> model = open_model("TorchScript file", "network.pt")  # doctest: +SKIP
        >>> Job(model, open_volume("stack.tif"), "restored.zarr").run()  # doctest: +SKIP
    """

    @door("Job")
    def __init__(
        self,
        model: OpenedModel,
        volume: Volume | tuple[Volume, ...],
        out: str | Path,
        *,
        tile: Tiles | None = None,
        pad: str | None = None,
        reduce: Reduce = None,
        overwrite: bool = False,
        mask: Any = None,
    ) -> None:
        self.text = model.text
        volumes = volume if isinstance(volume, tuple) else (volume,)
        self.given = volume
        volume, self.mask = choose_mask(mask, volume)
        self._prepare = partial(model.prepare, *(volume if isinstance(volume, tuple) else (volume,)))
        self.out, self.overwrite = Path(out).expanduser(), overwrite
        self.reduce = model.reduce if reduce is None else reduce
        shared = next(filter(None, (find_shared(self.out, each.array) for each in volumes)), None)
        if shared is not None:
            text = f"the output and the volume are both in {shared}, which is never written over; fix: another path."
            raise refusal(ValueError, text)
        self.network, self.volume = self._prepare()
        self.tiles, self.pad = parse_tiles(tile), pad
        try:
            self.plan, self.is_begun = self._make_plan(self.tiles, self.out)
        except ValueError as error:
            if pad is not None or 'pad="reflect"' not in str(error):
                raise
            self.pad = "reflect"
            self.plan, self.is_begun = self._make_plan(self.tiles, self.out)

    def _make_plan(self, tiles: Tiles, path: Path | None = None) -> tuple[StreamingPlan, bool]:
        """Plan a call as `predict_whole` does, by the letters of the volume and the path; tell whether it is begun."""

        def plan(network: nn.Module) -> tuple[StreamingPlan, bool]:
            known, arrays, layouts = arrange_volumes("Job", network, tiles, self.volume)
            masks = {} if self.mask is None else {"mask": open_mask(self.mask, self.volume, (known, arrays, layouts))}
            _, saved = find_unfinished(path, self.overwrite, network, arrays | masks)
            infos = [Info(tuple(each.shape), dtype_of(network)) for each in arrays.values()]
            volumes = list(zip(infos, layouts, strict=True))
            planned = plan_volumes(network, volumes, tiles, self.pad, self.reduce, path, saved)
            return planned, saved is not None

        return self._look(plan)

    def _look(self, function: Callable[[nn.Module], _Result]) -> _Result:
        """Call a function with a copy of the network, as `predict_whole` does: of a scripted one its operations."""
        result: _Result = looks_at_a_copy(function, "Job", scripted=True)(self.network)
        return result

    def run(self, show: Callable[[float, str], object] = lambda share, text: None) -> Volume:
        """Predict the volume, or go on with it, and return the file, opened for reading, with its voxel size.

        Args:
            show: Called after each tile with the share of the work that is done, 0 to 1, and the name of the pass. An
                error that it raises ends the prediction, and finished tiles are kept.
        """
        if not self.is_begun:  # the volume may have other numbers now, and grey levels
            self.network, self.volume = self._prepare()
            self.plan, self.is_begun = self._make_plan(replace(self.tiles, size=self.plan.tile), self.out)
        options: dict[str, Any] = {"plan": self.plan, "out": self.out, "overwrite": self.overwrite, "quiet": True}
        try:
            with use_progress_bar(lambda total, initial: _Bar(total, initial, show)):
                array = predict_whole(self.network, self.volume, mask=self.mask, **options)
        finally:
            self.is_begun = (unfinished_folder(self.out) / STATE).is_file()
        return Volume(array, self._look(lambda network: self._predict(network, self.plan).spec.metadata))

    @door("Job.measure")
    def measure(self) -> float:
        """Return about how many seconds it takes, as its tiles of a region do, which are checked; 0 if none is."""

        def measure(network: nn.Module) -> float:
            prediction = self._predict(network, self.plan)
            with prediction.surroundings():
                prediction.check_region(self.plan.threads or torch.get_num_threads(), warnings.warn)
            return prediction.seconds

        return self._look(measure)

    def _predict(self, network: nn.Module, plan: StreamingPlan) -> Prediction:
        return Prediction(network, plan, self.tiles, self.volume, {}, mask=self.mask, path=self.out)

    @door("preview")
    def preview(self, position: Mapping[str, int]) -> tuple[Volume, list[str]]:
        """Predict the block around a position, with its halo as if that were the volume; nothing is written.

        Args:
            position: Letter of an axis -> index in the volume; 0 for those that are absent.

        Returns:
            The block, at its place, in positions where the voxel size is not known. And the layers that will see all
            positions and here see the block alone, as norms and attention: without any, the numbers are those of the
            whole prediction, if nothing else in the network depends on the size or place of the whole, as coordinates
            and interpolation with `align_corners` do.
        """
        dims = len(self.plan.size)
        plan, _ = self._make_plan(replace(self.tiles, size=[_BLOCK.get(dims, _LEAST)] * dims))

        def open_source(network: nn.Module) -> tuple[ImageMetadata | None, VolumeSource]:
            prediction = self._predict(network, plan)
            return prediction.arranged[0], next(iter(prediction.sources.values()))

        known, source = self._look(open_source)
        if known is None or None in plan.places:
            raise refusal(ValueError, "the output has other axes than the volume; fix: start without a preview.")
        place = [
            position.get(letter, 0) + low for letter, (low, _) in zip(known.axes[-dims:], plan.padding, strict=True)
        ]
        core = next(each for each in plan.cores if all(a <= at < b for (a, b), at in zip(each, place, strict=True)))
        region, sample = _add_halo(core, plan), 0
        for letter, length in plan.layout.samples:
            sample = sample * length + position.get(letter, 0)
        grid = source.read(region, sample if plan.samples > 1 else None)
        whole = tuple(stop - start for start, stop in region)
        result = predict_whole(self.network, grid, tile=whole, reduce=self.reduce, quiet=True)
        names = dict.fromkeys(name for each in plan.passes for name in each.summarizes)
        return _take_core(result, known, plan, core, region), list(names)


class _Bar:
    """A progress bar that calls a function."""

    def __init__(self, total: float, done: float, show: Callable[[float, str], object]) -> None:
        self.total, self.done, self.show, self.text = total, done, show, ""

    def __enter__(self) -> _Bar:
        return self

    def __exit__(self, *error: object) -> None:
        """Leave the function as it is."""

    def set_description(self, text: str) -> None:
        self.text = text

    def update(self, units: float) -> None:
        self.done += units
        self.show(self.done / self.total, self.text)


def _add_halo(core: Region, plan: StreamingPlan) -> Region:
    """Return what a tile reads, out to multiples of the strides: a region that the network takes as it is."""
    strides = RecordedNetwork(plan.labelled.graph, plan.size).strides
    return tuple(
        (max(0, (start - before) // stride * stride), min(length, -(-(stop + after) // stride) * stride))
        for (start, stop), before, after, stride, length in zip(core, *plan.halo, strides, plan.size, strict=True)
    )


def _take_core(result: Tensor, known: ImageMetadata, plan: StreamingPlan, core: Region, region: Region) -> Volume:
    """Return the own positions of a tile from the output of what it reads, without those that stand for padding."""
    letters, places = known.axes[-len(core) :], {}
    index: list[slice] = []
    for axis, (letter, own) in enumerate(zip(letters, plan.places, strict=True)):
        if own is None:  # which has no preview
            continue
        (start, stop), (low, high), first = core[axis], plan.padding[axis], region[axis][0]
        place, (scale, offset) = own
        begin, end = (abs((at - first) / scale) for at in (max(start, low), min(stop, plan.size[axis] - high)))
        index.append(slice(int(begin), math.ceil(end)))
        places[letter] = Place(scale, offset + (int(begin) - plan.kept[place - 2][0]) * scale + first)
    numbers = to_numpy(result[0])[(slice(None), *index)]
    placed = replace(known, spacing=dict.fromkeys(letters, 1.0) | dict(known.spacing)).placed(places)
    if len(numbers) == 1:
        return Volume(numbers[0], placed.with_axes(letters))
    return Volume(numbers, replace(placed, channels=()).with_axes("C" + letters))
