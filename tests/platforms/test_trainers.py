"""Each trainer's part of docs/guide/trainers.md: train and save, then load in a new process, export and compare."""

from __future__ import annotations

import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

PAGE = Path(__file__).parents[2] / "docs/guide/trainers.md"


def programs() -> dict[str, list[str]]:
    """The heading of each part of the page -> its programs."""
    found: dict[str, list[str]] = {}
    tokens = MarkdownIt().parse(PAGE.read_text(encoding="utf-8"))
    heading = ""
    for before, token in pairwise(tokens):
        if before.type == "heading_open":
            heading = token.content
        if token.type == "fence" and token.info.strip() == "py":
            found.setdefault(heading, []).append(token.content)
    return found


FIRST, *TRAINERS = programs()


@pytest.mark.slow
@pytest.mark.parametrize("trainer", TRAINERS)
def test_a_trained_model_is_loaded_and_exported_in_a_new_process(trainer: str, tmp_path: Path) -> None:
    train, load = programs()[trainer]
    for package in re.findall(r"^from (ultralytics)", train, re.MULTILINE):
        pytest.importorskip(package)
    (tmp_path / "common.py").write_text(programs()[FIRST][0], encoding="utf-8")
    for name, program in (("train.py", train), ("load.py", load)):
        (tmp_path / name).write_text(program, encoding="utf-8")
        subprocess.run([sys.executable, "-W", "ignore", name], check=True, cwd=tmp_path, timeout=1200)


def test_every_trainer_has_two_programs() -> None:
    assert len(TRAINERS) == 7
    assert {len(programs()[trainer]) for trainer in TRAINERS} == {2}
