"""`farfield plan`: which operators fit a memory, what each needs, and from which size on it beats softmax attention."""

from __future__ import annotations

from typing import TYPE_CHECKING

from farfield.cli.output import Column, Row, Table, joined, megabytes_finely, millions, milliseconds
from farfield.cli.values import AttentionOptions, Bytes, Device, Size

if TYPE_CHECKING:
    from farfield.cost import Plan


def plan_operators(
    *,
    channels: int,
    size: Size,
    batch: int = 1,
    memory: Bytes | None = None,
    heads: int = 1,
    project: str = "v",
    backward: bool = False,
    device: Device = "cpu",
    no_time: bool = False,
) -> Table:
    """Show which operators fit a memory, what each needs, and the size from which on it beats softmax attention.

    farfield plan NETWORK INPUT OUTPUT shows the plan of a prediction instead, as farfield predict --plan does.

    Args:
        channels: Channels of the grid.
        size: Size of the grid.
        batch: Samples.
        memory: Available memory, such as 24G, which is 24GB, or 24GiB.
        heads: Heads of the operators.
        project: Projections, letters of "qkvo"; --project= for none.
        backward: A training step must fit, not only a forward pass.
        device: Device on which time is measured.
        no_time: Do not measure time: MACs and bytes only.
    """
    from farfield import cost

    plans = cost.plan(
        channels=channels,
        size=size,
        batch=batch,
        heads=heads,
        project=project,
        memory=memory,
        backward=backward,
        device=None if no_time else device,
    )
    columns = [Column("operator", "operator", left=True)]
    if memory:
        columns.append(Column("fits", "fits", lambda fits: "yes" if fits else "no", left=True))
    for key, heading in (("forward", "forward"), ("training", "and backward")):
        columns += [
            Column(f"macs_{key}", f"MACs {heading}", millions),
            Column(f"bytes_{key}", "memory", megabytes_finely),
        ]
        if not no_time:
            columns.append(Column(f"seconds_{key}", "time", _duration))
    columns += [Column("cheaper_macs", "fewer MACs from", "N = {:,}".format)]
    columns += [Column("cheaper_bytes", "less memory from", "N = {:,}".format)]
    scope = "a training step" if backward else "a forward pass"
    limit = f", {scope} in {megabytes_finely(memory)}" if memory else ""
    options = AttentionOptions(channels, batch, heads, project)
    title = f"Operators on {joined(list(size))} positions, {options}, batch {batch}{limit}"
    notes = [
        "Memory: the grid, the parameters and all other tensors that exist at the peak, in float32.",
        "Fewer, less from: the positions of a square (cube, …) from which on a forward pass costs less than softmax's.",
    ]
    if not no_time:
        notes.insert(1, f"Time: estimated from a short run on {device}.")
    if memory and not any(plan.fits for plan in plans):
        notes.append(
            "No operator fits as a whole. In tiles most do: a layer by streaming.respond_whole, a network by "
            "streaming.predict_whole (farfield predict)."
        )
    return Table(title, columns, [_table_row(plan) for plan in plans], notes)


def _duration(seconds: float) -> str:
    return f"{seconds:,.1f}s" if seconds >= 1 else milliseconds(seconds)


def _table_row(plan: Plan) -> Row:
    row: Row = {"operator": plan.operator, "fits": plan.fits}
    for key, needs in (("forward", plan.forward), ("training", plan.training)):
        row |= {f"macs_{key}": needs.macs, f"bytes_{key}": needs.bytes, f"seconds_{key}": needs.seconds}
    return row | {"cheaper_macs": plan.cheaper_macs, "cheaper_bytes": plan.cheaper_bytes}
