"""The plan of a prediction in tiles: what they read, in how many passes, what that costs. Made before anything runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

import torch
from torch import nn

from farfield._checks import ShapeError, unknown
from farfield.nn import GridAttention
from farfield.streaming.arguments import positions_a_side
from farfield.streaming.arrays import MODES, Layout, Region, Span, layout_of
from farfield.streaming.drafting import Draft, Pass
from farfield.streaming.geometry import Placed, cores, overlap
from farfield.streaming.listening import Trace, trace
from farfield.streaming.probing import Scale, find_scale, take
from farfield.streaming.refusals import refuse_global, refuse_training


class Call(NamedTuple):
    """One call of an attention.

    Attributes:
        grid: What it reads.
        attention: The module.
        summary: Bytes of its summary.
    """

    grid: Placed
    attention: GridAttention
    summary: int


class Output(NamedTuple):
    """What the network returns.

    Attributes:
        grid: Where its positions lie.
        channels: Of it.
        dtype: Of it.
    """

    grid: Placed
    channels: int
    dtype: torch.dtype


@dataclass(frozen=True)
class Plan:
    """What `predict_whole` will do.

    Attributes:
        layout: Which axes the volume has.
        size: Of the volume, padded.
        padding: Positions added before and after each side.
        tile: Positions a side that a tile writes.
        least: Positions a side that it reads at least, however small it is.
        calls: Of attentions, in their order.
        passes: Summary passes, and the last, which writes.
        output: What the network returns.
        macs: MACs of the network on the whole.
        tile_bytes: What a tile takes in memory, about: grids that are held at once.
    """

    layout: Layout
    size: tuple[int, ...]
    padding: tuple[Span, ...]
    tile: tuple[int, ...]
    least: tuple[int, ...]
    calls: tuple[Call, ...]
    passes: tuple[Pass, ...]
    output: Output
    macs: int
    tile_bytes: int

    @property
    def cores(self) -> list[Region]:
        """What each tile writes."""
        return cores(self.size, self.tile)

    @property
    def recomputed(self) -> float:
        """MACs of all passes over those of the network on the whole."""
        return sum(each.share * overlap(self.size, self.tile, each.halo) for each in self.passes)

    @property
    def kept(self) -> Region:
        """Where the volume lies in the network's output: all of it but, on each end, the positions of what was padded.

        A position of the output that stands for padded positions and others is kept.
        """
        spans = [(0, side) for side in self.output.grid.size]
        for follows, (before, after) in zip(self.output.grid.along, self.padding, strict=True):
            if follows is not None:
                side = self.output.grid.shape[follows.axis]
                spans[follows.axis - 2] = (int(before * follows.ratio), side - int(after * follows.ratio))
        return tuple(spans)

    @property
    def written(self) -> tuple[int, ...]:
        """Positions a side of the output that a tile writes."""
        return tuple(stop - start for start, stop in self.output.grid.part(self.cores[0], self.size))

    def lines(self) -> list[str]:
        """The plan in words."""
        last = self.passes[-1].halo
        size, tile = (" × ".join(map(str, each)) for each in (self.size, self.tile))
        halo = " × ".join(f"{before}+{after}" for before, after in zip(*last, strict=True))
        text = [f"volume {size} positions" + (" (padded)" if any(map(any, self.padding)) else "")]
        memory = f"about {self.tile_bytes / 2**20:,.0f} MiB each"
        count = f"{len(self.cores)} tiles" if len(self.cores) > 1 else "1 tile"
        text.append(f"{count} of {tile} positions that read {halo} more, {memory}")
        for index, each in enumerate(self.passes):
            heard = [self.calls[call] for call in each.calls]
            names = ", ".join(f"{call.grid.name} ({call.summary:,} bytes)" for call in heard)
            what = f"summarize {names}" if names else "write"
            work = each.share * overlap(self.size, self.tile, each.halo)
            text.append(f"pass {index + 1} of {len(self.passes)}: {what}; {work:.2f} times the network's work")
        macs = f"{self.macs / 1e9:,.1f}G MACs"
        text.append(f"in all {self.recomputed:.2f} times the work of the network on the whole, {macs}")
        return text


def plan_whole(
    model: nn.Module,
    shape: Sequence[int],
    *,
    tile: int | Sequence[int | None] | None = None,
    halo: int | Sequence[int] | None = None,
    pad: str | None = None,
) -> Plan:
    """Plan what `predict_whole` does, which it also prints before it starts.

    Args:
        model: As there.
        shape: Of the volume.
        tile: As there.
        halo: As there.
        pad: As there.

    Returns:
        The plan; `plan.lines()` are what is printed.

    Raises:
        TypeError: If tile or halo are no whole numbers.
        ValueError: If the network cannot be run in tiles.

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
    if tile is not None:
        tile = positions_a_side("predict_whole", "tile", tile, 1, optional=True)
    if halo is not None:
        halo = cast(int | tuple[int, ...], positions_a_side("predict_whole", "halo", halo, 0))
    refuse_training(model)
    refuse_global(model)
    if pad is not None and pad not in MODES:
        raise unknown("predict_whole", "pad", pad, MODES)
    layout = layout_of("predict_whole", shape, spatial_dims_of(model, tile))
    batch, channels = layout.without_positions(shape)
    own = tuple(shape[len(shape) - layout.spatial_dims :])
    scale = find_scale(model, channels, own)
    padding = tuple(padded(side, stride, pad) for side, stride in zip(own, scale.strides, strict=True))
    size = tuple(side + sum(positions) for side, positions in zip(own, padding, strict=True))
    whole = whole_trace(model, batch, channels, size, scale)
    placed = [
        Placed(step.name, step.attends, step.shape, along) for step, along in zip(whole.steps, scale.along, strict=True)
    ]
    draft = Draft(model, batch, channels, size, scale, placed, whole)
    positions, passes = draft.cut(tile, halo)
    plan = Plan(
        layout=layout,
        size=size,
        padding=padding,
        tile=positions,
        least=draft.least,
        calls=tuple(map(Call, [each for each in placed if each.attends], whole.attentions, whole.summaries)),
        passes=passes,
        output=Output(placed[-1], whole.steps[-1].shape[1], whole.steps[-1].dtype),
        macs=whole.macs[-1],
        tile_bytes=draft.tile_bytes(positions, passes[-1].halo),
    )
    if any(start >= stop for start, stop in plan.kept):
        raise ShapeError(
            f"predict_whole: the network returns {plan.output.grid.size} for sides {size}, nothing of which is left "
            f"without what stands for the {padding} positions padded; fix: a larger volume, or one that needs no padding."
        )
    return plan


