"""PSMNet: the disparity of every pixel of a stereo pair, with attention by any operator after the last feature stage.

Letters: D number of disparities, which are 0 to D - 1 pixels; h and w height and width of the grids of features, a
quarter of those of the images; i disparity in positions of these grids.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from farfield._checks import shape_error
from farfield._refusals import put_name
from farfield.nn.attention import GridAttention
from farfield.nn.initialization import DrawnByItself
from farfield.nn.spatial_dims import layers
from farfield.ops.table import Operator
from farfield_papers.models.choices import bind_arguments, check_numbers, find_operator
from farfield_papers.models.compact import check_image
from farfield_papers.models.storage import Stored

# Height and width of the windows of spatial pyramid pooling, in the order in which its branches are concatenated.
_POOLS = (8, 16, 32, 64)
# Of the four stages: channels in units of those of the first, number of blocks, first stride, dilation.
_STAGES = ((1, 3, 1, 1), (2, 16, 2, 1), (4, 3, 1, 1), (4, 3, 1, 2))
# Strides of the grids of features and of the smallest grids in the hourglasses, relative to the images.
_FEATURE_STRIDE, _WHOLE_STRIDE = 4, 16


class PSMNet(nn.Module, Stored, library_name="farfield", pipeline_tag="depth-estimation"):
    """Predict the disparity of each left pixel: how many pixels further left the right image shows the same point.

    `disparity = Σ_d d · softmax_d(enlarge(classify(convolve_3d(volume))))`, d = 0 … D - 1,
    `volume[:, :, i, y, x] = (left features at (y, x), right features at (y, x - i))`, 0 where x < i

    Both images pass through one network of 2-D convolutions with pooling at four scales, to a quarter of height and
    width. A network of 3-D convolutions over disparity, height and width compares their features: three hourglasses
    that share skips, each with its own output (`"psmnet_stacked"`), or four residual blocks (`"psmnet_basic"`).
    Attention, if there is any, follows the last stage, `layer4`, so that pooling and comparison both use its response;
    it starts as the identity.

    All interpolation has half-pixel centres (`align_corners=False`). In training mode the network returns the
    disparities of all outputs, the last of which are its prediction; in eval mode it returns the last alone.

    Args:
        model: `"psmnet_stacked"` or `"psmnet_basic"`.
        operator: Operator of the attention: a name of `ops.OPERATORS` or an `Operator`; None leaves attention out.
        max_disparity: D, a multiple of 16.
        inner_channels: Channels of the queries and keys: the size of the basis.
        value_channels: Channels of the values; those of `layer4` by default.
        heads: Number of attention heads.
        first_channels: Channels of the first stage; those of the others are multiples of it.
        scale: Scale of the products under a softmax, see `GridAttention`: by default 1/√d; in farfield 0.1 it was 1.0.

    Raises:
        LookupError: For an unknown model or operator.
        ShapeError: If heads do not divide the channels of queries or values.
        ValueError: For a number out of range.

    Cost:
        "psmnet_stacked" without attention has 5,224,768 parameters, and 185 billion MACs at 256x512 pixels and D = 192.

    Reference: FA §4.2; Chang and Chen 2018.

    Example:
        >>> from farfield_papers import models
        >>> net = models.psmnet_basic("factorized_gaussian", max_disparity=32, first_channels=8).eval()
        >>> net(torch.randn(1, 3, 32, 48), torch.randn(1, 3, 32, 48)).shape
        torch.Size([1, 1, 32, 48])
    """

    # The number of input images, for the model card; the numbers that height and width must be multiples of.
    images, multiples = 2, (_WHOLE_STRIDE, _WHOLE_STRIDE)

    _is_hf_initialized = DrawnByItself()

    def __init__(
        self,
        model: str = "psmnet_stacked",
        *,
        operator: str | Operator | None = None,
        max_disparity: int = 192,
        inner_channels: int = 64,
        value_channels: int | None = None,
        heads: int = 1,
        first_channels: int = 32,
        scale: float | None = None,
    ) -> None:
        super().__init__()
        self.config = bind_arguments(locals(), ("psmnet_stacked", "psmnet_basic"))
        check_numbers(model, first_channels=first_channels)
        if not isinstance(max_disparity, int) or max_disparity < _WHOLE_STRIDE or max_disparity % _WHOLE_STRIDE:
            raise ValueError(f"{model}: max_disparity must be a multiple of {_WHOLE_STRIDE}, got {max_disparity!r}.")
        self.name, self.max_disparity = model, max_disparity
        self.features = Features(first_channels)
        self.compare: nn.Module = (Hourglasses if model == "psmnet_stacked" else ResidualBlocks)(first_channels)
        self.reset_parameters()
        if operator is not None:
            options: dict[str, Any] = {"inner_channels": inner_channels, "value_channels": value_channels}
            options["project"] = find_operator(model, operator).projections("qkvo")
            # Residual with its output projection at zero: it starts as the identity.
            attention = GridAttention(4 * first_channels, operator, heads=heads, scale=scale, residual=True, **options)
            self.features.attention = attention

    def reset_parameters(self) -> None:
        """Draw convolutions from N(0, 2 / (kernel positions · output channels)); attention draws itself."""
        for module in self.modules():
            # Transposed convolutions keep torch's values.
            if isinstance(module, _ConvNd) and not isinstance(module, _ConvTransposeNd):
                nn.init.normal_(module.weight, std=math.sqrt(2 / (math.prod(module.kernel_size) * module.out_channels)))

    def card_shape(self, side: int) -> tuple[int, ...]:
        """Return the shape of each image whose MACs a model card counts: channels, height, width."""
        return (3, *(max(1, side // multiple) * multiple for multiple in self.multiples))

    def forward(self, left: Float[Tensor, "b 3 y x"], right: Float[Tensor, "b 3 y x"]) -> Float[Tensor, "b k y x"]:
        """Return disparities of the left image in pixels, one channel per output; in eval mode only the last output.

        Raises:
            ShapeError: If the images are not two batches of one shape, with 3 channels and a size in multiples of 16.
            TypeError: If they are not floating point.
        """
        self.check_pair(left, right)
        # One after the other, so that batch norm has separate statistics for left and right images.
        volume = cost_volume(self.features(left), self.features(right), self.max_disparity // _FEATURE_STRIDE)
        costs = self.compare(volume)
        if not self.training:
            costs = costs[-1:]
        return torch.cat([regress(cost, self.max_disparity, left.shape[2:]) for cost in costs], 1)

    def check_pair(self, left: Tensor, right: Tensor) -> None:
        """Refuse inputs that are not two batches of images of one size, a multiple of the strides."""
        check_image(self.name, left, 3)
        check_image(self.name, right, 3)
        if left.shape != right.shape:
            fix = "pass both images of each pair, rectified, at one size."
            raise put_name(self.name, shape_error("left and right must have one shape.", fix, left=left, right=right))
        if any(side % _WHOLE_STRIDE for side in left.shape[2:]):
            top, end = (-side % _WHOLE_STRIDE for side in left.shape[2:])
            fix = f"pad both at the top and on the right, torch.nn.functional.pad(left, (0, {end}, {top}, 0))."
            problem = f"height and width must be multiples of {_WHOLE_STRIDE}."
            raise put_name(self.name, shape_error(problem, fix, left=left, right=right))


def psmnet_stacked(
    operator: str | Operator | None = None,
    *,
    max_disparity: int = 192,
    inner_channels: int = 64,
    value_channels: int | None = None,
    heads: int = 1,
    first_channels: int = 32,
) -> PSMNet:
    """Build PSMNet with three stacked hourglasses and attention by any operator.

    The arguments are those of `PSMNet`.

    Reference: FA §4.2, Table 6.

    Example:
        >>> with torch.device("meta"):
        ...     net = psmnet_stacked()
        >>> sum(parameter.numel() for parameter in net.parameters())
        5224768
    """
    return PSMNet("psmnet_stacked", **locals())


def psmnet_basic(
    operator: str | Operator | None = None,
    *,
    max_disparity: int = 192,
    inner_channels: int = 64,
    value_channels: int | None = None,
    heads: int = 1,
    first_channels: int = 32,
) -> PSMNet:
    """Build PSMNet with residual blocks in place of hourglasses; the arguments are those of `PSMNet`.

    Example:
        >>> with torch.device("meta"):
        ...     net = psmnet_basic()
        >>> sum(parameter.numel() for parameter in net.parameters())
        3672896
    """
    return PSMNet("psmnet_basic", **locals())


class Features(nn.Module):
    """Features of an image at a quarter of its height and width: four stages, optional attention, pyramid pooling."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            *_conv_norm(3, channels, stride=2),
            *_conv_norm(channels, channels),
            *_conv_norm(channels, channels),
        )
        before, stages = channels, []
        for factor, blocks, stride, dilation in _STAGES:
            after = factor * channels
            stage = [_BasicBlock(before, after, stride, dilation)]
            stage += [_BasicBlock(after, after, 1, dilation) for _ in range(blocks - 1)]
            stages.append(nn.Sequential(*stage))
            before = after
        self.layer1, self.layer2, self.layer3, self.layer4 = stages
        self.attention: nn.Module = nn.Identity()
        self.pools = nn.ModuleList(nn.Sequential(*_conv_norm(before, channels, kernel=1)) for _ in _POOLS)
        # Channels of the concatenation of layer2, layer4 and the pooled branches.
        together = (_STAGES[1][0] + _STAGES[3][0] + len(_POOLS)) * channels
        self.last = nn.Sequential(*_conv_norm(together, 4 * channels), nn.Conv2d(4 * channels, channels, 1, bias=False))

    def forward(self, image: Float[Tensor, "b 3 y x"]) -> Float[Tensor, "b c h w"]:
        """Return the features."""
        early = self.layer2(self.layer1(self.stem(image)))
        late = self.attention(self.layer4(self.layer3(early)))
        size = late.shape[2:]
        pooled = []
        for side, pool in zip(_POOLS, self.pools, strict=True):
            # A window is at most as large as the grid.
            branch = pool(F.avg_pool2d(late, [min(side, own) for own in size]))
            pooled.append(F.interpolate(branch, size, mode="bilinear", align_corners=False))
        return self.last(torch.cat([early, late, *pooled], 1))


