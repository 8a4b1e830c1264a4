"""Views of arrays on disk with other axes, which are read only where they are sliced."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np


class AxesView:
    """A view of an array on disk with other axes: in another order, at some indices, or new ones of length 1."""

    # `axes`: of each axis of the view that of the array, None for a new one. `taken`: axis of the array -> the indices
    # that the view has; an axis with one index may be left out of it.
    def __init__(self, array: Any, axes: Sequence[int | None], taken: Mapping[int, Sequence[int]]) -> None:
        self.array, self.axes, self.taken = array, tuple(axes), taken
        lengths = [len(taken[axis]) if axis in taken else length for axis, length in enumerate(array.shape)]
        self.shape = tuple(1 if axis is None else lengths[axis] for axis in axes)
        self.dtype = array.dtype

    def __getitem__(self, index: Any) -> np.ndarray:
        """Return a part of the view as an array in memory; integers, slices and an ellipsis are taken."""
        given = index if isinstance(index, tuple) else (index,)
        if Ellipsis in given:
            place = given.index(Ellipsis)
            filled = (slice(None),) * (len(self.shape) - len(given) + 1)
            given = (*given[:place], *filled, *given[place + 1 :])
        given = (*given, *(slice(None),) * (len(self.shape) - len(given)))
        wanted: list[Any] = [slice(None)] * len(self.array.shape)
        for axis, each in zip(self.axes, given, strict=True):
            if axis is not None:
                wanted[axis] = slice(each, each + 1 or None) if isinstance(each, int | np.integer) else each
        part = self.read(wanted)
        dropped = tuple(axis for axis in range(part.ndim) if axis not in self.axes)
        left = [axis for axis in range(part.ndim) if axis not in dropped]
        part = part.squeeze(dropped).transpose([left.index(axis) for axis in self.axes if axis is not None])
        part = part[tuple(None if axis is None else slice(None) for axis in self.axes)]
        return part[tuple(0 if isinstance(each, int | np.integer) else slice(None) for each in given)]

    def read(self, wanted: list[slice]) -> np.ndarray:
        """Return a part of the array; along the axes in `taken`, slices are of their indices."""
        several = next((axis for axis, indices in self.taken.items() if len(indices) > 1), None)
        single = {axis: slice(indices[0], indices[0] + 1) for axis, indices in self.taken.items() if axis != several}
        index = [single.get(axis, each) for axis, each in enumerate(wanted)]
        if several is None:
            return np.asanyarray(self.array[tuple(index)])
        parts = []
        for place in self.taken[several][wanted[several]]:
            index[several] = slice(place, place + 1)
            parts.append(np.asanyarray(self.array[tuple(index)]))
        # The mask of an array that has one is kept, for the check of what reads the view.
        join = np.ma.concatenate if any(isinstance(part, np.ma.MaskedArray) for part in parts) else np.concatenate
        return join(parts, several)
