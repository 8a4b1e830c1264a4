"""Arrays that are read only where they are sliced, and views of them: other axes, parts, and some indices."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from farfield._refusals import refusal


def basic_index(index: Any, shape: Sequence[int]) -> list[int | range]:
    """Return an index of integers, slices and an ellipsis as one integer, counted from the start, or range an axis.

    Example:
        >>> basic_index((..., slice(2, 9), -1), (4, 5, 6))
        [range(0, 4), range(2, 5), 5]
    """
    given = list(index) if isinstance(index, tuple) else [index]
    kinds = slice | int | np.integer | type(Ellipsis)
    if any(not isinstance(each, kinds) or isinstance(each, bool) for each in given):
        raise refusal(
            IndexError,
            f"a part of a volume on disk is given by integers and slices, got {index!r:.60}; fix: numpy.s_[0, 2:4].",
        )
    place = next((place for place, each in enumerate(given) if each is Ellipsis), len(given))
    missing = len(shape) - len(given) + (place < len(given))
    given[place : place + 1] = [slice(None)] * missing
    if missing < 0 or len(given) != len(shape):
        raise refusal(
            IndexError,
            f"too many indices: a volume of {len(shape)} axes, got {index!r:.60}; fix: at most one for each, and one "
            "ellipsis.",
        )
    return [_take_positions(axis, length, each) for axis, (length, each) in enumerate(zip(shape, given, strict=True))]


def _take_positions(axis: int, length: int, index: Any) -> int | range:
    """Return the position or the range of an index; `range` counts from the end, and refuses what is outside."""
    try:
        return range(length)[index if isinstance(index, slice) else operator.index(index)]
    except (IndexError, TypeError, ValueError):
        raise refusal(
            IndexError,
            f"axis {axis} has {length} positions, got the index {index!r:.60}; fix: an integer from 0 to {length - 1}, "
            "or a slice of integers whose step is not 0.",
        ) from None


def as_slice(indices: range) -> slice:
    return slice(indices.start, indices.stop if indices.stop >= 0 else None, indices.step)


class SlicedArray:
    """An array of which parts are read, by integers and slices: `read` is given a range for each axis."""

    shape: tuple[int, ...]
    dtype: Any

    def __getitem__(self, index: Any) -> np.ndarray:
        """Return a part as an array in memory."""
        given = basic_index(index, self.shape)
        part = self.read([range(each, each + 1) if isinstance(each, int) else each for each in given])
        return part[tuple(0 if isinstance(each, int) else slice(None) for each in given)]

    def read(self, wanted: Sequence[range]) -> np.ndarray:
        raise NotImplementedError


class AxesView(SlicedArray):
    """A view of an array on disk with other axes: in another order, of a part, at some indices, or of length 1."""

    # `axes`: of each axis of the view that of the array, None for a new one. `taken`: axis of the array -> the indices
    # that the view has; an axis with one index may be left out of it.
    def __init__(self, array: Any, axes: Sequence[int | None], taken: Mapping[int, Sequence[int]]) -> None:
        self.array, self.axes, self.taken = array, tuple(axes), taken
        self.indices = [taken.get(axis, range(length)) for axis, length in enumerate(array.shape)]
        self.shape = tuple(1 if axis is None else len(self.indices[axis]) for axis in axes)
        self.dtype = array.dtype

    def read(self, wanted: Sequence[range]) -> np.ndarray:
        """Return the part of some ranges of the view."""
        chosen = self.choose(wanted)
        part = self._read_indices([range(each[0], each[0] + 1) if len(each) == 1 else each for each in chosen])
        dropped = tuple(axis for axis in range(part.ndim) if axis not in self.axes)
        left = [axis for axis in range(part.ndim) if axis not in dropped]
        part = part.squeeze(dropped).transpose([left.index(axis) for axis in self.axes if axis is not None])
        return part[tuple(None if axis is None else slice(None) for axis in self.axes)]

    def choose(self, wanted: Sequence[Sequence[int]]) -> list[Sequence[int]]:
        """Return the positions along each axis of the array that some along each axis of the view are."""
        chosen = list(self.indices)
        for axis, each in zip(self.axes, wanted, strict=True):
            if axis is not None:
                own = chosen[axis]
                chosen[axis] = own[as_slice(each)] if isinstance(each, range) else [own[place] for place in each]
        return chosen

    def _read_indices(self, chosen: Sequence[Sequence[int]]) -> np.ndarray:
        """Return the part of some indices of the array."""
        listed = [axis for axis, each in enumerate(chosen) if not isinstance(each, range)]
        boxes = [range(min(each), max(each) + 1) if axis in listed else each for axis, each in enumerate(chosen)]
        # Indices that are repeated, and those of several axes, are taken of the box around them.
        if len(listed) > 1 or any(len(boxes[axis]) < len(chosen[axis]) for axis in listed):
            within = [[place - box[0] for place in each] for each, box in zip(chosen, boxes, strict=True)]
            within = [within[axis] if axis in listed else list(range(len(box))) for axis, box in enumerate(boxes)]
            return self._read_indices(boxes)[np.ix_(*within)]
        backwards = tuple(axis for axis, each in enumerate(chosen) if isinstance(each, range) and each.step < 0)
        spans = [
            slice(None) if not isinstance(each, range) else as_slice(each[::-1] if axis in backwards else each)
            for axis, each in enumerate(chosen)
        ]
        several = next((axis for axis, each in enumerate(chosen) if not isinstance(each, range)), None)
        parts = []
        for place in (0,) if several is None else chosen[several]:
            if several is not None:
                spans[several] = slice(place, place + 1)
            parts.append(np.flip(np.asanyarray(self.array[tuple(spans)]), backwards))
        # The mask of an array that has one is kept, for the check of what reads the view.
        join = np.ma.concatenate if any(isinstance(part, np.ma.MaskedArray) for part in parts) else np.concatenate
        return parts[0] if several is None else join(parts, several)


def order_axes(array: Any, order: Sequence[int]) -> Any:
    """Return an array with its axes in another order: a view, of which nothing is read yet."""
    if isinstance(array, Tensor):
        return array.permute(*order)
    return array if list(order) == sorted(order) else AxesView(array, order, {})


def crop_array(array: Any, index: Any) -> Any:
    """Return a part of an array, by integers and slices: a view, of which nothing is read yet."""
    given = basic_index(index, array.shape)
    if isinstance(array, np.ndarray | Tensor):
        return array[index]
    taken = {axis: range(each, each + 1) if isinstance(each, int) else each for axis, each in enumerate(given)}
    return AxesView(array, [axis for axis, each in enumerate(given) if not isinstance(each, int)], taken)
