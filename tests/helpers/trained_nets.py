"""Small networks and losses that are trained on whole volumes, and their untiled gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from farfield.nn import GridAttention
from helpers.streamed_nets import CONVOLUTIONS, POOLS

UP = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}
NORMS: dict[str, Callable[[int, int], nn.Module]] = {
    "none": lambda dims, channels: nn.Identity(),
    "instance": lambda dims, channels: {2: nn.InstanceNorm2d, 3: nn.InstanceNorm3d}[dims](channels, affine=True),
    "tracked": lambda dims, channels: nn.InstanceNorm2d(channels, affine=True, track_running_stats=True),
    "batch": lambda dims, channels: {2: nn.BatchNorm2d, 3: nn.BatchNorm3d}[dims](channels),
    "group": lambda dims, channels: nn.GroupNorm(2, channels),
}


def block(dims: int, inner: int, outer: int, norm: str, **options: Any) -> nn.Module:
    """Convolution, norm and activation."""
    own = CONVOLUTIONS[dims](inner, outer, 3, padding=1, **options)
    return nn.Sequential(own, NORMS[norm](dims, outer), nn.LeakyReLU(0.1))


class UNet(nn.Module):
    """Two levels down and up; by pooling or strides, and by transposed convolutions or interpolation."""

    def __init__(
        self,
        dims: int,
        norm: str,
        *,
        up: str = "transposed",
        down: str = "pool",
        middle: Any = None,
        deep: bool = False,
    ) -> None:
        super().__init__()
        own, width = CONVOLUTIONS[dims], 6
        self.mode, self.deep = {2: "bilinear", 3: "trilinear"}[dims], deep
        self.corners = up == "corners"
        self.one, self.two = block(dims, 2, width, norm), block(dims, width, 2 * width, norm)
        self.bottom = block(dims, 2 * width, 4 * width, norm)
        self.down_one = POOLS[dims](2) if down == "pool" else own(width, width, 3, stride=2, padding=1)
        self.down_two = POOLS[dims](2) if down == "pool" else own(2 * width, 2 * width, 2, stride=2)
        self.middle = nn.Identity() if middle is None else middle(4 * width)
        is_transposed = up == "transposed"
        self.up_two = UP[dims](24, 12, 2, stride=2) if is_transposed else nn.Sequential(own(24, 12, 1), self._resize())
        self.up_one = (
            UP[dims](12, 6, 4, stride=2, padding=1) if is_transposed else nn.Sequential(own(12, 6, 1), self._resize())
        )
        self.four, self.five = block(dims, 24, 12, norm), block(dims, 12, 6, norm)
        self.head, self.side = own(6, 3, 1), own(12, 3, 1)

    def _resize(self) -> nn.Module:
        return nn.Upsample(scale_factor=2, mode=self.mode, align_corners=self.corners)

    def forward(self, grid: Tensor) -> Any:
        one = self.one(grid)
        two = self.two(self.down_one(one))
        bottom = self.middle(self.bottom(self.down_two(two)))
        four = self.four(torch.cat([self.up_two(bottom), two], 1))
        result = self.head(self.five(torch.cat([self.up_one(four), one], 1)))
        return [result, self.side(four)] if self.deep else result


class Squeeze(nn.Module):
    """Squeeze and excite."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(channels, channels // 2), nn.Linear(channels // 2, channels)

    def forward(self, grid: Tensor) -> Tensor:
        scale = self.last(F.relu(self.first(grid.mean(tuple(range(2, grid.dim())))))).sigmoid()
        return grid * scale.reshape(*scale.shape, *[1] * (grid.dim() - 2))


