"""SAGAN: a generator and a discriminator of images; residual blocks with spectral norm, attention in one place."""

from __future__ import annotations

import itertools
from typing import Any, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm
from torch.nn.utils.parametrize import is_parametrized, remove_parametrizations

from farfield._checks import shape_error
from farfield._refusals import put_name
from farfield.nn.attention import GridAttention
from farfield.nn.initialization import DrawnByItself
from farfield.nn.norm import norm_of
from farfield.ops.table import Operator
from farfield_papers.models.choices import bind_arguments, check_numbers, check_operator, find_operator
from farfield_papers.models.storage import Stored

# Height and width of the generator's first grid and the discriminator's last one; blocks double them up to the image.
_SMALLEST = 4


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
        self.first = _bound_weight(nn.Conv2d(channels, out_channels, 3, padding=1))
        self.second_norm = ConditionalNorm(out_channels, num_classes)
        self.second = _bound_weight(nn.Conv2d(out_channels, out_channels, 3, padding=1))
        self.shortcut = _bound_weight(nn.Conv2d(channels, out_channels, 1))

    def forward(self, grid: Float[Tensor, "b c h w"], labels: Int[Tensor, " b"] | None) -> Float[Tensor, "b d y x"]:
        """Return a grid of twice the size."""
        out = self.first(F.interpolate(F.relu(self.first_norm(grid, labels)), scale_factor=2))
        out = self.second(F.relu(self.second_norm(out, labels)))
        # A 1x1 convolution commutes with the repetition of positions, and costs a quarter before it.
        return F.interpolate(self.shortcut(grid), scale_factor=2) + out


class DiscriminatorBlock(nn.Module):
    """Residual block: two 3x3 convolutions, each after ReLU, plus a shortcut; half the size if `halve`."""

    def __init__(self, channels: int, out_channels: int, *, activate: bool = True, halve: bool = True) -> None:
        super().__init__()
        # The block whose input is an image does not activate it.
        self.activate, self.halve = activate, halve
        self.first = _bound_weight(nn.Conv2d(channels, out_channels, 3, padding=1))
        self.second = _bound_weight(nn.Conv2d(out_channels, out_channels, 3, padding=1))
        has_shortcut = halve or channels != out_channels
        self.shortcut = _bound_weight(nn.Conv2d(channels, out_channels, 1)) if has_shortcut else nn.Identity()

    def forward(self, grid: Float[Tensor, "b c h w"]) -> Float[Tensor, "b d y x"]:
        """Return the sum of convolutions and shortcut."""
        out = self.second(F.relu(self.first(F.relu(grid) if self.activate else grid)))
        if not self.halve:
            return self.shortcut(grid) + out
        # A 1x1 convolution commutes with average pooling, and costs a quarter after it.
        return self.shortcut(F.avg_pool2d(grid, 2)) + F.avg_pool2d(out, 2)


def _bound_weight(layer: nn.Conv2d | nn.Linear | nn.Embedding) -> nn.Module:
    """Set the bias to 0 and add spectral norm: the weight over its largest singular value, from a power iteration."""
    if not isinstance(layer, nn.Embedding) and layer.bias is not None:
        nn.init.zeros_(layer.bias)
    return spectral_norm(layer)


def _draw_bound_weights(net: nn.Module) -> None:
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
        _bound_weight(layer)


