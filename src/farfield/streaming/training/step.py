"""The forward pass of a call in tiles: the passes of a prediction, of which all that is stored and summed is kept."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from farfield.ops.modes import keep_autocast
from farfield.streaming.graph import Graph, Value, run_whole
from farfield.streaming.passes import Store
from farfield.streaming.plan import StreamingPlan, find_wanted, own_box
from farfield.streaming.records import Records, empty_record
from farfield.streaming.rules.rule import Parts
from farfield.streaming.rules.sums import find_moments
from farfield.streaming.run import compute, summarize_tile
from farfield.streaming.spans import Box, box_shape, read_box, region_of, whole_box, write_box
from farfield.volumes.source import VolumeSource


class Step:
    """A call in tiles: what it stores and sums is kept until its backward pass."""

    def __init__(
        self,
        plan: StreamingPlan,
        graph: Graph,
        outputs: Sequence[Value],
        sources: Sequence[VolumeSource],
        tracked: Mapping[str, nn.Module],
    ) -> None:
        self.graph, self.outputs, self.sources = graph, tuple(outputs), sources
        # Labels are those of the plan, constants those of this call, with their history.
        self.labelled = copy.copy(plan.labelled)
        self.labelled.graph = graph
        vars(self.labelled).pop("constants", None)
        self.constants, self.plan = self.labelled.constants, replace(plan, labelled=self.labelled)
        order = ((index, graph.nodes[index]) for index in self.labelled.order)
        self.tracked: dict[int, Any] = {
            index: tracked[node.path] for index, node in order if "batch_norm" in node.op and node.path in tracked
        }
        self.stored = Store(self.plan)
        # Of all tiles: merged parts of sums, and moments of norms of which nothing is cut.
        self.sums: dict[int, Parts] = {}
        self.moments: dict[int, Parts] = {}
        self.is_open = True
        # Makes the context of autocast in which the call was made.
        self.surroundings = keep_autocast(torch.empty(0, device=graph.device))

    @property
    def roots(self) -> list[Value]:
        """The constants that have a gradient."""
        return [value for value, each in self.constants.items() if each.requires_grad]

    def close(self) -> None:
        """Let go of all that is kept for the backward pass."""
        self.stored.close()
        self.sums, self.moments, self.is_open = {}, {}, False

    @torch.no_grad()
    def run(self) -> tuple[Tensor, ...]:
        """Run the passes; return the outputs."""
        infos, reductions = map(self.graph.info, self.outputs), self.labelled.reductions
        results = tuple(torch.empty(info.shape, dtype=info.dtype, device=self.graph.device) for info in infos)
        for number in range(len(self.plan.passes)):
            records = Records(len(self.plan.cores), lambda key: reductions[int(key)].merge)
            for index in range(len(self.plan.cores)):
                records.add(index, empty_record() | {"parts": self._run_tile(number, index, results)})
            self.sums |= {int(key): parts for key, parts in records.read()["parts"].items()}
        self._update_buffers()
        return results

    def _run_tile(self, number: int, index: int, results: Sequence[Tensor]) -> dict[str, Parts]:
        """Run a pass on a tile: write stored values and outputs, and return the parts of sums."""
        plan, labelled, tile = self.plan, self.labelled, self.plan.cores[index]
        summarized, wanted = find_wanted(plan, number, tile)
        is_last = number == len(plan.passes) - 1
        ends = {*plan.passes[number].writes, *(self.outputs if is_last else ())}
        own = {value: box for value in sorted(ends) if (box := own_box(plan, value, tile)) is not None}
        wanted |= {value: box for value, box in own.items() if value not in wanted}
        # The operands of tracked norms of which nothing is cut, and which are no sums over tiles.
        norms = [each for each in self.tracked if each not in self.sums] if is_last and index == 0 else []
        untiled = {each: self.graph.nodes[each].inputs[0] for each in norms}
        wanted |= {value: whole_box(labelled.layouts[value]) for value in untiled.values()}
        stored = {value for each in plan.passes[:number] for value in each.writes}
        known = compute(labelled, wanted, stored.union(self.graph.inputs) - ends, self.read, self.sums)

        def part(value: Value, box: Box) -> Tensor:
            return read_box(known[value], region_of(wanted[value]), box)

        for each, value in untiled.items():
            self.moments[each] = find_moments(known[value], [0, *range(2, known[value].dim())])
        for value, box in own.items():
            if value in self.outputs:
                write_box(results[self.outputs.index(value)], labelled.layouts[value], box, part(value, box))
            if value in plan.passes[number].writes:
                self.stored[value].write(index, box, part(value, box))
        return {str(node): summarize_tile(labelled, node, boxes, part, tile) for node, boxes in summarized.items()}

    def read(self, value: Value, box: Box) -> Tensor:
        """Read a box of a volume or of a stored value."""
        if value in self.graph.inputs:
            source = self.sources[self.graph.inputs.index(value)]
            return source.read(tuple(spans[0] for spans in box)).reshape(box_shape(box)).contiguous()
        return self.stored[value].read(0, box)

    def _update_buffers(self) -> None:
        """Update running statistics by those of the whole, once, and write what the network writes to itself."""
        for index, norm in sorted(self.tracked.items()):
            count, mean, squares = (each.flatten() for each in (self.sums | self.moments)[index])
            rate = norm.momentum or 0.0
            if isinstance(norm, _BatchNorm) and norm.num_batches_tracked is not None:
                norm.num_batches_tracked.add_(1)
                rate = 1 / float(norm.num_batches_tracked) if norm.momentum is None else norm.momentum
            for running, own in ((norm.running_mean, mean), (norm.running_var, squares / (count - 1))):
                # Of an instance norm, the mean over samples.
                running.lerp_(own.view(-1, len(running)).mean(0).to(running), rate)
        written = {name: run_whole(self.graph, [], value) for name, value in self.graph.writes.items()}
        for name, each in written.items():
            self.graph.constants[name].copy_(each)
