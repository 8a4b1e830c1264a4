"""The second derivative of a number along a direction, in every way that torch has.

A way takes a function of tensors, those tensors, and a direction for each; it returns the derivative along the
directions of the gradient of each tensor, 0 where there is none. Backward over dual tensors is left out, as torch
refuses it for its own softmax; reverse over forward is the same by `torch.func`.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, jvp

from farfield.ops.engine import SWITCH
from farfield.ops.fast import kernels

Loss = Callable[..., Tensor]
Tensors = Sequence[Tensor]
Way = Callable[[Loss, Tensors, Tensors], Tensors]
EPS = torch.finfo(torch.float32).eps


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


@contextmanager
def plainly() -> Iterator[None]:
    """Compute by the equations alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(SWITCH, "0")
        patch.setenv(kernels.SWITCH, "0")
        yield


def check(loss: Loss, exact: Loss, tensors: Tensors, ways: Iterable[Way] = tuple(WAYS.values())) -> None:
    """Every way gives the exact result: at most twice as far off as the equations, or off by the rounding of sums."""
    along = [torch.randn_like(tensor) for tensor in tensors]
    wanted = backward_twice(exact, *([each.double() for each in some] for some in (tensors, along)))
    with plainly():
        plain = backward_twice(loss, tensors, along)
    length = max(math.prod(tensor.shape[2:]) for tensor in tensors)
    sizes = [float(each.norm()) for each in wanted]
    # What is 0 in exact numbers, as that of a shift under a softmax, is as far off as the terms that cancel are.
    sizes = [max(sizes) if size < 1e-9 * max(sizes) else size for size in sizes]
    for way in ways:
        for number, (found, equation, want) in enumerate(zip(way(loss, tensors, along), plain, wanted, strict=True)):
            limit = max(2 * float((equation - want).norm()), (32 + math.sqrt(length)) * EPS * sizes[number])
            distance = float((found - want).norm())
            assert distance <= limit, f"{way.__name__}, tensor {number}: off by {distance}, and not {limit}"


def loss_of(response: Tensor) -> Tensor:
    """A number with all second derivatives."""
    weights = torch.linspace(-1, 2, response.numel(), dtype=response.dtype).view(response.shape)
    return (weights * response).sum() + response.square().sum() / 2


def check_module(module: nn.Module, grid: Tensor, ways: Iterable[Way]) -> None:
    """Every way gives the exact second derivatives of a module, by its grid and its parameters."""
    exact = copy.deepcopy(module).double()

    def equations(*given: Tensor) -> Tensor:
        with plainly():
            return Learned(exact, lambda part, grid: loss_of(part(grid))).of(*given)

    learned = Learned(module, lambda part, grid: loss_of(part(grid)))
    check(learned.of, equations, [grid, *(each.detach() for each in module.parameters())], ways)
