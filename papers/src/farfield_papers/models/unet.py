"""U-Nets for the restoration of images and volumes, with attention after the bottom block and each decoder block.

Letters as in the papers: f channels of the first level, d depth, the number of levels above the bottom.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from farfield.nn.initialization import DrawnByItself
from farfield.nn.spatial_dims import layers
from farfield.ops.table import Operator
from farfield_papers.models.choices import bind_arguments
from farfield_papers.models.storage import Stored
from farfield_papers.models.unet_parts import (
    Normalized,
    append_attention,
    build_care,
    build_residual,
    build_selection,
    check_stack,
    check_unet,
    draw_convolutions,
    find_reach,
)

# Added to a predicted scale, so that the loss of a probabilistic net stays bounded (CARE's value).
_SMALLEST_SCALE = 1e-3


class UNet(nn.Module, Stored, library_name="farfield", pipeline_tag="image-to-image"):
    """Restore a grid: `grid + head(decoder(bottom(encoder(grid))))`; each level has half the size of the one above.

    `unet_care` is the network of CARE: two convolutions with ReLU per block, max pooling, nearest-neighbour upsampling;
    996,769 parameters in 3-D at d = 2. `unet_residual` has residual blocks, strided and transposed convolutions and no
    biases; 2,140,032 parameters. There are no norms between the convolutions, so a position of the output depends
    only on the input within `halo` of it; with attention it depends on all positions. Attention starts as the identity:
    before training the network computes the same as without it.

    Args:
        model: `"unet_care"` or `"unet_residual"`.
        operator: Operator of the attention: a name of `ops.OPERATORS` or an `Operator`; None leaves attention out.
        spatial_dims: Number of spatial dims: 1 for signals, 2 for images, 3 for volumes.
        depth: d.
        first_channels: f; the channels double with each level.
        kernel: Size of the convolutions' kernels along each axis, odd.
        heads: Number of attention heads.
        in_channels: Channels of the grid and of the restored grid.
        probabilistic: Whether the mean and scale of a Laplace distribution are predicted for each value; the output
            then has twice the channels: first the means, then the scales.
        normalized: Whether the input of attention is normalized over the channels of each position, and its response
            multiplied by the standard deviation that the input was divided by. False is version 0.1, where the features
            were so small at first that attention had almost no effect; "unscaled" is version 0.2.0, which did not
            multiply, and where `factorized_gaussian` did not learn.

    Raises:
        LookupError: For an unknown model or operator.
        ShapeError: If heads do not divide the channels of a level with attention.
        ValueError: For a number out of range.

    Reference: SAN §4.5, Weigert et al. 2018.

    Example:
        >>> import torch
        >>> from farfield_papers.models.unet import UNet
        >>> net = UNet("unet_care", operator="siamese")
        >>> net(torch.randn(1, 1, 8, 16, 16)).shape, net.multiples, net.halo
        (torch.Size([1, 1, 8, 16, 16]), (4, 4, 4), 23)
    """

    _is_hf_initialized = DrawnByItself()

    def __init__(
        self,
        model: str = "unet_care",
        *,
        operator: str | Operator | None = None,
        spatial_dims: int = 3,
        depth: int = 2,
        first_channels: int = 32,
        kernel: int = 3,
        heads: int = 1,
        in_channels: int = 1,
        probabilistic: bool = False,
        normalized: Normalized = True,
    ) -> None:
        super().__init__()
        self.config = bind_arguments(locals(), ("unet_care", "unet_residual"))
        check_unet(model, operator, kernel, depth=depth, first_channels=first_channels, in_channels=in_channels)
        self.name, self.spatial_dims, self.depth = model, spatial_dims, depth
        self.in_channels, self.kernel = in_channels, kernel
        activated = model == "unet_care"
        build = build_care if activated else build_residual
        parts = build(spatial_dims, kernel, in_channels, [first_channels * 2**level for level in range(depth + 1)])
        self.stem, self.activation = parts.stem, parts.activation
        self.encoder, self.down, self.up = map(nn.ModuleList, (parts.encoder, parts.down, parts.up))
        options = (operator, heads, activated, normalized)
        attending = (append_attention(block, channels, *options) for block, channels in parts.attending)
        self.bottom = next(attending)
        self.decoder = nn.ModuleList(attending)
        point = layers(spatial_dims).convolution
        self.head = point(first_channels, in_channels, 1, bias=activated)
        self.scale = point(first_channels, in_channels, 1) if probabilistic else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the convolutions; attention draws itself."""
        draw_convolutions(self)

    def forward(self, grid: Float[Tensor, "b c *n"]) -> Float[Tensor, "b p *n"]:
        """Return the restored grid; for a probabilistic net means, then scales, concatenated along the channels."""
        self.check_grid(grid)
        skips, features = [], self.stem(grid)
        for encode, down in zip(self.encoder, self.down, strict=True):
            skips.append(encode(features))
            features = down(skips[-1])
        features = self.bottom(features)
        for up, decode in zip(self.up, self.decoder, strict=True):
            features = decode(torch.cat([up(features), skips.pop()], 1))
        features = self.activation(features)
        restored = grid + self.head(features)
        if self.scale is None:
            return restored
        return torch.cat([restored, F.softplus(self.scale(features)) + _SMALLEST_SCALE], 1)

    @property
    def multiples(self) -> tuple[int, ...]:
        """Numbers that the size of the grid must be multiples of: 2^d for each spatial dim."""
        return (2**self.depth,) * self.spatial_dims

    @property
    def halo(self) -> int:
        """Radius of the receptive field without attention, in positions; attention extends it to all positions."""
        # The reach depends on the place of a position in its pooling window of length 2^d: the maximum over the places.
        radius = self.kernel // 2
        care = self.name == "unet_care"
        spans = [
            (place, find_reach(place, place, self.depth, 2 * radius, None if care else radius))
            for place in range(2**self.depth)
        ]
        stem = 0 if care else radius
        return stem + max(max(place - low, high - place) for place, (low, high) in spans)

    def card_shape(self, side: int) -> tuple[int, ...]:
        """Return the shape of the grid whose MACs a model card counts: channels, then size."""
        return (self.in_channels, *(max(1, side // multiple) * multiple for multiple in self.multiples))

    def check_grid(self, grid: Tensor) -> None:
        """Refuse inputs that are not a floating-point batch of grids whose size can be halved d times."""
        check_stack(self.name, grid, self.in_channels, self.spatial_dims, self.multiples)


class ProjectionUNet(nn.Module, Stored, library_name="farfield", pipeline_tag="image-to-image"):
    """Restore an image from a stack: a weighted sum over its depth for each pixel, then a 2-D U-Net.

    `unet(Σ_z softmax_z(select(stack))_z · stack_z)`

    `select`, a small network with 14,329 parameters, scores all positions of the stack. The softmax of the scores over
    the depth weights the depths that each pixel is taken from.

    Args:
        model: `"unet_projection"`.
        operator: Operator of the U-Net's attention: a name of `ops.OPERATORS` or an `Operator`; None leaves it out.
        depth: Number of levels of the U-Net above its bottom.
        first_channels: Channels of its first level.
        kernel: Size of its kernels along each axis, odd.
        heads: Number of attention heads.
        probabilistic: See `UNet`.
        normalized: See `UNet`.

    Raises:
        LookupError: For an unknown model or operator.
        ShapeError: If heads do not divide the channels of a level with attention.
        ValueError: For a number out of range.

    Reference: SAN §4.5, Weigert et al. 2018.

    Example:
        >>> import torch
        >>> from farfield_papers.models.unet import ProjectionUNet
        >>> ProjectionUNet()(torch.randn(1, 1, 5, 16, 32)).shape
        torch.Size([1, 1, 16, 32])
    """

    # Levels and channels of the selection network.
    LEVELS, CHANNELS = 4, 8

    _is_hf_initialized = DrawnByItself()

    def __init__(
        self,
        model: str = "unet_projection",
        *,
        operator: str | Operator | None = None,
        depth: int = 2,
        first_channels: int = 32,
        kernel: int = 5,
        heads: int = 1,
        probabilistic: bool = False,
        normalized: Normalized = True,
    ) -> None:
        super().__init__()
        self.config = bind_arguments(locals(), ("unet_projection",))
        check_unet(model, operator, kernel, depth=depth, first_channels=first_channels)
        self.unet = UNet(
            operator=operator,
            spatial_dims=2,
            depth=depth,
            first_channels=first_channels,
            kernel=kernel,
            heads=heads,
            probabilistic=probabilistic,
            normalized=normalized,
        )
        self.multiples = (1, *[max(2**self.LEVELS, self.unet.multiples[0])] * 2)
        self.select = build_selection(self.LEVELS, self.CHANNELS)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the convolutions that weigh the depth; the U-Net draws itself."""
        draw_convolutions(self.select)

    def forward(self, stack: Float[Tensor, "b 1 z y x"]) -> Float[Tensor, "b p y x"]:
        """Return the restored image; for a probabilistic net means, then scales, concatenated along the channels."""
        return self.unet(self.project(stack))

    def project(self, stack: Float[Tensor, "b 1 z y x"]) -> Float[Tensor, "b 1 y x"]:
        """Return the weighted sum of the stack over its depth, which the U-Net restores."""
        check_stack("unet_projection", stack, 1, 3, self.multiples)
        return (self.select(stack).softmax(2) * stack).sum(2)

    def card_shape(self, side: int) -> tuple[int, ...]:
        """Return the shape of the stack whose MACs a model card counts: channels, depth, height, width."""
        side = max(1, side // self.multiples[1]) * self.multiples[1]
        return 1, 16, side, side


def unet_care(
    operator: str | Operator | None = None,
    *,
    spatial_dims: int = 3,
    depth: int = 2,
    first_channels: int = 32,
    kernel: int = 3,
    heads: int = 1,
    in_channels: int = 1,
    probabilistic: bool = False,
) -> UNet:
    """Build the U-Net of CARE, with attention by any operator or without. The arguments are those of `UNet`.

    Example:
        >>> from farfield_papers import models
        >>> sum(weight.numel() for weight in models.unet_care().parameters())
        996769
    """
    return UNet("unet_care", **locals())


def unet_residual(
    operator: str | Operator | None = None,
    *,
    spatial_dims: int = 3,
    depth: int = 2,
    first_channels: int = 32,
    kernel: int = 3,
    heads: int = 1,
    in_channels: int = 1,
    probabilistic: bool = False,
) -> UNet:
    """Build the residual U-Net, with attention by any operator or without. The arguments are those of `UNet`.

    Example:
        >>> from farfield_papers import models
        >>> sum(weight.numel() for weight in models.unet_residual().parameters())
        2140032
    """
    return UNet("unet_residual", **locals())


def unet_projection(
    operator: str | Operator | None = None,
    *,
    depth: int = 2,
    first_channels: int = 32,
    kernel: int = 5,
    heads: int = 1,
    probabilistic: bool = False,
) -> ProjectionUNet:
    """Build the network that projects a stack to an image and restores it. The arguments are those of `ProjectionUNet`.

    Example:
        >>> from farfield_papers import models
        >>> sum(weight.numel() for weight in models.unet_projection().parameters())
        937306
    """
    return ProjectionUNet(**locals())
