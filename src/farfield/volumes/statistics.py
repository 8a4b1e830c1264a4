"""Exact statistics of arrays larger than memory: mean and deviation in one pass, quantiles in one or a few."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from farfield._checks import ShapeError
from farfield._refusals import door, refusal
from farfield.volumes.checks import check_volume
from farfield.volumes.chunk_cache import keep_chunks
from farfield.volumes.matched_masks import match_mask
from farfield.volumes.sink import dtype_of_array, to_numpy
from farfield.volumes.source import explain_error, without_mask
from farfield.volumes.volume import split_volume

# Positions that are read at a time.
_AT_ONCE = 2**21
# Bits of a number that are counted in a pass.
_BITS = 16


@door("percentiles")
def percentiles(
    volume: Any, percents: Sequence[float], *, axes: str | None = None, mask: Any = None
) -> list[np.ndarray]:
    """Compute the exact percentiles of a volume larger than memory: `numpy.percentile`'s in float64.

    Args:
        volume: Anything with `shape`, `dtype` and slicing; a `Volume` tells its axes by their letters.
        percents: From 0 to 100.
        axes: Letters of the axes that they are over, such as "ZYX": of an array without letters its last ones. None:
            all but the channels of a `Volume`, and all of an array without letters.
        mask: True at the positions that count, with the shape of these axes, or a `Volume` of other voxels; the others
            may be NaN.

    Returns:
        An array for each percent; the axes that it is over have length 1.

    Raises:
        ValueError: If a number is not finite, a percent is none, or there is no such axis, or no position that counts.

    Cost:
        The volume is read once for numbers of 16 bits or fewer, twice for 32 bits, four times for 64, for each channel
        by itself; a chunk of it is in memory at once.

    Example:
        >>> image = np.random.default_rng(0).random((3, 64, 80)).astype("float32")
        >>> low, high = percentiles(image, [1, 99.8], axes="YX")
        >>> high.shape, bool(np.allclose(high[:, 0, 0], np.percentile(image, 99.8, axis=(1, 2))))
        ((3, 1, 1), True)
    """
    try:
        are_percents = all(0 <= each <= 100 for each in percents)
    except (TypeError, ValueError):
        are_percents = False
    if not are_percents:
        raise refusal(ValueError, f"percents are from 0 to 100, got {percents!r:.60}; fix: [1, 99.8], for example.")
    array, places, mask = _choose_axes(volume, axes, mask)
    return quantiles(array, places, [each / 100 for each in percents], mask=mask)


@door("mean_and_std")
def mean_and_std(volume: Any, *, axes: str | None = None, mask: Any = None) -> tuple[np.ndarray, np.ndarray]:
    """Compute mean and standard deviation (of the population) of a volume larger than memory, in float64.

    Args:
        volume: As of `percentiles`.
        axes: As of `percentiles`.
        mask: As of `percentiles`.

    Returns:
        The mean and the deviation; the axes that they are over have length 1.

    Raises:
        ValueError: If a number is not finite, or there is no such axis, or no position that counts.

    Cost:
        The volume is read once, a chunk at a time.

    Example:
        >>> mean, std = mean_and_std(np.arange(12.0).reshape(3, 4), axes="X")
        >>> mean.tolist(), std.round(3).tolist()
        ([[1.5], [5.5], [9.5]], [[1.118], [1.118], [1.118]])
    """
    array, places, mask = _choose_axes(volume, axes, mask)
    return mean_and_deviation(array, places, mask)


def _choose_axes(volume: Any, axes: str | None, mask: Any) -> tuple[Any, list[int], Any]:
    """Return the array of a volume, the axes of these letters, or as many of the last ones, and the mask of these."""
    known, array = split_volume(volume)
    check_volume("", "volume", array)
    array = to_numpy(array) if isinstance(array, Tensor) else array
    letters, count = "" if known is None or "Q" in known.axes else known.axes, len(array.shape)
    if 0 in array.shape:
        raise refusal(ShapeError, f"the volume has an empty axis, shape {tuple(array.shape)}; fix: leave it out.")
    if axes is not None and not isinstance(axes, str):
        raise refusal(TypeError, f'axes must be a text of letters, got {axes!r:.60}; fix: axes="YX", for example.')
    if letters and any(letters.count(each) != 1 for each in (axes or "").upper()):
        raise refusal(ValueError, f'the axes are "{letters}", got axes="{axes}"; fix: letters of these.')
    if axes is not None and not 0 < len(axes) <= count:
        raise refusal(ValueError, f'the volume has {count} axes, got axes="{axes}"; fix: axes=None for all of them.')
    if axes is None:
        places = [place for place in range(count) if letters[place : place + 1] != "C"]
    else:
        places = sorted(map(letters.index, axes.upper())) if letters else list(range(count))[-len(axes) :]
    chosen = "".join(letters[place : place + 1] for place in places)
    if mask is not None:
        mask = match_mask(mask, chosen, array.shape, known)
        check_volume("", "mask", mask)
    return array, places, mask


def mean_and_deviation(array: Any, axes: Collection[int], mask: Any = None) -> tuple[np.ndarray, np.ndarray]:
    """Compute mean and deviation (of the population) over some axes, which get length 1, in float64."""
    _count_valid(mask, array.shape, axes)
    shape = [1 if axis in axes else length for axis, length in enumerate(array.shape)]
    count, mean, squares = (np.zeros(shape) for _ in range(3))
    for index in _parts(array):
        valid = _valid(mask, index, axes)
        number = math.prod(each.stop - each.start for axis, each in enumerate(index) if axis in axes)
        number = number if mask is None else int(valid.sum())
        if not number:
            continue
        part = _read(array, index, valid).astype(np.float64)
        own = tuple(slice(None) if axis in axes else each for axis, each in enumerate(index))
        middle = part.mean(tuple(axes), keepdims=True, where=valid)
        total, distance = count[own] + number, middle - mean[own]
        squares[own] += ((part - middle) ** 2).sum(tuple(axes), keepdims=True, where=valid)
        squares[own] += distance**2 * count[own] * number / total
        mean[own] += distance * number / total
        count[own] = total
    return mean, np.sqrt(squares / count)


def quantiles(
    array: Any, axes: Collection[int], shares: Sequence[float], method: str = "linear", mask: Any = None
) -> list[np.ndarray]:
    """Compute quantiles, of shares from 0 to 1, over some axes, which get length 1: `numpy.quantile`'s in float64.

    The method is "linear" between the two nearest numbers, or "inverted_cdf", one of the numbers. The array is read
    part by part: numbers are counted by their bits, the first 16 of them in a first pass, and the next of those that
    may be the ones asked for in another; so the result is exact, of 16 bits in one pass, of 32 in two, of 64 in four.
    """
    array = keep_chunks(array)
    shape = [1 if axis in axes else length for axis, length in enumerate(array.shape)]
    count = _count_valid(mask, array.shape, axes)
    places = [share * (count - 1) if method == "linear" else max(math.ceil(share * count) - 1, 0) for share in shares]
    ranks = {rank for place in places for rank in (math.floor(place), math.ceil(place))}
    results = [np.zeros(shape) for _ in shares]
    for group in np.ndindex(*shape):
        region = [slice(None) if axis in axes else slice(each, each + 1) for axis, each in enumerate(group)]
        found = _select(array, region, ranks, axes, mask)
        for result, place in zip(results, places, strict=True):
            low, high = (found[rank] for rank in (math.floor(place), math.ceil(place)))
            # The distance of two integers may be more than their dtype holds.
            result[group] = np.quantile(np.array([low, high], np.float64), place - math.floor(place))
    return results


def _select(
    array: Any, region: Sequence[slice], ranks: Collection[int], axes: Collection[int], mask: Any
) -> dict[int, np.ndarray]:
    """Return the numbers of a region that have these ranks, counted from 0."""
    dtype = _plain_dtype(dtype_of_array(array) or np.dtype(float))
    bits = 8 * dtype.itemsize
    width = min(bits, _BITS)
    # Of each number, its first bits, and its rank among those that begin with them.
    known = {rank: (0, rank) for rank in ranks}
    for shift in range(bits - width, -1, -width):
        counts = {first: np.zeros(1 << width, np.int64) for first, _ in known.values()}
        for index in _parts(array, region):
            valid = _valid(mask, index, axes)
            part = _read(array, index, valid)
            keys = _order_bits(part if mask is None else part[np.broadcast_to(valid, part.shape)]).ravel()
            digits = keys >> keys.dtype.type(shift) & keys.dtype.type((1 << width) - 1)
            is_first = shift + width == bits
            above = None if is_first else keys >> keys.dtype.type(shift + width)
            for first, histogram in counts.items():
                own = digits if is_first else digits[above == keys.dtype.type(first)]
                histogram += np.bincount(own.astype(np.intp), minlength=len(histogram))
        for rank, (first, within) in known.items():
            up_to = counts[first].cumsum()
            digit = int(np.searchsorted(up_to, within, side="right"))
            known[rank] = first << width | digit, within - (int(up_to[digit - 1]) if digit else 0)
    return {rank: _restore_number(key, dtype) for rank, (key, _) in known.items()}


def _order_bits(numbers: np.ndarray) -> np.ndarray:
    """Return integers without signs that are in the order of the numbers."""
    kind, keys = numbers.dtype.kind, np.ascontiguousarray(numbers).view(f"u{numbers.dtype.itemsize}")
    sign = keys.dtype.type(1 << (8 * numbers.dtype.itemsize - 1))
    if kind == "i":
        return keys ^ sign
    if kind == "f":
        return np.where(keys & sign, ~keys, keys | sign)
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
    longest = (max(chunk) if isinstance(chunk, tuple) else int(chunk) for chunk in chunks)  # those of dask are tuples
    steps = [min(len(span), chunk) for span, chunk in zip(spans, longest, strict=True)]
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


def _count_valid(mask: Any, shape: Sequence[int], axes: Collection[int]) -> int:
    """Return how many positions along some axes count; refuse a mask of another shape, and one that has none."""
    size = tuple(length for axis, length in enumerate(shape) if axis in axes)
    if mask is None:
        return math.prod(size)
    if tuple(mask.shape) != size:
        raise refusal(ShapeError, f"mask must have shape {size}, got {tuple(mask.shape)}; fix: one value per position.")
    count = sum(int(np.count_nonzero(mask[index])) for index in _parts(mask))
    if not count:
        raise refusal(ValueError, "no position of the mask is True; fix: mask=None.")
    return count


def _valid(mask: Any, index: tuple[slice, ...], axes: Collection[int]) -> Any:
    """Return which positions of a part count, with length 1 along the axes that the mask has not."""
    if mask is None:
        return True
    part = np.asarray(mask[tuple(each for axis, each in enumerate(index) if axis in axes)]) != 0
    return np.expand_dims(part, [axis for axis in range(len(index)) if axis not in axes])


def _read(array: Any, index: tuple[slice, ...], valid: Any = True) -> np.ndarray:
    positions = "positions " + " × ".join(f"{each.start}:{each.stop}" for each in index)
    try:
        part = array[index]
    # Codecs and libraries of files raise all kinds of errors for damaged chunks.
    except Exception as error:
        raise explain_error(error, array, "farfield", positions) from error
    part = without_mask(part)
    part = part.astype(_plain_dtype(part.dtype), copy=False)
    if part.dtype.kind == "f" and not (np.isfinite(part) | ~np.asarray(valid)).all():
        raise refusal(
            ValueError,
            f"the volume has numbers that are not finite, at {positions}, and so no mean or percentile; fix: "
            "numpy.nan_to_num(volume), or a mask that is False there.",
        )
    return part
