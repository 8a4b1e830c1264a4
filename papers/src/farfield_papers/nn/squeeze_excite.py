"""Squeeze-excite, the baseline of SAN Table 4."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor, nn

from farfield._checks import ShapeError
from farfield._refusals import door
from farfield_papers.nn.block_checks import check_channels


class SqueezeExcite(nn.Module):
    """Scale each channel by a gate computed from the means of all channels: sigmoid(W₂ relu(W₁ mean(x))) · x.

    The baseline of SAN Table 4: global like attention, but the same at every position. The defaults, ρ = 2 without
    biases, give the c² weights of a value projection, and only they match the numbers of parameters in the table.

    Args:
        channels: c, channels of the grid.
        reduction: ρ; there are c/ρ channels between the two layers.
        bias: Whether the two layers have biases.

    Raises:
        ShapeError: If `reduction` is below 1 or does not divide the channels.

    Reference: SAN Table 4 (SENet).

    Example:
        >>> import torch
        >>> from farfield_papers.nn import SqueezeExcite
        >>> SqueezeExcite(32)(torch.randn(2, 32, 7, 7)).shape
        torch.Size([2, 32, 7, 7])
    """

    def __init__(self, channels: int, *, reduction: int = 2, bias: bool = False) -> None:
        super().__init__()
        if reduction < 1 or channels % reduction:
            divisors = [divisor for divisor in range(1, channels + 1) if channels % divisor == 0]
            nearest = min(divisors, key=lambda divisor: abs(divisor - reduction))
            problem = f"{reduction=} does not divide the {channels} channels"
            raise ShapeError(f"SqueezeExcite: {problem}; try reduction={nearest}.")
        self.channels = channels
        self.squeeze = nn.Linear(channels, channels // reduction, bias=bias)
        self.excite = nn.Linear(channels // reduction, channels, bias=bias)

    @staticmethod
    def count_printed(shape: tuple[int, ...]) -> int:
        """Return the MACs that SAN counts besides the layers: of the mean and of the gate, one for each number."""
        return 2 * math.prod(shape)

    def forward(self, grid: Float[Tensor, "b c *n"]) -> Float[Tensor, "b c *n"]:
        """Return the grid with its channels scaled; raise a ShapeError for other channels."""
        with door("SqueezeExcite"):
            check_channels(grid, self.channels)
        means = grid.mean(tuple(range(2, grid.dim())))
        gate = torch.sigmoid(self.excite(torch.relu(self.squeeze(means))))
        return grid * gate.view(*gate.shape, *[1] * (grid.dim() - 2))
