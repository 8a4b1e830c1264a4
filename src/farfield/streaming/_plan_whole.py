"""The plan of a prediction in tiles: tiles, passes and costs, computed before the prediction starts."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from farfield._checks import ShapeError, unknown
from farfield.nn.tracing import looks_at_a_copy
from farfield.streaming.arguments import Tiles, parse_tiles
from farfield.streaming.flips import MeanOverFlips, check_axes, refuse_integers, symmetric
from farfield.streaming.geometry import Halo, NetworkGrid, StoredGrid, cores, read_ratio
from farfield.streaming.global_layers import refuse_global, refuse_training
from farfield.streaming.labels import GraphError
from farfield.streaming.network_axes import refuse_axes, spatial_dims_of, split_padding, trace_volume
from farfield.streaming.planning import make_plan as make_graph_plan
from farfield.streaming.reduction import Reduction, check_reduction, function_applied, reduce_channels
from farfield.streaming.replacement import GlobalLayer
from farfield.streaming.resume import Saved
from farfield.streaming.scale import find_scale, refuse_other_layers
from farfield.streaming.several_inputs import check_arguments, inputs_split, parse_layouts
from farfield.streaming.several_outputs import outputs_joined
from farfield.streaming.spilling import SpillPlan, plan_spill
from farfield.streaming.streaming_plan import StreamingPlan
from farfield.streaming.tiling import Draft, Pass
from farfield.volumes.source import MODES, AxisLayout, Region, Span

# Work, in MACs of the network, above which a plan names a way to do less.
WORK = 4


class PlannedCall(NamedTuple):
    """One call of a layer that needs the whole grid: an attention, a norm, a mean.

    Attributes:
        grid: The input of the call.
        layer: What is called, and how it runs in tiles.
        summary: Bytes of its summary.
        in_tile: Whether its statistics are those of what each tile reads.
    """

    grid: NetworkGrid
    layer: GlobalLayer
    summary: int
    in_tile: bool


class Output(NamedTuple):
    """The network's output.

    Attributes:
        grid: The output's shape, and how it scales with the volume.
        channels: Number of its channels.
        dtype: Its dtype.
    """

    grid: NetworkGrid
    channels: int
    dtype: torch.dtype


@dataclass(frozen=True)
class ProbedPlan:
    """The plan of `predict_whole`.

    Attributes:
        layout: Axes of the volume; of the first of several.
        channels: Number of channels of each volume that the network takes.
        size: Size of the volume, padded.
        padding: How many positions are padded before and after each spatial axis.
        tile: Size of the tiles that are written.
        least: Smallest size that a tile reads.
        calls: Calls of layers that need the whole grid, in the order of the forward pass.
        passes: The passes that summarize, then the pass that writes.
        output: The network's output.
        macs: MACs of the network on the whole volume.
        tile_bytes: Memory of a tile, about: bytes of the grids held at once.
        spill: How passes start from grids that are stored on disk; None if each starts from the volume.
        not_spilled: Why none are stored, although `Tiles.disk` allows it.
        flips: Number of flips of the volume whose mean is written.
        keys: Call of softmax attention -> its keys and values, as a grid that is stored on disk.
        reason: Why it was made by experiment, and not from the recorded network.
    """

    layout: AxisLayout
    channels: tuple[int, ...]
    size: tuple[int, ...]
    padding: tuple[Span, ...]
    tile: tuple[int, ...]
    least: tuple[int, ...]
    calls: tuple[PlannedCall, ...]
    passes: tuple[Pass, ...]
    output: Output
    macs: int
    tile_bytes: int
    spill: SpillPlan | None = None
    not_spilled: str = ""
    flips: int = 1
    keys: Mapping[int, StoredGrid] = field(default_factory=dict)
    reason: str = ""

    @property
    def disk_bytes(self) -> int:
        """The most bytes of disk that stored grids, keys and values take at once; the output is not counted."""
        return (0 if self.spill is None else self.spill.peak) + sum(each.bytes for each in self.keys.values())

    @property
    def cores(self) -> list[Region]:
        """The own positions of each tile, in the padded volume: those that it writes, without halo."""
        return cores(self.size, self.tile)

    @property
    def recomputed(self) -> float:
        """MACs of all passes, relative to those of the network on the whole volume."""
        return self.flips * sum(pass_work(self, each) for each in self.passes)

    @property
    def kept(self) -> Region:
        """The region of the network's output that is kept: without positions that stand for padding alone.

        A position of the output that stands for padded positions and others is kept.
        """
        spans = [(0, length) for length in self.output.grid.size]
        for axis_scale, (before, after) in zip(self.output.grid.axis_scales, self.padding, strict=True):
            if axis_scale is not None:
                length = self.output.grid.shape[axis_scale.axis]
                spans[axis_scale.axis - 2] = (int(before * axis_scale.ratio), length - int(after * axis_scale.ratio))
        return tuple(spans)

    @property
    def written(self) -> tuple[int, ...]:
        """Size of the part of the output that the first tile writes; no tile writes a larger one."""
        return tuple(stop - start for start, stop in self.output.grid.part(self.cores[0], self.size))

    def __str__(self) -> str:
        """Return the text that `predict_whole` prints."""
        return "\n".join(self.lines())

    def lines(self) -> list[str]:
        """Return the lines of text that `predict_whole` prints."""
        largest = functools.reduce(Halo.join, (each.halo for each in self.passes))
        size, tile = (" × ".join(map(str, each)) for each in (self.size, self.tile))
        halo = " × ".join(f"{before}+{after}" for before, after in zip(*largest, strict=True))
        text = [f"volume {size} positions" + (" (padded)" if any(map(any, self.padding)) else "")]
        memory = f"about {self.tile_bytes / 2**20:,.0f} MiB each"
        count = f"{len(self.cores)} tiles" if len(self.cores) > 1 else "1 tile"
        if self.reason:
            text.append(f"planned by experiment: {self.reason}")
        text.append(f"{count} of {tile} positions with a halo of {halo}, {memory}")
        if any(call.in_tile for call in self.calls) and len(self.cores) > 1:
            patch = " × ".join(map(str, self.least))
            text.append(f'norms and pooling see the {patch} positions that a tile reads: statistics="tile"')
        for index, each in enumerate(self.passes):
            summarized, work = [self.calls[call] for call in each.calls], pass_work(self, each)
            names = ", ".join(f"{call.grid.name} ({call.summary:,} bytes)" for call in summarized)
            what = f"summarize {names}" if names else "write"
            stored = "" if self.spill is None else self.spill.describe(index)
            text.append(f"pass {index + 1} of {len(self.passes)}: {what}; {work:.2f} times the network's MACs{stored}")
        if self.flips > 1:
            text.append(f"these passes for each of {self.flips} flips, whose mean is written")
        total = f"{self.macs / 1e9:,.1f} billion" if self.macs >= 1e9 else f"{self.macs / 1e6:,.3g} million"
        text.append(f"in total {self.recomputed:.2f} times the MACs of the untiled network, which are {total}")
        return text + self.disk_lines()

    def disk_lines(self) -> list[str]:
        """Return the lines of text about what is stored on disk."""
        text = [
            f"keys and values of {each.grid.name}, {each.bytes:,} bytes, are stored on disk"
            for each in self.keys.values()
        ]
        if self.spill is not None:
            grids = f"{len(self.spill.stored)} grids, {self.spill.written:,} bytes, are stored on disk between passes"
            text.append(f"{grids}, at most {self.spill.peak:,} bytes at once")
        elif self.not_spilled:
            text.append(f"each pass starts from the volume: {self.not_spilled}")
        elif self.recomputed > WORK and self.flips == 1:
            text.append("to do less work: tile=Tiles(…, disk=bytes) stores grids inside the network between passes")
        return text


def pass_work(plan: ProbedPlan, each: Pass) -> float:
    """Return the MACs of a pass, relative to those of the network on the whole volume."""
    least = plan.least if plan.spill is None else (0,) * len(plan.size)
    return each.share * read_ratio(plan.size, plan.tile, each.halo, least)


@looks_at_a_copy
def plan_whole(
    model: nn.Module,
    shape: Sequence[int] | Sequence[Sequence[int]],
    *,
    tile: int | Sequence[int | None] | Tiles | None = None,
    pad: str | None = None,
    reduce: Reduction = None,
) -> StreamingPlan | ProbedPlan:
    """Plan a call of `predict_whole`, which also prints this plan before it starts.

    Args:
        model: As in `predict_whole`.
        shape: Shape of the volume; a tuple of shapes for a network of several inputs.
        tile: As in `predict_whole`.
        pad: As in `predict_whole`.
        reduce: As in `predict_whole`.

    Returns:
        The plan; `print(plan)` prints what `predict_whole` prints.

    Raises:
        TypeError: If a volume is passed in place of its shape, if tile or halo have numbers that are no integers, if
            `reduce` is no function, or if the network does not return one grid.
        ValueError: If the model is in training mode, does not take the volume's size, cannot be run in tiles, or has an
            attention whose summary takes too much memory; if shapes do not fit (`ShapeError`).
        LookupError: If `pad` or `reduce` is unknown.

    Example:
        >>> from torch import nn
        >>> from farfield.nn import GridAttention
        >>> from farfield.streaming import plan_whole
        >>> attention = GridAttention(8, "siamese")
        >>> net = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), attention, nn.Conv2d(8, 1, 3, padding=1))
        >>> plan = plan_whole(net.eval(), (1000, 1000), tile=256)
        >>> len(plan.cores), len(plan.passes), plan.passes[-1].halo.before
        (16, 2, (2, 2))
    """
    several = isinstance(shape, tuple | list) and bool(shape) and not any(isinstance(each, int) for each in shape)
    shapes: list[Any] = list(shape) if several else [shape]
    for each in shapes:
        if hasattr(each, "shape"):
            raise TypeError(
                f"plan_whole: shape must be numbers, got a volume of shape {tuple(each.shape)}; "
                "fix: plan_whole(model, volume.shape)."
            )
        if not isinstance(each, Sequence) or isinstance(each, str):
            raise TypeError(
                f"plan_whole: shape must be numbers, got {each!r:.60}; fix: plan_whole(model, volume.shape)."
            )
    return find_plan("plan_whole", model, shapes, parse_tiles("plan_whole", tile), pad, reduce)


def find_plan(
    caller: str,
    model: nn.Module,
    shapes: Sequence[Sequence[int]],
    tiles: Tiles,
    pad: str | None,
    reduce: Reduction,
    path: Path | None = None,
    saved: Saved | None = None,
) -> StreamingPlan | ProbedPlan:
    """Make the plan of `predict_whole` from the recorded network; by experiment where a rule is missing."""
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"{caller}: model must be a torch.nn.Module, got {type(model).__name__}; "
            f"fix: the network comes first, {caller}(model, …)."
        )
    try:
        return make_graph_plan(caller, model, shapes, tiles, pad, reduce, path, saved)
    except GraphError as error:
        reason = str(error)
    if saved is not None and tiles.size is None:
        tiles = replace(tiles, size=saved.tile)
    plan = make_plan(caller, model, shapes, replace(tiles, disk=tiles.disk or 0), pad, reduce)
    return replace(plan, reason=reason)


def check_plan(caller: str, plan: Any, volumes: Mapping[str, Any], tile: Any, pad: str | None) -> StreamingPlan:
    """Return a plan; refuse one that is none, or of volumes of another shape, or beside arguments that it has itself.

    Raises:
        TypeError: If it is no plan.
        ValueError: If the shapes are others, or `tile` or `pad` is given too.
    """
    if not isinstance(plan, StreamingPlan):
        raise TypeError(f"{caller}: plan must be what plan_whole returns, got {type(plan).__name__}; fix: plan=None.")
    if tile is not None or pad is not None:
        raise ValueError(f"{caller}: got tile or pad beside plan, which has both; fix: give them to plan_whole.")
    layouts = parse_layouts(caller, [each.shape for each in volumes.values()], plan.layout.spatial_dims)
    planned = plan.layout.shape(plan.output.shape[0], plan.channels[0], plan.unpadded)
    first = tuple(next(iter(volumes.values())).shape)
    channels = tuple(
        layout.batch_and_channels(each.shape)[1] for layout, each in zip(layouts, volumes.values(), strict=True)
    )
    if first != planned or channels != plan.channels:
        raise ShapeError(
            f"{caller}: plan is of volumes of another shape.\n  planned  {planned}\n  got      {first}\n"
            "  fix: plan_whole(model, volume.shape)."
        )
    return plan


def make_plan(
    caller: str,
    model: nn.Module,
    shapes: Sequence[Sequence[int]],
    tile: int | Sequence[int | None] | Tiles | None,
    pad: str | None,
    reduce: Reduction,
) -> ProbedPlan:
    """Make the plan of `predict_whole`, for `predict_whole` or `plan_whole`; errors name the caller."""
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"{caller}: model must be a torch.nn.Module, got {type(model).__name__}; "
            f"fix: the network comes first, {caller}(model, …)."
        )
    if isinstance(model, MeanOverFlips):
        tiles = parse_tiles(caller, tile)
        with outputs_joined(caller, model.network, reduce), refuse_integers(caller, model):
            plan = make_plan(caller, model.network, shapes, replace(tiles, disk=0), pad, reduce)
        if tiles.disk:
            plan = replace(plan, not_spilled="grids of flips are not stored on disk")
        return plan_flips(caller, model, plan)
    tiles = parse_tiles(caller, tile)
    refuse_training(caller, model)
    refuse_global(caller, model)
    if pad is not None and pad not in MODES:
        raise unknown(caller, "pad", pad, MODES)
    check_reduction(caller, reduce)
    # A named reduction is positionwise: the checks are of the scores that it reduces.
    with outputs_joined(caller, model, reduce), function_applied(caller, model, reduce):
        plan = make_checked_plan(caller, model, shapes, tiles, pad)
    smallest = torch.zeros((1, plan.output.channels, *(1,) * len(plan.kept)), dtype=plan.output.dtype)
    reduced = reduce_channels(caller, reduce, smallest)
    return replace(plan, output=plan.output._replace(channels=reduced.shape[1], dtype=reduced.dtype))


def plan_flips(caller: str, model: MeanOverFlips, plan: ProbedPlan) -> ProbedPlan:
    """Return the plan for all flips of a volume, from that for the network without flips.

    Raises:
        ShapeError: If the volume has not the axes, or is cut along one whose length is no multiple of the strides: the
            strides of a flip then start at other positions than its tiles.
    """
    check_axes(caller, model, len(plan.size))
    cut = [axis for axis in model.axes if plan.tile[axis] < plan.size[axis]]
    if cut:
        with inputs_split(model.network, plan.channels):
            scale = find_scale(caller, model.network, sum(plan.channels), plan.size)
        odd = [axis for axis in cut if plan.size[axis] % scale.multiple[axis]]
        if odd:
            multiples = " × ".join(map(str, scale.multiple))
            raise ShapeError(
                f"{caller}: tiles of a flipped volume need a size that {multiples} divides, got {plan.size}; fix: "
                f'pad="reflect", a volume of such a size, or tile with None for axis {odd[0]}, which is not cut then.'
            )
    passes = tuple(each._replace(halo=symmetric(each.halo, model.axes)) for each in plan.passes)
    plan = replace(plan, passes=passes, flips=len(model.flips))
    if not any(call.in_tile for call in plan.calls):
        return plan
    # All tiles have the size of one whose halo is cut nowhere.
    grown = zip(plan.least, plan.size, plan.tile, *passes[-1].halo, strict=True)
    return replace(plan, least=tuple(min(length, max(least, own + a + b)) for least, length, own, a, b in grown))


def make_checked_plan(
    caller: str, model: nn.Module, shapes: Sequence[Sequence[int]], tiles: Tiles, pad: str | None
) -> ProbedPlan:
    """Make the plan from arguments that were checked."""
    check_arguments(caller, model, len(shapes))
    layouts = parse_layouts(caller, shapes, spatial_dims_of(caller, model, tiles.size))
    pairs = [layout.batch_and_channels(shape) for layout, shape in zip(layouts, shapes, strict=True)]
    channels = tuple(own for _, own in pairs)
    size = tuple(shapes[0][len(shapes[0]) - layouts[0].spatial_dims :])
    with inputs_split(model, channels):
        return plan_grid(caller, model, (pairs[0][0], channels, size), layouts[0], tiles, pad)


def plan_grid(
    caller: str,
    model: nn.Module,
    shape: tuple[int, tuple[int, ...], tuple[int, ...]],
    layout: AxisLayout,
    tiles: Tiles,
    pad: str | None,
) -> ProbedPlan:
    """Make the plan for a grid that has all inputs as channels.

    Args:
        caller: The function that errors name.
        model: The network, which takes such a grid.
        shape: Batch, the channels of each input, and the volume's size.
        layout: Axes of the first volume.
        tiles: How it is cut.
        pad: As in `predict_whole`.
    """
    batch, inputs, own = shape
    channels = sum(inputs)
    try:
        scale = find_scale(caller, model, channels, own)
    except ValueError as error:
        refuse_axes(caller, model, inputs, own, error)
        raise
    padding = tuple(split_padding(length, stride, pad) for length, stride in zip(own, scale.strides, strict=True))
    size = tuple(length + sum(positions) for length, positions in zip(own, padding, strict=True))
    whole = trace_volume(caller, model, batch, inputs, size, scale)
    refuse_other_layers(caller, scale.steps, whole.steps)
    grids = [
        NetworkGrid(step.name, step.summarized, step.shape, axis_scales)
        for step, axis_scales in zip(whole.steps, scale.axis_scales, strict=True)
    ]
    draft = Draft(caller, model, batch, channels, size, scale, grids, whole, tiles)
    spilled, reason = plan_spill(draft, tiles)
    positions, passes = spilled[:2] if spilled else draft.cut(tiles.size, tiles.halo, tiles.memory)
    plan = ProbedPlan(
        layout=layout,
        channels=inputs,
        size=size,
        padding=padding,
        tile=positions,
        least=draft.least(positions, passes[-1].halo),
        calls=tuple(
            map(PlannedCall, [each for each in grids if each.summarized], whole.layers, whole.summaries, draft.in_tile)
        ),
        passes=passes,
        output=Output(grids[-1], whole.steps[-1].shape[1], whole.steps[-1].dtype),
        macs=whole.macs[-1],
        tile_bytes=spilled[2].tile_bytes if spilled else draft.tile_bytes(positions, passes[-1].halo),
        spill=spilled[2] if spilled else None,
        not_spilled=reason,
        keys=draft.keys if len(passes) > 1 else {},
    )
    if any(start >= stop for start, stop in plan.kept):
        raise ShapeError(
            f"{caller}: the network returns {plan.output.grid.size} for size {size}, nothing of which is left "
            f"without the {padding} padded positions; fix: a larger volume, or one that needs no padding."
        )
    return plan
