"""Kernels beside the equations that they stand for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from farfield.ops.fast import kernels


def off(run: Any, *arguments: Any) -> Any:
    """The same by the equation."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(kernels.SWITCH, "0")
        return run(*arguments)


def distance(found: Tensor, exact: Tensor) -> float:
    """Relative L2 error."""
    return float((found.double() - exact).norm() / exact.norm())


class KernelCalls(TorchDispatchMode):
    """Names of the operations that ran."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func._schema.name)
        return func(*args, **(kwargs or {}))


def calls(run: Callable[[], Any]) -> list[str]:
    """The operations that a run calls."""
    with KernelCalls() as record:
        run()
    return record.names


def drawn(module: Any) -> Any:
    """The module in eval mode, all its parameters and statistics random."""
    with torch.no_grad():
        for name, entry in module.state_dict().items():
            if entry.is_floating_point():
                entry.copy_(torch.rand_like(entry) + 0.5 if name.endswith("var") else torch.randn_like(entry) * 0.5)
    return module.eval()


def in_order(grid: Tensor, wide: bool) -> Tensor:
    """The grid as it is, or with its channels last in memory."""
    return grid.movedim(1, -1).contiguous().movedim(-1, 1) if wide else grid
