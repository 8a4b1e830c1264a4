"""Plan a prediction in tiles: record the network, choose the tiles and what is stored, and describe the output."""

from __future__ import annotations

import math
import shutil
from bisect import bisect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from farfield._checks import ShapeError, check_network, unknown
from farfield._fingerprint import fingerprint
from farfield._refusals import door, is_refusal, refusal
from farfield.nn.devices import device_of, dtype_of, free_bytes
from farfield.nn.network_copy import CannotCopyError
from farfield.nn.scripted_network import ScriptError
from farfield.nn.tracing import looks_at_a_copy
from farfield.streaming.adapt import MeanOverFlips, Outputs, Reduce, ReductionError, check_reduction, one_grid
from farfield.streaming.arguments import (
    OF_WINDOWS,
    Tiles,
    check_arguments,
    cut_axes,
    parse_layouts,
    parse_tiles,
    refuse_large_summary,
    refuse_training,
    round_up_tile,
    spatial_dims_of,
)
from farfield.streaming.graph import Info, RecordingError, Value
from farfield.streaming.labels import GraphError, LabelledGraph
from farfield.streaming.patches import make_patch_plan
from farfield.streaming.plan import GraphPlan, PatchPlan, find_stored, fit_stored, make_graph_plan
from farfield.streaming.progress import Saved
from farfield.streaming.readings import find_reading, refuse_axes
from farfield.streaming.record import record_network
from farfield.streaming.recording import Recording, plan_check
from farfield.streaming.spans import axes_of
from farfield.streaming.streaming_plan import StreamingPlan, plan_output
from farfield.volumes.source import MODES, AxisLayout

# The share of the free memory that tiles and stored values may take, each; and of the free disk, stored values.
_MEMORY_SHARE, _DISK_SHARE = 0.25, 0.5
# A length that strides divide, and windows of common models.
_DIVISIBLE = 2**6 * 3 * 5 * 7


@partial(looks_at_a_copy, scripted=True)
@door("plan_whole", OF_WINDOWS)
def plan_whole(
    model: nn.Module,
    shape: Sequence[int] | Sequence[Sequence[int]],
    *,
    tile: int | Sequence[int | None] | Tiles | None = None,
    pad: str | None = None,
    reduce: Reduce = None,
) -> StreamingPlan:
    """Plan a call of `predict_whole`, which also prints its plan before it starts.

    The network is recorded on tensors without numbers, at the volume's own size; nothing of it runs. A plan can be
    pickled, and `predict_whole(…, plan=plan)` runs it on any volume of the shape.

    Args:
        model: As in `predict_whole`.
        shape: Shape of the volume; a tuple of shapes for a network of several inputs.
        tile: As in `predict_whole`. Values are planned on disk if `Tiles(disk=…)` allows it: a plan knows no path.
        pad: As in `predict_whole`.
        reduce: As in `predict_whole`.

    Returns:
        The plan; `print(plan)` prints what `predict_whole` prints.

    Raises:
        TypeError: If a volume is passed in place of its shape, if tile or halo have numbers that are no integers, if
            `reduce` is no function, or if the network does not return one grid, or several of one size.
        ValueError: If the model is in training mode, does not take the volume's size, or has attention whose summary,
            or keys and values, take too much memory; if shapes do not fit (`ShapeError`); if an operation does not run
            in tiles (`GraphError`): the text has its name and the module that ran it.
        LookupError: If `pad` or `reduce` is unknown.

    Cost:
        Seconds at most, and no memory that grows with the volume.

    Example:
        >>> from torch import Tensor, nn
        >>> from farfield.nn import GridAttention
        >>> from farfield.streaming import plan_whole
        >>> attention = GridAttention(8, "siamese")
        >>> net = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), attention, nn.Conv2d(8, 1, 3, padding=1))
        >>> plan = plan_whole(net.eval(), (1000, 1000), tile=256)
        >>> len(plan.cores), len(plan.passes), plan.passes[0].summarizes, plan.passes[0].halo.before
        (16, 2, ('1',), (1, 1))
        >>> plan.stored_bytes, plan.disk_bytes, round(plan.recomputed, 2)
        (32000000, 0, 1.0)
    """
    several = isinstance(shape, tuple | list) and bool(shape) and not any(isinstance(each, int) for each in shape)
    shapes: list[Any] = list(shape) if several else [shape]
    for each in shapes:
        if not isinstance(each, Sequence) or isinstance(each, str):
            given = f"a volume of shape {tuple(each.shape)}" if hasattr(each, "shape") else f"{each!r:.60}"
            raise refusal(TypeError, f"shape must be numbers, got {given}; fix: plan_whole(model, volume.shape).")
    check_network(model, "model", "plan_whole(model, …)")
    return Planner(model, shapes, parse_tiles(tile), pad, reduce).plan()