class Tokens(nn.Module):
    """Softmax attention over all positions, by torch's function or by its products."""

    def __init__(self, channels: int, *, by_hand: bool) -> None:
        super().__init__()
        self.inner, self.outer, self.by_hand = nn.Linear(channels, 3 * channels), nn.Linear(channels, channels), by_hand

    def forward(self, grid: Tensor) -> Tensor:
        tokens = self.inner(grid.flatten(2).transpose(1, 2))
        query, key, value = tokens.unflatten(2, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        if self.by_hand:
            found = (query @ key.transpose(-1, -2) / key.shape[-1] ** 0.5).softmax(-1) @ value
        else:
            found = F.scaled_dot_product_attention(query, key, value)
        found = self.outer(found.transpose(1, 2).flatten(2))
        return grid + found.transpose(1, 2).reshape(grid.shape)


class ChannelNorm(nn.LayerNorm):
    """Layer norm over channels."""

    def forward(self, grid: Tensor) -> Tensor:
        return super().forward(grid.movedim(1, -1)).movedim(-1, 1)


class Classifier(nn.Module):
    """A class of the whole."""

    def __init__(self, dims: int, norm: str, pool: str = "Avg", *, head_norm: bool = False) -> None:
        super().__init__()
        self.body = nn.Sequential(
            block(dims, 2, 8, norm, stride=2), block(dims, 8, 8, norm), block(dims, 8, 16, norm, stride=2)
        )
        self.pool = getattr(nn, f"Adaptive{pool}Pool{dims}d")(1)
        self.head = (
            nn.Sequential(nn.Linear(16, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)) if head_norm else nn.Linear(16, 4)
        )

    def forward(self, grid: Tensor) -> Tensor:
        return self.head(self.pool(self.body(grid)).flatten(1))


def attention(operator: str, **options: Any) -> Callable[[int], nn.Module]:
    """Return what makes an attention of so many channels."""
    return lambda channels: GridAttention(channels, operator, **options)


def dice(output: Tensor, target: Tensor) -> Tensor:
    """One minus the mean Dice of classes."""
    share, own = output.softmax(1), F.one_hot(target, output.shape[1]).movedim(-1, 1).to(output.dtype)
    dims = (0, *range(2, output.dim()))
    return 1 - ((2 * (share * own).sum(dims) + 1e-5) / ((share + own).sum(dims) + 1e-5)).mean()


def deep_loss(outputs: Sequence[Tensor], target: Tensor) -> Tensor:
    """Cross entropy at two sizes, with half the weight at the smaller."""
    small = target[(..., *[slice(None, None, 2)] * (target.dim() - 1))]
    return F.cross_entropy(outputs[0], target) + 0.5 * F.cross_entropy(outputs[1], small)


WEIGHT = torch.tensor([0.2, 1.0, 2.0], dtype=torch.float64)
LOSSES: dict[str, Callable[..., Tensor]] = {
    "mse": F.mse_loss,
    "weighted mse": lambda output, target, weight: (weight * (output - target) ** 2).mean(),
    "smooth l1": F.smooth_l1_loss,
    "bce": F.binary_cross_entropy_with_logits,
    "cross entropy": lambda output, target: F.cross_entropy(output, target, weight=WEIGHT.to(output), ignore_index=2),
    "dice": dice,
    "dice + cross entropy": lambda output, target: dice(output, target) + F.cross_entropy(output, target),
    "class": F.cross_entropy,
    "deep": deep_loss,
}


def targets_of(kind: str, output: Any) -> list[Tensor]:
    """Return targets of an output for a loss."""
    first = output[0] if isinstance(output, list) else output
    draw = torch.Generator().manual_seed(5)
    if kind == "class":
        return [torch.randint(0, first.shape[1], (len(first),), generator=draw)]
    if kind in ("cross entropy", "dice", "dice + cross entropy", "deep"):
        return [torch.randint(0, first.shape[1], (len(first), *first.shape[2:]), generator=draw)]
    target = torch.rand(first.shape, generator=draw, dtype=first.dtype)
    if kind == "weighted mse":
        return [target, torch.rand(len(first), 1, *first.shape[2:], generator=draw, dtype=first.dtype)]
    return [target]


class Result(NamedTuple):
    """A loss, the gradients of parameters and of the volume, and the buffers after it."""

    loss: Tensor
    grads: dict[str, Tensor | None]
    buffers: dict[str, Tensor]


def differentiate(net: nn.Module, loss: Callable[[nn.Module, Tensor], Tensor], volume: Tensor) -> Result:
    """Run a copy of a network and its loss, and its backward pass."""
    net, volume = copy.deepcopy(net), volume.clone().requires_grad_()
    value = loss(net, volume)
    value.backward()
    grads = {name: each.grad for name, each in net.named_parameters()} | {"the volume": volume.grad}
    return Result(value.detach(), grads, dict(net.named_buffers()))


def farthest(got: Result, want: Result) -> tuple[float, str]:
    """Return the largest relative distance of a number, a gradient or a buffer, and its name."""
    pairs = [("the loss", got.loss, want.loss)]
    top = max(1e-300, *(float(each.abs().max()) for each in want.grads.values() if each is not None))
    found = []
    for name, each in want.grads.items():
        own = got.grads[name]
        assert (own is None) == (each is None), name
        if each is not None:
            # Of biases before norms, whose gradient is 0 but for rounding, relative to the largest.
            size = float(each.abs().max())
            found.append((float((own - each).abs().max()) / (size if size > 1e-9 * top else top), name))
    pairs += [(name, got.buffers[name].double(), each.double()) for name, each in want.buffers.items()]
    found += [(float((own - each).abs().max() / each.abs().max().clamp(min=1e-30)), name) for name, own, each in pairs]
    return max(found)
