"""`farfield operators | cost | measure`: tables as text, JSON or CSV.

Heavy modules are imported only after the command line is parsed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from farfield._operators import FACTS
from farfield._refusals import put_name
from farfield.cli.output import (
    Column,
    Row,
    Table,
    gigabytes_a_second,
    joined,
    megabytes,
    megabytes_finely,
    millions,
    milliseconds,
    percent,
    ratio,
)
from farfield.cli.printed import PaperTable, table_for
from farfield.cli.values import AttentionOptions, Device, Size

if TYPE_CHECKING:
    from farfield.cli.measured import Measurements
    from farfield.ops import Operator


def select(command: str, what: str, names: Sequence[str] | None, every: Iterable[str]) -> list[str]:
    """Return the names that are given, each once, or every one if none is; refuse unknown ones."""
    from farfield._checks import unknown

    every = list(every)
    for name in names or []:
        if name not in every:
            raise put_name(f"farfield {command}", unknown(what, name, every))
    return list(dict.fromkeys(names or every))


def _select_operators(command: str, names: Sequence[str] | None) -> dict[str, str | Operator]:
    """Return the operators that are given, or all; "module:attribute" is a user's own."""
    own: dict[str, str | Operator] = {name: import_operator(name) for name in names or [] if ":" in name}
    known = [name for name in names or [] if name not in own]
    selected = select(command, "operator", known, FACTS) if known or not own else []
    return {name: name for name in selected} | own


def import_operator(name: str) -> Operator:
    """Import a user's own operator, "module:attribute"."""
    from farfield._networks import import_function
    from farfield.ops import Operator

    operator: object = import_function(name, "--operator")
    if not isinstance(operator, Operator):
        raise TypeError(f"--operator {name} must be an ops.Operator, got {type(operator).__name__}.")
    return operator


def list_operators() -> Table:
    """List the operators: their equations, slots, merging and cost."""
    rows: list[Row] = [
        {"operator": name, "source": facts.source, "slots": facts.slots, "merging": facts.merging, "cost": facts.growth}
        for name, facts in FACTS.items()
    ]
    columns = [Column("operator", "operator", left=True), Column("source", "equation", left=True)]
    columns += [Column("slots", "slots per head", left=True), Column("merging", "summaries of tiles are", left=True)]
    columns.append(Column("cost", "MACs grow as", left=True))
    note = "N positions of c channels, S the sum of the size (112 for 56 × 56), h heads; farfield cost gives numbers."
    choice = (
        "To begin with: softmax up to a thousand positions, flare with one head in larger images, siamese where cost "
        "is all (docs: guide/choose, measured)."
    )
    return Table("Operators", columns, rows, [note, choice])


def show_costs(
    *,
    channels: int = 8,
    batch: int = 8,
    heads: int = 1,
    project: str = "v",
    operator: list[str] | None = None,
    size: Size = (56, 56),
) -> Table:
    """Show MACs and memory of the operators by formula, beside the papers' tables and the executed MACs.

    Args:
        channels: Channels of the grid.
        batch: Samples; 8 as in KAN Table 2.
        heads: Heads of the operators.
        project: Projections, letters of "qkvo"; --project= for none.
        operator: An operator that farfield operators lists, or one of yours, MODULE:NAME; may be given several times
            (default: all).
        size: Size of the grid.
    """
    attention = AttentionOptions(channels, batch, heads, project)
    table = table_for(size, channels, batch=batch, heads=heads, project=project)
    rows = [_cost_row(name, each, attention, size, table) for name, each in _select_operators("cost", operator).items()]
    columns = [Column("operator", "operator", left=True)]
    for key, heading, text in (
        ("macs", "MACs", millions),
        ("saving", "saving", percent),
        ("memory", "memory", megabytes_finely if table and table.paper == "SAN" else megabytes),
        ("memory_saving", "saving", percent),
    ):
        columns.append(Column(f"{key}_paper", heading, text))
        if any(row[f"{key}_printed"] for row in rows):
            columns.append(Column(f"{key}_printed", "printed"))
    columns += [Column("macs_executed", "MACs executed", millions), Column("activation_bytes", "held", megabytes)]
    columns.append(Column("gathered_bytes", "sent", megabytes))
    title = f"{joined(list(size))} positions, {attention}: MACs of one sample, memory of a batch of {batch}"
    printed = ""
    if table:
        printed = f' Printed: {table.name}; the documentation\'s page "Printed numbers" explains differences.'
    notes = [
        f"MACs and memory: by the papers' formulas; saving: compared with softmax.{printed}",
        "MACs executed: by this library's code, which reduces values before it projects them. Held: its activations.",
        "Sent: by each process of a grid spread over several; empty for operators with a summary as large as the grid.",
    ]
    return Table(title, columns, rows, notes)


_COSTS = ("macs", "saving", "memory", "memory_saving")
_COST_KEYS = ("operator", "paper", *(f"{cost}_{source}" for cost in _COSTS for source in ("paper", "printed")))
_COST_KEYS_HERE = ("macs_executed", "activation_bytes", "gathered_bytes", "coefficients", "weights", "parameters")


