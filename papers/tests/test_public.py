"""Nothing that users of the papers' package rely on changes by accident: names, signatures, options, recipes."""

from __future__ import annotations

import difflib
import pkgutil
import re

import pytest

from helpers.public import lines
from papers_helpers.public import PAPERS

WRITTEN = PAPERS.file.read_text(encoding="utf-8").splitlines()


@pytest.mark.unchecked("the hook that checks shapes wraps the functions")
def test_what_users_rely_on_has_not_changed() -> None:
    changed = [
        line for line in difflib.unified_diff(WRITTEN, lines(PAPERS), lineterm="", n=0) if line[:2] not in ("--", "++")
    ]
    fix = "fix: if it is meant, say so in CHANGELOG.md and run papers/tests/papers_helpers/public.py"
    assert not changed, "\n".join([*changed, fix])


CALLED = [line.split("(")[0] for line in WRITTEN if re.match(r"farfield_papers(\.\w+)+\(", line)]


@pytest.mark.parametrize("name", CALLED)
def test_a_public_name_has_a_docstring(name: str) -> None:
    text = pkgutil.resolve_name(name).__doc__  # its own, not that of a class it is made from
    assert text
    assert not text.startswith(f"{name.rpartition('.')[2]}("), "a named tuple or a dataclass made it"
