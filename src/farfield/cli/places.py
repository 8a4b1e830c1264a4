"""`farfield places`: where attention can be inserted into a network, and what it costs there."""

from __future__ import annotations

from functools import cache

import torch

from farfield import cost
from farfield._networks import build_named, load_network
from farfield._operators import DEFAULT
from farfield.cli.output import Column, Row, Table, joined, millions
from farfield.cli.tables import select
from farfield.cli.values import Size
from farfield.insertion import InsertionPlace, places
from farfield.nn import GridAttention
from farfield.nn.normed_attention import usual_heads
from farfield.ops import OPERATORS


def list_places(
    *,
    network: str | None = None,
    model: str | None = None,
    size: Size = (224, 224),
    channels: int = 3,
    operator: str = DEFAULT,
) -> Table:
    """Show where attention can be inserted into a network, and what it costs there.

        farfield places --network kanet_qkv --size 224,224
        farfield places --network torchvision.models.resnet50 --operator kronecker_kv
        farfield places --model runs/imagenette --json

    The network runs a few times with an input of zeros, in eval mode.

    Args:
        network: A network that farfield models lists, or the full name of the function that builds one, such as
            torchvision.models.resnet50.
        model: A saved network, a run of farfield fit, a folder of runs, a checkpoint, or a repository of the Hub.
        size: Size of the input.
        channels: Channels of the input.
        operator: An operator that farfield operators lists.
    """
    if not (model or network):
        raise ValueError("give a network, --network kanet_qkv, or a trained one, --model")
    select("places", "operator", [operator], OPERATORS)
    net = load_network(model, network) if model else build_named(network or "", {})
    listed = places(net, torch.zeros(1, channels, *size))
    columns = [Column("path", "path", lambda path: path or "(the network)", left=True)]
    columns += [Column("kind", "module", left=True), Column("channels", "channels"), Column("size", "size", joined)]
    columns += [Column("positions", "positions", "{:,}".format), Column("layout", "layout", left=True)]
    columns += [Column("macs", "MACs", millions), Column("parameters", "parameters", "{:,}".format)]
    if operator != "softmax":
        columns.append(Column("softmax_macs", "MACs of softmax", millions))
    title = f"{len(listed)} places of {model or network} for an input of {channels} × "
    notes = [
        f'MACs of one sample, parameters: attention_for(channels, "{operator}").',
        "insert(network, path, make, example=…) adds it; where the channels are last, with layout=…, as listed.",
    ]
    rows = [_table_row(place, operator) for place in listed]
    return Table(f"{title}{joined(list(size))}", columns, rows, notes)


def _table_row(place: InsertionPlace, operator: str) -> Row:
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
        project = OPERATORS[operator].projections("qkvo")
        attention = GridAttention(channels, operator, heads=usual_heads(channels), project=project)
    return cost.predict(attention, size=size)
