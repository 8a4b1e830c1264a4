"""Bytes: those alive while operations run, and those that a forward pass keeps for its backward pass."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def saved_bytes(module: Callable[..., Any], *inputs: Any) -> int:
    """Count the bytes that a forward pass keeps for its backward pass: what training holds of it meanwhile.

    Every storage counts once and whole, however many tensors look at it; those of parameters and buffers do not, those
    of the inputs do where they are kept.

    Args:
        module: A module, or any function of tensors.
        inputs: Its inputs; the gradients of those that require them, and of the parameters, are what is kept for.

    Returns:
        Bytes of all storages that `torch.autograd` packed.

    Example:
        >>> import torch
        >>> from farfield import cost
        >>> leaf = torch.zeros(1000, requires_grad=True)
        >>> cost.saved_bytes(torch.exp, leaf), cost.saved_bytes(torch.square, leaf), cost.saved_bytes(torch.neg, leaf)
        (4000, 4000, 0)
    """
    own = [*module.parameters(), *module.buffers()] if isinstance(module, nn.Module) else []
    kept = {tensor.untyped_storage()._cdata for tensor in own}
    # Alive until the count is over: an address is not given out twice.
    storages: list[torch.UntypedStorage] = []

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in kept:
            kept.add(storage._cdata)
            storages.append(storage)
        # An output that held itself would never be freed.
        return tensor.detach()

    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        outputs = module(*inputs)
    del outputs
    return sum(storage.nbytes() for storage in storages)


class LiveBytes(TorchDispatchMode):
    """Follow the storages that operations make, from the operation to the last reference."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        # Storage address -> weak reference, of everything alive that was seen: storages from before count nothing.
        self.seen: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in tensors_of([args, kwargs]):
            self.follow(tensor, counts=False)
        outputs = func(*args, **(kwargs or {}))
        for tensor in tensors_of(outputs):
            self.follow(tensor, counts=True)
        return outputs

    def follow(self, tensor: Tensor, *, counts: bool) -> None:
        """See a tensor's storage, once; bytes of one that an operation made count until it dies."""
        storage = tensor.untyped_storage()
        address = storage._cdata
        if address in self.seen:
            return
        size = storage.nbytes() if counts else 0

        def forget(_: object) -> None:
            del self.seen[address]
            self.live -= size

        self.seen[address] = weakref.ref(storage, forget)
        self.live += size
        self.peak = max(self.peak, self.live)


def tensors_of(value: Any) -> Iterator[Tensor]:
    """The tensors in nested tuples, lists and dictionaries."""
    yield from (leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor))
