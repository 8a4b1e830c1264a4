"""Plan a prediction in tiles: record the network, choose the tiles and what is stored, and describe the output."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from farfield._checks import ShapeError, check_network, unknown
from farfield._fingerprint import fingerprint
from farfield._refusals import door, refusal
from farfield.nn.devices import device_of, dtype_of
from farfield.nn.tracing import looks_at_a_copy
from farfield.streaming.adapt import MeanOverFlips, Outputs, Reduce, ReductionError, check_reduction
from farfield.streaming.arguments import (
    OF_WINDOWS,
    STORED,
    Tiles,
    check_arguments,
    parse_layouts,
    parse_tiles,
    refuse_training,
    round_up_tile,
    spatial_dims_of,
)
from farfield.streaming.choosing import choose_plan, choose_workers, plan_saved, refuse_large_summaries
from farfield.streaming.graph import Info
from farfield.streaming.labels import GraphError, LabelledGraph
from farfield.streaming.places import Record, RecordedNetwork, make_recorder, runs_alone
from farfield.streaming.plan import StreamingPlan
from farfield.streaming.planning import choose_threads, count_costs, make_patch_plan, plan_check
from farfield.streaming.progress import warn_caller
from farfield.streaming.readings import find_reading, refuse_axes
from farfield.streaming.spans import axes_of
from farfield.volumes.place import Place, stretch
from farfield.volumes.source import MODES, AxisLayout, Span

# Times the network's MACs above which a tile that is given is warned of, and how many those are: a second's.
_COSTLY, _MANY_MACS = 1.5, 5 * 10**10
# A length that strides divide, and windows of common models.
_DIVISIBLE = 2**6 * 3 * 5 * 7

# Shape and dtype of a volume, and its axes if letters tell them.
Given = tuple[Info, AxisLayout | None]


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
    dtype = dtype_of(model)
    return plan_volumes(model, [(Info(tuple(each), dtype), None) for each in shapes], parse_tiles(tile), pad, reduce)


def plan_volumes(
    model: nn.Module,
    volumes: Sequence[Given],
    tiles: Tiles,
    pad: str | None = None,
    reduce: Reduce = None,
    path: Path | None = None,
    saved: Mapping[str, Any] | None = None,
    record: Record | None = None,
) -> StreamingPlan:
    """Plan a call of `predict_whole`, whose output is at `path` and an unfinished one there was planned as `saved`.

    What `record` has recorded of the network before is not recorded again.
    """
    network = model.network if isinstance(model, MeanOverFlips) else model
    refuse_training(network)
    if pad is not None and pad not in MODES:
        raise unknown("pad", pad, MODES)
    check_reduction(reduce)
    name_reading = partial(_name_reading, model, volumes, tiles, pad, reduce, path)
    layouts, channels, halo = _parse_volumes(network, volumes, tiles, name_reading)
    stored = STORED.get(tiles.stored or "")
    record = record or make_recorder(model, channels, volumes[0][0].dtype, halo, reduce, stored, tiles.size)
    layout, shape = layouts[0], volumes[0][0].shape
    batch, size = layout.batch_and_channels(shape)[0], shape[len(shape) - layout.spatial_dims :]
    with _explained(model):
        # One on a size that the strides divide states the padding.
        probe = _record_first(record, batch, [(_DIVISIBLE,) * len(size), size]) if pad else None
        strides = probe.strides if probe else (1,) * len(size)
        missing = [-length % stride for length, stride in zip(size, strides, strict=True)]
        # Half on each end, as in CARE.
        padding = tuple((each // 2, each - each // 2) for each in missing)
        size = tuple(length + each for length, each in zip(size, missing, strict=True))
        # Of a network that took no size, it is not known.
        mixed = batch > 1 and (bool(pad and probe is None) or _mixes_samples(record, batch, size))
        if mixed and "Z" in dict(layout.samples):
            raise _planes_mixed(model)
        batch, samples = (batch, 1) if mixed else (1, batch)
        recorded = _record_whole(
            record, batch, size, network, channels, is_batch=bool(layout.batch), pad=pad, name_reading=name_reading
        )
        tile = None if tiles.size is None else round_up_tile(tiles.size, size, recorded.strides)
        device = device_of(network)
        plan = plan_saved(recorded, tiles, tile, saved) or choose_plan(recorded, tiles, tile, device, path)
        refuse_large_summaries(plan.labelled, device)
        if tiles.statistics == "tile" and plan.cut:
            plan = _plan_patches(model, plan, recorded.outputs, partial(record, batch))
        plan = _place_output(recorded, plan, padding)
        plan = count_costs(plan) if plan.is_moved else plan
        plan = replace(
            plan,
            layout=layout,
            channels=channels,
            pad=pad,
            samples=samples,
            outputs=recorded.outputs,
            threads=plan.threads or choose_threads(plan),
            reduction=fingerprint(reduce),
        )
        if tile is not None and not plan.patch:
            _warn_of_work(plan)
        check = plan_check(partial(record, batch, reduced=False), plan, recorded.strides)
        return replace(plan, check=check, workers=choose_workers(plan, tiles, device))


def _warn_of_work(plan: StreamingPlan) -> None:
    """Warn of a tile that is given by hand, and so small that the halos take much of the work."""
    macs = plan.samples * sum(each.macs for each in plan.passes)
    if plan.recomputed > _COSTLY and macs > _MANY_MACS:
        fix = "a larger tile, or None, which finds the largest"
        if plan.with_disk is not None:
            size, recomputed = plan.with_disk
            fix = f"Tiles({plan.tile}, disk={size}), with which it is {recomputed:.2f} times, or {fix}"
        warn_caller(
            f"tile={plan.tile} takes {plan.recomputed:.2f} times the MACs of the untiled network, as halos are "
            f"computed again; fix: {fix}."
        )


@contextmanager
def _explained(model: nn.Module) -> Iterator[None]:
    """Name the network that does not run in tiles."""
    try:
        yield
    except GraphError as error:
        raise refusal(GraphError, f"{type(model).__name__} does not run in tiles: {error}") from error


def _parse_volumes(
    network: nn.Module, volumes: Sequence[Given], tiles: Tiles, name_reading: Callable[[], None]
) -> tuple[list[AxisLayout], tuple[int, ...], Sequence[int] | None]:
    """Return the axes and channels of volumes, and the halo of operations without a rule along each axis."""
    check_arguments(network, len(volumes))
    shapes, known = [info.shape for info, _ in volumes], [layout for _, layout in volumes]
    dims = spatial_dims_of(network, tiles.size, shapes[0], known[0])
    try:
        layouts = parse_layouts(shapes, dims, known)
    except ShapeError:
        name_reading()
        raise
    halo = (tiles.halo,) * dims if isinstance(tiles.halo, int) else tiles.halo
    if halo is not None and len(halo) != dims:
        raise refusal(
            ShapeError,
            f"halo must be one number, or one for each of {dims} spatial dims, got {halo!r}; fix: "
            f"halo={max(halo, default=0)}.",
        )
    channels = tuple(own.batch_and_channels(shape)[1] for own, shape in zip(layouts, shapes, strict=True))
    return layouts, channels, halo


def _name_reading(
    model: nn.Module, volumes: Sequence[Given], tiles: Tiles, pad: str | None, reduce: Reduce, path: Path | None
) -> None:
    """Refuse a volume that the network takes with other axes, and name these; return where none are found."""
    (shape, dtype), network = volumes[0][0], model.network if isinstance(model, MeanOverFlips) else model
    if len(volumes) > 1 or volumes[0][1] or 0 in shape:
        return

    def plan_reading(other: tuple[int, ...], tile: Any) -> tuple[int, ...]:
        """Return the axes that can be cut of a volume that is read otherwise; raise the error of a call with it."""
        trial, dims = replace(tiles, size=tile), spatial_dims_of(network, tile, other)
        given: list[Given] = [(Info(other, dtype), parse_layouts([other], dims)[0])]
        plan = plan_volumes(model, given, trial, pad, reduce, path)
        return RecordedNetwork(plan.labelled.graph, plan.size, plan.labelled.halo).cuttable

    dims = spatial_dims_of(network, tiles.size, shape)
    found = find_reading(network, shape, dims, tiles.size, plan_reading)
    if found is not None:
        raise refusal(
            ValueError,
            f"{type(model).__name__} does not take a volume of shape {shape} with {dims} spatial dims, and "
            f"takes it as {found[0]}\n  fix: {found[1]}, if these are its axes.",
        )


# ---- recordings ------------------------------------------------------------------------------------------------------
def record_calls(model: nn.Module, channels: Sequence[int], size: tuple[int, ...]) -> RecordedNetwork:
    """Record two samples on a size that strides divide, or on the volume's if the network does not take that.

    Where the size is large, no window is as long as a grid.
    """
    check_arguments(model, len(channels))
    record = make_recorder(model, channels, dtype_of(model))
    first = _record_first(record, 2, [(_DIVISIBLE,) * len(size)])
    with _explained(model):
        return first or _record_whole(record, 2, size, model, channels, is_batch=True)


def _record_first(record: Record, batch: int, sizes: Sequence[tuple[int, ...]]) -> RecordedNetwork | None:
    """Record a network on the first of these sizes that it takes."""
    for size in sizes:
        with suppress(ValueError):
            return record(batch, size)
    return None


def _mixes_samples(record: Record, batch: int, size: tuple[int, ...]) -> bool:
    """Whether the result of a sample depends on others, on their number, or on its place among them."""
    several, one = (_record_first(record, each, [size]) for each in (batch, 1))
    return several is None or one is None or not runs_alone(several.graph, one.graph)


def _planes_mixed(model: nn.Module) -> ValueError:
    return refusal(
        ValueError,
        f"layers of {type(model).__name__} mix samples, so planes one after the other are not its result on all of "
        'them; fix: one plane at a time, volume.crop({"Z": (0, 1)}), or all as one batch, '
        "numpy.asarray(volume)[:, None].",
    )


def _record_whole(
    record: Record,
    batch: int,
    size: tuple[int, ...],
    network: nn.Module,
    channels: Sequence[int],
    *,
    is_batch: bool,
    pad: str | None = None,
    name_reading: Callable[[], None] = lambda: None,
) -> RecordedNetwork:
    """Record the network on the whole volume; an error has sizes that it takes if the strides are why."""
    try:
        return record(batch, size)
    except (GraphError, ReductionError):
        raise
    except ValueError as error:
        name_reading()
        refuse_axes(network, tuple(channels), size, is_batch, error)
        probe = None if pad else _record_first(record, 1, [(_DIVISIBLE,) * len(size)])
        strides = probe.strides if probe else ()
        if any(length % stride for length, stride in zip(size, strides, strict=False)):
            multiples = " × ".join(map(str, strides))
            raise refusal(ValueError, f'{error}\n  fix: a size that {multiples} divides, or pad="reflect".') from error
        raise


# ---- patches, and the output -----------------------------------------------------------------------------------------
def _plan_patches(
    model: nn.Module, plan: StreamingPlan, outputs: Outputs, record: Callable[[tuple[int, ...]], RecordedNetwork]
) -> StreamingPlan:
    """Plan how the network runs on patches, so that norms, means and pooling see what a tile reads."""
    along = axes_of(plan.labelled.layouts[plan.labelled.graph.output])
    if outputs.has_answers or not set(plan.cut) <= set(along):
        raise GraphError(
            'what it returns sums over the whole, and statistics="tile" sees what a tile reads; fix: '
            'Tiles(…, statistics="whole")'
        )
    try:
        patched = make_patch_plan(plan, record)
    except GraphError:
        raise
    except ValueError as error:
        raise refusal(
            ValueError, f'{error}\n  fix: Tiles(…, statistics="whole"), as the network takes no patch of the volume.'
        ) from error
    if isinstance(model, MeanOverFlips) and any(each.reductions for each in patched.passes):
        text = 'attention of flips sees the whole volume, and statistics="tile" what a tile reads of it'
        raise GraphError(f'{text}; fix: Tiles(…, statistics="whole")')
    return patched


def _place_output(recorded: RecordedNetwork, plan: StreamingPlan, padding: tuple[Span, ...]) -> StreamingPlan:
    """Return a plan with the places of the output; refuse one whose axes are not those of the volume."""
    labelled, size, graph = plan.labelled, plan.size, plan.labelled.graph
    info, layout = graph.info(graph.output), labelled.layouts[graph.output]
    # Axis of the volume -> the dimension that runs along it, also where it could be cut, and is not.
    graphs = (recorded.try_label(recorded.cuttable), labelled)
    layouts = [each.layouts[graph.output] for each in graphs if isinstance(each, LabelledGraph)]
    pairs = itertools.chain(*map(enumerate, layouts))
    there = {dim[0].axis: place for place, dim in pairs if len(dim) == 1 and dim[0].axis is not None}
    places, doubts = recorded.places.of[graph.output], dict[int, str]()
    moved = (plan.cut or any(map(any, padding))) and any(place < 2 for place in there.values())
    if moved or axes_of(layout[:2]) or any(len(dim) > 1 for dim in layout):
        raise GraphError(
            f"its output {info.shape} is no grid (batch, channels, *size) of the volume's axes; fix: a module "
            "around it that returns one: self.network(grid)[:, None] where it has no channels, .movedim(-1, 1) "
            "where they are last"
        )
    along: list[tuple[int, Place] | None] = []
    kept = [(0, length) for length in info.shape[2:]]
    for axis, (length, (before, after)) in enumerate(zip(size, padding, strict=True)):
        # Labels do not tell an axis along which the network cannot be cut, nor one of a single position.
        known = axis not in labelled.cut or axis in places
        same = known and len(layout) == len(size) + 2 and axis + 2 not in there.values()
        place = there.get(axis, axis + 2 if same else None)
        if place is None:
            along.append(None)
            continue
        scale, offset = places.get(axis, stretch(length, info.shape[place]))
        ends = [int(each / abs(scale)) for each in (before, after)][:: 1 if scale > 0 else -1]
        own_place = Place(scale, offset + ends[0] * scale - before)
        if scale < 0:
            doubts[axis] = "it is flipped, which a voxel size does not tell"
        elif axis in recorded.places.doubts:
            doubts[axis] = f"{recorded.places.doubts[axis]}, of which it has the first"
        elif axis not in places and info.shape[place] != length:
            doubts[axis] = "no rule tells it, and it is taken to be as long as the volume"
        elif own_place != Place() and info.shape[place] == length:
            doubts[axis] = f"it has the volume's positions, as in training, and by its layers stands at {own_place}"
        kept[place - 2] = ends[0], info.shape[place] - ends[1]
        along.append((place, own_place))
    if any(start >= stop for start, stop in kept):
        raise refusal(
            ShapeError,
            f"the network returns {info.shape[2:]} for size {size}, nothing of which is left "
            f"without the {tuple(padding)} padded positions; fix: a larger volume, or one that needs no padding.",
        )
    # Tiles that write from where what is kept begins read more there; a patch does not.
    is_moved = any(map(any, padding)) and not plan.patch
    return replace(plan, padding=padding, places=tuple(along), doubts=doubts, kept=tuple(kept), is_moved=is_moved)
