"""In which mode torch runs: what is recorded as a graph, differentiated forward, or wrapped by a transform."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import forward_ad


def is_recorded() -> bool:
    """Whether what runs becomes a graph, which takes torch's own operations."""
    return torch.compiler.is_compiling() or torch.jit.is_tracing()


def is_itself(tensor: Tensor) -> bool:
    """Whether a tensor has memory of its own, as those that a transform wraps have not, and no tangent."""
    try:
        tensor.untyped_storage()
    except NotImplementedError:
        return False
    return not has_tangent(tensor)


def has_tangent(tensor: Tensor) -> bool:
    """Whether a derivative is carried forward with a tensor."""
    return forward_ad.unpack_dual(tensor).tangent is not None


def is_recorded_by_autograd(*tensors: Tensor) -> bool:
    """Whether a gradient is wanted of any of the tensors."""
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
