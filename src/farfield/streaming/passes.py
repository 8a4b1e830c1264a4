"""Run the passes of a plan as tasks: a pass and a tile give partial sums, stored values and a box of the output."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from farfield.streaming.graph import Value
from farfield.streaming.layers import are_numbers, not_finite
from farfield.streaming.plan import GraphPlan, PatchPlan
from farfield.streaming.rules.rule import OperationCall, Parts, Reduction
from farfield.streaming.run import Read, compute, summarize_tile
from farfield.streaming.spans import Box, Span, read_box, region_of
from farfield.streaming.store import Store

# (sample, volume, tile, box) -> the numbers of a volume
ReadVolume = Callable[[int, int, int, Box], Tensor]
# (sample, box, numbers) writes the output
WriteOutput = Callable[[int, Box, Tensor], None]


class MergeTree:
    """Merges the parts of tiles in a binary tree over their number, so that the result follows from the tiles alone."""

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


class Sums(dict[int, Parts]):
    """The parts of all tiles of each reduction of a plan, merged when they are first read."""

    def __init__(self, plan: GraphPlan) -> None:
        self.reductions, self.nodes = plan.labelled.reductions, plan.labelled.graph.nodes
        self.trees: dict[int, MergeTree] = {}

    def __missing__(self, index: int) -> Parts:
        self[index] = self.trees[index].whole()
        return self[index]

    def add(self, index: int, parts: Parts, tile: Sequence[Span]) -> None:
        """Add the parts of the next tile to those of a reduction; refuse NaN, which would spread to every position."""
        if not are_numbers(parts):
            raise _not_finite_in(self.nodes[index].path, tile)
        self.trees.setdefault(index, MergeTree(self.reductions[index].merge)).add(parts)
        self.pop(index, None)

    def state(self) -> dict[str, Any]:
        """Return the state that `load` resumes from."""
        return {str(index): list(tree.runs) for index, tree in self.trees.items()}

    def load(self, state: Mapping[str, Any]) -> None:
        """Resume from a saved state."""
        self.clear()
        self.trees = {int(name): MergeTree(self.reductions[int(name)].merge) for name in state}
        for name, runs in state.items():
            self.trees[int(name)].runs = [(height, tuple(parts)) for height, parts in runs]


class TiledRun:
    """Runs the tasks of a plan; samples that no layer mixes run one after the other, each through all passes.

    `patches` is how it runs if norms and pooling see what a tile reads.
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
        """Run a pass, counted over all samples, on a tile."""
        sample, stage = divmod(number, len(self.plan.stages))
        if sample != self.sample:
            self.sums, self.sample = Sums(self.plan), sample
        if index == 0:
            # Not at the end of the pass before: a prediction that is killed there still needs what that pass read.
            self.store.end((stage - 1) % len(self.plan.stages))
        self._run_tile(stage, index)
        if index == len(self.plan.tiles) - 1 and self.plan.stages[stage].last:
            self.store.close()

    def _run_tile(self, stage: int, index: int) -> None:
        plan, labelled, tile = self.plan, self.plan.labelled, self.plan.tiles[index]
        summarized, wanted = plan.wanted(stage, tile)
        inputs, output = labelled.graph.inputs, labelled.graph.output

        def read(value: Value, box: Box) -> Tensor:
            if value in inputs:
                return self.read_volume(self.sample, inputs.index(value), index, box)
            return self.store[value].read(index, box)

        if self.patches is not None:
            part = _compute_on_patch(self.patches, tile, wanted, read, self.sums)
        else:
            known = compute(labelled, wanted, plan.given(stage), read, self.sums)

            def part(value: Value, box: Box) -> Tensor:
                return read_box(known[value], region_of(wanted[value]), box)

        for node, boxes in summarized.items():
            self.sums.add(node, summarize_tile(labelled, node, boxes, part, tile), tile)
        for value in plan.stages[stage].writes:
            if (box := plan.own_box(value, tile)) is not None:
                numbers = part(value, box)
                if value in labelled.gathered and _spreads(numbers):
                    raise _not_finite_in(labelled.graph.nodes[value.node].path, tile)
                self.store[value].write(index, box, numbers)
        if plan.stages[stage].last and (box := plan.own_box(output, tile)) is not None:
            self.write_output(self.sample, box, part(output, box))

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


def _spreads(numbers: Tensor) -> bool:
    """Whether keys or values of attention would make each response NaN; a mask may hide positions by -inf."""
    return bool((numbers.isnan() | numbers.isposinf()).any()) if numbers.dtype.is_floating_point else False


def _not_finite_in(path: str, tile: Sequence[Span]) -> ValueError:
    return not_finite(f"predict_whole: {path}", tuple(start for start, _ in tile))


def _compute_on_patch(
    plan: PatchPlan, tile: Sequence[Span], wanted: Mapping[Value, Box], read: Read, parts: Mapping[int, Parts]
) -> Read:
    """Run the patch of a tile; return the function that reads boxes of the wanted values, as those of the whole."""
    labelled, region, inputs = plan.labelled, plan.region(tile), plan.patch.graph.inputs

    def move(value: Value, box: Box) -> Box:
        """Return where a box of a value on the patch lies in the whole; each dimension is one piece."""
        return tuple(
            ((first + start, first + stop),)
            for ((first, _),), ((start, stop),) in zip(plan.part(value, region), box, strict=True)
        )

    def reduce(index: int) -> Reduction:
        whole = labelled.reductions[index]

        def finish(call: OperationCall, output: int, box: Box, tensors: Sequence[Tensor], own: Parts) -> Any:
            return whole.finish(labelled.calls[index], output, move(Value(index, output), box), tensors, own)

        return whole._replace(finish=finish)

    patch = copy.copy(plan.patch)
    patch.reductions = {index: reduce(index) for index in plan.reductions}
    known = compute(patch, plan.patch_boxes(wanted), inputs, lambda value, box: read(value, move(value, box)), parts)
    return lambda value, box: read_box(known[value], region_of(plan.part(value, region)), box)
