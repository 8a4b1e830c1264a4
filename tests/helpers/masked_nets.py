"""Networks whose norms, means, maxima and attention leave positions out, in plain torch, untiled."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from farfield.nn import GridAttention

POOLS = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}


def coarse(mask: Tensor, grid: Tensor) -> Tensor:
    """The mask `(batch, 1, *size)` of a coarser grid: valid where any position of a block is."""
    strides = [round(length / own) for length, own in zip(mask.shape[2:], grid.shape[2:], strict=True)]
    pooled = POOLS[grid.dim() - 2](mask.double(), strides, strides, ceil_mode=True) > 0
    assert pooled.shape[2:] == grid.shape[2:]
    return pooled


class Masked(nn.Module):
    """A layer that sees the valid positions alone."""

    def __init__(self, layer: Any, mask: Tensor) -> None:
        super().__init__()
        self.layer, self.mask = layer, mask

    def forward(self, grid: Tensor) -> Tensor:
        mask, layer = coarse(self.mask, grid), self.layer
        if isinstance(layer, GridAttention):
            return layer(grid, mask=mask[:, 0].expand(len(grid), *grid.shape[2:]))
        if isinstance(layer, nn.AdaptiveMaxPool2d):
            return grid.masked_fill(~mask, -math.inf).amax((2, 3), True)
        groups = {nn.GroupNorm: lambda: layer.num_groups}.get(type(layer), lambda: grid.shape[1])()
        split = grid.unflatten(1, (groups, -1)).flatten(3)
        weights = mask.flatten(2)[:, :, None].expand_as(split).to(grid)
        count = weights.sum((2, 3), keepdim=True).clamp(min=1)
        mean = (split * weights).sum((2, 3), keepdim=True) / count
        if isinstance(layer, nn.AdaptiveAvgPool2d | nn.AdaptiveAvgPool3d):
            return mean.view(*grid.shape[:2], *[1] * (grid.dim() - 2))
        variance = ((split - mean) ** 2 * weights).sum((2, 3), keepdim=True) / count
        result = ((split - mean) / (variance + layer.eps).sqrt()).view_as(grid)
        if layer.weight is None:
            return result
        weight, bias = (each.view(1, -1, *[1] * (grid.dim() - 2)) for each in (layer.weight, layer.bias))
        return result * weight + bias


LAYERS = (GridAttention, nn.GroupNorm, nn.InstanceNorm2d, nn.InstanceNorm3d, nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d)
LAYERS = (*LAYERS, nn.AdaptiveAvgPool3d)


def run_masked(net: nn.Module, grid: Tensor, mask: Tensor, fill: float = 0.0) -> Tensor:
    """The network with masked layers on a grid `(batch, channels, *size)`, by a mask `(batch or 1, 1, *size)`."""
    net = copy.deepcopy(net)
    for path, module in list(net.named_modules()):
        if isinstance(module, LAYERS):
            parent, _, name = path.rpartition(".")
            setattr(net.get_submodule(parent), name, Masked(module, mask))
    with torch.no_grad():
        result = net(grid.where(mask, torch.as_tensor(fill, dtype=grid.dtype)))
    return result.where(coarse(mask, result), 0)
