"""Kernels beside the equations that they stand for."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

from farfield.ops.fast import kernels


def off(run: Any, *arguments: Any) -> Any:
    """The same by the equation."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(kernels.SWITCH, "0")
        return run(*arguments)


def distance(found: Tensor, exact: Tensor) -> float:
    """Relative L2 error."""
    return float((found.double() - exact).norm() / exact.norm())
