"""The initial weights of projections."""

from __future__ import annotations

from torch import nn


def draw(layer: nn.Linear | nn.Conv2d) -> None:
    """Draw a projection's weight as Glorot uniform, so that it keeps the scale of its input; set the bias to 0."""
    nn.init.xavier_uniform_(layer.weight)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
