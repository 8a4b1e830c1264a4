"""Fixes that refusals of the command line name are followed."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from farfield.cli.explore import explore
from farfield.cli.linearize import linearize_network
from farfield.cli.options import check_words, read_words
from helpers.followed import Row, each, follow

pytestmark = pytest.mark.unchecked("arguments of other types reach the functions")


ROWS = [
    Row(
        "cli/options.py",
        lambda: check_words(read_words(["--network", "kanet", "--data", "Digits"])),
        "nearest: --model.network.",
        lambda: [check_words(read_words(["--model.network", "kanet", "--data", "Digits"]))],
    ),
    Row(
        "cli/maps/views.py",
        lambda: explore(image=Path("scan.nii"), no_open=True),
        "one plane",
        lambda: [explore(image=Path("plane.png"), operator=["dot"], size=8, no_open=True)],
    ),
    Row(
        "cli/maps/views.py",
        lambda: explore(image=Path("stack.tif"), no_open=True),
        "one plane",
        lambda: [explore(image=Path("plane.png"), operator=["dot"], size=8, no_open=True)],
    ),
]


@each(ROWS)
def test_a_fix_can_be_followed(row: Row) -> None:
    follow(row)


# ---- errors come early -----------------------------------------------------------------------------------------------
def test_a_text_file_is_missed_before_the_hub_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setitem(
        __import__("sys").modules, "transformers", SimpleNamespace(AutoModel=asked, AutoTokenizer=asked)
    )
    with pytest.raises(ValueError, match=r"missing\.txt"):
        linearize_network("owner/name", texts=[Path("missing.txt")], out=Path("out"))
    assert not asked


def test_a_network_of_timm_is_named_with_its_prefix() -> None:
    with pytest.raises(ValueError, match="fix: timm:vit_small"):
        linearize_network("vit_small", images=Path(), out=Path("out"))
