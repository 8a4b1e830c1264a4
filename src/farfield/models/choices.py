"""The arguments of the networks: how they are saved, the operators among them, and checks of numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from farfield import _checks
from farfield._refusals import door
from farfield.ops.table import Operator, find_name, look_up_operator


def bind_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a constructor, its `locals()` at the start, as the configuration to be saved."""
    given = {name: value for name, value in arguments.items() if name not in ("self", "__class__", "weights")}
    # The entry None stands for an operator without a name.
    return {name: _plain(value) for name, value in given.items() if value is not None}


def _plain(value: Any) -> Any:
    """Return a value as it stands in JSON: operators by name, None for a user's own."""
    if isinstance(value, Operator):
        return find_name(value)
    return list(value) if isinstance(value, tuple) else value


def find_operator(caller: str, operator: Any) -> Operator:
    """Return an operator by its name, or as it is; `LookupError` for an unknown name."""
    with door(caller):
        return look_up_operator(operator)[1]


def check_whole(model: str, name: str, value: object, smallest: int) -> None:
    """Refuse a value that is not a whole number, or below the smallest allowed."""
    with door(model):
        _checks.check_whole(name, value, smallest)
