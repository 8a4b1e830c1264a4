"""Every script in examples/ runs as it stands and prints something."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from helpers.partly import partly

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.py"))
# What they do is in the fast tests of its own subject as well.
LONGEST = {"shard_volume", "replace"}


@pytest.mark.long
@pytest.mark.parametrize(
    "path", partly(EXAMPLES, [path for path in EXAMPLES if path.stem not in LONGEST]), ids=lambda path: path.stem
)
def test_example(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) < 60
    runpy.run_path(str(path), run_name="__main__")
    assert capsys.readouterr().out.strip()
