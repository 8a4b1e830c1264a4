"""Networks drawn at random from many kinds of layers, for the tests of streaming."""

from __future__ import annotations

import copy
import math
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from farfield.streaming.check import without_fast_attention
from farfield.streaming.graph import RecordingError, run_whole
from farfield.streaming.labels import GraphError
from farfield.streaming.rules.rule import RuleError
from helpers.recorded import run_in_tiles

CONVOLUTIONS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
TRANSPOSED = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}
LINEAR = {1: "linear", 2: "bilinear", 3: "trilinear"}
# The number of values above which a drawn network grows no more.
LARGEST = 40_000

# The rounding of one operation of float32, relative to the largest number.
ONE_ROUNDING = 4e-7

# (random numbers, shape of the grid) -> a layer
Draw = Callable[[random.Random, Sequence[int]], nn.Module]
KINDS: dict[str, Draw] = {}


class Layer(nn.Module):
    """A function of a grid and of modules.

    Args:
        function: `(grid, *modules)` -> a grid.
        modules: The modules.
    """

    def __init__(self, function: Callable[..., Tensor], *modules: nn.Module) -> None:
        super().__init__()
        self.function, self.parts = function, nn.ModuleList(modules)

    def forward(self, grid: Tensor) -> Tensor:
        return self.function(grid, *self.parts)


def kind(draw: Draw) -> Draw:
    """Register a kind of layer under the name of the function that draws it."""
    KINDS[draw.__name__] = draw
    return draw


def axes(grid: Tensor) -> tuple[int, ...]:
    """The spatial dimensions of a grid."""
    return tuple(range(2, grid.dim()))


def narrowest(shape: Sequence[int]) -> int:
    """The shortest side."""
    return min(shape[2:])


