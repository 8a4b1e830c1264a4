"""Rules of operations that read positions from others: resampling, padding, positions that are known."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from farfield.streaming.graph import find_operation
from farfield.streaming.rules.rule import OperationCall, Rule, relabel, single
from farfield.streaming.rules.windows import clip, label_each, pad_constant, spatial_dims
from farfield.streaming.spans import Box, Layout, Span, box_shape, length_of


# ---- positions that are read from others -----------------------------------------------------------------------------
class Taps(NamedTuple):
    """How positions along a dimension are read from others: result[i] = Σ_t weights[t, i] · value[places[t, i]]."""

    places: Tensor
    weights: Tensor | None = None

    def read(self, span: Span) -> Span:
        """Return the positions that a span reads."""
        part = self.places[:, span[0] : span[1]]
        return int(part.min()), int(part.max()) + 1

    def apply(self, tensor: Tensor, dim: int, span: Span) -> Tensor:
        """Return a span of the result from the positions that it reads."""
        index = self.places[:, span[0] : span[1]] - self.read(span)[0]
        result = tensor.index_select(dim, index[0].to(tensor.device))
        if self.weights is None:
            return result
        shape = [-1 if axis == dim else 1 for axis in range(tensor.dim())]
        first, *factors = self.weights[:, span[0] : span[1]].to(tensor)
        result.mul_(first.view(shape))
        for each, factor in zip(index[1:], factors, strict=True):
            result.addcmul_(tensor.index_select(dim, each.to(tensor.device)), factor.view(shape))
        return result


def padded_index(op: str, length: int, before: int, result: int) -> Taps:
    """Return the positions of reflecting or replicating padding."""
    place = torch.arange(result) - before
    if "replication" in op:
        return Taps(place.clamp(0, length - 1)[None])
    period = max(2 * (length - 1), 1)
    place = place.abs() % period
    return Taps(torch.minimum(place, period - place)[None])


class Axis(NamedTuple):
    """An axis that is resampled.

    Attributes:
        length: Its length.
        result: Its new length.
        scale: The factor that was given; None where the size was.
        dtype: In which torch computes places: float64 for volumes in it, float32 for others.
    """

    length: int
    result: int
    scale: float | None
    dtype: torch.dtype


@functools.lru_cache(256)
def nearest_taps(op: str, axis: Axis, dims: int, wide: bool) -> Taps:
    """Return where torch reads the nearest position: a ramp through the operation itself.

    Where a place lies between two positions, torch's kernels round to different ones, and which runs depends on whether
    height and width together are more than 128 (`wide`).
    """
    ramp = torch.arange(axis.length, dtype=axis.dtype).view(1, 1, *[1] * (dims - 1), axis.length)
    size = [*([129 if wide else 1] * (dims - 1)), axis.result]
    result = find_operation(op)(ramp, size, *[None] * (dims - 1), axis.scale)
    return Taps(result[(0, 0, *[0] * (dims - 1))].long()[None])


@functools.lru_cache(256)
def linear_taps(mode: str, axis: Axis, corners: bool) -> Taps:
    """Return where torch interpolates between, in the precision in which it computes places."""
    length, result, scale, dtype = axis
    place = torch.arange(result, dtype=dtype)
    if corners:
        source = place * (torch.tensor(float(length - 1), dtype=dtype) / (result - 1) if result > 1 else 0.0)
    else:
        step = torch.tensor(1.0 / scale if scale else length / result, dtype=dtype)
        source = step * (place + 0.5) - 0.5
    if mode == "linear":
        source = source.clamp(min=0)
        low = source.long().clamp(max=length - 1)
        share = source - low
        return Taps(torch.stack([low, (low + 1).clamp(max=length - 1)]), torch.stack([1 - share, share]))
    low = source.floor()
    share = source - low
    index = torch.stack([(low.long() + tap).clamp(0, length - 1) for tap in (-1, 0, 1, 2)])
    return Taps(index, torch.stack([cubic(share + 1), cubic(share), cubic(1 - share), cubic(2 - share)]))


def cubic(distance: Tensor) -> Tensor:
    """The weight of bicubic interpolation at a distance, with a = -0.75."""
    near = (1.25 * distance - 2.25) * distance * distance + 1
    far = ((-0.75 * distance + 3.75) * distance - 6) * distance + 3
    return torch.where(distance <= 1, near, far)


# Name of the operation without its dimensions -> mode.
MODES = {
    "upsample_nearest": "nearest",
    "_upsample_nearest_exact": "nearest",
    "upsample_linear": "linear",
    "upsample_bilinear": "linear",
    "upsample_trilinear": "linear",
    "upsample_bicubic": "cubic",
}


def upsample_taps(call: OperationCall) -> list[Taps]:
    """The positions that an interpolation reads along each spatial dimension."""
    mode, count = MODES[call.op.split(".")[1].rstrip("d").rstrip("123")], spatial_dims(call)
    nearest, lengths, results = mode == "nearest", call.operands[0].shape, call.shape[-count:]
    # A factor for each dimension, or None where the size was given.
    scales = call.args[2 if nearest else 3 :]
    dtype = torch.float64 if call.dtype == torch.float64 else torch.float32
    axes = [Axis(*each, dtype) for each in zip(lengths[-count:], results, scales, strict=True)]
    if nearest:
        return [nearest_taps(call.op, axis, count, count == 2 and sum(results) > 128) for axis in axes]
    return [linear_taps(mode, axis, bool(call.args[2])) for axis in axes]


def pad_taps(call: OperationCall) -> list[Taps]:
    """The positions that reflecting or replicating padding reads."""
    pads, count = call.args[1], spatial_dims(call)
    lengths = call.operands[0].shape[-count:]
    befores = [pads[2 * (count - 1 - axis)] for axis in range(count)]
    return [
        padded_index(call.op, length, before, result)
        for length, before, result in zip(lengths, befores, call.shape[-count:], strict=True)
    ]


def tapped(find: Callable[[OperationCall], list[Taps]]) -> Rule:
    """Return the rule of an operation that reads positions along the last dimensions."""

    def needs(call: OperationCall, output: int, box: Box) -> list[Box]:
        taps = find(call)
        return [
            (
                *box[: -len(taps)],
                *((each.read(single(own)),) for each, own in zip(taps, box[-len(taps) :], strict=True)),
            )
        ]

    def run(call: OperationCall, output: int, box: Box, tensors: Sequence[Tensor]) -> Tensor:
        result, taps = tensors[0], find(call)
        # The last dimension first, as torch sums.
        for place in reversed(range(-len(taps), 0)):
            result = taps[place].apply(result, len(box) + place, single(box[place]))
        return result

    def label(call: OperationCall) -> list[Layout]:
        for own in call.operands[0].layout[-spatial_dims(call) :]:
            relabel(own, length_of(own))
        return label_each(call)

    def scratch(call: OperationCall, output: int, box: Box) -> int:
        # In the last step: what it reads, and one more of what it makes where that is weighted.
        taps = find(call)
        lengths = [*box_shape(box)]
        made = math.prod(lengths)
        first, last = taps[0].read(single(box[-len(taps)]))
        lengths[-len(taps)] = last - first
        read = 0 if len(taps) == 1 else math.prod(lengths)
        return read if taps[0].weights is None else read + made

    return Rule(label, needs, run, scratch=scratch)


# ---- positions that are known ----------------------------------------------------------------------------------------
def label_take(call: OperationCall) -> list[Layout]:
    """The same axis, with as many positions as are taken."""
    layout, dim = list(call.operands[0].layout), call.args[1]
    layout[dim] = relabel(layout[dim], call.shape[dim])
    return [tuple(layout)]


def needs_take(call: OperationCall, output: int, box: Box) -> list[Box]:
    """From the first to the last that is taken."""
    _, dim, positions = call.args
    chosen = positions[slice(*single(box[dim]))]
    return [(*box[:dim], ((min(chosen), max(chosen) + 1),), *box[dim + 1 :])]


def run_take(call: OperationCall, output: int, box: Box, tensors: Sequence[Tensor]) -> Tensor:
    """Take positions from those that were read."""
    _, dim, positions = call.args
    chosen = torch.tensor(positions[slice(*single(box[dim]))], device=tensors[0].device)
    return tensors[0].index_select(dim, chosen - chosen.min())


# ---- constant padding ------------------------------------------------------------------------------------------------
def pad_before(call: OperationCall) -> list[int]:
    """Return how many positions are padded before each dimension; negative ones are cropped."""
    count, pads = len(call.shape), list(call.args[1])
    return [pads[2 * (count - 1 - dim)] if 2 * (count - 1 - dim) < len(pads) else 0 for dim in range(count)]


def label_pad(call: OperationCall) -> list[Layout]:
    """The same axes, longer."""
    layout = call.operands[0].layout
    return [
        tuple(
            own if length_of(own) == length else relabel(own, length)
            for own, length in zip(layout, call.shape, strict=True)
        )
    ]


def needs_pad(call: OperationCall, output: int, box: Box) -> list[Box]:
    """What of a box is no padding."""
    read = []
    for own, spans, before, length in zip(call.operands[0].layout, box, pad_before(call), call.shape, strict=True):
        unchanged = length_of(own) == length and not before
        start, stop = (0, 0) if unchanged else single(spans)
        read.append(spans if unchanged else (clip((start - before, stop - before), length_of(own)),))
    return [tuple(read)]


def run_pad(call: OperationCall, output: int, box: Box, tensors: Sequence[Tensor]) -> Tensor:
    """Pad where the box is beyond the operand."""
    value = call.args[2]
    pads: list[int] = []
    for own, spans, before, length in zip(call.operands[0].layout, box, pad_before(call), call.shape, strict=True):
        if length_of(own) == length and not before:
            pads[:0] = [0, 0]
            continue
        start, stop = single(spans)
        first, last = clip((start - before, stop - before), length_of(own))
        pads[:0] = [first - (start - before), (stop - before) - last]
    return pad_constant(tensors[0], pads, value)


SAMPLING_RULES: dict[str, Rule] = {
    "take": Rule(label_take, needs_take, run_take),
    "aten.constant_pad_nd.default": Rule(label_pad, needs_pad, run_pad),
    **{f"aten.{kind}_pad{n}d.default": tapped(pad_taps) for kind in ("reflection", "replication") for n in (1, 2, 3)},
    **{
        f"aten.{name}{n}d.default": tapped(upsample_taps)
        for name, n in (
            *((kind, n) for kind in ("upsample_nearest", "_upsample_nearest_exact") for n in (1, 2, 3)),
            ("upsample_linear", 1),
            ("upsample_bilinear", 2),
            ("upsample_trilinear", 3),
            ("upsample_bicubic", 2),
        )
    },
}
