"""Choose tiles and passes for a volume: halos, the order of attentions, and the memory of a tile."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Sequence
from fractions import Fraction
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn

from farfield._checks import ShapeError
from farfield.streaming.geometry import Halo, NetworkGrid, StoredGrid, cores, enlarge_region, round_up
from farfield.streaming.global_layers import NotLocalError
from farfield.streaming.receptive_field import Probe, not_local_error
from farfield.streaming.replacement import AttentionLayer, follows_tile
from farfield.streaming.scale import Scale
from farfield.streaming.softmax_layer import SoftmaxLayer
from farfield.streaming.spill_choice import is_storable
from farfield.streaming.summaries import has_grid_summary
from farfield.streaming.trace import OUTPUT, Trace, device_of, trace
from farfield.streaming.verification import find_difference

if TYPE_CHECKING:
    from farfield.streaming.arguments import Tiles

# Share of the free memory that the grids of a tile may take; the workspace of kernels is not counted.
SHARE = 1 / 4
# Share of the free memory that a summary may take if it has a slot for each key, as that of softmax has.
SUMMARY_SHARE = 1 / 2


class Pass(NamedTuple):
    """One pass over all tiles: it summarizes some attentions, or, as the last pass, computes and writes the output.

    Attributes:
        calls: Indices of the attention calls that the pass summarizes, in the order of the forward pass; empty in the
            last pass.
        halo: Positions that a tile reads before and after its own, per axis.
        share: MACs of the pass on a tile, as a share of the whole network's. A pass stops at the input of the last
            attention in `calls`; the last pass runs the whole network, so its share is 1.
    """

    calls: tuple[int, ...]
    halo: Halo
    share: float


class Draft:
    """Chooses the tiles and passes of a network on a volume; `cut` starts it.

    `grid_halos` in its methods are: axis that is cut -> for each of `grids`, the positions of the volume that it needs
    (before, after) a tile's own.

    Args:
        caller: The function that errors name.
        model: The network.
        batch: Batch size of the volume.
        channels: Channels of the volume.
        size: Size of the volume, padded.
        scale: The network's strides.
        grids: The network's grids, for the whole volume.
        whole: The network's trace on the whole volume.
        tiles: The argument of `predict_whole`.

    Attributes:
        in_tile: For each call whether its statistics are those of what a tile reads.
        keys: Call of softmax attention -> its keys and values as a grid, if the disk space that is allowed holds all.
    """

    def __init__(
        self,
        caller: str,
        model: nn.Module,
        batch: int,
        channels: int,
        size: tuple[int, ...],
        scale: Scale,
        grids: list[NetworkGrid],
        whole: Trace,
        tiles: Tiles,
    ) -> None:
        self.caller, self.model, self.batch, self.channels, self.size = caller, model, batch, channels, size
        self.scale, self.grids, self.whole = scale, grids, whole
        self.in_tile = [tiles.statistics == "tile" and follows_tile(layer) for layer in whole.layers]
        self.keys = self.find_keys()
        if self.keys_bytes > tiles.disk:
            self.keys = {}
        self.probe: Probe | None = None

    def cut(
        self, tile: int | Sequence[int | None] | None, halo: int | Sequence[int] | None, memory: int | None
    ) -> tuple[tuple[int, ...], tuple[Pass, ...]]:
        """Choose tiles and passes, and check that they give the result of the whole.

        Args:
            tile: The argument of `predict_whole`.
            halo: The argument of `predict_whole`.
            memory: Bytes that the grids of a tile may take; None for a share of the free memory.

        Returns:
            The size of the tiles, and the passes.

        Raises:
            NotLocalError: If tiles do not give the result of the whole.
            ShapeError: If `halo` has a number of entries other than that of the spatial dims.
            ValueError: If a summary takes too much memory.
        """
        given = None if halo is None else self.round_halo(halo)
        if tile is None:
            positions, grid_halos = self.fit_memory(given, memory)
        else:
            positions = self.round_tile(tile)
            grid_halos = {axis: self.find_grid_halos(axis, given) for axis in self.cut_axes(positions)}
        if not grid_halos:  # a single tile, so no halo
            return positions, (Pass((), self.join_halos({}, range(0)), 1.0),)
        for axis in grid_halos:
            self.check(axis, positions[axis], grid_halos, given is not None)
        self.check_summaries()
        return positions, self.passes(grid_halos)

    def check(self, axis: int, positions: int, grid_halos: dict[int, list[tuple[int, int]]], given: bool) -> None:
        """Check that tiles along an axis give the result of the whole; enlarge the halos of the axis if they do not.

        Where a layer pads by the grid's own values, reflected for example, a position near a border depends on
        positions that the halo of other positions does not reach: in either direction up to the sum of both halos, and
        further if the layer makes the grid longer. So first that sum is tried at both ends, then twice as much.

        Args:
            axis: The spatial axis.
            positions: Length of the tiles along it.
            grid_halos: The halos; those of `axis` are replaced if they are too small.
            given: Whether the user gave the halo, which then stays as it is.

        Raises:
            NotLocalError: If tiles do not give the result of the whole with the largest halos either.
        """
        halos, step = grid_halos[axis], self.first_difference(axis, positions, grid_halos)
        for times in () if given else (1, 2):
            if step is not None:
                mirrored = [times * (before + after + self.length_change(axis)[1]) for before, after in halos]
                grid_halos[axis] = [(both, both) for both in mirrored]
                step = self.first_difference(axis, positions, grid_halos)
        if step is not None:
            raise not_local_error(
                self.caller, self.model, step, axis, "gives other results in tiles than on the whole volume"
            )

    def first_difference(self, axis: int, positions: int, grid_halos: dict[int, list[tuple[int, int]]]) -> str | None:
        """Return the name of the first step that differs between tiles and the whole in any pass; None if none does."""
        last, (shorter, longer) = (self.size[axis] - 1) % positions + 1, self.length_change(axis)
        for each in self.passes(grid_halos):
            enough = each.halo.before[axis] + each.halo.after[axis] + longer + self.scale.multiple[axis]
            # A grid may end earlier than the volume: the last tiles have nothing of it, and it ends in an inner tile.
            first, last = min(positions, enough), last if last <= enough else enough + last % self.scale.multiple[axis]
            widths = [first, enough, *[first] * -(-shorter // first), last]
            covered = [
                before <= each.halo.before[axis] and after <= each.halo.after[axis]
                for before, after in grid_halos[axis]
            ]
            difference = find_difference(self.get_probe(), axis, each.halo, widths, each.calls, covered)
            if difference is not None:
                return difference
        return None

    def length_change(self, axis: int) -> tuple[int, int]:
        """Return by how many positions of the volume a grid is at most shorter, and longer, than the volume on an axis.

        Both numbers are rounded up to a multiple of the strides.
        """
        grids = [(grid.shape, grid.axis_scales[axis]) for grid in self.grids]
        ends = [
            shape[axis_scale.axis] / axis_scale.ratio - self.size[axis]
            for shape, axis_scale in grids
            if axis_scale is not None
        ]
        multiple = self.scale.multiple[axis]
        return round_up(max(Fraction(0), -min(ends)), multiple), round_up(max(Fraction(0), max(ends)), multiple)

    def least(self, positions: Sequence[int], halo: Halo) -> tuple[int, ...]:
        """Return the smallest size that a tile reads: what the network takes, or all tiles if they have statistics.

        Args:
            positions: Size of the tiles; zeros are returned if nothing is cut.
            halo: Halo of all passes.
        """
        if self.probe is None:
            return (0,) * len(self.size)
        if not any(self.in_tile):
            return self.probe.least
        # The remainder of the volume's size, so that a tile at the volume's end starts at a multiple of the strides.
        return tuple(
            min(length, max(least, own + before + after + length % multiple))
            for length, least, own, before, after, multiple in zip(
                self.size, self.probe.least, positions, *halo, self.scale.multiple, strict=True
            )
        )

    @cached_property
    def levels(self) -> list[int]:
        """As `Probe.find_levels` returns them."""
        return self.get_probe().find_levels(self.in_tile)

    def cut_axes(self, positions: Sequence[int]) -> list[int]:
        """Return the axes along which tiles of this size are shorter than the volume."""
        return [axis for axis, (own, length) in enumerate(zip(positions, self.size, strict=True)) if own < length]

    def get_probe(self) -> Probe:
        """Return the probe, which runs the network on small grids; it is made once."""
        self.probe = self.probe or Probe(self.caller, self.model, self.channels, self.size, self.scale)
        return self.probe

    def round_tile(self, tile: int | Sequence[int | None]) -> tuple[int, ...]:
        """Return the size of the requested tiles, rounded up to multiples of the strides."""
        requested = (tile,) * len(self.size) if isinstance(tile, int) else tuple(tile)
        pairs = zip(requested, self.size, self.scale.multiple, strict=True)
        return tuple(
            length if positions is None else min(length, round_up(positions, multiple))
            for positions, length, multiple in pairs
        )

    def round_halo(self, halo: int | Sequence[int]) -> tuple[int, ...]:
        """Return the requested halo per spatial dim, rounded up to multiples of the strides.

        Raises:
            ShapeError: If it has another number of entries than spatial dims.
        """
        requested = (halo,) * len(self.size) if isinstance(halo, int) else tuple(halo)
        if len(requested) != len(self.size):
            raise ShapeError(
                f"{self.caller}: halo must be one number, or one for each of {len(self.size)} spatial dims, got "
                f"{halo!r}; fix: halo={max(requested, default=0)}."
            )
        return tuple(
            round_up(positions, multiple) for positions, multiple in zip(requested, self.scale.multiple, strict=True)
        )

    def find_grid_halos(self, axis: int, given: tuple[int, ...] | None) -> list[tuple[int, int]]:
        """Return the positions that each grid needs (before, after) a tile's own, along an axis.

        Args:
            axis: The spatial axis of the volume.
            given: The halo that the user gave, per axis; None to find it by the probe.

        Raises:
            NotLocalError: If the axis cannot be cut.
        """
        for grid in self.grids:
            axis_scale = grid.axis_scales[axis]
            if (grid.summarized or grid.name == OUTPUT) and (axis_scale is None or axis_scale.axis < 2):
                what = f'the input of "{grid.name}"' if grid.summarized else "the network's output"
                raise NotLocalError(
                    f"{self.caller}: spatial axis {axis} of the volume is no spatial axis of {what}, so tiles must "
                    f"not cut it; fix: tile=None on that axis."
                )
        if given is not None:
            return [(given[axis], given[axis])] * len(self.grids)
        if any(self.scale.windows):
            name = self.scale.steps[self.scale.windows.index(True)].name
            raise not_local_error(self.caller, self.model, name, axis, "gets windows of the grid as samples")
        return self.get_probe().reach(axis)

    def fit_memory(
        self, given: tuple[int, ...] | None, memory: int | None
    ) -> tuple[tuple[int, ...], dict[int, list[tuple[int, int]]]]:
        """Find the largest tiles that memory allows: halve the longest axis that can be cut until they fit.

        If they never fit, the tiles are the smallest that can be cut.

        Args:
            given: The halo that the user gave, per axis; None to find it by the probe.
            memory: Bytes that the grids of a tile may take; None for a share of the free memory.

        Returns:
            The size of the tiles, and the halos of the axes that are cut.

        Raises:
            NotLocalError: If the whole does not fit and no axis can be cut.
        """
        budget = int(SHARE * free_bytes(device_of(self.model))) if memory is None else memory
        positions = list(self.size)
        grid_halos: dict[int, list[tuple[int, int]]] = {}
        fixed: set[int] = set()
        while self.tile_bytes(positions, self.join_halos(grid_halos, range(len(self.grids)))) > budget:
            halves = [
                (own, axis)
                for axis, own in enumerate(positions)
                if own > self.scale.multiple[axis] and axis not in fixed
            ]
            if not halves:
                break
            own, axis = max(halves)
            try:
                grid_halos[axis] = grid_halos[axis] if axis in grid_halos else self.find_grid_halos(axis, given)
            except NotLocalError:
                fixed.add(axis)
                continue
            positions[axis] = round_up(-(-own // 2), self.scale.multiple[axis])
        if fixed and not grid_halos:
            self.find_grid_halos(fixed.pop(), given)
        return tuple(positions), grid_halos

    def join_halos(self, grid_halos: dict[int, list[tuple[int, int]]], grids: Sequence[int]) -> Halo:
        """Return the smallest halo that is enough for the grids with these indices; 0 on axes that are not cut."""
        zeros = (0,) * len(self.size)
        halo = Halo(zeros, zeros)
        for grid in grids:
            before, after = (
                tuple(grid_halos[axis][grid][end] if axis in grid_halos else 0 for axis in range(len(self.size)))
                for end in (0, 1)
            )
            halo = halo.join(Halo(before, after))
        return halo

    def passes(self, grid_halos: dict[int, list[tuple[int, int]]]) -> tuple[Pass, ...]:
        """Return one pass for each level of attentions, and the last pass, which writes.

        Layers that take their statistics from a tile need no pass. All passes then have the same halo, so that these
        statistics are the same in all.
        """
        summarized = [index for index, each in enumerate(self.grids) if each.summarized]
        levels = {call: level for call, level in enumerate(self.levels) if not self.in_tile[call]}
        whole = self.join_halos(grid_halos, [*summarized, len(self.grids) - 1]) if any(self.in_tile) else None
        passes = []
        for level in range(max(levels.values(), default=-1) + 1):
            calls = tuple(call for call, own in levels.items() if own == level)
            share = self.whole.macs[calls[-1]] / max(1, self.whole.macs[-1])
            halo = whole or self.join_halos(grid_halos, [summarized[call] for call in calls])
            passes.append(Pass(calls, halo, share))
        return (*passes, Pass((), whole or self.join_halos(grid_halos, [len(self.grids) - 1]), 1.0))

    def tile_bytes(self, positions: Sequence[int], halo: Halo) -> int:
        """Return the most bytes that the grids of one tile and its halo take at once."""
        read = halo.around(cores(self.size, positions)[0], self.size)
        if self.cut_axes(positions):
            read = enlarge_region(self.get_probe().least, read, self.size)
        size = tuple(
            min(length, stop + before) for length, (_, stop), before in zip(self.size, read, halo.before, strict=True)
        )
        return trace(self.caller, self.model, (self.batch, self.channels, *size), whole=True).peak

    def find_keys(self) -> dict[int, StoredGrid]:
        """Return the keys and values of softmax attentions whose grids have the volume's axes, as grids."""
        steps = [index for index, grid in enumerate(self.grids) if grid.summarized]
        keys = {}
        for call, (step, layer) in enumerate(zip(steps, self.whole.layers, strict=True)):
            dtype = self.whole.steps[step].dtype
            if isinstance(layer, SoftmaxLayer) and is_storable(self.grids[step], dtype):
                grid = self.grids[step]._replace(shape=layer.stored_shape(self.grids[step].shape))
                keys[call] = StoredGrid(grid, dtype, math.prod(grid.shape) * dtype.itemsize, -1)
        return keys

    @property
    def keys_bytes(self) -> int:
        """Bytes of disk for keys and values."""
        return sum(each.bytes for each in self.keys.values())

    def check_summaries(self) -> None:
        """Refuse an attention whose summary has a slot for each key, if that takes too much of the free memory.

        Raises:
            ValueError: If a summary takes more than SUMMARY_SHARE of it.
        """
        free = free_bytes(device_of(self.model))
        names = [grid.name for grid in self.grids if grid.summarized]
        for call, (layer, name, size) in enumerate(zip(self.whole.layers, names, self.whole.summaries, strict=True)):
            if call in self.keys:  # on disk
                continue
            attends = isinstance(layer, AttentionLayer) and has_grid_summary(layer.attention)
            if (attends or isinstance(layer, SoftmaxLayer)) and size > SUMMARY_SHARE * free:
                operator = layer.attention.operator_name if isinstance(layer, AttentionLayer) else "softmax attention"
                needed = sum(each.bytes for each in self.find_keys().values())
                fix = (
                    f"tile=Tiles(…, disk={needed}), which stores keys and values on disk, or "
                    if attends is False
                    else ""
                )
                raise ValueError(
                    f"{self.caller}: the summary of {operator} at {name} is its grid, {size:,} "
                    f"bytes, and may take half of the {free:,} bytes that are free; fix: {fix}an operator that "
                    f"compresses, such as factorized_gaussian."
                )


def free_bytes(device: torch.device) -> int:
    """Return the bytes of free memory on a device; half of all memory where the system does not report it."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return 1024 * int(next(line.split()[1] for line in lines if line.startswith("MemAvailable")))
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
