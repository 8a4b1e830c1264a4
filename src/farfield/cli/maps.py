"""`farfield maps`: what the attention of a trained network takes from where, over a photograph.

    farfield maps --model runs/imagenette --image photo.jpg
    farfield maps --model runs/imagenette --image photo.jpg --position 120,80 --position 40,200
    farfield maps --model runs/imagenette --image photo.jpg --image other.jpg --basis
    farfield maps --model runs/imagenette --norms
    farfield maps --network kanet_qkv --image photo.jpg --health

The first lists the layers, the last says how loud each of them is and what it learns from, the others draw a figure.
Pixels are named as positions are everywhere in farfield, by one index an axis: row,column from 0,0 at the top left.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from farfield._outputs import check_not_input
from farfield.cli.maps_figures import PANELS, write
from farfield.cli.maps_network import build_untrained, load
from farfield.cli.maps_views import View, attention, chosen, listing, masks, measured, read_photograph, rows, scales
from farfield.cli.output import Column, Table, joined, write_table
from farfield.maps.health import PARTS


def main(argv: Sequence[str]) -> None:
    """Run the command.

    Args:
        argv: Its options.

    Raises:
        SystemExit: With status 2 for a wrong option.
        ValueError: For a position outside the image, a network without attention, or maps that its operator does not have.
        LookupError: For an unknown layer.
        OSError: For a model or an image that is not there, and an output that is one of the photographs.
    """
    options = parser()
    arguments = options.parse_args(argv)
    if not (arguments.model or (arguments.health and arguments.network)):
        options.error("give a network, --model; for --health also one that is not trained, --network")
    if not (arguments.norms or arguments.image):
        options.error("give a photograph, --image photo.jpg, or --norms for the norms' scales over training")
    if arguments.norms + bool(arguments.position) + arguments.basis + arguments.health > 1:
        options.error("--position, --basis, --norms and --health show one thing each; give one of them")
    if len(arguments.image) > 1 and not arguments.basis:
        options.error("several photographs are for --basis; give one --image")
    check_not_input("farfield maps", arguments.output, map(Path, arguments.image))
    tell(scales(arguments.model) if arguments.norms else look(arguments), arguments)


def look(arguments: argparse.Namespace) -> View:
    """Run the network on the photographs and look into one of its layers."""
    photographs = [read_photograph(Path(path)) for path in arguments.image]
    trained = load(arguments.model, arguments.network) if arguments.model else build_untrained(arguments.network)
    if arguments.health:
        return measured(trained, photographs[0], arguments.size)
    found = [attention(trained, photograph, arguments.size) for photograph in photographs]
    if not (arguments.position or arguments.basis):
        return listing(found[0], photographs[0], arguments.size or trained.side, trained.source)
    name = chosen(found[0], arguments.layer)
    if arguments.position:
        return rows(name, found[0][name], photographs[0], arguments.position, arguments.head)
    return masks(name, [layers[name] for layers in found], photographs, arguments.head, arguments.slot)


def parser() -> argparse.ArgumentParser:
    """The command's options."""
    parser = argparse.ArgumentParser(prog="farfield maps", description=__doc__, allow_abbrev=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
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
        help="a pixel that asks; repeatable",
    )
    parser.add_argument("--basis", action="store_true", help="what the slots are made of, in place of rows")
    parser.add_argument("--norms", action="store_true", help="the norms' learned scales in each checkpoint of a run")
    parser.add_argument("--health", action="store_true", help="how loud each layer is, and what it learns from")
    parser.add_argument("--layer", metavar="PATH", help="default: the first with the finest grid")
    parser.add_argument("--head", type=count, help="one head, from 0 (default: their average; with --basis all)")
    parser.add_argument(
        "--slot", action="append", type=count, help=f"with --basis, of a head (default: the first {PANELS} of all)"
    )
    parser.add_argument(
        "--size", type=positive, help="shorter side for the network, in pixels (default: its training's)"
    )
    parser.add_argument(
        "--network",
        metavar="MODULE.FUNCTION",
        help="what builds the network of a checkpoint that is not farfield's, or without --model an untrained one",
    )
    parser.add_argument("--output", type=Path, default=Path("maps.png"), metavar="FILE", help="default: %(default)s")
    parser.add_argument("--json", action="store_true", help="print all numbers, for scripts")
    return parser


def pixel(text: str) -> tuple[int, int]:
    """A pixel, such as 120,80."""
    parts = [part.strip() for part in text.split(",")]
    if len(parts) != 2 or not all(part.isdecimal() for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} is not a pixel: its row and column from 0, such as 120,80")
    return int(parts[0]), int(parts[1])


def count(text: str) -> int:
    """A whole number from 0."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0")
    return int(text)


def positive(text: str) -> int:
    """A whole number from 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1")
    return int(text)


def pair(place: Sequence[int]) -> str:
    """A pixel or a position as the command line names it."""
    return f"{place[0]},{place[1]}"


TEXTS: dict[str, Callable[[Any], str]] = {"size": joined, "pixel": pair, "position": pair}
TEXTS |= dict.fromkeys(("sum", "mean", "smallest", "largest"), "{:.4g}".format)
TEXTS |= dict.fromkeys(("response", "constant", "host", *PARTS), "{:.2g}".format)
TEXTS |= dict.fromkeys(("identity", "cut"), lambda value: "yes" if value else "")
# What a table leaves to --json.
LONG = ("row", "mask", "scales")


def tell(view: View, arguments: argparse.Namespace) -> None:
    """Write the figure, if there is one, and the numbers."""
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
