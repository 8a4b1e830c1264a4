"""Kernels of convolution, batch norm and clamp, which read a grid once where torch's layers read it several times.

They are no steps of attention and have a switch of their own: `FARFIELD_LAYER_KERNELS=0` runs torch's layers alone.

* torch's oneDNN convolves and clamps, or adds a convolution to a grid, in one private operation;
* a kernel of this library computes the gradients of batch norm in training and the clamp after it at once. Torch
  computes the gradient of the clamp, which is as large as the grid, and from it that of the norm. Here neither it nor
  the clamped output is needed: what was clamped follows from the grid, which is read twice.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import conv_flop_count, flop_registry, register_flop_formula

from farfield.ops.fast import kernels
from farfield.ops.function import accelerate
from farfield.ops.grid import in_layout_of
from farfield.ops.modes import are_themselves, is_recorded, is_recorded_by_autograd, is_watched

SWITCH = "FARFIELD_LAYER_KERNELS"

# The arguments of torch's private operations as they are called below; operations with others are not called.
_CONVOLVE = "X W B padding stride dilation groups attr scalars algorithm"
_ADD = "other X W B padding stride dilation groups binary_attr alpha unary_attr unary_scalars unary_algorithm"


def is_on() -> bool:
    return os.environ.get(SWITCH) != "0"


# ---- torch's oneDNN --------------------------------------------------------------------------------------------------
def convolve_and_clamp(
    grid: Tensor, weight: Tensor, bias: Tensor | None, bounds: tuple[float, float], *how: Any
) -> Tensor | None:
    """Convolve a grid and clamp the output; None if oneDNN does not. `how`: padding, stride, dilation and groups."""
    if not fuses(grid, weight):
        return None
    return cast(Tensor, _private_operations()[0](grid, weight, bias, *how, "hardtanh", [*bounds], ""))


def add_pointwise(out: Tensor, grid: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
    """Add a 1x1 convolution of a grid to `out`, in place; None if oneDNN does not do it at once."""
    if not fuses(grid, weight, out):
        return None
    how = (0, 0), (1, 1), (1, 1), 1
    return cast(Tensor, _private_operations()[1](out, grid, weight, bias, *how, "add", 1.0, None, [], None))


def fuses(grid: Tensor, weight: Tensor, *others: Tensor) -> bool:
    """Whether torch's oneDNN can convolve and clamp, or add to another grid, in one operation."""
    # Before all else: a compiler does not follow the test for oneDNN.
    if is_watched(grid, weight, *others) or not is_on() or None in _private_operations():
        return False
    able = torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled
    fits = type(grid) is Tensor and grid.is_cpu and grid.dtype == torch.float32 and weight.dim() == 4
    same = all(each.dtype == grid.dtype for each in others)
    return bool(able) and fits and same and not torch.is_autocast_enabled("cpu")


@functools.cache
def _private_operations() -> tuple[Any, Any]:
    """Return torch's private operations that convolve and clamp, and that add; None for one that torch lacks."""
    convolve = _find_operation("_convolution_pointwise", "default", _CONVOLVE)
    add = _find_operation("_convolution_pointwise_", "binary", _ADD)
    return convolve, add


def _find_operation(name: str, overload: str, arguments: str) -> Any:
    packet = getattr(torch.ops.mkldnn, name, None)
    operation = getattr(packet, overload, None)
    if operation is None or [each.name for each in operation._schema.arguments] != arguments.split():
        return None
    if packet not in flop_registry:  # those of the convolution: a clamp and an addition have none
        at = arguments.split().index("X")
        register_flop_formula(packet)(lambda *shapes, out_shape: conv_flop_count(shapes[at], shapes[at + 1], out_shape))
    return operation


# Now, and not at the first call: a counter of FLOPs knows the formulas that were registered before it began.
_private_operations()


# ---- batch norm in training, and a clamp -----------------------------------------------------------------------------
def norm_and_clamp(
    grid: Tensor, statistics: Sequence[Tensor], momentum: float, eps: float, bounds: tuple[float, float]
) -> Tensor | None:
    """Norm a grid `(b, c, *n)` by its batch, and clamp it to bounds; None if no kernel computes the gradients."""
    mean, variance, weight, bias = statistics  # (c) each; the running mean and variance are updated
    if is_recorded() or not is_on() or not is_recorded_by_autograd(grid) or not are_themselves(grid, *statistics):
        return None
    one_each = grid.numel() <= grid.shape[1]  # which torch refuses
    if grid.dim() < 3 or one_each or kernels.why_not(grid, *statistics) is not None:
        return None
    if any(each.dtype != torch.float32 for each in (grid, *statistics)):
        return None
    return cast(Tensor, _norm_and_clamp(grid, weight, bias, mean, variance, momentum, eps, bounds)[0])


def _plain_norm(
    grid: Tensor, weight: Tensor, bias: Tensor, mean: Any, variance: Any, momentum: float, eps: float, bounds: Any
) -> Tensor:
    """Norm and clamp by torch's functions, without the running statistics, which have no gradient."""
    return F.hardtanh(F.batch_norm(grid, None, None, weight, bias, True, 0.0, eps), *bounds)


def _torch_norm(
    grid: Tensor, weight: Tensor, bias: Tensor, mean: Any, variance: Any, momentum: float, eps: float, bounds: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `_plain_norm` and update the running statistics; return also the means and the inverse deviations."""
    out, means, inverses = torch.native_batch_norm(grid, weight, bias, mean, variance, True, momentum, eps)
    low, high = bounds
    return F.hardtanh(out, low, high, inplace=True), means, inverses


def _gradients_of_norm(
    arguments: Sequence[Any], kept: Sequence[Tensor], grad_outputs: Sequence[Tensor], *_: Any
) -> tuple[Tensor | None, ...]:
    """Return the gradients of grid, weight and bias."""
    (grid, weight, bias, *others), (grad,) = arguments, grad_outputs
    grad = in_layout_of(grid, grad)
    grads = kernels.call("norm_and_clamp_backward", grid, weight, bias, *kept, *others[-1], grad)
    return *grads, None, None, None, None, None


def _without_running(arguments: Sequence[Any]) -> Sequence[Any]:
    """Return the arguments without the running statistics, which may change before the backward pass."""
    return [*arguments[:3], None, None, *arguments[5:]]


_norm_and_clamp = accelerate(
    _plain_norm, _torch_norm, _gradients_of_norm, kept=2, save=_without_running, kernels_run=kernels.run
)
