"""Image folders made up for the tests: squares of one colour a class, with noise."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

COLOURS = {"blue": (40, 60, 200), "green": (50, 180, 60), "red": (210, 50, 40)}


def make_folder(folder: Path, number: int, *, side: int = 40, suffix: str = ".jpg") -> Path:
    """Write `number` images of each class of `COLOURS` to folder/class/0.jpg … and return the folder."""
    random = np.random.default_rng(number)
    for name, colour in COLOURS.items():
        (folder / name).mkdir(parents=True)
        for place in range(number):
            pixels = np.clip(random.normal(colour, 30, (side, side + 8, 3)), 0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{place}{suffix}")
    return folder


def make_root(root: Path, train: int = 8, val: int = 4) -> Path:
    """Write root/train and root/val and return root."""
    make_folder(root / "train", train)
    make_folder(root / "val", val)
    return root
