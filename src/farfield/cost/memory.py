"""Bytes that a forward pass keeps for its backward pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


def saved_bytes(module: Callable[..., Any], *inputs: Any) -> int:
    """Count the bytes that a forward pass keeps in memory for its backward pass.

    Every storage counts once and whole, however many tensors share it. Storages of parameters and buffers do not count;
    those of the inputs count if they are kept.

    Args:
        module: A module, or any function of tensors.
        inputs: Its inputs; set `requires_grad` on those whose gradients are needed.

    Returns:
        Bytes of all storages that `torch.autograd` saves.

    Example:
        >>> import torch
        >>> from farfield import cost
        >>> leaf = torch.zeros(1000, requires_grad=True)
        >>> cost.saved_bytes(torch.exp, leaf), cost.saved_bytes(torch.square, leaf), cost.saved_bytes(torch.neg, leaf)
        (4000, 4000, 0)
    """
    own = [*module.parameters(), *module.buffers()] if isinstance(module, nn.Module) else []
    kept = {tensor.untyped_storage()._cdata for tensor in own}
    # Kept alive until the end, so that no address is used twice.
    storages: list[torch.UntypedStorage] = []

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in kept:
            kept.add(storage._cdata)
            storages.append(storage)
        # Without detach an output would hold a reference to itself and would never be freed.
        return tensor.detach()

    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        outputs = module(*inputs)
    del outputs
    return sum(storage.nbytes() for storage in storages)
