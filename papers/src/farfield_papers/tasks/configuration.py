"""Read configurations of runs: YAML of plain values only, so that nothing in a file is executed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from farfield._plain_values import DEPTH, check_values, read_text

_DATE = "tag:yaml.org,2002:timestamp"


class _Loader(yaml.SafeLoader):
    """Loader of plain values; a value that looks like a date stays a string, as on the command line."""

    yaml_implicit_resolvers = {  # noqa: RUF012  (as in PyYAML)
        first: [(tag, pattern) for tag, pattern in resolvers if tag != _DATE]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


def read_configuration(file: Path) -> dict[str, Any]:
    text = read_text(file)
    try:
        _check_depth(text)
        configuration = yaml.load(text, _Loader)
    # PyYAML's constructors of scalars raise any error, `!!bool x` a KeyError.
    except Exception as error:
        raise ValueError(
            f"{file} is damaged, not YAML of plain values: {error}; fix: use only numbers, strings, lists and entries."
        ) from error
    if not isinstance(configuration, dict):
        raise ValueError(
            f"{file} must have entries, got {_kind(configuration)}; fix: a recipe, or the config.yaml of a run."
        )
    check_values(file, configuration)
    _check_classes(file, "", configuration)
    return configuration


def _check_depth(text: str) -> None:
    """Raise for deeply nested values, on which PyYAML takes minutes before it fails."""
    depth = 0
    for event in yaml.parse(text, _Loader):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > DEPTH:
            raise ValueError(f"it is nested in more than {DEPTH} levels")


def _check_classes(file: Path, place: str, value: Any) -> None:
    """Raise for a class whose name is not a string, and for arguments of a class that have no names."""
    if isinstance(value, list):
        for number, each in enumerate(value):
            _check_classes(file, f"{place}[{number}]", each)
    elif isinstance(value, dict):
        inside = f"{place}." if place else ""
        _entry(file, value, "init_args", inside, dict, "its arguments by their names, such as {num_classes: 10}")
        _entry(file, value, "class_path", inside, str, "its full name, such as farfield_papers.models.kanet_qkv")
        for name, each in value.items():
            _check_classes(file, f"{place}.{name}" if place else name, each)


def _entry(file: Path, values: dict[str, Any], name: str, place: str, expected: type, fix: str) -> Any:
    """Return an entry, None if there is none; raise a `ValueError` if its type is not the expected one."""
    value = values.get(name)
    if value is not None and not isinstance(value, expected):
        raise ValueError(f"{file}: {place}{name} is {_kind(value)}; fix: {fix}.")
    return value


def read_recipe(file: Path, parts: Sequence[str]) -> dict[str, Any]:
    """Read a recipe or the configuration of a run; a part of it may be the path of another file."""
    recipe = read_configuration(file)
    for part in parts:
        inner = recipe.get(part)
        if isinstance(inner, str) and Path(inner).is_file():
            recipe[part] = read_configuration(Path(inner))
        else:
            section(file, recipe, part)
    return recipe


def section(file: Path, values: dict[str, Any], name: str, place: str = "") -> dict[str, Any]:
    """Return the entries below a name, an empty dict if there are none."""
    return _entry(file, values, name, place, dict, "entries below it, as in the recipes") or {}


def _kind(value: Any) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) < 50 else f'{text[:50]}…'}"
