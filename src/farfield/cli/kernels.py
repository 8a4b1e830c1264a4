"""`farfield kernels`: show whether the CPU kernels run, and if not, why."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from farfield.cli.command_parser import CommandParser
from farfield.cli.output import Column, Row, Table, add_formats, show


def main(argv: Sequence[str]) -> None:
    """Show the state of the kernels.

    Args:
        argv: The command's options.

    Raises:
        SystemExit: With status 2 for a wrong option.
    """
    parser = CommandParser("farfield kernels", kernels_table.__doc__)
    add_formats(parser)
    arguments = parser.parse_args(argv)
    show(kernels_table(arguments), arguments)


def kernels_table(arguments: argparse.Namespace) -> Table:
    """Show whether the CPU kernels run, their library, and the kernel table: what computes what, and when."""
    from farfield.ops.fast import kernels

    rows: list[Row] = [
        {"what": "state", "value": state()},
        {"what": "library", "value": str(kernels.LIBRARY)},
        {"what": "grids", "value": "float32, bfloat16 and float16 on a CPU, contiguous or channels-last"},
        {"what": "blocks", "value": blocks()},
        {"what": "switch", "value": f"{kernels.SWITCH}=0 turns them off"},
        *lines(),
    ]
    return Table("CPU kernels", [Column("what", "", left=True), Column("value", "", left=True)], rows)


def lines() -> list[Row]:
    """Return the lines of the kernel table: what is computed, for which operators, when, and the gradient's kernels."""
    from farfield.ops.fast import table

    return [{"what": ", ".join(line.names) or "–", "value": table.describe(line)} for line in table.LINES]


def blocks() -> str:
    """Return what the sizes of blocks depend on."""
    from farfield.ops.fast import kernels

    if not kernels.run():
        return "-"
    second, last = (size / 2**20 for size in kernels.cache_bytes())
    return f"a quarter or half of the level-2 cache, {second:g} MiB; written past the caches from {last / 2:g} MiB on"


def state() -> str:
    """Return "run" and the instruction set, or the reason why the kernels do not run."""
    from farfield.ops.fast import kernels

    return kernels.why_not() or f"run, compiled for {kernels.instructions()}"