class Hourglasses(nn.Module):
    """Score disparities from the volume, of `2 * channels`, by three stacked hourglasses; their scores add up."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.enter = nn.Sequential(*_conv_norm_3d(2 * channels, channels), *_conv_norm_3d(channels, channels))
        self.residual = _residual(channels)
        self.hourglasses = nn.ModuleList(_Hourglass(channels) for _ in range(3))
        self.classifiers = nn.ModuleList(_classifier(channels) for _ in range(3))

    def forward(self, volume: Float[Tensor, "b c i h w"]) -> list[Float[Tensor, "b 1 i h w"]]:
        """Return the scores of the volume's disparities, one grid per hourglass."""
        entered = self.enter(volume)
        start = entered + self.residual(entered)
        grid, way_down, way_up = start, None, None
        scores: list[Tensor] = []
        for hourglass, classify in zip(self.hourglasses, self.classifiers, strict=True):
            out, down, way_up = hourglass(grid, way_down, way_up)
            # On the way up, the second and third hourglass add the first one's grid of the way down.
            way_down = down if way_down is None else way_down
            grid = start + out
            score = classify(grid)
            scores.append(score + scores[-1] if scores else score)
        return scores


class ResidualBlocks(nn.Module):
    """Score disparities from the volume, of `2 * channels`, by four residual blocks: the "basic" network."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.enter = nn.Sequential(*_conv_norm_3d(2 * channels, channels), *_conv_norm_3d(channels, channels))
        self.blocks = nn.ModuleList(_residual(channels) for _ in range(4))
        self.classify = _classifier(channels)

    def forward(self, volume: Float[Tensor, "b c i h w"]) -> list[Float[Tensor, "b 1 i h w"]]:
        """Return the scores of the volume's disparities in a list of one grid, as `Hourglasses` does."""
        grid = self.enter(volume)
        for block in self.blocks:
            grid = grid + block(grid)
        return [self.classify(grid)]