class GatedAttention(nn.Module):
    """Attention with a learned gate that is 0 at first, `grid + gate · attention(grid)` (Zhang et al. 2019).

    Queries and keys have an eighth of the channels, values half; all projections have spectral norm and no biases.
    """

    _is_hf_initialized = DrawnByItself()

    def __init__(self, channels: int, operator: str | Operator, normalized: bool = True) -> None:
        super().__init__()
        entry = find_operator("sagan", operator)
        # softmax_pooled pools positions before their projection; the published network projects first.
        options: dict[str, Any] = {"inner_channels": max(1, channels // 8), "value_channels": max(1, channels // 2)}
        options |= {"project": entry.projections("qkvo"), "bias": False, "scale": 1.0}
        # Spectral norm makes products of several projections small: without this norm the response of some operators
        # begins at less than a hundredth of the grid.
        options |= {"coefficient_norm": norm_of(entry) if normalized else False}
        self.attention = GridAttention(channels, operator, **options)
        for linear in list(self.attention.children()):
            if isinstance(linear, nn.Linear):
                spectral_norm(linear)
        self.gate = nn.Parameter(torch.empty(()))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the gate to 0, so that the module starts as the identity."""
        nn.init.zeros_(self.gate)

    def forward(self, grid: Float[Tensor, "b c h w"]) -> Float[Tensor, "b c h w"]:
        """Return the grid plus the gated response of attention."""
        return grid + self.gate * self.attention(grid)


class Generator(nn.Module):
    """Generate images from noise: a linear layer to 4x4 positions, then blocks that double the size."""

    def __init__(
        self,
        operator: str | Operator | None,
        normalized: bool,
        side: int,
        attention_at: int,
        num_classes: int,
        noise_channels: int,
        channels: int,
    ) -> None:
        super().__init__()
        self.noise_channels, self.num_classes = noise_channels, num_classes
        widths = [channels * 2**level for level in reversed(range(_count_halvings(side)))]
        self.linear = _bound_weight(nn.Linear(noise_channels, widths[0] * _SMALLEST**2))
        pairs = itertools.pairwise([widths[0], *widths])
        self.blocks = nn.ModuleList(GeneratorBlock(before, after, num_classes) for before, after in pairs)
        self.attending = _count_halvings(attention_at) - 1
        self.attention = _build_attention(widths[self.attending], operator, normalized)
        self.norm = nn.BatchNorm2d(channels)
        self.last = _bound_weight(nn.Conv2d(channels, 3, 3, padding=1))

    def reset_parameters(self) -> None:
        """Draw the weights with spectral norm."""
        _draw_bound_weights(self)

    def forward(
        self, noise: Float[Tensor, "b z"], labels: Int[Tensor, " b"] | None = None
    ) -> Float[Tensor, "b 3 side side"]:
        """Return images with values between -1 and 1; without labels the classes are drawn at random."""
        if noise.dim() != 2 or noise.shape[1] != self.noise_channels:
            fix = f"torch.randn(batch, {self.noise_channels})."
            raise put_name("sagan", shape_error(f"noise must be (batch, {self.noise_channels}).", fix, noise=noise))
        if labels is None and self.num_classes:
            labels = torch.randint(self.num_classes, noise.shape[:1], device=noise.device)
        grid = self.linear(noise).unflatten(1, (-1, _SMALLEST, _SMALLEST))
        for place, block in enumerate(self.blocks):
            grid = block(grid, labels)
            if place == self.attending:
                grid = self.attention(grid)
        return torch.tanh(self.last(F.relu(self.norm(grid))))


class Discriminator(nn.Module):
    """Score images, high for real ones: blocks that halve the size and double the channels, then a sum of positions."""

    def __init__(
        self,
        operator: str | Operator | None,
        normalized: bool,
        side: int,
        attention_at: int,
        num_classes: int,
        channels: int,
    ) -> None:
        super().__init__()
        self.side = side
        widths = [channels * 2**level for level in range(_count_halvings(side))]
        self.blocks = nn.ModuleList([DiscriminatorBlock(3, channels, activate=False)])
        self.blocks.extend(DiscriminatorBlock(before, after) for before, after in itertools.pairwise(widths))
        self.blocks.append(DiscriminatorBlock(widths[-1], widths[-1], halve=False))
        self.attending = _count_halvings(side) - _count_halvings(attention_at) - 1
        self.attention = _build_attention(widths[self.attending], operator, normalized)
        self.score = _bound_weight(nn.Linear(widths[-1], 1))
        # The projection discriminator: the score has the dot product of the features and an embedding of the class too.
        self.classes = _bound_weight(nn.Embedding(num_classes, widths[-1])) if num_classes else None

    def reset_parameters(self) -> None:
        """Draw the weights with spectral norm."""
        _draw_bound_weights(self)

    def forward(
        self, images: Float[Tensor, "b 3 side side"], labels: Int[Tensor, " b"] | None = None
    ) -> Float[Tensor, " b"]:
        """Return the score of each image; with classes, its score as an image of its label."""
        if images.dim() != 4 or images.shape[1:] != (3, self.side, self.side):
            problem = f"images must be (batch, 3, {self.side}, {self.side})."
            fix = f"images of {self.side} pixels (--data.image_size {self.side}), or a network with another side."
            raise put_name("sagan", shape_error(problem, fix, images=images))
        if self.classes is not None and labels is None:
            problem = "the discriminator has classes, so that it needs the label of each image"
            raise ValueError(f"sagan: {problem}; fix: discriminator(images, labels), or a network with num_classes=0.")
        grid = images
        for place, block in enumerate(self.blocks):
            grid = block(grid)
            if place == self.attending:
                grid = self.attention(grid)
        features = F.relu(grid).sum((2, 3))
        score = self.score(features)[:, 0]
        return score if self.classes is None else score + (features * self.classes(labels)).sum(1)


class SAGAN(Stored, nn.Module, library_name="farfield", pipeline_tag="unconditional-image-generation"):
    """Generator and discriminator of the self-attention GAN, for images of 16x16, 32x32, 64x64 … pixels.

    At 128 pixels and 64 channels these are the published networks: from 4x4 positions the generator has 1024, 1024,
    512, 256, 128 and 64 channels, and the discriminator 64, 128, 256, 512, 1024 and 1024. Images of half the size have
    one level less, the widest. The published code has attention on a grid of 32x32 positions; with an operator of
    linear cost a grid of 64x64 is possible, where the discriminator has 64 channels: the example of FA.

    Args:
        model: `"sagan"`.
        operator: Operator of the attention in both networks: a name of `ops.OPERATORS` or an `Operator`; None leaves
            attention out.
        side: Height and width of the images in pixels, a power of two from 16.
        attention_at: Height and width of the grid on which attention is computed, a power of two from 8 to side / 2.
        num_classes: Number of classes; 0 for an unconditional network.
        noise_channels: Length of an image's noise vector.
        generator_channels: Channels of the generator's last block.
        discriminator_channels: Channels of the discriminator's first block.
        normalized: See `GatedAttention`; it was False in version 0.1, where the response of these operators was too
            small at first to have an effect.

    Raises:
        LookupError: For an unknown operator.
        ValueError: For a number out of range.

    Reference: FA §3.4, Zhang et al. 2019.

    Example:
        >>> from farfield_papers import models
        >>> net = models.sagan("factorized", side=32, attention_at=16, num_classes=10, generator_channels=8)
        >>> images = net(torch.randn(2, 128), torch.tensor([3, 5]))
        >>> images.shape, net.discriminator(images, torch.tensor([3, 5])).shape
        (torch.Size([2, 3, 32, 32]), torch.Size([2]))
    """

    def __init__(
        self,
        model: str = "sagan",
        *,
        operator: str | Operator | None = None,
        side: int = 128,
        attention_at: int = 32,
        num_classes: int = 1000,
        noise_channels: int = 128,
        generator_channels: int = 64,
        discriminator_channels: int = 64,
        normalized: bool = True,
    ) -> None:
        super().__init__()
        self.config = bind_arguments(locals(), ("sagan",))
        check_operator(model, operator)
        _check_sides(model, side, attention_at)
        check_numbers(model, 0, num_classes=num_classes)
        channels = {"generator_channels": generator_channels, "discriminator_channels": discriminator_channels}
        check_numbers(model, noise_channels=noise_channels, **channels)
        self.noise_channels, self.num_classes = noise_channels, num_classes
        common = (operator, normalized, side, attention_at, num_classes)
        self.generator = Generator(*common, noise_channels, generator_channels)
        self.discriminator = Discriminator(*common, discriminator_channels)

    def forward(
        self, noise: Float[Tensor, "b z"], labels: Int[Tensor, " b"] | None = None
    ) -> Float[Tensor, "b 3 side side"]:
        """Return images of the generator, values between -1 and 1; without labels the classes are drawn at random."""
        return self.generator(noise, labels)

    def card_shape(self, side: int) -> tuple[int, ...]:
        """Return the shape of the noise whose MACs a model card counts; `side` is unused, as images have one size."""
        return (self.noise_channels,)


def sagan(
    operator: str | Operator | None = "softmax_pooled",
    *,
    side: int = 128,
    attention_at: int = 32,
    num_classes: int = 1000,
    noise_channels: int = 128,
    generator_channels: int = 64,
    discriminator_channels: int = 64,
    normalized: bool = True,
) -> SAGAN:
    """Build the two networks of SAGAN, with attention by any operator or without. The arguments are those of `SAGAN`.

    Reference: FA §3.4, Zhang et al. 2019.

    Example:
        >>> with torch.device("meta"):
        ...     net = sagan()
        >>> sum(parameter.numel() for parameter in net.generator.parameters())
        42078852
    """
    return SAGAN(**locals())


def _check_sides(model: str, side: int, attention_at: int) -> None:
    check_numbers(model, 4 * _SMALLEST, side=side)
    if side & (side - 1):
        raise ValueError(f"{model}: side must be a power of two from {4 * _SMALLEST}, got {side}.")
    allowed = [2 * _SMALLEST * 2**level for level in range(_count_halvings(side) - 1)]
    if attention_at not in allowed:
        sides = f"{', '.join(map(str, allowed))} for images of {side}, got {attention_at!r}."
        raise ValueError(f"{model}: attention_at must be the side of a grid inside both networks, {sides}")


def _build_attention(channels: int, operator: str | Operator | None, normalized: bool) -> nn.Module:
    return nn.Identity() if operator is None else GatedAttention(channels, operator, normalized)


def _count_halvings(side: int) -> int:
    # Until a side is the smallest: 5 times for 128.
    return (side // _SMALLEST).bit_length() - 1
