"""Plan passes that store grids on disk, so that later passes start from them: halos, checks, tiles and costs."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from farfield.streaming.geometry import Halo, StoredGrid, index_within, round_up
from farfield.streaming.global_layers import NotLocalError
from farfield.streaming.graph import INPUT, Graph, UntraceableError, placeholder_response
from farfield.streaming.graph_recording import check_recording
from farfield.streaming.partial_network import NetworkPart, PartialNetwork, step_value
from farfield.streaming.receptive_field import find_nan_span, plain_kernels
from farfield.streaming.scale import replace_length
from farfield.streaming.spill_choice import PlannedPart, SpillChoice
from farfield.streaming.tiling import SHARE, Draft, Pass, free_bytes
from farfield.streaming.trace import Step, device_of
from farfield.streaming.verification import is_different, own_span
from farfield.volumes.source import Region

if TYPE_CHECKING:
    from farfield.streaming.arguments import Tiles

# Largest half of the length of a small grid, in multiples of the strides, on which halos are looked for.
LONGEST = 64


class SpillPlan(NamedTuple):
    """How passes start from grids that are stored on disk.

    Attributes:
        network: Runs parts of the network.
        parts: What each pass runs.
        stored: Step -> the grid that is stored.
        peak: The most bytes of disk that the stored grids take at once.
        tile_bytes: The most bytes that the grids of one tile take at once.
    """

    network: PartialNetwork
    parts: tuple[PlannedPart, ...]
    stored: dict[int, StoredGrid]
    peak: int
    tile_bytes: int

    @property
    def written(self) -> int:
        """Bytes that are written to stored grids."""
        return sum(each.bytes for each in self.stored.values())

    def describe(self, index: int) -> str:
        """Return the end of a text about a pass: the bytes that it reads and writes, without halos."""
        amounts = [
            (what, sum(self.stored[step].bytes for step in steps))
            for what, steps in (("reads", self.parts[index].part.reads), ("writes", self.parts[index].writes))
        ]
        return "".join(f", {what} {amount:,} bytes" for what, amount in amounts if amount)


class SpillDraft:
    """Plans passes that start from stored grids; `plan` starts it.

    Args:
        draft: The network on the volume.
        disk: Bytes of disk that stored grids may take at once.
        memory: Bytes that the grids of a tile may take; None for a share of the free memory.
    """

    def __init__(self, draft: Draft, disk: int, memory: int | None) -> None:
        self.draft, self.disk = draft, disk
        self.memory = int(SHARE * free_bytes(device_of(draft.model))) if memory is None else memory
        self.probe, self.size, self.grids = draft.get_probe(), draft.size, draft.grids
        self.multiple = draft.scale.multiple
        leading = draft.batch, draft.channels
        self.network = PartialNetwork(draft.caller, draft.model, leading, self.multiple, self.grids)
        self.ends = tuple(length % multiple for length, multiple in zip(self.size, self.multiple, strict=True))
        self.graph = self.network.graph(self.ends)
        check_recording(draft.caller, draft.model, self.graph, (*leading, *self.size))
        ratio = draft.whole.macs[-1] / max(1, sum(node.macs for node in self.graph.nodes))
        self.choice = SpillChoice(self.graph, self.grids, [step.dtype for step in draft.whole.steps], ratio)

    def plan(self, tiles: Tiles) -> tuple[tuple[int, ...], tuple[Pass, ...], SpillPlan]:
        """Choose tiles, passes and stored grids, and check that they give the result of the whole.

        Args:
            tiles: The argument of `predict_whole`.

        Returns:
            The size of the tiles, the passes, and the stored grids.

        Raises:
            UntraceableError: If no grid is worth storing, or tiles do not give the result of the whole.
            NotLocalError: If tiles cut an axis that cannot be cut.
        """
        stored = self.choice.choose(self.disk)
        if not stored:
            raise UntraceableError(f"no grid that saves work fits into {self.disk:,} bytes of disk")
        parts = self.choice.parts(stored)
        zeros = (0,) * len(self.size)
        halos = [Halo(zeros, zeros)] * len(parts)
        if tiles.size is None:
            positions, axes = self.fit_memory(parts, halos, tiles)
        else:
            positions = self.draft.round_tile(tiles.size)
            axes = self.draft.cut_axes(positions)
            self.set_halos(parts, halos, axes, tiles)
        if not axes:
            raise UntraceableError("the volume is one tile")
        for axis in axes:
            self.check(axis, positions[axis], parts, halos)
        self.draft.check_summaries()
        macs = max(1, sum(node.macs for node in self.graph.nodes))
        passes = tuple(
            Pass(each.calls, halo, self.graph.macs(each.order) / macs) for each, halo in zip(parts, halos, strict=True)
        )
        return positions, passes, self.gather(stored, parts, self.tile_bytes(parts, halos, positions))

    def gather(self, stored: frozenset[int], parts: list[PlannedPart], tile_bytes: int) -> SpillPlan:
        """Return the plan of the stored grids."""
        last = {step: index for index, each in enumerate(parts) for step in each.part.reads}
        dtypes = [step.dtype for step in self.draft.whole.steps]
        grids = {
            step: StoredGrid(self.grids[step], dtypes[step], self.choice.bytes[step], last[step])
            for step in sorted(stored)
        }
        return SpillPlan(self.network, tuple(parts), grids, self.choice.peak(stored), tile_bytes)

    # ---- tiles -------------------------------------------------------------------------------------------------------
    def fit_memory(
        self, parts: list[PlannedPart], halos: list[Halo], tiles: Tiles
    ) -> tuple[tuple[int, ...], list[int]]:
        """Find the largest tiles that memory allows: halve the longest axis that can be cut until they fit."""
        positions, axes, fixed = list(self.size), list[int](), set[int]()
        while self.tile_bytes(parts, halos, positions) > self.memory:
            longest = [
                (own, -axis) for axis, own in enumerate(positions) if own > self.multiple[axis] and axis not in fixed
            ]
            if not longest:
                break
            axis = -max(longest)[1]
            try:
                if axis not in axes:
                    self.set_halos(parts, halos, [axis], tiles)
            except NotLocalError:
                fixed.add(axis)
                continue
            axes = sorted({*axes, axis})
            positions[axis] = round_up(-(-positions[axis] // 2), self.multiple[axis])
        return tuple(positions), axes

    def tile_bytes(self, parts: Sequence[PlannedPart], halos: Sequence[Halo], positions: Sequence[int]) -> int:
        """Return the most bytes that the grids of one tile and its halo take at once, in any pass."""
        inner = tuple(
            (own, min(2 * own, length)) if 2 * own <= length else (0, own)
            for own, length in zip(positions, self.size, strict=True)
        )
        regions = [halo.around(inner, self.size) for halo in halos]
        graphs = [self.network.graph_at(region, self.size) for region in regions]
        return max(self.network.peak(each.part, graph) for each, graph in zip(parts, graphs, strict=True))

    # ---- halos -------------------------------------------------------------------------------------------------------
    def set_halos(self, parts: list[PlannedPart], halos: list[Halo], axes: Sequence[int], tiles: Tiles) -> None:
        """Set the halo of each pass along some axes: the given one, or else the one that its part of the network needs.

        Raises:
            NotLocalError: If an axis cannot be cut.
        """
        given = None if tiles.halo is None else self.draft.round_halo(tiles.halo)
        for axis in axes:
            self.draft.find_grid_halos(axis, (0,) * len(self.size))  # refuses an axis that cannot be cut
            for index, each in enumerate(parts):
                needed = self.needed_halo(each, axis) if given is None else (given[axis], given[axis])
                before, after = (list(ends) for ends in halos[index])
                before[axis], after[axis] = needed
                halos[index] = Halo(tuple(before), tuple(after))

    def needed_halo(self, each: PlannedPart, axis: int) -> tuple[int, int]:
        """Return the positions that a pass needs before and after a tile's own along an axis, by how far NaN spreads.

        NaN is put into all grids that the pass reads at once, in the tile's own positions.

        Raises:
            UntraceableError: If they are more than LONGEST multiples of the strides.
        """
        half, multiple = 2 * self.multiple[axis], self.part_multiple(each, axis)
        while half <= LONGEST * self.multiple[axis]:
            size = replace_length(self.probe.small, axis, 2 * half + multiple)
            core = tuple((half, half + multiple) if other == axis else (0, length) for other, length in enumerate(size))
            # Along this axis the grid is no multiple of the strides: it is one as inside a longer volume.
            graph = self.network.graph_at(whole_region(size), replace_length(size, axis, 2 * half + 2 * multiple))
            given = {step: self.draw(graph, step) for step in each.part.sources}
            for step, grid in given.items():
                grid[index_within(self.part_of(step, grid, core, size), whole_region(grid.shape[2:]))] = torch.nan
            with torch.no_grad(), plain_kernels():
                results = self.network.run(each.part, graph, given, placeholder_response)
            spans = {
                step: find_nan_span(self.as_step(step, grid), self.grids[step].axis_scales[axis])
                for step, grid in results.items()
            }
            if not any(span is not None and span.everywhere for span in spans.values()):
                needs = [
                    self.probe.needed_halo(span, self.grids[step].axis_scales[axis], half, multiple)
                    for step, span in spans.items()
                ]
                before, after = (max(ends) for ends in zip(*needs, strict=True))
                return before, after
            half *= 2
        raise UntraceableError(f"a pass sees further than {LONGEST} multiples of its strides")

    def part_multiple(self, each: PlannedPart, axis: int) -> int:
        """Return the multiple of which tiles of a pass are: that of the strides in its part of the network alone."""
        values = [step_value(self.graph, step) for step in (*each.part.reads, *each.part.wanted)]
        return self.network.strides(self.ends, each.order, values)[axis]

    def draw(self, graph: Graph, step: int | None) -> Tensor:
        """Draw a random grid in the place of a step; None is the volume."""
        info = graph.info(INPUT if step is None else step_value(graph, step))
        grid = torch.randn(info.shape, generator=self.probe.generator, device="cpu")
        return grid.to(self.network.device, info.dtype)

    def part_of(self, step: int | None, grid: Tensor, region: Region, whole: Sequence[int]) -> Region:
        """Return where a region of a volume of size `whole` lies in the grid of a step; None is the volume."""
        if step is None:
            return region
        return self.grids[step]._replace(shape=tuple(grid.shape)).part(region, whole)

    def as_step(self, step: int, grid: Tensor) -> Step:
        """Return a grid as a step of a run."""
        return Step(self.grids[step].name, self.grids[step].summarized, tuple(grid.shape), grid.dtype, grid)

    # ---- the check ---------------------------------------------------------------------------------------------------
    def check(self, axis: int, positions: int, parts: list[PlannedPart], halos: list[Halo]) -> None:
        """Check that tiles along an axis give in each pass what the whole gives; enlarge halos that do not.

        Larger halos are tried for the same reasons as in `Draft.check`.

        Raises:
            UntraceableError: If tiles do not give the result of the whole with the largest halos either.
        """
        for index, each in enumerate(parts):
            differs = self.first_difference(axis, positions, each, halos[index])
            for times in (1, 2):
                if differs is not None:
                    before, after = (list(ends) for ends in halos[index])
                    before[axis] = after[axis] = times * (halos[index].before[axis] + halos[index].after[axis])
                    halos[index] = Halo(tuple(before), tuple(after))
                    differs = self.first_difference(axis, positions, each, halos[index])
            if differs is not None:
                raise UntraceableError(f"{differs} in tiles that start from stored grids is not that of the whole")

    def first_difference(self, axis: int, positions: int, each: PlannedPart, halo: Halo) -> str | None:
        """Return the name of the first step that differs between tiles of a pass and the whole; None if none does.

        The whole is a small grid; a pass reads the grids of the whole in the place of stored ones.
        """
        multiple = self.multiple[axis]
        enough = round_up(halo.before[axis] + halo.after[axis] + multiple, multiple)
        last = (self.size[axis] - 1) % positions + 1
        widths = [min(positions, enough), enough, last if last <= enough else enough + last % multiple]
        widths[1] += round_up(max(0, self.probe.least[axis] - sum(widths)), multiple)
        stops = list(itertools.accumulate(widths))
        size = replace_length(self.probe.small, axis, stops[-1])
        graph = self.network.graph_at(whole_region(size), size)
        wanted = (*dict.fromkeys([*each.part.wanted, *each.part.reads]),)
        volume = self.draw(graph, None)
        with torch.no_grad():
            whole = self.network.run(NetworkPart(wanted, (), True), graph, {None: volume}, placeholder_response)
            for core in zip([0, *stops], stops, strict=False):
                tile = tuple(core if other == axis else (0, length) for other, length in enumerate(size))
                region = halo.around(tile, size)
                given = {
                    step: grid[index_within(self.part_of(step, grid, region, size), whole_region(grid.shape[2:]))]
                    for step in each.part.sources
                    for grid in [volume if step is None else whole[step]]
                }
                try:
                    graph = self.network.graph_at(region, size)
                    own = self.network.run(each.part, graph, given, placeholder_response)
                except RuntimeError:  # the grid is smaller than a layer takes
                    return self.grids[each.part.wanted[0]].name
                for step in each.part.wanted:
                    one, other = self.as_step(step, whole[step]), self.as_step(step, own[step])
                    axis_scale = self.grids[step].axis_scales[axis]
                    span = own_span(one, axis_scale, core, stops[-1])
                    if is_different(one, other, axis_scale, span, region[axis][0]):
                        return self.grids[step].name
        return None


def plan_spill(draft: Draft, tiles: Tiles) -> tuple[tuple[tuple[int, ...], tuple[Pass, ...], SpillPlan] | None, str]:
    """Plan passes that start from stored grids, if `tiles` allows them disk space.

    Returns:
        What `SpillDraft.plan` returns, or None; and why it is None, unless no disk space is allowed.
    """
    if not tiles.disk:
        return None, ""
    if any(draft.in_tile):
        return None, "norms see what a tile reads of the volume, and stored grids would be read with other halos"
    try:
        return SpillDraft(draft, tiles.disk - draft.keys_bytes, tiles.memory).plan(tiles), ""
    except (UntraceableError, RuntimeError) as error:  # a part of the network may not take a grid that the whole takes
        return None, str(error)


def whole_region(size: Sequence[int]) -> Region:
    """Return the region that is all of a grid."""
    return tuple((0, length) for length in size)
