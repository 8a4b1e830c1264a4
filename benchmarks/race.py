"""Contestants that are checked before they are timed, and timed in turns: no speed-up of a wrong result."""

from __future__ import annotations

import ctypes
import math
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from farfield.cost.measuring import device_name, step, take_turns
from farfield.cost.memory import saved_bytes

Row = dict[str, object]
# Positions whose responses are compared, drawn at random; gradients are compared on a corner of the grid of such sides.
ASKED, CORNER = 64, 14


@dataclass(frozen=True)
class Contestant:
    """Something that attends over a grid.

    Attributes:
        name: What it is.
        module: Takes a grid `(b, c, *size)`; with `flat`, contiguous positions `(b, n, c)`.
        truth: What it should answer, in float64: `(grid, asking positions) -> (b, m, p)`.
        flat: Whether it takes and gives positions.
        compiled: Whether it is to be compiled.
        forward_only: Whether it has no part in gradients: a copy, the unit of time.
        twins: Parameters of the module, each with the float64 one that `truth` reads: their gradients are compared too.
    """

    name: str
    module: Callable[[Tensor], Tensor]
    truth: Callable[[Tensor, Tensor], Tensor]
    flat: bool = False
    compiled: bool = False
    forward_only: bool = False
    twins: Sequence[tuple[Tensor, Tensor]] = ()

    def prepared(self) -> Callable[[Tensor], Tensor]:
        """What is run: the module, or its compiled form."""
        return torch.compile(self.module) if self.compiled else self.module

    def input(self, grid: Tensor) -> Tensor:
        """The grid as it takes it, contiguous, a leaf."""
        laid = grid.detach().flatten(2).mT if self.flat else grid.detach()
        return laid.contiguous().requires_grad_(grid.requires_grad)

    def positions(self, response: Tensor) -> Tensor:
        """What it answers, as positions."""
        return response if self.flat else response.flatten(2).mT


def copy_of_the_grid() -> Contestant:
    """`x.clone()`: the grid is read once and written once, which nothing that answers with a grid can do without."""
    return Contestant("copy", torch.clone, lambda grid, asking: grid.flatten(2).mT[:, asking], forward_only=True)


# ---- equality --------------------------------------------------------------------------------------------------------
def tolerance(dtype: torch.dtype) -> float:
    """Relative L2 error up to which two answers are one function: rounding is far below, another function far above."""
    return 1000 * torch.finfo(torch.float32).eps + 8 * torch.finfo(dtype).eps


def error_of(contestant: Contestant, run: Callable[[Tensor], Tensor], grid: Tensor, *, backward: bool) -> float:
    """Relative L2 error against the truth: of the responses of some positions, and of the gradient on a corner."""
    positions = grid[0, 0].numel()
    asking = torch.randperm(positions, generator=torch.Generator().manual_seed(0))[:ASKED].sort().values.to(grid.device)
    with torch.no_grad():
        found = contestant.positions(run(contestant.input(grid)))[:, asking]
        errors = [distance(found, contestant.truth(grid.detach().double(), asking))]
    if backward and not contestant.forward_only:
        errors.append(gradient_error(contestant, run, grid))
    return max(errors)


def gradient_error(contestant: Contestant, run: Callable[[Tensor], Tensor], grid: Tensor) -> float:
    """Relative L2 error of the gradients: of a corner of the grid, and of the parameters that have a twin."""
    corner = grid.detach()[(..., *(slice(CORNER) for _ in grid.shape[2:]))].contiguous()
    ours, theirs = contestant.input(corner.requires_grad_()), corner.detach().double().requires_grad_()
    answer = contestant.positions(run(ours))
    expected = contestant.truth(theirs, torch.arange(answer.shape[1], device=grid.device))
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1)).to(grid.device)
    parameters, exact = ([pair[index] for pair in contestant.twins] for index in (0, 1))
    found, *learned = torch.autograd.grad(answer, [ours, *parameters], weights.to(answer.dtype))
    wanted, *truths = torch.autograd.grad(expected, [theirs, *exact], weights.double())
    errors = [distance(found if contestant.flat else found.flatten(2).mT, wanted.flatten(2).mT)]
    if truths:
        errors.append(distance(*(torch.cat([part.double().flatten() for part in each]) for each in (learned, truths))))
    return max(errors)


def distance(found: Tensor, wanted: Tensor) -> float:
    """Relative L2 error; what is not finite is as wrong as can be."""
    error = float((found.double() - wanted).norm() / wanted.norm())
    return error if math.isfinite(error) else math.inf


# ---- memory ----------------------------------------------------------------------------------------------------------
def keep_freed_memory() -> None:
    """Let the C library keep what is freed: which sizes it hands back, at a page fault each, is chance."""
    if platform.libc_ver()[0] == "glibc":
        library = ctypes.CDLL(None)
        library.mallopt(-4, 0)  # M_MMAP_MAX: nothing of its own mapping
        library.mallopt(-1, -1)  # M_TRIM_THRESHOLD: nothing handed back


# ---- the race --------------------------------------------------------------------------------------------------------
def race(contestants: Sequence[Contestant], grid: Tensor, *, backward: bool = False, repeats: int = 7) -> list[Row]:
    """Check every contestant on the grid, then time in turns those that are right.

    Args:
        contestants: Of different names.
        grid: `(b, c, *size)`, what they attend over.
        backward: Whether gradients of the grid and of parameters are computed too.
        repeats: Turns of each, of which the median.

    Returns:
        For each contestant its name, error, whether it is right; and, if it is, seconds, the fastest turn, peak bytes
        (None if compiled for a CPU, where they cannot be seen) and the bytes saved for the backward pass.
    """
    # On a GPU cuDNN rounds the inputs of float32 convolutions to TF32 unless told not to: an error of 1e-3.
    torch.backends.cudnn.allow_tf32 = False
    grid = grid.detach().requires_grad_(backward)
    runs = {each.name: each.prepared() for each in contestants}
    errors = {each.name: error_of(each, runs[each.name], grid, backward=backward) for each in contestants}
    right = [each for each in contestants if errors[each.name] <= tolerance(grid.dtype)]
    steps = {each.name: step(runs[each.name], [each.input(grid)], backward and not each.forward_only) for each in right}
    times = take_turns(steps, grid.device, repeats) if steps else {}
    rows: list[Row] = []
    for each in contestants:
        row: Row = {"name": each.name, "error": errors[each.name], "right": each in right}
        row |= dict.fromkeys(("seconds", "fastest", "peak_bytes", "saved_bytes"))
        if each in right:
            found, seen = times[each.name], not (each.compiled and grid.device.type == "cpu")
            row |= {
                "seconds": found.seconds,
                "fastest": found.fastest,
                "peak_bytes": found.peak_bytes if seen else None,
            }
            if backward and not each.forward_only:
                row["saved_bytes"] = saved_bytes(runs[each.name], each.input(grid))
        rows.append(row)
    return rows


def seconds_of(rows: list[Row], name: str) -> float | None:
    """The time of a contestant, None if it was wrong or not there."""
    return next((row["seconds"] for row in rows if row["name"] == name), None)


def times_as_long(rows: list[Row], slow: str, fast: str) -> float | None:
    """How many times as long one contestant takes as another; None if one of them was wrong."""
    above, below = seconds_of(rows, slow), seconds_of(rows, fast)
    return above / below if above and below else None


def machine(device: torch.device) -> str:
    """The hardware and the software that a result belongs to."""
    return f"{device_name(device)}, torch {torch.__version__}, Python {platform.python_version()}"
