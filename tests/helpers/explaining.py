"""Errors hold facts: who was called, the wrong values, and that there is a fix. Their sentences may change."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

# How a fix begins.
FIX = re.compile(r"\b(fix: |nearest: |try )")


@contextmanager
def explains(error: type[BaseException], function: str, *facts: object, fix: bool = True) -> Iterator[None]:
    """Expect an error that begins with the name of the function, has these facts as words, and names a fix."""
    with pytest.raises(error) as raised:
        yield
    text = str(raised.value)
    assert re.match(rf"{re.escape(function)}\b", text), text
    missing = [str(fact) for fact in facts if not re.search(rf"(?<!\w){re.escape(str(fact))}(?!\w)", text)]
    assert not missing, f"no {missing} in {text!r}"
    assert not fix or FIX.search(text), f"no fix in {text!r}"
