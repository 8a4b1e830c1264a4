"""Rules of windows: convolutions, unfolding, folding, unpooling. What they read follows from positions of the whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from farfield.streaming.rules.rule import OperationCall, Rule, RuleError, aligned_box, relabel, single
from farfield.streaming.spans import Box, Layout, Piece, Span, box_shape, length_of, whole_box, whole_dim


class Window(NamedTuple):
    """The window of a spatial dimension: position i reads from `i * stride - padding` on, `kernel` positions."""

    kernel: int
    stride: int
    padding: int
    dilation: int = 1
    # Positions that a transposed convolution adds behind.
    extra: int = 0

    @property
    def moves(self) -> bool:
        """Whether a position reads another than itself."""
        return (self.kernel, self.stride, self.padding, self.extra) != (1, 1, 0, 0)

    def read(self, span: Span) -> Span:
        """Return the positions that a span of the output reads, padding included."""
        first = span[0] * self.stride - self.padding
        last = (span[1] - 1) * self.stride - self.padding
        return first, last + self.dilation * (self.kernel - 1) + 1

    def needs(self, spans: Sequence[Span], length: int) -> tuple[Span, ...]:
        """Return the spans of an axis that spans of the output read; those of several axes where nothing moves."""
        return (clip(self.read(single(spans)), length),) if self.moves else tuple(spans)

    def needs_transposed(self, spans: Sequence[Span], length: int) -> tuple[Span, ...]:
        """Return the same for a transposed convolution."""
        return (transposed_read(self, single(spans), length),) if self.moves else tuple(spans)


def clip(span: Span, length: int) -> Span:
    """Return the part of a span within an axis, at least one position."""
    start = min(max(span[0], 0), length - 1)
    return start, max(min(span[1], length), start + 1)


def repeat(number: Any, count: int) -> list[int]:
    """Return one number for each spatial dimension."""
    numbers = [number] if isinstance(number, int) else list(number)
    return [int(each) for each in (numbers * count if len(numbers) == 1 else numbers)]


def split_spatial(call: OperationCall, count: int) -> tuple[Layout, Layout]:
    """Return the dimensions before the last `count`, and these with their lengths in the result."""
    layout = call.operands[0].layout
    spatial = [
        own if length_of(own) == length else relabel(own, length)
        for own, length in zip(layout[-count:], call.shape[-count:], strict=True)
    ]
    return layout[:-count], tuple(spatial)


def find_windows(call: OperationCall) -> list[Window]:
    """The windows of a convolution, of unfolding or of folding."""
    if call.op == "aten.convolution.default":
        return conv_windows(call)
    return given_windows(call.args[1:] if call.op == "windows" else call.args[2:])


def label_mixing(call: OperationCall) -> list[Layout]:
    """Batch as it is, channels without a label, spatial dimensions along the same axes with their new lengths."""
    (batch, _), spatial = split_spatial(call, len(call.shape) - 2)
    refuse_moves(call, find_windows(call))
    return [(batch, (Piece(call.shape[1]),), *spatial)]


def label_each(call: OperationCall) -> list[Layout]:
    """Batch and channels as they are, spatial dimensions along the same axes with their new lengths."""
    leading, spatial = split_spatial(call, spatial_dims(call))
    return [(*leading, *spatial)] * len(call.infos)


def spatial_dims(call: OperationCall) -> int:
    """The number of spatial dimensions in the name of an operation."""
    return int(next(letter for letter in call.op if letter.isdigit()))


def refuse_moves(call: OperationCall, windows: Sequence[Window]) -> None:
    """Refuse windows along a dimension that is that of several axes."""
    for window, own in zip(windows, call.operands[0].layout[-len(windows) :], strict=True):
        if window.moves and len(own) > 1:
            raise RuleError("its spatial dimension is that of several axes")


def mixing_box(call: OperationCall, box: Box, spans: Sequence[tuple[Span, ...]]) -> Box:
    """Return the box of the first operand: batch of the output's, all channels, these spatial spans."""
    return (box[0], whole_dim(call.operands[0].layout[1]), *spans)


def others(call: OperationCall) -> list[Box]:
    """Return the boxes of all operands but the first, whole."""
    return [whole_box(operand.layout) for operand in call.operands[1:]]


def take_channels(call: OperationCall, result: Tensor, box: Box) -> Tensor:
    """Return the channels of a box from a result that has all."""
    start, stop = single(box[1])
    return result if stop - start == result.shape[1] else result.narrow(1, start, stop - start)


