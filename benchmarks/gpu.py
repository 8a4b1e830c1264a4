"""Everything that is to be known of a GPU, as processes with time limits, in one JSON file and one Markdown page.

    bash benchmarks/gpu.sh                                   # the command: this script with the checkout's sources
    bash benchmarks/gpu.sh --device cpu --step tests         # small, and one step alone

What fails, or passes its limit, is written down with the end of what it printed, and the rest goes on; the status is 1
then. The files are written after each step. Only the standard library is imported here: torch may be missing.
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
# What is lost without a package, by the name that it is imported by.
PACKAGES = {
    **dict.fromkeys(("torch", "jaxtyping", "safetensors", "huggingface_hub"), "everything"),
    **dict.fromkeys(("pytest", "hypothesis", "numpy"), "all tests"),
    **dict.fromkeys(("torchvision", "transformers", "peft", "pycocotools", "PIL"), "the tests that import it"),
    "segmentation_models_pytorch": "the tests that import it",
    "timm": "two peers and the tests that import it",
    "xdist": "tests side by side",
    **dict.fromkeys(("linear_attention_transformer", "axial_attention", "fla"), "one peer"),
}
# What computes on the device of `pytest --device`, and not in other processes or with files.
TESTS = ["tests/ops", "tests/nn", "tests/papers", "tests/models", "tests/insertion", "tests/test_fuzz.py"]
TESTS += ["tests/test_maps.py", "tests/test_theory.py", "tests/test_cost.py"]
SMALL_TESTS = ["tests/ops/test_grid.py", "tests/test_cost.py"]
# Section of limits.py -> seconds. "copies" compiles, which takes minutes on a CPU.
LIMITS = {"kan": 25, "san": 25, "bandwidth": 45, "copies": 100, "factorized": 45, "scaling": 35, "exponent": 35}
# For all steps, of ten minutes; and for one that is stopped, to write what it has.
SECONDS, GRACE = 550, 15
# What pytest calls a test that failed, and one whose fixtures did.
FAULTS = ("failure", "error")
# Lines of what a step printed that are kept if it did not pass.
LINES = 40


class Step(NamedTuple):
    """A process.

    Attributes:
        name: What it is called on the page.
        arguments: Of Python.
        file: Where it writes what it found: JSON, or the XML of pytest.
        seconds: How long it may take, of ten minutes.
    """

    name: str
    arguments: list[str]
    file: Path
    seconds: float


# ---- what is run -----------------------------------------------------------------------------------------------------
def steps(device: str, small: bool, folder: Path) -> Iterator[Step]:
    """The steps, the most important first; each writes into the folder."""
    file = folder / "tests.xml"
    side_by_side = ["-n", str(min(8, processors()))] if installed("xdist") else []
    pytest = ["-m", "pytest", "--device", device, "-q", "--tb=short", "--continue-on-collection-errors"]
    pytest += ["-m", "not slow and not long", *side_by_side, f"--junitxml={file}"]
    yield Step("tests", [*pytest, *(SMALL_TESTS if small else TESTS)], file, 240)
    sizes = ["--batch", "2", "--side", "32", "--repeats", "1"] if small else ["--batch", "128"]
    yield script("training steps", "training_steps.py", [*sizes, "--device", device], folder, 60)
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
    """A benchmark that writes JSON."""
    found = folder / f"{name.replace(' ', '-')}.json"
    return Step(name, [f"benchmarks/{file}", *options, "--json", str(found)], found, seconds)


def processors() -> int:
    """How many processors this process may use, where the system tells it."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def installed(package: str) -> bool:
    """Whether a package can be imported."""
    return importlib.util.find_spec(package) is not None


# ---- running ---------------------------------------------------------------------------------------------------------
def run(step: Step, seconds: float) -> dict[str, Any]:
    """Run a step for so many seconds at most; return what came of it."""
    command = shlex.join(["python", *step.arguments]).replace(f"{step.file.parent}/", "")
    row: dict[str, Any] = {"name": step.name, "command": command, "limit": round(seconds, 1)}
    if seconds <= 0:
        return row | {"state": "not started", "seconds": 0.0, "printed": "", "found": None}
    started, log = time.monotonic(), step.file.with_suffix(".log")
    with log.open("w", encoding="utf-8") as printed:
        # A session of its own, so that what it started ends with it.
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
    return row | {"found": found_in(step.file)}


def end(process: subprocess.Popen[bytes]) -> None:
    """End a process that still runs, and all that it started: at first so that it can write what it has."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGINT)
        try:
            process.wait(GRACE)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def found_in(file: Path) -> Any:
    """What a step wrote, None if nothing that can be read."""
    try:
        return counted(file) if file.suffix == ".xml" else json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, ElementTree.ParseError):
        return None


def counted(file: Path) -> dict[str, Any]:
    """Tests by how they ended, the reasons of those that were skipped, and the names of those that were wrong."""
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
    """What `farfield info` says: the processor, the GPUs, the versions."""
    command = [sys.executable, "-m", "farfield.cli", "info", "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        return [{"what": "farfield info", "value": f"failed: {' '.join(done.stderr.split()[-20:])}"}]
    return [row for row in json.loads(done.stdout) if not row["what"].startswith("extra ")]


def revision() -> str:
    """The commit of the checkout, if it is one."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown: no git here"


# ---- the program -----------------------------------------------------------------------------------------------------
def main() -> None:
    """Run the steps, and write after each what there is."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", help="such as cuda:1, or cpu, small (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu", metavar="FOLDER")
    parser.add_argument("--step", action="append", metavar="NAME", help="several times; default: all")
    parser.add_argument("--small", action="store_true", help="small grids and few tests, also on a GPU")
    parser.add_argument("--minutes", type=float, default=10.0, help="for all steps (default: %(default)s)")
    arguments = parser.parse_args()
    small = arguments.small or arguments.device == "cpu"
    arguments.out.mkdir(parents=True, exist_ok=True)
    # In the background SIGINT may be ignored, by steps too; and what ends this program ends the step that runs.
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
    """Write both files; what no page can be made of stays as JSON, and ends nothing."""
    (folder / "gpu.json").write_text(json.dumps(result, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    try:
        text = page(result)
    except (LookupError, TypeError, ValueError) as error:
        text = f"No page could be made of gpu.json: {error!r}\n"
        print(text, end="", flush=True)
    (folder / "gpu.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
