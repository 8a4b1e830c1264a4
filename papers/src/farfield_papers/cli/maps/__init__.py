"""`farfield maps`: show what a trained network attends to in a photograph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from farfield import maps
from farfield._outputs import check_not_input
from farfield._refusals import door
from farfield.cli.output import Column, Table, joined
from farfield.cli.values import CommandLineError, Index, Pixel
from farfield.maps.health import PARTS
from farfield_papers.cli.loaded_network import build_untrained, load
from farfield_papers.cli.maps.figures import write
from farfield_papers.cli.maps.views import (
    View,
    list_layers,
    measure_health,
    read_photograph,
    select_layer,
    show_masks,
    show_rows,
)


def show_maps(  # noqa: PLR0913  (the options of a command)
    *,
    model: str | None = None,
    image: list[Path] | None = None,
    position: list[Pixel] | None = None,
    token: list[Index] | None = None,
    basis: bool = False,
    health: bool = False,
    layer: str | None = None,
    head: Index | None = None,
    slot: list[Index] | None = None,
    size: int | None = None,
    network: str | None = None,
    output: Path = Path("maps.png"),
) -> Table:
    """Show what a trained network attends to in a photograph.

        farfield maps --model runs/imagenette --image photo.jpg
        farfield maps --model runs/imagenette --image photo.jpg --position 120,80 --position 40,200
        farfield maps --model runs/imagenette --image photo.jpg --image other.jpg --basis
        farfield maps --model vit.ckpt --network my_networks.build --image photo.jpg --token 0
        farfield maps --network kanet_qkv --image photo.jpg --health

    The first command lists the attention layers. The last measures the response and the gradients of each layer. The
    others draw a figure. A pixel is given as row,column, from 0,0 at the top left. A transformer has such layers after
    replace_attention.

    Args:
        model: A saved network, a run of farfield fit, a folder of runs, a checkpoint, or a repository of the Hub.
        image: A photograph; several for --basis.
        position: A pixel of the photograph, the query; may be given several times.
        token: A token before the patches of a transformer, the query: 0 is its class token; may be given several times.
        basis: Draw the basis masks of the slots.
        health: Measure the response and the gradients of each layer.
        layer: The path of a layer (default: the first layer with the finest grid).
        head: One head, from 0 (default: the average of all; with --basis all).
        slot: With --basis, a slot of each head; may be given several times (default: the first masks).
        size: Shorter side of the resized photograph, in pixels (default: as in training).
        network: The function that builds the network: of a checkpoint of another library, or, without --model,
            untrained.
        output: The figure.
    """
    images = image or []
    queries: list[Pixel | Index] = [*(position or []), *(token or [])]
    if not (model or (health and network)):
        raise CommandLineError("give a network, --model; --health also takes an untrained one, --network")
    if not images:
        raise CommandLineError("give a photograph, --image photo.jpg")
    if bool(queries) + basis + health > 1:
        raise CommandLineError("--position and --token, --basis, --health show one thing each; give one of them")
    if len(images) > 1 and not basis:
        raise CommandLineError("only --basis takes several photographs; give one --image")
    with door("farfield maps"):
        check_not_input(output, images)
    photographs = [read_photograph(path) for path in images]
    trained = load(model, network) if model else build_untrained(str(network))
    if health:
        return _write_view(measure_health(trained, photographs[0], size), output)
    layers = [maps.layers(trained.network, trained.prepare(each.pixels, size)) for each in photographs]
    if not (queries or basis):
        view = list_layers(layers[0], photographs[0], size or trained.side, trained.source)
    else:
        name = select_layer(layers[0], layer)
        view = (
            show_rows(name, layers[0][name], photographs[0], queries, head)
            if queries
            else show_masks(name, [each[name] for each in layers], photographs, head, slot)
        )
    return _write_view(view, output)


def _pair(indices: Sequence[int]) -> str:
    return f"{indices[0]},{indices[1]}"


_TEXTS: dict[str, Callable[[Any], str]] = {"size": joined, "pixel": _pair, "position": _pair}
_TEXTS |= dict.fromkeys(("sum", "mean", "smallest", "largest"), "{:.4g}".format)
_TEXTS |= dict.fromkeys(("response", "constant", "host", *PARTS), "{:.2g}".format)
_TEXTS |= dict.fromkeys(("identity", "cut"), lambda value: "yes" if value else "")
# Long values: printed by --json and --csv only.
_LONG = ("row", "mask")


def _write_view(view: View, output: Path) -> Table:
    """Write the figure of a view, if it has one, and return its table."""
    notes = list(view.notes)
    if view.figure is not None:
        write(view.figure, output)
        notes.append(f"Figure: {output}")
    shown = [key for key in view.rows[0] if key not in _LONG and any(row[key] is not None for row in view.rows)]
    columns = [Column(key, key, _TEXTS.get(key, str), left=key in ("layer", "operator", "image")) for key in shown]
    return Table(view.title, columns, view.rows, notes)