def last(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return the function on a grid whose channels are last."""
    return lambda grid, *modules: function(grid.movedim(1, -1), *modules).movedim(-1, 1)


def flat(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return the function on positions `(batch, positions, channels)`."""
    return lambda grid, *modules: function(grid.flatten(2).mT, *modules).mT.reshape(len(grid), -1, *grid.shape[2:])


# ---- convolutions ----------------------------------------------------------------------------------------------------
@kind
def convolution(draw: random.Random, shape: Sequence[int]) -> nn.Module:
    kernel, out = draw.choice((1, 3, 5, 7)), draw.choice((2, 4, 6))
    mode = draw.choice(("zeros", "reflect", "replicate", "circular"))
    padding = min(kernel // 2, narrowest(shape) - 1)
    return CONVOLUTIONS[len(shape) - 2](shape[1], out, kernel, padding=padding, padding_mode=mode)


@kind
def dilated(draw: random.Random, shape: Sequence[int]) -> nn.Module:
    dilation = draw.randint(2, max(2, min(40, narrowest(shape) - 1)))
    return CONVOLUTIONS[len(shape) - 2](shape[1], shape[1], 3, dilation=dilation, padding=dilation)


@kind
def strided(draw: random.Random, shape: Sequence[int]) -> nn.Module:
    kernel, stride = draw.randint(1, 5), draw.randint(2, 3)
    return CONVOLUTIONS[len(shape) - 2](shape[1], 4, kernel, stride, padding=draw.randint(0, kernel // 2))


@kind
def even(draw: random.Random, shape: Sequence[int]) -> nn.Module:
    return CONVOLUTIONS[len(shape) - 2](shape[1], 3, draw.choice((2, 4)), padding=draw.randint(0, 2))


@kind
def depthwise(draw: random.Random, shape: Sequence[int]) -> nn.Module:
    return CONVOLUTIONS[len(shape) - 2](shape[1], 2 * shape[1], 3, padding=1, groups=shape[1])


@kind
def transposed(draw: random.Random, shape: Sequence[int]) -> nn.Module:
    stride, kernel, dilation = draw.randint(1, 3), draw.randint(1, 4), draw.randint(1, 2)
    extra = draw.randint(0, max(stride, dilation) - 1)
    padding = draw.randint(0, dilation * (kernel - 1) // 2)
    return TRANSPOSED[len(shape) - 2](
        shape[1], 3, kernel, stride, padding=padding, output_padding=extra, dilation=dilation
    )


@kind
def same_padding(draw: random.Random, shape: Sequence[int]) -> nn.Module:
    return CONVOLUTIONS[len(shape) - 2](
        shape[1], 3, draw.choice((2, 3, 4)), padding="same", dilation=draw.randint(1, 3)
    )


@kind
def weight_normed(draw: random.Random, shape: Sequence[int]) -> nn.Module:
    return nn.utils.parametrizations.weight_norm(CONVOLUTIONS[len(shape) - 2](shape[1], 3, 3, padding=1))


@kind
def standardized(draw: random.Random, shape: Sequence[int]) -> nn.Module:
    convolution = CONVOLUTIONS[len(shape) - 2](shape[1], 4, 3)
    functions = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}

    def run(grid: Tensor, own: nn.Module) -> Tensor:
        weight = own.weight - own.weight.mean(tuple(range(1, own.weight.dim())), keepdim=True)
        return functions[grid.dim() - 2](grid, weight, own.bias, padding=1)

    return Layer(run, convolution)


@kind
def separable_axes(draw: random.Random, shape: Sequence[int]) -> nn.Module:
    count, layers = len(shape) - 2, []
    for axis in range(count):
        kernel = [5 if each == axis else 1 for each in range(count)]
        layers.append(CONVOLUTIONS[count](shape[1], shape[1], kernel, padding=[each // 2 for each in kernel]))
    return nn.Sequential(*layers)


# ---- pooling ---------------------------------------------------------------------------------------------------------
@kind
def max_pooling(draw: random.Random, shape: Sequence[int]) -> nn.Module:
    kernel = draw.randint(2, 4)
    options = {
        "padding": draw.randint(0, kernel // 2),
        "dilation": draw.randint(1, 2),
        "ceil_mode": draw.random() < 0.5,
    }
    return (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d)[len(shape) - 3](kernel, draw.randint(1, 3), **options)


@kind
def average_pooling(draw: random.Random, shape: Sequence[int]) -> nn.Module:
    kernel = draw.randint(2, 5)
    options = {"ceil_mode": draw.random() < 0.5, "count_include_pad": draw.random() < 0.5}
    padding = draw.randint(0, kernel // 2)
    return (nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d)[len(shape) - 3](kernel, draw.randint(1, 3), padding, **options)


@kind
def power_pooling(draw: random.Random, shape: Sequence[int]) -> nn.Module:
    return (nn.LPPool1d, nn.LPPool2d, nn.LPPool3d)[len(shape) - 3](2, draw.randint(2, 3))


@kind
def unpooling(draw: random.Random, shape: Sequence[int]) -> nn.Module:
    count, kernel = len(shape) - 3, draw.randint(2, 3)
    pool = (F.max_pool1d, F.max_pool2d, F.max_pool3d)[count]
    back = (F.max_unpool1d, F.max_unpool2d, F.max_unpool3d)[count]

    def run(grid: Tensor, own: nn.Module) -> Tensor:
        # Of numbers that are equal up to rounding, any may be the largest.
        slope = torch.arange(grid.shape[2], dtype=grid.dtype).view(-1, *[1] * count)
        pooled, index = pool(
            grid + slope * 0.37 + torch.arange(grid.shape[-1], dtype=grid.dtype), kernel, return_indices=True
        )
        return back(own(pooled), index, kernel, output_size=grid.shape[2:])

    return Layer(run, CONVOLUTIONS[count + 1](shape[1], shape[1], 3, padding=1))


@kind
def peaks_alone(draw: random.Random, shape: Sequence[int]) -> nn.Module:
    pool, kernel = (F.max_pool1d, F.max_pool2d, F.max_pool3d)[len(shape) - 3], draw.choice((3, 5))
    return Layer(lambda grid: grid * (pool(grid, kernel, 1, kernel // 2) == grid))


@kind
def pyramid_pooling(draw: random.Random, shape: Sequence[int]) -> nn.Module:
    count, bins = len(shape) - 3, draw.sample((1, 2, 3, 6), 2)
    pool = (F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d)[count]
    mode = draw.choice(("nearest", LINEAR[count + 1]))

    def run(grid: Tensor) -> Tensor:
        pooled = [F.interpolate(pool(grid, each), grid.shape[2:], mode=mode) for each in bins]
        return torch.cat([grid, *pooled], 1)

    return Layer(run)


@kind
def adaptive_maxima(draw: random.Random, shape: Sequence[int]) -> nn.Module:
    count, bins = len(shape) - 3, draw.randint(1, 8)
    pool = (F.adaptive_max_pool1d, F.adaptive_max_pool2d, F.adaptive_max_pool3d)[count]
    return Layer(lambda grid: grid - F.interpolate(pool(grid, bins), grid.shape[2:]))


@kind
def style(draw: random.Random, shape: Sequence[int]) -> nn.Module:
    pool = (F.avg_pool1d, F.avg_pool2d, F.avg_pool3d)[len(shape) - 3]

    def run(grid: Tensor, own: nn.Module) -> Tensor:
        vector = pool(grid, grid.shape[2:]).flatten(1)
        vector = own(vector / (vector.square().sum(1, keepdim=True) + 1).sqrt())
        return grid + vector[(...,) + (None,) * (grid.dim() - 2)]

    return Layer(run, nn.Linear(shape[1], shape[1]))


# ---- resampling ------------------------------------------------------------------------------------------------------
@kind
def upsampling(draw: random.Random, shape: Sequence[int]) -> nn.Module:
    mode, factor = draw.choice(("nearest", "nearest-exact", LINEAR[len(shape) - 2])), draw.choice((2, 1.5, 0.7, 3))
    corners = {} if mode.startswith("nearest") else {"align_corners": draw.random() < 0.5}
    again = draw.choice((None, False, True))
    return Layer(
        lambda grid: F.interpolate(grid, scale_factor=factor, mode=mode, recompute_scale_factor=again, **corners)
    )


@kind
def resizing(draw: random.Random, shape: Sequence[int]) -> nn.Module:
    size = [max(2, int(length * draw.uniform(0.5, 1.6))) for length in shape[2:]]
    mode = draw.choice(("nearest", "nearest-exact", LINEAR[len(shape) - 2]))
    corners = {} if mode.startswith("nearest") else {"align_corners": draw.random() < 0.5}
    return Layer(lambda grid: F.interpolate(grid, size, mode=mode, **corners))


@kind
def bicubic(draw: random.Random, shape: Sequence[int]) -> nn.Module:
    corners = draw.random() < 0.5
    if len(shape) != 4:
        return Layer(lambda grid: F.interpolate(grid, scale_factor=2.0))
    return Layer(lambda grid: F.interpolate(grid, scale_factor=1.3, mode="bicubic", align_corners=corners))


@kind
def down_and_up(draw: random.Random, shape: Sequence[int]) -> nn.Module:
    count, channels = len(shape) - 2, shape[1]
    down = CONVOLUTIONS[count](channels, 4, 3, 2, padding=1)
    inner = CONVOLUTIONS[count](4, channels, 3, padding=1)

    def run(grid: Tensor, down: nn.Module, inner: nn.Module) -> Tensor:
        low = inner(F.relu(down(grid)))
        return torch.cat([grid, F.interpolate(low, grid.shape[2:], mode=LINEAR[count], align_corners=False)], 1)

    return Layer(run, down, inner)


@kind
def shuffled_pixels(draw: random.Random, shape: Sequence[int]) -> nn.Module:
    if len(shape) != 4:
        return CONVOLUTIONS[len(shape) - 2](shape[1], 2, 1)
    return nn.Sequential(nn.Conv2d(shape[1], 8, 1), nn.PixelShuffle(2))


@kind
def unshuffled_pixels(draw: random.Random, shape: Sequence[int]) -> nn.Module:
    if len(shape) != 4:
        return CONVOLUTIONS[len(shape) - 2](shape[1], 2, 1)

    def run(grid: Tensor) -> Tensor:
        return F.pixel_unshuffle(F.pad(grid, (0, -grid.shape[3] % 2, 0, -grid.shape[2] % 2)), 2)

    return Layer(run)


@kind
def shuffled_channels(draw: random.Random, shape: Sequence[int]) -> nn.Module:
    return Layer(lambda grid: F.channel_shuffle(grid, 2 if grid.shape[1] % 2 == 0 else 1))


@kind
def unfolded(draw: random.Random, shape: Sequence[int]) -> nn.Module:
    if len(shape) != 4:
        return Layer(lambda grid: grid.unfold(2, 3, 1).mean(-1))
    kernel, dilation = draw.randint(2, 3), draw.randint(1, 3)
    padding = dilation * (kernel - 1) // 2

    def run(grid: Tensor, own: nn.Module) -> Tensor:
        rows = F.unfold(grid, kernel, dilation, padding)
        return F.fold(own(rows), grid.shape[2:], kernel, dilation, padding)

    return Layer(run, nn.Conv1d(shape[1] * kernel**2, shape[1] * kernel**2, 1))


@kind
def local_windows(draw: random.Random, shape: Sequence[int]) -> nn.Module:
    size, step = draw.randint(2, 4), draw.randint(1, 2)
    return Layer(lambda grid: grid.unfold(2, size, step).amax(-1) - grid.unfold(2, size, step)[..., 0])


# ---- moving numbers --------------------------------------------------------------------------------------------------
@kind
def padding(draw: random.Random, shape: Sequence[int]) -> nn.Module:
    mode = draw.choice(("constant", "reflect", "replicate", "circular"))
    pads = [draw.randint(-1 if mode == "constant" else 0, 3) for _ in range(2 * (len(shape) - 2))]
    return Layer(lambda grid: F.pad(grid, pads, mode=mode))


@kind
def rolled(draw: random.Random, shape: Sequence[int]) -> nn.Module:
    shifts = [draw.randint(-9, 9) for _ in shape[2:]]
    return Layer(lambda grid: grid + torch.roll(grid, shifts, axes(grid)))


@kind
def flipped(draw: random.Random, shape: Sequence[int]) -> nn.Module:
    axis = draw.randrange(2, len(shape))
    return Layer(lambda grid: torch.cat([grid, grid.flip(axis)], 1))


@kind
def turned(draw: random.Random, shape: Sequence[int]) -> nn.Module:
    turns = draw.randint(1, 3)
    return Layer(lambda grid: torch.rot90(grid, turns, (2, 3)) if grid.dim() > 3 else grid.flip(2))


@kind
def differences(draw: random.Random, shape: Sequence[int]) -> nn.Module:
    gap = draw.randint(1, 3)
    return Layer(lambda grid: F.pad((grid[:, :, gap:] - grid[:, :, :-gap]).movedim(2, -1), (0, gap)).movedim(-1, 2))


@kind
def border(draw: random.Random, shape: Sequence[int]) -> nn.Module:
    width = draw.randint(1, 4)

    def run(grid: Tensor) -> Tensor:
        grid = grid.clone()
        grid[:, :, :width] = 0
        grid[..., -width:] = 1
        return grid

    return Layer(run)


@kind
def comb(draw: random.Random, shape: Sequence[int]) -> nn.Module:
    step, start = draw.randint(2, 3), draw.randint(0, 2)

    def run(grid: Tensor) -> Tensor:
        result = torch.zeros_like(grid)
        result[:, :, start::step] = 2 * grid[:, :, start::step]
        return result + grid.sin()

    return Layer(run)


@kind
def every_second(draw: random.Random, shape: Sequence[int]) -> nn.Module:
    return Layer(lambda grid: grid[..., ::2] if grid.shape[-1] > 8 else grid)


@kind
def taken(draw: random.Random, shape: Sequence[int]) -> nn.Module:
    offset = draw.randint(0, 3)
    return Layer(lambda grid: grid[:, :, (torch.arange(grid.shape[2]) + offset).clamp(max=grid.shape[2] - 1)])


@kind
def repeated(draw: random.Random, shape: Sequence[int]) -> nn.Module:
    return Layer(lambda grid: grid.repeat_interleave(2, 2)[:, :, 1:])


@kind
def transposed_axes(draw: random.Random, shape: Sequence[int]) -> nn.Module:
    return Layer(lambda grid: grid.transpose(2, -1))


@kind
def coordinates(draw: random.Random, shape: Sequence[int]) -> nn.Module:
    def run(grid: Tensor, own: nn.Module) -> Tensor:
        lines = [torch.linspace(-1, 1, length, dtype=grid.dtype) for length in grid.shape[2:]]
        places = torch.stack(torch.meshgrid(*lines, indexing="ij"))
        return own(torch.cat([grid, places.expand(len(grid), *places.shape)], 1))

    return Layer(run, CONVOLUTIONS[len(shape) - 2](shape[1] + len(shape) - 2, 3, 3, padding=1))


@kind
def position_waves(draw: random.Random, shape: Sequence[int]) -> nn.Module:
    return Layer(lambda grid: grid + torch.sin(torch.arange(grid.shape[-1], dtype=grid.dtype) * 0.3))


@kind
def position_parameter(draw: random.Random, shape: Sequence[int]) -> nn.Module:
    layer = Layer(lambda grid, own: grid * own.weight.view(1, 1, *grid.shape[2:]))
    layer.parts.append(nn.Embedding(math.prod(shape[2:]), 1))
    return layer


# ---- norms -----------------------------------------------------------------------------------------------------------
@kind
def batch_norm(draw: random.Random, shape: Sequence[int]) -> nn.Module:
    tracked = draw.random() < 0.7
    return (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)[len(shape) - 3](shape[1], track_running_stats=tracked)


@kind
def instance_norm(draw: random.Random, shape: Sequence[int]) -> nn.Module:
    return (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)[len(shape) - 3](
        shape[1], affine=draw.random() < 0.5
    )


@kind
def group_norm(draw: random.Random, shape: Sequence[int]) -> nn.Module:
    return nn.GroupNorm(draw.choice([each for each in (1, 2, 3) if shape[1] % each == 0]), shape[1])


@kind
def layer_norm(draw: random.Random, shape: Sequence[int]) -> nn.Module:
    return Layer(last(lambda grid, own: own(grid)), nn.LayerNorm(shape[1]))


@kind
def layer_norm_of_all(draw: random.Random, shape: Sequence[int]) -> nn.Module:
    return Layer(lambda grid: F.layer_norm(grid, grid.shape[1:]))


@kind
def response_norm(draw: random.Random, shape: Sequence[int]) -> nn.Module:
    def run(grid: Tensor) -> Tensor:
        size = grid.norm(p=2, dim=tuple(range(1, grid.dim() - 1)), keepdim=True)
        return grid + grid * size / (size.mean(-1, keepdim=True) + 1e-3)

    return Layer(last(run))


@kind
def local_response(draw: random.Random, shape: Sequence[int]) -> nn.Module:
    return nn.LocalResponseNorm(3)


@kind
def root_mean_square(draw: random.Random, shape: Sequence[int]) -> nn.Module:
    return Layer(lambda grid: grid * (grid.square().mean(1, keepdim=True) + 1e-5).rsqrt())


@kind
def unit_vectors(draw: random.Random, shape: Sequence[int]) -> nn.Module:
    return (
        Layer(lambda grid: F.normalize(grid, dim=draw_dim))
        if (draw_dim := draw.choice((1, 2))) == 1
        else Layer(lambda grid: grid / (1 + grid.norm(dim=axes(grid), keepdim=True)))
    )


# ---- gates and statistics --------------------------------------------------------------------------------------------
@kind
def activation(draw: random.Random, shape: Sequence[int]) -> nn.Module:
    kinds = (
        nn.ReLU,
        nn.GELU,
        nn.SiLU,
        nn.ELU,
        nn.Hardswish,
        nn.Mish,
        nn.Softplus,
        nn.Tanhshrink,
        nn.PReLU,
        nn.RReLU,
        nn.SELU,
    )
    return draw.choice(kinds)()


@kind
def in_place(draw: random.Random, shape: Sequence[int]) -> nn.Module:
    return nn.Sequential(CONVOLUTIONS[len(shape) - 2](shape[1], 4, 1), nn.LeakyReLU(0.2, inplace=True), nn.Dropout(0.5))


@kind
def squeeze_excite(draw: random.Random, shape: Sequence[int]) -> nn.Module:
    own = CONVOLUTIONS[len(shape) - 2](shape[1], shape[1], 1)
    return Layer(lambda grid, own: grid * torch.sigmoid(own(grid.mean(axes(grid), keepdim=True))), own)


@kind
def channel_attention(draw: random.Random, shape: Sequence[int]) -> nn.Module:
    def run(grid: Tensor, own: nn.Module) -> Tensor:
        vectors = own(grid.flatten(2).mean(2)) + own(grid.flatten(2).amax(2))
        return grid * vectors.sigmoid()[(...,) + (None,) * (grid.dim() - 2)]

    return Layer(run, nn.Linear(shape[1], shape[1]))


@kind
def spatial_attention(draw: random.Random, shape: Sequence[int]) -> nn.Module:
    def run(grid: Tensor, own: nn.Module) -> Tensor:
        return grid * own(torch.cat([grid.mean(1, keepdim=True), grid.max(1, keepdim=True)[0]], 1)).sigmoid()

    return Layer(run, CONVOLUTIONS[len(shape) - 2](2, 1, 7, padding=3))


@kind
def coordinate_attention(draw: random.Random, shape: Sequence[int]) -> nn.Module:
    return Layer(lambda grid: grid * grid.mean(2, keepdim=True).sigmoid() * grid.mean(-1, keepdim=True).tanh())


@kind
def gate(draw: random.Random, shape: Sequence[int]) -> nn.Module:
    level, own = draw.uniform(-0.5, 0.5), CONVOLUTIONS[len(shape) - 2](shape[1], shape[1], 3, padding=1)
    return Layer(lambda grid, own: torch.where(grid > level, own(grid), torch.zeros((), dtype=grid.dtype)), own)


@kind
def share_of_positive(draw: random.Random, shape: Sequence[int]) -> nn.Module:
    own = CONVOLUTIONS[len(shape) - 2](shape[1], shape[1], 3, padding=1)
    return Layer(lambda grid, own: own(grid) * (grid > 0).to(grid).mean(axes(grid), keepdim=True), own)


@kind
def above_mean(draw: random.Random, shape: Sequence[int]) -> nn.Module:
    return Layer(lambda grid: grid * (grid > grid.mean(axes(grid), keepdim=True) + 0.1))


@kind
def deviating(draw: random.Random, shape: Sequence[int]) -> nn.Module:
    own = CONVOLUTIONS[len(shape) - 2](shape[1], shape[1], 3, padding=1)
    return Layer(lambda grid, own: torch.where(grid.std(axes(grid), keepdim=True) > 0.7, own(grid), grid), own)


@kind
def stretched(draw: random.Random, shape: Sequence[int]) -> nn.Module:
    def run(grid: Tensor) -> Tensor:
        low, high = grid.amin(axes(grid), keepdim=True), grid.amax(axes(grid), keepdim=True)
        return (grid - low) / (high - low + 0.1)

    return Layer(run)


@kind
def clamped(draw: random.Random, shape: Sequence[int]) -> nn.Module:
    def run(grid: Tensor) -> Tensor:
        variance, mean = torch.var_mean(grid, axes(grid), keepdim=True)
        return torch.clamp(grid, mean - variance.sqrt(), mean + variance.sqrt())

    return Layer(run)


@kind
def logarithms(draw: random.Random, shape: Sequence[int]) -> nn.Module:
    return Layer(
        lambda grid: grid.abs().log().nan_to_num(neginf=-3.0) - torch.logsumexp(grid, axes(grid), keepdim=True)
    )


@kind
def best_class(draw: random.Random, shape: Sequence[int]) -> nn.Module:
    def run(grid: Tensor) -> Tensor:
        classes = F.one_hot(grid.argmax(1), grid.shape[1]).movedim(-1, 1).to(grid)
        return grid * classes / (1 + classes.sum(axes(grid), keepdim=True)) + classes

    return Layer(run)


@kind
def farthest(draw: random.Random, shape: Sequence[int]) -> nn.Module:
    def run(grid: Tensor) -> Tensor:
        index = grid.flatten(2).argmax(2) if draw_max else grid.flatten(2).min(2)[1]
        place = index[(...,) + (None,) * (grid.dim() - 2)] % grid.shape[-1]
        return grid + (torch.arange(grid.shape[-1], dtype=grid.dtype) - place).abs() / grid.shape[-1]

    draw_max = draw.random() < 0.5
    return Layer(run)


@kind
def counted(draw: random.Random, shape: Sequence[int]) -> nn.Module:
    return Layer(
        lambda grid: (
            grid * torch.count_nonzero(grid > 0.3, dim=axes(grid)).view(*grid.shape[:2], *[1] * (grid.dim() - 2)) / 100
        )
    )


@kind
def masked_write(draw: random.Random, shape: Sequence[int]) -> nn.Module:
    def run(grid: Tensor) -> Tensor:
        grid = grid.clone()
        grid[grid > 0.5] = 0.5
        return grid

    return Layer(run)


@kind
def gram(draw: random.Random, shape: Sequence[int]) -> nn.Module:
    def run(grid: Tensor) -> Tensor:
        rows = grid.flatten(2)
        weights = (rows @ rows.mT / rows.shape[2]).softmax(-1)
        return grid + (weights @ rows).reshape(grid.shape)

    return Layer(run)


@kind
def linear_attention(draw: random.Random, shape: Sequence[int]) -> nn.Module:
    def run(rows: Tensor, own: nn.Module) -> Tensor:
        query, key, value = own(rows).chunk(3, -1)
        return query.softmax(-1) @ (key.softmax(1).mT @ value)

    return Layer(flat(run), nn.Linear(shape[1], 12))


@kind
def full_attention(draw: random.Random, shape: Sequence[int]) -> nn.Module:
    fused = draw.random() < 0.5

    def run(rows: Tensor, own: nn.Module) -> Tensor:
        query, key, value = own(rows).chunk(3, -1)
        if fused:
            return F.scaled_dot_product_attention(*(each.unsqueeze(1) for each in (query, key, value))).squeeze(1)
        return (query @ key.mT).softmax(-1) @ value

    if math.prod(shape[2:]) > 1500:
        return nn.Identity()
    return Layer(flat(run), nn.Linear(shape[1], 12))


@kind
def transformer(draw: random.Random, shape: Sequence[int]) -> nn.Module:
    if math.prod(shape[2:]) > 1500:
        return nn.Identity()
    width = 4
    layer = nn.TransformerEncoderLayer(width, 2, 8, batch_first=True, norm_first=draw.random() < 0.5)
    return nn.Sequential(
        CONVOLUTIONS[len(shape) - 2](shape[1], width, 1), Layer(flat(lambda rows, own: own(rows)), layer)
    )


@kind
def axial_attention(draw: random.Random, shape: Sequence[int]) -> nn.Module:
    axis = draw.randrange(2, len(shape))

    def run(grid: Tensor, own: nn.Module) -> Tensor:
        rows = grid.movedim((axis, 1), (-2, -1))
        query, key, value = own(rows).chunk(3, -1)
        return F.scaled_dot_product_attention(query, key, value).movedim((-2, -1), (axis, 1))

    return Layer(run, nn.Linear(shape[1], 12))


@kind
def window_attention(draw: random.Random, shape: Sequence[int]) -> nn.Module:
    size, shift = draw.choice((2, 4)), draw.choice((0, 1, 2))

    def run(grid: Tensor, own: nn.Module) -> Tensor:
        count = grid.dim() - 2
        before = grid.shape[2:]
        grid = F.pad(grid, [each for length in reversed(before) for each in (0, -length % size)])
        grid = torch.roll(grid, [-shift] * count, axes(grid)) if shift else grid
        lengths = [each for length in grid.shape[2:] for each in (length // size, size)]
        order = [0, *range(2, 2 + 2 * count, 2), *range(3, 3 + 2 * count, 2), 1]
        split = grid.reshape(*grid.shape[:2], *lengths).permute(order)
        rows = split.reshape(-1, size**count, grid.shape[1])
        query, key, value = own(rows).chunk(3, -1)
        rows = (query @ key.mT / 2).softmax(-1) @ value
        split = rows.reshape(*split.shape[:-1], -1)
        back = [0, 2 * count + 1, *(each for axis in range(count) for each in (1 + axis, 1 + count + axis))]
        grid = split.permute(back).reshape(len(grid), -1, *grid.shape[2:])
        grid = torch.roll(grid, [shift] * count, axes(grid)) if shift else grid
        return grid[(..., *(slice(length) for length in before))]

    return Layer(run, nn.Linear(shape[1], 12))


@kind
def token_mixer(draw: random.Random, shape: Sequence[int]) -> nn.Module:
    if shape[-1] > 64:
        return nn.Identity()
    return Layer(lambda grid, own: grid + own(grid), nn.Linear(shape[-1], shape[-1]))


@kind
def head_and_back(draw: random.Random, shape: Sequence[int]) -> nn.Module:
    positions = math.prod(shape[2:])
    if positions > 3000:
        return nn.Identity()

    def run(grid: Tensor, own: nn.Module) -> Tensor:
        return grid + own(grid.flatten(2)).mean(-1)[(...,) + (None,) * (grid.dim() - 2)]

    return Layer(run, nn.Linear(positions, 5))


@kind
def weighted_axis(draw: random.Random, shape: Sequence[int]) -> nn.Module:
    def run(grid: Tensor) -> Tensor:
        weights = grid.flatten(3).mean(-1) if grid.dim() > 3 else grid
        summed = torch.einsum("bch,bdh...->bcd...", weights.softmax(-1), grid)
        return grid + summed.mean(1).unsqueeze(2)

    return Layer(run)


@kind
def products_of_axes(draw: random.Random, shape: Sequence[int]) -> nn.Module:
    def run(grid: Tensor) -> Tensor:
        if grid.dim() == 3:
            return grid * (grid @ grid.mT / grid.shape[2]).diagonal(0, 1, 2)[..., None]
        return grid + grid @ (grid.transpose(-1, -2) @ grid) / grid[0, 0].numel() ** 1.5

    return Layer(run)


@kind
def outer_sums(draw: random.Random, shape: Sequence[int]) -> nn.Module:
    if len(shape) != 3:
        return Layer(lambda grid: grid + grid.mean(2, keepdim=True) + grid.amax(-1, keepdim=True))
    return Layer(lambda grid: (grid[..., :, None] - grid[..., None, :]).abs().mean(-1))


@kind
def distances(draw: random.Random, shape: Sequence[int]) -> nn.Module:
    return Layer(flat(lambda rows, own: -torch.cdist(rows, own.weight.to(rows)[None])), nn.Embedding(3, shape[1]))


# ---- along channels --------------------------------------------------------------------------------------------------
@kind
def dense(draw: random.Random, shape: Sequence[int]) -> nn.Module:
    return Layer(last(lambda grid, own: F.gelu(own(grid))), nn.Linear(shape[1], 5))


@kind
def ordered_channels(draw: random.Random, shape: Sequence[int]) -> nn.Module:
    functions = (
        lambda grid: grid.sort(1)[0],
        lambda grid: grid.cumsum(1),
        lambda grid: grid - grid.median(1, keepdim=True)[0],
        lambda grid: grid.topk(min(2, grid.shape[1]), 1)[0],
        lambda grid: torch.fft.irfft(torch.fft.rfft(grid, dim=1) * 0.7, n=grid.shape[1], dim=1),
        lambda grid: F.softmax(grid, 1),
        lambda grid: F.log_softmax(grid, 1),
        lambda grid: grid.gather(1, grid.argsort(dim=1, stable=True)),
        lambda grid: torch.quantile(grid, 0.3, 1, keepdim=True) + grid,
    )
    return Layer(draw.choice(functions))


@kind
def softmax_of_positions(draw: random.Random, shape: Sequence[int]) -> nn.Module:
    return Layer(lambda grid: grid * grid.flatten(2).softmax(-1).reshape(grid.shape) * 10)


@kind
def maxout(draw: random.Random, shape: Sequence[int]) -> nn.Module:
    own = CONVOLUTIONS[len(shape) - 2](shape[1], 6, 3, padding=1)
    return Layer(lambda grid, own: own(grid).unflatten(1, (3, 2)).amax(2), own)


@kind
def gated_linear(draw: random.Random, shape: Sequence[int]) -> nn.Module:
    return nn.Sequential(CONVOLUTIONS[len(shape) - 2](shape[1], 6, 3, padding=1), nn.GLU(1))


@kind
def looked_up(draw: random.Random, shape: Sequence[int]) -> nn.Module:
    def run(grid: Tensor, own: nn.Module) -> Tensor:
        return torch.cat([grid, own((grid[:, 0] * 2).round().clamp(-3, 3).long() + 3).movedim(-1, 1)], 1)

    return Layer(run, nn.Embedding(7, 2))


@kind
def structure_tensor(draw: random.Random, shape: Sequence[int]) -> nn.Module:
    def run(grid: Tensor) -> Tensor:
        rows = F.normalize(grid, dim=1).movedim(1, -1)
        matrices = rows[..., :, None] * rows[..., None, :] + torch.eye(rows.shape[-1], dtype=grid.dtype)
        return torch.linalg.det(matrices).log()[:, None] + grid

    return Layer(run)


@kind
def half_and_back(draw: random.Random, shape: Sequence[int]) -> nn.Module:
    return Layer(lambda grid: (grid * 8).round().int().remainder(5).to(grid) + grid)


# ---- shape -----------------------------------------------------------------------------------------------------------
@kind
def branch_on_size(draw: random.Random, shape: Sequence[int]) -> nn.Module:
    limit, own = draw.randint(10, 60), CONVOLUTIONS[len(shape) - 2](shape[1], shape[1], 3, padding=1)
    return Layer(lambda grid, own: own(grid) if grid.shape[2] > limit else grid / math.prod(grid.shape[2:]), own)


@kind
def slices_of_an_axis(draw: random.Random, shape: Sequence[int]) -> nn.Module:
    if len(shape) != 5:
        return nn.Conv1d(shape[1], 3, 1) if len(shape) == 3 else nn.Conv2d(shape[1], 3, 3, padding=1)

    def run(grid: Tensor, own: nn.Module) -> Tensor:
        planes = grid.movedim(2, 1).flatten(0, 1)
        return own(planes).unflatten(0, (len(grid), grid.shape[2])).movedim(1, 2)

    return Layer(run, nn.Conv2d(shape[1], 3, 3, padding=1))


@kind
def two_branches(draw: random.Random, shape: Sequence[int]) -> nn.Module:
    own = [
        CONVOLUTIONS[len(shape) - 2](shape[1], 3, 3, padding=each, dilation=each) for each in (1, draw.randint(2, 4))
    ]
    return Layer(lambda grid, one, other: one(grid) * other(grid).sigmoid(), *own)


@kind
def half_of_channels(draw: random.Random, shape: Sequence[int]) -> nn.Module:
    def run(grid: Tensor) -> Tensor:
        one, other = grid.tensor_split(2, 1)
        return torch.cat([other, one.cos()], 1)

    return Layer(run)


@kind
def fixed_blur(draw: random.Random, shape: Sequence[int]) -> nn.Module:
    def run(grid: Tensor) -> Tensor:
        kernel = torch.tensor([1.0, 4.0, 6.0, 4.0, 1.0], dtype=grid.dtype) / 16
        rows = grid.movedim(2, -1)
        blurred = F.conv1d(rows.reshape(-1, 1, rows.shape[-1]), kernel[None, None], padding=2)
        return blurred.reshape(rows.shape).movedim(-1, 2)

    return Layer(run)


# ---- networks --------------------------------------------------------------------------------------------------------
def draw_network(seed: int, kinds: Sequence[str] | None = None) -> tuple[nn.Sequential, tuple[int, ...], list[str]]:
    """Return a network, the shape of its volume, and the kinds of its layers."""
    draw = random.Random(seed)
    dims = draw.choices((1, 2, 3), (2, 5, 2))[0]
    longest = {1: 160, 2: 40, 3: 16}[dims]
    shape = (1, draw.randint(1, 3), *(draw.randint(longest // 2, longest) for _ in range(dims)))
    torch.manual_seed(seed)
    layers: list[nn.Module] = [CONVOLUTIONS[dims](shape[1], 4, 3, padding=1)]
    chosen: list[str] = []
    grid = layers[0].eval()(torch.randn(shape))
    for name in draw.sample(sorted(kinds or KINDS), draw.randint(1, 4)) if not kinds else list(kinds):
        try:
            layer = KINDS[name](draw, grid.shape).eval()
            with torch.no_grad():
                after = layer(grid)
        except (RuntimeError, ValueError):
            continue
        if not min(after.shape) or min(after.shape[2:]) < 4 or after.numel() > LARGEST or after.dim() != grid.dim():
            continue
        layers.append(layer)
        chosen.append(name)
        grid = after
    return nn.Sequential(*layers).eval(), shape, chosen


# (shape, random numbers) -> the numbers of a volume
VALUES: dict[str, Callable[[Sequence[int], torch.Generator], Tensor]] = {
    "normal": lambda shape, generator: torch.randn(shape, generator=generator),
    "skewed": lambda shape, generator: torch.randn(shape, generator=generator).exp(),
    "bytes": lambda shape, generator: torch.randint(0, 256, shape, generator=generator).float(),
}
# Where values are stored between passes.
STORED = ("none", "memory", "disk")


def draw_values(seed: int, shape: Sequence[int], values: str | None = None) -> Tensor:
    """Return numbers of N(0, 1), of exp N(0, 1), or from 0 to 255: those that are named, or by the seed."""
    return VALUES[values or list(VALUES)[seed % 3]](shape, torch.Generator().manual_seed(seed))


def draw_tile(seed: int, size: Sequence[int]) -> tuple[int, ...]:
    """Return the size of tiles, which cut at least one axis."""
    draw = random.Random(seed)
    tile = [max(2, min(length, int(length * draw.choice((0.2, 0.35, 0.5, 1))))) for length in size]
    return tuple(tile) if tuple(tile) != tuple(size) else tuple(max(2, length // 2) for length in size)


class Outcome(NamedTuple):
    """How a drawn network ran.

    Attributes:
        result: "right"; "rounded" where the recorded graph on the whole has other bits, since writes in place keep the
            order of dimensions in memory, in which torch sums; "wrong", "refused", or "failed" by another error.
        reason: How far it is off, or the error.
    """

    result: str
    reason: str = ""


def count_outcomes(compare: Callable[[int], Outcome], seeds: range, few: Mapping[str, float]) -> None:
    """Compare drawn networks: all are right, but for shares of other outcomes.

    Which of them round otherwise depends on the processor: three deviations of that count more may.
    """
    outcomes = {seed: compare(seed) for seed in seeds}
    others = {seed: each for seed, each in outcomes.items() if each.result not in ("right", *few)}
    assert not others, others
    counts = Counter(outcome.result for outcome in outcomes.values())
    for result, share in few.items():
        most = share * len(seeds)
        assert counts[result] <= most + (3 * math.sqrt(most) if result == "rounded" else 0), result


def change_last_bits(volume: Tensor) -> Iterator[Tensor]:
    """Yield a few volumes, each number of which is off by its last bit, up or down at random."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(8):
        signs = torch.randint(0, 2, volume.shape, generator=generator) * 2 - 1
        yield volume * (1 + signs * torch.finfo(volume.dtype).eps)


def compare(
    seed: int, kinds: Sequence[str] | None = None, *, values: str | None = None, stored: str | None = None
) -> Outcome:
    """Run a drawn network in tiles and compare it with the untiled one.

    Allowed is four times the distance of the untiled network in float32 from that in float64, relative to the largest
    number, and the rounding of one operation. A logarithm of a number near 0 makes much of the last bit at one position
    alone, where that distance is luck: before a network is called wrong, the distance of volumes that differ in their
    last bits counts too.

    Args:
        seed: Of the network, the tiles and the volume.
        kinds: The kinds of its layers; drawn if None.
        values: A key of `VALUES`; by the seed if None.
        stored: One of `STORED`; by the seed if None, none or in memory.
    """
    net, shape, _ = draw_network(seed, kinds)
    volume, stored = draw_values(seed, shape, values), stored or STORED[seed % 2]
    with torch.no_grad(), without_fast_attention():
        want, wide = net(volume), copy.deepcopy(net).double()(volume.double())
    try:
        tile = draw_tile(seed, shape[2:])
        tiled = run_in_tiles(net, volume, tile, store=stored != "none", on_disk=stored == "disk", seed=seed)
    except (GraphError, RecordingError, RuleError) as error:
        return Outcome("refused", str(error))
    except (RuntimeError, ValueError, LookupError, TypeError, AttributeError) as error:
        return Outcome("failed", f"{type(error).__name__}: {error}")
    with torch.no_grad():
        whole = run_whole(tiled.labelled.graph, [volume])
    finite = want.isfinite()
    for got in (whole, tiled.output):
        if got.shape != want.shape or not torch.equal(got.isfinite(), finite):
            return Outcome("wrong", f"other shapes or numbers that are not finite: {want.shape} {got.shape}")
    if not finite.any():
        return Outcome("right", "nothing is finite")

    def distance_of(got: Tensor) -> Tensor:
        return (got - wide)[finite].abs().max() / wide[finite].abs().max().clamp(min=1e-30)

    own, distance = distance_of(want), max(map(distance_of, (whole, tiled.output)))
    if not distance <= 4 * own + ONE_ROUNDING:
        with torch.no_grad(), without_fast_attention():
            others = [distance_of(net(each)) for each in change_last_bits(volume)]
        own = max([own, *(each for each in others if each.isfinite())])
    allowed = 4 * own + ONE_ROUNDING
    text = f"{float(distance):.2g}, allowed are {float(allowed):.2g}"
    if not distance <= allowed:
        return Outcome("wrong", text)
    return Outcome("right" if torch.equal(whole[finite], want[finite]) else "rounded", text)
