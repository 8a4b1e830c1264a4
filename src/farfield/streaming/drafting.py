"""How a volume is cut into tiles and how often they are passed over: halos, levels, and what memory allows."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from farfield._checks import ShapeError
from farfield.streaming.comparing import differing
from farfield.streaming.geometry import Halo, Placed, at_least, cores, rounded_up
from farfield.streaming.listening import OUTPUT, Trace, device_of, trace
from farfield.streaming.merging import is_grid
from farfield.streaming.probing import Probe, Scale, not_local
from farfield.streaming.refusals import NotLocalError

# A tile may take this share of the memory that is free: what kernels need beside the grids is not counted.
SHARE = 1 / 4
# A summary that is a whole grid may take this share.
SUMMARY_SHARE = 1 / 2


class Pass(NamedTuple):
    """One pass over all tiles.

    Attributes:
        calls: Which attentions are summarized, by their place in the order of calls; none in the last pass.
        halo: What tiles read beyond their own positions.
        share: Of the network's MACs that runs: it stops at the last of these attentions.
    """

    calls: tuple[int, ...]
    halo: Halo
    share: float


class Draft:
    """What is known of a network on a volume when it is cut.

    Args:
        model: The network.
        batch: Samples of the volume.
        channels: Of the volume.
        size: Of the volume, padded.
        scale: The network's strides.
        placed: Its grids.
        whole: Its trace on the whole volume.
    """

    def __init__(
        self,
        model: nn.Module,
        batch: int,
        channels: int,
        size: tuple[int, ...],
        scale: Scale,
        placed: list[Placed],
        whole: Trace,
    ) -> None:
        self.model, self.batch, self.channels, self.size = model, batch, channels, size
        self.scale, self.placed, self.whole = scale, placed, whole
        self.probe: Probe | None = None

    def cut(
        self, tile: int | Sequence[int | None] | None, halo: int | Sequence[int] | None
    ) -> tuple[tuple[int, ...], tuple[Pass, ...]]:
        """Choose tiles and passes, and see that what tiles give is what the whole gives."""
        given = None if halo is None else self.given_halo(halo)
        if tile is None:
            positions, needs = self.fitting(given)
        else:
            positions = self.given_tile(tile)
            needs = {axis: self.needs(axis, given) for axis in self.axes_cut(positions)}
        if not needs:  # one tile: the network as it is
            return positions, (Pass((), self.joined({}, range(0)), 1.0),)
        for axis in needs:
            self.check(axis, positions[axis], needs, given is not None)
        self.check_summaries()
        return positions, self.passes(needs)

    def check(self, axis: int, positions: int, needs: dict[int, list[tuple[int, int]]], given: bool) -> None:
        """See that tiles of one side give what the whole gives; read more, where they do not at its ends.

        A layer that continues a side by its own positions, reflected for example, sees there as far to one side as
        elsewhere to the other, and further if it makes the side longer.

        Raises:
            NotLocalError: If they do not, however much they read.
        """
        found, step = needs[axis], self.first_differing(axis, positions, needs)
        for times in () if given else (1, 2):
            if step is not None:
                mirrored = [times * (before + after + self.beyond(axis)[1]) for before, after in found]
                needs[axis] = [(both, both) for both in mirrored]
                step = self.first_differing(axis, positions, needs)
        if step is not None:
            raise not_local(self.model, step, axis, "gives a tile other than what it gives the whole")

    def first_differing(self, axis: int, positions: int, needs: dict[int, list[tuple[int, int]]]) -> str | None:
        """The first step that gives a tile other than the whole, in any pass."""
        last, (shorter, longer) = (self.size[axis] - 1) % positions + 1, self.beyond(axis)
        for each in self.passes(needs):
            enough = each.halo.before[axis] + each.halo.after[axis] + longer + self.scale.multiple[axis]
            # Near the end tiles may have nothing of a grid that ends earlier: the one before them is its last then.
            first, last = min(positions, enough), last if last <= enough else enough + last % self.scale.multiple[axis]
            widths = [first, enough, *[first] * -(-shorter // first), last]
            found = differing(self.look(), axis, each.halo, widths, each.calls)
            if found is not None:
                return found
        return None

    def beyond(self, axis: int) -> tuple[int, int]:
        """By how much the network's grids are shorter and longer than the volume on a side, at most, in its positions."""
        grids = [(grid.shape, grid.along[axis]) for grid in self.placed]
        ends = [shape[along.axis] / along.ratio - self.size[axis] for shape, along in grids if along is not None]
        multiple = self.scale.multiple[axis]
        return rounded_up(max(Fraction(0), -min(ends)), multiple), rounded_up(max(Fraction(0), max(ends)), multiple)

    @property
    def least(self) -> tuple[int, ...]:
        """Positions a side that a tile reads at least, as the network takes no fewer."""
        return (0,) * len(self.size) if self.probe is None else self.probe.least

    def axes_cut(self, positions: Sequence[int]) -> list[int]:
        """Sides that are cut."""
        return [axis for axis, (own, side) in enumerate(zip(positions, self.size, strict=True)) if own < side]

    def look(self) -> Probe:
        """The network on small grids, which is tried once."""
        self.probe = self.probe or Probe(self.model, self.channels, self.size, self.scale)
        return self.probe

    def given_tile(self, tile: int | Sequence[int | None]) -> tuple[int, ...]:
        """Positions a side of the tiles asked for, which begin at multiples of the strides."""
        wanted = (tile,) * len(self.size) if isinstance(tile, int) else tuple(tile)
        pairs = zip(wanted, self.size, self.scale.multiple, strict=True)
        return tuple(
            side if positions is None else min(side, rounded_up(positions, multiple))
            for positions, side, multiple in pairs
        )

    def given_halo(self, halo: int | Sequence[int]) -> tuple[int, ...]:
        """Positions a side of the halo asked for."""
        wanted = (halo,) * len(self.size) if isinstance(halo, int) else tuple(halo)
        if len(wanted) != len(self.size):
            raise ShapeError(
                f"predict_whole: halo must be one number, or one for each of {len(self.size)} sides, got {halo!r}; "
                f"fix: halo={max(wanted, default=0)}."
            )
        return tuple(
            rounded_up(positions, multiple) for positions, multiple in zip(wanted, self.scale.multiple, strict=True)
        )

    def needs(self, axis: int, given: tuple[int, ...] | None) -> list[tuple[int, int]]:
        """Positions that each grid needs before and after its own on a side that is cut.

        Raises:
            NotLocalError: If that side cannot be cut.
        """
        for grid in self.placed:
            follows = grid.along[axis]
            if (grid.attends or grid.name == OUTPUT) and (follows is None or follows.axis < 2):
                what = "what attends" if grid.attends else "what is returned"
                raise NotLocalError(
                    f"predict_whole: side {axis} of the volume is no side of {what}, {grid.name}, so tiles must not "
                    f"cut it; fix: tile=None on that side."
                )
        if given is not None:
            return [(given[axis], given[axis])] * len(self.placed)
        return self.look().reach(axis)

    def fitting(self, given: tuple[int, ...] | None) -> tuple[tuple[int, ...], dict[int, list[tuple[int, int]]]]:
        """The largest tiles that memory allows: the longest side that can be cut is halved until they fit."""
        budget, positions = int(SHARE * free_bytes(device_of(self.model))), list(self.size)
        needs: dict[int, list[tuple[int, int]]] = {}
        fixed: set[int] = set()
        while self.tile_bytes(positions, self.joined(needs, range(len(self.placed)))) > budget:
            halves = [
                (own, axis)
                for axis, own in enumerate(positions)
                if own > self.scale.multiple[axis] and axis not in fixed
            ]
            if not halves:
                break
            own, axis = max(halves)
            try:
                needs[axis] = needs[axis] if axis in needs else self.needs(axis, given)
            except NotLocalError:
                fixed.add(axis)
                continue
            positions[axis] = rounded_up(-(-own // 2), self.scale.multiple[axis])
        if fixed and not needs:
            self.needs(fixed.pop(), given)
        return tuple(positions), needs

    def joined(self, needs: dict[int, list[tuple[int, int]]], grids: Sequence[int]) -> Halo:
        """The halo that is enough for some of the grids."""
        zeros = (0,) * len(self.size)
        halo = Halo(zeros, zeros)
        for grid in grids:
            before, after = (
                tuple(needs[axis][grid][end] if axis in needs else 0 for axis in range(len(self.size)))
                for end in (0, 1)
            )
            halo = halo.join(Halo(before, after))
        return halo

    def passes(self, needs: dict[int, list[tuple[int, int]]]) -> tuple[Pass, ...]:
        """One pass for all attentions that hear of none but those before, and the last."""
        grids = [index for index, each in enumerate(self.placed) if each.attends]
        levels = self.look().levels
        found = []
        for level in range(max(levels, default=-1) + 1):
            calls = tuple(call for call, own in enumerate(levels) if own == level)
            share = self.whole.macs[calls[-1]] / max(1, self.whole.macs[-1])
            found.append(Pass(calls, self.joined(needs, [grids[call] for call in calls]), share))
        return (*found, Pass((), self.joined(needs, [len(self.placed) - 1]), 1.0))

    def tile_bytes(self, positions: Sequence[int], halo: Halo) -> int:
        """Bytes that a tile's grids take at once."""
        read = halo.around(cores(self.size, positions)[0], self.size)
        if self.axes_cut(positions):
            read = at_least(self.look().least, read, self.size)
        size = tuple(
            min(side, stop + before) for side, (_, stop), before in zip(self.size, read, halo.before, strict=True)
        )
        return trace(self.model, (self.batch, self.channels, *size), whole=True).peak

    def check_summaries(self) -> None:
        """Refuse an attention whose summary is its grid, where that is too large."""
        free = free_bytes(device_of(self.model))
        names = [grid.name for grid in self.placed if grid.attends]
        for attention, name, size in zip(self.whole.attentions, names, self.whole.summaries, strict=True):
            if is_grid(attention) and size > SUMMARY_SHARE * free:
                raise ValueError(
                    f"predict_whole: the summary of {attention.operator_name} at {name} is its grid, {size:,} bytes, "
                    f"and {free:,} are free; fix: an operator that compresses, such as factorized_gaussian."
                )


def free_bytes(device: torch.device) -> int:
    """Memory that is free where a model runs."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return 1024 * int(next(line.split()[1] for line in lines if line.startswith("MemAvailable")))
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
