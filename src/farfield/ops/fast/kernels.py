"""The library of CPU kernels: built on request, loaded at first use if it exists.

Nothing here runs on import, and only `build` compiles.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import math
import os
import platform
import shutil
import stat
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import register_flop_formula

from farfield._checks import install_command
from farfield.ops.modes import is_recorded

SOURCE = Path(__file__).with_name("cpu.cpp")
# -fopenmp is given to the compiler alone: the library uses the threads of the torch that loads it, not a second pool.
FLAGS = ("-O3", "-march=native", "-fopenmp")
# If this environment variable is 0, no kernel runs.
SWITCH = "FARFIELD_KERNELS"


def path() -> Path:
    """Return where the library for this torch, this source and this processor is, or would be."""
    listing = Path("/proc/cpuinfo")
    lines = listing.read_text(encoding="utf-8").splitlines() if listing.is_file() else []
    processor = next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())
    key = "\n".join((torch.__version__, sys.version, platform.machine(), processor, *FLAGS))
    digest = hashlib.sha256(key.encode() + SOURCE.read_bytes()).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "farfield" / "kernels" / digest / "farfield_cpu.so"


def build() -> Path:
    """Compile the library into the cache folder, unless it is already there.

    Returns:
        Its path.

    Raises:
        RuntimeError: If the system is not Linux, there is no compiler or no ninja, the compiler fails, other users can
            write to the folder, or this process has loaded a library from another folder.
        OSError: If the folder cannot be written.
    """
    target = path()
    compiler = os.environ.get("CXX", "c++")
    if sys.platform != "linux":
        raise RuntimeError(
            f"kernels: they are written for Linux, this is {sys.platform}; the equations run everywhere."
        )
    if reason := distrust(target):
        raise RuntimeError(f"kernels: {reason}, or a folder of your own as XDG_CACHE_HOME=/path.")
    if target.is_file():
        return target
    if shutil.which(compiler) is None:
        fix = "apt-get install g++, or CXX=/path/to/compiler"
        raise RuntimeError(f"kernels: no C++ compiler, {compiler!r} was not found; fix: {fix}.")
    if hasattr(torch.ops.farfield, "axis_sums"):
        # The build also loads the library, and torch ends a process that registers an operation twice.
        raise RuntimeError(
            "kernels: this process has loaded a library from another path, and cannot load two; "
            "fix: build it in a process of its own, farfield kernels --build."
        )
    # The extra installs ninja in the folder of Python, which need not be on the path.
    os.environ["PATH"] = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)))
    # It warns that there is no CUDA, which is not needed here.
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    try:
        from torch.utils import cpp_extension

        cpp_extension.verify_ninja_availability()
    except (ImportError, RuntimeError) as error:
        raise RuntimeError(f"kernels: {error}; fix: {install_command('kernels')}") from error
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        try:
            cpp_extension.load(
                target.stem, str(SOURCE), extra_cflags=list(FLAGS), build_directory=folder, is_python_module=False
            )
        except RuntimeError as error:
            raise RuntimeError(f"kernels: {compiler} cannot compile them; fix: another CXX=.\n{error}") from error
        # Atomic: the file is complete or absent, also if two processes build at once.
        os.replace(Path(folder) / target.name, target)
    register()
    problem.cache_clear()
    are_built.cache_clear()
    return target


@functools.cache
def problem() -> str | None:
    """Load the library; return why it cannot be used, or None."""
    if hasattr(torch.ops.farfield, "axis_sums"):
        return None
    target = path()
    if not target.is_file():
        return "not built (farfield kernels --build)"
    if reason := distrust(target):
        warnings.warn(
            f"kernels: their library is not loaded, the equations run: {reason}.", RuntimeWarning, stacklevel=2
        )
        return f"not loaded: {reason}"
    try:
        # The path that was checked, even if the links on the way to it change.
        torch.ops.load_library(target.resolve())
        register()
    except (OSError, RuntimeError) as error:
        return f"{target} does not load: {error}"
    return None


def distrust(target: Path) -> str | None:
    """Return why other users could have put code where the library is or would be, or None.

    In a folder such as /tmp anybody can create a file, but its sticky bit prevents renaming the file of another user.
    """
    user = os.getuid()
    for part in dict.fromkeys([*lineage(target.absolute()), *lineage(target.resolve())]):
        status = part.lstat()
        if status.st_uid not in (0, user):
            return f"{part} belongs to another user; fix: remove it"
        # A group whose number is the user's contains only that user.
        others = stat.S_IWOTH | (0 if status.st_gid == user else stat.S_IWGRP)
        sticky = part.is_dir() and status.st_mode & stat.S_ISVTX
        if status.st_mode & others and not sticky and not part.is_symlink():
            return f"others can write to {part}; fix: chmod go-w {part}"
    return None


def lineage(path: Path) -> list[Path]:
    """Return those of a path that exist: every folder on the way to it, and the file."""
    return [part for part in (*reversed(path.parents), path) if os.path.lexists(part)]


def register() -> None:
    """Register the output shapes and the FLOPs of the kernels with torch."""

    def axis_sums(grid: Tensor) -> Tensor:
        return grid.new_empty(*grid.shape[:2], sum(grid.shape[2:]))

    def axis_means(grid: Tensor) -> Tensor:
        return axis_sums(grid)

    def axis_attention(grid: Tensor, heads: int, scale: float, once: bool = False) -> Tensor:
        return torch.empty_like(grid)

    def position_attention(positions: Tensor, heads: int, scale: float) -> tuple[Tensor, Tensor]:
        return torch.empty_like(positions), positions.new_empty(
            len(positions) * heads, *positions.shape[2:], positions.shape[2]
        )

    def position_attention_backward(
        positions: Tensor, weights: Tensor | None, heads: int, scale: float, grad_output: Tensor
    ) -> Tensor:
        return torch.empty_like(positions)

    def score_attention(
        grid: Tensor, matrix: Tensor, both: bool, training: bool = False
    ) -> tuple[Tensor, Tensor, Tensor]:
        (batch, channels), (heads, _) = grid.shape[:2], matrix.shape
        scores = grid.new_empty(batch, heads, math.prod(grid.shape[2:]))
        return torch.empty_like(grid), scores, grid.new_empty(batch, 1 + heads, channels)

    def score_attention_backward(
        grid: Tensor, matrix: Tensor, both: bool, scores: Tensor, sums: Tensor, grad_output: Tensor
    ) -> tuple[Tensor, Tensor]:
        return torch.empty_like(grid), torch.empty_like(matrix)

    def outer_sum(vectors: Tensor, size: Sequence[int], means: bool = False, training: bool = False) -> Tensor:
        return vectors.new_empty(*vectors.shape[:2], *size)

    def project_and_sum(
        positions: Tensor, matrix: Tensor, offset: Tensor | None, weights: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        slots = 1 + (matrix if weights is None else weights).shape[1]
        rows = positions.new_empty(positions.shape[0], matrix.shape[1], positions.shape[2])
        return rows, positions.new_empty(positions.shape[0], slots, positions.shape[1])

    attentions = (
        axis_attention,
        position_attention,
        position_attention_backward,
        score_attention,
        score_attention_backward,
    )
    for shapes in (axis_means, axis_sums, outer_sum, project_and_sum, *attentions):
        torch.library.register_fake(f"farfield::{shapes.__name__}")(shapes)
    for name, flops in FLOPS.items():
        register_flop_formula(getattr(torch.ops.farfield, name))(flops)


# ---- FLOPs for torch's flop counter: the products of the equations ---------------------------------------------------
def count_nothing(*shapes: Any, out_shape: Any) -> int:
    """Return 0: sums have no products."""
    return 0


def count_axes(grid: Sequence[int], *others: Any, out_shape: Any) -> int:
    """Count the products of the axes' means with each other, and of these weights with the values."""
    return 4 * grid[0] * grid[1] * sum(grid[2:]) ** 2


