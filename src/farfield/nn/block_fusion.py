"""Blocks computed without concatenated grids and without the grid of responses. `blocks.py` has the plain forms.

A 1x1 convolution W of a concatenation is a sum, W [a | b] = W_a a + W_b b, and attention is linear in its slots:

    W_far · attention(x) = Σ_r coefficients_r(x) · (W_far · slots_r)

so the block's last convolution acts on the slots of the global path and not on its responses. What the global path adds
is then one product with a few coefficients per position, or, where queries are axis means, one vector per axis.

In inference a block computes a few samples at a time: its wide grid then stays in a cache, and in memory that the C
library reuses, where that of a whole batch takes new pages from the system each time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Protocol, TypeGuard

import torch
from torch import Tensor, nn

from farfield.nn.attention import GridAttention
from farfield.nn.bare import is_bare
from farfield.nn.conv_norm_act import Convolved, add_convolved, convolve
from farfield.ops.engine import attend
from farfield.ops.grid import in_channels_last, in_layout_of
from farfield.ops.modes import is_recorded, is_watched
from farfield.ops.projection import Projection

# Most bytes of the wide grid of the samples that a block computes at once in inference: half of a last cache of 32 MB,
# and less than the size from which the C library takes new pages from the system for each tensor.
SLICE_BYTES = 2**24


class Block(Protocol):
    """The interface of every block."""

    expand: Convolved | None
    depthwise: Convolved
    project: Convolved
    concatenates: bool
    residual: bool
    training: bool
    drop_path: float


class BlockWithAttention(Protocol):
    """The interface of an `AttentionBlock`."""

    expand: Convolved
    depthwise: Convolved
    project: Convolved
    attention: nn.Module
    skip: bool
    stride: int
    residual: bool
    training: bool
    drop_path: float

    def far(self, grid: Tensor) -> Tensor:
        """The global path."""
        ...


def adds_channels(part: nn.Module) -> bool:
    """Whether a part may be computed by `Convolved.across`."""
    return isinstance(part, Convolved) and part.adds_channels


def splits_channels(part: nn.Module) -> bool:
    """Whether a part may be computed by `Convolved.beside`."""
    return isinstance(part, Convolved) and part.splits_channels


def in_slices(
    layers: Sequence[nn.Module],
    compute: Callable[[Tensor], Tensor],
    grid: Tensor,
    wide_channels: int,  # of the widest grid of the layers, if it had as many positions as `grid`
    # Classes whose modules compute each sample by itself in eval mode, if their children do.
    kinds: Sequence[type[nn.Module]],
) -> Tensor:
    """Compute layers for a few samples at a time in inference, where nothing is recorded and no layer was changed."""
    if type(grid) is not Tensor or not grid.is_cpu or is_recorded():
        return compute(grid)
    few = max(1, SLICE_BYTES // max(1, wide_channels * math.prod(grid.shape[2:]) * grid.element_size()))
    if few >= len(grid) or is_watched(grid, *(each for layer in layers for each in layer.parameters())):
        return compute(grid)
    if not all(is_sample_wise(layer, kinds) for layer in layers):
        return compute(grid)
    slices = math.ceil(len(grid) / few)
    parts = [compute(part) for part in grid.split(math.ceil(len(grid) / slices))]
    if in_channels_last(grid):  # of one sample, torch.cat cannot tell the memory format
        return torch.cat([part.movedim(1, -1) for part in parts]).movedim(-1, 1)
    return torch.cat(parts)


def is_sample_wise(module: nn.Module, kinds: Sequence[type[nn.Module]]) -> bool:
    """Whether a module is bare and in eval mode and computes each sample by itself, as all inside it do."""
    if isinstance(module, Convolved):
        alone = is_bare(module, Convolved) and module.has_bare_layers and module.is_pointwise_at_last
        return alone and not any(part.training for part in module.modules())
    alone = is_bare(module, *kinds) and not module.training
    return alone and all(is_sample_wise(child, kinds) for child in module.children())


def base_block(block: Block, grid: Tensor) -> Tensor:
    """Compute `BaseBlock.plain` without concatenating the grid to the expanded channels."""
    wide = [grid if block.expand is None else block.expand(grid)]
    if block.concatenates:
        wide.append(grid)
    out = block.project.across(block.depthwise.beside(wide))
    return drop_samples(block, out).add_(grid) if block.residual else out


def attention_block(block: BlockWithAttention, grid: Tensor) -> Tensor:
    """Compute `AttentionBlock.plain` without concatenating: the last convolution acts on both paths separately."""
    near = block.depthwise(block.expand(grid))
    attention = block.attention
    if block.stride == 1 and enters_by_summary(attention):
        # Where no norm follows, W x + x = (W + 1) x.
        at_once = block.residual and block.skip and not block.training and block.project.norm_or_none is None
        out = with_response(block, attention, near, grid, at_once)
    else:
        at_once = False
        out = block.project.across([near, in_layout_of(near, block.far(grid))])
    return drop_samples(block, out).add_(grid) if block.residual and not at_once else out


def drop_samples(block: Block | BlockWithAttention, out: Tensor) -> Tensor:
    """In training, set the block's output to 0 for some samples and scale it up for the others (stochastic depth)."""
    if not block.training or block.drop_path == 0:
        return out
    share = 1 - block.drop_path
    return out * out.new_empty(out.shape[0], *[1] * (out.dim() - 1)).bernoulli_(share).div_(share)


def enters_by_summary(attention: nn.Module) -> TypeGuard[GridAttention]:
    """Whether the last convolution acts on the slots: a plain module with a basis, or with axis means as queries."""
    if not is_bare(attention, GridAttention):
        return False
    operator = attention.operator
    few = operator.basis is not None or not operator.queries_from.side_by_side
    return few and attention.output is None and not attention.residual


def with_response(
    block: BlockWithAttention, attention: GridAttention, near: Tensor, grid: Tensor, residual: bool
) -> Tensor:
    """Run the block's last layers on [near | attention(grid)], with the skip on [near | grid + attention(grid)]."""
    project = block.project
    near_weight, far_weight = project.convolution.weight.split([near.shape[1], grid.shape[1]], 1)

    def convolve_both(bias: Tensor | None, responses: Tensor | None) -> Tensor:
        out = (
            convolve(near, near_weight, bias)
            if responses is None
            else add_convolved(responses, near, near_weight, bias)
        )
        if not block.skip:
            return out
        # The residual adds the grid.
        return add_convolved(out, grid, plus_identity(far_weight) if residual else far_weight)

    last = Projection(far_weight.flatten(1), project.convolution.bias)
    call = attention.call_for(grid)._replace(output=last)
    return project.after(attend(call, grid, grid, grid, target=convolve_both))


def plus_identity(weight: Tensor) -> Tensor:
    """Return the weight of a 1x1 convolution that adds its input."""
    identity = torch.eye(len(weight), dtype=weight.dtype, device=weight.device)
    return weight + identity.view_as(weight)
