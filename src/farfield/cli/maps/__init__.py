"""`farfield maps`: show what a trained network attends to in a photograph.

    farfield maps --model runs/imagenette --image photo.jpg
    farfield maps --model runs/imagenette --image photo.jpg --position 120,80 --position 40,200
    farfield maps --model runs/imagenette --image photo.jpg --image other.jpg --basis
    farfield maps --model vit.ckpt --network my_networks.build --image photo.jpg --token 0
    farfield maps --model runs/imagenette --norms
    farfield maps --network kanet_qkv --image photo.jpg --health

The first command lists the attention layers. The last measures the response and the gradients of each layer. The others
draw a figure. A pixel is given as row,column, from 0,0 at the top left. A transformer has such layers after
replace_attention.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from farfield._outputs import check_not_input
from farfield.cli.command_parser import CommandParser
from farfield.cli.loaded_network import build_untrained, load
from farfield.cli.maps.figures import PANELS, write
from farfield.cli.maps.views import (
    View,
    attention,
    list_layers,
    measure_health,
    read_photograph,
    select_layer,
    show_masks,
    show_rows,
    show_scales,
)
from farfield.cli.output import Column, Table, joined, write_table
from farfield.maps.health import PARTS


def main(argv: Sequence[str]) -> None:
    """Run the command.

    Args:
        argv: Its options.

    Raises:
        SystemExit: With status 2 for a wrong option.
        ValueError: For a position outside the image, a network without attention, a figure that its operator does not
            support, or a model or image that cannot be read.
        LookupError: For an unknown layer or network.
        OSError: For a missing model or image, and an output that would replace one of the photographs.
    """
    options = parser()
    arguments = options.parse_args(argv)
    if not (arguments.model or (arguments.health and arguments.network)):
        options.error("give a network, --model; --health also takes an untrained one, --network")
    if not (arguments.norms or arguments.image):
        options.error("give a photograph, --image photo.jpg, or --norms for the scales of the norms over training")
    queries = [*arguments.position, *arguments.token]
    if arguments.norms + bool(queries) + arguments.basis + arguments.health > 1:
        options.error("--position and --token, --basis, --norms, --health show one thing each; give one of them")
    if len(arguments.image) > 1 and not arguments.basis:
        options.error("only --basis takes several photographs; give one --image")
    check_not_input("farfield maps", arguments.output, map(Path, arguments.image))
    print_view(show_scales(arguments.model) if arguments.norms else look(arguments), arguments)


def look(arguments: argparse.Namespace) -> View:
    """Run the network on the photographs and return the view of one of its layers."""
    photographs = [read_photograph(Path(path)) for path in arguments.image]
    trained = load(arguments.model, arguments.network) if arguments.model else build_untrained(arguments.network)
    if arguments.health:
        return measure_health(trained, photographs[0], arguments.size)
    layers = [attention(trained, photograph, arguments.size) for photograph in photographs]
    queries = [*arguments.position, *arguments.token]
    if not (queries or arguments.basis):
        return list_layers(layers[0], photographs[0], arguments.size or trained.side, trained.source)
    name = select_layer(layers[0], arguments.layer)
    if queries:
        return show_rows(name, layers[0][name], photographs[0], queries, arguments.head)
    return show_masks(name, [each[name] for each in layers], photographs, arguments.head, arguments.slot)


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command's options."""
    parser = CommandParser("farfield maps", __doc__, raw=True)
    parser.add_argument(
        "--model",
        metavar="PATH",
        help="a saved network, a run of farfield fit, a folder of runs, a checkpoint, or a repository of the Hub",
    )
    parser.add_argument(
        "--image", action="append", default=[], metavar="FILE", help="a photograph; several for --basis"
    )
    parser.add_argument(
        "--position",
        action="append",
        default=[],
        type=pixel,
        metavar="ROW,COLUMN",
        help="a pixel of the photograph, the query; repeatable",
    )
    parser.add_argument(
        "--token",
        action="append",
        default=[],
        type=count,
        metavar="INDEX",
        help="a token before the patches of a transformer, the query: 0 is its class token; repeatable",
    )
    parser.add_argument("--basis", action="store_true", help="draw the basis masks of the slots")
    parser.add_argument(
        "--norms", action="store_true", help="draw the learned scales of the norms in each checkpoint of a run"
    )
    parser.add_argument("--health", action="store_true", help="measure the response and the gradients of each layer")
    parser.add_argument("--layer", metavar="PATH", help="default: the first layer with the finest grid")
    parser.add_argument("--head", type=count, help="one head, from 0 (default: the average of all; with --basis all)")
    parser.add_argument(
        "--slot",
        action="append",
        type=count,
        help=f"with --basis, a slot of each head (default: the first {PANELS} masks)",
    )
    parser.add_argument(
        "--size", type=positive, help="shorter side of the resized photograph, in pixels (default: as in training)"
    )
    parser.add_argument(
        "--network",
        metavar="MODULE.FUNCTION",
        help="function that builds the network: of a checkpoint of another library, or, without --model, untrained",
    )
    parser.add_argument("--output", type=Path, default=Path("maps.png"), metavar="FILE", help="default: %(default)s")
    parser.add_argument("--json", action="store_true", help="print all numbers, for scripts")
    return parser


def pixel(text: str) -> tuple[int, int]:
    """Convert an option to a pixel, such as 120,80."""
    parts = [part.strip() for part in text.split(",")]
    if len(parts) != 2 or not all(part.isdecimal() for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} is not a pixel: its row and column from 0, such as 120,80")
    return int(parts[0]), int(parts[1])


def count(text: str) -> int:
    """Convert an option to a whole number from 0."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0")
    return int(text)


def positive(text: str) -> int:
    """Convert an option to a whole number from 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1")
    return int(text)


def pair(indices: Sequence[int]) -> str:
    """Format a pixel or a position as on the command line."""
    return f"{indices[0]},{indices[1]}"


TEXTS: dict[str, Callable[[Any], str]] = {"size": joined, "pixel": pair, "position": pair}
TEXTS |= dict.fromkeys(("sum", "mean", "smallest", "largest"), "{:.4g}".format)
TEXTS |= dict.fromkeys(("response", "constant", "host", *PARTS), "{:.2g}".format)
TEXTS |= dict.fromkeys(("identity", "cut"), lambda value: "yes" if value else "")
# Long values: printed by --json only.
LONG = ("row", "mask", "scales")


def print_view(view: View, arguments: argparse.Namespace) -> None:
    """Write the figure, if there is one, and print the numbers."""
    notes = list(view.notes)
    if view.figure is not None:
        write(view.figure, arguments.output)
        notes.append(f"Figure: {arguments.output}")
    if arguments.json:
        print(json.dumps(view.rows, indent=2, ensure_ascii=False))
        return
    shown = [key for key in view.rows[0] if key not in LONG and any(row[key] is not None for row in view.rows)]
    columns = [Column(key, key, TEXTS.get(key, str), left=key in ("layer", "operator", "image")) for key in shown]
    write_table(Table(view.title, columns, view.rows, notes))
