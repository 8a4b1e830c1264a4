"""What tests of training share: image folders, squares of one colour a class with noise; and a disk that is full."""

from __future__ import annotations

import contextlib
import resource
import signal
from collections.abc import Iterator
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


@contextlib.contextmanager
def full_disk() -> Iterator[None]:
    """Let no file grow beyond 100,000 bytes: writing more fails as it does on a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
