"""`farfield kernels`: show whether the CPU kernels run, and if not, why."""

from __future__ import annotations

from farfield.cli.output import Column, Row, Table


def show_kernels() -> Table:
    """Show whether the CPU kernels run, their library, and the grids they take."""
    from farfield.ops.fast import kernels

    rows: list[Row] = [
        {"what": "state", "value": describe_state()},
        {"what": "library", "value": str(kernels.LIBRARY)},
        {
            "what": "take",
            "value": "float32, bfloat16 and float16 grids on a CPU, contiguous or channels-last: Kronecker operators "
            "(2 or more spatial dims), siamese ones, factorized, averaged and factorized_gaussian",
        },
        {"what": "blocks", "value": _describe_blocks()},
        {"what": "switch", "value": f"{kernels.SWITCH}=0 turns them off"},
    ]
    return Table("CPU kernels", [Column("what", "", left=True), Column("value", "", left=True)], rows)


def _describe_blocks() -> str:
    from farfield.ops.fast import kernels

    if not kernels.run():
        return "-"
    second, last = (size / 2**20 for size in kernels.cache_bytes())
    return f"a quarter or half of the level-2 cache, {second:g} MiB; written past the caches from {last / 2:g} MiB on"


def describe_state() -> str:
    """Return "run" and the instruction set, or every reason why the kernels do not run."""
    import torch

    from farfield.ops.fast import kernels

    reasons = list(kernels.why_not(torch.empty(0)))
    return "; ".join(reasons) if reasons else f"run, compiled for {kernels.instructions()}"
