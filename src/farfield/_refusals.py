"""Refusals: errors of arguments that say what is wrong; the public function that was called puts its name in front."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import TracebackType
from typing import Any, TypeVar

_Error = TypeVar("_Error", bound=BaseException)
_Function = TypeVar("_Function", bound=Callable[..., Any])


def refusal(kind: type[_Error], *arguments: object) -> _Error:
    """Build an error whose text, the last argument, lacks the name of the called function: `door` adds it.

    Example:
        >>> raise refusal(ValueError, "heads must be a whole number from 1, got 0.")
        Traceback (most recent call last):
        ValueError: heads must be a whole number from 1, got 0.
    """
    error = kind(*arguments)
    vars(error)["is_unnamed"] = True
    return error


def is_refusal(error: BaseException) -> bool:
    """Whether the name of the called function is still to be put in front of the text."""
    return bool(vars(error).get("is_unnamed"))


def put_name(name: str, error: _Error) -> _Error:
    """Put a name in front of the text of a refusal that has none, and return it; other errors stay as they are."""
    if is_refusal(error):
        vars(error)["is_unnamed"] = False  # and not gone: an error that sets it is made again where it is unpickled
        *others, text = error.args
        error.args = (*others, f"{name}: {text}")
        if isinstance(error, OSError) and others:  # its text is not made of args
            error.strerror = error.args[-1]
        if isinstance(error, ImportError):
            error.msg = error.args[-1]
    return error


class door:  # noqa: N801  # read as a word: `with door("insert"):`
    """Put a name in front of the refusals of a function, as a decorator, or of a block: once, by the innermost.

    Errors of torch, of a user's network, and those with a name already, pass as they are.

    Args:
        name: The name of the public function, as it is called.

    Example:
        >>> with door("insert"):
        ...     raise refusal(ValueError, "where names no place.")
        Traceback (most recent call last):
        ValueError: insert: where names no place.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, function: _Function) -> _Function:
        name = self.name

        @functools.wraps(function)
        def inner(*args: Any, **kwargs: Any) -> Any:
            try:
                return function(*args, **kwargs)
            except Exception as error:
                put_name(name, error)
                raise

        return inner  # type: ignore[return-value]

    def __enter__(self) -> None:
        """Enter the block."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        """Name the error that leaves the block."""
        if error is not None:
            put_name(self.name, error)
