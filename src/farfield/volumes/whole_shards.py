"""Chunks of a user's zarr array that wait until all of them is there: a part of one writes it anew."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import torch

from farfield.nn.devices import free_bytes
from farfield.volumes.source import Region, index_within, overlap, size_of

# The share of the free memory that chunks which wait may take.
_SHARE = 0.125


class WholeShards:
    """An array of zarr whose shards, or chunks where it has none, are written when all their positions are there.

    Those that take too much memory together are written as far as they are there, the first ones first.
    """

    def __init__(self, array: Any) -> None:
        self.array, self.shape, self.lengths = array, tuple(array.shape), array.shards or array.chunks
        self.most, self.bytes = _SHARE * free_bytes(torch.device("cpu")), 0
        # Of each chunk that waits its numbers, and how many positions are not there.
        self.kept: dict[Region, tuple[np.ndarray, int]] = {}

    def __setitem__(self, index: tuple[slice, ...], box: np.ndarray) -> None:
        """Write a box, and all chunks that are complete with it."""
        spans = [part.indices(length)[:2] for part, length in zip(index, self.shape, strict=True)]
        chunks = [
            [(start, min(start + own, length)) for start in range(first - first % own, stop, own)]
            for (first, stop), own, length in zip(spans, self.lengths, self.shape, strict=True)
        ]
        for chunk in itertools.product(*chunks):
            both = overlap(chunk, spans)
            if both is not None:
                self._add(chunk, index_within(both, chunk), box[index_within(both, spans)])
        while self.bytes > self.most:
            self._write(next(iter(self.kept)))

    def _add(self, chunk: Region, within: tuple[slice, ...], part: np.ndarray) -> None:
        place = tuple(itertools.starmap(slice, chunk))
        if part.shape == size_of(chunk):
            self.array[place] = part
            return
        if chunk not in self.kept:
            numbers = np.array(self.array[place])
            self.kept[chunk], self.bytes = (numbers, numbers.size), self.bytes + numbers.nbytes
        numbers, left = self.kept[chunk]
        numbers[within] = part
        self.kept[chunk] = numbers, left - part.size
        if left == part.size:
            self._write(chunk)

    def _write(self, chunk: Region) -> None:
        numbers, _ = self.kept.pop(chunk)
        self.bytes -= numbers.nbytes
        self.array[tuple(itertools.starmap(slice, chunk))] = numbers

    def flush(self) -> None:
        """Write what waits."""
        for chunk in list(self.kept):
            self._write(chunk)
