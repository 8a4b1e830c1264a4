"""`farfield kernels`: show whether the CPU kernels are built, or build them."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from farfield.cli.command_parser import CommandParser
from farfield.cli.output import Column, Row, Table, add_formats, show


def main(argv: Sequence[str]) -> None:
    """Show the state of the kernels; with `--build`, build them first.

    Args:
        argv: The command's options.

    Raises:
        SystemExit: With status 2 for a wrong option.
        RuntimeError: With `--build`, if the kernels cannot be compiled; the text has the reason.
    """
    parser = CommandParser("farfield kernels", kernels_table.__doc__)
    parser.add_argument("--build", action="store_true", help="compile them for this processor and this torch")
    add_formats(parser)
    arguments = parser.parse_args(argv)
    show(kernels_table(arguments), arguments)


def kernels_table(arguments: argparse.Namespace) -> Table:
    """Show whether the CPU kernels are used, their library, and the grids they take; --build compiles them first."""
    from farfield.ops.fast import kernels

    if arguments.build:
        kernels.build()
    rows: list[Row] = [
        {"what": "state", "value": state()},
        {"what": "library", "value": str(kernels.path())},
        {
            "what": "take",
            "value": "contiguous float32 grids on a CPU: Kronecker operators (2 or more spatial dims), siamese ones",
        },
        {"what": "switch", "value": f"{kernels.SWITCH}=0 turns them off"},
    ]
    return Table("CPU kernels", [Column("what", "", left=True), Column("value", "", left=True)], rows)


def state() -> str:
    """Return "built", or every reason why the kernels are not used."""
    import torch

    from farfield.ops.fast import kernels

    reasons = list(kernels.why_not(torch.empty(0)))
    return "; ".join(reasons) if reasons else "built"
