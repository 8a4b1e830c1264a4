"""Draw the pictures of the site that need no trained network: `python docs/pictures.py`.

* `static/logo.svg` and `static/card.svg`: the idea of the library: all positions of a grid are summarized into a few
  slots, and one position responds from them.
* `images/petal.webp`: what one position of a photograph attends to by each operator, the picture of `farfield demo`.

Those of trained networks and of measurements, in `images`, come from what they show:

* `windows.webp`: `docs/windows.py`
* `results-cifar10.png`: `papers/benchmarks/train_compact.py … --collect`
* `results-front.png`: `benchmarks/results.py --picture FILE`
* `results-recall.png`: `benchmarks/recall.py --collect benchmarks/records/recall.jsonl --picture FILE`
* `fa-figure-5.png`: `papers/benchmarks/fa_figures.py 5`
* `look-*.png`: `farfield maps`, by the commands in `guide/insert.md`
* `seams.webp`: the first code of `guide/seams.md`
* `segment-camvid.png`: images, labels and what `farfield predict` wrote; no script of the repository puts them together
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from PIL import Image

from farfield_papers.cli.demo import picture

IMAGES = Path(__file__).parent / "images"
STATIC = Path(__file__).parent / "static"
INK, SLOT, QUERY = "#2b5c8a", "#e0782f", "#c2185b"
SIDE, GAP = 7, 10
# Rows of the slots, between the grid's rows.
SLOTS = (15, 30, 45)


def positions(left: int, top: int, count: int) -> list[str]:
    """Draw a grid of positions, the later ones stronger."""
    return [
        f'<rect x="{left + GAP * column}" y="{top + GAP * row}" width="{SIDE}" height="{SIDE}" rx="1.5" fill="{INK}" '
        f'opacity="{0.35 + 0.5 * ((3 * row + 5 * column) % 7) / 6:.2f}"/>'
        for row in range(count)
        for column in range(count)
    ]


def mark(left: int, top: int) -> str:
    """Draw the logo: a grid of 6 × 6 positions, three slots, one response; 128 wide, 60 high."""
    parts = positions(left, top, 6)
    for y in SLOTS:
        for row in (8, 28, 48):
            parts.append(
                f'<path d="M{left + 59} {top + row} C{left + 70} {top + row} {left + 72} {top + y - 0.5} '
                f'{left + 80} {top + y - 0.5}" fill="none" stroke="{SLOT}" stroke-width="0.8" opacity="0.6"/>'
            )
        parts.append(f'<circle cx="{left + 84}" cy="{top + y}" r="4.5" fill="{SLOT}"/>')
        parts.append(
            f'<path d="M{left + 89} {top + y} C{left + 98} {top + y} {left + 102} {top + 30} {left + 111} {top + 30}" '
            f'fill="none" stroke="{QUERY}" stroke-width="1.4"/>'
        )
    parts.append(f'<rect x="{left + 111}" y="{top + 23}" width="14" height="14" rx="3" fill="{QUERY}"/>')
    return "".join(parts)


def logo() -> str:
    """Return the logo on a square without a background."""
    return f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 130 130" role="img">{mark(2, 36)}</svg>\n'


def card() -> str:
    """Return the card that a page shows where it is shared: 1200 × 630, with a light background."""
    text = 'font-family="Helvetica, Arial, sans-serif"'
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 1200 630" role="img">'
        '<rect width="1200" height="630" fill="#fbfaf7"/>'
        f'<g transform="translate(80 120) scale(3.2)">{mark(0, 0)}</g>'
        f'<text x="80" y="430" {text} font-size="92" font-weight="700" fill="#1d2733">farfield</text>'
        f'<text x="80" y="500" {text} font-size="36" fill="#3c4a5a">'
        "Global attention for sequences, images, volumes and video:</text>"
        f'<text x="80" y="548" {text} font-size="36" fill="#3c4a5a">summarized once, linear in the positions.</text>'
        "</svg>\n"
    )


def petal(width: int = 1500) -> None:
    """Draw the picture of the demo, small enough for the first page."""
    with tempfile.TemporaryDirectory() as folder:
        picture.write(Path(folder) / "petal.png")
        image = Image.open(Path(folder) / "petal.png").convert("RGB")
        image = image.resize((width, round(width * image.height / image.width)), Image.Resampling.LANCZOS)
        image.save(IMAGES / "petal.webp", quality=82, method=6)


def main() -> None:
    """Write all files."""
    petal()
    (STATIC / "logo.svg").write_text(logo(), encoding="utf-8")
    (STATIC / "card.svg").write_text(card(), encoding="utf-8")


if __name__ == "__main__":
    main()
