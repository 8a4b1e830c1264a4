"""The command line and its five tables, for people, as JSON, as CSV."""

from __future__ import annotations

import csv
import io
import json
import re
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from farfield import __version__, cost
from farfield._operators import FACTS
from farfield.cli import COMMANDS, machine, main, output
from farfield.cli.values import parse_device
from farfield.cost import formulas
from farfield.ops import OPERATORS

DOCS = Path(__file__).parents[2] / "papers" / "docs"


@pytest.fixture
def fails(capsys: pytest.CaptureFixture[str]) -> Any:
    def fails(*arguments: str, status: int = 2) -> str:
        with pytest.raises(SystemExit) as stopped:
            main(arguments)
        assert stopped.value.code == status
        captured = capsys.readouterr()
        assert captured.out == ""
        assert "Traceback" not in captured.err
        return captured.err

    return fails


def words(text: str) -> list[str]:
    return text.split()


# ---- main ------------------------------------------------------------------------------------------------------------
def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["--help"], ["-h"]):
        with pytest.raises(SystemExit) as stopped:
            main(arguments)
        assert not stopped.value.code
        text = capsys.readouterr().out
        lines = {line.split()[0]: line.split()[1:] for line in text.splitlines() if line.startswith("  ")}
        assert all(lines[name] for name in COMMANDS)
    main([])
    assert capsys.readouterr().out == text


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out == f"farfield {__version__}\n"


def test_help_and_version_do_not_load_torch() -> None:
    script = "import sys\nfrom farfield.cli import main\ntry: main(['--help'])\nexcept SystemExit: pass\n"
    script += "assert 'torch' not in sys.modules; main(['operators', '--json']); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True, capture_output=True)


def test_unknown_command(fails: Any) -> None:
    assert fails("operatrs") == 'farfield: no command "operatrs"; nearest: operators.\n'
    assert fails("xyz").startswith('farfield: no command "xyz"; it has operators, cost, measure, ')


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["cost", "--size", "56,x"], "--size: '56,x' is not a size: whole numbers from 1 joined by commas"),
        (["cost", "--size", "56,0"], "--size: '56,0' is not a size"),
        (["cost", "--channels", "0"], "--channels: '0' is not a whole number from 1"),
        (["cost", "--channels", "eight"], "--channels: 'eight' is not a whole number from 1"),
        (["cost", "--json", "--csv"], "--csv: not allowed with argument --json"),
        (["cost", "--chanels", "8"], 'no option "--chanels"; nearest: --channels.'),
        (["measure", "--repeats", "-1"], "--repeats: '-1' is not a whole number from 1"),
        (["cost", "--operator", "siamse"], 'farfield cost: no operator "siamse"; nearest: siamese'),
        (["cost", "--heads", "3"], "heads=3 does not divide the 8 channels of query"),
        (["cost", "--project", "vx"], "project='vx' must be letters of \"qkvo\""),
        (["measure", "--device", "abacus", "--size", "4"], '--device: no device "abacus"; it has cpu, cuda, mps, xpu.'),
        (["measure", "--device", "cudda", "--size", "4"], '--device: no device "cudda"; nearest: cuda'),
        (["measure", "--device", "", "--size", "4"], '--device: no device ""; it has cpu, '),
        (["measure", "--device", "cpu:x"], "--device: this machine has no device cpu:x; fix: cpu."),
        (["measure", "--device", "cuda:99"], "--device: this machine has no device cuda:99; fix: c"),
    ],
)
def test_bad_arguments(fails: Any, arguments: list[str], text: str) -> None:
    assert text in fails(*arguments)


def test_debug_shows_the_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    for arguments in (["--debug", "cost", "--heads", "3"], ["cost", "--heads", "3", "--debug"]):
        with pytest.raises(ValueError, match="heads=3 does not divide"):
            main(arguments)


