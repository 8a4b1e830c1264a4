"""A volume for jobs, and what stops one."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from farfield.volumes import ImageMetadata, Volume

SHAPE = (9, 34, 30)
SPACED = ImageMetadata("ZYX", {"Z": 2.0, "Y": 0.5, "X": 0.5}, dict.fromkeys("ZYX", "micrometer"), {"Y": 3.0})


def make_stack() -> Volume:
    return Volume(np.random.default_rng(0).poisson(40, SHAPE).astype(np.uint16), SPACED)


class StopError(Exception):
    """What `show` raises to end a prediction."""


def stop_after(tiles: int, shown: list[float]) -> Callable[[float, str], None]:
    """What `show` is, to stop after so many tiles."""

    def show(share: float, text: str) -> None:
        shown.append(share)
        if len(shown) == tiles:
            raise StopError

    return show
