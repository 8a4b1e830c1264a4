"""Parts of the U-Nets: blocks, the layers between them, and their receptive field."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from farfield._checks import shape_error
from farfield._refusals import door, put_name
from farfield.nn.attention import GridAttention
from farfield.nn.channel_norm import split_deviation
from farfield.nn.initialization import DrawnByItself, draw
from farfield.nn.norm import norm_of
from farfield.nn.spatial_dims import layers
from farfield.ops.table import Operator
from farfield_papers.models.choices import check_numbers, check_operator, find_operator

# Whether the input of attention is normalized; "unscaled": its response is not multiplied by what it was divided by.
Normalized = bool | Literal["unscaled"]


class PreActivated(nn.Module):
    """Attention without normalization, as in version 0.1: `grid + attention(relu(grid))`, at first the identity."""

    _is_hf_initialized = DrawnByItself()

    def __init__(self, attention: GridAttention) -> None:
        super().__init__()
        self.attention = attention
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the output projection of attention to 0, which the attention itself draws."""
        for parameter in self.attention.output.parameters() if self.attention.output is not None else ():
            nn.init.zeros_(parameter)

    def forward(self, grid: Float[Tensor, "b c *n"]) -> Float[Tensor, "b c *n"]:
        """Return the grid plus the response of attention."""
        return grid + self.attention(torch.relu(grid))


class PreNormalized(PreActivated):
    """Attention for networks without norms: `grid + deviation * attention(normalize(relu(grid)))`.

    After convolutions without norms the features are about 0.03 at first: the response of attention, up to cubic in
    them, would be too small to have an effect, and that to normalized features, not multiplied by their deviation, so
    large that training does not recover from it. It was not multiplied, `scaled=False`, in version 0.2.0.
    """

    _version = 3  # of the state dict; version 1 had no norm, version 2 did not multiply by the deviation

    def __init__(self, attention: GridAttention, scaled: bool) -> None:
        super().__init__(attention)
        self.scaled = scaled
        self.register_load_state_dict_pre_hook(refuse_earlier_versions)

    def forward(self, grid: Float[Tensor, "b c *n"]) -> Float[Tensor, "b c *n"]:
        """Return the grid plus the response of attention."""
        features, deviation = split_deviation(torch.relu(grid))
        response = self.attention(features)
        return grid + (deviation * response if self.scaled else response)


def refuse_earlier_versions(
    module: PreNormalized,
    state: Mapping[str, Tensor],
    prefix: str,
    metadata: Mapping[str, Any],
    strict: bool,
    missing: list[str],
    unexpected: list[str],
    errors: list[str],
) -> None:
    """Refuse a state dict that farfield 0.1 or 0.2.0 saved by `torch.save`: its attention was another function."""
    if metadata.get("version") == 1:
        fix = "UNet(…, normalized=False) gives the same numbers."
        errors.append(f"{prefix}: this state is of farfield 0.1, whose attention had no norm before it; fix: {fix}")
    if metadata.get("version") == 2 and module.scaled:
        what = "whose attention's response was not multiplied by the deviation of its input"
        fix = 'UNet(…, normalized="unscaled") gives the same numbers.'
        errors.append(f"{prefix}: this state is of farfield 0.2.0, {what}; fix: {fix}")


