"""`farfield kernels`: the state, the reasons, and a build that cannot be."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from farfield.cli import main


def test_it_prints_why_kernels_are_not_used(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    main(["kernels", "--json"])
    rows = {row["what"]: row["value"] for row in json.loads(capsys.readouterr().out)}
    assert rows["state"] == "switched off (FARFIELD_KERNELS=0)"
    assert rows["library"].startswith(str(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_a_build_that_fails_states_why(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(SystemExit) as stopped:
        main(["kernels", "--build"])
    assert stopped.value.code == 2
    text = capsys.readouterr().err
    assert text.startswith("farfield kernels: ")
    assert "'no-such-compiler' was not found; fix: apt-get install g++" in text
