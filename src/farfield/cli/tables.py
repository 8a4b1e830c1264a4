"""`farfield operators | models | cost | measure | info`: tables as text, JSON or CSV.

Heavy modules are imported only after the command line is parsed.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from farfield.cli.command_parser import CommandParser, no_such
from farfield.cli.output import (
    Column,
    Row,
    Table,
    add_formats,
    gigabytes_a_second,
    joined,
    megabytes,
    megabytes_finely,
    millions,
    milliseconds,
    percent,
    ratio,
    show,
)
from farfield.cli.printed import NETWORKS, PaperTable, table_for

# Written out, because ops.OPERATORS imports torch, which takes seconds; tests compare the two.
# Operator -> its equation, its slots, what merging does with two summaries, and how its MACs grow in self-attention: N
# positions, S the sum of the size, c channels, h heads.
OPERATORS = {
    "softmax": ("KAN 1, SAN 1, FA 9", "one per position", "concatenated", "N²·c"),
    "softmax_pooled": ("KAN Table 2", "one per pooled position", "concatenated", "N²·c / 2^dims"),
    "kronecker_kv": ("KAN 14-16", "one per index of each axis", "added", "N·S·c"),
    "kronecker_qkv": ("KAN 13, 17-18", "one per index of each axis", "added", "S²·c"),
    "kronecker_qkv_literal": ("KAN 17-18", "one per index of each axis", "added", "S²·c"),
    "dot": ("FA 6", "one per position", "concatenated", "N²·c"),
    "factorized": ("FA 3, FA 8", "one per key channel", "added", "N·c²/h"),
    "averaged": ("SAN 2", "one per key channel", "added", "N·c²/h"),
    "factorized_gaussian": ("FA 4", "one per key channel", "rescaled to the larger peak, added", "N·c²/h"),
    "siamese": ("SAN 5-6", "two", "added", "N·c"),
    "siamese_local": ("SAN Table 6", "one", "added", "N·c"),
    "siamese_ones": ("SAN Table 8", "two", "added", "N·c"),
}


def main(argv: Sequence[str]) -> None:
    """Run one of the five commands.

    Args:
        argv: The command's name and its options.

    Raises:
        SystemExit: With status 2 for a wrong option.
        LookupError: For an unknown operator or network.
        ValueError: For heads or projections that an operator does not support.
    """
    name, *options = argv
    describe, build = COMMANDS[name]
    parser = CommandParser(f"farfield {name}", build.__doc__)
    parser.set_defaults(command=name)
    describe(parser)
    add_formats(parser)
    arguments = parser.parse_args(options)
    show(build(arguments), arguments)


# Kinds of devices of torch, each with its driver in torch's own releases.
DEVICES = ("cpu", "cuda", "mps", "xpu")


# ---- options ---------------------------------------------------------------------------------------------------------
def number(text: str) -> int:
    """Convert an option to a whole number from 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1")
    return int(text)


def grid_size(text: str) -> tuple[int, ...]:
    """Convert an option to the size of a grid, such as 56,56."""
    parts = text.split(",")
    if not all(part.strip().isdecimal() and int(part) > 0 for part in parts):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a size: whole numbers from 1 joined by commas, such as 56,56"
        )
    return tuple(int(part) for part in parts)


def device(text: str) -> str:
    """Convert an option to the name of a device that this machine has."""
    import torch

    kind = text.partition(":")[0]
    if kind not in DEVICES:
        raise argparse.ArgumentTypeError(no_such("device", text, DEVICES))
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    count = torch.accelerator.device_count() if accelerator is not None and accelerator.type == kind else 0
    numbers = [] if kind == "cpu" else [f"{kind}:{index}" for index in range(count)]
    if text not in ("cpu", "cpu:0", *numbers, *([kind] if numbers else [])):
        fix = f"{kind}, or one of {', '.join(numbers)}" if numbers else "cpu"
        raise argparse.ArgumentTypeError(f"this machine has no device {text}; fix: {fix}.")
    return text


def grid_options(parser: argparse.ArgumentParser) -> None:
    """Add the options for the grid, the heads, the projections and the operators."""
    parser.add_argument("--channels", type=number, default=8, help="channels of the grid (default: %(default)s)")
    parser.add_argument("--batch", type=number, default=8, help="samples (default: %(default)s, as in KAN Table 2)")
    parser.add_argument("--heads", type=number, default=1, help="default: %(default)s")
    parser.add_argument(
        "--project", default="v", metavar="LETTERS", help='projections, letters of "qkvo" (default: %(default)s)'
    )
    parser.add_argument(
        "--operator",
        action="append",
        metavar="NAME",
        help="an operator that farfield operators lists; may be given several times (default: all)",
    )


def select_operators(arguments: argparse.Namespace) -> list[str]:
    """Return the operators that the command line selects."""
    return select(arguments, "operator", arguments.operator, list(OPERATORS))


