"""Numbers of a volume that become 0 and 1 where it is read, of each channel: what networks were trained to take."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from farfield._refusals import refusal

# What becomes 0 and what becomes 1, of all channels or of each.
Scale = tuple[np.ndarray, np.ndarray]


def parse_scale(scale: Any, channels: Sequence[int]) -> list[Scale | None]:
    """Return the scale of each volume, of which the channels are given; None for one that is read as it is."""
    several = scale if len(channels) > 1 and scale is not None else (scale,) * len(channels)
    if not isinstance(several, tuple | list) or len(several) != len(channels):
        text = f"scale must be a pair (low, high) or None for each of {len(channels)} inputs, got {scale!r:.60}"
        raise refusal(TypeError, f"{text}; fix: a tuple of {len(channels)}.")
    return [None if pair is None else _parse_pair(pair, count) for pair, count in zip(several, channels, strict=True)]


def _parse_pair(pair: Any, count: int) -> Scale:
    try:
        low, high = (np.ravel(np.asarray(each, float)) for each in pair)
    except (TypeError, ValueError):
        text = f"scale must be the two numbers that become 0 and 1, or two arrays of one a channel, got {pair!r:.60}"
        raise refusal(TypeError, f"{text}; fix: scale=percentiles(volume, [1, 99.8]) of farfield.volumes.") from None
    if not {len(low), len(high)} <= {1, count}:
        text = f"scale has {len(low)} and {len(high)} numbers, and the volume has {count} channels"
        raise refusal(ValueError, f'{text}; fix: one, or one for each, percentiles(volume, [1, 99.8], axes="YX").')
    if not np.isfinite(high - low).all() or (low == high).any():
        text = f"scale must be finite numbers that differ, got low = {low.tolist()} and high = {high.tolist()}"
        raise refusal(ValueError, f"{text}; fix: a channel of one number has none, scale=(low, low + 1) for it.")
    return low, high


def apply_scale(grid: Tensor, scale: Scale) -> Tensor:
    """Return a grid `(batch, channels, *size)` whose low numbers are 0 and whose high numbers are 1."""
    grid = grid.to(torch.promote_types(grid.dtype, torch.float32))
    low, high = (torch.from_numpy(each).to(grid).reshape(-1, *(1,) * (grid.dim() - 2)) for each in scale)
    return (grid - low) / (high - low)
