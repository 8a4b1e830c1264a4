"""`farfield plan`: which operators fit a memory, what each needs, and from which size on it beats softmax attention."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from farfield.cli.command_parser import CommandParser
from farfield.cli.output import Column, Row, Table, add_formats, joined, megabytes_finely, millions, milliseconds, show
from farfield.cli.tables import describe_attention, device, grid_size, number

if TYPE_CHECKING:
    from farfield.cost import Plan

UNITS = {"": 1, "B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
UNITS |= {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


def main(argv: Sequence[str]) -> None:
    """Print the plan of self-attention on a grid.

    Args:
        argv: The command's options.

    Raises:
        SystemExit: With status 2 for a wrong option.
        ValueError: If heads do not divide the channels, the projections are not letters of "qkvo", or this machine does
            not have the device.
    """
    parser = CommandParser("farfield plan", plan_table.__doc__)
    parser.add_argument("--channels", type=number, required=True, help="channels of the grid")
    parser.add_argument("--size", type=grid_size, required=True, metavar="56,56", help="size of the grid")
    parser.add_argument("--batch", type=number, default=1, help="samples (default: %(default)s)")
    parser.add_argument("--memory", type=memory, metavar="8GiB", help="available memory: bytes, or with a unit")
    parser.add_argument("--heads", type=number, default=1, help="default: %(default)s")
    parser.add_argument(
        "--project", default="v", metavar="LETTERS", help='projections, letters of "qkvo" (default: %(default)s)'
    )
    parser.add_argument("--backward", action="store_true", help="a training step must fit, not only a forward pass")
    parser.add_argument(
        "--device", type=device, default="cpu", help="device on which time is measured (default: %(default)s)"
    )
    parser.add_argument("--no-time", action="store_true", help="do not measure time: MACs and bytes only")
    add_formats(parser)
    arguments = parser.parse_args(argv)
    show(plan_table(arguments), arguments)


def memory(text: str) -> int:
    """Convert an option to bytes, such as 8GiB."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?(?:[eE]\d+)?) ?([A-Za-z]*)", text.strip())
    size = int(float(match[1]) * UNITS[match[2]]) if match and match[2] in UNITS else 0
    if size < 1:
        known = ", ".join(unit for unit in UNITS if unit)
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a memory size: a number of bytes, or a number and one of {known}"
        )
    return size


def plan_table(arguments: argparse.Namespace) -> Table:
    """Show which operators fit a memory, what each needs, and the size from which on it beats softmax attention."""
    from farfield import cost

    plans = cost.plan(
        channels=arguments.channels,
        size=arguments.size,
        batch=arguments.batch,
        heads=arguments.heads,
        project=arguments.project,
        memory=arguments.memory,
        backward=arguments.backward,
        device=None if arguments.no_time else arguments.device,
    )
    columns = [Column("operator", "operator", left=True)]
    if arguments.memory:
        columns.append(Column("fits", "fits", lambda fits: "yes" if fits else "no", left=True))
    for key, heading in (("forward", "forward"), ("training", "and backward")):
        columns += [
            Column(f"macs_{key}", f"MACs {heading}", millions),
            Column(f"bytes_{key}", "memory", megabytes_finely),
        ]
        if not arguments.no_time:
            columns.append(Column(f"seconds_{key}", "time", duration))
    columns += [Column("cheaper_macs", "fewer MACs from", "N = {:,}".format)]
    columns += [Column("cheaper_bytes", "less memory from", "N = {:,}".format)]
    scope = "a training step" if arguments.backward else "a forward pass"
    limit = f", {scope} in {megabytes_finely(arguments.memory)}" if arguments.memory else ""
    title = f"{joined(list(arguments.size))} positions, {describe_attention(arguments)}, batch {arguments.batch}{limit}"
    notes = [
        "Memory: the grid, the parameters and all other tensors that exist at the peak, in float32.",
        "Fewer, less from: the positions of a square (cube, …) from which on a forward pass costs less than softmax's.",
    ]
    if not arguments.no_time:
        notes.insert(1, f"Time: estimated from a short run on {arguments.device}.")
    if arguments.memory and not any(plan.fits for plan in plans):
        notes.append(
            "No operator fits as a whole. In tiles most do: a layer by streaming.respond_whole, a network by "
            "streaming.predict_whole (farfield predict for saved ones)."
        )
    return Table(title, columns, [table_row(plan) for plan in plans], notes)


def duration(seconds: float) -> str:
    """Format seconds, as milliseconds below 1."""
    return f"{seconds:,.1f}s" if seconds >= 1 else milliseconds(seconds)


def table_row(plan: Plan) -> Row:
    """Return the raw values of one operator, under the keys of `plan_table`'s columns."""
    row: Row = {"operator": plan.operator, "fits": plan.fits}
    for key, needs in (("forward", plan.forward), ("training", plan.training)):
        row |= {f"macs_{key}": needs.macs, f"bytes_{key}": needs.bytes, f"seconds_{key}": needs.seconds}
    return row | {"cheaper_macs": plan.cheaper_macs, "cheaper_bytes": plan.cheaper_bytes}
