"""Tables for people, for scripts and for spreadsheets."""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

Row = dict[str, Any]


@dataclass(frozen=True)
class Column:
    """One column: the key of its value in a row, its heading, and how the value is written for people."""

    key: str
    heading: str
    text: Callable[[Any], str] = str
    left: bool = False


@dataclass(frozen=True)
class Table:
    """Rows of raw values, and how people read them.

    Attributes:
        title: What the rows are.
        columns: In order; a row may hold more than they show.
        rows: Key -> value; None where there is none.
        notes: Below the table.
    """

    title: str
    columns: list[Column]
    rows: list[Row]
    notes: list[str] = field(default_factory=list)


def add_formats(parser: argparse.ArgumentParser) -> None:
    """Let a command's table be written for scripts."""
    formats = parser.add_mutually_exclusive_group()
    formats.add_argument("--json", action="store_true", help="a JSON list, one object a row, raw values")
    formats.add_argument("--csv", action="store_true", help="comma-separated values, raw")


def show(table: Table, arguments: argparse.Namespace) -> None:
    """Write a table as the command line asks for."""
    if arguments.json:
        print(json.dumps(table.rows, indent=2, ensure_ascii=False))
    elif arguments.csv:
        write_csv(table.rows)
    else:
        write_table(table)


def write_csv(rows: list[Row]) -> None:
    """Write rows under the names of their keys, lists as words."""
    writer = csv.DictWriter(sys.stdout, fieldnames=list(rows[0]), lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow(
            {key: " ".join(map(str, value)) if isinstance(value, list) else value for key, value in row.items()}
        )


def write_table(table: Table) -> None:
    """Write a table for people, as wide as it is: rich would squeeze it into a pipe or a narrow terminal."""
    from rich import box
    from rich.console import Console
    from rich.table import Table as Grid

    class Screen(Console):
        def on_broken_pipe(self) -> None:
            raise BrokenPipeError  # main ends as other programs do, where rich would end with status 1

    console = Screen(highlight=False, width=1000)
    grid = Grid(title=table.title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    grid.show_header = any(column.heading for column in table.columns)
    for column in table.columns:
        grid.add_column(column.heading, justify="left" if column.left else "right")
    for row in table.rows:
        grid.add_row(*(written(column, row) for column in table.columns))
    console.print(grid)
    for note in table.notes:
        console.print(note, markup=False, soft_wrap=True)


def written(column: Column, row: Row) -> str:
    """A value as people read it."""
    value = row.get(column.key)
    return "" if value is None else column.text(value)


# ---- units -----------------------------------------------------------------------------------------------------------
def millions(number: float) -> str:
    """MACs as the papers write them."""
    return f"{number / 1e6:,.2f}m" if number >= 5000 else f"{number:,.0f}"


def megabytes(number: float) -> str:
    """Bytes as KAN writes them."""
    return f"{number / 1e6:,.1f}MB" if number >= 50_000 else f"{number / 1e3:,.1f}kB"


def megabytes_finely(number: float) -> str:
    """Bytes as SAN writes them."""
    return f"{number / 1e6:,.2f}MB" if number < 1e9 else f"{number / 1e9:,.2f}GB"


def milliseconds(seconds: float) -> str:
    """A time with three digits or so."""
    return f"{1e3 * seconds:,.1f}ms" if seconds >= 0.01 else f"{1e3 * seconds:.3f}ms"


def percent(share: float) -> str:
    """A share of one."""
    return f"{100 * share:.2f}%"


def ratio(number: float) -> str:
    """How many times as much."""
    return f"{number:,.1f}×"


def joined(size: list[int]) -> str:
    """Sides of a grid."""
    return " × ".join(map(str, size))
