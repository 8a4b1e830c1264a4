"""The library's operators, and regular attention with the same weights, as contestants of a race."""

from __future__ import annotations

import torch
from plain import Regular, Textbook, exact, truth
from race import Contestant
from torch import Tensor, nn

from farfield.nn import GridAttention
from farfield.ops import OPERATORS, Operator


def attention_of(
    operator: str | Operator,
    channels: int,
    *,
    heads: int = 1,
    project: str = "v",
    inner_channels: int | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> GridAttention:
    """Build an operator's module. All have the same projections, from one seed; none of keys if they are not read."""
    torch.manual_seed(1)
    project = (OPERATORS[operator] if isinstance(operator, str) else operator).projections(project)
    attention = GridAttention(channels, operator, heads=heads, project=project, inner_channels=inner_channels)
    return trainable(attention.to(device, dtype))


def trainable(module: nn.Module) -> nn.Module:
    """Put a module into eval mode and require gradients of its parameters."""
    return module.eval().requires_grad_()


def ours(attention: GridAttention, *, name: str = "", compiled: bool = False) -> Contestant:
    """Return an operator of the library as a contestant, eager or compiled."""
    double = exact(attention)
    return Contestant(
        name or attention.operator_name + " compiled" * compiled,
        attention,
        lambda grid, chosen: truth(double, grid, chosen),
        compiled=compiled,
        twins=list(zip(attention.parameters(), double.parameters(), strict=True)),
    )


def regular(attention: GridAttention, *, fused: bool) -> Contestant:
    """Return softmax attention with an operator's projections, by an explicit matrix ("plain") or fused ("SDPA")."""
    name, double = "SDPA" if fused else "plain", exact(attention)

    def equation(grid: Tensor, chosen: Tensor) -> Tensor:
        return truth(double, grid, chosen)

    twins = list(zip(attention.parameters(), double.parameters(), strict=True))
    return Contestant(name, Regular(attention, fused=fused), equation, flat=True, twins=twins)


def textbook(attention: GridAttention) -> Contestant:
    """Return the textbook form with an operator's weights, each projection computed at each position."""
    double = exact(attention)
    return Contestant("textbook", trainable(Textbook(attention)), lambda grid, chosen: truth(double, grid, chosen))
