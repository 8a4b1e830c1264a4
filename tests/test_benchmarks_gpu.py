"""The script for a machine with a GPU, tried on the CPU: steps, counts, and that it goes on after a fault."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.usefixtures("benchmarks_on_path")

ROOT = Path(__file__).parents[1]


def module(name: str) -> ModuleType:
    return __import__(name)


def pytest_of(*arguments: str, **options: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, **{"cwd": ROOT, **options})


TESTS = """
import pytest

@pytest.fixture
def broken():
    raise OSError("no file")

def test_right(): pass
def test_wrong(): assert 1 == 2, "not | equal"
def test_of_a_broken_fixture(broken): pass
@pytest.mark.skip(reason="needs a GPU")
def test_skipped(): pass
@pytest.mark.parametrize("number", [1, 2])
def test_skips(number): pytest.skip("no data")
"""


@pytest.mark.long
def test_tests_are_counted_with_the_reasons_of_skips(tmp_path: Path) -> None:
    (tmp_path / "test_one.py").write_text(TESTS, encoding="utf-8")
    pytest_of("test_one.py", "--junitxml=found.xml", cwd=tmp_path)
    result = module("gpu").read_result(tmp_path / "found.xml")
    assert (result["passed"], result["failed"], result["skipped"]) == (1, 2, 3)
    assert result["reasons"] == {"no data": 2, "needs a GPU": 1}
    assert [each["test"] for each in result["wrong"]] == ["test_one::test_wrong", "test_one::test_of_a_broken_fixture"]
    text = "\n".join(module("gpu_page").tests(result, stopped=True))
    assert "1 passed, 2 failed, 3 skipped. Then their time was up" in text
    assert "| 2 | no data |" in text
    assert "AssertionError: not / equal" in text


STOPPED = """
import signal, sys, time
# Where tests run in the background it may be ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)
try:
    print("has begun", flush=True)
    time.sleep(600)
except KeyboardInterrupt:
    open(sys.argv[1], "w").write('{"lines": []}')