def select(arguments: argparse.Namespace, what: str, names: list[str] | None, every: list[str]) -> list[str]:
    """Return the selected names, each once, or every name if none is selected; raise for unknown names."""
    from farfield._checks import unknown

    for name in names or []:
        if name not in every:
            raise unknown(f"farfield {arguments.command}", what, name, every)
    return list(dict.fromkeys(names or every))


def describe_attention(arguments: argparse.Namespace) -> str:
    """Return channels, heads and projections as text."""
    heads = "1 head" if arguments.heads == 1 else f"{arguments.heads} heads"
    return f"{arguments.channels} channels, {heads}, projections {arguments.project or 'none'}"


# ---- operators -------------------------------------------------------------------------------------------------------
def operators_table(arguments: argparse.Namespace) -> Table:
    """List the operators: their equations, slots, merging and cost."""
    keys = ("source", "slots", "merging", "cost")
    rows: list[Row] = [{"operator": name, **dict(zip(keys, texts, strict=True))} for name, texts in OPERATORS.items()]
    columns = [Column("operator", "operator", left=True), Column("source", "equation", left=True)]
    columns += [Column("slots", "slots per head", left=True), Column("merging", "summaries of tiles are", left=True)]
    columns.append(Column("cost", "MACs grow as", left=True))
    note = "N positions of c channels, S the sum of the size (112 for 56 × 56), h heads; farfield cost gives numbers."
    choice = (
        "To begin with: softmax up to a thousand positions, kronecker_kv or factorized_gaussian beyond, siamese where "
        "cost is all (docs: guide/choose, measured)."
    )
    return Table("Operators", columns, rows, [note, choice])


# ---- models ----------------------------------------------------------------------------------------------------------
def models_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `farfield models`."""
    parser.add_argument(
        "--model", action="append", metavar="NAME", help="one network; may be given several times (default: all)"
    )
    parser.add_argument(
        "--size", type=number, default=224, help="height and width of the image, in pixels (default: %(default)s)"
    )
    parser.add_argument("--classes", type=number, default=1000, help="default: %(default)s")
    parser.add_argument("--width", type=float, default=1.0, help="multiplier of all channels (default: %(default)s)")


def models_table(arguments: argparse.Namespace) -> Table:
    """List the networks: weights and MACs, beside the numbers in the papers."""
    import torch

    from farfield import cost, models

    as_printed = (arguments.size, arguments.classes, arguments.width) == (224, 1000, 1.0)
    rows: list[Row] = []
    for name in select(arguments, "model", arguments.model, list(models.CLASSIFIERS)):
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
    columns.append(Column("macs_executed", "MACs executed", millions))
    title = f"Networks at {arguments.size} × {arguments.size}, {arguments.classes} classes, width {arguments.width:g}"
    notes = ["Weights: parameters without biases and norms. The papers truncate digits: 365.37 million are 365m."]
    return Table(title, columns, rows, notes)


# ---- cost ------------------------------------------------------------------------------------------------------------
def cost_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `farfield cost`."""
    grid_options(parser)
    parser.add_argument(
        "--size", type=grid_size, default=(56, 56), metavar="56,56", help="size of the grid (default: 56,56)"
    )


def cost_table(arguments: argparse.Namespace) -> Table:
    """Show MACs and memory of the operators by formula, beside the papers' tables and the executed MACs."""
    table = table_for(
        arguments.size,
        arguments.channels,
        batch=arguments.batch,
        heads=arguments.heads,
        project=arguments.project,
    )
    rows = [cost_row(name, arguments, table) for name in select_operators(arguments)]
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
    title = (
        f"{joined(list(arguments.size))} positions, {describe_attention(arguments)}: MACs of one sample, memory of a "
    )
    title += f"batch of {arguments.batch}"
    printed = f" Printed: {table.name}; the documentation's page of results explains differences." if table else ""
    notes = [
        f"MACs and memory: by the papers' formulas; saving: compared with softmax.{printed}",
        "MACs executed: by this library's code, which reduces values before it projects them. Held: its activations.",
        "Sent: by each process of a grid spread over several; empty for operators with a summary as large as the grid.",
    ]
    return Table(title, columns, rows, notes)


def cost_row(name: str, arguments: argparse.Namespace, table: PaperTable | None) -> Row:
    """Return the cost of one operator: by the papers' formulas, as printed, and as executed."""
    import torch

    from farfield import cost, nn
    from farfield.cost.formulas import PAPERS
    from farfield.ops import table as operators

    papers = [table.paper] if table else []
    paper = next(paper for paper in (*papers, *PAPERS) if name in PAPERS[paper].rows)

    def predict(operator: str, batch: int) -> cost.Cost:
        return cost.predict(
            operator,
            channels=arguments.channels,
            size=arguments.size,
            batch=batch,
            heads=arguments.heads,
            project=operators.OPERATORS[operator].projections(arguments.project),
            convention=paper,
        )

    one, whole, dense = predict(name, 1), predict(name, arguments.batch), predict("softmax", arguments.batch)
    with torch.device("meta"):
        project = operators.OPERATORS[name].projections(arguments.project)
        attention = nn.GridAttention(arguments.channels, name, heads=arguments.heads, project=project).eval()
    held = cost.predict(attention, size=arguments.size, batch=arguments.batch)
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
        "activation_bytes": held.activation_bytes,
        "gathered_bytes": held.gathered_bytes,
        "coefficients": one.coefficients,
        "weights": one.weights,
        "parameters": one.parameters,
    }


