"""What the tests of the papers' tables share: each network counted once, and how the papers cut digits off."""

from __future__ import annotations

import functools

import torch

from farfield import cost
from farfield_papers import models


@functools.cache
def network(name: str, convention: str = "paper") -> cost.Cost:
    """The cost of a named network at 224 x 224, one image."""
    with torch.device("meta"):
        net = models.MODELS[name]().eval()
    return cost.predict(net, channels=3, size=(224, 224), convention=convention)


def millions(number: float, digits: int = 0) -> str:
    """Digits cut off: 365.37 million are 365m, 3,449,408 are 3.44m."""
    return f"{int(number / 1e6 * 10**digits) / 10**digits:.{digits}f}m"