def cost_volume(
    left: Float[Tensor, "b c h w"], right: Float[Tensor, "b c h w"], disparities: int
) -> Float[Tensor, "b e i h w"]:
    """Concatenate, for every disparity i, the left features and the right features i positions further left."""
    batch, channels, height, width = left.shape
    # Positions that the right image does not show at disparity i, x < i, stay 0 in all channels.
    volume = left.new_zeros(batch, 2 * channels, disparities, height, width)
    for shift in range(min(disparities, width)):
        volume[:, :channels, shift, :, shift:] = left[..., shift:]
        volume[:, channels:, shift, :, shift:] = right[..., : width - shift]
    return volume


def regress(scores: Float[Tensor, "b 1 i h w"], disparities: int, size: tuple[int, ...]) -> Float[Tensor, "b 1 y x"]:
    """Interpolate scores to all disparities and pixels, and return each pixel's mean disparity under their softmax."""
    # In float32 or wider, and without a matrix product, which autocast would round: bfloat16 cannot represent 129.5.
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    enlarged = F.interpolate(scores, (disparities, *size), mode="trilinear", align_corners=False)[:, 0]
    values = torch.arange(disparities, dtype=scores.dtype, device=scores.device)
    return (enlarged.softmax(1) * values[:, None, None]).sum(1, keepdim=True)


