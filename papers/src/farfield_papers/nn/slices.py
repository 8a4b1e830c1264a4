"""Layers computed for a few samples at a time in inference.

A wide grid then stays in a cache, and in memory that the C library reuses, where that of a whole batch takes new pages
from the system each time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from farfield.nn.bare import is_bare
from farfield.ops.grid import in_channels_last
from farfield.ops.modes import is_recorded, is_watched
from farfield_papers.nn.conv_norm_act import Convolved

# Most bytes of the wide grid of the samples that a block computes at once in inference: half of a last cache of 32 MB,
# and less than the size from which the C library takes new pages from the system for each tensor.
SLICE_BYTES = 2**24


def in_slices(
    layers: Sequence[nn.Module],
    compute: Callable[[Tensor], Tensor],
    grid: Tensor,
    wide_channels: int,  # of the widest grid of the layers, if it had as many positions as `grid`
    # Classes whose modules compute each sample by itself in eval mode, if their children do.
    kinds: Sequence[type[nn.Module]],
) -> Tensor:
    """Compute layers for a few samples at a time in inference, where nothing is recorded and no layer was changed."""
    if type(grid) is not Tensor or not grid.is_cpu or is_recorded():
        return compute(grid)
    few = max(1, SLICE_BYTES // max(1, wide_channels * math.prod(grid.shape[2:]) * grid.element_size()))
    if few >= len(grid) or is_watched(grid, *(each for layer in layers for each in layer.parameters())):
        return compute(grid)
    if not all(_is_sample_wise(layer, kinds) for layer in layers):
        return compute(grid)
    slices = math.ceil(len(grid) / few)
    parts = [compute(part) for part in grid.split(math.ceil(len(grid) / slices))]
    if in_channels_last(grid):  # of one sample, torch.cat cannot tell the memory format
        return torch.cat([part.movedim(1, -1) for part in parts]).movedim(-1, 1)
    return torch.cat(parts)


def _is_sample_wise(module: nn.Module, kinds: Sequence[type[nn.Module]]) -> bool:
    """Whether a module is bare and in eval mode and computes each sample by itself, as all inside it do."""
    if isinstance(module, Convolved):
        alone = is_bare(module, Convolved) and module.has_bare_layers and module.is_pointwise_at_last
        return alone and not any(part.training for part in module.modules())
    alone = is_bare(module, *kinds) and not module.training
    return alone and all(_is_sample_wise(child, kinds) for child in module.children())
