"""Choose the grids of a network that are stored on disk between passes, so that later passes do not recompute them."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from functools import cache
from typing import NamedTuple

import torch

from farfield.streaming.geometry import NetworkGrid
from farfield.streaming.graph import INPUT, Graph, Value
from farfield.streaming.partial_network import NetworkPart, step_value

# A grid that saves fewer MACs than this for each of its bytes is recomputed: writing and reading it takes longer.
MACS_A_BYTE = 20


class PlannedPart(NamedTuple):
    """The part of a network that one pass runs.

    Attributes:
        calls: Calls of layers that need the whole grid that the pass summarizes; empty in the last pass.
        inputs: The inputs of these calls: indices of steps.
        part: What it runs.
        writes: The grids that it stores: indices of steps.
        order: The nodes of the graph that run.
    """

    calls: tuple[int, ...]
    inputs: tuple[int, ...]
    part: NetworkPart
    writes: tuple[int, ...]
    order: tuple[int, ...]


class SpillChoice:
    """Chooses stored grids of a network.

    Args:
        graph: The network's operations.
        grids: The network's grids, for the whole volume.
        dtypes: Their dtypes.
        ratio: MACs on the whole volume, relative to those of the graph.
    """

    def __init__(self, graph: Graph, grids: Sequence[NetworkGrid], dtypes: Sequence[torch.dtype], ratio: float) -> None:
        self.graph, self.ratio = graph, ratio
        self.inputs = [step for step, grid in enumerate(grids) if grid.summarized]
        self.output, self.step_of, self.bytes = len(grids) - 1, dict[Value, int](), dict[int, int]()
        # The input of a layer that needs the whole grid stands for other steps with the same grid.
        for step in [*self.inputs, *range(len(grids) - 1)]:
            value = graph.steps[step].grid
            if value not in (None, INPUT) and value not in self.step_of and is_storable(grids[step], dtypes[step]):
                self.step_of[value] = step
                self.bytes[step] = math.prod(grids[step].shape) * dtypes[step].itemsize

    def level(self, step: int) -> int:
        """Return the index of the pass that computes a step first."""
        return self.graph.levels[step_value(self.graph, step).node]

    @property
    def levels(self) -> int:
        """The number of passes that summarize."""
        return 1 + max(map(self.level, self.inputs), default=-1)

    def parts(self, stored: Collection[int]) -> list[PlannedPart]:
        """Return what each pass runs if these steps are stored."""
        return [self.part(index, frozenset(stored)) for index in range(self.levels + 1)]

    def part(self, index: int, stored: frozenset[int]) -> PlannedPart:
        """Return what the pass with an index runs."""
        writes = tuple(step for step in sorted(stored) if self.level(step) == index)
        calls = tuple(call for call, step in enumerate(self.inputs) if self.level(step) == index)
        inputs = tuple(self.inputs[call] for call in calls)
        wanted = (*dict.fromkeys([*inputs, *writes]),)
        if index == self.levels:
            wanted = (self.output,)
        given = {step_value(self.graph, step): step for step in sorted(stored) if self.level(step) < index}
        values = [step_value(self.graph, step) for step in wanted]
        sources = self.graph.sources(values, [INPUT, *given])
        reads = tuple(given[value] for value in sources if value in given)
        order = tuple(self.graph.order(values, [INPUT, *given]))
        return PlannedPart(calls, inputs, NetworkPart(wanted, reads, INPUT in sources), writes, order)

    def macs(self, stored: Collection[int]) -> float:
        """Return the MACs of all passes on the whole volume, without halos, if these steps are stored."""
        return self.cached_macs(frozenset(stored))

    @cache  # noqa: B019  # lives as long as one plan is made
    def cached_macs(self, stored: frozenset[int]) -> float:
        """Return what `macs` returns."""
        return self.ratio * sum(self.graph.macs(each.order) for each in self.parts(stored))

    def used(self, stored: Collection[int]) -> frozenset[int]:
        """Return those of these steps that a later pass reads."""
        while True:
            read = frozenset(step for each in self.parts(stored) for step in each.part.reads)
            if read == frozenset(stored):
                return read
            stored = read

    def alive(self, stored: Collection[int]) -> list[list[int]]:
        """Return for each pass the stored steps that exist while it runs: from their own pass to the last reader."""
        parts = self.parts(stored)
        last = {step: index for index, each in enumerate(parts) for step in each.part.reads}
        return [[step for step in last if self.level(step) <= index <= last[step]] for index in range(len(parts))]

    def peak(self, stored: Collection[int]) -> int:
        """Return the most bytes of disk that these steps take at once."""
        return max((sum(self.bytes[step] for step in each) for each in self.alive(stored)), default=0)

    def choose(self, budget: int) -> frozenset[int]:
        """Choose the steps that save MACs and fit into a budget of bytes: inputs of layers, then further grids."""
        stored = self.remove(frozenset(self.step_of.values()) & frozenset(self.inputs), budget)
        return self.remove(self.add(stored, budget), budget)

    def remove(self, stored: frozenset[int], budget: int) -> frozenset[int]:
        """Remove the steps that save least, until all save enough and fit into the budget."""
        stored = self.used(stored)
        while stored:
            alive = max(self.alive(stored), key=lambda steps: sum(self.bytes[step] for step in steps))
            full = sum(self.bytes[step] for step in alive) > budget
            saved = {step: self.macs(stored - {step}) - self.macs(stored) for step in (alive if full else stored)}
            least = min(saved, key=lambda step: (saved[step] / self.bytes[step], step))
            if not full and saved[least] >= MACS_A_BYTE * self.bytes[least]:
                break
            stored = self.used(stored - {least})
        return stored

    def add(self, stored: frozenset[int], budget: int) -> frozenset[int]:
        """Add the steps that save most, while they save enough and fit into the budget."""
        while True:
            larger = {step: stored | {step} for step in self.step_of.values() if step not in stored}
            saved = {
                step: (self.macs(stored) - self.macs(steps)) / self.bytes[step]
                for step, steps in larger.items()
                if self.level(step) < self.levels and self.peak(steps) <= budget
            }
            most = max(saved, key=lambda step: (saved[step], -step), default=None)
            if most is None or saved[most] < MACS_A_BYTE:
                return stored
            stored = larger[most]


def is_storable(grid: NetworkGrid, dtype: torch.dtype) -> bool:
    """Whether a grid has the volume's axes in their order, so that tiles of the volume are tiles of it."""
    axes = [None if axis_scale is None else axis_scale.axis - 2 for axis_scale in grid.axis_scales]
    return axes == list(range(len(grid.shape) - 2)) and dtype.is_floating_point
