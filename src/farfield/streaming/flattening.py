"""Follow grids whose spatial axes a network joins into one: (batch, channels, *size) to (batch, channels, positions).

Positions stay in row-major order, so a layer on the joined axis is a layer on the grid: norms of `statistics.py`, and
softmax attention, which most libraries write on (batch, positions, channels).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

RESHAPES = {Tensor.view, Tensor.reshape, Tensor.flatten, torch.reshape, torch.flatten}


class FlattenedGrid:
    """The size of the grid that a network flattened last.

    Attributes:
        batch: Batch size of the network's input. Windows of a grid are more samples, so they are no flattened grid.
        size: The size of the grid; empty if none was flattened.
    """

    def __init__(self) -> None:
        self.batch: int | None = None
        self.size: tuple[int, ...] = ()

    def note(self, function: Any, args: Sequence[Any], result: Any) -> None:
        """Note the size of a grid if `function` has flattened it."""
        if function in RESHAPES and args and args[0].shape[:1] == (self.batch,):  # the grid may be a named argument
            self.size = joined_axes(args[0].shape, result.shape) or self.size

    def matches(self, samples: int, positions: int) -> bool:
        """Whether an axis of this many positions, in a tensor of this many samples, is the flattened grid."""
        return bool(self.size) and samples == self.batch and positions == math.prod(self.size)

    def unflatten(self, tensor: Tensor) -> Tensor:
        """Turn (batch, channels, positions) into a grid."""
        return tensor.reshape(*tensor.shape[:2], *self.size)


def joined_axes(before: Sequence[int], after: Sequence[int]) -> tuple[int, ...]:
    """Return the lengths of all spatial axes if a reshape joins them, and only them, into one axis; else nothing.

    The channels come before or after them, and may be divided into heads.
    """
    joined, start, axis = [], 0, 0
    while start < len(before) and axis < len(after):
        stop, end = start + 1, axis + 1
        one, other = before[start], after[axis]
        while one != other:
            if one < other and stop < len(before):
                one, stop = one * before[stop], stop + 1
            elif other < one and end < len(after):
                other, end = other * after[end], end + 1
            else:
                return ()
        if stop - start > 1:
            joined.append((start, stop, end - axis))
        start, axis = stop, end
    if len(joined) != 1 or len(before) < 4:
        return ()
    first, last, parts = joined[0]
    if first == 0 or parts != 1 or last - first != len(before) - 2:
        return ()
    return tuple(before[first:last])
