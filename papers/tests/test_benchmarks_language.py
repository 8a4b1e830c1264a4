"""The benchmarks of language as a user runs them, on tiny text; FA's figures, their lines and a few points."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from farfield_papers import theory

pytestmark = pytest.mark.usefixtures("benchmarks_on_path")

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.mark.long
def test_figure_4_by_one_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import fa_figures

    options = ["4", "--largest", "16", "--runs", str(tmp_path), "--picture", str(tmp_path / "4.png")]
    monkeypatch.setattr(sys, "argv", ["fa_figures.py", *options])
    fa_figures.main()
    assert (tmp_path / "4.png").stat().st_size > 10_000
    points = [json.loads(line) for line in (tmp_path / "fa-figure-4.jsonl").read_text().splitlines()]
    assert {(point["operator"], point["size"]) for point in points} == {("dot", 16), ("factorized", 16)}
    kept = {point["operator"]: point["kept_bytes"] for point in points if "kept_bytes" in point}
    # The grid, and of the conventional module its N×N coefficients.
    assert kept["dot"] > 4 * 256**2 > kept["factorized"] > 4 * 64 * 256
    fa_figures.main()
    assert len((tmp_path / "fa-figure-4.jsonl").read_text().splitlines()) == len(points) == 4


@pytest.mark.parametrize(("figure", "kind"), [("4", "memory"), ("4", "no"), ("5", "no")])
def test_a_figure_without_times(figure: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import fa_figures

    options = [figure, "--measure", kind, "--largest", "16", "--runs", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["fa_figures.py", *options, "--picture", str(tmp_path / "figure.png")])
    fa_figures.main()
    assert (tmp_path / "figure.png").stat().st_size > 10_000
    points = fa_figures.read(tmp_path / f"fa-figure-{figure}.jsonl")
    assert len(points) == (2 if kind == "memory" else 0)
    assert not any("seconds" in point for point in points)


def test_the_lines_of_both_figures_are_the_papers_numbers() -> None:
    import fa_figures

    lines = fa_figures.module_lines()
    dense, linear = (
        dict(zip(fa_figures.SIZE, lines[f"formula: {name}"][2], strict=True)) for name in ("conventional", "factorized")
    )
    assert f"{dense[64].activation_bytes / linear[64].activation_bytes:.0f}x" == "17x"
    assert f"{dense[128].activation_bytes / 1e9:.2f}" == "1.09"
    assert f"{int(dense[256].macs / 1e9)}" == "412"
    base = fa_figures.bert_lines()["formula: base, conventional"][2]
    one = theory.predict_module("CA-Tfm", channels=768, positions=512, basis=768, width=768, heads=12)
    assert base[fa_figures.LENGTHS.index(512)].activation_bytes == 12 * one.activation_bytes
