"""Run the passes of a plan as tasks: a pass and a tile give partial sums, stored values and a box of the output."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from farfield.streaming.graph import Value
from farfield.streaming.layers import are_numbers, not_finite
from farfield.streaming.plan import GraphPlan
from farfield.streaming.rules.rule import Parts
from farfield.streaming.run import compute, summarize_tile
from farfield.streaming.spans import Box, Span, box_shape, read_box, region_of
from farfield.streaming.store import SUFFIX, StoredInFile, StoredInMemory

# (number of merges above a tile, parts) of runs of tiles in order: at most one of each height
Runs = list[tuple[int, Parts]]
Merge = Callable[[Parts, Parts], Parts]
# (sample, volume, tile, box) -> the numbers of a volume
ReadVolume = Callable[[int, int, int, Box], Tensor]
# (pass, tile, (volume, box) -> its numbers, merged parts) -> the tile's parts, and its box of the output
RunPatch = Callable[
    [int, Sequence[Span], Callable[[int, Box], Tensor], Mapping[int, Parts]],
    tuple[dict[int, Parts], tuple[Box, Tensor] | None],
]
# (sample, box, numbers) writes the output; None are the zeros of a tile that is skipped
WriteOutput = Callable[[int, Box, Tensor | None], None]


def add_parts(runs: Runs, parts: Parts, merge: Merge) -> None:
    """Add the parts of the next tile to those of the tiles before."""
    # In a binary tree over the number of the tile, so that the result follows from the tiles alone.
    height = 0
    while runs and runs[-1][0] == height:
        parts, height = merge(runs.pop()[1], parts), height + 1
    runs.append((height, parts))


def merge_runs(runs: Runs, merge: Merge) -> Parts:
    """Return the parts of all tiles."""
    return functools.reduce(lambda parts, earlier: merge(earlier, parts), [parts for _, parts in reversed(runs)])


def load_runs(saved: Sequence[Any]) -> Runs:
    """Return the parts of tiles from a saved state, in which they are lists."""
    return [(height, tuple(parts)) for height, parts in saved]


class Sums(dict[int, Parts]):
    """The parts of all tiles of each reduction of a plan, merged when they are first read."""

    def __init__(self, plan: GraphPlan) -> None:
        self.reductions, self.nodes = plan.labelled.reductions, plan.labelled.graph.nodes
        self.runs: dict[int, Runs] = {}

    def __missing__(self, index: int) -> Parts:
        self[index] = merge_runs(self.runs[index], self.reductions[index].merge)
        return self[index]

    def add(self, index: int, parts: Parts, tile: Sequence[Span]) -> None:
        """Add the parts of the next tile to those of a reduction; refuse NaN, which would spread to every position."""
        if not are_numbers(parts):
            raise _not_finite_in(self.nodes[index].path, tile)
        add_parts(self.runs.setdefault(index, []), parts, self.reductions[index].merge)
        self.pop(index, None)


class Store(dict[Value, StoredInMemory | StoredInFile]):
    """The values that are stored between the passes of a plan, each from its own pass to the last that reads it."""

    def __init__(self, plan: GraphPlan, on_disk: bool, folder: Path | None, device: torch.device) -> None:
        self.plan = plan
        for value in plan.stored:
            info, layout = plan.labelled.graph.info(value), plan.labelled.layouts[value]
            if not on_disk:
                self[value] = StoredInMemory(info, layout, device)
                continue
            path = None if folder is None else folder / f"{_name(value)}{SUFFIX}"
            boxes = [plan.own_box(value, tile) for tile in plan.tiles]
            name = f'"{plan.labelled.graph.nodes[value.node].path}"'
            self[value] = StoredInFile(path, name, info, boxes, device)

    def begin(self, stage: int) -> None:
        """Let go of what no pass from this one on reads; what this one stores takes over files of that."""
        stored, made, info = self.plan.stored, self.plan.stages[stage].writes, self.plan.labelled.graph.info
        sizes = {value: info(value).bytes for value in stored}
        # Pass 0 is of another sample, which reads nothing of the sample before.
        gone = [value for value, last in stored.items() if stage == 0 or last < stage]
        free = sorted((value for value in gone if value not in made and self[value].is_reusable), key=sizes.__getitem__)
        for value in sorted(made, key=sizes.__getitem__, reverse=True):
            before = value if self[value].is_reusable or not free else free.pop()
            self[value].take_over(self[before])
        # Files that are left stay for what later passes store, as far as the planned disk space has room.
        later = any(each.writes for each in self.plan.stages[stage + 1 :])
        live = (value for value, last in stored.items() if self.plan.level_of(value) <= stage <= last)
        room = self.plan.bytes_stored - sum(sizes[value] for value in live)
        kept = set()
        for value in reversed(free):
            if later and sizes[value] <= room:
                room -= sizes[value]
                kept.add(value)
        for value in gone:
            if value not in made and value not in kept:
                self[value].remove()

    def clear(self) -> None:
        """Remove all."""
        for each in self.values():
            each.remove()

    def close(self) -> None:
        """Let go of memory and opened files; what is in files with a name stays there."""
        for each in self.values():
            each.close()

    def state(self) -> dict[str, Any]:
        """Return the checksums of all blocks that are in files."""
        return {
            _name(value): {str(index): own for index, own in each.checksums.items()}
            for value, each in self.items()
            if isinstance(each, StoredInFile)
        }

    def holds(self, state: Mapping[str, Mapping[str, int]], stage: int, index: int) -> bool:
        """Whether all is there that a pass needs to go on with a tile, by the `state` that was saved."""
        for value, each in self.items():
            level, needed = self.plan.level_of(value), 0
            if level < stage <= self.plan.stored[value]:
                needed = len(self.plan.tiles)
            elif level == stage:
                needed = index
            if not each.holds(state.get(_name(value), {}), range(needed)):
                self.clear()
                return False
        return True


class TiledRun:
    """Runs the tasks of a plan; samples that no layer mixes run one after the other, each through all passes."""

    def __init__(
        self,
        plan: GraphPlan,
        run_patch: RunPatch | None,  # if norms and pooling see what a tile reads
        store: Store,
        read_volume: ReadVolume,
        write_output: WriteOutput,
        skips: Callable[[int, int, int], bool] | None = None,  # (sample, pass, tile)
    ) -> None:
        self.plan, self.run_patch, self.store, self.skips = plan, run_patch, store, skips
        self.read_volume, self.write_output = read_volume, write_output
        self.sums, self.sample = Sums(plan), 0

    def run_task(self, number: int, index: int) -> None:
        """Run a pass, counted over all samples, on a tile."""
        sample, stage = divmod(number, len(self.plan.stages))
        if sample != self.sample:
            self.sums, self.sample = Sums(self.plan), sample
        if index == 0:
            # Not at the end of the pass before: a prediction that is killed there still needs what that pass read.
            self.store.begin(stage)
        if self.skips is not None and self.skips(sample, stage, index):
            self._skip(stage, index)
        elif self.run_patch is not None:
            self._run_patch(self.run_patch, stage, index)
        else:
            self._run_regions(stage, index)
        if index == len(self.plan.tiles) - 1 and self.plan.stages[stage].last:
            self.store.close()

    def _skip(self, stage: int, index: int) -> None:
        """Store zeros in place of what a tile would store, and write none."""
        plan, tile = self.plan, self.plan.tiles[index]
        for value in plan.stages[stage].writes:
            if (box := plan.own_box(value, tile)) is not None:
                zeros = torch.zeros(box_shape(box), dtype=plan.labelled.graph.info(value).dtype)
                self.store[value].write(index, box, zeros)
        if plan.stages[stage].last and (box := plan.own_box(plan.labelled.graph.output, tile)) is not None:
            self.write_output(self.sample, box, None)

    def _run_patch(self, run_patch: RunPatch, stage: int, index: int) -> None:
        tile = self.plan.tiles[index]

        def read(volume: int, box: Box) -> Tensor:
            return self.read_volume(self.sample, volume, index, box)

        summarized, output = run_patch(stage, tile, read, self.sums)
        for node, parts in summarized.items():
            self.sums.add(node, parts, tile)
        if output is not None:
            self.write_output(self.sample, *output)

    def _run_regions(self, stage: int, index: int) -> None:
        plan, labelled, tile = self.plan, self.plan.labelled, self.plan.tiles[index]
        summarized, wanted = plan.wanted(stage, tile)
        inputs, output = labelled.graph.inputs, labelled.graph.output

        def read(value: Value, box: Box) -> Tensor:
            if value in inputs:
                return self.read_volume(self.sample, inputs.index(value), index, box)
            return self.store[value].read(index, box)

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
        sums = {str(index): list(runs) for index, runs in self.sums.runs.items()}
        return {"sample": self.sample, "sums": sums, "stored": self.store.state()}

    def load(self, state: Mapping[str, Any], number: int, index: int) -> bool:
        """Go on from a saved state with a pass and a tile; False if it has no sums of the sample, or files changed."""
        sample, stage = divmod(number, len(self.plan.stages))
        if state["sample"] == sample:
            holds = self.store.holds(state["stored"], stage, index)
        else:  # right only where the pass is the first of the next sample, or none is left
            holds = (state["sample"], stage, index) == (sample - 1, 0, 0)
        if holds:
            self.sample = state["sample"]
            self.sums.runs = {int(name): load_runs(runs) for name, runs in state["sums"].items()}
        return holds


def _spreads(numbers: Tensor) -> bool:
    """Whether keys or values of attention would make each response NaN; a mask may hide positions by -inf."""
    return bool((numbers.isnan() | numbers.isposinf()).any()) if numbers.dtype.is_floating_point else False


def _not_finite_in(path: str, tile: Sequence[Span]) -> ValueError:
    return not_finite(f"predict_whole: {path}", tuple(start for start, _ in tile))


def _name(value: Value) -> str:
    return f"{value.node}-{value.output}"
