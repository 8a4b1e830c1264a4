"""SAGAN: a generator of images and its discriminator, residual blocks under spectral norm, attention in one place."""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

from farfield._checks import shape_error, unknown
from farfield.models.compact import check_whole, name_of
from farfield.models.storage import Stored
from farfield.nn.attention import GridAttention
from farfield.nn.norm import norm_of
from farfield.ops.table import OPERATORS, Operator

# The side of the first grid and of the last: the generator doubles it until it is the image's.
SMALLEST = 4


class GatedAttention(nn.Module):
    """Attention behind a gate that is learned and closed at first: `grid + gate · attention(grid)`.

    Queries and keys have an eighth of the channels, values half; all maps are under spectral norm and without biases.
    `softmax_pooled` pools positions and then maps them, where the published network maps first. The bound of spectral norm
    keeps small what other operators make of products of such maps: without a norm of their coefficients some begin at
    less than a hundredth of the grid.

    Args:
        channels: Of the grid.
        operator: A name of `ops.OPERATORS` or an `Operator`.
        normalized: Whether the Kronecker operators and `factorized_gaussian` have a norm of their coefficients.

    Reference: Zhang et al. 2019.

    Example:
        >>> grid = torch.randn(2, 64, 8, 8)
        >>> torch.equal(GatedAttention(64, "softmax_pooled")(grid), grid)
        True
    """

    def __init__(self, channels: int, operator: str | Operator, normalized: bool = True) -> None:
        super().__init__()
        row = OPERATORS[operator] if isinstance(operator, str) else operator
        options: dict[str, Any] = {"inner_channels": max(1, channels // 8), "value_channels": max(1, channels // 2)}
        options |= {"project": "qkvo" if row.reads_keys else "qvo", "bias": False, "scale": 1.0}
        options |= {"coefficient_norm": norm_of(row) if normalized else False}
        self.attention = GridAttention(channels, operator, **options)
        for linear in list(self.attention.children()):
            if isinstance(linear, nn.Linear):
                spectral_norm(linear)
        self.gate = nn.Parameter(torch.zeros(()))

    def forward(self, grid: Float[Tensor, "b c h w"]) -> Float[Tensor, "b c h w"]:
        """Return the grid with what its positions have gathered from all others."""
        return grid + self.gate * self.attention(grid)


class ConditionalNorm(nn.Module):
    """Batch norm with a scale and a shift for each class; without classes, batch norm.

    Args:
        channels: Of the grid.
        num_classes: Classes; 0 for none.
    """

    def __init__(self, channels: int, num_classes: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(channels, affine=num_classes == 0)
        self.scale = self.shift = None
        if num_classes:
            self.scale, self.shift = nn.Embedding(num_classes, channels), nn.Embedding(num_classes, channels)
            nn.init.ones_(self.scale.weight)
            nn.init.zeros_(self.shift.weight)

    def forward(self, grid: Float[Tensor, "b c h w"], labels: Int[Tensor, " b"] | None) -> Float[Tensor, "b c h w"]:
        """Return the normed grid, each sample scaled and shifted as its class says."""
        grid = self.norm(grid)
        if self.scale is None or self.shift is None:
            return grid
        return grid * self.scale(labels)[..., None, None] + self.shift(labels)[..., None, None]


class GeneratorBlock(nn.Module):
    """Two convolutions of 3x3 after norm and ReLU, on doubled sides, plus a 1x1 map of the input, doubled too."""

    def __init__(self, channels: int, out_channels: int, num_classes: int) -> None:
        super().__init__()
        self.first_norm = ConditionalNorm(channels, num_classes)
        self.first = bounded(nn.Conv2d(channels, out_channels, 3, padding=1))
        self.second_norm = ConditionalNorm(out_channels, num_classes)
        self.second = bounded(nn.Conv2d(out_channels, out_channels, 3, padding=1))
        self.shortcut = bounded(nn.Conv2d(channels, out_channels, 1))

    def forward(self, grid: Float[Tensor, "b c h w"], labels: Int[Tensor, " b"] | None) -> Float[Tensor, "b d y x"]:
        """Return the block's grid, of twice the sides."""
        out = self.first(doubled(F.relu(self.first_norm(grid, labels))))
        out = self.second(F.relu(self.second_norm(out, labels)))
        # A 1x1 convolution of repeated positions is its repeated result.
        return doubled(self.shortcut(grid)) + out


class DiscriminatorBlock(nn.Module):
    """Two convolutions of 3x3 after ReLU plus a 1x1 map of the input, both on halved sides if `halve`.

    Args:
        channels: Of the grid.
        out_channels: Of the block's grid.
        activate: Whether the input goes through ReLU; that of the first block is an image.
        halve: Whether the sides are halved, by averages.
    """

    def __init__(self, channels: int, out_channels: int, *, activate: bool = True, halve: bool = True) -> None:
        super().__init__()
        self.activate, self.halve = activate, halve
        self.first = bounded(nn.Conv2d(channels, out_channels, 3, padding=1))
        self.second = bounded(nn.Conv2d(out_channels, out_channels, 3, padding=1))
        mapped = halve or channels != out_channels
        self.shortcut = bounded(nn.Conv2d(channels, out_channels, 1)) if mapped else nn.Identity()

    def forward(self, grid: Float[Tensor, "b c h w"]) -> Float[Tensor, "b d y x"]:
        """Return the block's grid."""
        out = self.second(F.relu(self.first(F.relu(grid) if self.activate else grid)))
        if not self.halve:
            return self.shortcut(grid) + out
        # A 1x1 convolution of averages is the average of its results.
        return self.shortcut(F.avg_pool2d(grid, 2)) + F.avg_pool2d(out, 2)


class Generator(nn.Module):
    """Draw images from noise: a linear map to 4x4 positions, then blocks that double the sides and halve the channels.

    Args:
        operator: Of the attention; None leaves it out.
        normalized: See `GatedAttention`.
        side: Of the images.
        attention_at: Side of the grid that attends.
        num_classes: Classes; 0 for none.
        noise_channels: Numbers of noise an image.
        channels: Of the last block.
    """

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
        widths = [channels * 2**level for level in reversed(range(halvings(side)))]
        self.linear = bounded(nn.Linear(noise_channels, widths[0] * SMALLEST**2))
        pairs = itertools.pairwise([widths[0], *widths])
        self.blocks = nn.ModuleList(GeneratorBlock(before, after, num_classes) for before, after in pairs)
        self.attending = halvings(attention_at) - 1
        self.attention = attend(widths[self.attending], operator, normalized)
        self.norm = nn.BatchNorm2d(channels)
        self.last = bounded(nn.Conv2d(channels, 3, 3, padding=1))

    def forward(
        self, noise: Float[Tensor, "b z"], labels: Int[Tensor, " b"] | None = None
    ) -> Float[Tensor, "b 3 side side"]:
        """Return images with pixels between -1 and 1; without labels, of classes drawn at random."""
        if noise.dim() != 2 or noise.shape[1] != self.noise_channels:
            fix = f"torch.randn(batch, {self.noise_channels})."
            raise shape_error("sagan", f"noise must be (batch, {self.noise_channels}).", fix, noise=noise)
        if labels is None and self.num_classes:
            labels = torch.randint(self.num_classes, noise.shape[:1], device=noise.device)
        grid = self.linear(noise).unflatten(1, (-1, SMALLEST, SMALLEST))
        for place, block in enumerate(self.blocks):
            grid = block(grid, labels)
            if place == self.attending:
                grid = self.attention(grid)
        return torch.tanh(self.last(F.relu(self.norm(grid))))


class Discriminator(nn.Module):
    """Score images, high for real ones: blocks that halve the sides and double the channels, then a sum over positions.

    With classes the score has a second term, the product of the features and a vector of the class ("projection").

    Args:
        operator: Of the attention; None leaves it out.
        normalized: See `GatedAttention`.
        side: Of the images.
        attention_at: Side of the grid that attends.
        num_classes: Classes; 0 for none.
        channels: Of the first block.
    """

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
        widths = [channels * 2**level for level in range(halvings(side))]
        self.blocks = nn.ModuleList([DiscriminatorBlock(3, channels, activate=False)])
        self.blocks.extend(DiscriminatorBlock(before, after) for before, after in itertools.pairwise(widths))
        self.blocks.append(DiscriminatorBlock(widths[-1], widths[-1], halve=False))
        self.attending = halvings(side) - halvings(attention_at) - 1
        self.attention = attend(widths[self.attending], operator, normalized)
        self.score = bounded(nn.Linear(widths[-1], 1))
        self.classes = spectral_norm(nn.Embedding(num_classes, widths[-1])) if num_classes else None

    def forward(
        self, images: Float[Tensor, "b 3 side side"], labels: Int[Tensor, " b"] | None = None
    ) -> Float[Tensor, " b"]:
        """Return one score an image, as one of its class where there are classes."""
        if images.dim() != 4 or images.shape[1:] != (3, self.side, self.side):
            problem = f"images must be (batch, 3, {self.side}, {self.side})."
            fix = f"images of {self.side} pixels (--data.image_size {self.side}), or a network of another side."
            raise shape_error("sagan", problem, fix, images=images)
        grid = images
        for place, block in enumerate(self.blocks):
            grid = block(grid)
            if place == self.attending:
                grid = self.attention(grid)
        features = F.relu(grid).sum((2, 3))
        score = self.score(features)[:, 0]
        return score if self.classes is None else score + (features * self.classes(labels)).sum(1)


class SAGAN(Stored, nn.Module, library_name="farfield", pipeline_tag="unconditional-image-generation"):
    """Generator and discriminator of the self-attention GAN, for images of 16, 32, 64, 128 … pixels a side.

    At 128 pixels and 64 channels the published networks: 1024, 1024, 512, 256, 128, 64 channels from 4x4 positions up, 64,
    128, 256, 512, 1024, 1024 down again. Each halving of the images takes the widest of them away. The published code
    attends at a side of 32; attention with the grid's size as its cost can be had at 64, where the discriminator has 64
    channels, FA's example.

    Args:
        model: `"sagan"`.
        operator: Of the attention in both: a name of `ops.OPERATORS` or an `Operator`; None leaves attention out.
        side: Of the images, a power of two from 16.
        attention_at: Side of the grid that attends, from 8 to half the images'.
        num_classes: Classes; 0 for a network without.
        noise_channels: Numbers of noise an image.
        generator_channels: Of the generator's last block.
        discriminator_channels: Of the discriminator's first block.
        normalized: Whether attention by the Kronecker operators and `factorized_gaussian` has a norm of its
            coefficients. In version 0.1 it had none, and began too small to be noticed.

    Raises:
        LookupError: For an unknown operator.
        ValueError: For a number out of range.

    Reference: FA §3.4, Zhang et al. 2019.

    Example:
        >>> from farfield import models
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
        check_arguments(model, operator, side, attention_at)
        check_whole(model, "num_classes", num_classes, 0)
        sizes = {"noise_channels": noise_channels, "generator_channels": generator_channels}
        sizes |= {"discriminator_channels": discriminator_channels}
        for name, number in sizes.items():
            check_whole(model, name, number, 1)
        self.noise_channels, self.num_classes = noise_channels, num_classes
        # `None` in a saved configuration means an operator without a name.
        self.config: dict[str, Any] = {"model": model}
        self.config |= {} if operator is None else {"operator": name_of(operator)}
        self.config |= {"side": side, "attention_at": attention_at, "num_classes": num_classes, **sizes}
        self.config["normalized"] = normalized
        common = (operator, normalized, side, attention_at, num_classes)
        self.generator = Generator(*common, noise_channels, generator_channels)
        self.discriminator = Discriminator(*common, discriminator_channels)

    def forward(
        self, noise: Float[Tensor, "b z"], labels: Int[Tensor, " b"] | None = None
    ) -> Float[Tensor, "b 3 side side"]:
        """Return the generator's images, pixels between -1 and 1; without labels, of classes drawn at random."""
        return self.generator(noise, labels)

    def card_shape(self, side: int) -> tuple[int, ...]:
        """The noise whose MACs a model card counts; the side of the images is the network's own."""
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
    """Build SAGAN's two networks, their attention with any operator, or without. The arguments are `SAGAN`'s.

    Reference: FA §3.4, Zhang et al. 2019.

    Example:
        >>> with torch.device("meta"):
        ...     net = sagan()
        >>> sum(parameter.numel() for parameter in net.generator.parameters())
        42078852
    """
    return SAGAN(
        operator=operator,
        side=side,
        attention_at=attention_at,
        num_classes=num_classes,
        noise_channels=noise_channels,
        generator_channels=generator_channels,
        discriminator_channels=discriminator_channels,
        normalized=normalized,
    )


def check_arguments(model: str, operator: str | Operator | None, side: int, attention_at: int) -> None:
    """Refuse a model, an operator or sides that there are not."""
    if model != "sagan":
        raise unknown("models.SAGAN", "model", model, ["sagan"])
    if isinstance(operator, str) and operator not in OPERATORS:
        raise unknown(model, "operator", operator, OPERATORS)
    check_whole(model, "side", side, 4 * SMALLEST)
    if side & (side - 1):
        raise ValueError(f"{model}: side must be a power of two from {4 * SMALLEST}, got {side}.")
    size = [2 * SMALLEST * 2**level for level in range(halvings(side) - 1)]
    if attention_at not in size:
        raise ValueError(
            f"{model}: attention_at must be the side of a grid inside both networks, "
            f"{', '.join(map(str, size))} for images of {side}, got {attention_at!r}."
        )


def attend(channels: int, operator: str | Operator | None, normalized: bool) -> nn.Module:
    """Attention behind its gate, or nothing."""
    return nn.Identity() if operator is None else GatedAttention(channels, operator, normalized)


def bounded(layer: nn.Conv2d | nn.Linear) -> nn.Module:
    """The layer with its bias at 0 and its weight divided by its largest singular value, which an iteration follows."""
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
    return spectral_norm(layer)


def doubled(grid: Tensor) -> Tensor:
    """Each position as four."""
    return F.interpolate(grid, scale_factor=2, mode="nearest")


def halvings(side: int) -> int:
    """How often a side is halved down to the smallest: 5 for 128."""
    return (side // SMALLEST).bit_length() - 1
