"""Command lines that are refused, in this process."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from farfield.cli import main


def refusal(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """What a command line that ends with status 2 prints, and nothing on standard output."""
    with pytest.raises(SystemExit) as stopped:
        main(words)
    assert stopped.value.code == 2
    printed = capsys.readouterr()
    assert not printed.out
    return printed.err


def assert_one_line(text: str, facts: Iterable[str]) -> None:
    """Assert that a refusal is one line with these facts."""
    assert text.startswith("farfield")
    assert [fact for fact in facts if fact not in text] == []
    assert text.count("\n") == 1
    assert text.endswith("\n")
