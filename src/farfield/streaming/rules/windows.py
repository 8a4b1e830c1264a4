"""Rules of windows: constant padding, convolutions, unfolding, folding, pooling, unpooling.

What they read follows from positions of the whole; pooling of few windows that cover the whole is a sum over it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from farfield.streaming.graph import find_operation
from farfield.streaming.rules.rule import (
    ADDED,
    PEAKS,
    Core,
    OperationCall,
    Parts,
    Reduction,
    Rule,
    at_last,
    named,
    reading,
    reduce_arrays,
    single,
    spatial_dims,
)
from farfield.streaming.spans import (
    Box,
    Layout,
    Piece,
    Span,
    Window,
    box_shape,
    clip,
    flat_index,
    is_cut,
    length_of,
    positions_of,
)

# At most so many windows along an axis, of at least so many positions, are summed over the whole.
FEW, LARGE = 16, 16


# ---- windows ---------------------------------------------------------------------------------------------------------
Windows = Mapping[int, Window]


def each_window(call: OperationCall, windows: Windows, box: Box) -> Iterator[tuple[Window, Span, int]]:
    """Iterate over windows, spans of the box, and lengths of the operand; of windows that do not move, all in one."""
    for dim, window in windows.items():
        span = single(box[dim]) if window.moves else (0, math.prod(stop - start for start, stop in box[dim]))
        yield window, span, length_of(call.operands[0].layout[dim])


def find_padding(call: OperationCall, windows: Windows, box: Box) -> list[int]:
    """Return how many positions windows reach beyond the whole before and behind it, of the last dimension first."""
    pads: list[int] = []
    for window, span, length in each_window(call, windows, box):
        wanted = window.reach(span)
        have = clip(wanted, length)
        pads[:0] = [have[0] - wanted[0], wanted[1] - have[1]]
    return pads


def pad_constant(tensor: Tensor, pads: Sequence[int], value: float) -> Tensor:
    """Pad or crop the last dimensions; where more is cropped than is there, torch's own padding fails."""
    if not any(pads):
        return tensor
    added: list[int] = []
    for place in range(len(pads) // 2):
        dim, (before, after) = tensor.dim() - 1 - place, pads[2 * place : 2 * place + 2]
        length = tensor.shape[dim]
        start, stop = max(-before, 0), min(length + after, length)
        nothing = start >= stop
        tensor = tensor.narrow(dim, 0, 0) if nothing else tensor.narrow(dim, start, stop - start)
        added += [length + before + after, 0] if nothing else [max(before, 0), max(after, 0)]
    return F.pad(tensor, added, value=value)


# ---- constant padding ------------------------------------------------------------------------------------------------
def _padded(call: OperationCall) -> Windows:
    """The padding of each dimension; torch names the last one first, and crops where it is negative."""
    pads = zip(call.args[1][-2::-2], call.args[1][::-2], strict=True)
    return at_last(call, [Window(1, 1, before, extra=after) for before, after in pads])


def _run_pad(call: OperationCall, output: int, box: Box, tensors: Sequence[Tensor]) -> Tensor:
    return pad_constant(tensors[0], find_padding(call, _padded(call), box), call.args[2])


# ---- windows of operations -------------------------------------------------------------------------------------------
def _find_windows(call: OperationCall) -> Windows:
    extra, transposed = 0, call.op != "windows"
    if call.op == "aten.convolution.default":
        _, weight, _, strides, paddings, dilations, transposed, extra, _ = call.args
        kernels = weight.shape[2:]
    elif call.op == "unpool":
        kernels, strides, paddings, dilations = call.args[2:]
    else:
        kernels, dilations, paddings, strides = call.args[1 if call.op == "windows" else 2 :]
    numbers = (_repeat(each, len(kernels)) for each in (kernels, strides, paddings, dilations, extra))
    return at_last(call, [Window(*each)._replace(transposed=transposed) for each in zip(*numbers, strict=True)])


def _repeat(number: Any, count: int) -> list[int]:
    """Return one number for each spatial dimension."""
    numbers = [number] if isinstance(number, int) else list(number)
    return [int(each) for each in (numbers * count if len(numbers) == 1 else numbers)]


def _read_padded(call: OperationCall, windows: Windows, box: Box, tensor: Tensor) -> tuple[Tensor, list[int]]:
    """Pad what was read with zeros; return the padding that is left to the operation, which pads both ends equally."""
    pads = find_padding(call, windows, box)
    if pads[::2] == pads[1::2] and min(pads) >= 0:
        return tensor, pads[::-2]
    return pad_constant(tensor, pads, 0.0), [0] * len(windows)


def _find_written(call: OperationCall, windows: Windows, box: Box) -> tuple[list[int], list[int]]:
    """Return where a box begins in what transposed windows write of the positions that it reads, and its lengths."""
    starts, lengths = [], []
    for window, span, length in each_window(call, windows, box):
        first, last = window.reach(window.read(span, length) if window.moves else span)
        starts.append(span[0] - first)
        lengths.append(last - first)
    return starts, lengths


# ---- convolutions ----------------------------------------------------------------------------------------------------
def convolve(
    grid: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> Tensor:
    """Convolve.

    On a CPU volumes go to oneDNN: torch leaves it for a loop of its own where they are small, as those of tiles are,
    which takes up to 16 times as long.
    """
    fits = grid.is_cpu and grid.dtype == weight.dtype == torch.float32 and grid.dim() == 5
    if fits and torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled:
        return torch.ops.aten.mkldnn_convolution(grid, weight, bias, padding, stride, dilation, groups)
    return torch.convolution(grid, weight, bias, stride, padding, dilation, False, [0] * len(padding), groups)


def _run_convolution(call: OperationCall, output: int, box: Box, tensors: Sequence[Tensor]) -> Tensor:
    (grid, weight, bias, stride, _, dilation, transposed, _, groups), _ = call.bind(tensors)
    windows, shape = _find_windows(call), box_shape(box)[2:]
    if not transposed:
        grid, padding = _read_padded(call, windows, box, grid)
        return convolve(grid, weight, bias, stride, padding, dilation, groups)
    starts, lengths = _find_written(call, windows, box)
    extra = [max(0, start + own - length) for start, own, length in zip(starts, shape, lengths, strict=True)]
    result = torch.convolution(grid, weight, bias, stride, [0] * len(extra), dilation, True, extra, groups)
    for axis, (start, length) in enumerate(zip(starts, shape, strict=True), start=2):
        result = result.narrow(axis, start, length)
    return result


def _scratch_convolution(call: OperationCall, output: int, box: Box) -> int:
    """The input, where it is copied to pad it; a transposed convolution pads nothing."""
    windows = _find_windows(call)
    pads = find_padding(call, windows, box)
    if call.args[6] or (pads[::2] == pads[1::2] and min(pads) >= 0):
        return 0
    reached = [window.reach(span) for window, span, _ in each_window(call, windows, box)]
    channels = length_of(call.operands[0].layout[1])
    return box_shape(box)[0] * channels * math.prod(last - first for first, last in reached)


# ---- unfolding, folding, unpooling -----------------------------------------------------------------------------------
def _run_windows(call: OperationCall, output: int, box: Box, tensors: Sequence[Tensor]) -> Tensor:
    grid, padding = _read_padded(call, _find_windows(call), box, tensors[0])
    result = F.unfold(grid, call.args[1], call.args[2], tuple(padding), call.args[4])
    return result.view(*result.shape[:2], *box_shape(box)[2:])


def _run_fold(call: OperationCall, output: int, box: Box, tensors: Sequence[Tensor]) -> Tensor:
    """Add up windows, in the order of torch; what no window reaches is 0."""
    kernel, dilation, _, stride = call.args[2:]
    starts, lengths = _find_written(call, _find_windows(call), box)
    result = F.fold(tensors[0].flatten(2), tuple(lengths), kernel, dilation, 0, stride)
    pads: list[int] = []
    for start, own, length in zip(starts, box_shape(box)[2:], lengths, strict=True):
        pads[:0] = [-start, start + own - length]
    return pad_constant(result, pads, 0.0)


def _run_unpool(call: OperationCall, output: int, box: Box, tensors: Sequence[Tensor]) -> Tensor:
    """Write numbers to the positions of their indices that are in the box."""
    numbers, index = tensors
    size, count = call.shape, len(call.args[2])
    spans = [single(each) for each in box[-count:]]
    place, inside, stride = torch.zeros_like(index), torch.ones_like(index, dtype=torch.bool), 1
    for axis in reversed(range(count)):
        own = index % size[axis - count] - spans[axis][0]
        index = index // size[axis - count]
        length = spans[axis][1] - spans[axis][0]
        inside, place, stride = inside & (own >= 0) & (own < length), place + own * stride, stride * length
    result = numbers.new_zeros(*numbers.shape[:-count], stride + 1)
    place = torch.where(inside, place, stride).flatten(-count)
    result = result.scatter(-1, place, numbers.flatten(-count))
    return result.narrow(-1, 0, stride).reshape(*numbers.shape[:-count], *(stop - start for start, stop in spans))


# ---- pooling: small windows, and few that cover the whole ------------------------------------------------------------
def _pool_windows(call: OperationCall) -> Windows:
    """The windows of pooling: arguments are kernel, stride, padding, and for maxima dilation."""
    count = spatial_dims(call)
    given = call.args[1], call.args[2] or call.args[1], call.args[3], call.args[4] if "max" in call.op else 1
    return at_last(call, [Window(*each) for each in zip(*(_repeat(number, count) for number in given), strict=True)])


def _input_lengths(call: OperationCall) -> tuple[int, ...]:
    """The lengths of the spatial dimensions that are pooled."""
    return call.operands[0].shape[-spatial_dims(call) :]


class _Bins(NamedTuple):
    """The positions of each window along an axis."""

    spans: tuple[Span, ...]
    moves: bool = True

    def read(self, span: Span, length: int) -> Span:
        """As of `Moved`: from the first position of the first window to the last of the last."""
        chosen = self.spans[span[0] : span[1]]
        return chosen[0][0], max(last for _, last in chosen)


@functools.lru_cache(256)
def _bins_of(window: Window | None, length: int, result: int, padded: bool) -> _Bins:
    """Return the windows along an axis, with or without padding; None are those of torch's adaptive pooling."""
    if window is None:
        return _Bins(tuple((at * length // result, -(-(at + 1) * length // result)) for at in range(result)))
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


def _part_of(tensor: Tensor, dim: int, span: Span, first: int) -> Tensor:
    """Return the part of a span that is there, perhaps empty; `first` is the first position that is."""
    start, stop = (min(max(index - first, 0), tensor.shape[dim]) for index in span)
    return tensor.narrow(dim, start, stop - start)


def _pool_bins(call: OperationCall, tensor: Tensor, bins: Sequence[Sequence[Span]], spans: Sequence[Span]) -> Parts:
    """Return the sum of each window in the part of the whole that is there, or its maximum and its place in the whole.

    Where nothing of a window is there, the maximum is -inf at a position behind all.
    """
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
                # One position more stands for those that are not there.
                values, own = (part.narrow(dim, 0, 1) for part in (tensor, index))
                values, own = torch.full_like(values, -math.inf), torch.full_like(own, math.prod(lengths))
            largest, at = values.max(dim, keepdim=True)
            best.append((largest, own.gather(dim, at)))
        tensor, index = (torch.cat(parts, dim) for parts in zip(*best, strict=True))
    return tensor, index


def _finish_bins(call: OperationCall, output: int, box: Box, tensors: Sequence[Tensor], parts: Parts) -> Tensor:
    result = parts[output] if "max" in call.op else parts[0] / _divisors(call, box).to(parts[0])
    return result.to(call.infos[output].dtype)


def _run_max_pool(call: OperationCall, output: int, box: Box, tensors: Sequence[Tensor]) -> Tensor:
    """Take maxima; indices are those in the whole."""
    windows, shape = _pool_windows(call), call.operands[0].shape
    least = -math.inf if tensors[0].is_floating_point() else torch.iinfo(tensors[0].dtype).min
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
    return total / _divisors(call, box).to(total)


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


def _reduce_pool(call: OperationCall) -> Reduction | None:
    """Sum, or take maxima, of the part of each window that a tile has."""
    if not _is_summed(call):
        return None
    layout, bins, maxima = call.operands[0].layout, [each.spans for each in _find_bins(call)], "max" in call.op

    def summarize(core: Core, tensors: Sequence[Tensor]) -> Parts:
        spans = [single(each) for each in core(layout)[-len(bins) :]]
        grid = tensors[0] if maxima else tensors[0].double()
        return tuple(part.double() for part in _pool_bins(call, grid, bins, spans))

    return reduce_arrays((0,), call.layouts[0], PEAKS if maxima else ADDED, summarize, _finish_bins)


def _pooled(rule: Rule) -> Rule:
    """Return the rule of pooling from that of its windows: where sums over the whole are taken, it has no axis."""

    def label(call: OperationCall) -> list[Layout]:
        count = spatial_dims(call)
        layout, *_ = rule.label(call)
        if _is_summed(call):
            layout = (*layout[:-count], *((Piece(length_of(dim)),) for dim in layout[-count:]))
        return [layout] * len(call.infos)

    return rule._replace(label=label, reduce=_reduce_pool)


WINDOW_RULES: dict[str, Rule] = {
    "aten.constant_pad_nd.default": reading(_padded, _run_pad),
    "aten.convolution.default": reading(_find_windows, _run_convolution, mixes=True)._replace(
        scratch=_scratch_convolution
    ),
    "windows": reading(_find_windows, _run_windows, mixes=True),
    "fold": reading(_find_windows, _run_fold, mixes=True),
    "unpool": reading(_find_windows, _run_unpool),
    **named(_pooled(reading(_pool_windows, _run_max_pool)), "max_pool2d_with_indices max_pool3d_with_indices"),
    **named(_pooled(reading(_pool_windows, _run_average_pool)), "avg_pool2d avg_pool3d"),
    **named(
        _pooled(reading(lambda call: at_last(call, _find_bins(call)), _run_adaptive)),
        "_adaptive_avg_pool2d _adaptive_avg_pool3d adaptive_max_pool2d adaptive_max_pool3d",
    ),
}
