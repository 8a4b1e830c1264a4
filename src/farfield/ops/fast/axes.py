"""Sums along axes and outer sums whose gradients are each other, and kernels that read or write a grid once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from farfield.ops.fast import kernels
from farfield.ops.grid import add_axes, along_axes, hide, in_channels_last
from farfield.ops.modes import keeps_all


def sum_axes(grid: Tensor, mask: Tensor | None = None) -> Tensor:
    """`grid.along_axes` of a whole grid."""
    grid = hide(grid, mask)
    if not keeps_all(grid):
        return cast(Tensor, _AxisSums.apply(grid))
    if grid.dim() > 3 and kernels.runs(grid):
        return cast(Tensor, torch.ops.farfield.axis_sums(grid))
    return along_axes(grid)


def outer_sum(responses: Tensor, size: Sequence[int]) -> Tensor:
    """`grid.add_axes` of a whole grid."""
    if len(size) > 1 and not keeps_all(responses):
        return cast(Tensor, _OuterSum.apply(responses, tuple(size)))
    return write_sum(responses, size)


def write_sum(responses: Tensor, size: Sequence[int], *, training: bool = False) -> Tensor:
    """The same without a gradient; a kernel writes otherwise in training, where what it writes is new memory."""
    if len(size) > 1 and kernels.runs(responses):
        return cast(Tensor, torch.ops.farfield.outer_sum(responses, size, False, training))
    return add_axes(responses, size)


class _AxisSums(torch.autograd.Function):
    """`sum_axes`; its gradient is one outer sum, where autograd adds up a grid an axis."""

    @staticmethod
    def forward(ctx: Any, grid: Tensor) -> Tensor:
        """Sum, and note the grid's sides and memory order."""
        ctx.size, ctx.dtype, ctx.channels_last = grid.shape[2:], grid.dtype, in_channels_last(grid)
        return sum_axes(grid)

    @staticmethod
    def backward(ctx: Any, upon: Tensor) -> Tensor:
        """Every cell takes the gradients of its indices."""
        upon = upon.to(ctx.dtype)
        upon = upon.mT.contiguous().mT if ctx.channels_last else upon.contiguous()
        return outer_sum(upon, ctx.size) if torch.is_grad_enabled() else write_sum(upon, ctx.size, training=True)


class _OuterSum(torch.autograd.Function):
    """`outer_sum`; its gradient is the axis sums, read once where a kernel reads once."""

    @staticmethod
    def forward(ctx: Any, responses: Tensor, size: tuple[int, ...]) -> Tensor:
        """Add up, and note the dtype."""
        ctx.dtype = responses.dtype
        return write_sum(responses, size, training=True)

    @staticmethod
    def backward(ctx: Any, upon: Tensor) -> tuple[Tensor, None]:
        """Every index takes the gradients of its cells."""
        return sum_axes(upon).to(ctx.dtype), None
