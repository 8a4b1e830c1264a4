"""The least time of a pass on this machine: of the bytes that must move, or of the products that must be computed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from farfield._refusals import door, refusal
from farfield.cost.counting import count
from farfield.cost.measuring import step, take_turns

# Numbers of a grid that no cache holds, and of one that a level-2 cache holds twice; side of the multiplied matrices.
COPIED, SIDE = {"memory": 2**26, "cache": 2**15}, 1024


class Rates(NamedTuple):
    """What a machine can do."""

    from_memory: float  # bytes per second that a copy of a grid larger than any cache reads and writes
    from_cache: float  # the same of a grid that stays in a level-2 cache
    products: float  # MACs per second of a matrix product


@dataclass(frozen=True)
class Roofline:
    """A measured pass beside the least time that it could take.

    Attributes:
        seconds: Measured, the median.
        bytes: Bytes that must be read or written: grid, response and parameters once each; with a backward pass also
            the grid again, the gradients of response and grid, and those of the parameters.
        macs: MACs; those of a backward pass are twice the forward ones.
        copy_rate: Bytes per second that a copy of the same grid into memory at hand reads and writes, from and to the
            caches that hold such a grid.
        product_rate: MACs per second of a matrix product.
    """

    seconds: float
    bytes: int
    macs: int
    copy_rate: float
    product_rate: float

    @property
    def least_seconds(self) -> float:
        """The least time: the larger of moving the bytes and computing the products."""
        return max(self.bytes / self.copy_rate, self.macs / self.product_rate)

    @property
    def bottleneck(self) -> str:
        """What the least time is that of: "bytes" or "products"."""
        return "bytes" if self.bytes / self.copy_rate >= self.macs / self.product_rate else "products"

    @property
    def times(self) -> float:
        """How many times as long as the least time the pass takes."""
        return self.seconds / self.least_seconds


@door("cost.roofline")
def roofline(module: nn.Module, grid: Tensor, *, backward: bool = False, repeats: int = 7) -> Roofline:
    """Measure a module from grid to grid, in turns with a copy of the grid and a matrix product.

    Args:
        module: The module; it stays in the mode (training or not) that it is in.
        grid: Its input, `(b, c, *n)`; with `backward` its gradient is computed too.
        backward: Whether to measure forward and backward.
        repeats: Number of turns; the medians count.

    Returns:
        The measured time, the bytes, the MACs and the rates of this machine.

    Raises:
        ValueError: If `repeats` is below 1.

    Cost:
        About a tenth of a second for each of three contestants and each turn, and one pass that counts MACs.

    Example:
        >>> import torch
        >>> from farfield import cost
        >>> from farfield.nn import GridAttention
        >>> result = cost.roofline(GridAttention(64, "siamese", project=""), torch.randn(1, 64, 64, 64), repeats=1)
        >>> result.bottleneck in ("bytes", "products"), result.bytes == 2 * 64**3 * 4 + 4 * 64
        (True, True)
    """
    if repeats < 1:
        raise refusal(ValueError, f"repeats must be at least 1, got {repeats=}; fix: repeats=7.")
    leaf = grid.detach().requires_grad_(backward)
    matrix = torch.randn(SIDE, SIDE, dtype=grid.dtype, device=grid.device)
    runs = {
        "module": step(module, [leaf], backward),
        "copy": step(Tensor.copy_, [torch.empty_like(grid), grid], False),
        "product": step(torch.mm, [matrix, matrix], False),
    }
    times = take_turns(runs, grid.device, repeats)
    with torch.no_grad():
        response = module(leaf)
    parameters = sum(each.nbytes for each in module.parameters())
    moved = grid.nbytes + response.nbytes + parameters
    return Roofline(
        times["module"].seconds,
        moved + backward * (2 * grid.nbytes + response.nbytes + parameters),
        count(module, tuple(grid.shape)).macs * (3 if backward else 1),
        2 * grid.nbytes / times["copy"].seconds,
        len(matrix) ** 3 / times["product"].seconds,
    )


def machine_rates(device: torch.device) -> Rates:
    """Measure what a machine can do: copies from memory and within a cache, and a matrix product."""
    matrix = torch.randn(SIDE, SIDE, dtype=torch.float32, device=device)
    grids = {
        name: [torch.ones(numbers, dtype=torch.float32, device=device) for _ in range(2)]
        for name, numbers in COPIED.items()
    }
    runs = {name: step(Tensor.copy_, pair, False) for name, pair in grids.items()}
    times = take_turns(runs | {"product": step(torch.mm, [matrix, matrix], False)}, device, 3)
    memory, cache = (sum(each.nbytes for each in pair) / times[name].seconds for name, pair in grids.items())
    return Rates(memory, cache, len(matrix) ** 3 / times["product"].seconds)
