"""`farfield operators | models | cost | measure | info`: tables, for people, as JSON, or as CSV.

Nothing heavy loads before a command line is understood.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from farfield.cli.output import (
    Column,
    Row,
    Table,
    add_formats,
    joined,
    megabytes,
    megabytes_finely,
    millions,
    milliseconds,
    percent,
    ratio,
    show,
)
from farfield.cli.printed import NETWORKS, Tabled, table_for

# Without torch, which takes seconds to load; tests hold it to the operators themselves.
# Row -> its equation, its slots, what merging two summaries does, and how its MACs grow: N positions, c channels,
# h heads, self-attention.
OPERATORS = {
    "softmax": ("KAN 1, SAN 1, FA 9", "one a position", "stand side by side", "N²·c"),
    "softmax_pooled": ("KAN Table 2", "one a pooled position", "stand side by side", "N²·c / 2^dims"),
    "kronecker_kv": ("KAN 14-16", "one an index of each axis", "add", "N·Σsides·c"),
    "kronecker_qkv": ("KAN 13, 17-18", "one an index of each axis", "add", "(Σsides)²·c"),
    "kronecker_qkv_literal": ("KAN 17-18", "one an index of each axis", "add", "(Σsides)²·c"),
    "dot": ("FA 6", "one a position", "stand side by side", "N²·c"),
    "factorized": ("FA 3, FA 8", "one a key channel", "add", "N·c²/h"),
    "averaged": ("SAN 2", "one a key channel", "add", "N·c²/h"),
    "factorized_gaussian": ("FA 4", "one a key channel", "rescale to the larger peak, add", "N·c²/h"),
    "siamese": ("SAN 5-6", "two", "add", "N·c"),
    "siamese_local": ("SAN Table 6", "one", "add", "N·c"),
    "siamese_ones": ("SAN Table 8", "two", "add", "N·c"),
}


def main(argv: Sequence[str]) -> None:
    """Run one of the five commands.

    Args:
        argv: The command's name and its options.

    Raises:
        SystemExit: With status 2 for a wrong option.
    """
    name, *options = argv
    describe, build = COMMANDS[name]
    parser = argparse.ArgumentParser(prog=f"farfield {name}", description=build.__doc__, allow_abbrev=False)
    parser.set_defaults(command=name)
    describe(parser)
    add_formats(parser)
    arguments = parser.parse_args(options)
    show(build(arguments), arguments)


# ---- options ---------------------------------------------------------------------------------------------------------
def number(text: str) -> int:
    """A whole number from 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1")
    return int(text)


def grid_size(text: str) -> tuple[int, ...]:
    """Sides of a grid, such as 56,56."""
    parts = text.split(",")
    if not all(part.strip().isdecimal() and int(part) > 0 for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} is not sides: whole numbers from 1 joined by commas, such as 56,56")
    return tuple(int(part) for part in parts)


def grid_options(parser: argparse.ArgumentParser) -> None:
    """Options of what attends: grid, heads, maps, operators."""
    parser.add_argument("--channels", type=number, default=8, help="channels of the grid (default: %(default)s)")
    parser.add_argument("--batch", type=number, default=8, help="samples (default: %(default)s, as in KAN Table 2)")
    parser.add_argument("--heads", type=number, default=1, help="default: %(default)s")
    parser.add_argument(
        "--project", default="v", metavar="LETTERS", help='linear maps, letters of "qkvo" (default: %(default)s)'
    )
    parser.add_argument(
        "--operator",
        action="append",
        metavar="ROW",
        help="one row of farfield operators; may be given several times (default: all)",
    )


def chosen(arguments: argparse.Namespace) -> list[str]:
    """The operators that the command line asks for."""
    return known(arguments, "operator", arguments.operator, list(OPERATORS))


def known(arguments: argparse.Namespace, what: str, names: list[str] | None, every: list[str]) -> list[str]:
    """Names that the command line asks for, each once, all of which there are; every one if it asks for none."""
    from farfield._checks import unknown

    for name in names or []:
        if name not in every:
            raise unknown(f"farfield {arguments.command}", what, name, every)
    return list(dict.fromkeys(names or every))


def sentence(arguments: argparse.Namespace) -> str:
    """What attends, in words."""
    heads = "1 head" if arguments.heads == 1 else f"{arguments.heads} heads"
    return f"{arguments.channels} channels, {heads}, maps {arguments.project or 'none'}"


