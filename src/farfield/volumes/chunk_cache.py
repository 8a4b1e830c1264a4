"""Chunks that stay decoded or computed while tiles share them: each is once, and not once a tile."""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left, bisect_right
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

    Parts whose chunks hold hardly more are read directly, but for chunks that are computed, and so are those of chunks
    that are too large to keep. `chunks` are lengths, or of each axis a tuple of lengths, as those of dask.
    """

    def __init__(self, array: Any, most: int) -> None:
        self.array, self.most, self.kept = array, most, OrderedDict[tuple[int, ...], np.ndarray]()
        self.shape, self.dtype, self.chunks, self.bytes = tuple(array.shape), array.dtype, array.chunks, 0
        self.is_computed = any(isinstance(own, tuple) for own in array.chunks)
        # Where the chunks of each axis start, and where the last ends, at most behind the axis.
        self.edges = [_find_edges(own, length) for own, length in zip(array.chunks, self.shape, strict=True)]
        longest = (max(own) if isinstance(own, tuple) else own for own in array.chunks)
        self.largest = math.prod(longest) * self.dtype.itemsize

    def read(self, wanted: Sequence[range]) -> np.ndarray:
        if self.largest > self.most or any(part.step != 1 for part in wanted):
            return self._read_directly(wanted)
        axes = list(zip(wanted, self.edges, strict=True))
        whole = [range(bisect_right(own, part.start) - 1, bisect_left(own, part.stop)) for part, own in axes]
        positions = math.prod(own[each.stop] - own[each.start] for each, own in zip(whole, self.edges, strict=True))
        if not self.is_computed and 2 * math.prod(map(len, wanted)) >= positions:
            return self._read_directly(wanted)
        result = np.empty([len(part) for part in wanted], self.dtype)
        for place in itertools.product(*whole):
            there, here = [], []
            for (part, own), number in zip(axes, place, strict=True):
                first, last = max(part.start, own[number]), min(part.stop, own[number + 1])
                there.append(slice(first - part.start, last - part.start))
                here.append(slice(first - own[number], last - own[number]))
            chunk = self._read_chunk(place)
            if isinstance(chunk, np.ma.MaskedArray):  # the mask is kept, for the check of what reads the array
                result = np.ma.asarray(result)
            result[tuple(there)] = chunk[tuple(here)]
        return result

    def _read_directly(self, wanted: Sequence[range]) -> np.ndarray:
        return np.asanyarray(self.array[tuple(map(as_slice, wanted))])

    def _read_chunk(self, place: tuple[int, ...]) -> np.ndarray:
        """Return a chunk, which is then the last that is dropped."""
        if place in self.kept:
            self.kept.move_to_end(place)
            return self.kept[place]
        spans = tuple(slice(own[number], own[number + 1]) for number, own in zip(place, self.edges, strict=True))
        chunk = np.asanyarray(self.array[spans])
        self.kept[place] = chunk
        self.bytes += chunk.nbytes
        while self.bytes > self.most:
            self.bytes -= self.kept.popitem(last=False)[1].nbytes
        return chunk


def _find_edges(chunk: int | tuple[int, ...], length: int) -> Sequence[int]:
    """Return where the chunks of an axis start, and where the last ends; dask may have some of length 0."""
    if isinstance(chunk, int):
        return range(0, length + chunk, chunk)
    return list(itertools.accumulate((each for each in chunk if each), initial=0))


def keep_chunks(array: Any) -> Any:
    """Return an array that decodes its chunks once for the parts that share them; one without chunks as it is."""
    if isinstance(array, AxesView):
        return AxesView(keep_chunks(array.array), array.axes, array.taken)
    chunks, dtype = getattr(array, "chunks", None), getattr(array, "dtype", None)
    if not isinstance(chunks, tuple) or not isinstance(dtype, np.dtype) or len(chunks) != len(array.shape):
        return array
    if not all(isinstance(each, int | tuple) for each in chunks) or 0 in array.shape:
        return array
    return ChunkCache(array, int(_SHARE * free_bytes(torch.device("cpu"))))
