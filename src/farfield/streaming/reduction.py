"""Reduce a network's output tile by tile before it is written: scores become labels, and never exist as a whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from farfield._checks import ShapeError, unknown

# What may be given as `reduce`: a name, or a function from an output grid to a grid of the same size.
Reduction = str | Callable[[Tensor], Tensor] | None
# Labels have the first of these dtypes that holds them all.
LABELS = (torch.uint8, torch.int16, torch.int32)


def argmax(grid: Tensor) -> Tensor:
    """Return the index of the largest channel at each position, `(batch, 1, *size)`, in the smallest dtype."""
    return grid.argmax(1, keepdim=True).to(label_dtype(grid.shape[1]))


def softmax(grid: Tensor) -> Tensor:
    """Return the softmax over the channels."""
    return grid.softmax(1)


NAMED: dict[str, Callable[[Tensor], Tensor]] = {"argmax": argmax, "softmax": softmax}


class ReductionError(ShapeError):
    """A function of the user changes the batch or the size of a grid."""


def label_dtype(classes: int) -> torch.dtype:
    """Return the smallest dtype that holds the labels of this many classes.

    Example:
        >>> label_dtype(256), label_dtype(257)
        (torch.uint8, torch.int16)
    """
    return next(dtype for dtype in LABELS if torch.iinfo(dtype).max >= classes - 1)


def check_reduction(caller: str, reduce: Any) -> None:
    """Refuse a `reduce` that is neither a known name, nor a function, nor None.

    Raises:
        LookupError: If it is a name that is not known.
        TypeError: If it is none of the three.
    """
    if isinstance(reduce, str) and reduce not in NAMED:
        raise unknown(caller, "reduce", reduce, NAMED)
    if reduce is not None and not isinstance(reduce, str) and not callable(reduce):
        raise TypeError(
            f"{caller}: reduce must be one of {', '.join(NAMED)}, or a function from a grid to a grid of the same "
            f'size, got {type(reduce).__name__}; fix: reduce="argmax".'
        )


def reduce_channels(caller: str, reduce: Reduction, grid: Tensor) -> Tensor:
    """Reduce an output grid over its channels if `reduce` is a name; otherwise return it.

    Args:
        caller: The function that errors name.
        reduce: The reduction.
        grid: The output of the network, `(batch, channels, *size)`.

    Raises:
        ValueError: If the grid has one channel.
    """
    if not isinstance(reduce, str):
        return grid
    if grid.shape[1] == 1:
        raise ValueError(
            f'{caller}: reduce="{reduce}" is over channels, and the network returns one channel; fix: a function, '
            f"such as reduce=lambda scores: scores > 0."
        )
    return NAMED[reduce](grid)


def call_reduction(caller: str, reduce: Callable[[Tensor], Tensor], grid: Tensor) -> Tensor:
    """Return what a function of the user makes of an output grid.

    Raises:
        ReductionError: If it is no grid of the same batch and size.
        TypeError: If it is no tensor.
    """
    reduced: object = reduce(grid)
    if not isinstance(reduced, Tensor):
        raise TypeError(
            f"{caller}: reduce must return a tensor, got {type(reduced).__name__}; fix: a function from a grid "
            f"(batch, channels, *size) to one of the same size."
        )
    if reduced.dim() != grid.dim() or (len(reduced), reduced.shape[2:]) != (len(grid), grid.shape[2:]):
        raise ReductionError(
            f"{caller}: reduce must keep the batch and the size of a grid.\n"
            f"  before  {tuple(grid.shape)}\n  after   {tuple(reduced.shape)}\n"
            f"  fix: keepdim=True for a reduction over channels, such as lambda grid: grid.amax(1, keepdim=True)."
        )
    return reduced
