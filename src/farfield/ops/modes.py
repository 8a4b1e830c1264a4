"""In which mode torch runs: what is differentiated, recorded as a graph, or transformed."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import forward_ad


def keeps_all(*tensors: Tensor | None) -> bool:
    """Whether the plain form is to run: nothing to differentiate, or something else than `backward` does it."""
    wanted = torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)
    transformed = torch._C._are_functorch_transforms_active() or in_forward_mode()
    return not wanted or is_recorded() or transformed


def is_recorded() -> bool:
    """Whether what runs becomes a graph, which takes torch's own operations."""
    return torch.compiler.is_compiling() or torch.jit.is_tracing()


def in_forward_mode() -> bool:
    """Whether derivatives are carried forward with the values."""
    return forward_ad._current_level >= 0
