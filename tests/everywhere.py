"""Run the numerical tests as other processors would: `make test-everywhere`.

Each switch makes a library choose the code that it has for another processor, or changes the number of threads, or runs
the compiled kernels, with the loops for this processor and for older ones. One checks the shapes of annotations
(helpers/shapes.py). A table at the end has the number of tests that each ran.
"""

from __future__ import annotations

import argparse
from concurrent.futures import ThreadPoolExecutor

from helpers.running import report, run

SWITCHES = {
    "as it is": {},
    "MKL_CBWR=COMPATIBLE": {"MKL_CBWR": "COMPATIBLE"},
    "MKL_CBWR=AVX2": {"MKL_CBWR": "AVX2"},
    # With oneDNN's, which torch asks whether the processor packs bfloat16; its own code fails there if it then cannot.
    "ATEN_CPU_CAPABILITY=default": {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "AVX2"},
    "ONEDNN_MAX_CPU_ISA=AVX2": {"ONEDNN_MAX_CPU_ISA": "AVX2"},
    "two threads": {"OMP_NUM_THREADS": "2"},
    "shapes": {"FARFIELD_TEST_SHAPES": "1"},
    "kernels": {"FARFIELD_TEST_KERNELS": "1"},
    "kernels of x86-64-v3": {"FARFIELD_TEST_KERNELS": "1", "FARFIELD_INSTRUCTIONS": "x86_64_v3"},
    "kernels of x86-64-v2": {"FARFIELD_TEST_KERNELS": "1", "FARFIELD_INSTRUCTIONS": "x86_64_v2"},
}
# What computes, and not what reads files, prints or draws.
TESTS = ["tests/ops", "tests/nn", "papers/tests/papers", "tests/sharding", "tests/test_fuzz.py", "tests/test_maps.py"]
TESTS += [
    "papers/tests/test_theory.py",
    "tests/streaming/test_predict_whole.py",
    "tests/streaming/test_respond_whole.py",
]
TESTS += ["papers/tests/models/test_fuse.py", "papers/tests/models/test_compact.py", "papers/tests/models/test_bert.py"]
# The short form, which `make ci` runs after the whole suite.
SHORT = ["tests/ops/test_precision.py", "tests/test_fuzz.py"]
SHORT_SWITCHES = ["MKL_CBWR=COMPATIBLE", "ATEN_CPU_CAPABILITY=default", "two threads", "shapes"]


def main() -> None:
    """Run all switches, or those named, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("switches", nargs="*", choices=[*SWITCHES, []], help="which; all by default")
    parser.add_argument("--short", action="store_true", help="the few tests and switches of `make ci`")
    parser.add_argument("--jobs", type=int, default=2, help="test processes side by side")
    arguments = parser.parse_args()
    names = arguments.switches or (SHORT_SWITCHES if arguments.short else list(SWITCHES))
    tests = ["-m", "not slow and not long", *(SHORT if arguments.short else TESTS)]
    with ThreadPoolExecutor(arguments.jobs) as side_by_side:
        rows = list(side_by_side.map(lambda name: run(name, tests, SWITCHES[name]), names))
    report("switch", rows)


if __name__ == "__main__":
    main()
