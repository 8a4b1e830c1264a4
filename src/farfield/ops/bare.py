"""When a module is bare: the code of its class and its parameters are all that decides what it computes.

A fast path computes what a layer computes from the layer's parameters, without calling it. That is right for a bare
layer only. A patched method, a hook or a tensor that computes by its own class (quantized, distributed) is otherwise
ignored without a word.
"""

from __future__ import annotations

from itertools import chain
from types import MethodType
from typing import TypeGuard, TypeVar

from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.nn.modules import module as globals_of_torch
from torch.utils.module_tracker import ModuleTracker

Kind = TypeVar("Kind", bound=nn.Module)
# What torch calls between a layer and its numbers, if it is replaced on the instance (accelerate, diffusers do so).
METHODS = frozenset({"forward", "_call_impl", "_conv_forward", "_check_input_dim"})
# Torch's own tensors. Those of a network that is looked at, exported or transformed stand for the numbers of such ones.
TENSORS = frozenset({Tensor, nn.Parameter, FakeTensor, FunctionalTensor})


def is_bare(module: nn.Module | None, *kinds: type[Kind]) -> TypeGuard[Kind]:
    """Whether a module is of one of these classes, no subclass, and nothing on the instance changes what it computes.

    Parametrized modules are of a class of their own.
    """
    return module is not None and type(module) in kinds and is_unchanged(module)


def is_unchanged(module: nn.Module) -> bool:
    """Whether a module of any class has its class's methods, no hooks and torch's own tensors."""
    return (
        (METHODS.isdisjoint(vars(module)) or has_methods_of_class(module))
        and not (module._forward_hooks or module._forward_pre_hooks)
        and not (module._backward_hooks or module._backward_pre_hooks)
        and not has_global_hooks()
        and all(
            each is None or type(each) in TENSORS
            for each in chain(module._parameters.values(), module._buffers.values())
        )
    )


def has_methods_of_class(module: nn.Module) -> bool:
    """Whether the methods on the instance are its class's own, which accelerate leaves there when it removes hooks."""
    own, kind = vars(module), type(module)
    return all(own[name] == MethodType(getattr(kind, name, object), module) for name in METHODS & own.keys())


def has_global_hooks() -> bool:
    """Whether hooks of all modules are registered; those by which torch's FLOP counter names modules do not count."""
    hooks = (
        globals_of_torch._global_forward_hooks,
        globals_of_torch._global_forward_pre_hooks,
        globals_of_torch._global_backward_hooks,
        globals_of_torch._global_backward_pre_hooks,
    )
    return any(
        not isinstance(getattr(hook, "__self__", None), ModuleTracker) for each in hooks for hook in each.values()
    )
