"""When a module is bare: the code of its class and its parameters are all that decides what it computes.

A fast path computes what a layer computes from the layer's parameters, without calling it. That is right for a bare
layer only. A patched method, a hook or a tensor that computes by its own class (quantized, distributed) is otherwise
ignored without a word.
"""

from __future__ import annotations

from functools import partial
from itertools import chain
from types import MethodType
from typing import TypeGuard, TypeVar, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.nn.modules import module as globals_of_torch
from torch.utils.module_tracker import ModuleTracker

from farfield.ops.grid import accumulation
from farfield.ops.projection import IDENTITY, Projection

_Kind = TypeVar("_Kind", bound=nn.Module)
# What torch calls between a layer and its numbers, if it is replaced on the instance (accelerate, diffusers do so).
_METHODS = frozenset({"forward", "_call_impl", "_conv_forward", "_check_input_dim"})
# Hooks of all modules, by their ids.
_GLOBAL_HOOKS = (
    globals_of_torch._global_forward_hooks,
    globals_of_torch._global_forward_pre_hooks,
    globals_of_torch._global_backward_hooks,
    globals_of_torch._global_backward_pre_hooks,
)
# Torch's own tensors. Those of a network that is looked at, exported or transformed stand for the numbers of such ones.
_TENSORS = frozenset({Tensor, nn.Parameter, FakeTensor, FunctionalTensor})


def is_bare(module: nn.Module | None, *kinds: type[_Kind]) -> TypeGuard[_Kind]:
    """Whether a module is of one of these classes, no subclass, and nothing on the instance changes it."""
    return module is not None and type(module) in kinds and is_unchanged(module)


def is_unchanged(module: nn.Module) -> bool:
    """Whether a module of any class has its class's methods, no hooks and torch's own tensors."""
    return (
        (_METHODS.isdisjoint(vars(module)) or _has_methods_of_class(module))
        and not (module._forward_hooks or module._forward_pre_hooks)
        and not (module._backward_hooks or module._backward_pre_hooks)
        # Those by which torch's FLOP counter names modules change nothing.
        and all(
            isinstance(getattr(hook, "__self__", None), ModuleTracker)
            for each in _GLOBAL_HOOKS
            for hook in each.values()
        )
        and all(
            each is None or type(each) in _TENSORS
            for each in chain(module._parameters.values(), module._buffers.values())
        )
    )


def _has_methods_of_class(module: nn.Module) -> bool:
    """Whether the methods on the instance are its class's own, which accelerate leaves there when it removes hooks."""
    own, kind = vars(module), type(module)
    return all(own[name] == MethodType(getattr(kind, name, object), module) for name in _METHODS & own.keys())


def read_projection(module: nn.Module | None, like: Tensor) -> Projection:
    """Return an affine module, or None, as a matrix and bias that can act on a summary, or a function that runs it."""
    if module is None:
        return IDENTITY
    if type(module) is nn.Linear and is_unchanged(module):
        return Projection(module.weight, module.bias)
    # Hooks see the positions and their gradients, and dropout is drawn for each of them.
    if not all(is_unchanged(part) and not _drops(part) for part in module.modules()):
        return Projection(run=partial(_run_on_positions, module, like.dtype))
    # Any other affine module m (LoRA, parametrized) runs once on unit vectors: bias = m(0), matrix = (m(I) - m(0))ᵀ.
    # That m is affine is not checked.
    parameter = next(module.parameters(), None)
    dtype = parameter.dtype if parameter is not None and parameter.is_floating_point() else accumulation(like.dtype)
    width = cast(int, module.in_features)
    outputs = module(torch.eye(width + 1, width, dtype=dtype, device=like.device))  # the last row is 0
    return Projection((outputs[:-1] - outputs[-1]).transpose(-2, -1).to(like.dtype), outputs[-1].to(like.dtype))


def _run_on_positions(module: nn.Module, dtype: torch.dtype, positions: Tensor) -> Tensor:
    """Run a module of channels-last inputs on positions `(b, in, n)`, in the dtype of the grid."""
    return cast(Tensor, module(positions.transpose(-2, -1).to(dtype)).transpose(-2, -1))


def _drops(module: nn.Module) -> bool:
    """Whether a module is a dropout that draws at each call."""
    return isinstance(module, nn.modules.dropout._DropoutNd) and module.training and module.p > 0


def is_biased(module: nn.Module | None) -> bool:
    """Whether a module adds a bias; assumed for a module that is not a bare `nn.Linear`."""
    return module is not None and not (is_bare(module, nn.Linear) and module.bias is None)
