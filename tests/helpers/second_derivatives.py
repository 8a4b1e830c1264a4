"""The second derivative of a number along a direction, in every way that torch has.

A way takes a function of tensors, those tensors, and a direction for each; it returns the derivative along the
directions of the gradient of each tensor, 0 where there is none. Backward over dual tensors is left out, as torch
refuses it for its own softmax; reverse over forward is the same by `torch.func`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, jvp

Loss = Callable[..., Tensor]
Tensors = Sequence[Tensor]
Way = Callable[[Loss, Tensors, Tensors], Tensors]


def dot(ones: Tensors, others: Tensors) -> Tensor:
    """The sum of all products."""
    return torch.stack([(one * other).sum() for one, other in zip(ones, others, strict=True)]).sum()


def leaves_of(tensors: Tensors) -> list[Tensor]:
    """The same numbers in the same memory, as leaves."""
    return [tensor.detach().requires_grad_() for tensor in tensors]


def backward_twice(loss: Loss, tensors: Tensors, along: Tensors) -> Tensors:
    """By `torch.autograd.grad` of `torch.autograd.grad`."""
    leaves, options = leaves_of(tensors), {"allow_unused": True, "materialize_grads": True}
    first = torch.autograd.grad(loss(*leaves), leaves, create_graph=True, **options)
    return torch.autograd.grad(dot(first, along), leaves, **options)


def grad_of_grad(loss: Loss, tensors: Tensors, along: Tensors) -> Tensors:
    """By `torch.func.grad` of `torch.func.grad`."""
    every = tuple(range(len(tensors)))
    return grad(lambda *leaves: dot(grad(loss, every)(*leaves), along), every)(*tensors)


def forward_over_reverse(loss: Loss, tensors: Tensors, along: Tensors) -> Tensors:
    """By `torch.func.jvp` of `torch.func.grad`."""
    return jvp(grad(loss, tuple(range(len(tensors)))), tuple(tensors), tuple(along))[1]


def reverse_over_forward(loss: Loss, tensors: Tensors, along: Tensors) -> Tensors:
    """By `torch.func.grad` of `torch.func.jvp`."""
    every = tuple(range(len(tensors)))
    return grad(lambda *leaves: jvp(loss, leaves, tuple(along))[1], every)(*tensors)


def duals_over_backward(loss: Loss, tensors: Tensors, along: Tensors) -> Tensors:
    """By `torch.autograd.grad` of dual tensors."""
    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(*pair) for pair in zip(leaves_of(tensors), along, strict=True)]
        first = torch.autograd.grad(loss(*duals), duals, allow_unused=True, materialize_grads=True)
        tangents = [forward_ad.unpack_dual(each).tangent for each in first]
        return [torch.zeros_like(one) if each is None else each for one, each in zip(tensors, tangents, strict=True)]


WAYS: dict[str, Way] = {
    way.__name__: way
    for way in (backward_twice, grad_of_grad, forward_over_reverse, reverse_over_forward, duals_over_backward)
}


class Learned(nn.Module):
    """A function of a module and grids, as one of tensors: those grids and the module's parameters."""

    def __init__(self, module: nn.Module, run: Loss) -> None:
        super().__init__()
        self.module, self.run = module, run
        self.names = [name for name, _ in self.named_parameters()]

    def forward(self, *grids: Tensor) -> Tensor:
        """Run the function on the module."""
        return self.run(self.module, *grids)

    def of(self, *tensors: Tensor) -> Tensor:
        """Run the function of tensors."""
        grids = len(tensors) - len(self.names)
        return functional_call(self, dict(zip(self.names, tensors[grids:], strict=True)), tensors[:grids])
