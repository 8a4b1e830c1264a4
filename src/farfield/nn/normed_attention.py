"""Attention that is added to a network: normed input, weights that differ between positions from the start."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from jaxtyping import Bool, Float
from torch import Tensor, nn

from farfield._checks import check_whole
from farfield._operators import DEFAULT
from farfield._refusals import door, refusal
from farfield.nn.attention import GridAttention
from farfield.nn.channel_norm import split_deviation
from farfield.nn.checks import check_input
from farfield.nn.initialization import DrawnByItself
from farfield.ops.grid import hide
from farfield.ops.slots import (
    Quotient,
    centred,
    elu_plus_one,
    magnitude_aware,
    relu,
    softmax_of_products,
    softmax_over_channels,
    softmax_pair,
)
from farfield.ops.table import Operator, look_up_operator

# What weights are made of -> the standard deviation of the channels of queries and keys at first, and their mean.
# Exponentials: exponents vary by about 4. Of a softmax of products they have two factors. Features that are 0 or small
# below 0: most are, so that few keys are in each slot.
_STARTS: dict[Callable[..., Any], tuple[float, float]] = {
    softmax_of_products: (2.0, 0.0),
    softmax_over_channels: (4.0, 0.0),
    softmax_pair: (4.0, 0.0),
    centred: (2.0, 0.0),
    relu: (1.0, -1.0),
    elu_plus_one: (4.0, -4.0),
    magnitude_aware: (4.0, -4.0),
}
# Heads of `attention_for`, where the channels can be divided by them.
_HEADS = 8


class NormedAttention(nn.Module):
    """Add the response of attention to the normed channels of each position; at first the identity.

    `response = X + σ · attention((X - μ) / σ)`, with μ and σ of the channels of each position

    After a ReLU a grid is mostly its mean, queries and keys vary by less than 1, and the weights of most operators are
    nearly equal, so that all positions get nearly one response. Here the mean is gone and queries and keys are drawn so
    large that weights differ from the start, whatever the scale of the grid: it multiplies the response. The norm has
    no parameters, as the projections behind it can take them over, and no sums over positions: in tiles it is local.

    Args:
        attention: A `GridAttention` with an output projection and without a residual. Its queries and keys are drawn
            again, and its output projection is set to 0.

    Raises:
        TypeError: If the attention is no `GridAttention`.
        ValueError: If it has a residual or no output projection, or the grid one channel, of which nothing is left.

    Cost:
        That of the attention, and for N positions of c channels about 6·N·c additions and multiplications.

    Example:
        >>> import torch
        >>> from farfield.nn import GridAttention, NormedAttention
        >>> module, grid = NormedAttention(GridAttention(16, "flare", heads=2, project="kvo")), torch.randn(2, 16, 7, 7)
        >>> torch.equal(module(grid), grid)
        True
    """

    _is_hf_initialized = DrawnByItself()

    def __init__(self, attention: GridAttention) -> None:
        super().__init__()
        with door("NormedAttention"):
            _check_attention(attention)
        self.attention = attention
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the attention, with queries and keys that make weights differ, and set the output projection to 0."""
        attention = self.attention
        attention.reset_parameters()
        deviation, mean = find_start(attention.operator)
        inner, channels = attention.inner_channels, attention.channels
        for linear in (attention.query, attention.key):
            if linear is not None:
                # Glorot's weights from c to d channels have a variance of 2/(c + d), and outputs one of 2c/(c + d).
                nn.init.xavier_uniform_(linear.weight, deviation * math.sqrt((channels + inner) / (2 * channels)))
                if linear.bias is not None:
                    nn.init.constant_(linear.bias, mean)
        if attention.output is not None:
            nn.init.zeros_(attention.output.weight)

    def forward(
        self, grid: Float[Tensor, "b c *n"], *, mask: Bool[Tensor, " b *n"] | None = None
    ) -> Float[Tensor, "b c *n"]:
        """Add the response to the grid.

        Args:
            grid: The grid.
            mask: True where a position is valid; others may hold anything, are read as 0 and change no response.

        Returns:
            `(b, c, *n)` in the grid's dtype.

        Raises:
            ShapeError: If the grid or the mask does not fit the attention or each other.
            TypeError: If the grid is not floating-point of the module's dtype (any under autocast), or the mask is not
                boolean.
        """
        check_input(self.attention, grid, mask)
        grid = hide(grid, mask)
        features, deviation = split_deviation(grid)
        return grid + (deviation * self.attention(features, mask=mask)).to(grid.dtype)


