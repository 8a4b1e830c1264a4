"""From a stack as a microscope wrote it to a restored one: normalise, network, back to the stack's own grey levels."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import nn

# Percentiles of a stack that become 0 and 1 (CARE's for prediction).
PERCENTILES = (2.0, 99.8)
# Of more cells than this, percentiles of floating-point stacks are those of evenly spaced planes.
COUNTED = 2**25


class ScaledNetwork(nn.Module):
    """A network that reads and writes a stack's own grey levels: `network((x - low) / (high - low))`, and back.

    Args:
        network: From normalised to restored grids; of a probabilistic one the means are kept.
        low: Grey level that becomes 0.
        high: Grey level that becomes 1.
    """

    def __init__(self, network: nn.Module, low: float, high: float) -> None:
        super().__init__()
        self.network, self.low, self.range = network, low, high - low

    def forward(self, grid: Float[Tensor, "b c *n"]) -> Float[Tensor, "b c *m"]:
        """Return the restored grid."""
        restored = self.network((grid - self.low) / self.range)[:, : grid.shape[1]]
        return restored * self.range + self.low


def restore(network: nn.Module, stack: Any, *, device: torch.device | str = "cpu") -> NDArray[np.float32]:
    """Restore one stack: percentiles 2 and 99.8 become 0 and 1, reflect-pad, network, crop, and back.

    Args:
        network: From `(1, 1, *sides)` to `(1, 1, *sides)`, or to `(1, 1, y, x)` for a projection. Its `multiples`, if
            it has any, say what the sides are padded to.
        stack: Anything with `shape` and slicing: `(z, y, x)`, or `(y, x)`.
        device: Where the network is.

    Returns:
        The restored stack.

    Raises:
        ValueError: If the stack is constant, or not all of it is a number.

    Reference: Weigert et al. 2018.

    Example:
        >>> stack = np.random.default_rng(0).poisson(50, (5, 9, 11)).astype(np.uint16)
        >>> np.abs(restore(nn.Identity(), stack) - stack).max() < 1e-4
        True
    """
    low, high = grey_levels(stack)
    sides = tuple(stack.shape)
    multiples = getattr(network, "multiples", (1,) * len(sides))
    if len(multiples) != len(sides):
        raise ValueError(
            f"restore: the network restores stacks of {len(multiples)} sides, this one has {len(sides)}: {sides}."
        )
    # Split before and after; NumPy reflects as often as it must where a side is shorter than what it lacks.
    margins = [
        (-side % multiple // 2, (-side % multiple + 1) // 2) for side, multiple in zip(sides, multiples, strict=True)
    ]
    padded = np.pad(np.asarray(stack[:], np.float32), margins, mode="reflect")
    with torch.inference_mode():
        restored = ScaledNetwork(network, low, high)(torch.from_numpy(padded)[None, None].to(device))
    restored = restored[0, 0].float().cpu().numpy()
    # A projection has lost the first side.
    kept = [slice(before, before + side) for side, (before, _) in zip(sides, margins, strict=True)]
    return restored[tuple(kept[len(kept) - restored.ndim :])]


def grey_levels(stack: Any, percentiles: tuple[float, float] = PERCENTILES) -> tuple[float, float]:
    """Two percentiles of a stack that need not fit in memory.

    Of whole numbers up to 16 bits they are exact, from counts; of others too, up to 33 million cells, and beyond from
    evenly spaced planes.

    Args:
        stack: Anything with `shape`, `dtype` and slicing along its first side.
        percentiles: Which.

    Returns:
        Their grey levels.

    Raises:
        ValueError: If they are equal, or not all of the stack is a number.

    Example:
        >>> grey_levels(np.arange(101, dtype=np.uint8), (2, 98.5))
        (2.0, 98.5)
    """
    dtype = np.dtype(stack.dtype)
    if dtype.kind == "u" and dtype.itemsize <= 2:
        low, high = counted(stack, percentiles)
    else:
        step = max(1, math.ceil(math.prod(stack.shape) / COUNTED))
        planes = np.stack([np.asarray(stack[index]) for index in range(0, stack.shape[0], step)])
        if not np.isfinite(planes).all():
            faults = int((~np.isfinite(planes)).sum())
            raise ValueError(f"restore: {faults} of {planes.size} cells are no numbers (NaN or infinite).")
        low, high = (float(level) for level in np.percentile(planes, percentiles))
    if high <= low:
        raise ValueError(
            f"restore: the stack is as good as constant: its percentiles {percentiles[0]} and {percentiles[1]} are "
            f"both {low:g}, and there is nothing to bring to 0 and 1."
        )
    return low, high


def counted(stack: Any, percentiles: tuple[float, float]) -> tuple[float, float]:
    """Percentiles of whole numbers by counting them plane by plane, as `numpy.percentile` interpolates."""
    counts = np.zeros(256 ** np.dtype(stack.dtype).itemsize, np.int64)
    for index in range(stack.shape[0]):
        counts += np.bincount(np.asarray(stack[index]).ravel(), minlength=len(counts))
    up_to = np.cumsum(counts)
    levels = []
    for percentile in percentiles:
        place = percentile / 100 * (up_to[-1] - 1)
        below, above = np.searchsorted(up_to, [math.floor(place), math.ceil(place)], side="right")
        levels.append(float(below + (above - below) * (place - math.floor(place))))
    return levels[0], levels[1]
