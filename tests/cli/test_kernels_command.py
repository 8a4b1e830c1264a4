"""`farfield kernels`: the state, and the reasons."""

from __future__ import annotations

import json

import pytest

from farfield.cli import main
from farfield.ops.fast import kernels, table


def test_it_prints_why_kernels_do_not_run(capsys: pytest.CaptureFixture[str]) -> None:
    main(["kernels", "--json"])
    rows = {row["what"]: row["value"] for row in json.loads(capsys.readouterr().out)}
    assert rows["state"].startswith("switched off (FARFIELD_KERNELS=0)")
    assert rows["library"] == str(kernels.LIBRARY)


def test_it_prints_the_instructions_that_they_are_compiled_for(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if (reason := kernels.problem()) is not None:
        pytest.skip(reason)
    monkeypatch.setenv(kernels.SWITCH, "1")
    main(["kernels", "--json"])
    rows = {row["what"]: row["value"] for row in json.loads(capsys.readouterr().out)}
    assert rows["state"] == f"run, compiled for {kernels.instructions()}"


def test_it_prints_the_kernel_table(capsys: pytest.CaptureFixture[str]) -> None:
    main(["kernels", "--json"])
    rows = [(row["what"], row["value"]) for row in json.loads(capsys.readouterr().out)]
    for line in table.LINES:
        assert (", ".join(line.names) or "–", table.describe(line)) in rows