def spatial_dims_of(model: nn.Module, tile: object) -> int:
    """How many sides a model reads: as many as tile has numbers, else the rank of its first convolution."""
    if isinstance(tile, Sequence):
        return len(tile)
    dims_by_kind = {
        nn.Conv1d: 1,
        nn.Conv2d: 2,
        nn.Conv3d: 3,
        nn.ConvTranspose1d: 1,
        nn.ConvTranspose2d: 2,
        nn.ConvTranspose3d: 3,
    }
    spatial_dims = next(
        (
            spatial_dims
            for module in model.modules()
            for kind, spatial_dims in dims_by_kind.items()
            if isinstance(module, kind)
        ),
        None,
    )
    if spatial_dims is None:
        name = type(model).__name__
        raise ValueError(
            f"predict_whole: {name} has no convolution that says how many sides a volume has; "
            f"fix: one number of tile a side."
        )
    return spatial_dims


def padded(side: int, multiple: int, pad: str | None) -> Span:
    """Positions before and after a side that make it a multiple, shared as CARE does."""
    missing = -side % multiple if pad is not None else 0
    return missing // 2, missing - missing // 2


def whole_trace(model: nn.Module, batch: int, channels: int, size: tuple[int, ...], scale: Scale) -> Trace:
    """The network on the whole, without numbers; if it does not take these sides, say which it would."""
    try:
        take(model, channels, size)
    except ValueError as error:
        if any(side % multiple for side, multiple in zip(size, scale.strides, strict=True)):
            multiples = " × ".join(map(str, scale.strides))
            raise ValueError(f'{error}\n  fix: sides that {multiples} divide, or pad="reflect".') from error
        raise
    return trace(model, (batch, channels, *size), whole=True)
