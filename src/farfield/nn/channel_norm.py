"""A norm without parameters for the input of attention: of the channels of each position."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor, nn

from farfield.ops.grid import accumulation

# Added to the variance of a position's features, so that features that are all 0 stay 0.
_SMALLEST = 1e-6


def split_deviation(grid: Float[Tensor, "b c *n"]) -> tuple[Float[Tensor, "b c *n"], Float[Tensor, "b 1 *n"]]:
    """Return a grid whose channels have mean 0 and variance 1 at each position, and what it was divided by."""
    features = grid.to(accumulation(grid.dtype))
    centred = features - features.mean(1, keepdim=True)
    deviation = (centred.square().mean(1, keepdim=True) + _SMALLEST).sqrt()
    return (centred / deviation).to(grid.dtype), deviation.to(grid.dtype)


# Responses, up to cubic in their input, stay finite however that grows.
class ChannelNorm(nn.Module):
    """Give the channels of each position mean 0 and variance 1."""

    def forward(self, grid: Float[Tensor, "b c *n"]) -> Float[Tensor, "b c *n"]:
        """Return the grid, the channels of each position with mean 0 and variance 1."""
        return split_deviation(grid)[0]
