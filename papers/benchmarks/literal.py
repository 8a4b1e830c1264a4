"""The compact networks as printed, where the library's default is another: the norm of the responses starts at 1."""

from __future__ import annotations

from collections.abc import Sequence

from farfield_papers.models import CompactNet


def sanet(num_classes: int = 1000, width: float = 1.0, strides: Sequence[int] = (2, 2, 2, 2, 2)) -> CompactNet:
    """SANet whose normed responses are as large as a block's input from the start."""
    return CompactNet("sanet", num_classes=num_classes, width=width, strides=strides, response_start="one")
