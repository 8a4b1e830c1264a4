"""Exact statistics of arrays larger than memory: mean and deviation in one pass, quantiles in one or a few."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import numpy as np

from farfield._refusals import refusal

# Positions that are read at a time.
_AT_ONCE = 2**21
# Bits of a number that are counted in a pass.
_BITS = 16


def mean_and_deviation(array: Any, axes: Collection[int]) -> tuple[np.ndarray, np.ndarray]:
    """Compute mean and deviation (of the population) over some axes, which get length 1, in float64.

    The array is read once, part by part.

    Raises:
        ValueError: If a number is not finite.

    Example:
        >>> mean, deviation = mean_and_deviation(np.arange(12.0).reshape(3, 4), [1])
        >>> mean.tolist(), deviation.round(3).tolist()
        ([[1.5], [5.5], [9.5]], [[1.118], [1.118], [1.118]])
    """
    shape = [1 if axis in axes else length for axis, length in enumerate(array.shape)]
    count, mean, squares = (np.zeros(shape) for _ in range(3))
    for index in _parts(array):
        part = _read(array, index).astype(np.float64)
        own = tuple(slice(None) if axis in axes else each for axis, each in enumerate(index))
        middle = part.mean(tuple(axes), keepdims=True)
        number = part.size / middle.size
        total, distance = count[own] + number, middle - mean[own]
        squares[own] += ((part - middle) ** 2).sum(tuple(axes), keepdims=True)
        squares[own] += distance**2 * count[own] * number / total
        mean[own] += distance * number / total
        count[own] = total
    return mean, np.sqrt(squares / count)


def quantiles(array: Any, axes: Collection[int], shares: Sequence[float], method: str = "linear") -> list[np.ndarray]:
    """Compute quantiles, of shares from 0 to 1, over some axes, which get length 1: `numpy.quantile`'s in float64.

    The method is "linear" between the two nearest numbers, or "inverted_cdf", one of the numbers. The array is read
    part by part: numbers are counted by their bits, the first 16 of them in a first pass, and the next of those that
    may be the ones asked for in another; so the result is exact, of 16 bits in one pass, of 32 in two, of 64 in four.

    Raises:
        ValueError: If a number is not finite.

    Example:
        >>> numbers = np.random.default_rng(0).normal(size=(50, 40)).astype("float32")
        >>> [median] = quantiles(numbers, [0, 1], [0.5])
        >>> bool(median.item() == np.quantile(numbers.astype("float64"), 0.5))
        True
    """
    shape = [1 if axis in axes else length for axis, length in enumerate(array.shape)]
    count = math.prod(array.shape) // math.prod(shape)
    places = [share * (count - 1) if method == "linear" else max(math.ceil(share * count) - 1, 0) for share in shares]
    ranks = {rank for place in places for rank in (math.floor(place), math.ceil(place))}
    results = [np.zeros(shape) for _ in shares]
    for group in np.ndindex(*shape):
        region = [slice(None) if axis in axes else slice(each, each + 1) for axis, each in enumerate(group)]
        found = _select(array, region, ranks)
        for result, place in zip(results, places, strict=True):
            low, high = (found[rank] for rank in (math.floor(place), math.ceil(place)))
            # The distance of two integers may be more than their dtype holds.
            result[group] = np.quantile(np.array([low, high], np.float64), place - math.floor(place))
    return results


def _select(array: Any, region: Sequence[slice], ranks: Collection[int]) -> dict[int, np.ndarray]:
    """Return the numbers of a region that have these ranks, counted from 0."""
    dtype = _plain_dtype(np.dtype(array.dtype))
    bits = 8 * dtype.itemsize
    width = min(bits, _BITS)
    # Of each number, its first bits, and its rank among those that begin with them.
    known = {rank: (0, rank) for rank in ranks}
    for shift in range(bits - width, -1, -width):
        counts = {first: np.zeros(1 << width, np.int64) for first, _ in known.values()}
        for index in _parts(array, region):
            keys = _order_bits(_read(array, index)).ravel()
            above = keys >> np.uint64(shift + width) if shift + width < bits else np.zeros_like(keys)
            digits = (keys >> np.uint64(shift)) & np.uint64((1 << width) - 1)
            for first, histogram in counts.items():
                own = digits[above == np.uint64(first)].astype(np.int64)
                histogram += np.bincount(own, minlength=len(histogram))
        for rank, (first, within) in known.items():
            up_to = counts[first].cumsum()
            digit = int(np.searchsorted(up_to, within, side="right"))
            known[rank] = first << width | digit, within - (int(up_to[digit - 1]) if digit else 0)
    return {rank: _restore_number(key, dtype) for rank, (key, _) in known.items()}


def _order_bits(numbers: np.ndarray) -> np.ndarray:
    """Return integers without signs that are in the order of the numbers."""
    kind, bits = numbers.dtype.kind, 8 * numbers.dtype.itemsize
    keys = np.ascontiguousarray(numbers).view(f"u{numbers.dtype.itemsize}").astype(np.uint64)
    sign, all_ones = np.uint64(1 << (bits - 1)), np.uint64((1 << bits) - 1)
    if kind == "i":
        return keys ^ sign
    if kind == "f":
        return np.where(keys & sign, keys ^ all_ones, keys | sign)
    return keys


def _restore_number(key: int, dtype: np.dtype) -> np.ndarray:
    """Return the number of an integer of `_order_bits`."""
    bits = 8 * dtype.itemsize
    sign = 1 << (bits - 1)
    if dtype.kind == "i" or (dtype.kind == "f" and key & sign):
        key ^= sign
    elif dtype.kind == "f":
        key ^= (1 << bits) - 1
    return np.array(key, f"u{dtype.itemsize}").view(dtype)


def _parts(array: Any, region: Sequence[slice] | None = None) -> Iterator[tuple[slice, ...]]:
    """Iterate over parts of a region, each of whole chunks if the array has chunks."""
    whole = [slice(None)] * len(array.shape) if region is None else region
    spans = [range(length)[each] for length, each in zip(array.shape, whole, strict=True)]
    chunks = getattr(array, "chunks", None) or (1,) * len(spans)
    steps = [min(len(span), int(chunk)) for span, chunk in zip(spans, chunks, strict=True)]
    for axis in reversed(range(len(steps))):
        steps[axis] = min(len(spans[axis]), steps[axis] * max(1, _AT_ONCE // math.prod(steps)))
    starts = [range(span.start, span.stop, step) for span, step in zip(spans, steps, strict=True)]
    for first in itertools.product(*starts):
        yield tuple(
            slice(start, min(start + step, span.stop)) for start, step, span in zip(first, steps, spans, strict=True)
        )


def _plain_dtype(dtype: np.dtype) -> np.dtype:
    """Return the dtype in which numbers are counted: in this machine's byte order, and booleans as integers."""
    return np.dtype(np.uint8) if dtype.kind == "b" else dtype.newbyteorder("=")


def _read(array: Any, index: tuple[slice, ...]) -> np.ndarray:
    part = np.asarray(array[index])
    part = part.astype(_plain_dtype(part.dtype), copy=False)
    if part.dtype.kind == "f" and not np.isfinite(part).all():
        region = ", ".join(f"{each.start}:{each.stop}" for each in index)
        raise refusal(
            ValueError,
            f"the volume has numbers that are not finite, in [{region}], and so no mean or percentile; fix: "
            "numpy.nan_to_num(volume).",
        )
    return part
