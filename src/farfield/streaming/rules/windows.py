"""Rules of windows: constant padding, convolutions, unfolding, folding, unpooling.

What they read follows from positions of the whole.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from farfield.streaming.rules.rule import OperationCall, Rule, at_last, reading, single
from farfield.streaming.spans import Box, Span, Window, box_shape, clip, length_of

# Channels of a block of oneDNN on processors with AVX-512, the widest.
BLOCK = 16
# Samples, channels and positions along two axes up to which torch does not transpose a convolution by oneDNN.
SMALL = 20_480


CONVOLUTION = "aten.convolution.default"
# A convolution whose result is stored: it computes no numbers, and has its gradients.
HOLLOW = "hollow convolution"


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
    shape, spans = list(tensor.shape), []
    for place in reversed(range(len(pads) // 2)):
        dim, (before, after) = tensor.dim() - 1 - place, pads[2 * place : 2 * place + 2]
        length = tensor.shape[dim]
        shape[dim] = length + before + after
        start = min(max(-before, 0), length)
        tensor = tensor.narrow(dim, start, max(0, min(length + after, length) - start))
        spans.append((dim, min(max(before, 0), shape[dim])))
    # `F.pad` writes the value to all of the result before it copies.
    result = inside = tensor.new_empty(shape)
    for dim, first in spans:
        stop = first + tensor.shape[dim]
        inside.narrow(dim, 0, first).fill_(value)
        inside.narrow(dim, stop, shape[dim] - stop).fill_(value)
        inside = inside.narrow(dim, first, tensor.shape[dim])
    inside.copy_(tensor)
    return result


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
    if call.op in (CONVOLUTION, HOLLOW):
        _, weight, _, strides, paddings, dilations, transposed, extra, _ = call.args
        kernels = weight.shape[2:]
    elif call.op == "unpool":
        kernels, strides, paddings, dilations = call.args[2:]
    else:
        kernels, dilations, paddings, strides = call.args[1 if call.op == "windows" else 2 :]
    numbers = (repeat(each, len(kernels)) for each in (kernels, strides, paddings, dilations, extra))
    return at_last(call, [Window(*each)._replace(transposed=transposed) for each in zip(*numbers, strict=True)])


def repeat(number: Any, count: int) -> list[int]:
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
    """Convolve; on a CPU volumes by oneDNN."""
    given = stride, padding, dilation, False, [0] * len(padding), groups
    # Where they are small, as those of tiles are, torch takes a loop of its own, which takes up to 16 times as long.
    if _is_volume(grid, weight) and torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled:
        return cast(Tensor, _Convolution.apply(grid, weight, bias, *given))
    return torch.convolution(grid, weight, bias, *given)


class _Hollow(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, grid: Tensor, weight: Tensor, bias: Tensor | None, *given: Any) -> Tensor:
        ctx.save_for_backward(grid, weight)
        ctx.bias, ctx.given = None if bias is None else list(bias.shape), given
        shape = torch.convolution(grid.to("meta"), weight.to("meta"), None, *given).shape
        return grid.new_zeros(()).expand(shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        grid, weight = ctx.saved_tensors
        wanted = [*ctx.needs_input_grad[:2], ctx.bias is not None and ctx.needs_input_grad[2]]
        found = find_gradients(grad, grid, weight, ctx.bias, *ctx.given, wanted)
        return *found, *[None] * len(ctx.given)


class _Convolution(_Hollow):
    @staticmethod
    def forward(ctx: Any, grid: Tensor, weight: Tensor, bias: Tensor | None, *given: Any) -> Tensor:
        ctx.save_for_backward(grid, weight)
        ctx.bias, ctx.given = None if bias is None else list(bias.shape), given
        stride, padding, dilation, _, _, groups = given
        return torch.ops.aten.mkldnn_convolution(grid, weight, bias, padding, stride, dilation, groups)


def find_gradients(grad: Tensor, grid: Tensor, weight: Tensor, bias: list[int] | None, *given: Any) -> list[Any]:
    """Return the gradients of a convolution; of a small volume by oneDNN, which torch asks for two samples alone."""
    stride, padding, dilation, transposed, extra, groups, wanted = given
    small = _is_volume(grid, weight) and len(grid) == 1 and math.prod(grid.shape[:4]) <= SMALL
    # Where windows have few numbers torch's loop takes less.
    full = math.prod(weight.shape[2:]) > 1 and min(weight.shape[:2]) >= BLOCK // 2
    if transposed or not (small and full and set(stride) == {1} and groups == 1):
        return list(torch.ops.aten.convolution_backward(grad, grid, weight, bias, *given))
    # Two halves of the first axis, each with its halo. A middle row is in both, and counts in the first.
    before, rows, halo = padding[0], grad.shape[2], dilation[0] * (weight.shape[2] - 1)
    half = -(-rows // 2)
    start, padded = rows - half, F.pad(grid, (0, 0, 0, 0, before, before))
    halves = torch.cat([grad[:, :, :half], grad[:, :, start:]])
    halves[1, :, : half - start] = 0
    grids = torch.cat([padded[:, :, : half + halo], padded[:, :, start:]])
    around = stride, [0, *padding[1:]], dilation, False, extra, 1, wanted
    own, *others = torch.ops.aten.convolution_backward(halves, grids, weight, bias, *around)
    if own is not None:
        result = torch.zeros_like(padded)
        result[:, :, : half + halo] = own[:1]
        result[:, :, start:] += own[1:]
        own = result.narrow(2, before, grid.shape[2])
    return [own, *others]


def _is_volume(grid: Tensor, weight: Tensor) -> bool:
    return grid.is_cpu and grid.dtype == weight.dtype == torch.float32 and grid.dim() == 5


def _has_few_columns(call: OperationCall, windows: Windows) -> bool:
    """Whether torch's loop makes fewer numbers than oneDNN, which fills the channels of volumes up to a block."""
    shape, stride = call.args[1].shape, math.prod(window.stride for window in windows.values())
    return len(shape) == 5 and call.args[8] == 1 and math.prod(shape[1:]) < BLOCK * stride


