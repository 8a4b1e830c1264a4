"""Views of arrays on disk, with other axes or of a part, which are read only where they are sliced."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor


def basic_index(index: Any, shape: Sequence[int]) -> list[int | range | None] | None:
    """Return an index of integers, slices, an ellipsis and new axes, as one integer, range or None for each axis.

    Integers are counted from the start. None in place of the list for an index that has anything else.

    Example:
        >>> basic_index((..., slice(2, 9), -1), (4, 5, 6))
        [range(0, 4), range(2, 5), 5]
    """
    given = list(index) if isinstance(index, tuple) else [index]
    own = [each for each in given if each is not None and each is not Ellipsis]
    if any(not isinstance(each, slice | int | np.integer) or isinstance(each, bool) for each in own):
        return None
    if len(own) > len(shape):
        raise IndexError(f"too many indices: an array of {len(shape)} axes, and {len(own)} of them")
    if not any(each is Ellipsis for each in given):
        given.append(Ellipsis)
    place = next(place for place, each in enumerate(given) if each is Ellipsis)
    given[place : place + 1] = [slice(None)] * (len(shape) - len(own))
    lengths, parsed = iter(shape), list[int | range | None]()
    for each in given:
        length = 0 if each is None else next(lengths)
        if each is None or isinstance(each, slice):
            parsed.append(each if each is None else range(*each.indices(length)))
            continue
        number = operator.index(each)
        if not -length <= number < length:
            raise IndexError(f"index {number} is out of bounds for an axis of length {length}")
        parsed.append(number % length)
    return parsed


def as_slice(indices: range) -> slice:
    """Return the slice that takes the indices of a range."""
    return slice(indices.start, indices.stop if indices.stop >= 0 else None, indices.step)


class AxesView:
    """A view of an array on disk with other axes: in another order, of a part, at some indices, or of length 1."""

    # `axes`: of each axis of the view that of the array, None for a new one. `taken`: axis of the array -> the indices
    # that the view has; an axis with one index may be left out of it.
    def __init__(self, array: Any, axes: Sequence[int | None], taken: Mapping[int, Sequence[int]]) -> None:
        self.array, self.axes, self.taken = array, tuple(axes), taken
        lengths = [len(taken[axis]) if axis in taken else length for axis, length in enumerate(array.shape)]
        self.shape = tuple(1 if axis is None else lengths[axis] for axis in axes)
        self.dtype = array.dtype

    def __getitem__(self, index: Any) -> np.ndarray:
        """Return a part of the view as an array in memory; integers, slices and an ellipsis are taken."""
        given = basic_index(index, self.shape)
        if given is None or None in given:
            raise IndexError(f"a volume on disk takes integers and slices, got {index!r}")
        wanted = [range(len(self.taken.get(axis, range(length)))) for axis, length in enumerate(self.array.shape)]
        for axis, each in zip(self.axes, given, strict=True):
            if axis is not None and each is not None:
                wanted[axis] = range(each, each + 1) if isinstance(each, int) else each
        part = self.read(wanted)
        dropped = tuple(axis for axis in range(part.ndim) if axis not in self.axes)
        left = [axis for axis in range(part.ndim) if axis not in dropped]
        part = part.squeeze(dropped).transpose([left.index(axis) for axis in self.axes if axis is not None])
        part = part[tuple(None if axis is None else slice(None) for axis in self.axes)]
        return part[tuple(0 if isinstance(each, int) else slice(None) for each in given)]

    def read(self, wanted: Sequence[range]) -> np.ndarray:
        """Return a part of the array; along the axes in `taken`, ranges are of their indices."""
        indices = [self.taken.get(axis, range(length)) for axis, length in enumerate(self.array.shape)]
        chosen = [each[as_slice(own)] for each, own in zip(indices, wanted, strict=True)]
        chosen = [range(each[0], each[0] + 1) if len(each) == 1 else each for each in chosen]
        backwards = tuple(axis for axis, each in enumerate(chosen) if isinstance(each, range) and each.step < 0)
        spans = [
            as_slice(each[::-1] if axis in backwards else each) if isinstance(each, range) else slice(None)
            for axis, each in enumerate(chosen)
        ]
        several = next((axis for axis, each in enumerate(chosen) if not isinstance(each, range)), None)
        if several is None:
            return np.flip(np.asanyarray(self.array[tuple(spans)]), backwards)
        parts = []
        for place in chosen[several]:
            spans[several] = slice(place, place + 1)
            parts.append(np.flip(np.asanyarray(self.array[tuple(spans)]), backwards))
        # The mask of an array that has one is kept, for the check of what reads the view.
        join = np.ma.concatenate if any(isinstance(part, np.ma.MaskedArray) for part in parts) else np.concatenate
        return join(parts, several)


def crop_array(array: Any, index: Any) -> Any:
    """Return a part of an array, by integers, slices and new axes: a view, of which nothing is read yet."""
    given = basic_index(index, array.shape)
    if given is None or not hasattr(array, "dtype") or isinstance(array, np.ndarray | Tensor):
        return array[index]
    axes: list[int | None] = []
    taken, axis = {}, 0
    for each in given:
        if not isinstance(each, int):
            axes.append(None if each is None else axis)
        if each is not None:
            taken[axis] = range(each, each + 1) if isinstance(each, int) else each
            axis += 1
    return AxesView(array, axes, taken)
