"""Operations that are recorded as others: views, slices and concatenations of values, whatever torch calls them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes as with_numbers

from farfield.streaming.graph import Info, RecordingError, Value, Writer, run_whole

aten = torch.ops.aten


def _view(write: Writer, output: Info, value: Value, *_: Any) -> Value:
    if output.dtype != write.graph.info(value).dtype:
        raise RecordingError(f"{write.path} reads a tensor as another dtype; fix: tensor.to(dtype), which converts it")
    return write.view(value, output.shape)


def _transpose(write: Writer, output: Info, value: Value, first: int = 0, second: int = -1) -> Value:
    order = list(range(len(output.shape)))
    if order:
        order[first], order[second] = order[second], order[first]
    return write.permute(value, order)


def _rot90(write: Writer, output: Info, value: Value, turns: int, dims: Sequence[int]) -> Value:
    """Quarter turns: flips and an exchange of two dimensions."""
    flipped = {0: [], 1: [dims[1]], 2: list(dims), 3: [dims[0]]}[turns % 4]
    if flipped:
        flipped = [dim % len(output.shape) for dim in flipped]
        value = write.append("aten.flip.default", (value, flipped), write.shape(value))
    return _transpose(write, output, value, *dims) if turns % 2 else value


def _shuffle(write: Writer, output: Info, value: Value, fine: Sequence[int], order: Sequence[int]) -> Value:
    """View a value in finer dimensions, reorder the last of them, and view it in the dimensions of the output."""
    first = len(fine) - len(order)
    value = write.permute(write.view(value, fine), [*range(first), *(first + dim for dim in order)])
    return write.view(value, output.shape)


def _pixel_shuffle(write: Writer, output: Info, value: Value, factor: int) -> Value:
    """Channels become positions: (…, C r², H, W) -> (…, C, H r, W r)."""
    *batch, channels, height, width = write.shape(value)
    fine = [*batch, channels // factor**2, factor, factor, height, width]
    return _shuffle(write, output, value, fine, (0, 3, 1, 4, 2))


def _pixel_unshuffle(write: Writer, output: Info, value: Value, factor: int) -> Value:
    """Positions become channels: (…, C, H r, W r) -> (…, C r², H, W)."""
    *batch, channels, height, width = write.shape(value)
    fine = [*batch, channels, height // factor, factor, width // factor, factor]
    return _shuffle(write, output, value, fine, (0, 2, 4, 1, 3))


def _channel_shuffle(write: Writer, output: Info, value: Value, groups: int) -> Value:
    batch, channels, *size = write.shape(value)
    fine = [batch, groups, channels // groups, *size]
    return _shuffle(write, output, value, fine, (1, 0, *range(2, 2 + len(size))))


def _slice(write: Writer, output: Info, value: Value, dim: int, start: Any, stop: Any, step: int) -> Value:
    dim %= len(output.shape)
    first, *_ = slice(start, stop).indices(write.shape(value)[dim])
    return write.append("slice", (value, dim, first, step), output.shape)


def _select(write: Writer, output: Info, value: Value, dim: int, index: int) -> Value:
    shape = write.shape(value)
    dim %= len(shape)
    index %= shape[dim]
    return write.view(write.part(value, dim, index, index + 1), output.shape)


def _split(write: Writer, outputs: Sequence[Info], value: Value, _: Any, dim: int) -> list[Value]:
    dim, stop, parts = dim % len(write.shape(value)), 0, []
    for output in outputs:
        start, stop = stop, stop + output.shape[dim]
        parts.append(write.part(value, dim, start, stop))
    return parts


def _index_select(write: Writer, output: Info, value: Value, dim: int, index: Value) -> Value | None:
    return _index(write, output, value, [*[None] * (dim % len(output.shape)), index]) if output.shape else None


def _index(write: Writer, output: Info, value: Value, indices: Sequence[Value | None]) -> Value | None:
    """Known positions along one dimension, or along several of which each index runs along its own dimension."""
    given = [(dim, each) for dim, each in enumerate(indices) if each is not None]
    known = all(write.is_known(each) and write.graph.info(each).dtype != torch.bool for _, each in given)
    if not known or write.is_known(value):
        return None
    shapes = [write.shape(each) for _, each in given]
    together = [dim for shape in shapes for dim in range(-len(shape), 0) if shape[dim] > 1]
    first, last = given[0][0], given[-1][0]
    if len(given) != last + 1 - first or together != sorted(set(together)):
        return None
    for dim, each in given:
        with with_numbers():
            positions = run_whole(write.graph, [], each).reshape(-1) % write.shape(value)[dim]
            value = write.take(value, dim, positions.tolist())
    return write.view(value, output.shape)


def _roll(write: Writer, output: Info, value: Value, shifts: Sequence[int], dims: Sequence[int]) -> Value:
    """The end before the beginning, along each dimension."""
    if not dims:
        value, dims = write.view(value, (math.prod(output.shape),)), [0]
    for shift, dim in zip(shifts, dims, strict=True):
        dim %= len(write.shape(value))
        length = write.shape(value)[dim]
        split = -shift % length
        value = write.join([write.part(value, dim, split, length), write.part(value, dim, 0, split)], dim)
    return write.view(value, output.shape)


def _stack(write: Writer, output: Info, values: Sequence[Value], dim: int) -> Value:
    """A concatenation along a new dimension."""
    dim, shape = dim % len(output.shape), list(output.shape)
    shape[dim] = 1
    return write.join([write.view(each, shape) for each in values], dim)


def _cat(write: Writer, output: Info, values: Sequence[Value], dim: int) -> Value | None:
    """What has no positions, as the padding of none before a causal convolution, is left out."""
    present = [each for each in values if 0 not in write.shape(each)]
    if len(present) in (0, len(values)):
        return None
    if len(present) == 1 and write.graph.info(present[0]).dtype == output.dtype:
        return present[0]
    return write.append("aten.cat.default", (present, dim), *output)


def _pad(write: Writer, output: Info, value: Value, pads: Sequence[int], *_: Any) -> Value | None:
    """Padding by nothing, as U-Nets have it for sizes that need none, is the value itself."""
    return None if any(pads) else value


def _repeat(write: Writer, output: Info, value: Value, times: Sequence[int]) -> Value:
    """Each dimension expanded by a new one before it, and both viewed as one."""
    shape = write.shape(value)
    shape = (*[1] * (len(times) - len(shape)), *shape)
    value = write.view(value, [*chain(*((1, length) for length in shape))])
    value = write.append("expand", (value,), [*chain(*zip(times, shape, strict=True))])
    return write.view(value, output.shape)


def _put(write: Writer, value: Value, source: Value, dim: int, start: int, stop: int) -> Value:
    """Put a value between what stands before and behind a part of another one."""
    parts = write.part(value, dim, 0, start), source, write.part(value, dim, stop, write.shape(value)[dim])
    return write.join(parts, dim)


def _select_scatter(write: Writer, output: Info, value: Value, source: Value, dim: int, index: int) -> Value:
    shape = list(output.shape)
    dim %= len(shape)
    index %= shape[dim]
    shape[dim] = 1
    return _put(write, value, write.view(source, shape), dim, index, index + 1)


def _slice_scatter(
    write: Writer, output: Info, value: Value, source: Value, dim: int, start: Any, stop: Any, step: int
) -> Value:
    dim %= len(output.shape)
    length = output.shape[dim]
    first, last, _ = slice(start, stop).indices(length)
    if step == 1 or last <= first:
        return _put(write, value, source, dim, first, max(first, last))
    return _choose(write, value, source, dim, range(first, last, step))


def _choose(write: Writer, value: Value, source: Value, dim: int, places: Sequence[int]) -> Value:
    """Choose between a value and a source whose positions are written to places of it, the last to the same one."""
    numbers, last, nearest = {place: number for number, place in enumerate(places)}, 0, []
    for place in range(write.shape(value)[dim]):
        last = numbers.get(place, last)
        nearest.append(last)
    with with_numbers():
        mask = torch.tensor([place in numbers for place in range(len(nearest))], device="cpu")
        mask = mask.view(-1, *[1] * (len(write.shape(value)) - 1 - dim))
    return write.where(write.constant(mask), write.take(source, dim, nearest), value)


def _index_put(
    write: Writer, output: Info, value: Value, indices: Sequence[Value | None], number: Value, accumulate: bool, *_: Any
) -> Value | None:
    """Numbers written to known positions along one dimension, or one where a condition holds: a choice."""
    given = [(dim, each) for dim, each in enumerate(indices) if each is not None]
    if accumulate or len(given) != 1:
        return None
    ((dim, index),) = given
    shape, dtype = write.graph.info(index)
    if dtype == torch.bool and math.prod(write.shape(number)) == 1:
        condition = write.view(index, [*shape, *[1] * (len(output.shape) - dim - len(shape))])
        return write.where(condition, write.view(number, ()), value)
    if dtype == torch.bool or len(shape) != 1 or not write.is_known(index):
        return None
    with with_numbers():
        places = (run_whole(write.graph, [], index) % output.shape[dim]).tolist()
    if not places:
        return value
    number = write.append("expand", (number,), (*output.shape[:dim], len(places), *output.shape[dim + 1 :]))
    return _choose(write, value, number, dim, places)


def _count_windows(size: Sequence[int], windows: Sequence[Sequence[int]]) -> list[int]:
    """Return how many windows there are along each dimension: kernel, dilation, padding, stride."""
    each = zip(size, *windows, strict=True)
    return [(length + 2 * pad - gap * (width - 1) - 1) // step + 1 for length, width, gap, pad, step in each]


def _unfold(write: Writer, output: Info, value: Value, *windows: Sequence[int]) -> Value | None:
    """Windows of two spatial dimensions, whose positions become one dimension."""
    shape = write.shape(value)
    if len(shape) != 4:
        return None
    size = _count_windows(shape[2:], windows)
    return write.view(write.append("windows", (value, *windows), (*output.shape[:2], *size)), output.shape)


def _fold(write: Writer, output: Info, value: Value, result: Sequence[int], *windows: Sequence[int]) -> Value | None:
    """Windows added up."""
    shape = write.shape(value)
    if len(shape) != 3:
        return None
    value = write.view(value, (*shape[:2], *_count_windows(result, windows)))
    return write.append("fold", (value, result, *windows), output.shape)


def _max_unpool(write: Writer, output: Info, value: Value, index: Value, size: Sequence[int], *_: Any) -> Value:
    """Numbers written to where maxima came from: the windows are those of the pooling."""
    graph, origin = write.graph, index
    while graph.nodes[origin.node].op == "view":
        origin = graph.nodes[origin.node].inputs[0]
    pooling = graph.nodes[origin.node]
    pools = "max_pool" in pooling.op and "adaptive" not in pooling.op
    pooled = write.shape(pooling.inputs[0])[-len(pooling.args[1]) :] if pools else ()
    if [length for length in pooled if length > 1] != [length for length in size if length > 1]:
        raise RecordingError(
            f"{write.path} unpools to {tuple(size)} by indices of a pooled grid of another size; fix: output_size="
        )
    # Pooling along one axis is that of two, of which the other has length 1, perhaps in another place.
    kernel, stride, padding, dilation = pooling.args[1:5]
    each = zip(kernel, stride or kernel, padding, dilation, pooled, strict=True)
    windows = iter([window for *window, length in each if length > 1])
    chosen = [next(windows) if length > 1 else [1, 1, 0, 1] for length in size]
    return write.append("unpool", (value, index, *map(list, zip(*chosen, strict=True))), output.shape)


def _copy(write: Writer, output: Info, _: Value, value: Value, *__: Any) -> Value:
    """The second tensor in the shape and dtype of the first."""
    if write.shape(value) != output.shape:
        value = write.append("expand", (value,), output.shape)
    return write.cast(value, output.dtype)


def as_attention(
    write: Writer, function: Any, args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[str, list[Any], dict[str, Any]] | None:
    """Return a kernel of attention, of whichever device, as torch's function; None for another operation."""
    if "scaled_dot_product" not in str(function):
        return None
    names = [argument.name for argument in function._schema.arguments]
    given = {"scale": None} | dict(zip(names, args, strict=False)) | kwargs
    mask = given.get("attn_mask", given.get("attn_bias"))
    *_, heads, _, _ = write.shape(given["query"])
    key, value = (_repeat_heads(write, given[name], heads) for name in ("key", "value"))
    return "attend", [given["query"], key, value, mask, given["is_causal"], given["scale"]], {}


