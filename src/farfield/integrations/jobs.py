"""A prediction of a volume by a trained model: planned, tried out on a block, run, stopped and resumed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from farfield._refusals import door
from farfield.integrations.preview import Preview, predict_block
from farfield.integrations.trained_models import OpenedModel
from farfield.nn.tracing import looks_at_a_copy
from farfield.streaming import SeamReport, StreamingPlan, Tiles, find_seams, predict_whole, use_progress_bar
from farfield.streaming.adapt import Reduce
from farfield.streaming.arguments import arrange_volumes
from farfield.streaming.planning import Planner
from farfield.streaming.prediction import Prediction
from farfield.streaming.progress import Saved, find_unfinished
from farfield.volumes import Volume
from farfield.volumes.unfinished import STATE, unfinished_folder

# Positions along each axis of the block that a preview predicts, by the number of spatial dims, and for other numbers.
_PREVIEW, _LEAST = {1: 4096, 2: 256, 3: 64}, 16


class Cancelled(Exception):  # noqa: N818  # no error: what the user asked for
    """A prediction was stopped between two tiles; it goes on when the same one is started again."""


class Progress:
    """A progress bar for `use_progress_bar` that calls a function with the share that is done, and can be stopped.

    Args:
        show: Called after each tile with the share of the work that is done, 0 to 1, and the name of the pass; in the
            thread that predicts.
        is_cancelled: Asked after each tile; the prediction ends with `Cancelled` where it is True.
        total: The work of all tiles.
        initial: That of those that are finished.
    """

    def __init__(
        self, show: Callable[[float, str], object], is_cancelled: Callable[[], bool], total: float, initial: float
    ) -> None:
        self.show, self.is_cancelled, self.total, self.done, self.text = show, is_cancelled, total, initial, ""

    def __enter__(self) -> Progress:
        """Show what is done."""
        self.update(0)
        return self

    def __exit__(self, *error: object) -> None:
        """Leave the bar as it is."""

    def set_description(self, text: str) -> None:
        """Name the pass."""
        self.text = text

    def update(self, units: float) -> None:
        """Add the work of a tile; raise `Cancelled` if the prediction is to end."""
        self.done += units
        self.show(self.done / max(1, self.total), self.text)
        if self.is_cancelled():
            raise Cancelled


class Job:
    """A prediction of one volume by one model, to one path; the same job goes on where an earlier one was stopped.

    Args:
        model: The model, from `open_model`.
        volume: The volume, from `open_volume` or an array with letters for its axes.
        out: The path that is written; its suffix is the format: .zarr, .ome.zarr, .tif, .ome.tif or .npy.
        tile: As of `predict_whole`.
        reduce: As of `predict_whole`; None for the model's own.
        overwrite: Whether what exists at the path is replaced.

    Attributes:
        plan: What will run, known before it does: `print(job.plan)`.
        is_begun: Whether an unfinished prediction of this job is beside the path, with which `run` goes on.

    Raises:
        ValueError, TypeError, FileExistsError, FileNotFoundError, PermissionError: As `predict_whole`.

    Cost:
        Records the network, seconds at most; a model that is scaled by the volume reads it once.

    Example:
        >>> import tempfile, numpy as np
        >>> from farfield import models
        >>> from farfield.integrations.jobs import Job
        >>> from farfield.integrations.trained_models import open_model
        >>> from farfield.volumes import ImageMetadata, Volume
        >>> folder = tempfile.TemporaryDirectory()
        >>> models.unet_care(first_channels=4).save_pretrained(folder.name)
        >>> stack = Volume(np.random.default_rng(0).poisson(50, (8, 32, 32)), ImageMetadata("ZYX"))
        >>> model = open_model("run of farfield fit", folder.name)
        >>> job = Job(model, stack, f"{folder.name}/restored.zarr", tile=Tiles((8, 16, 16)))
        >>> len(job.plan.cores), job.preview({"Z": 3, "Y": 9, "X": 9}).is_exact, job.run().shape
        (4, True, (8, 32, 32))
        >>> folder.cleanup()
    """

    @door("Job")
    def __init__(
        self,
        model: OpenedModel,
        volume: Volume,
        out: str | Path,
        *,
        tile: Tiles | None = None,
        reduce: Reduce = None,
        overwrite: bool = False,
    ) -> None:
        prepared = model.prepare(_name_axes(volume))
        self.network, self.volume, self.pad, own_reduce, self.spatial_dims = prepared
        self.out, self.overwrite, self.reduce = Path(out).expanduser(), overwrite, reduce or own_reduce
        self.tiles = self._by_axis(tile or Tiles())
        _, volumes, _ = arrange_volumes("Job", self.network, self.tiles, self.volume)
        _, saved = find_unfinished(self.out, overwrite, self.network, volumes)
        try:
            self.plan = self._make_plan(self.tiles, self.out, saved)
        except ValueError as error:
            if self.pad is not None or 'pad="reflect"' not in str(error):
                raise
            self.pad = "reflect"
            self.plan = self._make_plan(self.tiles, self.out, saved)
        self.is_begun = saved is not None

    def _by_axis(self, tiles: Tiles) -> Tiles:
        """Return tiles of a number for each axis, which tells the number of spatial dims."""
        if self.spatial_dims is None or tiles.size is None or isinstance(tiles.size, Sequence):
            return tiles
        return replace(tiles, size=[tiles.size] * self.spatial_dims)

    def _make_plan(self, tiles: Tiles, path: Path | None, saved: Saved | None = None) -> StreamingPlan:
        """Plan a call of `predict_whole`, as it does itself: with the letters of the volume, and the path."""

        def plan(network: nn.Module) -> StreamingPlan:
            _, volumes, layouts = arrange_volumes("Job", network, tiles, self.volume)
            shapes = [each.shape for each in volumes.values()]
            return Planner(network, shapes, tiles, self.pad, self.reduce, path, saved, layouts).plan()

        planned: StreamingPlan = looks_at_a_copy(plan, "Job")(self.network)
        return planned

    def run(
        self,
        show: Callable[[float, str], object] | None = None,
        is_cancelled: Callable[[], bool] = lambda: False,
    ) -> Volume:
        """Predict the volume, or go on with it, and return the file, opened for reading, with its voxel size.

        Args:
            show: As of `Progress`; None shows nothing.
            is_cancelled: As of `Progress`.

        Raises:
            Cancelled: If it was stopped; finished tiles are kept, and `run` goes on from them.
        """
        own, self.is_begun = show or (lambda share, text: None), True
        try:
            with use_progress_bar(lambda total, initial: Progress(own, is_cancelled, total, initial)):
                options: dict[str, Any] = {"plan": self.plan, "out": self.out, "overwrite": self.overwrite}
                array = predict_whole(self.network, self.volume, **options, quiet=True)
        finally:
            self.is_begun = (unfinished_folder(self.out) / STATE).is_file()
        return Volume(array, self._predict(self.plan).spec.metadata)

    def _predict(self, plan: StreamingPlan) -> Prediction:
        return Prediction(self.network, plan, self.tiles, self.volume, {})

    @door("preview")
    def preview(self, position: Mapping[str, int]) -> Preview:
        """Predict the block of the volume around a position; nothing is written.

        With its halo a block has all that its numbers depend on, unless a layer sees all positions, as norms and
        attention do: that sees the block and its halo alone, and the numbers are not those of the prediction.

        Args:
            position: Letter of an axis -> index in the volume; the first one of those that are absent.
        """
        dims = self.plan.layout.spatial_dims
        plan = self._make_plan(replace(self.tiles, size=[_PREVIEW.get(dims, _LEAST)] * dims), None)
        return predict_block(self._predict(plan), self.reduce, position)

    def find_seams(self) -> SeamReport:
        """Find out how far tiles of the plan depend on where they are cut, as `streaming.find_seams`."""
        return find_seams(self.network, self.volume, self.plan.tile)


def _name_axes(volume: Volume) -> Volume:
    """Return a volume with a letter for each axis, the last ones Z, Y, X, where its file tells none."""
    axes = volume.metadata.axes
    if set(axes) <= set("TCZYXS") and len(set(axes)) == len(axes):
        return volume
    letters = "TCZYX"[-len(axes) :]
    return Volume(volume.array, replace(volume.metadata, axes=letters).with_axes(letters))
