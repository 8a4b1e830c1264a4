"""The library of CPU kernels, compiled when farfield was built (`hatch_build.py`): loaded at first use, if it is there.

One library holds the loops for several instruction sets, and selects the best one that the processor has.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import register_flop_formula

from farfield.ops.modes import are_free, autocast_dtype, is_recorded
from farfield.ops.slots import Quotient

FOLDER = Path(__file__).with_name("cpu")
LIBRARY = FOLDER / "farfield_cpu.so"
# The number of the features that are twice as many as rows, in cpu/products.h.
PAIR = 5
# Why there is no library, as `hatch_build.py` wrote it.
REASON = FOLDER / "not_built.txt"
# If this environment variable is 0, no kernel runs.
SWITCH = "FARFIELD_KERNELS"
# What grids and positions may be; the kernels compute in float32.
_FORMATS = (torch.float32, torch.bfloat16, torch.float16)
MANY_SCORES = "more than 4 scores, or fewer than 8 channels a score, with which torch's products are faster"
DERIVATIVE = "a derivative is wanted"
# The forms of a call: the operator alone, with projections or a norm, and added to a target.
BARE, PROJECTED, WITH_TARGET = "nothing projected or normed", "something projected or normed", "added to a target"
NOT_INSTALLED = "not built: farfield runs from files that were not installed; fix: pip install -e . in their checkout"


class Kernel(NamedTuple):
    """A line of the kernel table: which kernels compute what, for which operators, and when."""

    step: str  # "attention", "sums", "responses", "sums along axes" or "outer sums"
    names: tuple[str, ...]
    operators: tuple[dict[str, tuple[Any, ...]], ...]  # for fields of an `Operator`, the entries that the line is for
    why_not: Callable[..., str | None]  # from the arguments of the step to why it does not run, in words, or None
    run: Callable[..., Any]  # computes the step
    derive: Callable[..., Any] | None = None  # computes its gradients
    gradient: tuple[str, ...] = ()  # the kernels of these
    forms: tuple[str, ...] = ()  # for attention: BARE, PROJECTED, WITH_TARGET
    when: str = "always"  # or "in inference", "in training"
    needs: str = "nothing else"  # in words

    def is_for(self, operator: object) -> bool:
        return any(
            all(with_any_epsilon(getattr(operator, field)) in entries for field, entries in kind.items())
            for kind in self.operators
        )


def with_any_epsilon(entry: object) -> object:
    """Return an entry of an operator as lines have it: kernels take the ε of a quotient as an argument."""
    # A user's own kind of quotient may compute something else, and be made of other arguments.
    return replace(entry, epsilon=0.0) if type(entry) is Quotient else entry


@functools.cache
def problem() -> str | None:
    """Load the library; return why it cannot be used, or None."""
    if hasattr(torch.ops.farfield, "axis_sums"):
        return None
    if not LIBRARY.is_file():
        return f"not built: {REASON.read_text(encoding='utf-8').strip()}" if REASON.is_file() else NOT_INSTALLED
    try:
        torch.ops.load_library(LIBRARY)
        for name, flops in FLOPS.items():
            register_flop_formula(getattr(torch.ops.farfield, name))(_as_formula(flops))
    except (OSError, RuntimeError) as error:
        return f"{LIBRARY} does not load: {error}"
    return None


def _as_formula(count: Callable[..., int]) -> Callable[..., int]:
    return lambda *shapes, out_shape: count(*shapes)


# ---- FLOPs for torch's flop counter: the products of the equations, from the shapes of a kernel's arguments ----------
def _count_scores(grid: Sequence[int], matrix: Sequence[int], both: bool, *_: Any) -> int:
    """Count scores, one or two slots, and the responses."""
    return 2 * math.prod(grid) * (matrix[0] + 2 * (1 + both))


def _count_summary(positions: Sequence[int], values: Sequence[int] | None, *others: Any) -> int:
    """Count the projection, perhaps by head, and the sums over positions of weight ⊗ value."""
    matrix, _, _, keys, _, _, groups, number, _ = others
    slots = keys * (1 + (number == PAIR))
    rows = matrix[-2] if matrix else 0
    return 2 * (math.prod(positions) * rows + math.prod(values or positions) * slots // groups)


def _count_summary_backward(
    positions: Sequence[int], values: Sequence[int] | None, matrix: Sequence[int] | None, *others: Any
) -> int:
    """Count the keys again, the gradients of their weights, and those of positions and matrix."""
    (_, slots, shared), keys, each = others[3], others[7], 2 * positions[0] * positions[2]
    of_projection = 0 if matrix is None else matrix[-1] * (keys + 2 * math.prod(matrix[:-1]))
    return each * (2 * slots * shared + of_projection)


def _count_combination(queries: Sequence[int], slots: Sequence[int], sums: Sequence[int] | None, *_: Any) -> int:
    batch, rows, count = queries
    return 2 * batch * count * (sums[1] if sums else rows) * slots[3]


FLOPS: dict[str, Callable[..., int]] = {
    # Sums have no products.
    "axis_sums": lambda *_: 0,
    "axis_means": lambda *_: 0,
    "outer_sum": lambda *_: 0,
    "norm_and_clamp_backward": lambda *_: 0,
    # The products of the means with each other, and of these weights with the values.
    "axis_attention": lambda grid, *_: 4 * grid[0] * grid[1] * sum(grid[2:]) ** 2,
    "attend_means": lambda means, values, *_: 2 * means[0] * (means[1] + values[1]) * means[2] ** 2,
    "axis_responses": lambda means, *_: 4 * means[0] * means[1] * means[2] ** 2,
    # Four products, and a fifth for the matrix if it was not kept.
    "axis_responses_backward": lambda means, weights, *_: (
        (8 if weights[0] else 10) * means[0] * means[1] * means[2] ** 2
    ),
    "score_attention": _count_scores,
    "score_attention_backward": lambda *shapes: 2 * _count_scores(*shapes),
    # The projection to rows, and the sums over positions of row ⊗ position.
    "project_and_sum": lambda positions, matrix, *_: 4 * math.prod(positions) * matrix[1],
    "project_and_summarize": _count_summary,
    "project_and_summarize_backward": _count_summary_backward,
    "combine_slots": _count_combination,
    "combine_slots_backward": lambda *shapes: 2 * _count_combination(*shapes),
}


def call(name: str, *arguments: Any) -> Any:
    """Call a kernel: the only place that does."""
    # Kernels have no derivatives, and torch would take them as constants. Within a `torch.autograd.Function` nothing is
    # recorded.
    if not are_free(*arguments):
        raise RuntimeError(
            f"farfield::{name}: a derivative through this kernel is wanted, and it has none, so that it would be lost "
            f"without a word; fix: {SWITCH}=0, and report this, as the equation should have run."
        )
    return getattr(torch.ops.farfield, name)(*arguments)


def why_not(*tensors: Tensor | None, ordered: bool = True, multiplied: Tensor | None = None) -> str | None:
    """Return the first reason against kernels on these tensors, in words; None if kernels may run.

    `multiplied` is a factor of their products, which autocast would compute in its own dtype.
    """
    if multiplied is not None and autocast_dtype(multiplied) not in (None, multiplied.dtype):
        return "autocast computes in another dtype"
    if os.environ.get(SWITCH) == "0":
        return f"switched off ({SWITCH}=0)"
    if is_recorded():
        return "compiled or traced"
    if text := problem():
        return text
    for tensor in tensors:
        if tensor is None:
            continue
        if tensor.dtype not in _FORMATS:
            return f"{tensor.dtype}, not {', '.join(map(str, _FORMATS))}"
        if not tensor.is_cpu:
            return f"on {tensor.device}, not on a CPU"
        if type(tensor) not in (Tensor, nn.Parameter):
            return f"a {type(tensor).__name__}, not a plain tensor"
        if ordered and not (tensor.is_contiguous() or (tensor.dim() > 2 and tensor.movedim(1, -1).is_contiguous())):
            return f"strides {tuple(tensor.stride())}, neither contiguous nor channels-last"
    return None


def run() -> bool:
    """Whether the kernels are loaded, or can be, and are not switched off."""
    return os.environ.get(SWITCH) != "0" and problem() is None


def instructions() -> str:
    """Return the name of the instruction set whose loops run, such as `x86_64_v3`; the library must load."""
    return cast(str, torch.ops.farfield.instructions())


def cache_bytes() -> tuple[int, int]:
    """Return the bytes of the level-2 cache and of the last one, by which blocks are sized; the library must load."""
    second, last = torch.ops.farfield.cache_bytes()
    return second, last


@functools.cache
def multiplied_by_processor() -> frozenset[torch.dtype]:
    """Return the formats of half the width whose products the processor has; torch's products are then faster."""
    return frozenset(getattr(torch, name) for name in torch.ops.farfield.multiplied().split())
