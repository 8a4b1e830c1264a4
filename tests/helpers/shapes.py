"""Shapes of annotations, checked while tests run: `FARFIELD_TEST_SHAPES=1`, one of the switches of everywhere.py.

jaxtyping's import hook hands `check` two forms of every function of the library: one that takes its arguments, before
it is called, and one that takes what it returned as well. Arguments are checked with the second, when the function has
accepted them, so that what it refuses is refused in its own words.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

from beartype import BeartypeConf, beartype
from jaxtyping import AbstractArray, install_import_hook

# An int is a float to whoever calls.
CONFIGURATION = BeartypeConf(is_pep484_tower=True)


def check(function: Callable[..., Any]) -> Callable[..., Any]:
    """Check a function whose annotations have shapes; of others the type checker has seen all there is to see."""
    hints = function.__annotations__
    takes_what_returned = hints.get("return") is not Any
    return (
        beartype(function, conf=CONFIGURATION)
        if takes_what_returned and any(map(has_shape, hints.values()))
        else function
    )


def has_shape(hint: Any) -> bool:
    """Whether a shape stands in an annotation."""
    return (isinstance(hint, type) and issubclass(hint, AbstractArray)) or any(map(has_shape, get_args(hint)))


def install() -> None:
    """Check all modules of the library that are imported from now on."""
    install_import_hook("farfield", "helpers.shapes.check")
