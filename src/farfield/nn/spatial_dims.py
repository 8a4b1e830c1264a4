"""The layers that come once per rank in torch: convolutions, batch norm and pooling, found by rank."""

from __future__ import annotations

from typing import NamedTuple

from torch import nn


class Layers(NamedTuple):
    """The layers of one rank."""

    convolution: type[nn.Conv1d | nn.Conv2d | nn.Conv3d]
    batch_norm: type[nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d]
    max_pool: type[nn.MaxPool1d | nn.MaxPool2d | nn.MaxPool3d]
    transposed: type[nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d]


LAYERS = {
    1: Layers(nn.Conv1d, nn.BatchNorm1d, nn.MaxPool1d, nn.ConvTranspose1d),
    2: Layers(nn.Conv2d, nn.BatchNorm2d, nn.MaxPool2d, nn.ConvTranspose2d),
    3: Layers(nn.Conv3d, nn.BatchNorm3d, nn.MaxPool3d, nn.ConvTranspose3d),
}


def layers(caller: str, spatial_dims: int) -> Layers:
    """Return the layers of a rank.

    Attention reads the rank from its grid; torch's convolutions have it in their class, so what holds one is told.

    Args:
        caller: What an error names.
        spatial_dims: Number of spatial dims: 1 for sequences, 2 for images, 3 for volumes and video.

    Raises:
        ValueError: For a rank that torch has no convolution for.

    Example:
        >>> layers("BaseBlock", 3).convolution.__name__
        'Conv3d'
    """
    if spatial_dims not in LAYERS:
        raise ValueError(
            f"{caller}: convolutions have 1, 2 or 3 spatial dims, got spatial_dims={spatial_dims!r}; fix: fold further sides into the batch."
        )
    return LAYERS[spatial_dims]
