"""The library's words are the field's: code, pages and help have none of the private words that stood for them."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FILES = sorted(
    [
        *(ROOT / "src").rglob("*.py"),
        *(ROOT / "src").rglob("*.cpp"),
        *(ROOT / "recipes").glob("*.yaml"),
        *(path for path in (ROOT / "docs").rglob("*.md") if "_build" not in path.parts),
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
    ]
)

# What is written -> what is not.
WORDS = {
    "position": r"(?i)\bcells?\b",
    "size": r"(?i)\bsides\b",
    "query, key, attends to": r"(?i)\b(ask(s|ed|ing)?|answer(s|ed|ing)?|hear(s|d)?|listens?)\b",
    "states, gives, reports": r"(?i)\b(say|says|said|saying)\b",
    "valid": r"(?i)\breal (positions?|keys?|tokens?|queries|values?)\b|\b(is|are) (not )?real\b",
    "spatial dims": r"(?i)\b(any|of|another|other|the) rank\b|\brank=[1-9]|\branks? [1-9]\b",
    "operator": r"\brow: Operator\b|\b(Kronecker|siamese|factorized) rows?\b",
    "projection": r"(?i)\b(value|key|query) maps?\b|\breadings\b",
    "grad_output, result": r"(?i)\bupon\b|\bfound\b *(=[^=]|,[^\"'(]* = )",
    "MACs": r"(?i)\bmadds?\b|\bmultiply-adds?\b",
}
# (what is written, file) -> how often the other word stands there, and why.
ALLOWED: dict[tuple[str, str], tuple[int, str]] = {}


@pytest.mark.parametrize("word", WORDS)
def test_files_have_the_fields_words(word: str) -> None:
    found: Counter[str] = Counter()
    for path in FILES:
        found[path.relative_to(ROOT).as_posix()] += len(re.findall(WORDS[word], path.read_text(encoding="utf-8")))
    allowed = {file: count for (name, file), (count, _) in ALLOWED.items() if name == word}
    assert {file: count for file, count in found.items() if count} == allowed


@pytest.mark.long
@pytest.mark.parametrize("command", [(), ("maps",), ("cost",), ("measure",), ("plan",), ("models",), ("operators",)])
def test_help_has_the_fields_words(command: tuple[str, ...]) -> None:
    arguments = [sys.executable, "-m", "farfield.cli", *command, "--help"]
    text = subprocess.run(arguments, capture_output=True, text=True, check=True).stdout
    assert [re.findall(pattern, text) for pattern in WORDS.values()] == [[]] * len(WORDS)


def test_words_are_found() -> None:
    wrong = "Each cell asks; its sides say upon a real key of rank 2 what key maps and Kronecker rows of madds give."
    assert [word for word, pattern in WORDS.items() if not re.search(pattern, wrong)] == []
