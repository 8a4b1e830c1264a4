"""Configurations of runs, as YAML: plain values alone, so that reading one runs nothing; errors name the file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from farfield.models.description import DEPTH, check_values, read_text

DATE = "tag:yaml.org,2002:timestamp"


class Loader(yaml.SafeLoader):
    """Read plain values; what looks like a date stays a string, as on the command line."""

    yaml_implicit_resolvers = {  # noqa: RUF012  (as in PyYAML)
        first: [(tag, pattern) for tag, pattern in resolvers if tag != DATE]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


def read_configuration(file: Path) -> dict[str, Any]:
    """Read a configuration.

    Args:
        file: A recipe, or the `config.yaml` of a run.

    Returns:
        Its entries, of plain values.

    Raises:
        ValueError: If it is no YAML, or holds other values, or names a class by something else than a string; the
            text has the file and the fix.
    """
    text = read_text(file)
    try:
        check_depth(text)
        found = yaml.load(text, Loader)
    # PyYAML's constructors of scalars fail in ways of their own, `!!bool x` with a KeyError.
    except Exception as error:
        raise ValueError(f"{file} is damaged, not YAML of plain values: {error}; fix: write its values out.") from error
    if not isinstance(found, dict):
        raise ValueError(f"{file} holds no entries but {kind(found)}; fix: a recipe, or the config.yaml of a run.")
    check_values(file, found)
    check_classes(file, "", found)
    return found


def check_depth(text: str) -> None:
    """Refuse lists in lists in lists, for which PyYAML takes minutes before it fails."""
    depth = 0
    for event in yaml.parse(text, Loader):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > DEPTH:
            raise ValueError(f"it is nested in more than {DEPTH} levels")


def check_classes(file: Path, place: str, value: Any) -> None:
    """Refuse a class that is not named by a string, and arguments of it that have no names."""
    if isinstance(value, list):
        for number, each in enumerate(value):
            check_classes(file, f"{place}[{number}]", each)
    elif isinstance(value, dict):
        inside = f"{place}." if place else ""
        entry(file, value, "init_args", inside, dict, "its arguments by their names, such as {num_classes: 10}")
        entry(file, value, "class_path", inside, str, "its full name, such as farfield.models.kanet_qkv")
        for name, each in value.items():
            check_classes(file, f"{place}.{name}" if place else name, each)


def entry(file: Path, values: dict[str, Any], name: str, place: str, expected: type, fix: str) -> Any:
    """Return an entry of some values, None if it is not there; refuse one of another kind."""
    found = values.get(name)
    if found is not None and not isinstance(found, expected):
        raise ValueError(f"{file}: {place}{name} is {kind(found)}; fix: {fix}.")
    return found


def section(file: Path, values: dict[str, Any], name: str, place: str = "") -> dict[str, Any]:
    """Return the entries below a name, none if it is not there."""
    return entry(file, values, name, place, dict, "entries below it, as in the recipes") or {}


def kind(value: Any) -> str:
    """A value for an error, shortened."""
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) < 50 else f'{text[:50]}…'}"
