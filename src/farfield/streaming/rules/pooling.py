"""Rules of pooling: windows where they are small, and sums over the whole where few windows cover it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from farfield.streaming.graph import find_operation
from farfield.streaming.rules.rule import Core, OperationCall, Parts, Reduction, Rule, add, reduce_arrays, single
from farfield.streaming.rules.windows import Window, clip, label_each, read_padded, refuse_moves, repeat, spatial_dims
from farfield.streaming.spans import Box, Layout, Piece, Span, is_cut, length_of

# At most so many windows along an axis, of at least so many positions, are summed over the whole.
FEW, LARGE = 16, 16


def pool_windows(call: OperationCall) -> list[Window]:
    """The windows of pooling: arguments are kernel, stride, padding, and for maxima dilation."""
    count = spatial_dims(call)
    kernel, stride, padding = (
        repeat(each, count) for each in (call.args[1], call.args[2] or call.args[1], call.args[3])
    )
    dilation = repeat(call.args[4], count) if "max" in call.op else [1] * count
    return [Window(*each) for each in zip(kernel, stride, padding, dilation, strict=True)]


def input_lengths(call: OperationCall) -> tuple[int, ...]:
    """The lengths of the spatial dimensions that are pooled."""
    return call.operands[0].shape[-spatial_dims(call) :]


# ---- small windows ---------------------------------------------------------------------------------------------------
def needs_pool(call: OperationCall, output: int, box: Box) -> list[Box]:
    """The windows of a box."""
    count = spatial_dims(call)
    read = [
        window.needs(spans, length)
        for window, spans, length in zip(pool_windows(call), box[-count:], input_lengths(call), strict=True)
    ]
    return [(*box[:-count], *read)]


def run_max_pool(call: OperationCall, output: int, box: Box, tensors: Sequence[Tensor]) -> Tensor:
    """Take maxima; indices are those in the whole."""
    windows, lengths = pool_windows(call), input_lengths(call)
    least = -math.inf if tensors[0].is_floating_point() else torch.iinfo(tensors[0].dtype).min
    grid, _ = read_padded(tensors[0], windows, box, lengths, least)
    kernel, stride, _, dilation, _ = (list(each) for each in zip(*windows, strict=True))
    values, index = find_operation(call.op)(grid, kernel, stride, [0] * len(kernel), dilation)
    return values if output == 0 else flat_index(index, grid.shape[-len(windows) :], windows, box, lengths)


def flat_index(
    index: Tensor, own: Sequence[int], windows: Sequence[Window], box: Box, lengths: Sequence[int]
) -> Tensor:
    """Return indices in the flattened whole from those in the flattened part that was read."""
    whole, rest, stride = torch.zeros_like(index), index, 1
    for axis in reversed(range(len(own))):
        window = windows[axis]
        place = rest % own[axis] + window.read(single(box[axis - len(own)]))[0]
        # A window of which all is -inf has the index of its first position that is no padding.
        place = torch.where(place < 0, place % window.dilation, place)
        whole, rest, stride = whole + place * stride, rest // own[axis], stride * lengths[axis]
    return whole


def counts(call: OperationCall, box: Box) -> Tensor:
    """Return by how many positions each window of an average is divided."""
    include_padding, divisor = call.args[5:7]
    if divisor:
        return torch.tensor(float(divisor))
    total, count = torch.ones(()), spatial_dims(call)
    for window, spans, length in zip(pool_windows(call), box[-count:], input_lengths(call), strict=True):
        if not window.moves:
            total = total[..., None].expand(*total.shape, math.prod(stop - start for start, stop in spans))
            continue
        first = torch.arange(*single(spans)) * window.stride - window.padding
        last = (first + window.kernel).clamp(max=length + window.padding)
        if not include_padding:
            first, last = first.clamp(min=0), last.clamp(max=length)
        total = total[..., None] * (last - first)
    return total


def run_average_pool(call: OperationCall, output: int, box: Box, tensors: Sequence[Tensor]) -> Tensor:
    """Average; windows at the border count as torch counts them."""
    windows = pool_windows(call)
    kernel, stride = [each.kernel for each in windows], [each.stride for each in windows]
    grid, padding = read_padded(tensors[0], windows, box, input_lengths(call), 0.0)
    grid = torch.nn.functional.pad(grid, [each for pad in reversed(padding) for each in (pad, pad)])
    total = find_operation(call.op)(grid, kernel, stride, [0] * len(kernel), False, True, 1)
    return total / counts(call, box).to(total)


# ---- windows of any size, one after the other ------------------------------------------------------------------------
# The positions of each window along an axis, without padding.
Bins = tuple[Span, ...]


def find_bins(call: OperationCall) -> list[Bins]:
    """Return the windows along each spatial dimension: those of torch's adaptive pooling, or those that slide."""
    lengths, results = input_lengths(call), call.shape[-spatial_dims(call) :]
    if "adaptive" in call.op:
        return [
            tuple((place * length // result, -(-(place + 1) * length // result)) for place in range(result))
            for length, result in zip(lengths, results, strict=True)
        ]
    return [
        tuple(clip(window.read((place, place + 1)), length) for place in range(result))
        for window, length, result in zip(pool_windows(call), lengths, results, strict=True)
    ]


def add_bins(tensor: Tensor, dim: int, bins: Sequence[Span], first: int) -> Tensor:
    """Sum over the part of each window that is there; `first` is the first position that is."""
    return torch.stack([part_of(tensor, dim, each, first).sum(dim) for each in bins], dim)


def part_of(tensor: Tensor, dim: int, span: Span, first: int) -> Tensor:
    """Return the part of a span that is there, perhaps empty."""
    start, stop = (min(max(index - first, 0), tensor.shape[dim]) for index in span)
    return tensor.narrow(dim, start, stop - start)


class Peaks(NamedTuple):
    """Maxima and where they are in the flattened whole; -inf and a position behind all where nothing is."""

    value: Tensor
    place: Tensor


def pool_peaks(tensor: Tensor, bins: Sequence[Bins], spans: Sequence[Span], lengths: Sequence[int]) -> Peaks:
    """Return the maximum of each window in the part of the whole that is there."""
    count, behind = len(bins), float(math.prod(lengths))
    places = torch.zeros(1, dtype=torch.float64)
    for (start, stop), length in zip(spans, lengths, strict=True):
        places = (places[:, None] * length + torch.arange(start, stop, dtype=torch.float64)).flatten()
    index = places.view([stop - start for start, stop in spans]).to(tensor.device).expand(tensor.shape)
    peaks = Peaks(tensor, index)
    # The last dimension first, so that of equal ones the first in the flattened whole is taken.
    for axis in reversed(range(count)):
        dim = axis - count
        best_of = []
        for each in bins[axis]:
            values, own = (part_of(part, dim, each, spans[axis][0]) for part in peaks)
            if not values.shape[dim]:
                shape = [length for place, length in enumerate(values.shape) if place != dim % values.dim()]
                best_of.append(Peaks(tensor.new_full(shape, -math.inf), index.new_full(shape, behind)))
                continue
            best, at = values.max(dim, keepdim=True)
            best_of.append(Peaks(best.squeeze(dim), own.gather(dim, at).squeeze(dim)))
        peaks = Peaks(*(torch.stack(parts, dim) for parts in zip(*best_of, strict=True)))
    return peaks


def larger_peaks(first: Parts, second: Parts) -> Parts:
    """Take the larger of two maxima and its position; of equal ones, or of two NaN, the first."""
    (value, index), (other, other_index) = first, second
    both = value.isnan() & other.isnan()
    later = other_index < index
    better = (other > value) | (other.isnan() & ~value.isnan()) | (((other == value) | both) & later)
    return torch.where(better, other, value), torch.where(better, other_index, index)


def needs_bins(call: OperationCall, output: int, box: Box) -> list[Box]:
    """From the first position of the first window to the last of the last."""
    count = spatial_dims(call)
    read = []
    for bins, spans in zip(find_bins(call), box[-count:], strict=True):
        start, stop = single(spans)
        read.append(((bins[start][0], max(last for _, last in bins[start:stop])),))
    return [(*box[:-count], *read)]


def chosen_bins(call: OperationCall, box: Box) -> list[Bins]:
    """The windows of a box."""
    return [
        bins[slice(*single(spans))] for bins, spans in zip(find_bins(call), box[-spatial_dims(call) :], strict=True)
    ]


def run_adaptive_average(call: OperationCall, output: int, box: Box, tensors: Sequence[Tensor]) -> Tensor:
    """Sum along each dimension and divide by the number of positions."""
    chosen, result = chosen_bins(call, box), tensors[0]
    for axis, bins in enumerate(chosen):
        result = add_bins(result, axis - len(chosen), bins, bins[0][0])
    return result / divisors(chosen).to(result)


def divisors(chosen: Sequence[Bins]) -> Tensor:
    """Return the number of positions of each window."""
    total = torch.ones(())
    for bins in chosen:
        total = total[..., None] * torch.tensor([float(stop - start) for start, stop in bins])
    return total


def run_adaptive_max(call: OperationCall, output: int, box: Box, tensors: Sequence[Tensor]) -> Tensor:
    """Take maxima; indices are those in the whole."""
    spans = [single(each) for each in needs_bins(call, output, box)[0][-spatial_dims(call) :]]
    peaks = pool_peaks(tensors[0], chosen_bins(call, box), spans, input_lengths(call))
    return peaks.value if output == 0 else peaks.place.long()


# ---- few windows that cover the whole --------------------------------------------------------------------------------
def is_summed(call: OperationCall) -> bool:
    """Whether a pooling has few and large windows along an axis that is cut."""
    if "adaptive" not in call.op and any(window.dilation > 1 for window in pool_windows(call)):
        return False
    layout = call.operands[0].layout[-spatial_dims(call) :]
    return any(
        is_cut(dim) and len(bins) <= FEW and (max(stop - start for start, stop in bins) >= LARGE or len(bins) == 1)
        for dim, bins in zip(layout, find_bins(call), strict=True)
    )


def label_pool(call: OperationCall) -> list[Layout]:
    """As of windows; no axis where sums over the whole are taken."""
    if "adaptive" not in call.op:
        refuse_moves(call, pool_windows(call))
    (layout, *_), count = label_each(call), spatial_dims(call)
    if is_summed(call):
        layout = (*layout[:-count], *((Piece(length_of(dim)),) for dim in layout[-count:]))
    return [layout] * len(call.infos)


def reduce_pool(call: OperationCall) -> Reduction | None:
    """Sum, or take maxima, of the part of each window that a tile has."""
    if not is_summed(call):
        return None
    layout, bins, count = call.operands[0].layout, find_bins(call), spatial_dims(call)
    maxima = "max" in call.op

    def summarize(core: Core, tensors: Sequence[Tensor]) -> Parts:
        tensor, spans = tensors[0], [single(each) for each in core(layout)[-count:]]
        if maxima:
            peaks = pool_peaks(tensor, bins, spans, input_lengths(call))
            return peaks.value.double(), peaks.place
        for axis, each in enumerate(bins):
            tensor = add_bins(tensor.double(), axis - count, each, spans[axis][0])
        return (tensor,)

    def finish(own: OperationCall, output: int, box: Box, tensors: Sequence[Tensor], parts: Parts) -> Tensor:
        if maxima:
            return parts[output].to(own.infos[output].dtype)
        divided = divisors(chosen_bins(own, box)) if "adaptive" in own.op else counts(own, box)
        return (parts[0] / divided.to(parts[0])).to(own.dtype)

    start = (-math.inf, float(math.prod(input_lengths(call)))) if maxima else (0.0,)
    merge = larger_peaks if maxima else add
    return reduce_arrays(
        (0,), [call.layouts[0]] * len(start), start, summarize, merge, finish, lambda box: [box] * len(start)
    )


POOLING_RULES: dict[str, Rule] = {
    **{
        f"aten.max_pool{n}d_with_indices.default": Rule(label_pool, needs_pool, run_max_pool, reduce_pool)
        for n in (2, 3)
    },
    **{f"aten.avg_pool{n}d.default": Rule(label_pool, needs_pool, run_average_pool, reduce_pool) for n in (2, 3)},
    **{
        f"aten._adaptive_avg_pool{n}d.default": Rule(label_pool, needs_bins, run_adaptive_average, reduce_pool)
        for n in (2, 3)
    },
    **{
        f"aten.adaptive_max_pool{n}d.default": Rule(label_pool, needs_bins, run_adaptive_max, reduce_pool)
        for n in (2, 3)
    },
}
