"""Cases of which some run every time, and the others with the slow tests: they differ in a name or a size alone."""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any

import pytest

# Operators that have little in common: a softmax over positions, over axis means that ask and answer, none at all.
UNLIKE = ("softmax", "kronecker_qkv", "siamese")


def partly(values: Iterable[Any], often: Container[Any] = UNLIKE) -> list[Any]:
    """All values, for `pytest.mark.parametrize`; all but those that run often are marked slow. A tuple is a case."""
    cases = [(value, value if isinstance(value, tuple) else (value,)) for value in values]
    return [pytest.param(*case, marks=[] if value in often else pytest.mark.slow) for value, case in cases]