"""


def test_what_is_stopped_can_write_what_it_has(tmp_path: Path) -> None:
    gpu, file = module("gpu"), tmp_path / "found.json"
    command = [sys.executable, "-c", STOPPED, str(file)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdout.readline() == b"has begun\n"
        gpu.end(process)
    assert gpu.read_result(file) == {"lines": []}


def test_what_does_not_stop_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = module("gpu")
    monkeypatch.setattr(gpu, "GRACE", 0.1)
    code = "import signal, time; signal.signal(2, signal.SIG_IGN); print('has begun', flush=True); time.sleep(600)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdout.readline() == b"has begun\n"
        gpu.end(process)
    assert process.returncode < 0


def test_what_fails_or_takes_too_long_is_written_down_and_the_rest_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gpu = module("gpu")
    limits = {"hardware": "beads", "lines": [{"what": "siamese", "limit": "≤ 2", "measured": "1.5", "met": True}]}
    scripts = {
        "limits kan": (f"import json, sys; json.dump({limits}, open(sys.argv[1], 'w'))", 60),
        "limits san": ("raise SystemExit('siamese is wrong')", 60),
        "tests": ("import time; time.sleep(600)", 0.1),
        "peers": ("", 0),
    }
    made = [
        gpu.Step(name, ["-c", code, str(tmp_path / name)], tmp_path / name, s) for name, (code, s) in scripts.items()
    ]
    monkeypatch.setattr(gpu, "steps", lambda device, small, folder: made)
    monkeypatch.setattr(gpu, "machine", lambda: [{"what": "processor", "value": "an abacus"}])
    monkeypatch.setattr(gpu, "PACKAGES", {"no_such_package": "one peer", "torch": "everything"})
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--out", str(tmp_path / "out")])
    with pytest.raises(SystemExit) as ended:
        gpu.main()
    assert ended.value.code == 1
    assert "missing: no_such_package, and with it one peer" in capsys.readouterr().out
    result = json.loads((tmp_path / "out" / "gpu.json").read_text(encoding="utf-8"))
    assert [step["state"] for step in result["steps"]] == ["passed", "failed", "out of time", "not started"]
    page = (tmp_path / "out" / "gpu.md").read_text(encoding="utf-8")
    for part in ("an abacus", "| siamese | ≤ 2 | 1.5 | met |", "1 of 1 met, on beads.", "siamese is wrong"):
        assert part in page


# ---- the page --------------------------------------------------------------------------------------------------------
RACED = {"name": "siamese", "size": [8, 8], "direction": "forward", "error": 3e-7, "right": True, "seconds": 0.0125}
RACED |= {"copies": 1.75, "rival_times": None, "same": None, "peak_bytes": 2_500_000, "hardware": "beads"}
RACED |= {"channels": 8, "batch": 2, "heads": 1, "dtype": "float32", "project": "v"}
PEER = RACED | {"name": "timm", "rival_times": 3.5, "same": True, "peak_bytes": None}
WRONG = PEER | {"name": "axial", "error": 0.25, "right": False, "seconds": None, "copies": None, "rival_times": None}
TRAINED = {"name": "sanet", "dtype": "float32", "error": 2e-12, "batch": 2, "side": 32, "repeats": 7}
TRAINED |= {"seconds": 0.0125, "fastest": 0.0115, "peak_bytes": 2_500_000}


def results_of_steps(small: bool) -> dict[str, Any]:
    """What a run of two steps has written."""
    line = {"what": "copies", "limit": "≤ 2", "measured": "1.85", "met": None if small else True}
    each = {"state": "passed", "seconds": 1.0, "limit": 60, "command": "python", "printed": ""}
    parts = {"peers": [RACED, PEER, WRONG], "training steps": {"hardware": "beads", "rows": [TRAINED]}}
    parts["limits kan"] = {"hardware": "beads", "lines": [line]}
    result = {"command": "bash benchmarks/gpu.sh", "revision": "1", "seconds": 2.0, "small": small, "missing": {}}
    return result | {"machine": [], "steps": [each | {"name": name, "result": part} for name, part in parts.items()]}


def test_the_page_has_times_of_what_is_right_alone() -> None:
    page = module("gpu_page").page(results_of_steps(small=False))
    assert "| siamese | 8×8 | forward | 3.0e-07 | 12.500 | 1.75 |  | 2.5 |" in page
    assert "| timm | 8×8 | forward | 3.0e-07 | 12.500 | 1.75 | 3.50 |  |" in page
    assert "| axial | 8×8 | forward | **wrong**, 2.5e-01 |  |  |  |  |" in page
    assert "| `sanet` | float32 | 2.0e-12 | 12.50 | 11.50 | 2 |" in page
    assert "| copies | ≤ 2 | 1.85 | met |" in page
    assert page.count("on beads") == 3


def test_the_page_of_a_small_run_has_errors_alone() -> None:
    page = module("gpu_page").page(results_of_steps(small=True))
    lines = ("| siamese | 8×8 | forward | 3.0e-07 |", "| axial | 8×8 | forward | **wrong**, 2.5e-01 |")
    lines += ("| `sanet` | float32 | 2.0e-12 |", "| copies | ≤ 2 |")
    assert set(lines) <= set(page.splitlines())
    assert "Everything is small here" in page
    assert "None is judged, on beads." in page


def test_results_that_no_page_can_be_made_of_stay_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = results_of_steps(small=False)
    result["steps"][0]["result"] = [{}]
    module("gpu").write(result, tmp_path)
    assert json.loads((tmp_path / "gpu.json").read_text(encoding="utf-8")) == result
    text = "No page could be made of gpu.json: KeyError('channels')\n"
    assert (tmp_path / "gpu.md").read_text(encoding="utf-8") == capsys.readouterr().out == text


# ---- the command -----------------------------------------------------------------------------------------------------
def test_an_unknown_step_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    gpu = module("gpu")
    monkeypatch.setattr(gpu, "machine", list)
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--device", "cpu", "--out", str(tmp_path), "--step", "test"])
    with pytest.raises(SystemExit, match="2"):
        gpu.main()
    assert "no step 'test'; there are tests, training steps, " in capsys.readouterr().err


def test_every_section_of_the_limits_has_its_time() -> None:
    assert set(module("gpu").LIMITS) == set(module("limits").SECTIONS)


@pytest.mark.long
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_tests_do_not_run_on_one() -> None:
    done = pytest_of("tests/test_files.py", "--device", "cuda")
    assert done.returncode == 4
    assert "--device cuda: PyTorch sees no CUDA device." in done.stderr


@pytest.mark.long
def test_what_computes_on_the_cpu_is_skipped_elsewhere() -> None:
    done = pytest_of("tests/ops/test_kernels.py", "--device", "meta", "-rs")
    assert done.returncode == 0
    assert "the kernels are for the CPU" in done.stdout
    assert " passed" not in done.stdout


@pytest.mark.slow
def test_the_script_runs_to_its_end(tmp_path: Path) -> None:
    command = ["bash", "benchmarks/gpu.sh", "--device", "cpu", "--out", str(tmp_path)]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"PYTHON": sys.executable}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "gpu.json").read_text(encoding="utf-8"))
    assert {step["state"] for step in result["steps"]} == {"passed"}
    assert result["steps"][0]["result"]["passed"] > 100
    page = (tmp_path / "gpu.md").read_text(encoding="utf-8")
    sections = ("## Tests", "## Limits", "## Training steps", "## Operators and peers")
    for part in (*sections, "`kanet_qkv`", "timm NonLocalAttn"):
        assert part in page
