"""In which mode torch runs: what is recorded as a graph, derived, wrapped by a transform or cast."""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor
from torch.autograd import forward_ad


def is_recorded() -> bool:
    """Whether what runs becomes a graph, which takes torch's own operations."""
    return torch.compiler.is_compiling() or torch.jit.is_tracing()


def has_memory(tensor: Tensor) -> bool:
    """Whether a tensor has memory of its own: one that a transform wraps has none, which torch raises an error for."""
    try:
        tensor.untyped_storage()
    except NotImplementedError:
        return False
    return True


def is_itself(tensor: Tensor) -> bool:
    """Whether a tensor has memory of its own and no tangent."""
    return has_memory(tensor) and not has_tangent(tensor)


def has_tangent(argument: object) -> bool:
    """Whether a derivative is carried forward with an argument that is a tensor."""
    return isinstance(argument, Tensor) and forward_ad.unpack_dual(argument).tangent is not None


def is_recorded_by_autograd(*tensors: Tensor) -> bool:
    """Whether a gradient is wanted of any of the tensors."""
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def autocasts(tensor: Tensor) -> bool:
    """Whether autocast is on where the tensor is; some devices, as meta, have none."""
    device = tensor.device.type
    return torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)


def full_precision(tensor: Tensor) -> contextlib.AbstractContextManager[None]:
    """Compute in the tensors' own dtypes also under autocast: sums over positions accumulate in float32 at least."""
    return torch.autocast(tensor.device.type, enabled=False) if autocasts(tensor) else contextlib.nullcontext()