def find_start(operator: Operator) -> tuple[float, float]:
    """Return the standard deviation and the mean of the channels of queries and keys with which weights differ."""
    coefficients = operator.coefficients
    form = coefficients.map if isinstance(coefficients, Quotient) else coefficients
    deviation, mean = _STARTS.get(form, (1.0, 0.0))
    # Means over an axis vary less than positions.
    return deviation if operator.keys_from.side_by_side else 2 * deviation, mean


def usual_heads(*channels: int) -> int:
    """Return the number of heads of `attention_for` for so many channels of values, and of queries and keys."""
    return math.gcd(_HEADS, *channels)


@door("attention_for")
def attention_for(
    channels: int,
    operator: str | Operator = DEFAULT,
    *,
    heads: int | None = None,
    inner_channels: int | None = None,
) -> NormedAttention:
    """Build the attention that is recommended for insertion into a network: at first the identity, then it learns.

    `response = X + σ · attention((X - μ) / σ)`, see `NormedAttention`

    A `GridAttention` with all projections that the operator has, between a norm of each position's channels and their
    deviation. Without them it starts nearly constant: behind the second stage of a ResNet-18, on photographs, 12 % of
    the mean square of the response of softmax varied over positions, and of those of `kronecker_kv`, `kronecker_qkv`,
    `factorized_gaussian` and `flare` 0.2 to 3 %; here it is 38 to 64 % (docs/guide/insert.md; `maps.health`).

    Args:
        channels: Channels of the grid, 2 at least.
        operator: A name in `ops.OPERATORS`, or an `ops.Operator` of your own.
        heads: Number of heads; 8 by default, or the greatest common divisor of 8 and the channels.
        inner_channels: Channels of queries and keys; `channels` by default. Fewer make wide grids cheaper.

    Raises:
        LookupError: If there is no such operator.
        ShapeError: If heads do not divide the channels.
        TypeError: If the operator is neither a name nor an `ops.Operator`.
        ValueError: If channels are not a whole number from 2, or the operator has no queries or keys to be narrower.

    Cost:
        For N positions of c channels, that of `GridAttention` with `project="qkvo"`, and about 6·N·c additions and
        multiplications for the norm.

    Reference: Xiong et al. 2020.

    Example:
        >>> import torch
        >>> from farfield import insert
        >>> from farfield.nn import attention_for
        >>> net, image = torch.nn.Sequential(torch.nn.Conv2d(3, 16, 3), torch.nn.ReLU()), torch.randn(2, 3, 9, 9)
        >>> before = net(image)
        >>> added = insert(net, "1", attention_for, example=image)
        >>> torch.equal(net(image), before), added["1"].attention.operator_name
        (True, 'factorized_gaussian')
    """
    check_whole("channels", channels, 2)
    if inner_channels is not None:
        check_whole("inner_channels", inner_channels, 1)
    _, entry = look_up_operator(operator)
    inner = channels if inner_channels is None else inner_channels
    number = usual_heads(channels, inner) if heads is None else heads
    project = entry.projections("qkvo")
    return NormedAttention(
        GridAttention(channels, operator, heads=number, inner_channels=inner_channels, project=project)
    )


def _check_attention(attention: object) -> None:
    fix = "fix: attention_for(channels, operator)."
    if not isinstance(attention, GridAttention):
        raise refusal(TypeError, f"attention must be a GridAttention, got {type(attention).__name__}; {fix}")
    if attention.residual or attention.output is None:
        what = "a residual" if attention.residual else "no output projection"
        raise refusal(ValueError, f"the attention has {what}, and the module adds its response to the grid; {fix}")
    norm = attention.coefficient_norm
    if norm is not None and norm.start == "zero":
        problem = "the norm of its responses and the output projection would start at zero, so that neither learns"
        raise refusal(ValueError, f"{problem}; fix: coefficient_norm=True.")
    if attention.channels < 2:
        raise refusal(ValueError, "the norm of one channel is 0 everywhere; fix: GridAttention without a norm.")
