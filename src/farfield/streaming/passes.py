"""Run the passes of a plan as tasks: a pass and a tile give partial sums, stored values and a box of the output."""

from __future__ import annotations

import functools
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from farfield._refusals import refusal
from farfield.streaming.blocks import Blocks
from farfield.streaming.graph import Value, map_values
from farfield.streaming.layers import are_numbers, not_finite
from farfield.streaming.lines import Lines
from farfield.streaming.patches import compute_patch
from farfield.streaming.plan import StreamingPlan, find_wanted, own_box
from farfield.streaming.records import Merge, Record, empty_record
from farfield.streaming.rules.rule import Parts
from farfield.streaming.run import compute, summarize_tile
from farfield.streaming.spans import Box, Span, box_shape, read_box, region_of
from farfield.streaming.store import SUFFIX, StoredInBlocks, StoredInFile, StoredInMemory, StoredValue

# (sample, volume, tile, box) -> the numbers of a volume
ReadVolume = Callable[[int, int, int, Box], Tensor]
# (sample, box, numbers) writes the output; None are the zeros of a tile that is skipped
WriteOutput = Callable[[int, Box, Tensor | None], None]
# (sample, box) -> where in the output that is written
Locate = Callable[[int, Box], tuple[slice, ...]]
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
    """What a prediction does with its tiles. Without methods of their own, nothing is stored between passes.

    Attributes:
        workers: How many tiles of a pass run at once, each in a thread.
        surroundings: Makes the context of a thread in which they do.
    """

    workers = 1
    surroundings: Callable[[], AbstractContextManager[None]] = nullcontext

    @property
    @abstractmethod
    def passes(self) -> list[Pass]:
        """The passes over all tiles."""

    def resume(self, number: int, finished: Collection[int], sums: Mapping[str, np.ndarray]) -> bool:
        """Go on with a pass of which some tiles are finished; False if what was stored for it is gone."""
        return True

    def first_pass(self, number: int) -> int:
        return 0

    def find_written(self, number: int, index: int) -> tuple[slice, ...]:
        """Return where in the output a pass writes a tile."""
        raise LookupError(f"pass {number} writes nothing")

    def clean(self, number: int) -> None:  # noqa: B027  # nothing is stored
        """Remove what was stored and no pass from this one on reads, where several processes work."""

    def close(self) -> None:  # noqa: B027  # nothing is open
        """Let go of files and memory."""


class Store(dict[Value, StoredValue]):
    """The values that are stored between the passes of a plan, each from its own pass to the last that reads it.

    If several processes share it, each block is a file of its own, in `folder`.
    """

    def __init__(self, plan: StreamingPlan, folder: Path | None = None, *, shared: bool = False) -> None:
        self.plan, graph = plan, plan.labelled.graph
        for value in plan.stored:
            info, layout = graph.stored_info(value), plan.labelled.layouts[value]
            if not plan.on_disk:
                self[value] = StoredInMemory(info, layout, graph.device)
                continue
            path = None if folder is None else folder / f"{name_value(value)}{SUFFIX}"
            blocks = Blocks(plan.labelled, layout, plan.cores, info.dtype.itemsize)
            name = f'"{graph.nodes[value.node].path}"'
            if shared and path is not None:
                self[value] = StoredInBlocks(path, name, info, blocks, graph.device)
            else:
                self[value] = StoredInFile(path, name, info, blocks, graph.device)

    def begin(self, sample: int, number: int) -> None:
        """Let go of what no pass from this one on reads; what this one stores takes over files of that."""
        for each in self.values():
            each.begin(sample)
        lives, made = self.plan.lives, self.plan.passes[number].writes
        sizes = {value: self.plan.labelled.graph.stored_info(value).bytes for value in lives}
        # Pass 0 is of another sample, which reads nothing of the sample before.
        gone = [value for value, (_, last) in lives.items() if number == 0 or last < number]
        free = sorted((value for value in gone if value not in made and self[value].is_reusable), key=sizes.__getitem__)
        for value in sorted(made, key=sizes.__getitem__, reverse=True):
            before = value if self[value].is_reusable or not free else free.pop()
            self[value].take_over(self[before])
        # Files that are left stay for what later passes store, as far as the planned disk space has room.
        later = any(first > number for first, _ in lives.values())
        live = (value for value, (first, last) in lives.items() if first <= number <= last)
        room = self.plan.stored_bytes - sum(sizes[value] for value in live)
        kept = set()
        for value in reversed(free):
            if later and sizes[value] <= room:
                room -= sizes[value]
                kept.add(value)
        for value in gone:
            if value not in made and value not in kept:
                self[value].free()

    def clean(self, sample: int, number: int) -> None:
        """Remove what no pass from this one on reads, where other processes may not have let go of it."""
        for value, each in self.items():
            each.begin(sample)
            each.clean(is_read=number <= self.plan.lives[value][1])

    def close(self) -> None:
        """Let go of memory and opened files; what is in files with a name stays there."""
        for each in self.values():
            each.close()

    def holds(self, sums: Mapping[str, np.ndarray], number: int, finished: Collection[int]) -> bool:
        """Whether all is there that a pass needs, of which some tiles are finished, by checksums of its blocks."""
        for value, each in self.items():
            first, last = self.plan.lives[value]
            needed: Collection[int] = range(len(self.plan.cores)) if first < number <= last else ()
            own = sums.get(name_value(value), np.zeros(len(self.plan.cores), np.int64))
            if not each.holds(own, finished if first == number else needed):
                for other in self.values():
                    other.remove()
                return False
        return True