# ---- operators -------------------------------------------------------------------------------------------------------
def operators_table(arguments: argparse.Namespace) -> Table:
    """List the operators: their equations, slots, merging and cost."""
    keys = ("source", "slots", "merging", "cost")
    rows: list[Row] = [{"operator": name, **dict(zip(keys, row, strict=True))} for name, row in OPERATORS.items()]
    columns = [Column("operator", "operator", left=True), Column("source", "equation", left=True)]
    columns += [Column("slots", "slots a head", left=True), Column("merging", "summaries of tiles", left=True)]
    columns.append(Column("cost", "MACs grow as", left=True))
    return Table("Operators", columns, rows, ["N positions of c channels, h heads; farfield cost gives the numbers."])


# ---- models ----------------------------------------------------------------------------------------------------------
def models_options(parser: argparse.ArgumentParser) -> None:
    """Options of `farfield models`."""
    parser.add_argument(
        "--model", action="append", metavar="NAME", help="one network; may be given several times (default: all)"
    )
    parser.add_argument("--size", type=number, default=224, help="pixels a side of one image (default: %(default)s)")
    parser.add_argument("--classes", type=number, default=1000, help="default: %(default)s")
    parser.add_argument("--width", type=float, default=1.0, help="multiplies all channels (default: %(default)s)")


def models_table(arguments: argparse.Namespace) -> Table:
    """List the networks: weights and MACs, beside what the papers print."""
    import torch

    from farfield import cost, models

    as_printed = (arguments.size, arguments.classes, arguments.width) == (224, 1000, 1.0)
    rows: list[Row] = []
    for name in known(arguments, "model", arguments.model, list(models.CLASSIFIERS)):
        with torch.device("meta"):
            net = models.CLASSIFIERS[name](num_classes=arguments.classes, width=arguments.width).eval()
        size = arguments.size, arguments.size
        executed = cost.count(net, (1, 3, *size))
        printed = cost.predict(net, channels=3, size=size, convention="paper")
        network = NETWORKS.get(name)
        row: Row = {"model": name, "paper_name": network.name if network else None, "weights": executed.weights}
        row |= {"parameters": executed.parameters, "macs_paper": printed.macs, "macs_executed": executed.macs}
        row["weights_printed"] = network.parameters if network and as_printed else None
        row["macs_printed"] = network.macs if network and as_printed else None
        rows.append(row)
    columns = [Column("model", "model", left=True), Column("paper_name", "in the papers", left=True)]
    columns += [Column("weights", "weights", "{:,}".format), Column("weights_printed", "printed")]
    columns += [Column("macs_paper", "MACs, papers' rule", millions), Column("macs_printed", "printed")]
    columns.append(Column("macs_executed", "MACs that executes", millions))
    title = f"Networks at {arguments.size} × {arguments.size}, {arguments.classes} classes, width {arguments.width:g}"
    notes = ["Weights: parameters without biases and norms. The papers cut digits off: 365.37 million are 365m."]
    return Table(title, columns, rows, notes)


# ---- cost ------------------------------------------------------------------------------------------------------------
def cost_options(parser: argparse.ArgumentParser) -> None:
    """Options of `farfield cost`."""
    grid_options(parser)
    parser.add_argument(
        "--size", type=grid_size, default=(56, 56), metavar="56,56", help="sides of the grid (default: 56,56)"
    )


def cost_table(arguments: argparse.Namespace) -> Table:
    """MACs and memory of the operators by formula, beside the papers' tables and beside what executes."""
    table = table_for(
        arguments.size,
        arguments.channels,
        batch=arguments.batch,
        heads=arguments.heads,
        project=arguments.project,
    )
    rows = [cost_row(name, arguments, table) for name in chosen(arguments)]
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
    columns += [Column("macs_executed", "MACs executed", millions), Column("activation_bytes", "formed", megabytes)]
    columns.append(Column("gathered_bytes", "sent", megabytes))
    title = (
        f"{joined(list(arguments.size))} positions, {sentence(arguments)}: MACs of one sample, memory of a batch of "
    )
    printed = f" Printed: {table.name}; what differs is on the documentation's page of results." if table else ""
    notes = [
        f"MACs and memory: by the papers' formulas; saving: against softmax.{printed}",
        "MACs executed: counted on this library's code, which sums values before it maps them. Formed: what it holds.",
        "Sent: by each process where the grid is spread over several; nothing for rows whose summary is the grid.",
    ]
    return Table(f"{title}{arguments.batch}", columns, rows, notes)


