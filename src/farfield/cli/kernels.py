"""`farfield kernels`: show whether the CPU kernels run, and if not, why."""

from __future__ import annotations

from farfield.cli.output import Column, Row, Table


def show_kernels() -> Table:
    """Show whether the CPU kernels run, their library, and the kernel table: what computes what, and when."""
    from farfield.ops.fast import kernels

    rows: list[Row] = [
        {"what": "state", "value": describe_state()},
        {"what": "library", "value": str(kernels.LIBRARY)},
        {"what": "grids", "value": "float32, bfloat16 and float16 on a CPU, contiguous or channels-last"},
        {"what": "blocks", "value": _describe_blocks()},
        {"what": "switch", "value": f"{kernels.SWITCH}=0 turns them off"},
        *_describe_lines(),
    ]
    return Table("CPU kernels", [Column("what", "", left=True), Column("value", "", left=True)], rows)


def _describe_lines() -> list[Row]:
    from farfield.ops.fast import table

    return [{"what": ", ".join(line.names) or "–", "value": table.describe(line)} for line in table.LINES]


def _describe_blocks() -> str:
    from farfield.ops.fast import kernels

    if not kernels.run():
        return "-"
    second, last = (size / 2**20 for size in kernels.cache_bytes())
    return f"a quarter or half of the level-2 cache, {second:g} MiB; written past the caches from {last / 2:g} MiB on"


def describe_state() -> str:
    """Return "run" and the instruction set, or the reason why the kernels do not run."""
    from farfield.ops.fast import kernels

    return kernels.why_not() or f"run, compiled for {kernels.instructions()}"
