"""The page of results: the tables of the scripts that train nothing are those on the page."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
SCRIPTS = ("results", "ceiling", "power")


def commands() -> list[list[str]]:
    """Return the commands on the page that print a table from a record."""
    lines = [
        line.strip() for line in PAGE.replace("\\\n", " ").splitlines() if line.startswith("    python benchmarks/")
    ]
    words = [shlex.split(line, comments=True)[1:] for line in lines]
    return [each for each in words if Path(each[0]).stem in SCRIPTS and "--root" not in each]


def test_each_of_the_scripts_stands_on_the_page() -> None:
    assert {Path(words[0]).stem for words in commands()} == set(SCRIPTS)


@pytest.mark.parametrize("words", commands(), ids=" ".join)
def test_the_page_has_the_rows_of_the_record(
    benchmarks_on_path: None, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    # A picture is drawn elsewhere.
    drawn = [str(tmp_path / Path(word).name) if word.endswith(".png") else word for word in words]
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", drawn)
    script: ModuleType = __import__(Path(words[0]).stem)
    script.main()
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|") and set(line) - set("|-")]
    assert len(rows) > 1
    missing = [row for row in rows if row not in PAGE]
    assert not missing


def test_verdicts_name_what_helps_and_what_costs(benchmarks_on_path: None) -> None:
    results = __import__("results")
    scores = {"without": (70.0, 70.2, 69.9), "good": (80.0, 80.1, 80.2), "bad": (60.0, 60.1, 60.2)}
    scores |= {"same": (70.1, 70.0, 70.2)}
    networks = {
        name: [{"seed": seed, "score": each, "images": 5000} for seed, each in enumerate(values)]
        for name, values in scores.items()
    }
    verdicts = [results.verdict(results.Row("", "cifar10", name, "without"), networks) for name in scores]
    assert verdicts[1:] == ["yes", "no, it costs", "not seen"]


def test_of_several_rates_that_with_most_seeds_is_taken(
    benchmarks_on_path: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = __import__("results")
    lines = [{"operator": "dot", "rate": 0.1, "seed": seed, "accuracy": 0.5} for seed in range(3)]
    lines += [{"operator": "dot", "rate": 0.2, "seed": seed, "accuracy": 0.9} for seed in range(2)]
    (tmp_path / "recall.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    monkeypatch.setattr(results, "RECORDS", tmp_path)
    assert [line["score"] for line in results.networks_of("recall")["dot"]] == [50.0] * 3
