"""Softmax attention by torch's kernel, which keeps no matrix of products.

The kernel has first derivatives in reverse mode only; all other derivatives are those of the equation. Positions are
`(b, h, positions, channels)` here, as the kernel takes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from farfield.ops.function import accelerate
from farfield.ops.grid import accumulation
from farfield.ops.modes import are_themselves, is_recorded


def fused_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """Compute softmax(scale · Q Kᵀ) V: `(b, h, m, c)`, from `(b, h, m, d)`, `(b, h, n, d)` and `(b, h, n, c)`."""
    if is_recorded():
        return _scaled_dot_product(query, key, value, mask, scale)
    if not are_themselves(query, key, value):  # under a transform of torch.func, or with a tangent
        return cast(Tensor, _transformed(query, key, value, mask, scale))
    response = _scaled_dot_product(query, key, value, mask, scale)
    return cast(Tensor, _derivable(response, query, key, value, mask, scale)) if response.requires_grad else response


def _scaled_dot_product(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)


def _attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    return (_weigh(query, key, mask, scale) @ value.to(accumulation(value.dtype))).to(value.dtype)


def _weigh(query: Tensor, key: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """Return the matrix `(b, h, m, n)`: softmax(scale · Q Kᵀ)."""
    dtype = accumulation(query.dtype)
    products = scale * query.to(dtype) @ key.to(dtype).mT
    return (products if mask is None else products.masked_fill(~mask, -torch.inf)).softmax(-1)


def _plain_gradients(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value, by operations that are differentiable again."""
    dtype = accumulation(query.dtype)
    weights, grad = _weigh(query, key, mask, scale), grad.to(dtype)
    grad_weights = grad @ value.to(dtype).mT
    # Gradient of the products: weights · (gradient of the weights minus its mean under the weights).
    grad_products = scale * weights * (grad_weights - (weights * grad_weights).sum(-1, keepdim=True))
    result = grad_products @ key.to(dtype), grad_products.mT @ query.to(dtype), weights.mT @ grad
    return result[0].to(query.dtype), result[1].to(key.dtype), result[2].to(value.dtype)


def _gradients_by_kernel(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the same as `_plain_gradients`, by the kernel and without a matrix of products."""

    def run(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return _scaled_dot_product(query, key, value, mask, scale)

    response, pull = torch.func.vjp(run, query, key, value)[:2]
    return cast(tuple[Tensor, Tensor, Tensor], pull(grad.to(response.dtype)))


def _pull_gradients(
    arguments: Sequence[Any], kept: Any, grad_outputs: Sequence[Tensor], *_: Any
) -> tuple[Tensor | None, ...]:
    """Return the vector-Jacobian product of `_plain_gradients`, by its equation."""
    grad, query, key, value, mask, scale = arguments

    def run(grad: Tensor, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        return _plain_gradients(grad, query, key, value, mask, scale)

    pull = torch.func.vjp(run, grad, query, key, value)[1]
    return *pull(tuple(grad_outputs)), None, None


def _differentiate(
    arguments: Sequence[Any], kept: Any, grad_outputs: Sequence[Tensor], *_: Any
) -> tuple[Tensor | None, ...]:
    return *_gradients(grad_outputs[0], *arguments), None, None


_gradients = accelerate(
    _plain_gradients, _gradients_by_kernel, _pull_gradients, vmapped=_gradients_by_kernel, kernels_run=lambda: True
)
# The attention for transforms of torch.func and for tangents.
_transformed = accelerate(
    _attend,
    _scaled_dot_product,
    _differentiate,
    again=lambda arguments, grad_outputs: _differentiate(arguments, None, grad_outputs),
    vmapped=_scaled_dot_product,
    kernels_run=lambda: True,
)


class _Derivable(torch.autograd.Function):
    """The kernel's response, unchanged. Its gradient is the kernel's; the equation's, if it is differentiated again."""

    @staticmethod
    def forward(
        response: Tensor, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float
    ) -> Tensor:
        return response.detach()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, *tensors, ctx.scale = inputs
        ctx.save_for_backward(*tensors)  # the kernel saves the same tensors

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if not torch.is_grad_enabled():
            return grad, None, None, None, None, None
        return None, *_gradients(grad, *ctx.saved_tensors, ctx.scale), None, None


_derivable = _Derivable.apply
