"""Contestants that are checked before they are timed, and timed in turns: a wrong result gets no time."""

from __future__ import annotations

import ctypes
import math
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from farfield.cost import saved_bytes
from farfield.cost.measuring import device_name, step, take_turns

Row = dict[str, object]
# The number of positions, drawn at random, whose responses are compared; the side of the corner of the grid on which
# gradients are compared.
COMPARED, CORNER = 64, 14


@dataclass(frozen=True)
class Contestant:
    """A function that attends over a grid.

    Attributes:
        name: Its name.
        module: Takes a grid `(b, c, *size)`; with `flat`, contiguous positions `(b, n, c)`.
        truth: Computes the right response in float64: `(grid, indices of the m query positions) -> (b, m, p)`.
        flat: Whether it takes and returns positions.
        compiled: Whether it is compiled.
        forward_only: Whether its gradients are neither checked nor timed: a copy, the unit of time.
        twins: Parameters of the module, each with the float64 one of `truth`: their gradients are compared too.
    """

    name: str
    module: Callable[[Tensor], Tensor]
    truth: Callable[[Tensor, Tensor], Tensor]
    flat: bool = False
    compiled: bool = False
    forward_only: bool = False
    twins: Sequence[tuple[Tensor, Tensor]] = ()

    def prepared(self) -> Callable[[Tensor], Tensor]:
        """Return the module, compiled if `compiled`."""
        return torch.compile(self.module) if self.compiled else self.module

    def input(self, grid: Tensor) -> Tensor:
        """Return the input that the module takes for a grid: contiguous, a leaf."""
        laid = grid.detach().flatten(2).mT if self.flat else grid.detach()
        return laid.contiguous().requires_grad_(grid.requires_grad)

    def positions(self, response: Tensor) -> Tensor:
        """Return a response of the module as positions."""
        return response if self.flat else response.flatten(2).mT


def copy_of_the_grid() -> Contestant:
    """Return `x.clone()`, which reads and writes the grid once: the least that any function from grid to grid does."""
    return Contestant("copy", torch.clone, lambda grid, chosen: grid.flatten(2).mT[:, chosen], forward_only=True)


# ---- equality --------------------------------------------------------------------------------------------------------
def tolerance(dtype: torch.dtype) -> float:
    """Return the largest relative L2 error of a right result: rounding is far below it, another function far above."""
    return 1000 * torch.finfo(torch.float32).eps + 8 * torch.finfo(dtype).eps


def error_of(contestant: Contestant, run: Callable[[Tensor], Tensor], grid: Tensor, *, backward: bool) -> float:
    """Compute the relative L2 error: of the responses of some positions, and of the gradient on a corner."""
    order = torch.randperm(grid[0, 0].numel(), generator=torch.Generator().manual_seed(0))
    chosen = order[:COMPARED].sort().values.to(grid.device)
    with torch.no_grad():
        response = contestant.positions(run(contestant.input(grid)))[:, chosen]
        errors = [distance(response, contestant.truth(grid.detach().double(), chosen))]
    if backward and not contestant.forward_only:
        errors.append(gradient_error(contestant, run, grid))
    return max(errors)


def gradient_error(contestant: Contestant, run: Callable[[Tensor], Tensor], grid: Tensor) -> float:
    """Compute the relative L2 error of the gradients: of a corner of the grid, and of the parameters with a twin."""
    corner = grid.detach()[(..., *(slice(CORNER) for _ in grid.shape[2:]))].contiguous()
    ours, theirs = contestant.input(corner.requires_grad_()), corner.detach().double().requires_grad_()
    response = contestant.positions(run(ours))
    expected = contestant.truth(theirs, torch.arange(response.shape[1], device=grid.device))
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1)).to(grid.device)
    parameters, exact = ([pair[index] for pair in contestant.twins] for index in (0, 1))
    gradient, *learned = torch.autograd.grad(response, [ours, *parameters], weights.to(response.dtype))
    wanted, *truths = torch.autograd.grad(expected, [theirs, *exact], weights.double())
    errors = [distance(gradient if contestant.flat else gradient.flatten(2).mT, wanted.flatten(2).mT)]
    if truths:
        errors.append(distance(*(torch.cat([part.double().flatten() for part in each]) for each in (learned, truths))))
    return max(errors)


def distance(result: Tensor, expected: Tensor) -> float:
    """Compute the relative L2 error, infinite if it is not finite."""
    error = float((result.double() - expected).norm() / expected.norm())
    return error if math.isfinite(error) else math.inf


# ---- memory ----------------------------------------------------------------------------------------------------------
def keep_freed_memory() -> None:
    """Let the C library keep freed memory: returning it costs page faults, and which sizes it returns is random."""
    if platform.libc_ver()[0] == "glibc":
        library = ctypes.CDLL(None)
        library.mallopt(-4, 0)  # M_MMAP_MAX: nothing of its own mapping
        library.mallopt(-1, -1)  # M_TRIM_THRESHOLD: nothing handed back


# ---- the race --------------------------------------------------------------------------------------------------------
def race(contestants: Sequence[Contestant], grid: Tensor, *, backward: bool = False, repeats: int = 7) -> list[Row]:
    """Check every contestant on the grid, then time in turns those that are right.

    Args:
        contestants: Contestants of different names.
        grid: `(b, c, *size)`, the grid that they attend over.
        backward: Whether gradients of the grid and of parameters are computed too.
        repeats: Number of turns of each, for medians.

    Returns:
        For each contestant its name, error, whether it is right; and, if it is, seconds, the fastest turn, peak bytes
        (None if compiled for a CPU, where they cannot be measured) and the bytes saved for the backward pass.
    """
    # On a GPU cuDNN rounds the inputs of float32 convolutions to TF32 unless told not to: an error of 1e-3.
    torch.backends.cudnn.allow_tf32 = False
    grid = grid.detach().requires_grad_(backward)
    runs = {each.name: each.prepared() for each in contestants}
    errors = {each.name: error_of(each, runs[each.name], grid, backward=backward) for each in contestants}
    right = [each for each in contestants if errors[each.name] <= tolerance(grid.dtype)]
    steps = {each.name: step(runs[each.name], [each.input(grid)], backward and not each.forward_only) for each in right}
    unseen = [each.name for each in right if each.compiled and grid.device.type == "cpu"]
    times = take_turns(steps, grid.device, repeats, unseen=unseen) if steps else {}
    rows: list[Row] = []
    for each in contestants:
        row: Row = {"name": each.name, "error": errors[each.name], "right": each in right}
        row |= dict.fromkeys(("seconds", "fastest", "peak_bytes", "saved_bytes"))
        if each in right:
            time = times[each.name]
            row |= {
                "seconds": time.seconds,
                "fastest": time.fastest,
                "peak_bytes": None if each.name in unseen else time.peak_bytes,
            }
            if backward and not each.forward_only:
                row["saved_bytes"] = saved_bytes(runs[each.name], each.input(grid))
        rows.append(row)
    return rows


def seconds_of(rows: list[Row], name: str) -> float | None:
    """Return the time of a contestant, None if it was wrong or did not run."""
    return next((row["seconds"] for row in rows if row["name"] == name), None)


def times_as_long(rows: list[Row], slow: str, fast: str) -> float | None:
    """Return the time of one contestant divided by that of another; None if one of them was wrong."""
    above, below = seconds_of(rows, slow), seconds_of(rows, fast)
    return above / below if above and below else None


def machine(device: torch.device) -> str:
    """Return the hardware and the software of a result."""
    return f"{device_name(device)}, torch {torch.__version__}, Python {platform.python_version()}"
