"""The command itself: what it prints before a command runs."""

from __future__ import annotations

import sys

import pytest

from farfield import cli


@pytest.mark.parametrize(
    ("words", "terminal", "said"),
    [
        (["fit", "--help"], True, False),
        (["fit", "--config", "digist"], True, True),
        (["fit", "--config", "digist"], False, False),
        (["operators"], True, False),
    ],
)
def test_a_command_whose_imports_take_seconds_says_that_it_started(
    words: list[str], terminal: bool, said: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    called: list[str] = []
    monkeypatch.setattr(cli, "dispatch", lambda name, arguments: called.append(capsys.readouterr().err))
    cli.main(words)
    assert called == ([f"farfield {words[0]}: loading\n"] if said else [""])
