"""Batch norm in training and the clamp after it, whose gradients are computed at once.

Torch computes the gradient of the clamp, which is as large as the grid, and from it that of the norm. Here neither it
nor the clamped output is needed: what was clamped follows from the grid, which is read twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from farfield.ops.fast import kernels
from farfield.ops.function import accelerate
from farfield.ops.grid import in_channels_last
from farfield.ops.modes import are_themselves, is_recorded_by_autograd


def norm_and_clamp(
    grid: Tensor, statistics: Sequence[Tensor], momentum: float, eps: float, bounds: tuple[float, float]
) -> Tensor | None:
    """Norm a grid by the mean and variance of its batch, and clamp it; None if no kernel computes the gradients.

    Args:
        grid: `(b, c, *n)`.
        statistics: Running mean and variance, which are updated, weight and bias of the norm, `(c)` each.
        momentum: Weight of this batch in the running statistics.
        eps: Added to the variance.
        bounds: The least and the largest number of the output.
    """
    mean, variance, weight, bias = statistics
    if not is_recorded_by_autograd(grid) or not are_themselves(grid, *statistics):
        return None
    one_each = grid.numel() <= grid.shape[1]  # which torch refuses
    if grid.dim() < 3 or one_each or not kernels.fit(grid, *statistics):
        return None
    if any(each.dtype != torch.float32 for each in (grid, *statistics)):
        return None
    return _norm_and_clamp(grid, weight, bias, mean, variance, momentum, eps, bounds)[0]


def plain_norm(
    grid: Tensor, weight: Tensor, bias: Tensor, mean: Any, variance: Any, momentum: float, eps: float, bounds: Any
) -> Tensor:
    """Norm and clamp by torch's functions, without the running statistics, which have no gradient."""
    return F.hardtanh(F.batch_norm(grid, None, None, weight, bias, True, 0.0, eps), *bounds)


def torch_norm(
    grid: Tensor, weight: Tensor, bias: Tensor, mean: Any, variance: Any, momentum: float, eps: float, bounds: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `plain_norm` and update the running statistics; return also the means and the inverse deviations."""
    out, means, inverses = torch.native_batch_norm(grid, weight, bias, mean, variance, True, momentum, eps)
    low, high = bounds
    return F.hardtanh(out, low, high, inplace=True), means, inverses


def gradients_of_norm(
    arguments: Sequence[Any], kept: Sequence[Tensor], grad_outputs: Sequence[Tensor], *_: Any
) -> tuple[Tensor | None, ...]:
    """Return the gradients of grid, weight and bias."""
    (grid, weight, bias, *others), (grad,) = arguments, grad_outputs
    grad = grad.movedim(1, -1).contiguous().movedim(-1, 1) if in_channels_last(grid) else grad.contiguous()
    grads = kernels.call("norm_and_clamp_backward", grid, weight, bias, *kept, *others[-1], grad)
    return *grads, None, None, None, None, None


def without_running(arguments: Sequence[Any]) -> Sequence[Any]:
    """Return the arguments without the running statistics, which may change before the backward pass."""
    return [*arguments[:3], None, None, *arguments[5:]]


_norm_and_clamp = accelerate(
    plain_norm, torch_norm, gradients_of_norm, kept=2, save=without_running, kernels_run=kernels.run
)
