"""The blocks of the papers' compact networks: KAN Figure 4, SAN Figure 2.

Letters as in the papers: c input channels, d output channels, r expansion, s stride. Every convolution is followed by
batch norm and ReLU6, the last 1x1 by batch norm alone.

Blocks are computed without concatenated grids and without the grid of responses. A 1x1 convolution W of a concatenation
is a sum, W [a | b] = W_a a + W_b b, and attention is linear in its slots:

    W_far · attention(x) = Σ_r coefficients_r(x) · (W_far · slots_r)

so the block's last convolution acts on the slots of the global path and not on its responses. What the global path adds
is then one product with a few coefficients per position, or, where queries are axis means, one vector per axis.
"""

from __future__ import annotations

import copy
from typing import Any, Literal, TypeGuard

import torch
from jaxtyping import Float
from torch import Tensor, nn

from farfield._refusals import door
from farfield.nn.attention import GridAttention
from farfield.nn.bare import is_bare
from farfield.nn.norm import CoefficientNorm
from farfield.ops.engine import attend
from farfield.ops.grid import in_layout_of, windows
from farfield.ops.projection import Projection
from farfield.ops.table import Operator, look_up_operator
from farfield_papers.nn.block_checks import check_block, check_channels, check_response_start
from farfield_papers.nn.bn_folding import Fusable
from farfield_papers.nn.conv_norm_act import (
    add_convolved,
    adds_channels,
    convolve,
    convolved,
    scale_and_shift,
    splits_channels,
)
from farfield_papers.nn.slices import in_slices
from farfield_papers.nn.squeeze_excite import SqueezeExcite

# Least bound of a block's output: in float16 the fourth root of the largest number would be 16.
LEAST_BOUND = 1000.0


class BaseBlock(Fusable):
    """Inverted residual: 1x1 to rc channels, depthwise 3x3 of stride s, 1x1 to d; plus the input if s = 1 and c = d.

    With `skip` the first 1x1 makes (r-1)c channels and the input itself is the rest of the rc, which reuses features
    and saves c² weights. Without it the block is MobileNetV2's. At r = 1 there is no first 1x1, and `skip` changes
    nothing.

    Args:
        channels: c, channels of the input.
        out_channels: d, channels of the output.
        expansion: r, 1 at least.
        stride: s.
        skip: Whether the input is concatenated to the expanded channels.
        spatial_dims: Number of spatial dims of the grid, 1 to 3.

    Attributes:
        drop_path: In training, where the block adds its input: the probability that a sample's output is the input
            alone (stochastic depth); 0 by default.

    Raises:
        ValueError: For an expansion or stride below 1, or a number of spatial dims that is not 1 to 3.

    Cost:
        With m the output's positions, b·n·c·rc MACs for the first 1x1 (b·n·c·(r-1)c with `skip`), 9·b·m·rc for the 3x3
        in two dims, b·m·rc·d for the last. In eval mode without gradients, on a CPU, a few samples are computed at a
        time, so that their rc channels are held in 16 MB (or those of one sample).

    Reference: KAN Figure 4 (a) BaseModule, (b) BaseSkipModule; SAN Figure 2 (a).

    Example:
        >>> import torch
        >>> from farfield_papers.nn import BaseBlock
        >>> BaseBlock(24, 32, stride=2, skip=True)(torch.randn(2, 24, 9, 9)).shape
        torch.Size([2, 32, 5, 5])
    """

    drop_path: float = 0.0

    def __init__(
        self,
        channels: int,
        out_channels: int,
        *,
        expansion: int = 6,
        stride: int = 1,
        skip: bool = False,
        spatial_dims: int = 2,
    ) -> None:
        super().__init__()
        with door("BaseBlock"):
            check_block(expansion=expansion, stride=stride, spatial_dims=spatial_dims, smallest=1)
        wide = expansion * channels
        self.channels, self.stride, self.spatial_dims = channels, stride, spatial_dims
        self.concatenates = skip and expansion > 1
        self.expanded = wide - channels if self.concatenates else wide
        self.residual = stride == 1 and channels == out_channels
        self.expand = convolved(channels, self.expanded, spatial_dims=spatial_dims) if expansion > 1 else None
        self.depthwise = convolved(wide, wide, kernel=3, stride=stride, groups=wide, spatial_dims=spatial_dims)
        self.project = convolved(wide, out_channels, activate=False, spatial_dims=spatial_dims)

    def forward(self, grid: Float[Tensor, "b c *n"]) -> Float[Tensor, "b d *m"]:
        """Return the block's output: `out_channels`, and each axis divided by the stride and rounded up.

        Raises:
            ShapeError: If the grid has other channels, or another number of spatial dims, than the block.
        """
        with door("BaseBlock"):
            check_channels(grid, self.channels, self.spatial_dims)
        compute = self._fused if splits_channels(self.depthwise) and adds_channels(self.project) else self.plain
        wide = self.expanded + self.channels if self.concatenates else self.expanded
        return in_slices([*self.children()], compute, grid, wide, SAMPLE_WISE)

    def plain(self, grid: Tensor) -> Tensor:
        """Compute the block layer by layer, as `forward` does where a layer is wrapped or has hooks."""
        wide = grid if self.expand is None else self.expand(grid)
        if self.concatenates:
            wide = torch.cat([wide, grid], 1)
        out = self.project(self.depthwise(wide))
        return grid + _drop_samples(self, out) if self.residual else out

    def _fused(self, grid: Tensor) -> Tensor:
        """Compute the block without concatenating the grid to the expanded channels."""
        wide = [grid if self.expand is None else self.expand(grid)]
        if self.concatenates:
            wide.append(grid)
        out = self.project.across(self.depthwise.beside(wide))
        return _drop_samples(self, out).add_(grid) if self.residual else out


