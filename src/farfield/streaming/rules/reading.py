"""Rules of operations that read other positions along a dimension: slices, flips, padding, resampling."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from farfield.streaming.graph import find_operation
from farfield.streaming.rules.rule import SEVERAL_AXES, OperationCall, Rule, RuleError, Run, named, relabel, single
from farfield.streaming.spans import Box, Layout, Span, box_shape, constant_layout, length_of, whole_box, whole_dim

# Dimension of the first operand -> how it is read: `moves`, whether a position reads another than itself, and
# `read(span, length)`, the positions that a span of the result reads, of so many. Others are read as they are.
Readers = Mapping[int, Any]


def reading(find: Callable[[OperationCall], Readers], run: Run, *, mixes: bool = False) -> Rule:
    """Return the rule of an operation whose result has the dimensions of its operands, read along some by `find`.

    Args:
        find: `(call)` -> how dimensions are read. Each runs along the same axis in the result, with its length there.
        run: As of `Rule`.
        mixes: Whether dimension 1, and all operands but the first, are read whole.
    """

    def label(call: OperationCall) -> list[Layout]:
        readers, labels = find(call), list(constant_layout(call.shape))
        for dim, own in enumerate(call.operands[0].layout):
            if len(own) > 1 and dim in readers and readers[dim].moves:
                raise RuleError(SEVERAL_AXES)
            if not (mixes and dim == 1):
                labels[dim] = own if length_of(own) == call.shape[dim] else relabel(own, call.shape[dim])
        return [tuple(labels)] * len(call.infos)

    def needs(call: OperationCall, output: int, box: Box) -> list[Box]:
        readers, needed = find(call), []
        for dim, own in enumerate(call.operands[0].layout):
            if mixes and dim == 1:
                needed.append(whole_dim(own))
            elif dim in readers and readers[dim].moves:
                needed.append((readers[dim].read(single(box[dim]), length_of(own)),))
            else:
                needed.append(box[dim])
        others = call.operands[1:]
        return [tuple(needed), *(whole_box(each.layout) if mixes else tuple(needed) for each in others)]

    return Rule(label, needs, run)


def at_last(call: OperationCall, readers: Sequence[Any]) -> dict[int, Any]:
    """Return readers of the last dimensions of the first operand by dimension."""
    return dict(enumerate(readers, len(call.operands[0].layout) - len(readers)))


def spatial_dims(call: OperationCall) -> int:
    """The number of spatial dimensions in the name of an operation."""
    return int(next(letter for letter in call.op if letter.isdigit()))


# ---- windows ---------------------------------------------------------------------------------------------------------
class Window(NamedTuple):
    """The window of a dimension: position i reads from `i * stride - padding` on, `kernel` positions.

    Where it is transposed, position i of the operand is written there.
    """

    kernel: int
    stride: int
    padding: int
    dilation: int = 1
    # Positions that are added behind.
    extra: int = 0
    transposed: bool = False

    @property
    def moves(self) -> bool:
        """Whether a position reads another than itself."""
        return (self.kernel, self.stride, self.padding, self.extra) != (1, 1, 0, 0)

    def reach(self, span: Span) -> Span:
        """Return where the windows of a span begin and end, padding included."""
        ends = [place * self.stride - self.padding for place in (span[0], span[1] - 1)]
        return min(ends), max(ends) + self.dilation * (self.kernel - 1) + 1

    def read(self, span: Span, length: int) -> Span:
        """As of `Readers`."""
        if not self.transposed:
            return clip(self.reach(span), length)
        first, last = span[0] + self.padding, span[1] - 1 + self.padding
        first = min(-(-(first - self.dilation * (self.kernel - 1)) // self.stride), first // self.stride)
        return clip((first, last // self.stride + 1), length)


Windows = Mapping[int, Window]


def clip(span: Span, length: int) -> Span:
    """Return the part of a span within an axis, at least one position."""
    start = min(max(span[0], 0), length - 1)
    return start, max(min(span[1], length), start + 1)


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


# ---- slices, flips, constant padding ---------------------------------------------------------------------------------
def _run_slice(call: OperationCall, output: int, box: Box, tensors: Sequence[Tensor]) -> Tensor:
    _, dim, _, step = call.args
    return tensors[0] if step == 1 else tensors[0][(slice(None),) * dim + (slice(None, None, step),)]


def _flipped(call: OperationCall) -> Windows:
    dims = [dim % len(call.shape) for dim in call.args[1]]
    return {dim: Window(1, -1, 1 - call.shape[dim]) for dim in dims}


def _run_unfold(call: OperationCall, output: int, box: Box, tensors: Sequence[Tensor]) -> Tensor:
    _, dim, size, step = call.args
    start, stop = single(box[-1])
    return tensors[0].unfold(dim % (len(box) - 1), size, step)[..., start:stop]


def _padded(call: OperationCall) -> Windows:
    """The padding of each dimension; torch names the last one first, and crops where it is negative."""
    pads = zip(call.args[1][-2::-2], call.args[1][::-2], strict=True)
    return at_last(call, [Window(1, 1, before, extra=after) for before, after in pads])


def _run_pad(call: OperationCall, output: int, box: Box, tensors: Sequence[Tensor]) -> Tensor:
    return pad_constant(tensors[0], find_padding(call, _padded(call), box), call.args[2])


# ---- positions that are read from others -----------------------------------------------------------------------------
class _Taps(NamedTuple):
    """How positions along a dimension are read from others: result[i] = Σ_t weights[t, i] · value[places[t, i]]."""

    places: Tensor
    weights: Tensor | None = None
    moves: bool = True

    def read(self, span: Span, length: int) -> Span:
        """As of `Readers`."""
        part = self.places[:, span[0] : span[1]]
        return int(part.min()), int(part.max()) + 1

    def apply(self, tensor: Tensor, dim: int, span: Span) -> Tensor:
        """Return a span of the result from the positions that it reads."""
        index = self.places[:, span[0] : span[1]]
        index = (index - index.min()).to(tensor.device)
        result = tensor.index_select(dim, index[0])
        if self.weights is None:
            return result
        shape = [-1 if axis == dim else 1 for axis in range(tensor.dim())]
        first, *factors = self.weights[:, span[0] : span[1]].to(tensor)
        result.mul_(first.view(shape))
        for each, factor in zip(index[1:], factors, strict=True):
            result.addcmul_(tensor.index_select(dim, each), factor.view(shape))
        return result


def _tapped(find: Callable[[OperationCall], Mapping[int, _Taps]]) -> Rule:
    def run(call: OperationCall, output: int, box: Box, tensors: Sequence[Tensor]) -> Tensor:
        result, taps = tensors[0], find(call)
        # The last dimension first, as torch sums.
        for dim in sorted(taps, reverse=True):
            result = taps[dim].apply(result, dim, single(box[dim]))
        return result

    def scratch(call: OperationCall, output: int, box: Box) -> int:
        # In the last step: what it reads, and one more of what it makes where that is weighted.
        taps, lengths = find(call), [*box_shape(box)]
        first, made = min(taps), math.prod(lengths)
        start, stop = taps[first].read(single(box[first]), 0)
        lengths[first] = stop - start
        read = 0 if len(taps) == 1 else math.prod(lengths)
        return read if taps[first].weights is None else read + made

    return reading(find, run)._replace(scratch=scratch)


@functools.lru_cache(256)
def _known_taps(positions: tuple[int, ...]) -> _Taps:
    return _Taps(torch.tensor(positions)[None])


@functools.lru_cache(256)
def _padded_taps(op: str, length: int, before: int, result: int) -> _Taps:
    """Return the positions of reflecting or replicating padding."""
    place = torch.arange(result) - before
    if "replication" in op:
        return _Taps(place.clamp(0, length - 1)[None])
    period = max(2 * (length - 1), 1)
    place = place.abs() % period
    return _Taps(torch.minimum(place, period - place)[None])


def _pad_taps(call: OperationCall) -> Readers:
    count, pads = spatial_dims(call), call.args[1]
    each = zip(call.operands[0].shape[-count:], pads[-2::-2], call.shape[-count:], strict=True)
    return at_last(call, [_padded_taps(call.op, *axis) for axis in each])


# ---- resampling ------------------------------------------------------------------------------------------------------
# An axis that is resampled: its length, its new length, the factor that was given, None where the size was, and the
# dtype in which torch computes places: float64 for volumes in it, float32 for others.
_Axis = tuple[int, int, float | None, torch.dtype]


@functools.lru_cache(256)
def _nearest_taps(op: str, axis: _Axis, dims: int, wide: bool) -> _Taps:
    """Return where torch reads the nearest position: a ramp through the operation itself.

    Where a place lies between two positions, torch's kernels round to different ones, and which runs depends on whether
    height and width together are more than 128 (`wide`).
    """
    length, result, scale, dtype = axis
    ramp = torch.arange(length, dtype=dtype).view(1, 1, *[1] * (dims - 1), length)
    places = find_operation(op)(ramp, [*[129 if wide else 1] * (dims - 1), result], *[None] * (dims - 1), scale)
    return _Taps(places[(0, 0, *[0] * (dims - 1))].long()[None])


@functools.lru_cache(256)
def _weighted_taps(cubic: bool, axis: _Axis, corners: bool) -> _Taps:
    """Return where torch interpolates between, in the precision in which it computes places."""
    length, result, scale, dtype = axis
    place = torch.arange(result, dtype=dtype)
    if corners:
        source = place * (torch.tensor(float(length - 1), dtype=dtype) / (result - 1) if result > 1 else 0.0)
    else:
        step = torch.tensor(1.0 / scale if scale else length / result, dtype=dtype)
        source = step * (place + 0.5) - 0.5
    if not cubic:
        source = source.clamp(min=0)
        low = source.long().clamp(max=length - 1)
        share = source - low
        return _Taps(torch.stack([low, (low + 1).clamp(max=length - 1)]), torch.stack([1 - share, share]))
    low = source.floor()
    share = source - low
    index = torch.stack([(low.long() + tap).clamp(0, length - 1) for tap in (-1, 0, 1, 2)])
    return _Taps(index, torch.stack([_cubic_weight(each) for each in (share + 1, share, 1 - share, 2 - share)]))


def _cubic_weight(distance: Tensor) -> Tensor:
    near = (1.25 * distance - 2.25) * distance * distance + 1
    far = ((-0.75 * distance + 3.75) * distance - 6) * distance + 3
    return torch.where(distance <= 1, near, far)


def _upsample_taps(call: OperationCall) -> Readers:
    nearest, cubic, count = "nearest" in call.op, "cubic" in call.op, spatial_dims(call)
    lengths, results = call.operands[0].shape[-count:], call.shape[-count:]
    # A factor for each dimension, or None where the size was given.
    scales = call.args[2 if nearest else 3 :]
    dtype = torch.float64 if call.dtype == torch.float64 else torch.float32
    axes = [(*each, dtype) for each in zip(lengths, results, scales, strict=True)]
    if nearest:
        wide = count == 2 and sum(results) > 128
        return at_last(call, [_nearest_taps(call.op, axis, count, wide) for axis in axes])
    return at_last(call, [_weighted_taps(cubic, axis, bool(call.args[2])) for axis in axes])


PADS = """
    reflection_pad1d reflection_pad2d reflection_pad3d replication_pad1d replication_pad2d replication_pad3d
"""
UPSAMPLES = """
    upsample_nearest1d upsample_nearest2d upsample_nearest3d
    _upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d
    upsample_linear1d upsample_bilinear2d upsample_bicubic2d upsample_trilinear3d
"""
READING_RULES: dict[str, Rule] = {
    "slice": reading(lambda call: {call.args[1]: Window(1, call.args[3], -call.args[2])}, _run_slice),
    "take": _tapped(lambda call: {call.args[1]: _known_taps(tuple(call.args[2]))}),
    "aten.unfold.default": reading(
        lambda call: {call.args[1] % len(call.operands[0].layout): Window(call.args[2], call.args[3], 0)}, _run_unfold
    ),
    "aten.flip.default": reading(_flipped, lambda call, output, box, tensors: tensors[0].flip(call.args[1])),
    "aten.constant_pad_nd.default": reading(_padded, _run_pad),
    **named(_tapped(_pad_taps), PADS),
    **named(_tapped(_upsample_taps), UPSAMPLES),
}