def _repeat_heads(write: Writer, value: Value, heads: int) -> Value:
    """Return keys or values of a head for each of the queries, where several of these share one."""
    *batch, own, positions, channels = write.shape(value)
    if own == heads:
        return value
    value = write.view(value, (*batch, own, 1, positions, channels))
    value = write.append("expand", (value,), (*batch, own, heads // own, positions, channels))
    return write.view(value, (*batch, heads, positions, channels))


_VIEWS = (aten.view, aten._unsafe_view, aten.reshape, aten._reshape_alias, aten.squeeze, aten.unsqueeze, aten.unflatten)
_REFLECTED = (aten.reflection_pad1d, aten.reflection_pad2d, aten.reflection_pad3d)
_REPLICATED = (aten.replication_pad1d, aten.replication_pad2d, aten.replication_pad3d)
_ZEROS = (aten.new_zeros, aten.zeros_like, aten.zeros, aten.zero, aten.new_empty, aten.empty, aten.empty_like)
_ONES = (aten.new_ones, aten.ones_like, aten.ones)
_FULL = (aten.full, aten.full_like, aten.new_full)
# Operation -> `(writer, info of the output or of each, *arguments of the schema)` -> the value, or values, that the
# output is; None to record the operation itself.
REWRITTEN: dict[Any, Callable[..., Value | list[Value] | None]] = {
    **dict.fromkeys((aten.alias, aten.detach, aten.lift_fresh, aten.lift), lambda write, output, value, *_: value),
    **dict.fromkeys(_VIEWS, _view),
    aten.expand: lambda write, output, value, *_: write.append("expand", (value,), output.shape),
    aten.permute: lambda write, output, value, order: write.permute(value, [dim % len(order) for dim in order]),
    **dict.fromkeys((aten.transpose, aten.t), _transpose),
    aten.rot90: _rot90,
    aten.pixel_shuffle: _pixel_shuffle,
    aten.pixel_unshuffle: _pixel_unshuffle,
    **dict.fromkeys((aten.channel_shuffle, aten.native_channel_shuffle), _channel_shuffle),
    aten.slice: _slice,
    aten.select: _select,
    aten.unbind: lambda write, outputs, value, dim: [
        _select(write, output, value, dim, index) for index, output in enumerate(outputs)
    ],
    **dict.fromkeys((aten.split, aten.split_with_sizes, aten.unsafe_split, aten.unsafe_split_with_sizes), _split),
    aten.index_select: _index_select,
    **dict.fromkeys((aten.index, aten._unsafe_index), _index),
    aten.roll: _roll,
    aten.stack: _stack,
    aten.cat: _cat,
    **dict.fromkeys((aten.constant_pad_nd, *_REFLECTED, *_REPLICATED), _pad),
    aten.repeat: _repeat,
    aten.select_scatter: _select_scatter,
    aten.slice_scatter: _slice_scatter,
    aten.index_put: _index_put,
    aten.im2col: _unfold,
    aten.col2im: _fold,
    **dict.fromkeys((aten.max_unpool2d, aten.max_unpool3d), _max_unpool),
    aten.copy: _copy,
    # The tensor as it is, and what of it is kept: all.
    aten.native_dropout: lambda write, outputs, value, *_: [value, write.append("full", (True,), *outputs[1])],
    **dict.fromkeys(_ZEROS, lambda write, output, *_: write.append("full", (0,), *output)),
    **dict.fromkeys(_ONES, lambda write, output, *_: write.append("full", (1,), *output)),
    **dict.fromkeys(_FULL, lambda write, output, *given: write.append("full", given[-1:], *output)),
}