class AttentionBlock(Fusable):
    """Inverted residual with a parallel global path: [depthwise(expand(x)) | attention(x)] to d channels by a 1x1.

    The local path makes (r-1)c channels, the global path the c others, so the last 1x1 is as wide as `BaseBlock`'s and
    each position mixes local and global features. The attention's input is the block's input, not the expanded
    channels, and only the values are projected: c² weights. At s > 1 the global path is average-pooled by s.

    Args:
        channels: c, channels of the input.
        out_channels: d, channels of the output.
        operator: A name in `ops.OPERATORS`, an `Operator`, or a module that keeps a grid's shape, as `SqueezeExcite`.
        expansion: r, 2 at least.
        stride: s.
        heads: Heads of the attention; unused if `operator` is a module.
        skip: Whether the block's input is added to the attention's output (where s = 1).
        response_start: First value of the weights of the norm of the responses: "zero", so that the global path is the
            block's input at first (0 without a skip) and training decides how much of the response it adds, or "one",
            the literal form of SAN, whose normed responses are as large as the input from the start. Unused where the
            coefficients are a softmax of products: their norm is one of products (KAN), which would give all positions
            one response at 0.
        spatial_dims: Number of spatial dims of the grid, 1 to 3.

    Attributes:
        drop_path: In training, where the block adds its input: the probability that a sample's output is the input
            alone (stochastic depth); 0 by default.

    Raises:
        ValueError: For an expansion below 2, a stride below 1, a number of spatial dims that is not 1 to 3, or another
            start of the responses.
        LookupError: For a name that is not in `ops.OPERATORS`.
        ShapeError: If heads do not divide the channels.

    Cost:
        The MACs of `BaseBlock` with `skip`, and those of the attention. In eval mode without gradients, on a CPU, a few
        samples are computed at a time, as in `BaseBlock`, unless the global path is a module of the user.

    Reference: KAN Figure 4 (c) AttnModule, (d) AttnSkipModule; SAN Figure 2 (b).

    Example:
        >>> import torch
        >>> from farfield_papers.nn import AttentionBlock
        >>> AttentionBlock(32, 64, "kronecker_qkv")(torch.randn(2, 32, 14, 14)).shape
        torch.Size([2, 64, 14, 14])
    """

    drop_path: float = 0.0

    def __init__(
        self,
        channels: int,
        out_channels: int,
        operator: str | Operator | nn.Module,
        *,
        expansion: int = 6,
        stride: int = 1,
        heads: int = 4,
        skip: bool = True,
        response_start: Literal["zero", "one"] = "zero",
        spatial_dims: int = 2,
    ) -> None:
        super().__init__()
        with door("AttentionBlock"):
            check_block(expansion=expansion, stride=stride, spatial_dims=spatial_dims, smallest=2)
            check_response_start(response_start)
        self.channels, self.stride, self.spatial_dims = channels, stride, spatial_dims
        self.expanded = (expansion - 1) * channels
        self.residual = stride == 1 and channels == out_channels
        self.skip = skip and stride == 1
        self.expand = convolved(channels, self.expanded, spatial_dims=spatial_dims)
        self.depthwise = convolved(
            self.expanded, self.expanded, kernel=3, stride=stride, groups=self.expanded, spatial_dims=spatial_dims
        )
        if not isinstance(operator, nn.Module):
            with door("AttentionBlock"):
                norms_responses = not look_up_operator(operator)[1].has_scale
            norm = "zero" if norms_responses and response_start == "zero" else True
            options: dict[str, Any] = {"bias": False, "scale": 1.0, "coefficient_norm": norm}
            operator = GridAttention(channels, operator, heads=heads, project="v", **options)
        self.attention = operator
        self.project = convolved(self.expanded + channels, out_channels, activate=False, spatial_dims=spatial_dims)

    def forward(self, grid: Float[Tensor, "b c *n"]) -> Float[Tensor, "b d *m"]:
        """Return the block's output: `out_channels`, and each axis divided by the stride and rounded up.

        In eval mode the output of some operators is clamped, see `bounded`.

        Raises:
            ShapeError: If the grid has other channels, or another number of spatial dims, than the block.
        """
        with door("AttentionBlock"):
            check_channels(grid, self.channels, self.spatial_dims)
        compute = self._fused if adds_channels(self.project) else self.plain
        return self.bounded(in_slices([*self.children()], compute, grid, self.expanded + self.channels, SAMPLE_WISE))

    def plain(self, grid: Tensor) -> Tensor:
        """Compute the block layer by layer, without the bound, as `forward` does for layers with hooks or wrappers."""
        near = self.depthwise(self.expand(grid))
        out = self.project(torch.cat([near, self.far(grid)], 1))
        return grid + _drop_samples(self, out) if self.residual else out

    def _fused(self, grid: Tensor) -> Tensor:
        """Compute the block without concatenating: the last convolution acts on both paths separately."""
        near = self.depthwise(self.expand(grid))
        at_once = False
        if self.stride == 1 and _enters_by_summary(self.attention):
            # Where no norm follows, W x + x = (W + 1) x.
            at_once = self.residual and self.skip and not self.training and self.project.norm_or_none is None
            out = self._add_attention(self.attention, near, grid, residual=at_once)
        else:
            out = self.project.across([near, in_layout_of(near, self.far(grid))])
        return _drop_samples(self, out).add_(grid) if self.residual and not at_once else out

    def _add_attention(self, attention: GridAttention, near: Tensor, grid: Tensor, *, residual: bool) -> Tensor:
        """Run the last layers on [near | attention(grid)], with the skip on [near | grid + attention(grid)]."""
        near_weight, far_weight = self.project.convolution.weight.split([near.shape[1], grid.shape[1]], 1)

        def convolve_both(bias: Tensor | None, responses: Tensor | None) -> Tensor:
            if responses is None:
                out = convolve(near, near_weight, bias)
            else:
                out = add_convolved(responses, near, near_weight, bias)
            if not self.skip:
                return out
            if not residual:
                return add_convolved(out, grid, far_weight)
            identity = torch.eye(len(far_weight), dtype=far_weight.dtype, device=far_weight.device)
            return add_convolved(out, grid, far_weight + identity.view_as(far_weight))

        last = Projection(far_weight.flatten(1), self.project.convolution.bias)
        call = attention.call_for(grid)._replace(output=last)
        return self.project.after(attend(call, grid, grid, grid, target=convolve_both))

    def far(self, grid: Tensor) -> Tensor:
        """Return the global path: attention of the grid, plus the grid if `skip`, pooled by the stride."""
        far = self.attention(grid)
        if self.skip:
            far = grid + far
        return self.average(far) if self.stride > 1 else far

    def bounded(self, out: Tensor) -> Tensor:
        """In eval mode, clamp the block's output for operators whose responses are not averages of values.

        Such a response is a product of two or three factors computed from the input. In training, batch norm bounds it.
        In eval mode it does not for an image that is far from the running statistics, and after a few more blocks the
        output would be infinite. The bound is the fourth root of the dtype's largest number, 4·10⁹ in float32, and 1000
        at least, so that no image near the statistics is changed.
        """
        attention = self.attention
        if self.training or type(attention) is not GridAttention or attention.operator.averages:
            return out
        largest = max(torch.finfo(out.dtype).max ** 0.25, LEAST_BOUND)
        if out.requires_grad or torch.jit.is_tracing():  # so that a trace is the same with and without gradients
            return out.clamp(-largest, largest)
        return out.clamp_(-largest, largest)

    def fold(self) -> None:
        """Fold a norm of responses: its scale into the value projection, its shift into the last convolution's bias."""
        if not (adds_channels(self.project) and is_bare(self.attention, GridAttention)):
            return
        norm, value = self.attention.coefficient_norm, self.attention.value
        if not (is_bare(norm, CoefficientNorm) and is_bare(value, nn.Linear)) or self.attention.output is not None:
            return
        if norm.bias is None or self.project.convolution.bias is None:
            return
        # Another block may have the same parts, and the keys may have the same projection.
        self.attention, self.project = attention, project = copy.deepcopy((self.attention, self.project))
        attention.value = value = copy.deepcopy(value)
        convolution: Any = project.convolution
        scale, shift = scale_and_shift(norm.running_mean, norm.running_var, norm.weight, norm.bias, norm.eps)
        value.weight.mul_(scale[:, None])
        if value.bias is not None:
            value.bias.mul_(scale)
        matrix = convolution.weight[:, self.expanded :].flatten(1)
        convolution.bias.add_(matrix @ shift.to(matrix))
        attention.coefficient_norm = None

    def average(self, grid: Tensor) -> Tensor:
        """Average-pool by the stride to the size of the depthwise convolution: 7 positions at stride 2 give 4."""
        # Not torch's pooling with ceil_mode, which AOTInductor compiles only for sizes of the example's parity.
        strides = (self.stride,) * self.spatial_dims
        positions = windows(grid.new_ones((1, 1, *grid.shape[2:])), strides, 0).sum(-1)
        return windows(grid, strides, 0).sum(-1) / positions


def _drop_samples(block: BaseBlock | AttentionBlock, out: Tensor) -> Tensor:
    """In training, set the block's output to 0 for some samples and scale it up for the others (stochastic depth)."""
    if not block.training or block.drop_path == 0:
        return out
    share = 1 - block.drop_path
    return out * out.new_empty(out.shape[0], *[1] * (out.dim() - 1)).bernoulli_(share).div_(share)


def _enters_by_summary(attention: nn.Module) -> TypeGuard[GridAttention]:
    """Whether the last convolution acts on the slots: a plain module with a basis, or with axis means as queries."""
    if not is_bare(attention, GridAttention):
        return False
    operator = attention.operator
    few = operator.basis is not None or not operator.queries_from.side_by_side
    return few and attention.output is None and not attention.residual


# In eval mode these compute each sample by itself, if the modules inside them do.
SAMPLE_WISE = (BaseBlock, AttentionBlock, SqueezeExcite, GridAttention, CoefficientNorm, nn.Linear, nn.Sequential)
