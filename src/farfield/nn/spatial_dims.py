"""The layers that torch has once per number of spatial dims: convolutions, batch norm and pooling."""

from __future__ import annotations

from typing import NamedTuple

from torch import nn

from farfield._refusals import refusal


class Layers(NamedTuple):
    """The layers for one number of spatial dims."""

    convolution: type[nn.Conv1d | nn.Conv2d | nn.Conv3d]
    batch_norm: type[nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d]
    max_pool: type[nn.MaxPool1d | nn.MaxPool2d | nn.MaxPool3d]
    transposed: type[nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d]


LAYERS = {
    1: Layers(nn.Conv1d, nn.BatchNorm1d, nn.MaxPool1d, nn.ConvTranspose1d),
    2: Layers(nn.Conv2d, nn.BatchNorm2d, nn.MaxPool2d, nn.ConvTranspose2d),
    3: Layers(nn.Conv3d, nn.BatchNorm3d, nn.MaxPool3d, nn.ConvTranspose3d),
}


def layers(spatial_dims: int) -> Layers:
    """Return the layers for 1 (sequences), 2 (images) or 3 spatial dims (volumes, video); torch has no others."""
    if spatial_dims not in LAYERS:
        raise refusal(
            ValueError,
            f"convolutions have 1, 2 or 3 spatial dims, got spatial_dims={spatial_dims!r}; "
            f"fix: one of these, with further axes folded into the batch.",
        )
    return LAYERS[spatial_dims]
