"""Operations that are recorded as others: views, slices and concatenations of values, whatever torch calls them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes as with_numbers

from farfield.streaming.operations import Info, RecordingError, Value
from farfield.streaming.writer import Recording

aten = torch.ops.aten


# `(recorder, arguments, named arguments, outputs)` -> the values that the outputs are; None to record the operation.
Rewrite = Callable[[Recording, Any, Any, Any], "list[Value] | None"]


# ---- views -----------------------------------------------------------------------------------------------------------
def itself(recorder: Recording, args: Any, kwargs: Any, outputs: Any) -> list[Value]:
    """The same value: an alias."""
    return [recorder.value_of(args[0])]


def view(recorder: Recording, args: Any, kwargs: Any, outputs: Any) -> list[Value]:
    """The same numbers in the same order, in other dimensions."""
    if outputs.dtype != args[0].dtype:
        raise RecordingError(f"{recorder.where()} reads a tensor as another dtype without converting it")
    return [recorder.derive("view", args[0], (), outputs)]


def expand(recorder: Recording, args: Any, kwargs: Any, outputs: Any) -> list[Value]:
    """Repeat dimensions of length 1."""
    return [recorder.derive("expand", args[0], (), outputs)]


def permute(recorder: Recording, args: Any, kwargs: Any, outputs: Any) -> list[Value]:
    """Reorder dimensions, as `permute` does."""
    count = args[0].dim()
    return [recorder.derive("permute", args[0], (tuple(dim % count for dim in args[1]),), outputs)]


def transpose(recorder: Recording, args: Any, kwargs: Any, outputs: Any) -> list[Value]:
    """Exchange two dimensions, by default the two of a matrix."""
    count = args[0].dim()
    order = list(range(count))
    if count:
        first, second = (dim % count for dim in args[1:]) if len(args) > 1 else (0, count - 1)
        order[first], order[second] = order[second], order[first]
    return [recorder.derive("permute", args[0], (tuple(order),), outputs)]


def pixel_shuffle(recorder: Recording, args: Any, kwargs: Any, outputs: Any) -> list[Value]:
    """Channels become positions: (…, C r², H, W) -> (…, C, H r, W r)."""
    tensor, factor = args
    *batch, channels, height, width = tensor.shape
    write, first = recorder.write, len(batch)
    value = write.view(recorder.value_of(tensor), [*batch, channels // factor**2, factor, factor, height, width])
    value = write.permute(value, [*range(first), *(first + dim for dim in (0, 3, 1, 4, 2))])
    return [write.view(value, outputs.shape)]


def pixel_unshuffle(recorder: Recording, args: Any, kwargs: Any, outputs: Any) -> list[Value]:
    """Positions become channels: (…, C, H r, W r) -> (…, C r², H, W)."""
    tensor, factor = args
    *batch, channels, height, width = tensor.shape
    write, first = recorder.write, len(batch)
    shape = [*batch, channels, height // factor, factor, width // factor, factor]
    value = write.view(recorder.value_of(tensor), shape)
    value = write.permute(value, [*range(first), *(first + dim for dim in (0, 2, 4, 1, 3))])
    return [write.view(value, outputs.shape)]


def channel_shuffle(recorder: Recording, args: Any, kwargs: Any, outputs: Any) -> list[Value]:
    """Groups of channels one within the other."""
    tensor, groups = args
    batch, channels, *size = tensor.shape
    write = recorder.write
    value = write.view(recorder.value_of(tensor), [batch, groups, channels // groups, *size])
    value = write.permute(value, [0, 2, 1, *range(3, 3 + len(size))])
    return [write.view(value, outputs.shape)]


def rot90(recorder: Recording, args: Any, kwargs: Any, outputs: Any) -> list[Value]:
    """Quarter turns: flips and an exchange of two dimensions."""
    tensor, turns, dims = args
    write, value = recorder.write, recorder.value_of(tensor)
    turns, dims = turns % 4, [dim % tensor.dim() for dim in dims]
    flipped = {0: [], 1: [dims[1]], 2: dims, 3: [dims[0]]}[turns]
    value = write.flip(value, flipped) if flipped else value
    if turns % 2:
        order = list(range(tensor.dim()))
        order[dims[0]], order[dims[1]] = dims[1], dims[0]
        value = write.permute(value, order)
    return [value]


# ---- parts -----------------------------------------------------------------------------------------------------------
def bounds(length: int, start: Any, stop: Any) -> tuple[int, int]:
    """Return the start and stop of a slice as Python does."""
    return slice(start, stop).indices(length)[:2]


def cut(recorder: Recording, args: Any, kwargs: Any, outputs: Any) -> list[Value]:
    """A slice along one dimension."""
    tensor, dim, start, stop, step = args
    dim %= tensor.dim()
    first, _ = bounds(tensor.shape[dim], start, stop)
    return [recorder.derive("slice", tensor, (dim, first, step), outputs)]


def select(recorder: Recording, args: Any, kwargs: Any, outputs: Any) -> list[Value]:
    """One position along a dimension, which goes."""
    tensor, dim, index = args
    dim, index = dim % tensor.dim(), index % tensor.shape[dim]
    write = recorder.write
    return [write.view(write.part(recorder.value_of(tensor), dim, index, index + 1), outputs.shape)]


def split(recorder: Recording, args: Any, kwargs: Any, outputs: Any) -> list[Value]:
    """Consecutive parts along a dimension."""
    tensor, dim, start, parts = args[0], args[2] % args[0].dim(), 0, []
    for each in outputs:
        parts.append(recorder.write.part(recorder.value_of(tensor), dim, start, start + each.shape[dim]))
        start += each.shape[dim]
    return parts


def unbind(recorder: Recording, args: Any, kwargs: Any, outputs: Any) -> list[Value]:
    """All positions along a dimension, which goes."""
    return [select(recorder, (*args, index), {}, each)[0] for index, each in enumerate(outputs)]


def index_select(recorder: Recording, args: Any, kwargs: Any, outputs: Any) -> list[Value] | None:
    """Positions that are known."""
    tensor, dim, index = args
    if not tensor.dim() or not recorder.is_known(index):
        return None
    with with_numbers():
        positions = recorder.numbers_of(index).reshape(-1).tolist()
    return [recorder.write.take(recorder.value_of(tensor), dim % tensor.dim(), positions)]


def index(recorder: Recording, args: Any, kwargs: Any, outputs: Any) -> list[Value] | None:
    """Known positions along one dimension, or along several of which each index runs along its own dimension."""
    tensor, indices = args
    dims = [dim for dim, each in enumerate(indices) if each is not None]
    given = [indices[dim] for dim in dims]
    if any(each.dtype == torch.bool or not recorder.is_known(each) for each in given):
        return None
    own = [[dim for dim in range(-each.dim(), 0) if each.shape[dim] > 1] for each in given]
    together = [dim for dims in own for dim in dims]
    if dims != list(range(dims[0], dims[-1] + 1)) or together != sorted(set(together)):
        return None
    write, value = recorder.write, recorder.value_of(tensor)
    for dim, each in zip(dims, given, strict=True):
        with with_numbers():
            positions = (recorder.numbers_of(each).reshape(-1) % tensor.shape[dim]).tolist()
        value = write.take(value, dim, positions)
    return [write.view(value, outputs.shape)]


# ---- several values as one -------------------------------------------------------------------------------------------
def roll(recorder: Recording, args: Any, kwargs: Any, outputs: Any) -> list[Value]:
    """The end before the beginning, along each dimension."""
    tensor, shifts, dims = args
    write, value = recorder.write, recorder.value_of(tensor)
    if not dims:
        value, dims = write.view(value, (tensor.numel(),)), [0]
    for shift, dim in zip(shifts, dims, strict=True):
        dim %= len(write.shape(value))
        length = write.shape(value)[dim]
        split = -shift % length
        value = write.join([write.part(value, dim, split, length), write.part(value, dim, 0, split)], dim)
    return [write.view(value, tuple(outputs.shape))]


def stack(recorder: Recording, args: Any, kwargs: Any, outputs: Any) -> list[Value]:
    """A concatenation along a new dimension."""
    dim, shape, write = args[1] % outputs.dim(), list(outputs.shape), recorder.write
    shape[dim] = 1
    return [write.join([write.view(recorder.value_of(each), shape) for each in args[0]], dim)]


def repeated(recorder: Recording, args: Any, kwargs: Any, outputs: Any) -> list[Value]:
    """Each dimension expanded by a new one before it, and both viewed as one."""
    times, shape, write = list(args[1]), list(args[0].shape), recorder.write
    shape = [1] * (len(times) - len(shape)) + shape
    paired = [each for pair in zip([1] * len(shape), shape, strict=True) for each in pair]
    value = write.view(recorder.value_of(args[0]), paired)
    paired[::2] = times
    return [write.view(write.append("expand", (value,), paired), tuple(outputs.shape))]


def slice_scatter(recorder: Recording, args: Any, kwargs: Any, outputs: Any) -> list[Value]:
    """What stands before and behind a slice, and what is written to the slice between them."""
    tensor, source, dim, start, stop, step = args
    dim %= tensor.dim()
    length, write, value = tensor.shape[dim], recorder.write, recorder.value_of(tensor)
    first, last = bounds(length, start, stop)
    last = max(first, last)
    if step == 1 or last <= first:
        parts = [write.part(value, dim, 0, first), recorder.value_of(source), write.part(value, dim, last, length)]
        return [write.join(parts, dim)]
    # Every step-th position is chosen from the source, whose positions are repeated to those of the tensor.
    nearest = [min(max((place - first) // step, 0), source.shape[dim] - 1) for place in range(length)]
    chosen = [first <= place < last and (place - first) % step == 0 for place in range(length)]
    shape = [-1 if axis == dim else 1 for axis in range(tensor.dim())]
    with with_numbers():
        condition = write.constant(torch.tensor(chosen, device="cpu").view(shape))
    return [write.where(condition, write.take(recorder.value_of(source), dim, nearest), value)]


def select_scatter(recorder: Recording, args: Any, kwargs: Any, outputs: Any) -> list[Value]:
    """What stands before and behind a position, and what is written to it between them."""
    tensor, source, dim, index = args
    dim, index = dim % tensor.dim(), index % tensor.shape[dim]
    write, value, shape = recorder.write, recorder.value_of(tensor), list(tensor.shape)
    shape[dim] = 1
    middle = write.view(recorder.value_of(source), shape)
    parts = [write.part(value, dim, 0, index), middle, write.part(value, dim, index + 1, tensor.shape[dim])]
    return [write.join(parts, dim)]


def index_put(recorder: Recording, args: Any, kwargs: Any, outputs: Any) -> list[Value] | None:
    """One number written where a condition holds: a choice."""
    tensor, indices, number, accumulate = args
    if accumulate or len(indices) != 1 or number.numel() != 1 or indices[0].dtype != torch.bool:
        return None
    write, mask = recorder.write, indices[0]
    condition = write.view(recorder.value_of(mask), [*mask.shape, *[1] * (tensor.dim() - mask.dim())])
    return [write.where(condition, write.view(recorder.value_of(number), ()), recorder.value_of(tensor))]


# ---- windows ---------------------------------------------------------------------------------------------------------
def unfold(recorder: Recording, args: Any, kwargs: Any, outputs: Any) -> list[Value] | None:
    """Windows of two spatial dimensions, whose positions become one dimension."""
    tensor, kernel, dilation, padding, stride = args
    if tensor.dim() != 4:
        return None
    size = [
        (length + 2 * pad - gap * (width - 1) - 1) // step + 1
        for length, width, gap, pad, step in zip(tensor.shape[2:], kernel, dilation, padding, stride, strict=True)
    ]
    value = recorder.derive("windows", tensor, [list(each) for each in args[1:]], (*outputs.shape[:2], *size))
    return [recorder.write.view(value, outputs.shape)]


def fold(recorder: Recording, args: Any, kwargs: Any, outputs: Any) -> list[Value] | None:
    """Windows added up."""
    tensor, result, kernel, dilation, padding, stride = args
    if tensor.dim() != 3:
        return None
    size = [
        (length + 2 * pad - gap * (width - 1) - 1) // step + 1
        for length, width, gap, pad, step in zip(result, kernel, dilation, padding, stride, strict=True)
    ]
    write = recorder.write
    value = write.view(recorder.value_of(tensor), (*tensor.shape[:2], *size))
    return [write.append("fold", (value, *map(list, args[1:])), outputs.shape)]


def max_unpool(recorder: Recording, args: Any, kwargs: Any, outputs: Any) -> list[Value]:
    """Numbers written to where maxima came from: the windows are those of the pooling.

    Raises:
        RecordingError: If the indices are not those of a pooling of a grid of that size.
    """
    graph, index, count = recorder.graph, recorder.value_of(args[1]), len(args[2])
    while graph.nodes[index.node].op == "view":
        index = graph.nodes[index.node].inputs[0]
    pooling, size = graph.nodes[index.node], tuple(outputs.shape[-count:])
    pools = "max_pool" in pooling.op and "adaptive" not in pooling.op
    pooled = graph.info(pooling.inputs[0]).shape[-len(pooling.args[1]) :] if pools else ()
    if [length for length in pooled if length > 1] != [length for length in size if length > 1]:
        raise RecordingError(
            f"{recorder.where()} unpools to {size} by indices that are not those of pooling a grid of that size"
        )
    # Pooling along one axis is that of two, of which the other has length 1, perhaps in another place.
    kernel, stride, padding, dilation = pooling.args[1:5]
    each = zip(kernel, stride or kernel, padding, dilation, pooled, strict=True)
    windows = iter([window for *window, length in each if length > 1])
    chosen = [next(windows) if length > 1 else [1, 1, 0, 1] for length in size]
    arguments = [list(numbers) for numbers in zip(*chosen, strict=True)]
    return [recorder.derive("unpool", args[0], (recorder.value_of(args[1]), *arguments), outputs)]


# ---- other numbers ---------------------------------------------------------------------------------------------------
def copy(recorder: Recording, args: Any, kwargs: Any, outputs: Any) -> list[Value]:
    """The second tensor in the shape and dtype of the first."""
    write, value = recorder.write, recorder.value_of(args[1])
    if tuple(args[1].shape) != tuple(outputs.shape):
        value = write.append("expand", (value,), outputs.shape)
    if args[1].dtype != outputs.dtype:
        info = Info(tuple(outputs.shape), outputs.dtype)
        value = recorder.graph.add(
            "aten._to_copy.default", (value,), {"dtype": info.dtype}, [info], path=recorder.where()
        )
    return [value]


def filled(number: float) -> Rewrite:
    """Return the rewriting of a function that makes a tensor of one number, whatever the tensor it is made like."""

    def rewrite(recorder: Recording, args: Any, kwargs: Any, outputs: Any) -> list[Value]:
        return [recorder.write.append("full", (number,), outputs.shape, outputs.dtype)]

    return rewrite


def filled_with(place: int) -> Rewrite:
    """Return the rewriting of a function that makes a tensor of the number in one of its arguments."""

    def rewrite(recorder: Recording, args: Any, kwargs: Any, outputs: Any) -> list[Value] | None:
        return filled(args[place])(recorder, args, kwargs, outputs)

    return rewrite


def dropout(recorder: Recording, args: Any, kwargs: Any, outputs: Any) -> list[Value]:
    """The tensor as it is, and what of it is kept: all."""
    kept = recorder.write.append("full", (True,), outputs[1].shape, torch.bool)
    return [recorder.value_of(args[0]), kept]


REWRITTEN: dict[Any, Rewrite] = {
    **dict.fromkeys((aten.alias, aten.detach, aten.lift_fresh, aten.lift), itself),
    **dict.fromkeys(
        (aten.view, aten._unsafe_view, aten.reshape, aten._reshape_alias, aten.squeeze, aten.unsqueeze, aten.unflatten),
        view,
    ),
    **dict.fromkeys((aten.transpose, aten.t), transpose),
    aten.permute: permute,
    aten.expand: expand,
    aten.pixel_shuffle: pixel_shuffle,
    aten.pixel_unshuffle: pixel_unshuffle,
    **dict.fromkeys((aten.channel_shuffle, aten.native_channel_shuffle), channel_shuffle),
    aten.rot90: rot90,
    aten.slice: cut,
    aten.select: select,
    **dict.fromkeys((aten.split, aten.split_with_sizes), split),
    aten.unbind: unbind,
    aten.index_select: index_select,
    **dict.fromkeys((aten.index, aten._unsafe_index), index),
    aten.roll: roll,
    aten.stack: stack,
    aten.repeat: repeated,
    aten.slice_scatter: slice_scatter,
    aten.select_scatter: select_scatter,
    aten.index_put: index_put,
    aten.im2col: unfold,
    aten.col2im: fold,
    **dict.fromkeys((aten.max_unpool2d, aten.max_unpool3d), max_unpool),
    aten.copy: copy,
    aten.native_dropout: dropout,
    **dict.fromkeys(
        (aten.new_zeros, aten.zeros_like, aten.zeros, aten.zero, aten.new_empty, aten.empty, aten.empty_like), filled(0)
    ),
    **dict.fromkeys((aten.new_ones, aten.ones_like, aten.ones), filled(1)),
    **dict.fromkeys((aten.full, aten.full_like), filled_with(1)),
    aten.new_full: filled_with(2),
}
