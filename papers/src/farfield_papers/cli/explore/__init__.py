"""`farfield explore`: a page in which each operator shows what the position next to the pointer attends to."""

from __future__ import annotations

import webbrowser
from pathlib import Path

from farfield._outputs import check_not_input
from farfield._refusals import door
from farfield.cli.tables import select
from farfield.cli.values import Side
from farfield.ops import OPERATORS
from farfield_papers.cli.explore.page import write
from farfield_papers.cli.explore.panels import panels_of_features, panels_of_layer


def explore(
    *,
    image: Path | None = None,
    operator: list[str] | None = None,
    size: Side = 56,
    model: str | None = None,
    layer: str | None = None,
    output: Path = Path("explore.html"),
    no_open: bool = False,
) -> None:
    """Write a page in which each operator shows what the position next to the pointer attends to.

        farfield explore --image photo.jpg
        farfield explore --image photo.jpg --operator kronecker_kv --operator siamese --size 40
        farfield explore --image photo.jpg --model runs/imagenette --layer features.8.attention

    The page is one HTML file that needs no server and no network. Without --model all operators get the same features
    of the photograph, nothing is trained; with it, each head of a layer of a trained network is a panel.

    Args:
        image: A photograph (default: a flower that scikit-learn ships).
        operator: An operator that farfield operators lists; may be given several times (default: all).
        size: Longer side of the grid, at most 64.
        model: A trained network, as for farfield maps.
        layer: With --model, the path of a layer (default: the first layer with the finest grid).
        output: The page.
        no_open: Write the page and do not show it.
    """
    operators = select("explore", "operator", operator, OPERATORS)
    with door("farfield explore"):
        check_not_input(output, [image] if image else [])
    view = panels_of_layer(image, model, layer, size) if model else panels_of_features(image, operators, size)
    write(view, output)
    print(f"farfield explore: {output}, {output.stat().st_size / 1e6:.2f} MB")
    if not no_open:
        webbrowser.open(output.resolve().as_uri())
