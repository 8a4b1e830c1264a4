"""Blocks of SAGAN's generator and discriminator, and the weights of their convolutions, with spectral norm."""

from __future__ import annotations

from typing import cast

import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm
from torch.nn.utils.parametrize import is_parametrized, remove_parametrizations

from farfield.nn.attention import GridAttention
from farfield.nn.initialization import DrawnByItself


class ConditionalNorm(nn.Module):
    """Batch norm with a scale and a shift for each class; without classes, ordinary batch norm."""

    _is_hf_initialized = DrawnByItself()

    def __init__(self, channels: int, num_classes: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(channels, affine=num_classes == 0)
        self.scale = self.shift = None
        if num_classes:
            self.scale, self.shift = nn.Embedding(num_classes, channels), nn.Embedding(num_classes, channels)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the scales to 1 and the shifts to 0."""
        if self.scale is not None and self.shift is not None:
            nn.init.ones_(self.scale.weight)
            nn.init.zeros_(self.shift.weight)

    def forward(self, grid: Float[Tensor, "b c h w"], labels: Int[Tensor, " b"] | None) -> Float[Tensor, "b c h w"]:
        """Return the normalized grid, each sample with the scale and shift of its class."""
        grid = self.norm(grid)
        if self.scale is None or self.shift is None:
            return grid
        return grid * self.scale(labels)[..., None, None] + self.shift(labels)[..., None, None]


class GeneratorBlock(nn.Module):
    """Residual block that doubles height and width: `up(conv1(x)) + conv3(relu(norm(conv3(up(relu(norm(x)))))))`."""

    def __init__(self, channels: int, out_channels: int, num_classes: int) -> None:
        super().__init__()
        self.first_norm = ConditionalNorm(channels, num_classes)
        self.first = bound_weight(nn.Conv2d(channels, out_channels, 3, padding=1))
        self.second_norm = ConditionalNorm(out_channels, num_classes)
        self.second = bound_weight(nn.Conv2d(out_channels, out_channels, 3, padding=1))
        self.shortcut = bound_weight(nn.Conv2d(channels, out_channels, 1))

    def forward(self, grid: Float[Tensor, "b c h w"], labels: Int[Tensor, " b"] | None) -> Float[Tensor, "b d y x"]:
        """Return a grid of twice the size."""
        out = self.first(_double_size(F.relu(self.first_norm(grid, labels))))
        out = self.second(F.relu(self.second_norm(out, labels)))
        # A 1x1 convolution commutes with the repetition of positions, and costs a quarter before it.
        return _double_size(self.shortcut(grid)) + out


class DiscriminatorBlock(nn.Module):
    """Residual block: two 3x3 convolutions, each after ReLU, plus a shortcut; half the size if `halve`."""

    def __init__(self, channels: int, out_channels: int, *, activate: bool = True, halve: bool = True) -> None:
        super().__init__()
        # The block whose input is an image does not activate it.
        self.activate, self.halve = activate, halve
        self.first = bound_weight(nn.Conv2d(channels, out_channels, 3, padding=1))
        self.second = bound_weight(nn.Conv2d(out_channels, out_channels, 3, padding=1))
        has_shortcut = halve or channels != out_channels
        self.shortcut = bound_weight(nn.Conv2d(channels, out_channels, 1)) if has_shortcut else nn.Identity()

    def forward(self, grid: Float[Tensor, "b c h w"]) -> Float[Tensor, "b d y x"]:
        """Return the sum of convolutions and shortcut."""
        out = self.second(F.relu(self.first(F.relu(grid) if self.activate else grid)))
        if not self.halve:
            return self.shortcut(grid) + out
        # A 1x1 convolution commutes with average pooling, and costs a quarter after it.
        return self.shortcut(F.avg_pool2d(grid, 2)) + F.avg_pool2d(out, 2)


def bound_weight(layer: nn.Conv2d | nn.Linear | nn.Embedding) -> nn.Module:
    """Set the bias to 0 and add spectral norm: the weight over its largest singular value, from a power iteration."""
    if not isinstance(layer, nn.Embedding) and layer.bias is not None:
        nn.init.zeros_(layer.bias)
    return spectral_norm(layer)


def draw_bound_weights(net: nn.Module) -> None:
    """Draw the weights that have spectral norm anew, and the vectors of its power iteration."""
    layers = [cast(nn.Conv2d | nn.Linear, layer) for layer in net.modules() if is_parametrized(layer, "weight")]
    for layer in layers:
        # A parametrized layer draws its weight into a product that is thrown away.
        remove_parametrizations(layer, "weight", leave_parametrized=False)
        layer.reset_parameters()
    for module in net.modules():
        if isinstance(module, GridAttention):
            module.reset_parameters()
    for layer in layers:
        bound_weight(layer)


def _double_size(grid: Tensor) -> Tensor:
    return F.interpolate(grid, scale_factor=2, mode="nearest")
