"""Scans along an axis, such as cumulative sums: a row of the table of reductions, which reads what is before a box.

A tile gives the totals of its windows, each of so many positions, and where they lie. A position reads the merge of all
windows before its box, and scans the rest inside the box. So a box may begin anywhere, as one that a convolution behind
the scan asks for does, and tiles run in any order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from farfield.streaming.linear_scan import combine_linear, reduce_linear, scan_linear
from farfield.streaming.rules.aligned import take_tile
from farfield.streaming.rules.rule import (
    Core,
    Dims,
    OperationCall,
    Parts,
    Reduction,
    Rule,
    RuleError,
    aligned,
    all_but,
    boxes_along,
    given_dims,
    take_along,
    widen,
)
from farfield.streaming.spans import Box, axes_of, box_shape, is_cut, length_of

# The spans of the pieces of all dimensions, in lists as a record has them; along the scan, of windows.
Spans = list[list[int]]


class Scan(NamedTuple):
    """An associative operation on tensors side by side, and the number that changes nothing."""

    neutral: tuple[float, ...]
    total: Callable[[Sequence[Tensor], int], Sequence[Tensor]]  # of all positions along a dimension, which goes
    combine: Callable[[Sequence[Tensor], Sequence[Tensor]], Sequence[Tensor]]  # what is before, and what follows
    scan: Callable[[Sequence[Tensor], int], Sequence[Tensor]]  # the totals up to each position


def _dim_of(call: OperationCall) -> int:
    """The dimension that is scanned: of our own operation the first."""
    return 0 if call.op == "scan" else given_dims(call)[0]


# ---- what a tile gives, and how two merge ----------------------------------------------------------------------------
def _convert(call: OperationCall, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Convert numbers that are scanned as torch does, which adds up half precision in float32."""
    dtype = call.dtype
    if dtype.is_floating_point or dtype.is_complex:
        dtype = torch.promote_types(dtype, torch.float32)
    return [each.to(call.dtype).to(dtype) for each in tensors]


def _spans_of(box: Box, dim: int, windows: list[int]) -> tuple[Spans, int]:
    """Return the spans of a box with these windows along the scan, and the place of those."""
    spans = [[list(span) for span in spans] for spans in box]
    spans[dim] = [windows]
    return [span for own in spans for span in own], sum(map(len, spans[:dim]))


def _summarize(scan: Scan, window: int, call: OperationCall, core: Core, tensors: Sequence[Tensor]) -> Parts:
    """Return the totals of a tile's windows; the last one of the axis may be shorter."""
    dim, layout = _dim_of(call), call.layouts[0]
    box = core(layout)
    ((start, stop),) = box[dim]
    tensors = [take_tile(each, own.layout, layout, box) for each, own in zip(tensors, call.operands, strict=True)]
    first, last = start // window, -(-stop // window)
    at, _ = _spans_of(box, dim, [first, last])
    split = []
    for numbers, neutral in zip(_convert(call, tensors), scan.neutral, strict=True):
        shape = [last * window - stop if place == dim else length for place, length in enumerate(numbers.shape)]
        full = torch.cat([numbers, numbers.new_full(shape, neutral)], dim) if shape[dim] else numbers
        split.append(full.unflatten(dim, (last - first, window)))
    totals = scan.total(split, dim + 1)
    return at, *(each.to(widen(each.dtype)).reshape([stop - start for start, stop in at]) for each in totals)


def _take_spans(at: Spans, numbers: Tensor, wanted: Spans, neutral: float) -> Tensor:
    """Return numbers, which lie at some spans, at those that are wanted; neutral ones where there are none."""
    both = [(max(one[0], other[0]), min(one[1], other[1])) for one, other in zip(at, wanted, strict=True)]
    have, take = (
        tuple(slice(start - own[0], max(start, stop) - own[0]) for (start, stop), own in zip(both, spans, strict=True))
        for spans in (at, wanted)
    )
    if both == [*map(tuple, wanted)]:
        return numbers[have]
    result = numbers.new_full([stop - start for start, stop in wanted], neutral)
    result[take] = numbers[have]
    return result


def _merge(scan: Scan, first: Parts, second: Parts) -> Parts:
    """Merge the windows of tiles, of which no two have the same."""
    hull = [[min(one[0], other[0]), max(one[1], other[1])] for one, other in zip(first[0], second[0], strict=True)]
    sides = [
        [_take_spans(at, each, hull, neutral) for each, neutral in zip(numbers, scan.neutral, strict=True)]
        for at, *numbers in (first, second)
    ]
    return hull, *scan.combine(*sides)


def _pull(own: Parts, merged: Parts, grads: Parts) -> tuple[Parts, Parts]:
    """Return the gradient of a tile's windows, which is that of the merged ones."""
    taken = [None if each is None else _take_spans(merged[0], each, own[0], 0) for each in grads[1:]]
    return ([[None, None] for _ in own[0]], *taken), grads


# ---- what a position reads -------------------------------------------------------------------------------------------
def _read(window: int, call: OperationCall, box: Box) -> list[Box]:
    """The box, from where the window begins that its first position is in."""
    return boxes_along(call, _all_dims(call), 0, _begin_window(window, call, box))