@pytest.mark.parametrize(("kind", "count"), [("cuda", 2), ("cuda", 0)])
def test_the_devices_of_another_machine(kind: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.accelerator.is_available", lambda *_: count > 0)
    monkeypatch.setattr("torch.accelerator.current_accelerator", lambda *_: torch.device(kind))
    monkeypatch.setattr("torch.accelerator.device_count", lambda *_: count)
    assert parse_device("cpu") == "cpu"
    if count:
        assert [parse_device(name) for name in ("cuda", "cuda:0", "cuda:1")] == ["cuda", "cuda:0", "cuda:1"]
    for name in ("cuda:2", "mps") if count else ("cuda", "cuda:0"):
        fix = "cuda, or one of cuda:0, cuda:1." if count and name == "cuda:2" else "cpu."
        with pytest.raises(ValueError, match="this machine has no device") as raised:
            parse_device(name)
        assert str(raised.value) == f"this machine has no device {name}; fix: {fix}"


def raising(error: BaseException) -> Any:
    def build() -> None:
        raise error

    return build


@pytest.mark.parametrize(
    ("error", "status", "text"),
    [
        (KeyboardInterrupt(), 130, "farfield: interrupted.\n"),
        (ValueError("a clear sentence."), 2, "farfield info: a clear sentence.\n"),
        (LookupError("no such thing."), 2, "farfield info: no such thing.\n"),
        (
            OSError(28, "No space left on device", "runs"),
            2,
            "farfield info: [Errno 28] No space left on device: 'runs'\n",
        ),
        (ModuleNotFoundError("No module named 'safetensors'", name="safetensors"), 2, None),
        (ImportError("plot: it needs x; fix: y"), 2, "farfield info: plot: it needs x; fix: y\n"),
    ],
)
def test_errors_are_one_message(
    fails: Any, monkeypatch: pytest.MonkeyPatch, error: BaseException, status: int, text: str | None
) -> None:
    monkeypatch.setattr(machine, "show_machine", raising(error))
    output = fails("info", status=status)
    assert output == text if text else output.strip().endswith("fix: pip install safetensors")


@pytest.mark.parametrize(
    "error", [KeyError("x"), IndexError("y"), AttributeError("z"), NotImplementedError(), ImportError("w")]
)
def test_faults_of_the_program_keep_their_traceback(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    monkeypatch.setattr(machine, "show_machine", raising(error))
    with pytest.raises(type(error)):
        main(["info"])


@pytest.mark.parametrize("form", [[], ["--csv"], ["--json"]])
def test_a_reader_that_leaves_early_is_no_error(form: list[str]) -> None:
    command = [sys.executable, "-m", "farfield", "operators", *form]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout
        assert process.stderr
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait() == 141


# ---- operators -------------------------------------------------------------------------------------------------------
def test_operators_lists_every_operator(run: Any) -> None:
    text = run("operators")
    for name, facts in FACTS.items():
        [line] = [line for line in text.splitlines() if line.split()[:1] == [name]]
        assert all(text in line for text in (facts.source, facts.slots, facts.merging, facts.growth))
    assert [row["operator"] for row in json.loads(run("operators", "--json"))] == list(OPERATORS)


@pytest.mark.parametrize("name", OPERATORS)
def test_operators_states_how_summaries_merge(name: str) -> None:
    operator, facts = OPERATORS[name], FACTS[name]
    assert (facts.merging == "concatenated") != operator.merges_by_adding
    key = torch.ones(1, 1, 1 if operator.score in ("learned", "ones") else 5, 3)
    number = None if operator.basis is None else operator.basis(key, torch.ones(1, 1, 1, 3))[0].shape[2]
    slots = {"one": 1, "two": 2, "one per key channel": 5, "two per key channel": 10, "one per latent": 5}
    assert (slots | {"one per key channel, and one": 6}).get(facts.slots) == number


@pytest.mark.parametrize("name", OPERATORS)
def test_operators_states_how_the_cost_grows(name: str) -> None:
    rule = FACTS[name].growth.replace("²", "**2").replace("·", "*").replace("^dims", "**2")

    def grown(side: int) -> float:
        return float(eval(rule, {"N": side**2, "S": 2 * side, "c": 16, "h": 1, "s": 64}))

    small, large = (cost.predict(name, channels=16, size=(side, side), project="").macs for side in (64, 128))
    assert large / small == pytest.approx(grown(128) / grown(64), rel=1e-6)


# ---- cost ------------------------------------------------------------------------------------------------------------
def test_cost_prints_kan_table_2(run: Any) -> None:
    text = run("cost", "--channels", "8", "--size", "56,56")
    lines = {line.split()[0]: line.split() for line in text.splitlines() if line.strip()}
    assert lines["softmax"][1:9] == words("157.55m 157.55m 0.00% 0.00% 1,262.8MB 1,262.6MB 0.00% 0.00%")
    assert lines["softmax_pooled"][1:9] == words("39.39m 39.39m 75.00% 75.00% 318.7MB 318.7MB 74.76% 74.76%")
    assert lines["kronecker_kv"][1:9] == words("5.63m 5.62m 96.43% 96.43% 48.2MB 48.2MB 96.18% 96.18%")
    assert lines["kronecker_qkv"][1:9] == words("0.21m 0.21m 99.87% 99.87% 3.4MB 3.4MB 99.73% 99.73%")
    assert set(OPERATORS) <= set(lines)
    # The executed MACs, counted.
    assert lines["averaged"][-3] == "0.40m"
    assert lines["kronecker_qkv"][-3] == lines["kronecker_qkv_literal"][-3] == "0.21m"
    # What a process sends: of 8 samples 8 · 8 values, 8 weights and a count, in float32.
    assert lines["averaged"][-1] == "2.3kB"
    assert "KAN Table 2" in text
    # The page that the note points to has what differs in this table.
    (title,) = re.findall('documentation\'s page "(.+?)"', text)
    pages = [page.read_text(encoding="utf-8") for page in DOCS.glob("*.md")]
    (page,) = (page for page in pages if re.search(f"^# {title}$", page, re.MULTILINE))
    assert "| KAN Table 2, MACs of KAO_KV, 56² | 5.62m | 5.63m |" in page


def test_cost_prints_san_table_2(run: Any) -> None:
    arguments = words("cost --channels 128 --size 28,28 --batch 32 --project= --operator softmax --operator siamese")
    text = run(*arguments)
    lines = {line.split()[0]: line.split() for line in text.splitlines() if line.strip()}
    assert lines["siamese"][1:8] == words("0.40m 0.40m 99.74% 33.88MB 33.88MB 88.78% 88.78%")
    assert lines["softmax"][1:8] == words("157.35m 157.35m 0.00% 301.99MB 301.99MB 0.00% 0.00%")
    assert "SAN Table 2" in text


@pytest.mark.long
def test_cost_without_a_table_of_a_paper(run: Any) -> None:
    text = run("cost", "--channels", "12", "--size", "9,7,5", "--heads", "2", "--project", "qkvo")
    assert "printed" not in text.lower()
    rows = json.loads(run("cost", "--channels", "12", "--size", "9,7,5", "--heads", "2", "--project", "qkvo", "--json"))
    for row in rows:
        name = row["operator"]
        project = OPERATORS[name].projections("qkvo")
        options = {"channels": 12, "size": (9, 7, 5), "heads": 2, "project": project}
        ours = cost.predict(name, **options)
        assert (row["macs_executed"], row["parameters"]) == (ours.macs, ours.parameters)
        assert row["activation_bytes"] == 8 * ours.activation_bytes
        assert row["coefficients"] == ours.coefficients
        if row["paper"] is None:
            assert not any(name in rows.rows for rows in formulas.PAPERS.values())
            continue
        paper = cost.predict(name, convention="paper", **options)
        assert row["macs_paper"] == paper.macs
        assert row["memory_paper"] == 8 * paper.activation_bytes or row["paper"] == "SAN"
        assert row["macs_printed"] is None


def test_csv_is_as_json(run: Any) -> None:
    arguments = ["cost", "--size", "14,14", "--operator", "softmax", "--operator", "kronecker_kv"]
    rows = list(csv.DictReader(io.StringIO(run(*arguments, "--csv"))))
    raw = json.loads(run(*arguments, "--json"))
    assert [row["operator"] for row in rows] == ["softmax", "kronecker_kv"]
    assert rows == [{key: "" if value is None else str(value) for key, value in row.items()} for row in raw]


# ---- measure ---------------------------------------------------------------------------------------------------------
@pytest.mark.long
def test_measure(run: Any) -> None:
    rows = json.loads(run("measure", "--size", "12", "--size", "4,5", "--repeats", "2", "--batch", "2", "--json"))
    assert [(row["size"], row["operator"]) for row in rows] == [
        (size, name) for size in ([12], [4, 5]) for name in OPERATORS
    ]
    measured = {(len(row["size"]), row["operator"]): row for row in rows}
    for row in rows:
        assert 0 < row["fastest"] <= row["seconds"]
        assert row["speed_up"] == pytest.approx(measured[len(row["size"]), "softmax"]["seconds"] / row["seconds"])
        assert row["peak_bytes"] > 0
    # On one axis the Kronecker operators are softmax attention; dot and factorized are one function in two orders.
    assert measured[1, "kronecker_kv"]["equals"] == "softmax"
    assert measured[1, "kronecker_qkv"]["equals"] == "softmax, kronecker_kv"
    assert measured[1, "kronecker_qkv_literal"]["equals"] == "softmax, kronecker_kv, kronecker_qkv"
    assert measured[2, "kronecker_kv"]["equals"] is None
    assert measured[2, "factorized"]["equals"] == "dot"


def test_measure_for_people(run: Any) -> None:
    arguments = words("measure --size 14,14 --repeats 1 --backward --operator kronecker_kv --operator softmax")
    text = run(*arguments)
    lines = [line.split() for line in text.splitlines()]
    assert [line[3] for line in lines if line[:1] == ["14"]] == ["softmax", "kronecker_kv"]
    assert "forward and backward, 1 runs" in text
    assert "3.5×" in text  # KAN's
    assert "printed" not in run("measure", "--size", "5", "--repeats", "1", "--operator", "dot")


@pytest.mark.long
def test_measure_beside_the_least_time(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("farfield.cost.least_time.COPIED", {"memory": 2**12, "cache": 2**10})
    arguments = words("measure --roofline --size 5,6 --channels 8 --batch 2 --repeats 1 --operator siamese --backward")
    (row,) = json.loads(run(*arguments, "--json"))
    assert (row["size"], row["operator"]) == ([5, 6], "siamese")
    assert row["least_seconds"] == max(row["bytes"] / row["copy_rate"], row["macs"] / row["product_rate"])
    assert row["times"] == pytest.approx(row["seconds"] / row["least_seconds"])
    text = run(*arguments)
    assert "This machine: a copy from memory " in text
    assert "forward and backward, on " in text


@pytest.mark.long
@pytest.mark.parametrize("roofline", [[], ["--roofline"]])
def test_what_does_not_fit_is_left_out_of_a_measurement(
    roofline: list[str], run: Any, fails: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`dot` has a matrix of 400 × 400 numbers, which are 0.64 MB; the grid and the response of `siamese` 6.4 kB."""
    monkeypatch.setattr("farfield.cli.measured.free_bytes", lambda device: 600_000)
    monkeypatch.setattr("farfield.cost.least_time.COPIED", {"memory": 2**12, "cache": 2**10})
    arguments = words("measure --size 20,20 --channels 2 --batch 1 --repeats 1 --json --operator dot") + roofline
    with pytest.warns(UserWarning, match="dot on 20 × 20 positions, batch 1, needs 0.* and 0.60MB are free: it"):
        rows = json.loads(run(*arguments, "--operator", "siamese"))
    assert [row["operator"] for row in rows] == ["siamese"]
    with pytest.warns(UserWarning, match="fix: a smaller --size or --batch"):
        assert "no operator fits into the free memory; fix: a smaller --size or --batch" in fails(*arguments)
    arguments[arguments.index("20,20")] = "10,10"  # the fix
    assert len(json.loads(run(*arguments))) == 1


@pytest.mark.long
def test_a_measurement_of_minutes_is_announced(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = words("measure --size 6,6 --channels 2 --repeats 1 --operator softmax --operator siamese --json")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(*arguments)
    monkeypatch.setattr("farfield.cli.measured.MANY_MACS", 0)
    monkeypatch.setattr("farfield.cli.measured.LONG", 0)
    with pytest.warns(
        UserWarning, match=r"6 × 6 positions, batch 8, take about 0.\d minutes or more, s\w+ \d+% of them; fix"
    ):
        assert len(json.loads(run(*arguments))) == 2


# ---- info ------------------------------------------------------------------------------------------------------------
def test_info(run: Any) -> None:
    rows = {row["what"]: row["value"] for row in json.loads(run("info", "--json"))}
    assert rows["farfield"] == __version__
    assert rows["torch"].startswith(torch.__version__)
    assert f"{torch.get_num_threads()} threads" in rows["processor"]
    assert rows["kernels"] == "CPU: switched off (FARFIELD_KERNELS=0)"
    assert rows["extra stream"] == "installed"


def test_info_states_what_an_extra_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "installed", lambda name: name != "nibabel")
    extras = machine.extras()
    assert extras["timm"] == "installed"
    assert extras["nifti"] == extras["monai"].partition(",")[0] == "lacks nibabel"


# ---- writing ---------------------------------------------------------------------------------------------------------
def test_a_wide_table_is_not_cut_in_a_pipe(run: Any) -> None:
    text = run("operators")
    assert max(len(line) for line in text.splitlines()) > 100
    assert "…" not in text


@pytest.mark.parametrize(
    ("write", "value", "text"),
    [
        (output.millions, 157_552_640, "157.55m"),
        (output.millions, 5_035_261_952, "5,035.26m"),
        (output.millions, 4_999, "4,999"),
        (output.megabytes, 1_262_600_000, "1,262.6MB"),
        (output.megabytes, 1_500, "1.5kB"),
        (output.megabytes_finely, 20_971_520, "20.97MB"),
        (output.megabytes_finely, 4_563_402_752, "4.56GB"),
        (output.milliseconds, 1.5411, "1,541.1ms"),
        (output.milliseconds, 0.00123, "1.230ms"),
        (output.percent, 0.9987, "99.87%"),
        (output.ratio, 305.82, "305.8×"),
        (output.joined, [56, 57], "56 × 57"),
    ],
)
def test_units(write: Any, value: Any, text: str) -> None:
    assert write(value) == text


# ---- what is one's own -----------------------------------------------------------------------------------------------
@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A user's operator in a file of the current folder."""
    functions = "basis=lambda key, valid: (key.exp(), None), coefficients=lambda query, summary: query.softmax(2)"
    source = f"from farfield.ops import Operator\nwaves = Operator({functions})\nnumber = 5\n"
    (tmp_path / "operators_of_a_user.py").write_text(source, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return "operators_of_a_user:waves"


def test_an_operator_of_ones_own_is_counted_and_measured(run: Any, fails: Any, own: str) -> None:
    rows = json.loads(run("cost", "--operator", own, "--operator", "siamese", "--json"))
    assert [row["operator"] for row in rows] == ["siamese", own]
    assert rows[1]["macs_executed"] > rows[0]["macs_executed"] > 0
    assert rows[1]["macs_paper"] is None
    assert rows[0].keys() == rows[1].keys()
    assert own in run("cost", "--operator", own)
    assert "operators_of_a_user.py:waves" in run("cost", "--operator", "operators_of_a_user.py:waves")
    assert len(run("cost", "--operator", own, "--csv").splitlines()) == 2
    (row,) = json.loads(run("measure", "--operator", own, "--size", "4,4", "--repeats", "1", "--json"))
    assert row["operator"] == own
    assert row["seconds"] > 0
    assert "cannot be imported" in fails("measure", "--operator", f"{own}s")
    assert "must be an ops.Operator, got int" in fails("cost", "--operator", "operators_of_a_user:number")
    assert "cannot be imported" in fails("cost", "--operator", "no_such_module:waves")
