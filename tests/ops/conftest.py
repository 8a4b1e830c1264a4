"""Fixtures of the tests of operators: where compiled kernels run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from farfield.ops.fast import kernels


@pytest.fixture(scope="session")
def built() -> None:
    """The library is loaded; without a compiler there is none."""
    if (reason := kernels.problem()) is not None:
        pytest.skip(reason)


@pytest.fixture
def on(built: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Kernels run, on memory that holds NaN before it is written."""
    monkeypatch.setenv(kernels.SWITCH, "1")
    deterministic = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(deterministic)
