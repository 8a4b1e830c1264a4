"""The mode in which torch runs: recording a graph, differentiating, transforming (torch.func) or casting."""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor
from torch.autograd import forward_ad


def is_recorded() -> bool:
    """Whether a graph is being recorded, which is to hold torch's own operations only."""
    return torch.compiler.is_compiling() or torch.jit.is_tracing()


def has_memory(tensor: Tensor) -> bool:
    """Whether a tensor has memory of its own; a tensor wrapped by a transform has none, and torch raises an error."""
    try:
        tensor.untyped_storage()
    except NotImplementedError:
        return False
    return True


def is_itself(tensor: Tensor) -> bool:
    """Whether a tensor has memory of its own and no tangent."""
    return has_memory(tensor) and not has_tangent(tensor)


def has_tangent(argument: object) -> bool:
    """Whether an argument is a tensor that carries a forward-mode tangent."""
    return isinstance(argument, Tensor) and forward_ad.unpack_dual(argument).tangent is not None


def is_recorded_by_autograd(*tensors: Tensor) -> bool:
    """Whether autograd records operations on any of the tensors."""
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def autocasts(tensor: Tensor) -> bool:
    """Whether autocast is on for the tensor's device; some devices, such as meta, have none."""
    device = tensor.device.type
    return torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)


def full_precision(tensor: Tensor) -> contextlib.AbstractContextManager[None]:
    """Compute in the tensors' own dtypes also under autocast: sums over positions accumulate in float32 or wider."""
    return torch.autocast(tensor.device.type, enabled=False) if autocasts(tensor) else contextlib.nullcontext()
