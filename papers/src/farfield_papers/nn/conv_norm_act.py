"""Convolution, batch norm and ReLU6 as one part of a block, on one grid or on several without concatenating them."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_weights

from farfield.nn.bare import is_bare
from farfield.nn.spatial_dims import LAYERS, layers
from farfield.ops.grid import accumulation
from farfield.ops.modes import is_itself, is_recorded, is_recorded_by_autograd, is_watched
from farfield_papers.nn.bn_folding import Fusable
from farfield_papers.nn.layer_kernels import add_pointwise, convolve_and_clamp, norm_and_clamp

CONVOLVE = {3: F.conv1d, 4: F.conv2d, 5: F.conv3d}  # by the number of dimensions of the weight
CONVOLUTIONS = {each.convolution for each in LAYERS.values()}
NORMS = {each.batch_norm for each in LAYERS.values()}
FOLDABLE = {*NORMS, nn.SyncBatchNorm}
# The layers of a `Convolved` in the orders that it computes in its own way; those of others run one after another.
ORDERS = {
    ("convolution",),
    ("convolution", "norm"),
    ("convolution", "activation"),
    ("convolution", "norm", "activation"),
}
BOUNDS = (0.0, 6.0)  # of ReLU6


class ConvNormParameters(NamedTuple):
    """The parameters that convolve and norm some of the channels of a `Convolved`."""

    weight: Tensor  # of the convolution
    bias: Tensor | None  # of the convolution
    # Running mean and variance, weight and bias of the norm; None if it is folded away.
    statistics: tuple[Tensor, ...] | None
    momentum: float  # weight of a batch in the running statistics


class Convolved(Fusable, nn.Sequential):
    """A convolution, its batch norm and an optional ReLU6: `convolution`, `norm` and `activation` in state dicts."""

    # `beside` and `across` run these on several grids as if their channels were concatenated, without the
    # concatenation: a depthwise convolution and batch norm treat each channel separately, and a 1x1 convolution of a
    # concatenation is the sum of the convolutions of its parts.
    convolution: nn.Conv1d | nn.Conv2d | nn.Conv3d

    @property
    def norm_or_none(self) -> Any:
        """The batch norm; None once it is folded."""
        return self._modules.get("norm")

    @property
    def has_bare_layers(self) -> bool:
        """Whether its layers are a bare convolution with zeros around the grid and a bare norm with all its numbers."""
        convolution, norm = self._modules.get("convolution"), self.norm_or_none
        if tuple(self._modules) not in ORDERS or not is_bare(convolution, *CONVOLUTIONS):
            return False
        return self.convolution.padding_mode == "zeros" and (norm is None or has_numbers(norm))

    @property
    def is_pointwise_at_last(self) -> bool:
        """Whether its activation, if it has one, computes each number from one."""
        return "activation" not in self._modules or is_bare(self._modules["activation"], *POINTWISE)

    @property
    def clamps(self) -> bool:
        """Whether its activation is a bare ReLU6."""
        activation: Any = self._modules.get("activation")
        return is_bare(activation, ReLU6, nn.ReLU6) and (activation.min_val, activation.max_val) == BOUNDS

    def forward(self, grid: Tensor) -> Tensor:
        """Run the layers in their order."""
        if not self.has_bare_layers:
            return cast(Tensor, super().forward(grid))
        return self.run(grid, self.pieces([len(self.convolution.weight)])[0])

    def beside(self, grids: list[Tensor]) -> list[Tensor]:
        """Run these layers, if depthwise, on each of the grids: the parts of their output on the concatenated grids."""
        pieces = self.pieces([grid.shape[1] for grid in grids])
        return [self.run(grid, piece) for grid, piece in zip(grids, pieces, strict=True)]

    def across(self, grids: list[Tensor]) -> Tensor:
        """Run these layers, if 1x1, on the concatenated grids without concatenating them."""
        weights = self.convolution.weight.split([grid.shape[1] for grid in grids], 1)
        out = convolve(grids[0], weights[0], self.convolution.bias)
        for grid, weight in zip(grids[1:], weights[1:], strict=True):
            out = add_convolved(out, grid, weight)
        return self.after(out)

    def after(self, out: Tensor) -> Tensor:
        """Norm and activate an output of the convolution, which may be overwritten."""
        return self.follow(out, self.pieces([out.shape[1]])[0])

    def pieces(self, sizes: list[int]) -> list[ConvNormParameters]:
        """Split the parameters for grids of these numbers of channels; count a batch in training."""
        convolution, norm, several = self.convolution, self.norm_or_none, range(len(sizes))
        weights, biases = split(convolution.weight, sizes), split(convolution.bias, sizes)
        if norm is None:
            return [ConvNormParameters(weights[index], biases[index], None, 0.0) for index in several]
        momentum = count_batch(norm)
        entries = [split(entry, sizes) for entry in (norm.running_mean, norm.running_var, norm.weight, norm.bias)]
        return [
            ConvNormParameters(weights[i], biases[i], tuple(entry[i] for entry in entries), momentum) for i in several
        ]

    def run(self, grid: Tensor, piece: ConvNormParameters) -> Tensor:
        """Run the layers with the parameters of some of their channels."""
        layer, kernel = self.convolution, piece.weight
        groups = layer.groups * len(kernel) // len(layer.weight)  # the groups of this piece of a depthwise convolution
        if piece.statistics is None and not isinstance(layer.padding, str) and self.clamps:
            how = layer.padding, layer.stride, layer.dilation, groups
            clamped = convolve_and_clamp(grid, kernel, piece.bias, BOUNDS, *how)
            if clamped is not None:
                return clamped
        out = convolve(grid, kernel, piece.bias, layer.stride, layer.padding, layer.dilation, groups)
        return self.follow(out, piece)

    def follow(self, out: Tensor, piece: ConvNormParameters) -> Tensor:
        """Norm and activate the channels of an output that `piece` is for."""
        activation = self._modules.get("activation")
        if piece.statistics is not None:
            norm = self.norm_or_none
            if norm.training and self.clamps:
                clamped = norm_and_clamp(out, piece.statistics, piece.momentum, norm.eps, BOUNDS)
                if clamped is not None:
                    return clamped
            out = normed(out, piece.statistics, norm, piece.momentum)
        return out if activation is None else activation(out)

    def fold(self) -> None:
        """Fold the batch norm into the convolution: weight · scale, plus a bias."""
        norm: Any = self.norm_or_none
        if tuple(self._modules) not in ORDERS or not is_bare(self.convolution, *CONVOLUTIONS):
            return
        if not is_bare(norm, *FOLDABLE) or norm.running_mean is None or norm.running_var is None:
            return
        # Another part may have the same convolution and a norm of its own.
        self.convolution = convolution = copy.deepcopy(self.convolution)
        # In float32 at least, for networks in half precision.
        dtype = accumulation(norm.running_var.dtype)
        mean, variance = norm.running_mean.to(dtype), norm.running_var.to(dtype)
        convolution.weight, convolution.bias = fuse_conv_bn_weights(
            convolution.weight, convolution.bias, mean, variance, norm.eps, norm.weight, norm.bias
        )
        del self.norm


def splits_channels(part: nn.Module) -> bool:
    """Whether `Convolved.beside` gives what a part gives: each of its channels is computed from one of the grid."""
    if not (is_bare(part, Convolved) and part.has_bare_layers and part.is_pointwise_at_last):
        return False
    weight = part.convolution.weight
    return weight.shape[1] == 1 and len(weight) == part.convolution.groups


def adds_channels(part: nn.Module) -> bool:
    """Whether `Convolved.across` gives what a part gives: a 1x1 convolution, and a norm or nothing behind it."""
    if not (is_bare(part, Convolved) and part.has_bare_layers) or "activation" in part._modules:
        return False
    layer = part.convolution
    moves = layer.padding not in ("same", "valid") and any(layer.padding)
    return not moves and layer.groups == 1 and {*layer.weight.shape[2:], *layer.stride} == {1}


def convolved(
    channels: int,
    out_channels: int,
    *,
    kernel: int = 1,
    stride: int = 1,
    groups: int = 1,
    activate: bool = True,
    spatial_dims: int = 2,
) -> Convolved:
    """Build convolution, batch norm and ReLU6; the last layer of a block has `activate=False`."""
    convolution, batch_norm, *_ = layers(spatial_dims)
    parts: OrderedDict[str, nn.Module] = OrderedDict()
    parts["convolution"] = convolution(
        channels, out_channels, kernel, stride=stride, padding=kernel // 2, groups=groups, bias=False
    )
    parts["norm"] = batch_norm(out_channels)
    if activate:
        parts["activation"] = ReLU6(inplace=True)
    return Convolved(parts)


class ReLU6(nn.ReLU6):
    """min(max(x, 0), 6) in place; keeps its output for the backward pass, which the next layer keeps anyway."""

    def forward(self, grid: Tensor) -> Tensor:
        """Clamp."""
        if not self.inplace or is_recorded() or not is_recorded_by_autograd(grid) or not is_itself(grid):
            return super().forward(grid)
        if grid._is_view():  # behind a backward hook, whose output torch does not let be changed
            return F.hardtanh(grid, self.min_val, self.max_val)
        return _Clamp.apply(grid, self.min_val, self.max_val)


# Activations that compute each number from one.
POINTWISE = (ReLU6, nn.ReLU6, nn.ReLU, nn.SiLU, nn.Hardswish, nn.GELU)


class _Clamp(torch.autograd.Function):
    """The clamp in place, with the gradient of torch's clamp."""

    @staticmethod
    def forward(ctx: Any, grid: Tensor, low: float, high: float) -> Tensor:
        """Clamp."""
        ctx.mark_dirty(F.hardtanh(grid, low, high, inplace=True))
        ctx.save_for_backward(grid)
        ctx.bounds = low, high
        return grid

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None, None]:
        """Return the gradient where nothing was clamped, and 0 elsewhere."""
        (clamped,) = ctx.saved_tensors
        return torch.ops.aten.hardtanh_backward(grad_output, clamped, *ctx.bounds), None, None


