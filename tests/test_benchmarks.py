"""The benchmarks as a user runs them, on tiny grids; and that what is wrong gets no time."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from farfield.cost import saved_bytes
from farfield.nn import GridAttention
from farfield.ops import OPERATORS
from farfield.ops.fast import kernels

pytestmark = pytest.mark.usefixtures("benchmarks_on_path")

ROOT = Path(__file__).parents[1]
BENCHMARKS = ROOT / "benchmarks"
SMALL = ["--channels", "8", "--batch", "2", "--repeats", "1"]


def module(name: str) -> ModuleType:
    return __import__(name)


def main(monkeypatch: pytest.MonkeyPatch, script: str, *arguments: str) -> None:
    """Run a script as `run` does, in this process: loading torch again would be most of it."""
    monkeypatch.setattr(sys, "argv", [script, *arguments])
    module(script.removesuffix(".py")).main()


def run(script: str, *arguments: str, status: int = 0, folder: Path = BENCHMARKS) -> str:
    command = [sys.executable, str(folder / script), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder.parent)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + done.stderr


# ---- equality before time --------------------------------------------------------------------------------------------
def options(operator: str, project: str) -> dict[str, Any]:
    return {"heads": 2, "project": OPERATORS[operator].projections(project)}


@pytest.mark.parametrize("project", ["", "qkvo"])
@pytest.mark.parametrize("operator", OPERATORS)
def test_every_operator_is_what_its_equation_says(operator: str, project: str) -> None:
    contestants, race = module("contestants"), module("race")
    contestant = contestants.ours(contestants.attention_of(operator, 8, **options(operator, project)))
    for shape in ((2, 8, 5, 7), (1, 8, 11), (1, 8, 3, 4, 3)):
        error = race.error_of(contestant, contestant.module, torch.randn(shape), backward=True)
        assert error < race.tolerance(torch.float32) / 10


@pytest.mark.parametrize("operator", OPERATORS)
def test_no_operator_passes_for_another(operator: str) -> None:
    contestants, race = module("contestants"), module("race")
    grid = torch.randn(2, 8, 5, 7)
    # dot and factorized are one function; siamese_ones differs from siamese by its vector.
    for other in set(OPERATORS) - ({"dot", "factorized"} if operator in ("dot", "factorized") else {operator}):
        truth = contestants.ours(contestants.attention_of(other, 8, heads=2)).truth
        attention = contestants.attention_of(operator, 8, heads=2)
        error = race.error_of(race.Contestant("wrong", attention, truth), attention, grid, backward=False)
        assert error > 3 * race.tolerance(torch.float32), other


class Broken(nn.Module):
    """An operator with a fault in its responses, or in its gradient alone."""

    def __init__(self, attention: GridAttention, fault: str) -> None:
        super().__init__()
        self.attention, self.fault = attention, fault

    def forward(self, grid: torch.Tensor) -> torch.Tensor:
        response = self.attention(grid)
        if self.fault == "response":
            return 1.001 * response
        if self.fault == "nan":
            return torch.where(response == response.max(), torch.nan, response)
        return response.detach() + 1.001 * (response - response.detach())


@pytest.mark.parametrize("fault", ["response", "nan", "gradient"])
def test_a_wrong_operator_gets_no_time(fault: str) -> None:
    contestants, race = module("contestants"), module("race")
    attention, grid = contestants.attention_of("siamese", 8), torch.randn(2, 8, 5, 7)
    right = contestants.ours(attention)
    wrong = race.Contestant("wrong", Broken(attention, fault), right.truth, twins=right.twins)
    rows = race.race([right, wrong], grid, backward=fault == "gradient", repeats=1)
    assert [row["right"] for row in rows] == [True, False]
    assert rows[0]["seconds"] > 0
    assert rows[1]["seconds"] is rows[1]["fastest"] is rows[1]["peak_bytes"] is rows[1]["saved_bytes"] is None
    assert race.times_as_long(rows, "siamese", "wrong") is None
    assert race.times_as_long(rows, "wrong", "siamese") is None
    assert race.race([wrong], grid, repeats=1)[0]["right"] == (fault == "gradient")


def test_a_wrong_gradient_of_a_parameter_is_found() -> None:
    contestants, race = module("contestants"), module("race")
    attention = contestants.attention_of("averaged", 8)
    right = contestants.ours(attention)
    attention.value.weight.register_hook(lambda gradient: 1.01 * gradient)
    assert not race.race([right], torch.randn(2, 8, 5, 7), backward=True, repeats=1)[0]["right"]


@pytest.mark.long
def test_a_wrong_revision_of_an_operator_ends_the_program(tmp_path: Path) -> None:
    """The whole program on a library in which one equation is wrong."""
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(BENCHMARKS, tmp_path / "benchmarks", ignore=shutil.ignore_patterns("__pycache__"))
    with (tmp_path / "src" / "farfield" / "ops" / "table.py").open("a", encoding="utf-8") as table:
        table.write('\nOPERATORS["averaged"] = Operator(coefficients=queries, basis=keys, per=channel)\n')
    script, file = tmp_path / "benchmarks" / "operators.py", tmp_path / "found.json"
    arguments = [*SMALL, "--size", "5,4", "--operator", "averaged", "--operator", "siamese", "--json", str(file)]
    done = subprocess.run(
        [sys.executable, str(script), *arguments],
        env=os.environ | {"PYTHONPATH": str(tmp_path / "src")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "wrong, and so without a time: averaged" in done.stderr
    assert re.search(r"averaged +WRONG, ", done.stdout)
    rows = {row["name"]: row for row in json.loads(file.read_text(encoding="utf-8"))}
    assert rows["averaged"]["seconds"] is rows["averaged"]["plain_times"] is rows["averaged"]["copies"] is None
    assert rows["siamese"]["plain_times"] > 0


def test_causal_attention_beside_torchs() -> None:
    text = run("causal_speed.py", "--tokens", "130", "--context", "90", "--steps", "3", "--turns", "1")
    assert re.search(r"^equal to \d\.\de-1[4-9] in float64", text)
    rows = re.findall(r"^\| (130 tokens|3 tokens behind 90) \| `(\w+)` \|", text, re.MULTILINE)
    assert [name for _, name in rows] == [name for name in ("linear_elu", "mala", "hedgehog") for _ in range(2)]


# ---- the program -----------------------------------------------------------------------------------------------------
@pytest.mark.slow
def test_operators(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    file, picture = tmp_path / "found.json", tmp_path / "found.png"
    arguments = [*SMALL, "--heads", "2", "--size", "4,5", "--size", "8,8", "--backward", "--peers"]
    arguments += ["--operator", "siamese", "--operator", "kronecker_kv", "--json", str(file), "--picture", str(picture)]
    main(monkeypatch, "operators.py", *arguments)
    text = capsys.readouterr().out
    rows = json.loads(file.read_text(encoding="utf-8"))
    peers = ["timm NonLocalAttn", "timm Attention2d", "MONAI SABlock", "MONAI SABlock, fused"]
    peers += ["kornia MultiHeadAttention", "kornia LinearAttention", "ImageLinearAttention", "AxialAttention"]
    others = ("AxialAttention", "kornia LinearAttention")
    # Without a compiler it is left out; it has no backward pass on a CPU.
    has_flex = "left out: torch flex_attention" not in text
    for size in ([4, 5], [8, 8]):
        for direction in ("forward", "forward and backward"):
            group = {row["name"]: row for row in rows if (row["size"], row["direction"]) == (size, direction)}
            assert list(group)[:5] == ["copy", "plain", "SDPA", "siamese", "kronecker_kv"]
            flexes = [name for name in group if name.startswith("torch flex_attention ")]
            assert len(flexes) == (has_flex and direction == "forward")
            assert len(group) == 5 + 2 * (len(peers) + len(flexes))
            for name, row in group.items():
                assert row["right"]
                assert row["copies"] == pytest.approx(row["seconds"] / group["copy"]["seconds"])
                assert f"{torch.__version__}" in row["hardware"]
                assert (row["saved_bytes"] is not None) == (direction != "forward" and name != "copy")
            for name in ("siamese", "kronecker_kv"):
                times = group["plain"]["seconds"] / group[name]["seconds"]
                assert group[name]["plain_times"] == pytest.approx(times)
            for name in peers + ["torch flex_attention"] * len(flexes):
                (peer,) = (row for key, row in group.items() if key.startswith(f"{name} "))
                rival = group[peer["rival"]]
                assert peer["rival_times"] == pytest.approx(peer["seconds"] / rival["seconds"])
                assert peer["same"] == (name not in others)
                assert peer["plain_times"] is None
    assert text.count("flash-linear-attention") == (0 if torch.cuda.is_available() else 1)
    assert "kronecker_kv (another function)" in text
    assert "4 × 5 positions, 8 channels, batch 2, heads 2, projections v, float32: forward and backward" in text
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_large_grids_leave_out_what_squares_them() -> None:
    operators = module("operators")
    arguments = operators.parser().parse_args(["--channels", "1", "--batch", "1"])
    names = [each.name for each in operators.own(arguments, torch.zeros(1, 1, 1 << 15))]
    assert names == [name for name in OPERATORS if name not in ("softmax", "softmax_pooled", "dot")]


def test_operators_takes_a_users_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = "Operator(basis=lambda key, valid: (key.exp(), None), coefficients=lambda query, summary: query.softmax(2))"
    (tmp_path / "operators_of_mine.py").write_text(
        f"from farfield.ops import Operator\nown = {own}\n", encoding="utf-8"
    )
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "found.json"
    arguments = [*SMALL, "--size", "4,4", "--operator", "operators_of_mine:own", "--json", str(file), "--quiet"]
    main(monkeypatch, "operators.py", *arguments)
    rows = json.loads(file.read_text(encoding="utf-8"))
    assert rows[-1]["name"] == "custom"
    assert all(row["right"] for row in rows)


@pytest.mark.slow
def test_operators_compiled(tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    arguments = [*SMALL, "--size", "8,8", "--operator", "siamese", "--mode", "eager", "--mode", "compiled"]
    run("operators.py", *arguments, "--backward", "--only-ours", "--json", str(file), "--quiet")
    rows = json.loads(file.read_text(encoding="utf-8"))
    assert [row["name"] for row in rows] == 2 * ["copy", "siamese", "siamese compiled"]
    for row in rows:
        assert row["right"]
        # On a CPU the allocations of compiled code cannot be measured.
        assert (row["peak_bytes"] is None) == (row["name"] == "siamese compiled" and not torch.cuda.is_available())


SLOW = """
import time
fast = GridAttention.forward
GridAttention.forward = lambda self, grid: (time.sleep(0.1), fast(self, grid))[1]
"""


VALUE = re.compile(r"^\| (.+: \w+) \| (\S+) \| (\S+) \| (\S+) \|$", re.MULTILINE)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("git") is None, reason="no git")
def test_against_a_revision(tmp_path: Path) -> None:
    """A checkout whose working tree waits in each forward pass is slower than its last revision."""
    for folder in ("src", "benchmarks"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "a"]):
        subprocess.run([*git, *command], cwd=tmp_path, check=True, capture_output=True)
    with (tmp_path / "src" / "farfield" / "nn" / "attention.py").open("a", encoding="utf-8") as attention:
        attention.write(SLOW)
    arguments = [*SMALL, "--size", "5,4", "--operator", "siamese", "--only-ours"]
    text = run("revisions.py", "HEAD", "operators.py", "--turns", "1", *arguments, folder=tmp_path / "benchmarks")
    rows = {cells[0]: [float(cell) for cell in cells[1:]] for cells in VALUE.findall(text)}
    before, now, ratio = rows["5×4, forward, siamese: seconds"]
    assert now > 0.1 > before
    assert ratio == pytest.approx(now / before, rel=1e-3)
    assert next(iter(rows)) == "5×4, forward, copy: seconds"
    assert "Medians of 1 turns." in text
    with pytest.raises(SystemExit, match=r"^revisions.py: git knows no revision 'nowhere': "):
        module("revisions").unpack("nowhere", tmp_path)


def test_values_of_a_renamed_benchmark_are_compared_by_their_new_names(tmp_path: Path) -> None:
    script = tmp_path / "benchmarks" / "made.py"
    script.parent.mkdir()
    script.write_text(
        "import json, sys\n"
        "assert sys.argv[1:3] == ['--sides', '5,4'], sys.argv\n"
        "rows = [{'sides': [5, 4], 'name': 'copy', 'seconds': 2.0}]\n"
        "open(sys.argv[4], 'w').write(json.dumps({'rows': rows}))\n"
    )
    revisions = module("revisions")
    values = revisions.run(tmp_path, "made.py", ["--size", "5,4"], {"size": "sides"}, tmp_path / "values.json")
    assert values == {"5×4, copy: seconds": 2.0}
    script.write_text(
        "import json, sys\n"
        "rows = [{'source': '/elsewhere/farfield', 'name': 'copy', 'seconds': 2.0}]\n"
        "open(sys.argv[2], 'w').write(json.dumps(rows))\n"
    )
    with pytest.raises(
        SystemExit, match=r"^revisions.py: it should have measured .*, and measured /elsewhere/farfield\.$"
    ):
        revisions.run(tmp_path, "made.py", [], {}, tmp_path / "values.json")
    lines = [{"what": "exponent", "measured": "1,024.5 (7 copies)"}]
    assert revisions.values_of({"lines": lines}) == {"exponent: measured": 1024.5}
    turns = [{"a": 1.0, "b": 5.0}, {"a": 3.0}, {"a": 2.0}]
    assert revisions.compare(turns, [{"a": 4.0, "c": 1.0}]) == [("a", 2.0, 4.0)]


# ---- the lines that operators are held to ----------------------------------------------------------------------------
LINE = re.compile(r"^\| (.+) \| ([≥≤] [\d.]+|[\d.]+ ± 0.05) \| (.+) \| (.+) \|$", re.MULTILINE)


@pytest.mark.long
def test_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "limits.json"
    sections = [word for name in ("kan", "san", "exponent") for word in ("--section", name)]
    main(monkeypatch, "limits.py", "--tiny", "--repeats", "1", *sections, "--json", str(file))
    text = capsys.readouterr().out
    lines = LINE.findall(text)
    assert len(lines) == 4 + 2 + 2
    assert {verdict for *_, verdict in lines} == {"not judged"}
    assert "0 of 0 lines met, medians on " in text
    written = json.loads(file.read_text(encoding="utf-8"))["lines"]
    assert [(line["what"], line["limit"], line["measured"]) for line in written] == [line[:3] for line in lines]


def test_limits_are_those_of_the_task() -> None:
    limits = module("limits")
    setup = limits.Setup(tiny=False, repeats=1, device=torch.device("cpu"))
    assert setup.at_least("a", 80, 79.9) == ("a", "≥ 80", "79.9", False)
    assert setup.at_least("a", 80, 80).met is True
    assert setup.at_most("a", 2, 2.01) == ("a", "≤ 2", "2.01", False)
    assert setup.at_most("a", 2, 2).met is True
    grid, copy = torch.randn(1, 2, 40), module("race").copy_of_the_grid()
    (row,) = setup._replace(repeats=5, fastest=True).race([copy], grid)
    assert row["seconds"] == row["fastest"]
    assert limits.slope([(0, 1), (1, 3), (2, 5)]) == pytest.approx(2)
    assert limits.verdict(setup.at_most("a", 2, 3)) == "**not met**"


@pytest.mark.slow
@pytest.mark.parametrize("section", ["copies", "factorized", "scaling", "bandwidth"])
def test_limits_of_every_section(section: str) -> None:
    text = run("limits.py", "--tiny", "--repeats", "1", "--section", section)
    count = {"copies": 16, "factorized": 27, "scaling": 4, "bandwidth": 10}[section]
    assert len(LINE.findall(text)) == count


def test_without_a_gpu_bandwidth_says_so() -> None:
    limits = module("limits")
    setup = limits.Setup(tiny=False, repeats=1, device=torch.device("cpu"))
    assert list(limits.bandwidth(setup)) == [("bandwidth on a GPU", "≥ 80 %", "none could be had", None)]


@pytest.mark.slow
def test_kernels_beside_equations() -> None:
    lines = [line for line in run("kernels.py", "--tiny", "--rounds", "1").splitlines() if line.startswith("| `")]
    assert len(lines) == 4
    assert all(re.search(r"[\d.]+ → [\d.]+", line) for line in lines)


@pytest.mark.slow
def test_cases_of_kernels() -> None:
    if kernels.problem() is not None:
        pytest.skip("kernels: not built")
    header, _, *lines = [line for line in run("kernels.py", "--cases", "--tiny").splitlines() if line.startswith("|")]
    cases = [case.name for case in module("paths").CASES]
    assert header.split(" | ")[1:] == [*cases[:-1], f"{cases[-1]} |"]
    assert [line.split("`")[1] for line in lines] == list(module("kernels").IN_CASES)
    entry = r"[\d.]+ \([\d.]+\) / [\d.]+ \([\d.]+\)"
    assert all(len(re.findall(entry, line)) == len(cases) for line in lines)


@pytest.mark.slow
def test_default_beside_native_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    if kernels.problem() is not None:
        pytest.skip("kernels: not built")
    monkeypatch.delenv(kernels.SWITCH, raising=False)
    printed = run("native.py", "--tiny", "--turns", "2").splitlines()
    entries = [line.strip("| ").split(" | ") for line in printed if line.startswith("| ")][1:]
    native = module("native")
    expected = [name for name, *_ in native.cases(native.TINY)]
    assert [what.split(",")[0] for what, *_ in entries] == [*expected, f"mean of {len(expected)}"]
    assert all(float(ratio) > 0 for _, ratio, *_ in entries)


@pytest.mark.long
def test_the_documented_paths_are_those_that_run() -> None:
    if kernels.problem() is not None:
        pytest.skip("kernels: not built")
    run("paths.py", "--check")


# ---- what is kept for the backward pass ------------------------------------------------------------------------------
def test_the_documented_bytes_are_those_that_are_kept() -> None:
    page = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    missing = [line for line in module("kept").table().splitlines() if line not in page]
    assert missing == [], "docs/performance.md: python benchmarks/kept.py prints the table anew"


def test_the_textbook_form_keeps_what_it_must() -> None:
    """The input, four projections, both softmaxes: known by hand, in grids of as many channels."""
    kept = module("kept").kept()
    # The input, softmaxed queries and keys, values, attended; the context is small.
    assert kept["textbook"][0] == pytest.approx(5, abs=0.05)


@pytest.mark.parametrize("heads", [1, 8])
@pytest.mark.parametrize("shape", [(8, 256, 56, 56), (2, 1024, 56, 56)])
def test_a_third_of_what_the_textbook_form_keeps(shape: tuple[int, ...], heads: int) -> None:
    contestants, grid = module("contestants"), torch.zeros(shape, requires_grad=True)
    attention = contestants.attention_of(
        "factorized_gaussian", shape[1], heads=heads, project="qkvo", inner_channels=64
    )
    theirs = saved_bytes(contestants.textbook(attention).module, grid)
    assert saved_bytes(attention, grid) <= theirs / 3
