"""Rules of pooling; of few windows that cover the whole it is a sum over the whole."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from farfield.streaming.graph import find_operation
from farfield.streaming.rules.reading import Taps
from farfield.streaming.rules.rule import (
    Core,
    OperationCall,
    Parts,
    Reduction,
    Rule,
    along_output,
    at_last,
    convert_number,
    named,
    reading,
    single,
    spatial_dims,
    widen,
)
from farfield.streaming.rules.sums import PEAKS, SUM
from farfield.streaming.rules.windows import Windows, find_padding, pad_constant, repeat
from farfield.streaming.spans import Box, Layout, Piece, Span, Window, clip, flat_index, is_cut, length_of, positions_of
from farfield.volumes.place import Place, stretch

# At most so many windows along an axis, of at least so many positions, are summed over the whole.
FEW, LARGE = 16, 16


# ---- pooling: small windows, and few that cover the whole ------------------------------------------------------------
def _pool_windows(call: OperationCall) -> Windows:
    """The windows of pooling: arguments are kernel, stride, padding, and for maxima dilation."""
    count = spatial_dims(call)
    given = call.args[1], call.args[2] or call.args[1], call.args[3], call.args[4] if "max" in call.op else 1
    return at_last(call, [Window(*each) for each in zip(*(repeat(number, count) for number in given), strict=True)])


def _input_lengths(call: OperationCall) -> tuple[int, ...]:
    """The lengths of the spatial dimensions that are pooled."""
    return call.operands[0].shape[-spatial_dims(call) :]


class _Bins(NamedTuple):
    """The positions of each window along an axis."""

    spans: tuple[Span, ...]
    place: Place | None = None
    moves: bool = True

    def read(self, span: Span, length: int) -> Span:
        """As of `Moved`: from the first position of the first window to the last of the last."""
        chosen = self.spans[span[0] : span[1]]
        return chosen[0][0], max(last for _, last in chosen)


@functools.lru_cache(256)
def _bins_of(window: Window | None, length: int, result: int, padded: bool) -> _Bins:
    """Return the windows along an axis, with or without padding; None are those of torch's adaptive pooling."""
    if window is None:
        spans = [(at * length // result, -(-(at + 1) * length // result)) for at in range(result)]
        return _Bins(tuple(spans), stretch(length, result))
    spans = [window.reach((at, at + 1)) for at in range(result)]
    if padded:
        return _Bins(tuple((first, min(last, length + window.padding)) for first, last in spans))
    return _Bins(tuple(clip(span, length) for span in spans))


def _find_bins(call: OperationCall, *, padded: bool = False) -> list[_Bins]:
    """Return the windows along each spatial dimension: those of torch's adaptive pooling, or those that slide."""
    lengths, results = _input_lengths(call), call.shape[-spatial_dims(call) :]
    windows = [None] * len(lengths) if "adaptive" in call.op else _pool_windows(call).values()
    return [_bins_of(*each, padded) for each in zip(windows, lengths, results, strict=True)]


def _divisors(call: OperationCall, box: Box) -> Tensor:
    """Return by how many positions each window of an average is divided."""
    adaptive = "adaptive" in call.op
    if not adaptive and call.args[6]:
        return torch.tensor(float(call.args[6]))
    total, bins = torch.ones(()), _find_bins(call, padded=not adaptive and call.args[5])
    for each, spans in zip(bins, box[-len(bins) :], strict=True):
        # Windows of one position run along several axes too.
        chosen = each.spans[slice(*spans[0])] if len(spans) == 1 else each.spans[: math.prod(b - a for a, b in spans)]
        total = total[..., None] * torch.tensor([float(stop - start) for start, stop in chosen])
    return total


def _divide(total: Tensor, divisors: Tensor) -> Tensor:
    return torch.div(total, divisors.to(total), rounding_mode=None if total.is_floating_point() else "trunc")


def _part_of(tensor: Tensor, dim: int, span: Span, first: int) -> Tensor:
    """Return the part of a span that is there, perhaps empty; `first` is the first position that is."""
    start, stop = (min(max(index - first, 0), tensor.shape[dim]) for index in span)
    return tensor.narrow(dim, start, stop - start)


def _pool_bins(call: OperationCall, tensor: Tensor, bins: Sequence[Sequence[Span]], spans: Sequence[Span]) -> Parts:
    """Return the sum of each window in the part of the whole that is there, or its maximum and the place of that."""
    if "max" not in call.op:
        for dim in range(-len(bins), 0):
            sums = [_part_of(tensor, dim, each, spans[dim][0]).sum(dim) for each in bins[dim]]
            tensor = torch.stack(sums, dim)
        return (tensor,)
    lengths = _input_lengths(call)
    index = positions_of(lengths, spans).view([stop - start for start, stop in spans])
    index = index.to(tensor.device).expand(tensor.shape)
    # The last dimension first, so that of equal ones the first in the flattened whole is taken.
    for dim in range(-1, -len(bins) - 1, -1):
        best: list[tuple[Tensor, Tensor]] = []
        for each in bins[dim]:
            values, own = (_part_of(part, dim, each, spans[dim][0]) for part in (tensor, index))
            if not values.shape[dim]:
                # One position more, -inf at a place behind all, stands for those that are not there.
                values, own = (part.narrow(dim, 0, 1) for part in (tensor, index))
                least = convert_number(-math.inf, values.dtype)
                values, own = torch.full_like(values, least), torch.full_like(own, math.prod(lengths))
            largest, at = values.max(dim, keepdim=True)
            best.append((largest, own.gather(dim, at)))
        tensor, index = (torch.cat(parts, dim) for parts in zip(*best, strict=True))
    return tensor, index


def _finish_bins(call: OperationCall, output: int, box: Box, tensors: Sequence[Tensor], parts: Parts) -> Tensor:
    result = parts[output] if "max" in call.op else _divide(parts[0], _divisors(call, box))
    return result.to(call.infos[output].dtype)


def _run_max_pool(call: OperationCall, output: int, box: Box, tensors: Sequence[Tensor]) -> Tensor:
    """Take maxima; indices are those in the whole."""
    windows, shape = _pool_windows(call), call.operands[0].shape
    least = convert_number(-math.inf, tensors[0].dtype)
    grid = pad_constant(tensors[0], find_padding(call, windows, box), least)
    kernel, stride, _, dilation, *_ = (list(each) for each in zip(*windows.values(), strict=True))
    values, index = find_operation(call.op)(grid, kernel, stride, [0] * len(kernel), dilation)
    if output == 0:
        return values
    # Indices are in the flattened part that was read.
    places = []
    for dim, window in windows.items():
        start = window.reach(single(box[dim]))[0]
        place = torch.arange(start, start + grid.shape[dim])
        # A window of which all is -inf has the index of its first position that is no padding.
        places.append(torch.where(place < 0, place % window.dilation, place))
    return flat_index([shape[dim] for dim in windows], places).to(index.device)[index]


def _run_average_pool(call: OperationCall, output: int, box: Box, tensors: Sequence[Tensor]) -> Tensor:
    """Average; windows at the border count as torch counts them."""
    windows = _pool_windows(call)
    kernel, stride, *_ = (list(each) for each in zip(*windows.values(), strict=True))
    grid = pad_constant(tensors[0], find_padding(call, windows, box), 0.0)
    total = find_operation(call.op)(grid, kernel, stride, [0] * len(kernel), False, True, 1)
    return _divide(total, _divisors(call, box))


def _run_adaptive(call: OperationCall, output: int, box: Box, tensors: Sequence[Tensor]) -> Tensor:
    bins = _find_bins(call)
    chosen = [each.spans[slice(*single(own))] for each, own in zip(bins, box[-len(bins) :], strict=True)]
    spans = [(each[0][0], max(last for _, last in each)) for each in chosen]
    return _finish_bins(call, output, box, tensors, _pool_bins(call, tensors[0], chosen, spans))


def _is_summed(call: OperationCall) -> bool:
    """Whether a pooling has few and large windows along an axis that is cut."""
    if "adaptive" not in call.op and any(window.dilation > 1 for window in _pool_windows(call).values()):
        return False
    bins = [each.spans for each in _find_bins(call)]
    return any(
        is_cut(dim) and len(own) <= FEW and (max(stop - start for start, stop in own) >= LARGE or len(own) == 1)
        for dim, own in zip(call.operands[0].layout[-len(bins) :], bins, strict=True)
    )


def _pool_tile(call: OperationCall, core: Core, tensors: Sequence[Tensor]) -> Parts:
    """Sum, or take maxima, of the part of each window that a tile has."""
    bins = [each.spans for each in _find_bins(call)]
    spans = [single(each) for each in core(call.operands[0].layout)[-len(bins) :]]
    return _pool_bins(call, tensors[0] if "max" in call.op else tensors[0].to(widen(call.dtype)), bins, spans)


_SUMS, _MAXIMA = (row._replace(summarize=_pool_tile, finish=_finish_bins, along=along_output) for row in (SUM, PEAKS))


def _reduce_pool(call: OperationCall) -> Reduction | None:
    return (_MAXIMA if "max" in call.op else _SUMS) if _is_summed(call) else None


# ---- masks: a position of a coarser grid is valid if any of those that it stands for is ------------------------------
@functools.lru_cache(256)
def _find_blocks(length: int, result: int, start: int, scale: int, least: int) -> Taps:
    """Return the positions that those of another axis stand for: `scale` many from `start` on, in units of 1/least."""
    first = start + scale * np.arange(result)
    start_of, stop = first // least, -(-(first + scale) // least)
    steps = np.arange((stop - start_of).max())[:, None]
    return Taps(np.minimum(start_of + steps, stop - 1).clip(0, length - 1))


def _blocks_of(call: OperationCall) -> dict[int, Taps]:
    """The blocks of a mask along a dimension, which are the arguments."""
    _, dim, *blocks = call.args
    return {dim: _find_blocks(call.operands[0].shape[dim], call.shape[dim], *blocks)}


def _run_cover(call: OperationCall, output: int, box: Box, tensors: Sequence[Tensor]) -> Tensor:
    ((dim, taps),) = _blocks_of(call).items()
    index = taps.index_of(single(box[dim]), tensors[0].device)
    return functools.reduce(torch.logical_or, (tensors[0].index_select(dim, each) for each in index))


def _pooled(rule: Rule) -> Rule:
    """Return the rule of pooling from that of its windows: where sums over the whole are taken, it has no axis."""

    def label(call: OperationCall) -> list[Layout]:
        count = spatial_dims(call)
        layout, *_ = rule.label(call)
        if _is_summed(call):
            layout = (*layout[:-count], *((Piece(length_of(dim)),) for dim in layout[-count:]))
        return [layout] * len(call.infos)

    return rule._replace(label=label, reduce=_reduce_pool)


POOLING_RULES: dict[str, Rule] = {
    **named(_pooled(reading(_pool_windows, _run_max_pool)), "max_pool2d_with_indices max_pool3d_with_indices"),
    **named(_pooled(reading(_pool_windows, _run_average_pool)), "avg_pool2d avg_pool3d"),
    **named(
        _pooled(reading(lambda call: at_last(call, _find_bins(call)), _run_adaptive)),
        "_adaptive_avg_pool2d _adaptive_avg_pool3d adaptive_max_pool2d adaptive_max_pool3d",
    ),
    "cover": reading(_blocks_of, _run_cover),
}
