"""Find how the grids of a network scale with the volume, from shapes alone: strides, and axes that are joined."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import NamedTuple

from torch import nn

from farfield.ops.grid import Pool
from farfield.streaming.geometry import AxisScale
from farfield.streaming.global_layers import NotLocalError
from farfield.streaming.reduction import ReductionError
from farfield.streaming.replacement import AttentionLayer, GlobalLayer
from farfield.streaming.trace import Step, Trace, trace

# A length that all common strides divide: 2^6 · 3^3 · 5 · 7.
DIVISIBLE = 60480


class Scale(NamedTuple):
    """How the grids of a network scale with the volume.

    Attributes:
        axis_scales: For each step: how its grid scales with each spatial axis of the volume, None if it does not.
        strides: Least common multiple of the strides, along each axis.
        multiple: The same of the strides and the windows of pooled attentions; tiles start at multiples of it.
        steps: The steps, without the grids.
        flattened: For each step whether several axes of the volume share one of its axes.
        windows: For each step whether positions of the volume are its samples, as windows are.
        joins: Whether any operation, in a module or not, returns a tensor in which they do.
    """

    axis_scales: list[tuple[AxisScale | None, ...]]
    strides: tuple[int, ...]
    multiple: tuple[int, ...]
    steps: list[Step]
    flattened: list[bool]
    windows: list[bool]
    joins: bool


def find_scale(caller: str, model: nn.Module, channels: int, size: Sequence[int]) -> Scale:
    """Find the strides of a network from how the shapes of its grids change when the volume grows along one axis.

    Raises:
        ValueError: If the network takes neither a large grid nor one of this size, or none that is longer on one axis.
        NotLocalError: If other layers run on the longer grid.
        TypeError: If the network does not return one grid.
    """
    spatial_dims = len(size)
    try:
        base = (DIVISIBLE,) * spatial_dims
        first = trace(caller, model, (1, channels, *base))
    except (RuntimeError, ValueError, NotImplementedError):
        base = tuple(size)
        first = trace_or_raise(caller, model, channels, base)
    axis_scales: list[list[AxisScale | None]] = [[] for _ in first.steps]
    windows = [False] * len(first.steps)
    strides, multiple, grown_axes = [], [], []
    for axis in range(spatial_dims):
        longer = replace_length(base, axis, base[axis] + DIVISIBLE)
        grown = trace_or_raise(caller, model, channels, longer, f", the volume's {tuple(size)} longer on axis {axis}")
        refuse_other_layers(caller, first.steps, grown.steps)
        ratios, pooled, called = list(all_ratios(first, grown)), [], iter(first.layers)
        pairs = zip(windows, first.steps, grown.steps, strict=True)
        windows = [known or before.shape[0] != after.shape[0] for known, before, after in pairs]
        grown_axes.append(find_grown_axes(first, grown))
        for scales, before, after in zip(axis_scales, first.steps, grown.steps, strict=True):
            scales.append(find_axis_scale(before, after))
            if scales[-1] is not None:
                ratios.append(scales[-1].ratio)
            if before.summarized:
                pooled += window_ratios(next(called), scales[-1])
        strides.append(math.lcm(*(ratio.denominator for ratio in ratios)))
        multiple.append(math.lcm(strides[-1], *(ratio.denominator for ratio in pooled)))
    dropped = [drop_shared_axes(each) for each in axis_scales]
    flattened = [tuple(each) != kept for each, kept in zip(axis_scales, dropped, strict=True)]
    return Scale(dropped, tuple(strides), tuple(multiple), first.steps, flattened, windows, share_axes(grown_axes))


def refuse_other_layers(caller: str, steps: Sequence[Step], others: Sequence[Step]) -> None:
    """Refuse a network that runs other layers on a grid of another size.

    Raises:
        NotLocalError: If the steps of two runs have other names.
    """
    if [step.name for step in steps] != [step.name for step in others]:
        raise NotLocalError(
            f"{caller}: the network runs other layers on grids of other sizes, so tiles would not give the result of "
            "the whole; fix: model(volume) where the volume fits in memory."
        )


def trace_or_raise(caller: str, model: nn.Module, channels: int, size: Sequence[int], why: str = "") -> Trace:
    """Trace the network on one sample of this size; raise ValueError if the network does not take it.

    Args:
        caller: The function that errors name.
        model: The network.
        channels: Channels of the sample.
        size: Size of the sample.
        why: For a size that is not the volume's: where it comes from.
    """
    try:
        return trace(caller, model, (1, channels, *size))
    except (TypeError, ReductionError):
        raise
    except (RuntimeError, ValueError, NotImplementedError) as error:
        raise ValueError(
            f"{caller}: {type(model).__name__} does not take a grid of size {tuple(size)}{why}: {error}"
            + (
                "\n  fix: a network for grids of any size, or model(volume) where the volume fits in memory."
                if why
                else ""
            )
        ) from error


def replace_length(size: Sequence[int], axis: int, length: int) -> tuple[int, ...]:
    """Replace the length of one axis in a size."""
    return tuple(length if other == axis else own for other, own in enumerate(size))


def find_axis_scale(before: Step, after: Step) -> AxisScale | None:
    """Return how a grid scales with the axis of the volume that has grown; None unless exactly one of its axes does."""
    changed = [axis for axis, (one, other) in enumerate(zip(before.shape, after.shape, strict=True)) if one != other]
    if len(changed) != 1 or changed[0] == 0:
        return None
    return AxisScale(changed[0], Fraction(after.shape[changed[0]] - before.shape[changed[0]], DIVISIBLE))


def drop_shared_axes(axis_scales: Sequence[AxisScale | None]) -> tuple[AxisScale | None, ...]:
    """Set the scales of axes of the volume that share an axis of the grid to None, as of all in a flattened grid."""
    axes = [axis_scale.axis for axis_scale in axis_scales if axis_scale is not None]
    return tuple(
        None if axis_scale is None or axes.count(axis_scale.axis) > 1 else axis_scale for axis_scale in axis_scales
    )


def all_ratios(first: Trace, grown: Trace) -> Iterator[Fraction]:
    """Yield by how much each axis of each operation's output grows, per position by which the volume has grown.

    Yield nothing if the two runs have different numbers of operations.
    """
    if len(first.shapes) == len(grown.shapes):
        for before, after in zip(first.shapes, grown.shapes, strict=True):
            if len(before) == len(after):
                yield from (Fraction(other - one, DIVISIBLE) for one, other in zip(before, after, strict=True))


def find_grown_axes(first: Trace, grown: Trace) -> set[tuple[int, int]] | None:
    """Return (operation, axis) of each axis of an operation's output that has grown with the volume.

    None if the two runs have different operations.
    """
    if [len(shape) for shape in first.shapes] != [len(shape) for shape in grown.shapes]:
        return None
    return {
        (index, axis)
        for index, (before, after) in enumerate(zip(first.shapes, grown.shapes, strict=True))
        for axis, (one, other) in enumerate(zip(before, after, strict=True))
        if one != other
    }


def share_axes(grown: Sequence[set[tuple[int, int]] | None]) -> bool:
    """Whether two axes of the volume share an axis of a tensor, or may; `grown` is of each axis of the volume."""
    known = [each for each in grown if each is not None]
    return len(known) < len(grown) or len(set().union(*known)) < sum(map(len, known))


def window_ratios(layer: GlobalLayer, axis_scale: AxisScale | None) -> list[Fraction]:
    """Return the windows per position of the volume of an attention that pools its keys and values; else nothing."""
    if axis_scale is None or not isinstance(layer, AttentionLayer):
        return []
    pool = layer.attention.operator.keys_from.gather
    if not isinstance(pool, Pool):
        return []
    return [axis_scale.ratio / (pool.size if isinstance(pool.size, int) else pool.size[axis_scale.axis - 2])]