@dataclass
class Planner:
    """Plans a call of `predict_whole` or `plan_whole`, of which these are the arguments."""

    model: Any
    shapes: Sequence[Sequence[int]]
    tiles: Tiles
    pad: str | None
    reduce: Reduce
    # The path of the output, and what an unfinished prediction there was planned with.
    path: Path | None = None
    saved: Saved | None = None
    # Of volumes with letters.
    known_layouts: Sequence[AxisLayout | None] = ()
    # That of the volumes as the network takes them; None if these are not known.
    dtype: torch.dtype | None = None
    # Whether it is tried how a volume is read.
    is_trial: bool = False
    # Known once the network is recorded.
    outputs: Outputs = field(default_factory=Outputs, init=False)
    # Number of samples, size, and whether it is reduced -> the network on volumes of these.
    recordings: dict[tuple[int, tuple[int, ...], bool], Recording] = field(default_factory=dict, init=False)

    def plan(self) -> StreamingPlan:
        """Make the plan."""
        with self._explained():
            return self._plan()

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Name the network that does not run in tiles."""
        try:
            yield
        except GraphError as error:
            raise refusal(GraphError, f"{type(self.model).__name__} does not run in tiles: {error}") from error

    def _plan(self) -> StreamingPlan:
        self._check()
        # One on a size that the strides divide states the padding.
        sizes = [(_DIVISIBLE,) * len(self.size), self.size] if self.pad else []
        probe = self._record_first(self.batch, sizes)
        strides = probe.strides if probe and self.pad else (1,) * len(self.size)
        # Half on each end, as in CARE.
        missing = [-length % stride for length, stride in zip(self.size, strides, strict=True)]
        padding = tuple((each // 2, each - each // 2) for each in missing)
        size = tuple(length + each for length, each in zip(self.size, missing, strict=True))
        # Of a network that took no size, it is not known.
        mixed = self.batch > 1 and (bool(self.pad and probe is None) or self._mixes_samples(size))
        if mixed and "Z" in dict(self.layouts[0].samples):
            raise refusal(
                ValueError,
                f"layers of {type(self.model).__name__} mix samples, so planes one after the other are not its result "
                'on all of them; fix: one plane at a time, volume.crop({"Z": (0, 1)}), or all as one batch, '
                "numpy.asarray(volume)[:, None].",
            )
        batch, samples = (self.batch, 1) if mixed else (1, self.batch)
        recording = self._record_whole(batch, size, probe)
        tile = None if self.tiles.size is None else round_up_tile(self.tiles.size, size, recording.strides)
        plan, on_disk = self._plan_saved(recording, tile) or self._choose_tiles(recording, tile)
        self._refuse_large_summaries(plan.labelled)
        if self.tiles.statistics == "tile" and plan.cut:
            plan = self._plan_patches(plan, batch)
        output = plan_output(recording, plan, padding, samples)
        if any(map(any, padding)) and not isinstance(plan, PatchPlan):
            plan = replace(plan, kept=output.kept)
        return StreamingPlan(
            layout=self.layouts[0],
            channels=self.channels,
            padding=padding,
            pad=self.pad,
            samples=samples,
            passes=plan.passes,
            output=output,
            outputs=self.outputs,
            on_disk=on_disk and bool(plan.stored),
            reduction=fingerprint(self.reduce),
            check=plan_check(partial(self._record, batch, reduced=False), plan, recording.strides, samples),
            graph_plan=plan,
        )

    def _check(self) -> None:
        model = self.model
        self.network = model.network if isinstance(model, MeanOverFlips) else model
        refuse_training(self.network)
        if self.pad is not None and self.pad not in MODES:
            raise unknown("pad", self.pad, MODES)
        check_reduction(self.reduce)
        check_arguments(self.network, len(self.shapes))
        first = next(iter(self.known_layouts), None)
        dims = spatial_dims_of(self.network, self.tiles.size, self.shapes[0], first)
        try:
            self.layouts = parse_layouts(self.shapes, dims, self.known_layouts)
        except ShapeError:
            self._name_reading(dims)
            raise
        pairs = [own.batch_and_channels(shape) for own, shape in zip(self.layouts, self.shapes, strict=True)]
        self.batch, self.channels = pairs[0][0], tuple(channels for _, channels in pairs)
        self.size = tuple(self.shapes[0][len(self.shapes[0]) - dims :])
        halo = self.tiles.halo
        self.halo = (halo,) * dims if isinstance(halo, int) else halo
        if self.halo is not None and len(self.halo) != dims:
            raise refusal(
                ShapeError,
                f"halo must be one number, or one for each of {dims} spatial dims, got {halo!r}; fix: "
                f"halo={max(self.halo, default=0)}.",
            )

    def _record(self, batch: int, size: tuple[int, ...], *, reduced: bool = True) -> Recording:
        """Record the network on volumes of this size; raise ValueError if it does not take them."""
        key = batch, size, reduced and self.reduce is not None
        if key in self.recordings:
            return self.recordings[key]
        dtype = self.dtype or dtype_of(self.model)
        volumes = [Info((batch, own, *size), dtype) for own in self.channels]

        def finish(output: Any) -> Tensor:
            reduce = self.reduce if reduced else self.outputs.taken
            grid, self.outputs = one_grid(self.model, volumes[0].shape, output, reduce)
            return grid

        try:
            graph = record_network(self.model, volumes, finish)
        except (RecordingError, CannotCopyError, ScriptError) as error:
            raise GraphError(str(error)) from error
        except (RuntimeError, IndexError, ValueError, TypeError, AssertionError) as error:
            if is_refusal(error):
                raise
            if str(error).startswith("MeanOverFlips: "):  # which runs in the function that was called
                raise refusal(type(error), str(error).removeprefix("MeanOverFlips: ")) from error
            raise refusal(
                ValueError, f"{type(self.model).__name__} does not take a grid of size {size}: {error}"
            ) from error
        record = partial(self._record, batch, reduced=reduced)
        self.recordings[key] = Recording(graph, size, self.halo, record)
        return self.recordings[key]

    def _record_first(self, batch: int, sizes: Sequence[tuple[int, ...]]) -> Recording | None:
        """Record the network on the first of these sizes that it takes."""
        for size in sizes:
            with suppress(ValueError):
                return self._record(batch, size)
        return None

    def _mixes_samples(self, size: tuple[int, ...]) -> bool:
        """Whether the result of a sample depends on others, on their number, or on its place among them."""
        several, one = (self._record_first(batch, [size]) for batch in (self.batch, 1))
        return several is None or one is None or not several.runs_as(one)

    def record_calls(self) -> Recording:
        """Record two samples on a size that strides divide, or on the volume's if the network does not take that.

        Where the size is large, no window is as long as a grid.
        """
        self._check()
        first = self._record_first(2, [(_DIVISIBLE,) * len(self.size)])
        with self._explained():
            return first or self._record_whole(2, self.size, None)

    def _record_whole(self, batch: int, size: tuple[int, ...], probe: Recording | None) -> Recording:
        """Record the network on the whole volume; an error has sizes that it takes if the strides are why."""
        try:
            return self._record(batch, size)
        except (GraphError, ReductionError):
            raise
        except ValueError as error:
            self._name_reading(len(size))
            refuse_axes(self.network, self.channels, size, bool(self.layouts[0].batch), error)
            if not self.pad:
                probe = self._record_first(1, [(_DIVISIBLE,) * len(size)])
            strides = probe.strides if probe else ()
            if any(length % stride for length, stride in zip(size, strides, strict=False)):
                multiples = " × ".join(map(str, strides))
                raise refusal(
                    ValueError, f'{error}\n  fix: a size that {multiples} divides, or pad="reflect".'
                ) from error
            raise

    def _name_reading(self, dims: int) -> None:
        """Refuse a volume that the network takes with other axes, and name these; return where none are found."""
        shape = tuple(self.shapes[0])
        if self.is_trial or len(self.shapes) > 1 or any(self.known_layouts) or 0 in shape:
            return
        found = find_reading(self.network, shape, dims, self.tiles.size, self._plan_reading)
        if found is not None:
            raise refusal(
                ValueError,
                f"{type(self.model).__name__} does not take a volume of shape {shape} with {dims} spatial dims, and "
                f"takes it as {found[0]}\n  fix: {found[1]}, if these are its axes.",
            )

    def _plan_reading(self, shape: tuple[int, ...], tile: Any) -> tuple[int, ...]:
        """Return the axes that can be cut of a volume that is read otherwise; raise the error of a call with it."""
        trial = replace(self, shapes=[shape], tiles=replace(self.tiles, size=tile), saved=None, is_trial=True)
        trial._plan()
        one = trial._record_first(1, [trial.size])
        return one.cuttable if one else ()

    def _plan_patches(self, plan: GraphPlan, batch: int) -> PatchPlan:
        """Plan how the network runs on patches, so that norms, means and pooling see what a tile reads."""
        along = axes_of(plan.labelled.layouts[plan.labelled.graph.output])
        if self.outputs.has_answers or not set(plan.cut) <= set(along):
            raise GraphError(
                'what it returns sums over the whole, and statistics="tile" sees what a tile reads; fix: '
                'Tiles(…, statistics="whole")'
            )
        try:
            patches = make_patch_plan(plan.labelled, plan.tile, partial(self._record, batch))
        except GraphError:
            raise
        except ValueError as error:
            raise refusal(
                ValueError,
                f'{error}\n  fix: Tiles(…, statistics="whole"), as the network takes no patch of the volume.',
            ) from error
        if patches.reductions and isinstance(self.model, MeanOverFlips):
            raise GraphError('attention of flips sees the whole volume, and statistics="tile" what a tile reads of it')
        return patches

    def _plan_saved(self, recording: Recording, given: tuple[int, ...] | None) -> tuple[GraphPlan, bool] | None:
        """Return the plan of an unfinished prediction, if the call is for it, whatever memory and disk are free."""
        saved, tiles = self.saved, self.tiles
        if saved is None or len(saved.tile) != len(recording.size):
            return None
        # An explicit number of bytes on disk determines by itself what is stored.
        is_explicit = tiles.disk is not None and (saved.on_disk or tiles.disk > 0)
        if is_explicit or (given or saved.tile) != saved.tile:
            return None
        try:
            labelled = recording.label(cut_axes(recording.size, saved.tile))
        except GraphError:
            return None
        stored = {*labelled.gathered, *(Value(*each) for each in saved.stored)}
        if not stored <= find_stored(labelled):
            return None
        return make_graph_plan(labelled, saved.tile, stored), saved.on_disk

    def _choose_tiles(self, recording: Recording, given: tuple[int, ...] | None) -> tuple[GraphPlan, bool]:
        """Choose the size of tiles and the values that are stored; return the plan, and whether they are on disk."""
        size, memory = recording.size, self.tiles.memory
        if memory is None:
            memory = int(_MEMORY_SHARE * free_bytes(device_of(self.network)))
        if given is None:
            whole = make_graph_plan(recording.label([]), size, [])
            if whole.passes[0].bytes <= memory:
                return whole, False
        axes = recording.cuttable if given is None else cut_axes(size, given)
        labelled = recording.label(axes)
        of_tile, of_stored, on_disk = self._choose_budget(labelled, memory)
        stored = fit_stored(labelled, of_stored)
        if given is not None:
            return make_graph_plan(labelled, given, stored), on_disk
        multiple = math.lcm(*(recording.strides[axis] for axis in axes))
        most = max((-(-size[axis] // multiple) for axis in axes), default=1)

        def plan_tiles(count: int) -> GraphPlan:
            edges = tuple(count * multiple if axis in axes else length for axis, length in enumerate(size))
            return make_graph_plan(labelled, edges, stored)

        def is_large(count: int) -> bool:
            return max(each.bytes for each in plan_tiles(count).passes) > of_tile

        # The largest number of multiples that fits; one where none does.
        return plan_tiles(max(1, bisect(range(1, most + 1), False, key=is_large))), on_disk

    def _choose_budget(self, labelled: LabelledGraph, memory: int) -> tuple[int, int, bool]:
        """Return the bytes of a tile and of stored values, and whether these are on disk: where it has enough room."""
        graph, disk = labelled.graph, self.tiles.disk
        wanted = sum(graph.info(value).bytes for value in find_stored(labelled))
        on_disk, of_stored = bool(disk), disk or (memory // 2 if wanted else 0)
        if wanted and self.path is not None and disk is None:
            # On disk a value outlives a process that is killed.
            room = int(_DISK_SHARE * shutil.disk_usage(self.path.absolute().parent).free)
            if room >= min(wanted, memory // 2):
                on_disk, of_stored = True, room
        least = sum(graph.info(value).bytes for value in labelled.gathered)
        if least > of_stored:
            names = ", ".join(dict.fromkeys(graph.nodes[value.node].path for value in labelled.gathered))
            where = "disk" if on_disk else "memory"
            raise refusal(
                ValueError,
                f"{names} needs all positions for each of its own, which are {least:,} bytes to store, "
                f"and may take {of_stored:,} bytes of {where}; fix: tile=Tiles(…, disk={least}), or attention that "
                "compresses, such as factorized_gaussian.",
            )
        return memory if on_disk else memory - of_stored, of_stored, on_disk

    def _refuse_large_summaries(self, labelled: LabelledGraph) -> None:
        free = free_bytes(device_of(self.network))
        for node in (labelled.graph.nodes[index] for index in labelled.reductions):
            if node.op == "layer" and node.args[0].summary_bytes:
                name = f"the summary of {node.args[0].module.operator_name} at {node.path}"
                refuse_large_summary(name, node.args[0].summary_bytes, free)
