"""Chunks that stay decoded while tiles that share them are read: each is decoded once, and not once a tile."""

from __future__ import annotations

import itertools
import math
from collections import OrderedDict
from typing import Any

import numpy as np
import torch

from farfield.nn.devices import free_bytes
from farfield.volumes.axes_view import AxesView, basic_index

# The share of the free memory that decoded chunks may take.
_SHARE = 0.125


class ChunkCache:
    """An array in chunks of which the last ones that were read stay in memory, up to `most` bytes.

    Parts whose chunks hold hardly more are read directly, and so are those of chunks that are too large to keep.
    """

    def __init__(self, array: Any, most: int) -> None:
        self.array, self.most, self.kept = array, most, OrderedDict[tuple[int, ...], np.ndarray]()
        self.shape, self.dtype = tuple(array.shape), array.dtype
        # A shard is decoded chunk by chunk.
        self.chunks = tuple(array.chunks)
        self.bytes = 0

    def __getitem__(self, index: Any) -> np.ndarray:
        """Read a part, by integers and slices."""
        given = basic_index(index, self.shape)
        if given is None or None in given:
            return self.array[index]
        spans = [range(each, each + 1) if isinstance(each, int) else each for each in given if each is not None]
        whole = [range(part.start // own, -(-part.stop // own)) for part, own in zip(spans, self.chunks, strict=True)]
        size = math.prod(self.chunks) * self.dtype.itemsize
        wanted = math.prod(map(len, spans)) * self.dtype.itemsize
        if (
            any(part.step != 1 for part in spans)
            or size > self.most
            or not 2 * wanted < math.prod(map(len, whole)) * size
        ):
            return self.array[index]
        result = np.empty([len(part) for part in spans], self.dtype)
        for place in itertools.product(*whole):
            origin = [number * own for number, own in zip(place, self.chunks, strict=True)]
            chunk = self._read_chunk(place, origin)
            inner = [
                range(max(part.start, first), min(part.stop, first + length))
                for part, first, length in zip(spans, origin, chunk.shape, strict=True)
            ]
            there, here = (
                tuple(slice(part.start - first, part.stop - first) for part, first in zip(inner, firsts, strict=True))
                for firsts in ([part.start for part in spans], origin)
            )
            result[there] = chunk[here]
        return result[tuple(0 if isinstance(each, int) else slice(None) for each in given)]

    def _read_chunk(self, place: tuple[int, ...], origin: list[int]) -> np.ndarray:
        """Return a chunk, which is then the last that is dropped."""
        if place in self.kept:
            self.kept.move_to_end(place)
            return self.kept[place]
        ends = (min(first + own, length) for first, own, length in zip(origin, self.chunks, self.shape, strict=True))
        chunk = np.asarray(self.array[tuple(map(slice, origin, ends))])
        self.kept[place] = chunk
        self.bytes += chunk.nbytes
        while self.bytes > self.most:
            self.bytes -= self.kept.popitem(last=False)[1].nbytes
        return chunk


def keep_chunks(array: Any) -> Any:
    """Return an array that decodes its chunks once for the parts that share them; one without chunks as it is."""
    if isinstance(array, AxesView):
        return AxesView(keep_chunks(array.array), array.axes, array.taken)
    chunks = getattr(array, "chunks", None)
    # Those of dask are lists of lengths, and no chunks of a file.
    if not isinstance(chunks, tuple) or not chunks or not all(isinstance(each, int) for each in chunks):
        return array
    dtype = getattr(array, "dtype", None)
    if not isinstance(dtype, np.dtype) or len(chunks) != len(array.shape) or min(chunks) < 1:
        return array
    return ChunkCache(array, int(_SHARE * free_bytes(torch.device("cpu"))))
