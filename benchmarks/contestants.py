"""The library's operators, and the regular ones with the same weights, ready to race."""

from __future__ import annotations

import torch
from plain import Regular, Textbook, exact, truth
from race import Contestant
from torch import Tensor, nn

from farfield.nn import GridAttention


def attention_of(
    operator: str,
    channels: int,
    *,
    heads: int = 1,
    project: str = "v",
    inner_channels: int | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> GridAttention:
    """An operator's module; the same seed gives all of them the same maps, and a row that reads no keys has none."""
    torch.manual_seed(1)
    project = project.replace("k", "") if operator == "siamese_local" else project
    attention = GridAttention(channels, operator, heads=heads, project=project, inner_channels=inner_channels)
    return trainable(attention.to(device, dtype))


def trainable(module: nn.Module) -> nn.Module:
    """A module in eval mode whose parameters want gradients."""
    return module.eval().requires_grad_()


def ours(attention: GridAttention, *, name: str = "", compiled: bool = False) -> Contestant:
    """An operator of the library, as it is or compiled."""
    double = exact(attention)
    return Contestant(
        name or attention.operator_name + " compiled" * compiled,
        attention,
        lambda grid, asking: truth(double, grid, asking),
        compiled=compiled,
        twins=list(zip(attention.parameters(), double.parameters(), strict=True)),
    )


def regular(attention: GridAttention, *, fused: bool) -> Contestant:
    """Softmax attention with an operator's maps, by an explicit matrix ("plain") or fused ("SDPA")."""
    name, double = "SDPA" if fused else "plain", exact(attention)

    def equation(grid: Tensor, asking: Tensor) -> Tensor:
        return truth(double, grid, asking)

    twins = list(zip(attention.parameters(), double.parameters(), strict=True))
    return Contestant(name, Regular(attention, fused=fused), equation, flat=True, twins=twins)


def textbook(attention: GridAttention) -> Contestant:
    """Factorized attention with an operator's weights, each map at each position."""
    double = exact(attention)
    return Contestant("textbook", trainable(Textbook(attention)), lambda grid, asking: truth(double, grid, asking))