class ResidualBlock(nn.Module):
    """Two convolutions, each after a ReLU6, plus the input, or plus its 1x1 convolution if the channels change."""

    def __init__(self, spatial_dims: int, kernel: int, channels: int, out_channels: int) -> None:
        super().__init__()
        convolution = layers(spatial_dims).convolution
        self.first = convolution(channels, out_channels, kernel, padding=kernel // 2, bias=False)
        self.second = convolution(out_channels, out_channels, kernel, padding=kernel // 2, bias=False)
        self.shortcut: nn.Module = nn.Identity()
        if channels != out_channels:
            self.shortcut = convolution(channels, out_channels, 1, bias=False)

    def forward(self, grid: Float[Tensor, "b c *n"]) -> Float[Tensor, "b d *n"]:
        """Return the sum of shortcut and convolutions."""
        return self.shortcut(grid) + self.second(F.relu6(self.first(F.relu6(grid))))


class UNetParts(NamedTuple):
    """Modules of a U-Net, from its input to its last features."""

    stem: nn.Module
    encoder: list[nn.Module]  # one block per level above the bottom, from the top
    down: list[nn.Module]  # they halve the size, one after each encoder block
    attending: list[tuple[nn.Module, int]]  # the bottom and decoder blocks, from the bottom, with their output channels
    up: list[nn.Module]  # they double the size, one before each decoder block
    activation: nn.Module


@door("unet_care")
def build_care(spatial_dims: int, kernel: int, channels: int, widths: list[int]) -> UNetParts:
    """Build the parts of CARE's U-Net, from `channels` of the input and `widths` of each level, from the top."""
    convolution, pool = layers(spatial_dims).convolution, layers(spatial_dims).max_pool

    def block(*sizes: int) -> nn.Module:
        parts: list[nn.Module] = []
        for before, after in itertools.pairwise(sizes):
            parts += [convolution(before, after, kernel, padding=kernel // 2), nn.ReLU(inplace=True)]
        return nn.Sequential(*parts)

    levels = range(len(widths) - 1)
    # A block on the way up ends with the channels of the level above.
    above = [widths[max(0, level - 1)] for level in range(len(widths))]
    encoder = [block(widths[level - 1] if level else channels, widths[level], widths[level]) for level in levels]
    attending = [(block(widths[-2], widths[-1], above[-1]), above[-1])]
    attending += [(block(2 * widths[level], widths[level], above[level]), above[level]) for level in reversed(levels)]
    down: list[nn.Module] = [pool(2) for _ in levels]
    up: list[nn.Module] = [nn.Upsample(scale_factor=2, mode="nearest") for _ in levels]
    return UNetParts(nn.Identity(), encoder, down, attending, up, nn.Identity())


@door("unet_residual")
def build_residual(spatial_dims: int, kernel: int, channels: int, widths: list[int]) -> UNetParts:
    """Build the parts of the U-Net of residual blocks; the arguments are those of `build_care`."""
    kinds = layers(spatial_dims)
    convolution, transposed = kinds.convolution, kinds.transposed
    levels, padding = range(len(widths) - 1), kernel // 2
    half: dict[str, Any] = {"kernel_size": kernel, "stride": 2, "padding": padding, "bias": False}

    def block(before: int, after: int) -> nn.Module:
        return ResidualBlock(spatial_dims, kernel, before, after)

    stem = convolution(channels, widths[0], kernel, padding=padding, bias=False)
    encoder = [block(widths[level], widths[level]) for level in levels]
    down: list[nn.Module] = [convolution(widths[level], widths[level + 1], **half) for level in levels]
    attending = [(block(widths[-1], widths[-1]), widths[-1])]
    attending += [(block(2 * widths[level], widths[level]), widths[level]) for level in reversed(levels)]
    up: list[nn.Module] = [
        transposed(widths[level + 1], widths[level], output_padding=1, **half) for level in reversed(levels)
    ]
    return UNetParts(stem, encoder, down, attending, up, nn.ReLU6(inplace=True))


def build_selection(levels: int, channels: int) -> nn.Sequential:
    """Build the network that scores every position of a stack; it pools height and width, but not the depth."""
    step = (1, 2, 2)

    def convolved(before: int) -> list[nn.Module]:
        return [nn.Conv3d(before, channels, 3, padding=1), nn.ReLU(inplace=True)]

    parts: list[nn.Module] = []
    for level in range(levels):
        parts += [*convolved(channels if level else 1), nn.MaxPool3d(step)]
    parts += convolved(channels)
    for _ in range(levels):
        parts += [nn.Upsample(scale_factor=step, mode="nearest"), *convolved(channels)]
    return nn.Sequential(*parts, nn.Conv3d(channels, 1, 3, padding=1))


def append_attention(
    block: nn.Module,
    channels: int,
    operator: str | Operator | None,
    heads: int,
    activated: bool,
    normalized: Normalized,
) -> nn.Module:
    """Append attention, which starts as the identity, to a block, which is `activated` if it ends with a ReLU."""
    if normalized not in (True, False, "unscaled"):
        raise ValueError(f'UNet: normalized must be True, False or "unscaled", got {normalized!r}; fix: leave it out.')
    if operator is None:
        return nn.Sequential(OrderedDict(block=block))
    entry = find_operator("UNet", operator)
    # As in version 0.1: no ReLU before attention without normalization if the block ends with one.
    alone = activated and not normalized
    options: dict[str, Any] = {"scale": 1.0, "coefficient_norm": norm_of(entry) if normalized else False}
    attention = GridAttention(
        channels, operator, heads=heads, project=entry.projections("qkvo"), residual=alone, **options
    )
    if normalized:
        return nn.Sequential(OrderedDict(block=block, attention=PreNormalized(attention, normalized != "unscaled")))
    return nn.Sequential(OrderedDict(block=block, attention=attention if alone else PreActivated(attention)))


def draw_convolutions(net: nn.Module) -> None:
    """Initialize convolutions as in the papers: Glorot uniform, biases 0; attention keeps its own initialization."""
    for module in net.modules():
        if isinstance(module, _ConvNd):
            draw(module)


def find_reach(low: int, high: int, levels: int, block: int, radius: int | None) -> tuple[int, int]:
    """Return the first and the last input position on which outputs `low` to `high` depend, without attention."""
    # Positions may lie outside the grid. `block` is the sum of the radii of a block's convolutions, `radius` that of
    # strided and transposed convolutions, None for pooling and nearest-neighbour upsampling.
    low, high = low - block, high + block
    if not levels:
        return low, high
    before = 0 if radius is None else radius
    # In a transposed convolution of stride 2, outputs 2i - radius to 2i + radius depend on input i.
    below = find_reach(-((before - low) // 2), (high + before) // 2, levels - 1, block, radius)
    last = 1 if radius is None else radius
    return min(low, 2 * below[0] - before) - block, max(high, 2 * below[1] + last) + block


def check_unet(model: str, operator: str | Operator | None, kernel: int, **numbers: int) -> None:
    """Refuse an unknown operator, numbers below 1, and a kernel whose size is even."""
    check_operator(model, operator)
    check_numbers(model, **numbers)
    if not isinstance(kernel, int) or kernel < 1 or kernel % 2 == 0:
        raise ValueError(f"{model}: kernel must be an odd number, got {kernel!r}; fix: 3 or 5.")


def check_stack(model: str, grid: Tensor, channels: int, spatial_dims: int, multiples: tuple[int, ...]) -> None:
    """Refuse inputs that are not a floating-point batch of grids whose size is a multiple of `multiples`."""
    names = ", ".join(("z", "y", "x")[3 - spatial_dims :])
    if grid.dim() != spatial_dims + 2 or grid.shape[1] != channels:
        fix = f"pass (batch, {channels}, {names}), or build a UNet with other spatial_dims and in_channels."
        if grid.dim() == spatial_dims + 1:
            fix = "add the batch, grid.unsqueeze(0), or the channel, grid.unsqueeze(1)."
        raise put_name(model, shape_error(f"the grid must be (batch, {channels}, {names}).", fix, grid=grid))
    if not grid.is_floating_point():
        fix = "grid.float(), scaled as in training."
        raise TypeError(f"{model}: the grid must be floating point, got {grid.dtype}; fix: {fix}")
    if any(side % multiple or not side for side, multiple in zip(grid.shape[2:], multiples, strict=True)):
        problem = f"the size ({names}) must be multiples of {multiples}, above 0."
        fix = "pad the grid; farfield_papers.tasks.restore_stack.restore pads and crops again."
        raise put_name(model, shape_error(problem, fix, grid=grid))
