"""Run a plan: passes over tiles, in one process."""

from __future__ import annotations

import torch
from torch import Tensor

from farfield.streaming.operations import Value
from farfield.streaming.plan import GraphPlan
from farfield.streaming.rules.rule import Parts
from farfield.streaming.run import Read, compute, summarize_tile
from farfield.streaming.spans import Box, read_box, region_of, whole_box, write_box


def execute(plan: GraphPlan, read_volume: Read) -> Tensor:
    """Run all passes in memory and return the output."""
    labelled, graph = plan.labelled, plan.labelled.graph
    parts: dict[int, Parts] = {}
    stored: dict[Value, Tensor] = {}
    info = graph.info(graph.output)
    result = torch.empty(info.shape, dtype=info.dtype)

    def read(value: Value, box: Box) -> Tensor:
        if value in stored:
            return read_box(stored[value], region_of(whole_box(labelled.layouts[value])), box)
        return read_volume(value, box)

    for number, stage in enumerate(plan.stages):
        for value in stage.writes:
            stored[value] = torch.empty(graph.info(value).shape, dtype=graph.info(value).dtype)
        given = plan.given(number)
        for tile in plan.tiles:
            summarized, wanted = plan.wanted(number, tile)
            known = compute(labelled, wanted, given, read, parts)
            for index, boxes in summarized.items():
                own = summarize_tile(labelled, index, boxes, known, tile)
                parts[index] = labelled.reductions[index].merge(parts[index], own) if index in parts else own
            for value in stage.writes:
                if value in wanted:
                    write_box(stored[value], labelled.layouts[value], wanted[value], known[value])
            if stage.last and graph.output in wanted:
                write_box(result, labelled.layouts[graph.output], wanted[graph.output], known[graph.output])
        for value in [value for value, last in plan.stored.items() if last == number]:
            del stored[value]
    return result
