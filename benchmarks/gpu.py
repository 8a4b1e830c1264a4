"""All GPU tests and benchmarks, as processes with time limits; the results are one JSON file and one Markdown page.

    bash benchmarks/gpu.sh                                   # the command: this script with the checkout's sources
    bash benchmarks/gpu.sh --device cpu --step tests         # small, and one step alone

A step that fails, or exceeds its limit, is reported with the end of its output, and the next steps run; the status is
then 1. The files are written after each step. Only the standard library is imported here: torch may be missing.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

from gpu_page import page

ROOT = Path(__file__).resolve().parents[1]
# Package, by the name that it is imported by -> what needs it.
PACKAGES = {
    **dict.fromkeys(("torch", "jaxtyping", "safetensors", "huggingface_hub"), "everything"),
    **dict.fromkeys(("pytest", "hypothesis", "numpy"), "all tests"),
    **dict.fromkeys(("torchvision", "transformers", "peft", "pycocotools", "PIL"), "the tests that import it"),
    "segmentation_models_pytorch": "the tests that import it",
    "timm": "two peers and the tests that import it",
    "xdist": "tests side by side",
    **dict.fromkeys(("linear_attention_transformer", "axial_attention", "kornia", "monai", "fla"), "one peer"),
}
# The tests that compute on the device of `pytest --device`, and not in other processes or with files.
TESTS = ["tests/ops", "tests/nn", "papers/tests/papers", "papers/tests/models", "tests/insertion", "tests/test_fuzz.py"]
TESTS += [
    "tests/streaming/test_predict_whole.py",
    "tests/streaming/test_respond_whole.py",
    "tests/test_maps.py",
    "papers/tests/test_theory.py",
    "tests/test_cost.py",
]
SMALL_TESTS = ["tests/ops/test_grid.py", "tests/test_cost.py"]
# Section of limits.py -> seconds. "copies" compiles, which takes minutes on a CPU.
LIMITS = {
    "kan": 25,
    "san": 25,
    "bandwidth": 45,
    "copies": 100,
    "factorized": 45,
    "linear": 45,
    "scaling": 35,
    "exponent": 35,
}
# Seconds for all steps, if these have ten minutes; and for a step that is stopped, to write its results.
SECONDS, GRACE = 550, 15
# pytest's tags for a test that failed, and for one whose fixtures failed.
FAULTS = ("failure", "error")
# Number of lines of a step's output that are kept if it did not pass.
LINES = 40


class Step(NamedTuple):
    """A process.

    Attributes:
        name: Its name on the page.
        arguments: Arguments of Python.
        file: The file of its results: JSON, or the XML of pytest.
        seconds: Its time limit, if all steps have ten minutes.
    """

    name: str
    arguments: list[str]
    file: Path
    seconds: float


# ---- what is run -----------------------------------------------------------------------------------------------------
def steps(device: str, small: bool, folder: Path) -> Iterator[Step]:
    """Yield the steps, the most important first; each writes into the folder."""
    file = folder / "tests.xml"
    side_by_side = ["-n", str(min(8, processors()))] if installed("xdist") else []
    pytest = ["-m", "pytest", "--device", device, "-q", "--tb=short", "--continue-on-collection-errors"]
    pytest += ["-m", "not slow and not long", *side_by_side, f"--junitxml={file}"]
    yield Step("tests", [*pytest, *(SMALL_TESTS if small else TESTS)], file, 240)
    sizes = ["--batch", "2", "--side", "32", "--repeats", "1"] if small else ["--batch", "128"]
    yield script("training steps", "training_steps.py", [*sizes, "--device", device], folder, 60)
    if installed("monai") and installed("segmentation_models_pytorch"):
        yield script("tiles", "gpu_tiles.py", ["--device", device, *(["--tiny"] if small else [])], folder, 150)
    for section, seconds in LIMITS.items():
        if not (small and section == "copies"):
            options = ["--section", section, "--device", device, *(["--tiny", "--repeats", "1"] if small else [])]
            yield script(f"limits {section}", "limits.py", options, folder, seconds)
    sizes = ["--channels", "8", "--batch", "2", "--heads", "2", "--size", "8,8", "--repeats", "1"]
    if not small:
        sizes = ["--channels", "64", "--batch", "8", "--heads", "4", "--size", "28,28", "--size", "56,56"]
        sizes += ["--repeats", "3"]
    yield script("peers", "operators.py", ["--peers", "--backward", "--quiet", *sizes, "--device", device], folder, 75)


def script(name: str, file: str, options: list[str], folder: Path, seconds: float) -> Step:
    """Return the step of a benchmark that writes JSON."""
    result = folder / f"{name.replace(' ', '-')}.json"
    return Step(name, [f"benchmarks/{file}", *options, "--json", str(result)], result, seconds)


def processors() -> int:
    """Return the number of processors that this process may use, or of all where the system does not report it."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def installed(package: str) -> bool:
    """Whether a package can be imported."""
    return importlib.util.find_spec(package) is not None


