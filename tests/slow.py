"""Run the tests that take minutes, in parts: `make test-slow`, or `python tests/slow.py streaming platforms`."""

from __future__ import annotations

import argparse

from helpers.brains import download_wheels
from helpers.running import report, run

# Each ends within 90 minutes on two cores.
PARTS = {
    "operators": ["tests/ops", "tests/nn", "papers/tests/nn"],
    "models": ["papers/tests/models"],
    "insertion": ["tests/insertion"],
    "platforms": ["tests/platforms", "papers/tests/platforms"],
    "streaming": ["tests/streaming", "tests/volumes", "tests/test_cost_planning.py"],
}
# Whatever no other part has.
REST = "rest"


def main() -> None:
    """Run all parts, or those named, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, REST, []], help="which; all by default")
    parser.add_argument("--jobs", type=int, default=2, help="test processes side by side")
    arguments = parser.parse_args()
    rest = ["tests", "papers/tests", *(f"--ignore={path}" for paths in PARTS.values() for path in paths)]
    tests = PARTS | {REST: rest}
    names = arguments.parts or list(tests)
    if "streaming" in names and not download_wheels():
        print("the wheels of the dependency group brains cannot be downloaded: the tests that need them are skipped")
    shared = ["-m", "slow", "-n", str(arguments.jobs), "--durations=20"]
    report("part", [run(name, [*shared, *tests[name]]) for name in names])


if __name__ == "__main__":
    main()
