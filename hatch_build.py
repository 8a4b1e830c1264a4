"""Compile the CPU kernels when farfield is built; without a compiler the package is pure Python, and has the reason.

    pip install .                            # compiles where there is a C++ compiler
    FARFIELD_KERNELS=0 pip install .         # does not
    python hatch_build.py                    # compiles into this checkout, as an editable install does

The library needs torch's headers and no compiled part of torch: it is linked with torch's own names, by torch's stable
ABI, and loads with every torch from 2.11 on. The headers are those of the environment that farfield is installed into,
if torch is there, or else of the environment of the build.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SOURCES = Path(__file__).parent / "src" / "farfield" / "ops" / "fast" / "cpu"
LIBRARY = "farfield_cpu.so"
# Why there is no library, for `farfield info`.
REASON = "not_built.txt"
SWITCH = "FARFIELD_KERNELS"
TORCH = "torch>=2.11"
# The first torch whose names the library uses.
TARGET = "0x020b000000000000"
# Instruction sets of `loops.cpp` and `products.cpp`: name -> flags.
LEVELS = {f"x86_64_v{level}": [f"-march=x86-64-v{level}"] for level in (2, 3, 4)}
PORTABLE: dict[str, list[str]] = {"portable": []}
SHARED = ["-std=c++20", "-O3", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra", "-Wno-psabi"]


class NoKernelsError(Exception):
    """There is no library; the text says why and what would make one."""


def compiler() -> list[str]:
    """Return the command of the C++ compiler.

    Raises:
        NoKernelsError: If there is none, the system is not Linux, or kernels are switched off.
    """
    if os.environ.get(SWITCH) == "0":
        raise NoKernelsError(f"{SWITCH} was 0 when farfield was installed; fix: install it again without")
    if sys.platform != "linux":
        raise NoKernelsError(f"they are written for Linux, this is {sys.platform}; the equations run everywhere")
    command = shlex.split(os.environ.get("CXX", "c++"))
    if not command or shutil.which(command[0]) is None:
        name = command[0] if command else ""
        raise NoKernelsError(
            f"no C++ compiler, {name!r} was not found when farfield was installed; "
            "fix: apt-get install g++, or CXX=/path/to/compiler, and install it again"
        )
    return command


def torch_folder() -> Path | None:
    """Return the folder of torch in the environment that farfield is installed into, or in that of the build."""
    folders = [Path(sysconfig.get_paths()["purelib"]) / "torch"]
    spec = importlib.util.find_spec("torch")
    if spec is not None and spec.origin is not None:
        folders.append(Path(spec.origin).parent)
    return next((each for each in folders if (each / "include/torch/csrc/stable/ops.h").is_file()), None)


def build(target: Path) -> None:
    """Compile the library.

    Raises:
        NoKernelsError: If there is no compiler, no torch, or the compiler fails.
    """
    command, torch = compiler(), torch_folder()
    if torch is None:
        raise NoKernelsError("torch's headers were not found when farfield was installed; fix: install it again")
    levels = LEVELS if platform.machine() == "x86_64" else PORTABLE
    with tempfile.TemporaryDirectory() as folder:
        files = [(name, file) for name in levels for file in ("loops", "products")]
        objects = [Path(folder) / f"{file}_{name}.o" for name, file in (*files, ("all", "library"))]
        steps = [
            [*SHARED, "-fopenmp-simd", f"-DLEVEL={name}", *levels[name], "-c", str(SOURCES / f"{file}.cpp")]
            for name, file in files
        ]
        headers = ["-isystem", str(torch / "include"), f"-DTORCH_TARGET_VERSION={TARGET}", "-Wno-unused-parameter"]
        # Errors of the checks name files: without the folders of this machine, and the same file wherever it is built.
        headers += [f"-ffile-prefix-map={each}/=" for each in (SOURCES, torch / "include")]
        steps.append([*SHARED, *headers, "-c", str(SOURCES / "library.cpp")])
        with ThreadPoolExecutor() as pool:
            list(pool.map(run, [[*command, *step, "-o", str(out)] for step, out in zip(steps, objects, strict=True)]))
        linked = Path(folder) / LIBRARY
        # Without these names in the file the loader finds none of torch's functions.
        names = ["-Wl,--no-as-needed", f"-L{torch / 'lib'}", "-ltorch_cpu", "-ltorch"]
        run([*command, "-shared", "-s", *map(str, objects), "-o", str(linked), *names])
        # Atomic within a folder: the file is complete or absent.
        part = target.with_name(f"{target.name}.{os.getpid()}")
        shutil.copy(linked, part)
        os.replace(part, target)


def run(command: list[str]) -> None:
    """Run a step of the compiler.

    Raises:
        NoKernelsError: If it fails, with what it printed.
    """
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NoKernelsError(
            f"{command[0]} cannot compile them (pip install -v prints why); fix: another CXX=\n{done.stderr[-4000:]}"
        )


def build_or_explain(folder: Path) -> Path:
    """Compile the library into a folder, or write there why not; return the file."""
    library, reason = folder / LIBRARY, folder / REASON
    try:
        build(library)
    except NoKernelsError as error:
        library.unlink(missing_ok=True)
        reason.write_text(str(error).splitlines()[0] + "\n", encoding="utf-8")
        print(f"farfield is built without its CPU kernels: {error}", file=sys.stderr)
        return reason
    reason.unlink(missing_ok=True)
    return library


class CustomBuildHook(BuildHookInterface[Any]):
    """What hatchling runs before it makes a wheel."""

    def dependencies(self) -> list[str]:
        """Return what the build needs beside hatchling: torch, for its headers, where they would be used."""
        with contextlib.suppress(NoKernelsError):
            compiler()
            return [] if torch_folder() else [TORCH]
        return []

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Add the library, or the reason why there is none; an editable install has it in the checkout."""
        if self.target_name != "wheel":
            return
        folder = SOURCES if version == "editable" else Path(tempfile.mkdtemp())
        made = build_or_explain(folder)
        if version != "editable":
            build_data["force_include"][str(made)] = f"farfield/ops/fast/cpu/{made.name}"
        if made.name == LIBRARY:
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-linux_{platform.machine()}"


if __name__ == "__main__":
    print(build_or_explain(SOURCES))