class TiledRun(Run):
    """Runs the tasks of a plan; samples that no layer mixes run one after the other, each through all passes."""

    def __init__(
        self,
        plan: StreamingPlan,
        store: Store,
        read_volume: ReadVolume,
        write_output: WriteOutput,
        parts_of: PartsOf,
        skips: Skips = lambda *_: False,
        locate: Locate = lambda *_: (),
    ) -> None:
        self.plan, self.store, self.skips, self.locate, self.workers = plan, store, skips, locate, plan.workers
        self.read_volume, self.write_output, self.parts_of = read_volume, write_output, parts_of
        # The pass of the last task, over all samples.
        self.number = -1
        # Of the sample that runs: the merged parts of all tiles of each reduction, of so many passes.
        self.sample, self.known, self.parts = -1, 0, dict[int, Parts]()
        self.lines = Lines(plan)
        # Tiles of one pass run in several threads: the first of them begins it, and one at a time is stored.
        self.lock = threading.Lock()

    @property
    def passes(self) -> list[Pass]:
        reductions, passes = self.plan.labelled.reductions, self.plan.passes * self.plan.samples
        return [
            Pass(
                len(self.plan.cores),
                functools.partial(self.run_task, number),
                each.macs,
                lambda key: reductions[int(key)].merge,
            )
            for number, each in enumerate(passes)
        ]

    def run_task(self, number: int, index: int) -> Record:
        """Run a pass, counted over all samples, on a tile; return its record."""
        before = number - number % len(self.plan.passes)
        sample, own = divmod(number, len(self.plan.passes))
        with self.lock:
            if sample != self.sample:
                self.sample, self.known, self.parts = sample, 0, {}
            while self.known < own:
                self.parts |= {int(key): self._move(parts) for key, parts in self.parts_of(before + self.known).items()}
                self.known += 1
            if number != self.number:
                # Not at the end of the pass before: a prediction that is killed there still needs what that pass read.
                self.store.begin(sample, own)
                self.lines.clear()
                self.number = number
        return self._run_tile(own, index)

    def _move(self, parts: Parts) -> Parts:
        """Copy merged parts to a GPU once a pass, not once a tile; others have no float64, or need no copy."""
        device = self.plan.labelled.graph.device
        return map_values(parts, Tensor, lambda part: part.to(device)) if device.type == "cuda" else parts

    def resume(self, number: int, finished: Collection[int], sums: Mapping[str, np.ndarray]) -> bool:
        """Go on with a pass of which some tiles are finished; False if what was stored for it is gone."""
        self.clean(number)
        holds = self.store.holds(sums, number % len(self.plan.passes), finished)
        if holds and len(finished):
            self.number = number
        return holds

    def first_pass(self, number: int) -> int:
        return number - number % len(self.plan.passes)

    def find_written(self, number: int, index: int) -> tuple[slice, ...]:
        box = own_box(self.plan, self.plan.labelled.graph.output, self.plan.cores[index])
        return () if box is None else self.locate(number // len(self.plan.passes), box)

    def clean(self, number: int) -> None:
        """Remove what was stored in files of its own, and no pass from this one on reads."""
        self.store.clean(*divmod(number, len(self.plan.passes)))

    def close(self) -> None:
        """Let go of stored values."""
        self.store.close()

    def _run_tile(self, number: int, index: int) -> Record:
        plan, labelled, tile = self.plan, self.plan.labelled, self.plan.cores[index]
        graph, record = labelled.graph, empty_record()
        # A tile that is skipped sums nothing, stores zeros, and writes none.
        summarized, wanted = ({}, {}) if self.skips(self.sample, number, index) else find_wanted(plan, number, tile)

        def read(value: Value, box: Box) -> Tensor:
            if value in graph.inputs:
                return self.read_volume(self.sample, graph.inputs.index(value), index, box)
            return self.store[value].read(index, box).to(graph.info(value).dtype)

        if plan.patch:
            known, boxes = compute_patch(labelled, plan.patch, tile, wanted, read, self.parts)
        else:
            known, boxes = self._compute(number, index, wanted, read), wanted

        def part(value: Value, box: Box) -> Tensor:
            if not known:
                return torch.zeros(box_shape(box), dtype=graph.info(value).dtype)
            return read_box(known[value], region_of(boxes[value]), box)

        for node, own in summarized.items():
            parts = record["parts"][str(node)] = summarize_tile(labelled, node, own, part, tile)
            if not are_numbers(parts):  # NaN would spread to every position
                raise _not_finite_in(graph.nodes[node].path, tile)
        for value in plan.passes[number].writes:
            if (box := own_box(plan, value, tile)) is None:
                continue
            numbers = part(value, box)
            if value in labelled.gathered and _spreads(numbers):
                raise _not_finite_in(graph.nodes[value.node].path, tile)
            narrow = numbers.to(graph.stored_info(value).dtype)
            if narrow.dtype != numbers.dtype and bool((narrow.isinf() & numbers.isfinite()).any()):
                raise _too_large_for(narrow.dtype, graph.nodes[value.node].path, tile)
            with self.lock:
                own_sum = self.store[value].write(index, box, narrow)
            if own_sum is not None:
                record["stored"][name_value(value)] = torch.tensor([own_sum])
        if number == len(plan.passes) - 1 and (box := own_box(plan, graph.output, tile)) is not None:
            self.write_output(self.sample, box, part(graph.output, box) if known else None)
        return record

    def _compute(
        self, number: int, index: int, wanted: Mapping[Value, Box], read: Callable[[Value, Box], Tensor]
    ) -> dict[Value, Tensor]:
        """Compute values of a tile; what it scans takes the states of tiles before it, and leaves its own."""
        labelled, given = self.plan.labelled, {*self.plan.labelled.graph.inputs, *self.plan.passes[number].reads}

        def run_before(value: Value, before: int, states: list[Tensor]) -> None:
            box = own_box(self.plan, value, self.plan.cores[before])
            if box is not None:
                compute(labelled, {value: box}, given, read, {**self.parts, value.node: states})

        carried = {
            value.node: self.lines.find(value.node, index, functools.partial(run_before, value))
            for value in wanted
            if value.node in labelled.scans
        }
        known = compute(labelled, wanted, given, read, {**self.parts, **carried})
        for node, states in carried.items():
            self.lines.keep(node, index, states)
        return known


def _spreads(numbers: Tensor) -> bool:
    """Whether keys or values of attention would make each response NaN; a mask may hide positions by -inf."""
    return bool((numbers.isnan() | numbers.isposinf()).any()) if numbers.dtype.is_floating_point else False


def _not_finite_in(path: str, tile: Sequence[Span]) -> ValueError:
    return not_finite(f"predict_whole: {path}", tuple(start for start, _ in tile))


def _too_large_for(dtype: torch.dtype, path: str, tile: Sequence[Span]) -> ValueError:
    """Return the refusal of what is infinite where it is stored, and not before."""
    name, most = str(dtype).removeprefix("torch."), torch.finfo(dtype).max
    fix = 'stored="bfloat16", or None' if dtype == torch.float16 else "stored=None"
    return refusal(
        ValueError,
        f"{path} has numbers in the tile at {tuple(start for start, _ in tile)} that {name}, which ends "
        f"at {most:g}, cannot store; fix: Tiles(…, {fix}).",
    )


def name_value(value: Value) -> str:
    """Return the name of a stored value in records and files."""
    return f"{value.node}-{value.output}"
