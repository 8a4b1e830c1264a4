"""Calls of the tables run in a folder of their own, which has the files that they read."""

from __future__ import annotations

import pytest

from helpers.followed import write_files


@pytest.fixture(autouse=True)
def files(apart: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(".")
    write_files()
