"""The compact networks with responses of zero: the baseline of their attention.

Blocks, skips and all other layers are those of the network; the attention, its weights and its norm are removed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from farfield_papers.models import CompactNet
from farfield_papers.nn import AttentionBlock


class Zero(nn.Module):
    """Respond with zeros."""

    def forward(self, grid: Tensor) -> Tensor:
        """Return zeros like the grid."""
        return torch.zeros_like(grid)


def kanet_qkv(num_classes: int = 1000, width: float = 1.0, strides: Sequence[int] = (2, 2, 2, 2, 2)) -> CompactNet:
    """KANet with responses of zero."""
    return zeroed(CompactNet("kanet_qkv", num_classes=num_classes, width=width, strides=strides))


def sanet(num_classes: int = 1000, width: float = 1.0, strides: Sequence[int] = (2, 2, 2, 2, 2)) -> CompactNet:
    """SANet with responses of zero."""
    return zeroed(CompactNet("sanet", num_classes=num_classes, width=width, strides=strides))


def zeroed(net: CompactNet) -> CompactNet:
    """Replace all attention of a network by zeros."""
    for module in net.modules():
        if isinstance(module, AttentionBlock):
            module.attention = Zero()
    return net