def split(entry: Tensor | None, sizes: list[int]) -> Sequence[Any]:
    """Split the parameters of channels for grids of these numbers of channels; None for each grid if there are none."""
    return [entry] * len(sizes) if entry is None or len(sizes) == 1 else entry.split(sizes)


def convolve(grid: Tensor, weight: Tensor, bias: Tensor | None = None, *how: Any) -> Tensor:
    """Convolve a grid with as many spatial dims as the weight; `how`: stride, padding, dilation and groups."""
    return CONVOLVE[weight.dim()](grid, weight, bias, *how)


def add_convolved(out: Tensor, grid: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Add a 1x1 convolution of a grid to `out`, in place of it or of the convolution's output, which is not saved."""
    added = add_pointwise(out, grid, weight, bias)
    return convolve(grid, weight, bias).add_(out) if added is None else added


def normed(out: Tensor, statistics: tuple[Tensor, ...], norm: Any, momentum: float) -> Tensor:
    """Apply batch norm to a grid; in place in inference, if possible."""
    mean, variance, weight, bias = statistics
    if norm.training or is_watched(out) or out.dtype != accumulation(variance.dtype):
        return F.batch_norm(out, mean, variance, weight, bias, norm.training, momentum, norm.eps)
    scale, shift = scale_and_shift(mean, variance, weight, bias, norm.eps)
    each = (-1, *[1] * (out.dim() - 2))
    return torch.addcmul(shift.view(each), out, scale.view(each), out=out)


def has_numbers(norm: Any) -> bool:
    """Whether a norm is torch's batch norm with running statistics that training updates, a weight and a bias."""
    if not is_bare(norm, *NORMS) or not norm.track_running_stats:
        return False
    return all(each is not None for each in (norm.running_mean, norm.running_var, norm.weight, norm.bias))


def count_batch(norm: Any) -> float:
    """Count a batch in training, as batch norm itself does; return its weight in the running statistics."""
    if not norm.training or norm.num_batches_tracked is None:
        return norm.momentum or 0.0
    norm.num_batches_tracked.add_(1)
    return 1 / float(norm.num_batches_tracked) if norm.momentum is None else norm.momentum


def scale_and_shift(
    mean: Tensor, variance: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """Return the factor and the offset by which a norm acts in eval mode, in float32 at least."""
    dtype = accumulation(variance.dtype)
    scale = (variance.to(dtype) + eps).rsqrt()
    scale = scale if weight is None else scale * weight
    mean = mean.to(dtype)
    # Rounds as torch's kernels do, so that the norm in place gives the same digits.
    return scale, -mean * scale if bias is None else torch.addcmul(bias.to(dtype), mean, scale, value=-1)