def count_positions(positions: Sequence[int], *others: Any, out_shape: Any) -> int:
    """Count the products of all positions with each other, and of these weights with the values."""
    return 4 * positions[0] * positions[1] * positions[2] ** 2


def count_positions_backward(
    positions: Sequence[int], weights: Sequence[int] | None, *others: Any, out_shape: Any
) -> int:
    """Count four products, and a fifth for the matrix if it was not kept."""
    return (8 if weights else 10) * positions[0] * positions[1] * positions[2] ** 2


def count_scores(grid: Sequence[int], matrix: Sequence[int], both: bool, *others: Any, out_shape: Any) -> int:
    """Count scores, one or two slots, and the responses."""
    return 2 * math.prod(grid) * (matrix[0] + 2 * (1 + both))


def count_scores_backward(grid: Sequence[int], matrix: Sequence[int], both: bool, *others: Any, out_shape: Any) -> int:
    """Count twice the products of `count_scores`."""
    return 2 * count_scores(grid, matrix, both, out_shape=out_shape)


def count_rows(positions: Sequence[int], matrix: Sequence[int], *others: Any, out_shape: Any) -> int:
    """Count the projection to rows, and the sums over positions of row ⊗ position."""
    return 4 * math.prod(positions) * matrix[1]


FLOPS: dict[str, Any] = {
    "axis_sums": count_nothing,
    "axis_means": count_nothing,
    "outer_sum": count_nothing,
    "axis_attention": count_axes,
    "position_attention": count_positions,
    "position_attention_backward": count_positions_backward,
    "score_attention": count_scores,
    "score_attention_backward": count_scores_backward,
    "project_and_sum": count_rows,
}


def why_not(*tensors: Tensor | None) -> Iterator[str]:
    """Yield every reason against a kernel on these tensors; none if it may run."""
    if os.environ.get(SWITCH) == "0":
        yield f"switched off ({SWITCH}=0)"
    elif text := problem():
        yield text
    for tensor in tensors:
        if tensor is not None:
            yield from why_not_on(tensor)
    if is_recorded():
        yield "compiled or traced"


def why_not_on(tensor: Tensor) -> Iterator[str]:
    """Yield every reason against a kernel on this tensor."""
    if tensor.dtype != torch.float32:
        yield f"{tensor.dtype}, not torch.float32"
    if tensor.device.type != "cpu":
        yield f"on {tensor.device}, not on a CPU"
    if type(tensor) not in (Tensor, nn.Parameter):
        yield f"a {type(tensor).__name__}, not a plain tensor"
    if not tensor.is_contiguous():
        yield f"strides {tuple(tensor.stride())}, not contiguous"


def run() -> bool:
    """Whether the kernels are loaded, or can be, and are not switched off."""
    return are_built() and os.environ.get(SWITCH) != "0" and problem() is None


@functools.cache
def are_built() -> bool:
    """Whether a library is loaded or is at its path, looked for once: reading the environment takes longer."""
    return hasattr(torch.ops.farfield, "axis_sums") or path().is_file()


def fit(*tensors: Tensor | None) -> bool:
    """Whether `why_not` yields nothing, without building its texts, which take 5 % of the time on small grids."""
    return run() and not is_recorded() and all(tensor is None or fits(tensor) for tensor in tensors)


def fits(tensor: Tensor) -> bool:
    """Whether `why_not_on` yields nothing."""
    plain = tensor.dtype == torch.float32 and tensor.is_cpu and type(tensor) in (Tensor, nn.Parameter)
    return plain and tensor.is_contiguous()
