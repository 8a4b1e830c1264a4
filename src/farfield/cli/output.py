"""Tables as text, JSON or CSV."""

from __future__ import annotations

import sys
from collections.abc import Callable
from csv import DictWriter
from dataclasses import dataclass, field
from json import dumps
from typing import Any

Row = dict[str, Any]


@dataclass(frozen=True)
class Column:
    key: str
    heading: str
    text: Callable[[Any], str] = str
    left: bool = False


@dataclass(frozen=True)
class Table:
    """Rows of raw values, and the columns that show them to people."""

    title: str
    columns: list[Column]
    rows: list[Row]
    notes: list[str] = field(default_factory=list)


def show(table: Table, *, json: bool = False, csv: bool = False) -> None:
    """Print a table: for people, as a JSON list of its rows, or as CSV."""
    if json:
        print(dumps(table.rows, indent=2, ensure_ascii=False))
    elif csv:
        _write_csv(table.rows)
    else:
        write_table(table)


def _write_csv(rows: list[Row]) -> None:
    """Print rows as CSV, with a header of their keys; a list becomes words separated by spaces."""
    writer = DictWriter(sys.stdout, fieldnames=list(rows[0]) if rows else [], lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow(
            {key: " ".join(map(str, value)) if isinstance(value, list) else value for key, value in row.items()}
        )


def write_table(table: Table) -> None:
    """Print a table for people at its full width, also in a pipe or a narrow terminal."""
    headings = [column.heading for column in table.columns]
    lines = [[_format_value(column, row) for column in table.columns] for row in table.rows]
    widths = [max(map(len, entries)) for entries in zip(headings, *lines, strict=True)]

    def line(entries: list[str]) -> str:
        aligned = [
            entry.ljust(width) if column.left else entry.rjust(width)
            for entry, width, column in zip(entries, widths, table.columns, strict=True)
        ]
        return f" {'   '.join(aligned)}".rstrip()

    print(f"{table.title}\n")
    if any(headings):
        print(f"{line(headings)}\n {'─' * (sum(widths) + 3 * (len(widths) - 1))}")
    print("\n".join([*map(line, lines), "", *table.notes]))


def _format_value(column: Column, row: Row) -> str:
    value = row.get(column.key)
    return "" if value is None else column.text(value)


def millions(number: float) -> str:
    """Format MACs in millions, as the papers do, or unchanged below 5,000."""
    return f"{number / 1e6:,.2f}m" if number >= 5000 else f"{number:,.0f}"


def megabytes(number: float) -> str:
    """Format bytes in units of 10**6, as KAN does, or of 10**3 below 50,000."""
    return f"{number / 1e6:,.1f}MB" if number >= 50_000 else f"{number / 1e3:,.1f}kB"


def megabytes_finely(number: float) -> str:
    """Format bytes in units of 10**6 with two decimals, as SAN does, or of 10**9 from there."""
    return f"{number / 1e6:,.2f}MB" if number < 1e9 else f"{number / 1e9:,.2f}GB"


def milliseconds(seconds: float) -> str:
    """Format seconds as milliseconds: one decimal, or three below 10 ms."""
    return f"{1e3 * seconds:,.1f}ms" if seconds >= 0.01 else f"{1e3 * seconds:.3f}ms"


def gigabytes_a_second(rate: float) -> str:
    """Format bytes per second in units of 10**9."""
    return f"{rate / 1e9:,.1f}GB/s"


def percent(share: float) -> str:
    """Format a share of 1 as a percentage."""
    return f"{100 * share:.2f}%"


def ratio(number: float) -> str:
    """Format a ratio, such as 3.5×."""
    return f"{number:,.1f}×"


def joined(size: list[int]) -> str:
    """Format a size, such as 56 × 56."""
    return " × ".join(map(str, size))
