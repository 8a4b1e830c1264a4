"""Chunks that stay decoded while tiles that share them are read: each is decoded once, and not once a tile."""

from __future__ import annotations

import itertools
import math
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from farfield.nn.devices import free_bytes
from farfield.volumes.axes_view import AxesView, SlicedArray, as_slice

# The share of the free memory that decoded chunks may take.
_SHARE = 0.125


class ChunkCache(SlicedArray):
    """An array in chunks of which the last ones that were read stay in memory, up to `most` bytes.

    Parts whose chunks hold hardly more are read directly, and so are those of chunks that are too large to keep.
    """

    def __init__(self, array: Any, most: int) -> None:
        self.array, self.most, self.kept = array, most, OrderedDict[tuple[int, ...], np.ndarray]()
        self.shape, self.dtype, self.chunks, self.bytes = tuple(array.shape), array.dtype, tuple(array.chunks), 0

    def read(self, wanted: Sequence[range]) -> np.ndarray:
        """Return the part of some ranges."""
        whole = [range(part.start // own, -(-part.stop // own)) for part, own in zip(wanted, self.chunks, strict=True)]
        positions, asked = math.prod(self.chunks), math.prod(map(len, wanted))
        is_large = positions * self.dtype.itemsize > self.most or 2 * asked >= math.prod(map(len, whole)) * positions
        if is_large or any(part.step != 1 for part in wanted):
            return np.asanyarray(self.array[tuple(map(as_slice, wanted))])
        result = np.empty([len(part) for part in wanted], self.dtype)
        for place in itertools.product(*whole):
            there, here = [], []
            for part, number, own in zip(wanted, place, self.chunks, strict=True):
                first, last = max(part.start, number * own), min(part.stop, (number + 1) * own)
                there.append(slice(first - part.start, last - part.start))
                here.append(slice(first - number * own, last - number * own))
            chunk = self._read_chunk(place)
            if isinstance(chunk, np.ma.MaskedArray):  # the mask is kept, for the check of what reads the array
                result = np.ma.asarray(result)
            result[tuple(there)] = chunk[tuple(here)]
        return result

    def _read_chunk(self, place: tuple[int, ...]) -> np.ndarray:
        """Return a chunk, which is then the last that is dropped."""
        if place in self.kept:
            self.kept.move_to_end(place)
            return self.kept[place]
        spans = [slice(number * own, (number + 1) * own) for number, own in zip(place, self.chunks, strict=True)]
        chunk = np.asanyarray(self.array[tuple(spans)])
        self.kept[place] = chunk
        self.bytes += chunk.nbytes
        while self.bytes > self.most:
            self.bytes -= self.kept.popitem(last=False)[1].nbytes
        return chunk


def keep_chunks(array: Any) -> Any:
    """Return an array that decodes its chunks once for the parts that share them; one without chunks as it is."""
    if isinstance(array, AxesView):
        return AxesView(keep_chunks(array.array), array.axes, array.taken)
    chunks, dtype = getattr(array, "chunks", None), getattr(array, "dtype", None)
    # Those of dask are lists of lengths, and no chunks of a file.
    if (
        not isinstance(chunks, tuple)
        or not isinstance(dtype, np.dtype)
        or not all(isinstance(each, int) for each in chunks)
    ):
        return array
    return ChunkCache(array, int(_SHARE * free_bytes(torch.device("cpu"))))
