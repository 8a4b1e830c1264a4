"""From a stack as a microscope wrote it to a restored one: normalise, network, back to the stack's own grey levels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor, nn

from farfield.streaming import predict_whole
from farfield.streaming.aliasing import refuse_aliasing
from farfield.streaming.driving import write_whole
from farfield.streaming.outputs import check_path

# Percentiles of a stack that become 0 and 1 (CARE's for prediction).
PERCENTILES = (2.0, 99.8)
# Of more positions than this, percentiles of floating-point stacks are those of evenly spaced planes.
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


def restore(
    network: nn.Module,
    stack: Any,
    *,
    tile: int | Sequence[int | None] | None = None,
    out: str | Path | None = None,
    overwrite: bool = False,
    quiet: bool = True,
) -> Any:
    """Restore one stack: percentiles 2 and 99.8 become 0 and 1, reflect-pad, network, crop, and back to grey levels.

    Tile by tile where it does not fit in memory, attention over the whole of it all the same: see
    `streaming.predict_whole`. A projection is restored in one piece.

    Args:
        network: In eval mode, from grids `(1, 1, *size)` to such grids; of a probabilistic one the means are kept.
        stack: Anything with `shape`, `dtype` and slicing: `(z, y, x)`, or `(y, x)`.
        tile: Positions a side that are written at a time; by default what memory allows.
        out: A path ending in .tif or .zarr, for what does not fit in memory; None returns an array.
        overwrite: Whether what is there is replaced.
        quiet: Whether to say nothing of plan and progress.

    Returns:
        The restored stack, in float32: an array, or the file opened for reading.

    Raises:
        ValueError: If the stack is constant, has positions that are no numbers, or not as many sides as the network.
        FileExistsError: If something is at the path.

    Reference: SAN §4.5, Weigert et al. 2018.

    Example:
        >>> from farfield import models
        >>> stack = np.random.default_rng(0).poisson(50, (5, 9, 11)).astype(np.uint16)
        >>> restore(models.unet_care("siamese", first_channels=4).eval(), stack).shape
        (5, 9, 11)
    """
    multiples = getattr(network, "multiples", (1,) * len(stack.shape))
    if len(multiples) != len(stack.shape):
        raise ValueError(
            f"restore: the network restores grids of {len(multiples)} sides, this one has {len(stack.shape)}: "
            f"{tuple(stack.shape)}."
        )
    low, high = grey_levels(stack)
    scaled = ScaledNetwork(network, low, high).eval()
    if not hasattr(network, "project"):
        each = tile if isinstance(tile, Sequence) else [tile] * len(multiples)
        # The number of spatial dims must be said: the first convolution of a foreign network need not have them.
        tiles = None if tile is None else list(each)
        return predict_whole(scaled, stack, tile=tiles, pad="reflect", out=out, overwrite=overwrite, quiet=quiet)
    if out is None:
        return projected(scaled, stack, multiples)
    refuse_aliasing("restore", out, {"stack": stack})
    check_path("restore", Path(out), overwrite)  # before the work
    image = projected(scaled, stack, multiples)
    return write_whole("restore", Path(out), image, "YX", overwrite)


def projected(network: nn.Module, stack: Any, multiples: Sequence[int]) -> NDArray[np.float32]:
    """Restore an image from a whole stack, padded to what the network's strides divide and cropped again."""
    # Split before and after; NumPy reflects as often as it must where a side is shorter than what it lacks.
    lacking = [-side % multiple for side, multiple in zip(stack.shape, multiples, strict=True)]
    padded = np.pad(
        np.asarray(stack[:], np.float32), [(short // 2, short - short // 2) for short in lacking], "reflect"
    )
    parameter = next(network.parameters())
    with torch.inference_mode():
        image = network(torch.from_numpy(padded).to(parameter)[None, None])[0, 0].float().cpu().numpy()
    kept = (slice(short // 2, short // 2 + side) for short, side in zip(lacking[1:], stack.shape[1:], strict=True))
    return image[tuple(kept)]


def grey_levels(stack: Any, percentiles: tuple[float, float] = PERCENTILES) -> tuple[float, float]:
    """Two percentiles of a stack that need not fit in memory.

    Of whole numbers up to 16 bits they are exact, from counts; of others too, up to 33 million positions, and beyond from
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
            raise ValueError(f"restore: {faults} of {planes.size} positions are no numbers (NaN or infinite).")
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