def cost_row(name: str, arguments: argparse.Namespace, table: Tabled | None) -> Row:
    """One operator by the papers' formulas, as printed, and as executed."""
    import torch

    from farfield import cost, nn
    from farfield.cost.formulas import PAPERS
    from farfield.ops import table as operators

    papers = [table.paper] if table else []
    paper = next(paper for paper in (*papers, *PAPERS) if name in PAPERS[paper].rows)

    def predicted(row: str, batch: int) -> cost.Cost:
        return cost.predict(
            row,
            channels=arguments.channels,
            size=arguments.size,
            batch=batch,
            heads=arguments.heads,
            project=operators.OPERATORS[row].projections(arguments.project),
            convention=paper,
        )

    one, whole, dense = predicted(name, 1), predicted(name, arguments.batch), predicted("softmax", arguments.batch)
    with torch.device("meta"):
        maps = operators.OPERATORS[name].projections(arguments.project)
        attention = nn.GridAttention(arguments.channels, name, heads=arguments.heads, project=maps).eval()
    formed = cost.predict(attention, size=arguments.size, batch=arguments.batch)
    printed = table.rows.get(name) if table else None
    return {
        "operator": name,
        "paper": paper,
        "macs_paper": one.macs,
        "macs_printed": printed and printed.macs,
        "saving_paper": 1 - whole.macs / dense.macs,
        "saving_printed": printed and printed.saving,
        "memory_paper": whole.activation_bytes,
        "memory_printed": printed and printed.memory,
        "memory_saving_paper": 1 - whole.activation_bytes / dense.activation_bytes,
        "memory_saving_printed": printed and printed.memory_saving,
        "macs_executed": cost.count(attention, (1, arguments.channels, *arguments.size)).macs,
        "activation_bytes": formed.activation_bytes,
        "gathered_bytes": formed.gathered_bytes,
        "coefficients": one.coefficients,
        "weights": one.weights,
        "parameters": one.parameters,
    }


# ---- measure ---------------------------------------------------------------------------------------------------------
def measure_options(parser: argparse.ArgumentParser) -> None:
    """Options of `farfield measure`."""
    grid_options(parser)
    parser.add_argument(
        "--size",
        type=grid_size,
        action="append",
        metavar="56,56",
        help="sides of the grid; may be given several times (default: 14,14 28,28 56,56)",
    )
    parser.add_argument(
        "--repeats", type=number, default=10, help="timed runs, of which the median (default: %(default)s)"
    )
    parser.add_argument("--backward", action="store_true", help="gradients too")
    parser.add_argument("--device", default="cpu", help="such as cuda (default: %(default)s)")


def measure_table(arguments: argparse.Namespace) -> Table:
    """Measure time and peak memory of the operators on this machine, against softmax attention."""
    from farfield.cli.measured import measured_rows

    rows = measured_rows(arguments, chosen(arguments))
    columns = [Column("size", "positions", joined, left=True), Column("operator", "operator", left=True)]
    columns += [Column("seconds", "time", milliseconds), Column("copies", "copies", "{:,.1f}".format)]
    columns.append(Column("speed_up", "speed-up", ratio))
    if any(row["speed_up_printed"] for row in rows):
        columns.append(Column("speed_up_printed", "printed"))
    columns += [Column("peak_bytes", "peak memory", megabytes), Column("memory_saving", "saving", percent)]
    if arguments.backward:
        columns.append(Column("saved_bytes", "kept for backward", megabytes))
    columns.append(Column("equals", "answers equal", left=True))
    what = "forward and backward" if arguments.backward else "forward"
    title = f"{sentence(arguments)}, batch {arguments.batch}, {what}, {arguments.repeats} runs on {rows[0]['device']}"
    notes = [
        "Time: the median of turns that all take. Copies: times as long as x.clone(), which reads and writes the grid.",
        "Peak memory: beyond what was there before. Speed-up and saving: against softmax.",
    ]
    if any(row["speed_up_printed"] for row in rows):
        notes.append("Printed: the papers' speed-ups, on their machines.")
    return Table(title, columns, rows, notes)


# ---- info ------------------------------------------------------------------------------------------------------------
def info_table(arguments: argparse.Namespace) -> Table:
    """Show versions, devices, threads, installed extras and kernels."""
    from farfield.cli.machine import machine_rows

    columns = [Column("what", "", left=True), Column("value", "", left=True)]
    return Table("farfield on this machine", columns, machine_rows())


def no_options(parser: argparse.ArgumentParser) -> None:
    """A command without options of its own."""


COMMANDS = {
    "operators": (no_options, operators_table),
    "models": (models_options, models_table),
    "cost": (cost_options, cost_table),
    "measure": (measure_options, measure_table),
    "info": (no_options, info_table),
}