def padded_numbers(call: OperationCall, box: Box, windows: Sequence[Window], channels: int) -> int:
    """Return how many numbers are copied where windows reach beyond the whole on one side alone."""
    lengths = call.operands[0].shape[-len(windows) :]
    number, equal = box_shape(box)[0] * channels, True
    for window, spans, length in zip(windows, box[-len(windows) :], lengths, strict=True):
        wanted = window.read(single(spans)) if window.moves else (0, length)
        have = clip(wanted, length)
        equal = equal and have[0] - wanted[0] == wanted[1] - have[1]
        number *= wanted[1] - wanted[0]
    return 0 if equal else number


def scratch_convolution(call: OperationCall, output: int, box: Box) -> int:
    """The padded input; a transposed convolution pads nothing."""
    return 0 if call.args[6] else padded_numbers(call, box, conv_windows(call), call.operands[0].shape[1])


def read_padded(
    tensor: Tensor, windows: Sequence[Window], box: Box, lengths: Sequence[int], value: float
) -> tuple[Tensor, list[int]]:
    """Pad what was read where windows reach beyond the whole; return the padding that is left to the operation.

    The same padding before and after is left to the operation; other paddings are written.
    """
    pads = []
    for window, spans, length in zip(windows, box[-len(windows) :], lengths, strict=True):
        if not window.moves:
            pads.append((0, 0))
            continue
        wanted = window.read(single(spans))
        have = clip(wanted, length)
        pads.append((have[0] - wanted[0], wanted[1] - have[1]))
    if value == 0 and all(before == after >= 0 for before, after in pads):
        return tensor, [before for before, _ in pads]
    return pad_constant(tensor, [each for pair in reversed(pads) for each in pair], value), [0] * len(pads)


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


# ---- convolutions ----------------------------------------------------------------------------------------------------
def conv_windows(call: OperationCall) -> list[Window]:
    """The windows of a convolution."""
    (_, weight, _, *numbers, _), count = call.args, len(call.shape) - 2
    each = (repeat(number, count) for number in (*numbers[:3], numbers[4]))
    return [Window(kernel, *rest) for kernel, *rest in zip(weight.shape[2:], *each, strict=True)]