# ---- running ---------------------------------------------------------------------------------------------------------
def run(step: Step, seconds: float) -> dict[str, Any]:
    """Run a step for at most so many seconds; return its entry in the results."""
    command = shlex.join(["python", *step.arguments]).replace(f"{step.file.parent}/", "")
    row: dict[str, Any] = {"name": step.name, "command": command, "limit": round(seconds, 1)}
    if seconds <= 0:
        return row | {"state": "not started", "seconds": 0.0, "printed": "", "result": None}
    started, log = time.monotonic(), step.file.with_suffix(".log")
    with log.open("w", encoding="utf-8") as printed:
        # In a session of its own, so that the processes it started can be ended with it.
        process = subprocess.Popen(
            [sys.executable, *step.arguments],
            cwd=ROOT,
            stdout=printed,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            state = "passed" if process.wait(seconds) == 0 else "failed"
        except subprocess.TimeoutExpired:
            state = "out of time"
        finally:
            end(process)
    text = log.read_text(encoding="utf-8", errors="replace")
    row |= {"state": state, "seconds": round(time.monotonic() - started, 1)}
    row["printed"] = "" if state == "passed" else "\n".join(text.splitlines()[-LINES:])
    return row | {"result": read_result(step.file)}


def end(process: subprocess.Popen[bytes]) -> None:
    """End a process that still runs, and all that it started; SIGINT comes first, so that it can write its results."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGINT)
        try:
            process.wait(GRACE)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def read_result(file: Path) -> Any:
    """Read the results of a step, None if there are none or they cannot be read."""
    try:
        return counted(file) if file.suffix == ".xml" else json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, ElementTree.ParseError):
        return None


def counted(file: Path) -> dict[str, Any]:
    """Count the tests by outcome; collect the reasons of the skipped ones and the names of the failed ones."""
    ends, reasons, wrong = Counter[str](passed=0, failed=0, skipped=0), Counter[str](), []
    for case in ElementTree.parse(file).iter("testcase"):
        skipped, failure = (next((part for part in case if part.tag in tags), None) for tags in (("skipped",), FAULTS))
        if failure is not None:
            wrong.append({"test": f"{case.get('classname')}::{case.get('name')}", "why": failure.get("message", "")})
        elif skipped is not None:
            reasons[skipped.get("message", "")] += 1
        ends["failed" if failure is not None else "skipped" if skipped is not None else "passed"] += 1
    return {**ends, "reasons": dict(reasons.most_common()), "wrong": wrong}


def machine() -> list[dict[str, str]]:
    """Return the output of `farfield info`: the processor, the GPUs, the versions."""
    command = [sys.executable, "-m", "farfield", "info", "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        return [{"what": "farfield info", "value": f"failed: {' '.join(done.stderr.split()[-20:])}"}]
    return [row for row in json.loads(done.stdout) if not row["what"].startswith("extra ")]


def revision() -> str:
    """Return the commit of the checkout, if there is one."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown: no git here"


# ---- the program -----------------------------------------------------------------------------------------------------
def main() -> None:
    """Run the steps, and write the results after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--device", default="cuda", help="such as cuda:1, or cpu, which implies --small (default: %(default)s)"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu", metavar="FOLDER")
    parser.add_argument("--step", action="append", metavar="NAME", help="may be repeated; default: all")
    parser.add_argument("--small", action="store_true", help="small grids and few tests, also on a GPU")
    parser.add_argument("--minutes", type=float, default=10.0, help="for all steps (default: %(default)s)")
    arguments = parser.parse_args()
    small = arguments.small or arguments.device == "cpu"
    arguments.out.mkdir(parents=True, exist_ok=True)
    # Background processes may ignore SIGINT, and steps inherit that; SIGTERM must end the running step too.
    for name in (signal.SIGINT, signal.SIGTERM):
        signal.signal(name, signal.default_int_handler)
    started = time.monotonic()
    missing = {name: use for name, use in PACKAGES.items() if not installed(name)}
    for name, use in missing.items():
        print(f"missing: {name}, and with it {use}", flush=True)
    result: dict[str, Any] = {
        "command": shlex.join(["bash", "benchmarks/gpu.sh", *sys.argv[1:]]),
        "revision": revision(),
    }
    result |= {"device": arguments.device, "small": small, "machine": machine(), "missing": missing, "steps": []}
    with tempfile.TemporaryDirectory() as folder:
        every = {step.name: step for step in steps(arguments.device, small, Path(folder))}
        if unknown := [name for name in arguments.step or () if name not in every]:
            parser.error(f"no step {unknown[0]!r}; there are {', '.join(every)}")
        for step in (every[name] for name in arguments.step or every):
            left = SECONDS * arguments.minutes / 10 - (time.monotonic() - started)
            row = run(step, min(step.seconds * arguments.minutes / 10, left))
            print(f"{step.name}: {row['state']}, {row['seconds']:.0f} s", flush=True)
            result["steps"].append(row)
            write(result | {"seconds": round(time.monotonic() - started, 1)}, arguments.out)
    print(f"{arguments.out / 'gpu.json'} and {arguments.out / 'gpu.md'}")
    sys.exit(any(row["state"] != "passed" for row in result["steps"]))


def write(result: dict[str, Any], folder: Path) -> None:
    """Write both files; if no page can be made of the results, write the JSON file and a note."""
    (folder / "gpu.json").write_text(json.dumps(result, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    try:
        text = page(result)
    except (LookupError, TypeError, ValueError) as error:
        text = f"No page could be made of gpu.json: {error!r}\n"
        print(text, end="", flush=True)
    (folder / "gpu.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
