"""The loops of the CPU kernels compute the same, but for rounding, compiled for every processor that they are for."""

from __future__ import annotations

import shutil
import signal
import subprocess
from collections import defaultdict
from pathlib import Path

import pytest
import torch

from farfield.ops.fast import kernels

FLAGS = ["-std=c++20", "-O3", "-fopenmp-simd", "-Wno-psabi", "-DLEVEL=portable", f"-I{kernels.FOLDER}"]
SOURCES = [Path(__file__).with_name("loops.cpp"), kernels.FOLDER / "loops.cpp", kernels.FOLDER / "products.cpp"]
# Name -> compiler with its flags, and what runs its programs.
PROCESSORS = {
    "x86-64-v3": (["c++", "-march=x86-64-v3"], []),
    "x86-64-v4": (["c++", "-march=x86-64-v4"], []),
    "aarch64": (["aarch64-linux-gnu-g++", "-static"], ["qemu-aarch64"]),
}


def results(folder: Path, compiler: list[str], runner: list[str]) -> dict[str, torch.Tensor]:
    """Compile the program, run it, and read its numbers: name of a loop -> numbers in float64."""
    if missing := [name for name in (compiler[0], *runner) if shutil.which(name) is None]:
        pytest.skip(f"{', '.join(missing)} is not installed")
    program = folder / "-".join(compiler[:2])
    subprocess.run([*compiler, *FLAGS, *map(str, SOURCES), "-o", str(program)], check=True)
    done = subprocess.run([*runner, str(program)], check=False, capture_output=True, text=True)
    if done.returncode == -signal.SIGILL:
        pytest.skip(f"this processor has not all instructions of {program.name}")
    assert done.returncode == 0, done.stderr
    numbers = defaultdict(list)
    for line in done.stdout.splitlines():
        name, number = line.split()
        numbers[name].append(float(number))
    return {name: torch.tensor(each, dtype=torch.float64) for name, each in numbers.items()}


@pytest.fixture(scope="module")
def oldest(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """The numbers of the loops for the first processors of 64 bits, without a product that also adds."""
    return results(tmp_path_factory.mktemp("oldest"), ["c++"], [])


@pytest.mark.long
@pytest.mark.skipif(shutil.which("c++") is None, reason="c++ is not installed")
def test_the_program_gives_the_loops_their_jobs() -> None:
    subprocess.run(["c++", *FLAGS, "-fsyntax-only", str(SOURCES[0])], check=True)


@pytest.mark.slow
@pytest.mark.parametrize("processor", PROCESSORS)
def test_loops_for_a_processor(tmp_path: Path, oldest: dict[str, torch.Tensor], processor: str) -> None:
    found = results(tmp_path, *PROCESSORS[processor])
    assert found.keys() == oldest.keys()
    assert len(found) == 11
    for name, numbers in found.items():
        assert numbers.isfinite().all(), name
        # Where float32 rounds otherwise, a number near the middle of two of half width is rounded to the other one:
        # one of a thousand at most, by one step of bfloat16, 2^-7.
        assert float((numbers - oldest[name]).norm() / oldest[name].norm()) <= 2**-7 / 1000**0.5, name
        away = (numbers - oldest[name]).abs() > 1e-4 * oldest[name].abs().clamp_min(oldest[name].std())
        assert float(away.double().mean()) <= 1e-3, name