def transposed_read(window: Window, span: Span, length: int) -> Span:
    """Return the positions of the input that a span of a transposed convolution's output depends on."""
    reach = window.dilation * (window.kernel - 1)
    first = min(-(-(span[0] + window.padding - reach) // window.stride), (span[0] + window.padding) // window.stride)
    return clip((first, (span[1] - 1 + window.padding) // window.stride + 1), length)


def needs_convolution(call: OperationCall, output: int, box: Box) -> list[Box]:
    """The windows of a box, all channels, the whole weight and bias."""
    lengths = call.operands[0].shape[2:]
    read = [
        window.needs_transposed(spans, length) if call.args[6] else window.needs(spans, length)
        for window, spans, length in zip(conv_windows(call), box[2:], lengths, strict=True)
    ]
    return [mixing_box(call, box, read), *others(call)]


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


def run_convolution(call: OperationCall, output: int, box: Box, tensors: Sequence[Tensor]) -> Tensor:
    """Convolve what was read; zeros stand for what is beyond the whole."""
    grid, weight = tensors[:2]
    bias = tensors[2] if len(tensors) > 2 else None
    windows, lengths = conv_windows(call), call.operands[0].shape[2:]
    stride, dilation, groups = call.args[3], call.args[5], call.args[8]
    if not call.args[6]:
        grid, padding = read_padded(grid, windows, box, lengths, 0.0)
        return take_channels(call, convolve(grid, weight, bias, stride, padding, dilation, groups), box)
    extra, starts = [], []
    for window, spans, length in zip(windows, box[2:], lengths, strict=True):
        if not window.moves:
            extra.append(0)
            starts.append(0)
            continue
        start, stop = single(spans)
        first, last = transposed_read(window, (start, stop), length)
        begins = first * window.stride - window.padding
        ends = begins + (last - first - 1) * window.stride + window.dilation * (window.kernel - 1) + 1
        extra.append(max(0, stop - ends))
        starts.append(start - begins)
    result = torch.convolution(grid, weight, bias, stride, [0] * len(extra), dilation, True, extra, groups)
    for axis, (start, length) in enumerate(zip(starts, box_shape(box)[2:], strict=True), start=2):
        result = result.narrow(axis, start, length)
    return take_channels(call, result, box)


# ---- unfolding and folding -------------------------------------------------------------------------------------------
def given_windows(arguments: Sequence[Any]) -> list[Window]:
    """The windows of kernel, dilation, padding and stride, as `unfold` and `fold` of torch order them."""
    kernels, dilations, paddings, strides = arguments
    return [Window(*each) for each in zip(kernels, strides, paddings, dilations, strict=True)]


def needs_windows(call: OperationCall, output: int, box: Box) -> list[Box]:
    """The windows of a box, all channels."""
    windows, lengths = given_windows(call.args[1:]), call.operands[0].shape[2:]
    read = [window.needs(spans, length) for window, spans, length in zip(windows, box[2:], lengths, strict=True)]
    return [mixing_box(call, box, read)]


def run_windows(call: OperationCall, output: int, box: Box, tensors: Sequence[Tensor]) -> Tensor:
    """Take windows; zeros stand for what is beyond the whole."""
    windows = given_windows(call.args[1:])
    grid, padding = read_padded(tensors[0], windows, box, call.operands[0].shape[2:], 0.0)
    result = F.unfold(grid, call.args[1], call.args[2], tuple(padding), call.args[4])
    return take_channels(call, result.view(*result.shape[:2], *box_shape(box)[2:]), box)


def needs_fold(call: OperationCall, output: int, box: Box) -> list[Box]:
    """The windows that reach into a box."""
    windows, lengths = given_windows(call.args[2:]), call.operands[0].shape[2:]
    read = [
        (transposed_read(window, single(spans), length),)
        for window, spans, length in zip(windows, box[2:], lengths, strict=True)
    ]
    return [mixing_box(call, box, read)]


def run_fold(call: OperationCall, output: int, box: Box, tensors: Sequence[Tensor]) -> Tensor:
    """Add up windows, in the order of torch."""
    windows, lengths = given_windows(call.args[2:]), call.operands[0].shape[2:]
    kernel, dilation, _, stride = call.args[2:]
    size, starts = [], []
    for window, spans, length in zip(windows, box[2:], lengths, strict=True):
        start, stop = single(spans)
        first, last = transposed_read(window, (start, stop), length)
        begins = first * window.stride - window.padding
        size.append((last - first - 1) * window.stride + window.dilation * (window.kernel - 1) + 1)
        starts.append(start - begins)
    result = F.fold(tensors[0].flatten(2), tuple(size), kernel, dilation, 0, stride)
    return take_channels(call, take_padded(result, starts, box), box)


def take_padded(result: Tensor, starts: Sequence[int], box: Box) -> Tensor:
    """Return the spatial part of a box that begins at `starts` of a result; what it does not have is 0."""
    pads: list[int] = []
    for length, start, spans in zip(result.shape[-len(starts) :], starts, box[-len(starts) :], strict=True):
        count = single(spans)[1] - single(spans)[0]
        pads[:0] = [-start, start + count - length]
    return pad_constant(result, pads, 0.0)


# ---- unpooling -------------------------------------------------------------------------------------------------------
def unpool_windows(call: OperationCall) -> list[Window]:
    """The windows of the pooling that the indices come from."""
    return [Window(*each) for each in zip(*call.args[2:], strict=True)]


def needs_unpool(call: OperationCall, output: int, box: Box) -> list[Box]:
    """The windows that cover a box, of the numbers and of their indices."""
    windows = unpool_windows(call)
    lengths = call.operands[0].shape[-len(windows) :]
    read = [
        (transposed_read(window, single(spans), length),)
        for window, spans, length in zip(windows, box[-len(windows) :], lengths, strict=True)
    ]
    return [(*aligned_box(each.layout, call.layouts[0], box)[: -len(windows)], *read) for each in call.operands]


def run_unpool(call: OperationCall, output: int, box: Box, tensors: Sequence[Tensor]) -> Tensor:
    """Write numbers to the positions of their indices that are in the box."""
    numbers, index = tensors
    size, count = call.shape, len(unpool_windows(call))
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


def label_unpool(call: OperationCall) -> list[Layout]:
    """Batch and channels as they are, spatial dimensions along the same axes with their new lengths."""
    refuse_moves(call, unpool_windows(call))
    leading, spatial = split_spatial(call, len(unpool_windows(call)))
    return [(*leading, *spatial)]


WINDOW_RULES: dict[str, Rule] = {
    "aten.convolution.default": Rule(label_mixing, needs_convolution, run_convolution, scratch=scratch_convolution),
    "windows": Rule(label_mixing, needs_windows, run_windows),
    "fold": Rule(label_mixing, needs_fold, run_fold),
    "unpool": Rule(label_unpool, needs_unpool, run_unpool),
}
