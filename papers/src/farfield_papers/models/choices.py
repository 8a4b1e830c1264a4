"""The arguments of the networks: how they are saved, and their checks."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from farfield._checks import check_whole, unknown
from farfield._refusals import door, put_name
from farfield.ops.table import Operator, find_name, look_up_operator


def bind_arguments(arguments: Mapping[str, Any], models: Collection[str]) -> dict[str, Any]:
    """Return the arguments of a constructor, its `locals()` at the start, as the configuration; refuse other models."""
    check_choice(f"models.{type(arguments['self']).__name__}", "model", arguments["model"], models)
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


def check_operator(model: str, operator: Any) -> None:
    """Refuse what is neither an operator nor the name of one, nor None."""
    if operator is not None:
        find_operator(model, operator)


def check_choice(caller: str, what: str, value: Any, names: Collection[str]) -> None:
    """Refuse a name that is not among those known."""
    if value not in names:
        raise put_name(caller, unknown(what, value, names))


def check_numbers(model: str, smallest: int = 1, **numbers: object) -> None:
    """Refuse values that are not whole numbers, or below the smallest allowed."""
    with door(model):
        for name, value in numbers.items():
            check_whole(name, value, smallest)
