"""`farfield explore`: a page in which each operator shows what the position under the pointer attends to.

    farfield explore --image photo.jpg
    farfield explore --image photo.jpg --operator kronecker_kv --operator siamese --size 40
    farfield explore --image photo.jpg --model runs/imagenette --layer features.8.attention

The page is one HTML file that needs no server and no network. Without `--model` all operators get the same features of
the photograph, nothing is trained; with it, each head of a layer of a trained network is a panel.
"""

from __future__ import annotations

import argparse
import webbrowser
from collections.abc import Sequence
from pathlib import Path

from farfield._outputs import check_not_input
from farfield.cli.command_parser import CommandParser
from farfield.cli.explore.page import write
from farfield.cli.explore.panels import panels_of_features, panels_of_layer
from farfield.ops import OPERATORS


def main(argv: Sequence[str]) -> None:
    """Run the command.

    Args:
        argv: Its options.

    Raises:
        SystemExit: With status 2 for a wrong option.
        ValueError: For an image or a network that cannot be read, or a layer whose rows are not products of queries
            and keys of positions.
        LookupError: For an unknown layer or network.
        OSError: For a missing image, or an output that would replace it.
    """
    arguments = parser().parse_args(argv)
    image = None if arguments.image is None else Path(arguments.image)
    check_not_input("farfield explore", arguments.output, [image] if image else [])
    if arguments.model is None:
        view = panels_of_features(image, arguments.operator or list(OPERATORS), arguments.size)
    else:
        view = panels_of_layer(image, arguments.model, arguments.layer, arguments.size)
    write(view, arguments.output)
    print(f"farfield explore: {arguments.output}, {arguments.output.stat().st_size / 1e6:.2f} MB")
    if arguments.open:
        webbrowser.open(arguments.output.resolve().as_uri())


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command's options."""
    parser = CommandParser("farfield explore", __doc__, raw=True)
    parser.add_argument("--image", metavar="FILE", help="a photograph (default: a flower that scikit-learn ships)")
    parser.add_argument(
        "--operator", action="append", choices=list(OPERATORS), metavar="NAME", help="repeatable (default: all)"
    )
    parser.add_argument("--size", type=length, default=56, help="longer side of the grid (default: %(default)s)")
    parser.add_argument("--model", metavar="PATH", help="a trained network, as for farfield maps")
    parser.add_argument("--layer", metavar="PATH", help="with --model; default: the first layer with the finest grid")
    parser.add_argument(
        "--output", type=Path, default=Path("explore.html"), metavar="FILE", help="default: %(default)s"
    )
    parser.add_argument("--no-open", dest="open", action="store_false", help="write the page and do not show it")
    return parser


def length(text: str) -> int:
    """Convert an option to a length from 2 to 64: pages of longer grids take more than 2 MB and react slowly."""
    if not text.isdecimal() or not 2 <= int(text) <= 64:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 2 to 64")
    return int(text)
