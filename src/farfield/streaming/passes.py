"""Run the passes of a plan as tasks: a pass and a tile give partial sums, stored values and a box of the output."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from farfield.streaming.graph import Value
from farfield.streaming.layers import are_numbers, not_finite
from farfield.streaming.patches import PatchPlan, run_patch
from farfield.streaming.plan import GraphPlan
from farfield.streaming.rules.rule import Parts
from farfield.streaming.run import compute, summarize_tile
from farfield.streaming.spans import Box, Span, read_box, region_of
from farfield.streaming.store import Store

# (sample, volume, tile, box) -> the numbers of a volume
ReadVolume = Callable[[int, int, int, Box], Tensor]
# (sample, box, numbers) writes the output
WriteOutput = Callable[[int, Box, Tensor], None]


class MergeTree:
    """Merges the parts of tiles in a binary tree over their number, so that the result follows from the tiles alone.

    Args:
        merge: Merges the parts of two runs of tiles, the earlier first.
    """

    def __init__(self, merge: Callable[[Parts, Parts], Parts]) -> None:
        self.merge = merge
        # (number of merges above a tile, parts) of runs of tiles in order: at most one of each height.
        self.runs: list[tuple[int, Parts]] = []

    def add(self, parts: Parts) -> None:
        """Add the parts of the next tile."""
        height = 0
        while self.runs and self.runs[-1][0] == height:
            parts, height = self.merge(self.runs.pop()[1], parts), height + 1
        self.runs.append((height, parts))

    def whole(self) -> Parts:
        """Return the parts of all tiles."""
        *earlier, (_, parts) = self.runs
        for _, each in reversed(earlier):
            parts = self.merge(each, parts)
        return parts


def spreads(numbers: Tensor) -> bool:
    """Whether keys or values of attention would make each response NaN; a mask may hide positions by -inf."""
    return bool((numbers.isnan() | numbers.isposinf()).any()) if numbers.dtype.is_floating_point else False


def not_finite_in(path: str, tile: Sequence[Span]) -> ValueError:
    """Return the error for numbers of a tile that would spread to every position."""
    return not_finite(f"predict_whole: {path}", tuple(start for start, _ in tile))


class Sums(Mapping[int, Parts]):
    """The parts of all reductions of a plan, merged when they are first read.

    Args:
        plan: The plan.
    """

    def __init__(self, plan: GraphPlan) -> None:
        self.reductions, self.nodes = plan.labelled.reductions, plan.labelled.graph.nodes
        self.trees: dict[int, MergeTree] = {}
        self.merged: dict[int, Parts] = {}

    def add(self, index: int, parts: Parts, tile: Sequence[Span]) -> None:
        """Add the parts of the next tile to those of a reduction.

        Raises:
            ValueError: If they are not numbers, and would spread to every position.
        """
        if not are_numbers(parts):
            raise not_finite_in(self.nodes[index].path, tile)
        if index not in self.trees:
            self.trees[index] = MergeTree(self.reductions[index].merge)
        self.trees[index].add(parts)
        self.merged.pop(index, None)

    def __getitem__(self, index: int) -> Parts:
        if index not in self.merged:
            self.merged[index] = self.trees[index].whole()
        return self.merged[index]

    def __iter__(self) -> Iterator[int]:
        return iter(self.trees)

    def __len__(self) -> int:
        return len(self.trees)

    def state(self) -> dict[str, Any]:
        """Return the state that `load` resumes from."""
        return {str(index): list(tree.runs) for index, tree in self.trees.items()}

    def load(self, state: Mapping[str, Any]) -> None:
        """Resume from a saved state."""
        self.trees, self.merged = {}, {}
        for name, runs in state.items():
            tree = self.trees[int(name)] = MergeTree(self.reductions[int(name)].merge)
            tree.runs = [(height, tuple(parts)) for height, parts in runs]


class TiledRun:
    """Runs the tasks of a plan; samples that no layer mixes run one after the other, each through all passes.

    Args:
        plan: The plan of one sample, or of all that are mixed.
        patches: How it runs on patches, if norms and pooling see what a tile reads.
        store: Its stored values.
        read_volume: Reads a box of a volume.
        write_output: Writes a box of the output.
    """

    def __init__(
        self,
        plan: GraphPlan,
        patches: PatchPlan | None,
        store: Store,
        read_volume: ReadVolume,
        write_output: WriteOutput,
    ) -> None:
        self.plan, self.patches, self.store = plan, patches, store
        self.read_volume, self.write_output = read_volume, write_output
        self.sums, self.sample = Sums(plan), 0

    def run_task(self, number: int, index: int) -> None:
        """Run a pass on a tile.

        Args:
            number: The pass, counted over all samples.
            index: The tile.
        """
        sample, stage = divmod(number, len(self.plan.stages))
        if sample != self.sample:
            self.sums, self.sample = Sums(self.plan), sample
        if index == 0:
            # Not at the end of the pass before: a prediction that is killed there still needs what that pass read.
            self.store.end((stage - 1) % len(self.plan.stages))
        if self.patches is not None:
            self.run_patch(self.patches, sample, stage, index)
        else:
            self.run_regions(sample, stage, index)
        if index == len(self.plan.tiles) - 1 and self.plan.stages[stage].last:
            self.store.close()

    def run_patch(self, patches: PatchPlan, sample: int, stage: int, index: int) -> None:
        """Run a pass on the patch of a tile."""
        tile = self.plan.tiles[index]
        spans = [(span,) for span in patches.region(tile)]
        volumes = []
        for number, value in enumerate(patches.patch.inputs):
            batch, channels = patches.patch.info(value).shape[:2]
            volumes.append(self.read_volume(sample, number, index, (((0, batch),), ((0, channels),), *spans)))
        summarized, output = run_patch(patches, stage, tile, volumes, self.sums)
        for node, parts in summarized.items():
            self.sums.add(node, parts, tile)
        if output is not None:
            self.write_output(sample, *output)

    def run_regions(self, sample: int, stage: int, index: int) -> None:
        """Run a pass on what a tile needs of each value."""
        plan, labelled = self.plan, self.plan.labelled
        summarized, wanted = plan.wanted(stage, plan.tiles[index])
        inputs = labelled.graph.inputs

        def read(value: Value, box: Box) -> Tensor:
            if value in inputs:
                return self.read_volume(sample, inputs.index(value), index, box)
            return self.store.read(value, index, box)

        known, tile = compute(labelled, wanted, plan.given(stage), read, self.sums), plan.tiles[index]

        def part(value: Value, box: Box) -> Tensor:
            return read_box(known[value], region_of(wanted[value]), box)

        for node, boxes in summarized.items():
            self.sums.add(node, summarize_tile(labelled, node, boxes, part, tile), tile)
        for value in plan.stages[stage].writes:
            box = plan.own_box(value, tile)
            if box is not None:
                numbers = part(value, box)
                if value in labelled.gathered and spreads(numbers):
                    raise not_finite_in(labelled.graph.nodes[value.node].path, tile)
                self.store.write(value, index, box, numbers)
        output, box = labelled.graph.output, plan.own_box(labelled.graph.output, tile)
        if plan.stages[stage].last and box is not None:
            self.write_output(sample, box, part(output, box))

    def state(self) -> dict[str, Any]:
        """Return the state that `load` resumes from."""
        return {"sample": self.sample, "sums": self.sums.state(), "stored": self.store.state()}

    def load(self, state: Mapping[str, Any]) -> None:
        """Resume from a saved state."""
        self.sample = state["sample"]
        self.sums.load(state["sums"])

    def holds(self, state: Mapping[str, Any], number: int, index: int) -> bool:
        """Whether a pass can go on with a tile: the state has the sums of its sample, and files what was stored."""
        sample, stage = divmod(number, len(self.plan.stages))
        if state["sample"] != sample:  # right only where the pass is the first of the next sample, or none is left
            return (state["sample"], stage, index) == (sample - 1, 0, 0)
        return self.store.holds(state["stored"], stage, index)
