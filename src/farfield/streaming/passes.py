"""Run the passes of a plan as tasks: a pass and a tile give partial sums, stored values and a box of the output."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from farfield.streaming.graph import Value
from farfield.streaming.layers import are_numbers, not_finite
from farfield.streaming.patches import compute_patch
from farfield.streaming.plan import GraphPlan, PatchPlan
from farfield.streaming.records import Merge, Record, Records, empty_record
from farfield.streaming.rules.rule import Parts
from farfield.streaming.run import compute, summarize_tile
from farfield.streaming.spans import Box, Span, box_shape, read_box, region_of
from farfield.streaming.store import SUFFIX, StoredInBlocks, StoredInFile, StoredInMemory

# (sample, volume, tile, box) -> the numbers of a volume
ReadVolume = Callable[[int, int, int, Box], Tensor]
# (sample, box, numbers) writes the output; None are the zeros of a tile that is skipped
WriteOutput = Callable[[int, Box, Tensor | None], None]
# (sample, pass, tile) -> whether the tile is skipped
Skips = Callable[[int, int, int], bool]

# Pass -> the merged parts of all tiles, by key
PartsOf = Callable[[int], Mapping[str, Parts]]


def has_no_parts(key: str) -> Merge:
    """Raise LookupError: nothing is merged of a pass that summarizes nothing."""
    raise LookupError(key)


class Pass(NamedTuple):
    """A pass over tiles: how many, what it does with one and returns of it, how parts merge, and the work of all."""

    tiles: int
    run_tile: Callable[[int], Record]
    work: float  # relative to that of other passes
    merge: Callable[[str], Merge] = has_no_parts


class Run(ABC):
    """What a prediction does with its tiles. Without methods of their own, nothing is stored between passes."""

    @property
    @abstractmethod
    def passes(self) -> list[Pass]:
        """The passes over all tiles."""

    def resume(self, number: int, finished: Collection[int], sums: Mapping[str, Mapping[str, int]]) -> bool:
        """Go on with a pass of which some tiles are finished; False if what was stored for it is gone."""
        return True

    def first_pass(self, number: int) -> int:
        return 0

    def clean(self, number: int) -> None:  # noqa: B027  # nothing is stored
        """Remove what was stored and no pass from this one on reads, where several processes work."""

    def close(self) -> None:  # noqa: B027  # nothing is open
        """Let go of files and memory."""


class Sums(dict[int, Parts]):
    """The parts of all tiles of each reduction of a plan, merged; those of a pass are read when one is first used."""

    def __init__(self, plan: GraphPlan, parts_of: PartsOf) -> None:
        self.levels, self.parts_of = plan.labelled.levels, parts_of

    def __missing__(self, index: int) -> Parts:
        self.update({int(key): parts for key, parts in self.parts_of(self.levels[index] - 1).items()})
        return self[index]


class Store(dict[Value, StoredInMemory | StoredInFile]):
    """The values that are stored between the passes of a plan, each from its own pass to the last that reads it.

    If several processes share it, each block is a file of its own, in `folder`.
    """

    def __init__(
        self, plan: GraphPlan, on_disk: bool, folder: Path | None, device: torch.device, *, shared: bool = False
    ) -> None:
        self.plan = plan
        # Those of which each block is a file: none, or all.
        self.blocks: dict[Value, StoredInBlocks] = {}
        for value in plan.stored:
            info, layout = plan.labelled.graph.info(value), plan.labelled.layouts[value]
            if not on_disk:
                self[value] = StoredInMemory(info, layout, device)
                continue
            path = None if folder is None else folder / f"{name_value(value)}{SUFFIX}"
            boxes = [plan.own_box(value, tile) for tile in plan.tiles]
            name = f'"{plan.labelled.graph.nodes[value.node].path}"'
            if shared and path is not None:
                self[value] = self.blocks[value] = StoredInBlocks(path, name, info, boxes, device)
            else:
                self[value] = StoredInFile(path, name, info, boxes, device)

    def begin(self, sample: int, stage: int) -> None:
        """Let go of what no pass from this one on reads; what this one stores takes over files of that."""
        for each in self.blocks.values():
            each.begin(sample)
        if self.blocks:
            return
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

    def clean(self, sample: int, stage: int) -> None:
        """Remove what no pass from this one on reads, where that is in files of its own."""
        for value, each in self.blocks.items():
            each.begin(sample)
            each.clean(is_read=stage <= self.plan.stored[value])

    def clear(self) -> None:
        for each in self.values():
            each.remove()

    def close(self) -> None:
        """Let go of memory and opened files; what is in files with a name stays there."""
        for each in self.values():
            each.close()

    def holds(self, sums: Mapping[str, Mapping[str, int]], stage: int, finished: Collection[int]) -> bool:
        """Whether all is there that a pass needs, of which some tiles are finished, by checksums of its blocks."""
        for value, each in self.items():
            level: int = self.plan.level_of(value)
            needed: Collection[int] = range(len(self.plan.tiles)) if level < stage <= self.plan.stored[value] else ()
            if not each.holds(sums.get(name_value(value), {}), finished if level == stage else needed):
                self.clear()
                return False
        return True


class TiledRun(Run):
    """Runs the tasks of a plan; samples that no layer mixes run one after the other, each through all passes."""

    def __init__(
        self,
        plan: GraphPlan,
        store: Store,
        read_volume: ReadVolume,
        write_output: WriteOutput,
        parts_of: PartsOf,
        samples: int = 1,
        skips: Skips = lambda *_: False,
    ) -> None:
        self.plan, self.store, self.skips = plan, store, skips
        self.read_volume, self.write_output, self.parts_of = read_volume, write_output, parts_of
        self.samples, self.sample, self.sums = samples, -1, Sums(plan, parts_of)
        # The pass of the last task, over all samples.
        self.number = -1

    @property
    def passes(self) -> list[Pass]:
        reductions, stages = self.plan.labelled.reductions, self.plan.passes * self.samples
        return [
            Pass(
                len(self.plan.tiles),
                functools.partial(self.run_task, number),
                each.macs,
                lambda key: reductions[int(key)].merge,
            )
            for number, each in enumerate(stages)
        ]

    def run_task(self, number: int, index: int) -> Record:
        """Run a pass, counted over all samples, on a tile; return its record."""
        stages = len(self.plan.stages)
        sample, stage = divmod(number, stages)
        if sample != self.sample:
            self.sums, self.sample = Sums(self.plan, lambda each: self.parts_of(sample * stages + each)), sample
        if number != self.number:
            # Not at the end of the pass before: a prediction that is killed there still needs what that pass read.
            self.store.begin(sample, stage)
            self.number = number
        return self._run_tile(stage, index)

    def resume(self, number: int, finished: Collection[int], sums: Mapping[str, Mapping[str, int]]) -> bool:
        """Go on with a pass of which some tiles are finished; False if what was stored for it is gone."""
        sample, stage = divmod(number, len(self.plan.stages))
        self.store.clean(sample, stage)
        holds = self.store.holds(sums, stage, finished)
        if holds and finished:
            self.number = number
        return holds

    def first_pass(self, number: int) -> int:
        return number - number % len(self.plan.stages)

    def clean(self, number: int) -> None:
        """Remove what was stored in files of its own, and no pass from this one on reads."""
        self.store.clean(number // len(self.plan.stages), number % len(self.plan.stages))

    def close(self) -> None:
        """Let go of stored values."""
        self.store.close()

    def _store(self, record: Record, value: Value, index: int, box: Box, numbers: Tensor) -> None:
        self.store[value].write(index, box, numbers)
        own = self.store[value].checksums.get(index)
        record["stored"] |= {} if own is None else {name_value(value): {str(index): own}}

    def _run_tile(self, stage: int, index: int) -> Record:
        plan, labelled, tile = self.plan, self.plan.labelled, self.plan.tiles[index]
        inputs, output = labelled.graph.inputs, labelled.graph.output
        # A tile that is skipped sums nothing, stores zeros, and writes none.
        summarized, wanted = ({}, {}) if self.skips(self.sample, stage, index) else plan.wanted(stage, tile)

        def read(value: Value, box: Box) -> Tensor:
            if value in inputs:
                return self.read_volume(self.sample, inputs.index(value), index, box)
            return self.store[value].read(index, box)

        if isinstance(plan, PatchPlan):
            known, boxes = compute_patch(plan, tile, wanted, read, self.sums)
        else:
            known, boxes = compute(labelled, wanted, plan.given(stage), read, self.sums), wanted

        def part(value: Value, box: Box) -> Tensor:
            if not known:
                return torch.zeros(box_shape(box), dtype=labelled.graph.info(value).dtype)
            return read_box(known[value], region_of(boxes[value]), box)

        parts = {node: summarize_tile(labelled, node, own, part, tile) for node, own in summarized.items()}
        record = empty_record() | {"parts": self._check(parts, tile)}
        for value in plan.stages[stage].writes:
            if (box := plan.own_box(value, tile)) is not None:
                numbers = part(value, box)
                if value in labelled.gathered and _spreads(numbers):
                    raise _not_finite_in(labelled.graph.nodes[value.node].path, tile)
                self._store(record, value, index, box, numbers)
        if plan.stages[stage].last and (box := plan.own_box(output, tile)) is not None:
            self.write_output(self.sample, box, part(output, box) if known else None)
        return record

    def _check(self, parts: Mapping[int, Parts], tile: Sequence[Span]) -> dict[str, Parts]:
        """Return parts by key; refuse NaN, which would spread to every position."""
        for node, own in parts.items():
            if not are_numbers(own):
                raise _not_finite_in(self.plan.labelled.graph.nodes[node].path, tile)
        return {str(node): own for node, own in parts.items()}


def run_in_memory(plan: GraphPlan, store: Store, read_volume: ReadVolume, write_output: WriteOutput) -> None:
    """Run all passes of a plan on one sample, one tile after the other."""
    records: list[Records] = []
    run = TiledRun(plan, store, read_volume, write_output, lambda number: records[number].read()["parts"])
    for each in run.passes:
        records.append(Records(each.tiles, each.merge))
        for index in range(each.tiles):
            records[-1].add(index, each.run_tile(index))
    store.close()


def _spreads(numbers: Tensor) -> bool:
    """Whether keys or values of attention would make each response NaN; a mask may hide positions by -inf."""
    return bool((numbers.isnan() | numbers.isposinf()).any()) if numbers.dtype.is_floating_point else False


def _not_finite_in(path: str, tile: Sequence[Span]) -> ValueError:
    return not_finite(f"predict_whole: {path}", tuple(start for start, _ in tile))


def name_value(value: Value) -> str:
    """Return the name of a stored value in records and files."""
    return f"{value.node}-{value.output}"