def _cost_row(
    name: str, operator: str | Operator, options: AttentionOptions, size: Size, table: PaperTable | None
) -> Row:
    """Return the cost of one operator: by the papers' formulas, as printed, and as executed."""
    import torch

    from farfield import cost, nn
    from farfield.cost.formulas import PAPERS
    from farfield.ops import OPERATORS

    channels, batch, heads, letters = options
    project = (OPERATORS[operator] if isinstance(operator, str) else operator).projections(letters)
    with torch.device("meta"):
        attention = nn.GridAttention(channels, operator, heads=heads, project=project).eval()
    counted = cost.count(attention, (1, channels, *size))
    row: Row = dict.fromkeys((*_COST_KEYS, *_COST_KEYS_HERE)) | {"operator": name}
    row |= {"macs_executed": counted.macs, "weights": counted.weights, "parameters": counted.parameters}
    if name not in OPERATORS:  # a user's own operator has no formula
        return row
    held = cost.predict(attention, size=size, batch=batch)
    row |= {
        "activation_bytes": held.activation_bytes,
        "gathered_bytes": held.gathered_bytes,
        "coefficients": held.coefficients and held.coefficients // batch,
    }
    papers = [table.paper] if table else []
    paper = next((paper for paper in (*papers, *PAPERS) if name in PAPERS[paper].rows), None)
    if paper is None:
        return row

    def predict(operator: str, batch: int) -> cost.Cost:
        letters = OPERATORS[operator].projections(options.project)
        return cost.predict(
            operator,
            channels=channels,
            size=size,
            batch=batch,
            heads=heads,
            project=letters,
            convention=paper,
        )

    one, whole, dense = predict(name, 1), predict(name, batch), predict("softmax", batch)
    printed = table.rows.get(name) if table else None
    row |= {
        "paper": paper,
        "macs_paper": one.macs,
        "macs_printed": printed and printed.macs,
        "saving_paper": 1 - whole.macs / dense.macs,
        "saving_printed": printed and printed.saving,
        "memory_paper": whole.activation_bytes,
        "memory_printed": printed and printed.memory,
        "memory_saving_paper": 1 - whole.activation_bytes / dense.activation_bytes,
        "memory_saving_printed": printed and printed.memory_saving,
    }
    return row


def measure_operators(
    *,
    channels: int = 8,
    batch: int = 8,
    heads: int = 1,
    project: str = "v",
    operator: list[str] | None = None,
    size: list[Size] | None = None,
    repeats: int = 10,
    backward: bool = False,
    device: Device = "cpu",
    roofline: bool = False,
) -> Table:
    """Measure time and peak memory of the operators on this machine, compared with softmax attention.

    Args:
        channels: Channels of the grid.
        batch: Samples; 8 as in KAN Table 2.
        heads: Heads of the operators.
        project: Projections, letters of "qkvo"; --project= for none.
        operator: An operator that farfield operators lists, or one of yours, MODULE:NAME; may be given several times
            (default: all).
        size: Size of the grid; may be given several times (default: 14,14 28,28 56,56).
        repeats: Timed runs, whose median is shown.
        backward: Forward and backward pass.
        device: A device of this machine, such as cuda.
        roofline: Beside the least time: of moving the bytes, or of the products.
    """
    from farfield.cli.measured import Measurements

    attention = AttentionOptions(channels, batch, heads, project)
    measured = Measurements(attention, _select_operators("measure", operator), size, repeats, backward, device)
    title = f"{attention}, batch {batch}, {'forward and backward' if backward else 'forward'}"
    return _roofline_table(measured, title) if roofline else _measured_table(measured, title)


def _measured_table(measured: Measurements, title: str) -> Table:
    rows = measured.measure_all()
    columns = [Column("size", "positions", joined, left=True), Column("operator", "operator", left=True)]
    columns += [Column("seconds", "time", milliseconds), Column("copies", "copies", "{:,.1f}".format)]
    columns.append(Column("speed_up", "speed-up", ratio))
    if any(row["speed_up_printed"] for row in rows):
        columns.append(Column("speed_up_printed", "printed"))
    columns += [Column("peak_bytes", "peak memory", megabytes), Column("memory_saving", "saving", percent)]
    if measured.backward:
        columns.append(Column("saved_bytes", "saved for backward", megabytes))
    columns.append(Column("equals", "same output as", left=True))
    notes = [
        "Time: median; all operators run in turns. Copies: the time divided by that of x.clone() of the grid.",
        "Peak memory: beyond that allocated before. Speed-up and saving: compared with softmax.",
    ]
    if any(row["speed_up_printed"] for row in rows):
        notes.append("Printed: the papers' speed-ups, on their machines.")
    return Table(f"{title}, {measured.repeats} runs on {rows[0]['device']}", columns, rows, notes)


def _roofline_table(measured: Measurements, title: str) -> Table:
    """Show the times beside the least time that this machine could take."""
    import torch

    from farfield.cost.least_time import machine_rates

    rows, rates = measured.measure_rooflines(), machine_rates(torch.device(measured.device))
    columns = [Column("size", "positions", joined, left=True), Column("operator", "operator", left=True)]
    columns += [Column("bytes", "bytes", megabytes), Column("macs", "MACs", millions)]
    columns += [Column("copy_rate", "copy", gigabytes_a_second), Column("least_seconds", "least time", milliseconds)]
    columns += [Column("bottleneck", "that of", left=True), Column("seconds", "time", milliseconds)]
    columns.append(Column("times", "÷ least", ratio))
    notes = [
        f"This machine: a copy from memory {gigabytes_a_second(rates.from_memory)}, within a cache "
        f"{gigabytes_a_second(rates.from_cache)}, read and written; a matrix product "
        f"{rates.products / 1e9:,.0f} GMAC/s.",
        "Copy: the rate of a copy of the same grid, from whatever caches hold it. Least time: that of the bytes at "
        "this rate, or of the MACs at the rate of the matrix product, whichever is longer.",
    ]
    return Table(f"{title}, on {rows[0]['device']}", columns, rows, notes)
