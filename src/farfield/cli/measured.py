"""The table rows of `farfield measure`: the operators on this machine, beside each other or beside its limits."""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Iterator

import torch

from farfield.cli.output import Row, joined, megabytes_finely
from farfield.cli.printed import table_for
from farfield.cost import roofline, saved_bytes
from farfield.cost.measuring import device_name, step, take_turns
from farfield.cost.planning import Setting, needs
from farfield.nn import GridAttention
from farfield.nn.devices import free_bytes
from farfield.ops import OPERATORS

# Two outputs are equal up to float32 rounding if they differ by this share of their norm at most.
SAME = 1e-4
# The seconds that a grid takes are estimated if an operator has at least so many MACs, and stated from so many on.
MANY_MACS, LONG = 10**10, 60


def measure_all(arguments: argparse.Namespace, names: list[str]) -> list[Row]:
    """Measure each operator on each grid; softmax, if selected, is first: the others are compared with it."""
    names = sorted(names, key=lambda name: name != "softmax")
    return [row for grid, fit in grids_of(arguments, names) for row in measure_grid(grid, arguments, fit)]


def grids_of(arguments: argparse.Namespace, names: list[str]) -> Iterator[tuple[torch.Tensor, list[str]]]:
    """Yield a random grid of each size and the operators that fit into the free memory; raise if none ever does."""
    none = True
    for size in arguments.size or [(14, 14), (28, 28), (56, 56)]:
        if fit := those_that_fit([setting_for(name, size, arguments) for name in names], arguments):
            none = False
            warn_of_minutes(fit, arguments)
            torch.manual_seed(0)
            shape = (arguments.batch, arguments.channels, *size)
            grid = torch.randn(shape, device=arguments.device, requires_grad=arguments.backward)
            yield grid, [setting.operator for setting in fit]
    if none:
        raise ValueError("farfield measure: no operator fits into the free memory; fix: a smaller --size or --batch.")


def setting_for(name: str, size: tuple[int, ...], arguments: argparse.Namespace) -> Setting:
    """Return what an operator is measured with."""
    project = OPERATORS[name].projections(arguments.project)
    return Setting(name, arguments.channels, arguments.heads, project, arguments.batch, size)


def those_that_fit(settings: list[Setting], arguments: argparse.Namespace) -> list[Setting]:
    """Return the settings that fit into the free memory, and warn of each other one."""
    free, fit = free_bytes(torch.device(arguments.device)), []
    for setting, need in zip(settings, needs(settings, training=arguments.backward, device=None), strict=True):
        if need.bytes <= free:
            fit.append(setting)
        else:
            warnings.warn(
                f"farfield measure: {setting.operator} on {joined(list(setting.size))} positions, batch "
                f"{setting.batch}, needs {megabytes_finely(need.bytes)} of memory, and {megabytes_finely(free)} are "
                "free: it is left out; fix: a smaller --size or --batch.",
                stacklevel=2,
            )
    return fit


def warn_of_minutes(settings: list[Setting], arguments: argparse.Namespace) -> None:
    """Estimate how long large grids take, and warn of minutes."""
    if max(setting.cost().macs for setting in settings) < MANY_MACS:
        return
    # A turn has a pass that is not timed; before the turns there are two, and one each for memory and the response.
    passes = 2 * arguments.repeats + 4
    estimates = needs(settings, training=arguments.backward, device=arguments.device)
    seconds = {
        setting.operator: passes * (each.seconds or 0) for setting, each in zip(settings, estimates, strict=True)
    }
    total, longest = sum(seconds.values()), max(seconds, key=lambda name: seconds[name])
    if total >= LONG:
        warnings.warn(
            f"farfield measure: {joined(list(settings[0].size))} positions, batch {arguments.batch}, take about "
            f"{total / 60:,.1f} minutes or more, {longest} {seconds[longest] / total:.0%} of them; fix: fewer "
            "--repeats, or an --operator for each that matters.",
            stacklevel=2,
        )


def rooflines(arguments: argparse.Namespace, names: list[str]) -> list[Row]:
    """Measure each operator on each grid beside the least time that this machine could take."""
    rows: list[Row] = []
    for grid, fit in grids_of(arguments, names):
        for name in fit:
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