# ---- measure ---------------------------------------------------------------------------------------------------------
def measure_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `farfield measure`."""
    grid_options(parser)
    parser.add_argument(
        "--size",
        type=grid_size,
        action="append",
        metavar="56,56",
        help="size of the grid; may be given several times (default: 14,14 28,28 56,56)",
    )
    parser.add_argument(
        "--repeats", type=number, default=10, help="timed runs, whose median is shown (default: %(default)s)"
    )
    parser.add_argument("--backward", action="store_true", help="forward and backward pass")
    parser.add_argument("--device", type=device, default="cpu", help="such as cuda (default: %(default)s)")
    parser.add_argument(
        "--roofline", action="store_true", help="beside the least time: of moving the bytes, or of the products"
    )


def measure_table(arguments: argparse.Namespace) -> Table:
    """Measure time and peak memory of the operators on this machine, compared with softmax attention."""
    from farfield.cli.measured import measure_all

    if arguments.roofline:
        return roofline_table(arguments)
    rows = measure_all(arguments, select_operators(arguments))
    columns = [Column("size", "positions", joined, left=True), Column("operator", "operator", left=True)]
    columns += [Column("seconds", "time", milliseconds), Column("copies", "copies", "{:,.1f}".format)]
    columns.append(Column("speed_up", "speed-up", ratio))
    if any(row["speed_up_printed"] for row in rows):
        columns.append(Column("speed_up_printed", "printed"))
    columns += [Column("peak_bytes", "peak memory", megabytes), Column("memory_saving", "saving", percent)]
    if arguments.backward:
        columns.append(Column("saved_bytes", "saved for backward", megabytes))
    columns.append(Column("equals", "same output as", left=True))
    what = "forward and backward" if arguments.backward else "forward"
    title = f"{describe_attention(arguments)}, batch {arguments.batch}, {what}, "
    title += f"{arguments.repeats} runs on {rows[0]['device']}"
    notes = [
        "Time: median; all operators run in turns. Copies: the time divided by that of x.clone() of the grid.",
        "Peak memory: beyond that allocated before. Speed-up and saving: compared with softmax.",
    ]
    if any(row["speed_up_printed"] for row in rows):
        notes.append("Printed: the papers' speed-ups, on their machines.")
    return Table(title, columns, rows, notes)


def roofline_table(arguments: argparse.Namespace) -> Table:
    """Measure the operators beside the least time that this machine could take."""
    import torch

    from farfield.cli.measured import rooflines
    from farfield.cost.least_time import machine_rates

    rows, rates = rooflines(arguments, select_operators(arguments)), machine_rates(torch.device(arguments.device))
    columns = [Column("size", "positions", joined, left=True), Column("operator", "operator", left=True)]
    columns += [Column("bytes", "bytes", megabytes), Column("macs", "MACs", millions)]
    columns += [Column("copy_rate", "copy", gigabytes_a_second), Column("least_seconds", "least time", milliseconds)]
    columns += [Column("bottleneck", "that of", left=True), Column("seconds", "time", milliseconds)]
    columns.append(Column("times", "÷ least", ratio))
    what = "forward and backward" if arguments.backward else "forward"
    title = f"{describe_attention(arguments)}, batch {arguments.batch}, {what}, on {rows[0]['device']}"
    notes = [
        f"This machine: a copy from memory {gigabytes_a_second(rates.from_memory)}, within a cache "
        f"{gigabytes_a_second(rates.from_cache)}, read and written; a matrix product "
        f"{rates.products / 1e9:,.0f} GMAC/s.",
        "Copy: the rate of a copy of the same grid, from whatever caches hold it. Least time: that of the bytes at "
        "this rate, or of the MACs at the rate of the matrix product, whichever is longer.",
    ]
    return Table(title, columns, rows, notes)


# ---- info ------------------------------------------------------------------------------------------------------------
def info_table(arguments: argparse.Namespace) -> Table:
    """Show versions, devices, threads, installed extras and kernels."""
    from farfield.cli.machine import machine_rows

    columns = [Column("what", "", left=True), Column("value", "", left=True)]
    return Table("farfield on this machine", columns, machine_rows())


def no_options(parser: argparse.ArgumentParser) -> None:
    """Add nothing: the command has no options of its own."""


COMMANDS = {
    "operators": (no_options, operators_table),
    "models": (models_options, models_table),
    "cost": (cost_options, cost_table),
    "measure": (measure_options, measure_table),
    "info": (no_options, info_table),
}
