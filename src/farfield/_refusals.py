"""Refusals: errors of arguments that say what is wrong; the public function that was called puts its name in front."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
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
        others: Arguments that other functions of its kind have, and what takes their place in this one.

    Example:
        >>> with door("insert"):
        ...     raise refusal(ValueError, "where names no place.")
        Traceback (most recent call last):
        ValueError: insert: where names no place.
    """

    def __init__(self, name: str, others: Mapping[str, str] | None = None) -> None:
        self.name, self.others = name, others or {}

    def __call__(self, function: _Function) -> _Function:
        name = self.name

        @functools.wraps(function)
        def inner(*args: Any, **kwargs: Any) -> Any:
            try:
                return function(*args, **kwargs)
            except Exception as error:
                if type(error) is TypeError and error.__traceback__ and error.__traceback__.tb_next is None:
                    self._explain_call(error, function, args, kwargs)
                put_name(name, error)
                raise

        return inner  # type: ignore[return-value]

    def _explain_call(self, error: TypeError, function: Any, args: Sequence[Any], names: Iterable[str]) -> None:
        """Make a refusal of the error of a call whose arguments are not those of the function."""
        parameters = inspect.signature(function).parameters
        by_name = [each.name for each in parameters.values() if each.kind is each.KEYWORD_ONLY]
        unknown, most = next((each for each in names if each not in parameters), None), len(parameters) - len(by_name)
        if unknown is not None:
            near = difflib.get_close_matches(unknown, parameters, 1) or [f"one of {', '.join(parameters)}"]
            text = f"no argument {unknown}; fix: {self.others.get(unknown, near[0])}."
        elif len(args) > most:
            text = f"{most} arguments go by position, got {len(args)}; fix: others by name, {', '.join(by_name)}."
        else:
            return
        error.args = (text,)
        vars(error)["is_unnamed"] = True

    def __enter__(self) -> None:
        """Enter the block."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        """Name the error that leaves the block."""
        if error is not None:
            put_name(self.name, error)