class _BasicBlock(nn.Module):
    """`shortcut(x) + norm(convolve(relu(norm(convolve(x)))))`: a residual block without a ReLU after the sum."""

    def __init__(self, before: int, after: int, stride: int, dilation: int) -> None:
        super().__init__()
        # The first convolution has the stride, both have the dilation.
        self.first = nn.Sequential(*_conv_norm(before, after, stride=stride, dilation=dilation))
        self.second = nn.Sequential(*_conv_norm(after, after, dilation=dilation, relu=False))
        same = before == after and stride == 1
        self.shortcut = (
            nn.Identity() if same else nn.Sequential(*_conv_norm(before, after, kernel=1, stride=stride, relu=False))
        )

    def forward(self, grid: Float[Tensor, "b c h w"]) -> Float[Tensor, "b d y x"]:
        """Return the sum of shortcut and convolutions."""
        return self.shortcut(grid) + self.second(self.first(grid))


class _Hourglass(nn.Module):
    """Halve the size twice and double it twice, with twice the channels; grids of earlier hourglasses are added."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        inside = 2 * channels
        self.down = nn.Sequential(
            *_conv_norm_3d(channels, inside, stride=2), *_conv_norm_3d(inside, inside, relu=False)
        )
        self.bottom = nn.Sequential(*_conv_norm_3d(inside, inside, stride=2), *_conv_norm_3d(inside, inside))
        self.up = nn.Sequential(*_transposed_norm(inside, inside))
        self.out = nn.Sequential(*_transposed_norm(inside, channels))

    def forward(self, grid: Tensor, way_down: Tensor | None, way_up: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return the result, and the grids at half the size on the way down and on the way up.

        Of `(b, c, i, h, w)`, i is the disparity. `way_down` is the first hourglass's grid on the way down, which is
        added on the way up; `way_up` is the previous one's on the way up, which is added on the way down.
        """
        down = self.down(grid)
        down = F.relu(down if way_up is None else down + way_up)
        up = F.relu(self.up(self.bottom(down)) + (down if way_down is None else way_down))
        return self.out(up), down, up


def _conv_norm(
    before: int,
    after: int,
    *,
    spatial_dims: int = 2,
    kernel: int = 3,
    stride: int = 1,
    dilation: int = 1,
    relu: bool = True,
) -> list[nn.Module]:
    """Build a convolution without bias, its batch norm and, by default, a ReLU."""
    kinds, padding = layers(spatial_dims), dilation * (kernel // 2)
    convolution = kinds.convolution(before, after, kernel, stride, padding, dilation, bias=False)
    return [convolution, kinds.batch_norm(after), *([nn.ReLU(inplace=True)] if relu else [])]


_conv_norm_3d = partial(_conv_norm, spatial_dims=3)


def _transposed_norm(before: int, after: int) -> list[nn.Module]:
    # It doubles the size.
    transposed = nn.ConvTranspose3d(before, after, 3, stride=2, padding=1, output_padding=1, bias=False)
    return [transposed, nn.BatchNorm3d(after)]


def _residual(channels: int) -> nn.Sequential:
    """Build two 3-D convolutions with their batch norms, whose result is added to their input."""
    return nn.Sequential(*_conv_norm_3d(channels, channels), *_conv_norm_3d(channels, channels, relu=False))


def _classifier(channels: int) -> nn.Sequential:
    """Build the layers that compute one score for each position of a volume."""
    return nn.Sequential(*_conv_norm_3d(channels, channels), nn.Conv3d(channels, 1, 3, padding=1, bias=False))
