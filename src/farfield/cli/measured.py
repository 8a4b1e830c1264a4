"""The table rows of `farfield measure`: the operators on this machine, beside each other or beside its limits."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import torch

from farfield.cli.output import Row
from farfield.cli.printed import table_for
from farfield.cost import roofline, saved_bytes
from farfield.cost.measuring import device_name, step, take_turns
from farfield.nn import GridAttention
from farfield.ops import OPERATORS

# Two outputs are equal up to float32 rounding if they differ by this share of their norm at most.
SAME = 1e-4


def measure_all(arguments: argparse.Namespace, names: list[str]) -> list[Row]:
    """Measure each operator on each grid; softmax, if selected, is first: the others are compared with it."""
    names = sorted(names, key=lambda name: name != "softmax")
    return [row for grid in grids_of(arguments) for row in measure_grid(grid, arguments, names)]


def grids_of(arguments: argparse.Namespace) -> Iterator[torch.Tensor]:
    """Yield a random grid of each size."""
    for size in arguments.size or [(14, 14), (28, 28), (56, 56)]:
        torch.manual_seed(0)
        shape = (arguments.batch, arguments.channels, *size)
        yield torch.randn(shape, device=arguments.device, requires_grad=arguments.backward)


def rooflines(arguments: argparse.Namespace, names: list[str]) -> list[Row]:
    """Measure each operator on each grid beside the least time that this machine could take."""
    rows: list[Row] = []
    for grid in grids_of(arguments):
        for name in names:
            result = roofline(
                attention_for(name, arguments), grid, backward=arguments.backward, repeats=arguments.repeats
            )
            rows.append(
                {
                    "size": list(grid.shape[2:]),
                    "operator": name,
                    "bytes": result.bytes,
                    "macs": result.macs,
                    "copy_rate": result.copy_rate,
                    "product_rate": result.product_rate,
                    "bottleneck": result.bottleneck,
                    "least_seconds": result.least_seconds,
                    "seconds": result.seconds,
                    "times": result.times,
                    "device": device_name(grid.device),
                }
            )
    return rows


def measure_grid(grid: torch.Tensor, arguments: argparse.Namespace, names: list[str]) -> list[Row]:
    """Measure the operators on one grid, in turns with a copy of the grid."""
    options = {"batch": arguments.batch, "heads": arguments.heads, "project": arguments.project}
    table = table_for(tuple(grid.shape[2:]), arguments.channels, **options)
    attentions = {name: attention_for(name, arguments) for name in names}
    runs = {name: step(attention, [grid], arguments.backward) for name, attention in attentions.items()}
    times = take_turns({"copy": step(torch.clone, [grid], False), **runs}, grid.device, arguments.repeats)
    copy, reference = times["copy"], times.get("softmax")
    rows: list[Row] = []
    outputs: dict[str, torch.Tensor] = {}
    for name, attention in attentions.items():
        with torch.no_grad():
            output = attention(grid)
        measured, printed = times[name], table.rows.get(name) if table else None
        rows.append(
            {
                "size": list(grid.shape[2:]),
                "operator": name,
                "seconds": measured.seconds,
                "fastest": measured.fastest,
                "copies": measured.seconds / copy.seconds,
                "speed_up": reference and reference.seconds / measured.seconds,
                "speed_up_printed": printed and printed.speed_up,
                "peak_bytes": measured.peak_bytes,
                "memory_saving": reference and 1 - measured.peak_bytes / reference.peak_bytes,
                "saved_bytes": saved_bytes(attention, grid) if arguments.backward else None,
                "equals": ", ".join(other for other, known in outputs.items() if same(output, known)) or None,
                "device": measured.device,
            }
        )
        outputs[name] = output
    return rows


def attention_for(name: str, arguments: argparse.Namespace) -> GridAttention:
    """Build the module of an operator; the same seed gives all of them the same projections."""
    torch.manual_seed(1)
    project = OPERATORS[name].projections(arguments.project)
    attention = GridAttention(arguments.channels, name, heads=arguments.heads, project=project)
    return attention.eval().to(arguments.device)


def same(output: torch.Tensor, known: torch.Tensor) -> bool:
    """Return whether two outputs differ by no more than float32 rounding."""
    return bool((output - known).norm() <= SAME * known.norm())
