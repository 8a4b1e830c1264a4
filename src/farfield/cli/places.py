"""`farfield places`: where attention can be inserted into a network, and what it costs there.

    farfield places --network kanet_qkv --size 224,224
    farfield places --network torchvision.models.resnet50 --operator kronecker_kv
    farfield places --model runs/imagenette --json

The network runs a few times with an input of zeros, in eval mode.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import cache

import torch
from torch import nn

from farfield import cost
from farfield._checks import unknown
from farfield.cli.command_parser import CommandParser
from farfield.cli.network_builder import build_named
from farfield.cli.output import Column, Row, Table, joined, millions, show
from farfield.cli.tables import grid_size, number
from farfield.insertion import InsertionPlace, places
from farfield.nn import GridAttention
from farfield.ops import OPERATORS


def main(argv: Sequence[str]) -> None:
    """Print the places of a network, and the cost of attention at each.

    Args:
        argv: The command's options.

    Raises:
        SystemExit: With status 2 for a wrong option.
        LookupError: For an unknown operator or network.
        OSError: For a missing model.
        ValueError: For a network that cannot be read, or that does not run with such an input.
    """
    parser = CommandParser("farfield places", __doc__, raw=True)
    # Its rows may be none, for which there is no CSV.
    parser.set_defaults(csv=False)
    parser.add_argument(
        "--network",
        metavar="NAME",
        help="a network of farfield.models, or the function that builds one, such as torchvision.models.resnet50",
    )
    parser.add_argument(
        "--model",
        metavar="PATH",
        help="a saved network, a run of farfield fit, a folder of runs, a checkpoint, or a repository of the Hub",
    )
    parser.add_argument(
        "--size", type=grid_size, default=(224, 224), metavar="224,224", help="size of the input (default: 224,224)"
    )
    parser.add_argument("--channels", type=number, default=3, help="channels of the input (default: %(default)s)")
    parser.add_argument(
        "--operator",
        default="factorized_gaussian",
        metavar="NAME",
        help="an operator that farfield operators lists (default: %(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="print a JSON list with one object per place, raw values")
    arguments = parser.parse_args(argv)
    if not (arguments.model or arguments.network):
        parser.error("give a network, --network kanet_qkv, or a trained one, --model")
    if arguments.operator not in OPERATORS:
        raise unknown("farfield places", "operator", arguments.operator, OPERATORS)
    show(places_table(arguments), arguments)


def load_trained(arguments: argparse.Namespace) -> nn.Module:
    """Load a trained network; this needs the packages of training, which a network that is named does not."""
    from farfield.cli.loaded_network import load

    return load(arguments.model, arguments.network).network


def places_table(arguments: argparse.Namespace) -> Table:
    """Show where `insert` can add attention to a network, and what it costs there."""
    network = load_trained(arguments) if arguments.model else build_named(arguments.network, {})
    listed = places(network, torch.zeros(1, arguments.channels, *arguments.size))
    columns = [Column("path", "path", lambda path: path or "(the network)", left=True)]
    columns += [Column("kind", "module", left=True), Column("channels", "channels"), Column("size", "size", joined)]
    columns += [Column("positions", "positions", "{:,}".format), Column("layout", "layout", left=True)]
    columns += [Column("macs", "MACs", millions), Column("parameters", "parameters", "{:,}".format)]
    if arguments.operator != "softmax":
        columns.append(Column("softmax_macs", "MACs of softmax", millions))
    title = f"{len(listed)} places of {arguments.model or arguments.network} for an input of {arguments.channels} × "
    notes = [
        f'MACs of one sample, parameters: GridAttention(channels, "{arguments.operator}", '
        f'project="{OPERATORS[arguments.operator].projections("qkvo")}", residual=True).',
        "insert(network, path, make, example=…) adds it; where the channels are last, with layout=…, as listed.",
    ]
    rows = [table_row(place, arguments.operator) for place in listed]
    return Table(f"{title}{joined(arguments.size)}", columns, rows, notes)


def table_row(place: InsertionPlace, operator: str) -> Row:
    """Return the raw values of one place, under the keys of the columns and some more."""
    attention, softmax = (attention_cost(name, place.channels, place.size) for name in (operator, "softmax"))
    row: Row = {"path": place.path, "kind": place.kind, "channels": place.channels, "size": list(place.size)}
    row |= {"positions": torch.Size(place.size).numel(), "layout": place.layout, "shape": list(place.shape)}
    row |= {"operator": operator, "macs": attention.macs, "parameters": attention.parameters}
    return row | {"softmax_macs": softmax.macs, "softmax_parameters": softmax.parameters}


@cache
def attention_cost(operator: str, channels: int, size: tuple[int, ...]) -> cost.Cost:
    """Return the cost of one sample of a module that starts as the identity."""
    with torch.device("meta"):
        attention = GridAttention(channels, operator, project=OPERATORS[operator].projections("qkvo"), residual=True)
    return cost.predict(attention, size=size)
