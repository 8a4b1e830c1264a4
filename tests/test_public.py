"""Nothing that users rely on changes by accident: names, signatures, options, entries of recipes, licences."""

from __future__ import annotations

import ast
import difflib
import pkgutil
import re
import tomllib

import pytest
from packaging.requirements import Requirement

from helpers.public import LIBRARY, ROOT, definitions, lines


@pytest.mark.unchecked("the hook that checks shapes wraps the functions")
def test_what_users_rely_on_has_not_changed() -> None:
    written, current = LIBRARY.file.read_text(encoding="utf-8").splitlines(), lines(LIBRARY)
    changed = [
        line for line in difflib.unified_diff(written, current, lineterm="", n=0) if line[:2] not in ("--", "++")
    ]
    fix = "fix: if it is meant, say so in CHANGELOG.md and run python tests/helpers/public.py"
    assert not changed, "\n".join([*changed, fix])


def test_every_direct_dependency_is_on_the_page_of_licences_and_none_is_copyleft() -> None:
    names = set()
    for file in ("pyproject.toml", "papers/pyproject.toml"):
        project = tomllib.loads((ROOT / file).read_text(encoding="utf-8"))["project"]
        extras = [each for extra in project["optional-dependencies"].values() for each in extra]
        names |= {Requirement(each).name for each in (*project["dependencies"], *extras)} - {"farfield"}
    rows = [line.split("|")[1:4] for line in (ROOT / "docs" / "licences.md").read_text(encoding="utf-8").splitlines()]
    licences = {row[0].strip(): row[2].strip() for row in rows[2:] if len(row) == 3}
    listed = {name for name in licences if name not in ("package", "---")}
    assert listed == names
    assert not [name for name in listed if re.search(r"GPL", licences[name])]
    sources = "\n".join(
        path.read_text(encoding="utf-8") for folder in ("src", "papers/src") for path in (ROOT / folder).rglob("*.py")
    )
    assert not re.search(r"^\s*(import|from) ultralytics", sources, re.MULTILINE)


def named_in(lines: list[str]) -> list[str]:
    """The paths of functions, classes and methods, without those that are read as text, and attributes."""
    names = [line.split("(")[0] for line in lines if re.match(r"farfield(\.\w+)+\(", line)]
    return [name for name in names if not name.startswith(tuple(LIBRARY.sources))]


@pytest.mark.parametrize("name", named_in(LIBRARY.file.read_text(encoding="utf-8").splitlines()))
def test_a_public_name_has_a_docstring(name: str) -> None:
    text = pkgutil.resolve_name(name).__doc__  # its own, not that of a class it is made from
    assert text
    assert not text.startswith(f"{name.rpartition('.')[2]}("), "a named tuple or a dataclass made it"


@pytest.mark.parametrize(("path", "name"), [(path, name) for path, names in LIBRARY.sources.items() for name in names])
def test_a_name_of_an_integration_has_a_docstring(path: str, name: str) -> None:
    [node] = [each for each in definitions(path) if each.name == name]
    functions = [each for each in node.body if isinstance(each, ast.FunctionDef) and not each.decorator_list]
    methods = [each for each in functions if isinstance(node, ast.ClassDef) and not each.name.startswith("_")]
    assert [each.name for each in (node, *methods) if not ast.get_docstring(each)] == []