def _begin_window(window: int, call: OperationCall, box: Box) -> Box:
    dim = _dim_of(call)
    ((start, stop),) = box[dim]
    return (*box[:dim], ((start // window * window, stop),), *box[dim + 1 :])


def _all_dims(call: OperationCall) -> Dims:
    return [range(len(call.shape))] * len(call.operands)


def _finish(
    scan: Scan, window: int, call: OperationCall, output: int, box: Box, tensors: Sequence[Tensor], parts: Parts
) -> Tensor:
    dim, (at, *numbers) = _dim_of(call), parts
    ((start, stop),) = box[dim]
    tensors = take_along(call, _all_dims(call), 0, _begin_window(window, call, box), tensors)
    result = scan.scan(_convert(call, tensors), dim)
    if start >= window:
        wanted, place = _spans_of(box, dim, [0, start // window])
        pairs = zip(numbers, scan.neutral, strict=True)
        before = scan.total([_take_spans(at, each, wanted, neutral) for each, neutral in pairs], place)
        shape = [1 if place == dim else length for place, length in enumerate(box_shape(box))]
        before = [one.reshape(shape).to(own.dtype) for one, own in zip(before, result, strict=True)]
        result = scan.combine(before, result)
    return result[-1].narrow(dim, start % window, stop - start)


# ---- windows ---------------------------------------------------------------------------------------------------------
def _make_row(scan: Scan, call: OperationCall, window: int) -> Reduction:
    dim, layout = _dim_of(call), call.layouts[0]
    # A tile gives its own part of the operand that runs along all axes.
    places = range(len(call.operands))
    first = next((at for at in places if axes_of(call.operands[at].layout) == axes_of(layout)), None)
    if first is None:
        raise RuleError("its operands run along different axes")
    return Reduction(
        partial(_summarize, scan, window),
        partial(_merge, scan),
        partial(_finish, scan, window),
        operands=(first, *(at for at in places if at != first)),
        reads=partial(_read, window),
        windows=tuple(window if place == dim else 1 for place in range(len(call.shape))),
        pull=_pull,
        fit=partial(_fit_row, scan),
        parts_bytes=len(scan.neutral) * _count_bytes(call, window),
    )


def _count_bytes(call: OperationCall, window: int) -> int:
    """Return the bytes of the windows of the whole."""
    windows = [-(-length // window) if at == _dim_of(call) else length for at, length in enumerate(call.shape)]
    return math.prod(windows) * widen(call.dtype).itemsize


def _fit_row(scan: Scan, call: OperationCall, box: Box) -> Reduction:
    """Return the row whose windows of the whole take no more than a tile's own part of what is scanned.

    They divide that, so that a tile begins with one; where the least is too much, a tile is a window.
    """
    most, length = math.prod(box_shape(box)) * call.dtype.itemsize, max(1, box_shape(box)[_dim_of(call)])
    divisors = (each for each in range(1, length) if length % each == 0)
    return _make_row(scan, call, next((each for each in divisors if _count_bytes(call, each) <= most), length))


# ---- the table -------------------------------------------------------------------------------------------------------
def _sum_up(numbers: Sequence[Tensor], dim: int) -> Sequence[Tensor]:
    return [numbers[0].sum(dim, dtype=widen(numbers[0].dtype))]


def _multiply_up(numbers: Sequence[Tensor], dim: int) -> Sequence[Tensor]:
    return [numbers[0].prod(dim, dtype=widen(numbers[0].dtype))]


def _add_exponentials(numbers: Sequence[Tensor], dim: int) -> Sequence[Tensor]:
    return [numbers[0].logsumexp(dim)]


_SCANS = {
    "aten.cumsum.default": Scan(
        (0,), _sum_up, lambda one, other: [one[0] + other[0]], lambda own, dim: [own[0].cumsum(dim)]
    ),
    "aten.cumprod.default": Scan(
        (1,), _multiply_up, lambda one, other: [one[0] * other[0]], lambda own, dim: [own[0].cumprod(dim)]
    ),
    "aten.logcumsumexp.default": Scan(
        (-math.inf,),
        _add_exponentials,
        lambda one, other: [torch.logaddexp(one[0], other[0])],
        lambda own, dim: [own[0].logcumsumexp(dim)],
    ),
    "scan": Scan((1, 0), reduce_linear, combine_linear, scan_linear),
}


def _dims_of(call: OperationCall) -> Dims:
    return [all_but(call, [_dim_of(call)])] * len(call.operands)


def _scanned(scan: Scan) -> Rule:
    def reduce(call: OperationCall) -> Reduction | None:
        dim, layout = _dim_of(call), call.layouts[0]
        if not is_cut(layout[dim]):
            return None
        if len(layout[dim]) > 1:
            raise RuleError(f"it scans {length_of(layout[dim])} positions, which are those of several axes")
        return _make_row(scan, call, 1)

    label = aligned(_all_dims).label
    return aligned(_dims_of)._replace(label=label, reduce=reduce)


SCAN_RULES: dict[str, Rule] = {name: _scanned(scan) for name, scan in _SCANS.items()}
