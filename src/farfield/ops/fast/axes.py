"""Sums along axes and outer sums, each the gradient of the other, by kernels that read or write a grid once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from farfield.ops.fast import kernels
from farfield.ops.function import accelerate, shapes_alone
from farfield.ops.grid import (
    Gathered,
    add_axes,
    along_axes,
    hide,
    in_channels_last,
    lay_out,
    valid_counts,
)


def sum_axes(grid: Tensor, mask: Tensor | None = None, weight: Tensor | None = None) -> Tensor:
    """Return `grid.along_axes` of a whole grid."""
    return cast(Tensor, _sum_axes(hide(grid, mask, weight), in_channels_last(grid)))


def outer_sum(responses: Tensor, size: Sequence[int]) -> Tensor:
    """Return `grid.add_axes` of a whole grid; in training, the kernel writes large grids past the caches."""
    return cast(Tensor, _outer_sum(responses, tuple(size), responses.requires_grad and torch.is_grad_enabled()))


def gather(grid: Tensor, mask: Tensor | None, weight: Tensor | None = None) -> Gathered:
    """Gather `grid.axis_sums` of a whole grid."""
    counts = valid_counts(grid, mask) if weight is None else sum_axes(weight[:, None])
    return Gathered(sum_axes(grid, mask, weight), counts)


def why_not_sums(grid: Tensor) -> str | None:
    """Return why no kernel sums along the axes, or None."""
    return "one spatial dim" if grid.dim() < 4 else kernels.why_not(grid)


def why_not_outer_sum(responses: Tensor, size: Sequence[int]) -> str | None:
    """Return why no kernel adds up the axes, or None."""
    return "one spatial dim" if len(size) < 2 else kernels.why_not(responses)


def _read_axes(grid: Tensor) -> Tensor:
    """Sum along the axes; a kernel reads the grid once."""
    if why_not_sums(grid) is None:
        return cast(Tensor, kernels.call("axis_sums", grid))
    return along_axes(grid)


def write_sum(responses: Tensor, size: Sequence[int], training: bool) -> Tensor:
    """Add up the axes; a kernel writes the grid once."""
    if why_not_outer_sum(responses, size) is None:
        return cast(Tensor, kernels.call("outer_sum", responses, size, False, training))
    return add_axes(responses, size)


def _spread(arguments: Sequence[Any], kept: Any, grad_outputs: Sequence[Tensor], *_: Any) -> tuple[Tensor, None]:
    """Return the gradient of sums along axes, the outer sum of their gradients; autograd would make a grid per axis."""
    (grid, wide), (grad,) = arguments, grad_outputs
    return write_sum(lay_out(grad.to(grid.dtype), wide), grid.shape[2:], True), None


def _collect(arguments: Sequence[Any], kept: Any, grad_outputs: Sequence[Tensor], *_: Any) -> tuple[Tensor, None, None]:
    """Return the gradient of an outer sum: the sums of its gradient along the axes."""
    return _read_axes(grad_outputs[0]).to(arguments[0].dtype), None, None


_sum_axes = accelerate(
    lambda grid, wide: along_axes(grid),
    lambda grid, wide: _read_axes(grid),
    _spread,
    save=shapes_alone,
    kernels_run=kernels.run,
)
_outer_sum = accelerate(
    lambda responses, size, training: add_axes(responses, size),
    write_sum,
    _collect,
    save=shapes_alone,
    kernels_run=kernels.run,
)
