"""Nothing that users rely on changes by accident: names, signatures, options, entries of recipes, licences."""

from __future__ import annotations

import difflib
import re
import tomllib

import pytest
from packaging.requirements import Requirement

from helpers.public import FILE, ROOT, lines


@pytest.mark.unchecked("the hook that checks shapes wraps the functions")
def test_what_users_rely_on_has_not_changed() -> None:
    written, current = FILE.read_text(encoding="utf-8").splitlines(), lines()
    changed = [
        line for line in difflib.unified_diff(written, current, lineterm="", n=0) if line[:2] not in ("--", "++")
    ]
    fix = "fix: if it is meant, say so in CHANGELOG.md and run python tests/helpers/public.py"
    assert not changed, "\n".join([*changed, fix])


def test_every_direct_dependency_is_on_the_page_of_licences_and_none_is_copyleft() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    needed = [
        *project["dependencies"],
        *(each for extra in project["optional-dependencies"].values() for each in extra),
    ]
    names = {Requirement(each).name for each in needed} - {"farfield"}
    rows = [line.split("|")[1:4] for line in (ROOT / "docs" / "licences.md").read_text(encoding="utf-8").splitlines()]
    licences = {row[0].strip(): row[2].strip() for row in rows[2:] if len(row) == 3}
    listed = {name for name in licences if name not in ("package", "---")}
    assert listed == names
    assert not [name for name in listed if re.search(r"GPL", licences[name])]
    sources = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "src").rglob("*.py"))
    assert not re.search(r"^\s*(import|from) ultralytics", sources, re.MULTILINE)
