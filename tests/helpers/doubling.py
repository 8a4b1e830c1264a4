"""Tensors of a class of their own, as those of quantized or distributed weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn


class Doubling(Tensor):
    """A tensor whose functions see twice its numbers, so that what reads the numbers themselves gives other results."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] = {}
    ) -> Any:
        if func in COMPUTING:
            with torch._C.DisableTorchFunctionSubclass():
                args, kwargs = [doubled(each) for each in args], {name: doubled(each) for name, each in kwargs.items()}
                return func(*args, **kwargs)
        return super().__torch_function__(func, types, args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Doubling:
        copied = nn.Parameter(Doubling(self.detach().as_subclass(Tensor).clone()), self.requires_grad)
        return memo.setdefault(id(self), copied)


COMPUTING = {
    torch.nn.functional.linear,
    torch.nn.functional.batch_norm,
    *(getattr(torch, f"conv{dims}d") for dims in (1, 2, 3)),
}


def doubled(each: Any) -> Any:
    """Twice a `Doubling`, as torch's own tensor; anything else as it is."""
    return each.as_subclass(Tensor) * 2 if isinstance(each, Doubling) else each