def _run_convolution(call: OperationCall, output: int, box: Box, tensors: Sequence[Tensor]) -> Tensor:
    (grid, weight, bias, stride, _, dilation, transposed, _, groups), _ = call.bind(tensors)
    windows, shape = _find_windows(call), box_shape(box)[2:]
    if not transposed:
        grid, padding = _read_padded(call, windows, box, grid)
        if call.op == HOLLOW:
            given = stride, padding, dilation, False, [0] * len(padding), groups
            return cast(Tensor, _Hollow.apply(grid, weight, bias, *given))
        return convolve(grid, weight, bias, stride, padding, dilation, groups)
    starts, lengths = _find_written(call, windows, box)
    extra = [max(0, start + own - length) for start, own, length in zip(starts, shape, lengths, strict=True)]
    none = [0] * len(extra)
    if call.op == HOLLOW:
        result = _Hollow.apply(grid, weight, bias, stride, none, dilation, True, extra, groups)
    elif _is_volume(grid, weight) and _has_few_columns(call, windows):
        loop = torch.ops.aten.slow_conv_transpose3d
        result = loop(grid, weight, weight.shape[2:], bias, stride, none, extra, dilation)
    else:
        result = torch.convolution(grid, weight, bias, stride, none, dilation, True, extra, groups)
    for axis, (start, length) in enumerate(zip(starts, shape, strict=True), start=2):
        result = result.narrow(axis, start, length)
    return result


def _scratch_convolution(call: OperationCall, output: int, box: Box) -> int:
    """The input, where it is copied to pad it, and what oneDNN copies: input and output in blocks of channels.

    Of transposed ones it copies either twice, adds a bias to a copy, and torch's loop, which small ones take, makes
    columns.
    """
    windows, (batch, channels, *shape) = _find_windows(call), box_shape(box)
    transposed, operands = call.args[6], length_of(call.operands[0].layout[1])
    spans, made = [window.reach(span) for window, span, _ in each_window(call, windows, box)], shape
    if transposed:
        spans = [window.read(span, length) for window, span, length in each_window(call, windows, box)]
        starts, lengths = _find_written(call, windows, box)
        made = [max(length, start + own) for start, own, length in zip(starts, shape, lengths, strict=True)]
    read, result = batch * math.prod(stop - start for start, stop in spans), batch * math.prod(made)
    kernels = [window.kernel for window in windows.values()]
    # Fewer channels than a block are read as they are, but by a kernel of one position.
    blocks = 0 if operands < BLOCK and max(kernels) > 1 else read * _fill_blocks(operands)
    written = result * _fill_blocks(channels)
    if transposed:
        first = math.prod(stop - start for start, stop in spans[:2])
        has_bias = call.args[2] is not None
        is_large = max(batch, call.args[8]) > 1 or batch * operands * first > SMALL or min(kernels[-2:]) > 3
        if is_large and not _has_few_columns(call, windows):
            beside = max(2 * read * operands + has_bias * result * channels, 2 * result * channels)
        else:
            beside = read * channels * math.prod(kernels) + result
        return beside + (result - batch * math.prod(shape)) * channels
    pads = find_padding(call, windows, box)
    padded = read * operands if pads[::2] != pads[1::2] or min(pads) < 0 else 0
    # The result is made in blocks, and then copied.
    return padded + max(blocks + written - result * channels, written)


def _fill_blocks(channels: int) -> int:
    return -(-channels // BLOCK) * BLOCK


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


WINDOW_RULES: dict[str, Rule] = {
    "aten.constant_pad_nd.default": reading(_padded, _run_pad),
    CONVOLUTION: reading(_find_windows, _run_convolution, mixes=True)._replace(scratch=_scratch_convolution),
    "windows": reading(_find_windows, _run_windows, mixes=True),
    "fold": reading(_find_windows, _run_fold, mixes=True),
    "unpool": reading(_find_windows, _run_unpool),
}
