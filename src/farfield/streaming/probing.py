"""What a network does to places, found out by running it on small grids: strides, how far a position sees, which order.

Attentions are answered position by position meanwhile, so that what is left is what tiles must overlap for.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fractions import Fraction
from functools import cached_property, partial
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from farfield.nn import GridAttention
from farfield.ops.grid import Pool
from farfield.streaming.geometry import Along, rounded_up
from farfield.streaming.listening import OUTPUT, Step, Trace, device_of, dtype_of, positionwise, record, trace
from farfield.streaming.refusals import NotLocalError, named

# Sides that every stride divides that anyone uses: 2^6 · 3^3 · 5 · 7.
DIVISIBLE = 60480
# Positions a side of the longest probe.
LONGEST = 4096
# Positions across it, at most.
WIDEST = 2**14


class Scale(NamedTuple):
    """What a network does to the sides of its grids.

    Attributes:
        along: Of each step: how it follows each side of the volume.
        strides: What every stride divides, a side each.
        multiple: Where tiles may begin: at multiples of that and of the windows that attentions pool.
    """

    along: list[tuple[Along | None, ...]]
    strides: tuple[int, ...]
    multiple: tuple[int, ...]


def find_scale(model: nn.Module, channels: int, size: Sequence[int]) -> Scale:
    """Find the strides of a network, from the shapes of its grids when the volume grows on one side.

    Raises:
        ValueError: If the network takes neither a large grid nor one of these sides.
    """
    spatial_dims = len(size)
    try:
        base = (DIVISIBLE,) * spatial_dims
        first = trace(model, (1, channels, *base))
    except (RuntimeError, ValueError, NotImplementedError):
        base = tuple(size)
        first = take(model, channels, base)
    along: list[list[Along | None]] = [[] for _ in first.steps]
    strides, multiple = [], []
    for axis in range(spatial_dims):
        grown = take(model, channels, replaced(base, axis, base[axis] + DIVISIBLE))
        if [step.name for step in grown.steps] != [step.name for step in first.steps]:
            raise NotLocalError("predict_whole: the network takes other steps for other sides; fix: one that does not.")
        ratios, pooled, called = list(all_ratios(first, grown)), [], iter(first.attentions)
        for follows, before, after in zip(along, first.steps, grown.steps, strict=True):
            follows.append(following(before, after))
            if follows[-1] is not None:
                ratios.append(follows[-1].ratio)
            if before.attends:
                pooled += windows(next(called), follows[-1])
        strides.append(math.lcm(*(ratio.denominator for ratio in ratios)))
        multiple.append(math.lcm(strides[-1], *(ratio.denominator for ratio in pooled)))
    return Scale([alone(each) for each in along], tuple(strides), tuple(multiple))


def take(model: nn.Module, channels: int, size: Sequence[int]) -> Trace:
    """Trace a grid; say it if the network does not take one of these sides."""
    try:
        return trace(model, (1, channels, *size))
    except TypeError:
        raise
    except (RuntimeError, ValueError, NotImplementedError) as error:
        raise ValueError(
            f"predict_whole: {type(model).__name__} does not take a grid of size {tuple(size)}: {error}"
        ) from error


def replaced(size: Sequence[int], axis: int, side: int) -> tuple[int, ...]:
    """The sides with another one."""
    return tuple(side if other == axis else own for other, own in enumerate(size))


def following(before: Step, after: Step) -> Along | None:
    """How a grid follows the side that has grown; None if it does not, or in more than one of its axes."""
    changed = [axis for axis, (one, other) in enumerate(zip(before.shape, after.shape, strict=True)) if one != other]
    if len(changed) != 1 or changed[0] == 0:
        return None
    return Along(changed[0], Fraction(after.shape[changed[0]] - before.shape[changed[0]], DIVISIBLE))


def alone(along: Sequence[Along | None]) -> tuple[Along | None, ...]:
    """Without sides of the volume that share an axis: a grid whose positions stand in one row has none of them."""
    axes = [follows.axis for follows in along if follows is not None]
    return tuple(None if follows is None or axes.count(follows.axis) > 1 else follows for follows in along)


def all_ratios(first: Trace, grown: Trace) -> Iterator[Fraction]:
    """By how much every result of an operation grows, for each position of the side that has grown."""
    if len(first.shapes) == len(grown.shapes):
        for before, after in zip(first.shapes, grown.shapes, strict=True):
            if len(before) == len(after):
                yield from (Fraction(other - one, DIVISIBLE) for one, other in zip(before, after, strict=True))


def windows(attention: GridAttention, follows: Along | None) -> list[Fraction]:
    """Windows for each position of the volume, where an attention's answering positions are pooled."""
    pool = attention.operator.keys_from.gather
    if follows is None or not isinstance(pool, Pool):
        return []
    return [follows.ratio / (pool.size if isinstance(pool.size, int) else pool.size[follows.axis - 2])]


# ---- with numbers ----------------------------------------------------------------------------------------------------
class Probe:
    """A network on small grids.

    Args:
        model: The network.
        channels: Of its grid.
        size: Of the volume.
        scale: Its strides.
    """

    def __init__(self, model: nn.Module, channels: int, size: Sequence[int], scale: Scale) -> None:
        self.model, self.channels, self.whole, self.scale = model, channels, tuple(size), scale
        self.generator = torch.Generator().manual_seed(0)
        self.small = self.least = self.smallest()

    def run(self, grid: Tensor, last_call: int | None = None) -> list[Step]:
        """Run the network, its attentions answered position by position."""
        return record(self.model, partial(self.model, grid), last_call=last_call)

    @cached_property
    def labels(self) -> bool:
        """Whether any step is of whole numbers."""
        return not all(step.dtype.is_floating_point for step in self.run(self.draw(self.small)))

    def draw(self, size: Sequence[int], samples: int = 1) -> Tensor:
        """Random grids."""
        # The generator is the CPU's, and the default device may be another.
        grid = torch.randn(samples, self.channels, *size, generator=self.generator, device="cpu")
        return grid.to(device_of(self.model), dtype_of(self.model))

    def smallest(self) -> tuple[int, ...]:
        """The smallest sides that the network takes, with the volume's remainders."""
        for factor in (1, 2, 4, 8, 16, 32):
            pairs = zip(self.whole, self.scale.multiple, strict=True)
            size = tuple(side % multiple + factor * multiple for side, multiple in pairs)
            try:
                self.run(self.draw(size))
            except (RuntimeError, ValueError):
                continue
            return size
        self.run(self.draw(self.whole))
        return self.whole

    def reach(self, axis: int) -> list[tuple[int, int]]:
        """Positions that each step needs before and after its own on one side: NaN goes where a position is seen.

        Raises:
            NotLocalError: If a layer sees further than any probe, or everything.
        """
        multiple = self.scale.multiple[axis]
        half = 16 * multiple
        while True:
            grid = self.draw(replaced(self.small, axis, 2 * half + multiple))
            grid.narrow(axis + 2, half, multiple).fill_(torch.nan)
            with plain_kernels():
                steps = self.run(grid)
            spans = [nan_span(step, along[axis]) for step, along in zip(steps, self.scale.along, strict=True)]
            lost = any(
                span is None and along[axis] is not None and step.dtype.is_floating_point
                for step, span, along in zip(steps, spans, self.scale.along, strict=True)
            )
            if lost and self.grow(axis):
                continue
            if not any(span is not None and span.everywhere for span in spans):
                pairs = zip(spans, self.scale.along, strict=True)
                found = [self.needed(span, along[axis], half, multiple) for span, along in pairs]
                # Whole numbers cannot be NaN: they need what all before them do, which is compared later.
                return [
                    each if step.dtype.is_floating_point else tuple(map(max, *found[: index + 1], (0, 0)))
                    for index, (step, each) in enumerate(zip(steps, found, strict=True))
                ]
            half *= 2
            if half > max(LONGEST, 64 * multiple):
                name = next(
                    step.name for step, span in zip(steps, spans, strict=True) if span is not None and span.everywhere
                )
                raise not_local(self.model, name, axis, f"sees further than {half // 2} positions")

    def grow(self, axis: int) -> bool:
        """Make the small grids larger on the other sides, up to the volume's; False if they are large enough.

        Where they are smaller than the steps of a dilated convolution, some of its windows see nothing but padding.
        """
        doubled = tuple(
            own if other == axis else min(own + rounded_up(own, multiple), max(own, side))
            for other, (own, side, multiple) in enumerate(zip(self.small, self.whole, self.scale.multiple, strict=True))
        )
        if doubled == self.small or math.prod(doubled) // doubled[axis] > WIDEST:
            return False
        self.small = doubled
        return True

    def needed(self, span: NanSpan | None, follows: Along | None, half: int, multiple: int) -> tuple[int, int]:
        """Positions before and after, where NaN in the multiple after half went so far."""
        if span is None or follows is None:
            return 0, 0
        before = Fraction(span.stop) / follows.ratio - (half + multiple)
        after = half - Fraction(span.start) / follows.ratio
        return rounded_up(max(before, Fraction(0)), multiple), rounded_up(max(after, Fraction(0)), multiple)

    @cached_property
    def levels(self) -> list[int]:
        """Which attentions hear of which: each one's level is one more than the highest it hears of."""
        grid = self.draw(self.small)
        count = sum(step.attends for step in self.run(grid))
        levels = [0] * count
        for asked in range(count):
            calls = iter(range(count))

            def poison(path: str, attention: GridAttention, read: Tensor, mask: Tensor | None) -> Tensor:
                answer = positionwise(path, attention, read, mask)
                return answer.fill_(torch.nan) if next(calls) == asked else answer  # noqa: B023  # used at once

            with plain_kernels():
                steps = [step for step in record(self.model, partial(self.model, grid), poison) if step.attends]
            for later in range(asked + 1, count):
                if cast(Tensor, steps[later].grid).isnan().any():
                    levels[later] = max(levels[later], levels[asked] + 1)
        return levels


class NanSpan(NamedTuple):
    """Where NaN is in a grid, on one side."""

    start: int
    stop: int
    everywhere: bool


def nan_span(step: Step, follows: Along | None) -> NanSpan | None:
    """Where NaN has come to; everywhere if it reaches an end, or a grid that does not have the side any more."""
    nan = cast(Tensor, step.grid).isnan()
    if follows is None:
        return NanSpan(0, 0, True) if nan.any() else None
    places = nan.movedim(follows.axis, 0).flatten(1).any(1).nonzero()
    if not len(places):
        return None
    start, last = int(places[0]), int(places[-1])
    return NanSpan(start, last + 1, start == 0 or last + 1 == step.shape[follows.axis])


def not_local(model: nn.Module, name: str, axis: int, what: str) -> NotLocalError:
    """Word that a layer beside attention is not local."""
    layer = named(name, model.get_submodule(name)) if name != OUTPUT else type(model).__name__
    return NotLocalError(
        f"predict_whole: {layer} {what}, on side {axis} of the volume, so tiles would not give what the whole gives; "
        f"fix: tile=None on that side, which is then not cut, or another layer there."
    )


@contextmanager
def plain_kernels() -> Iterator[None]:
    """Convolutions by the kernels in which NaN goes no further than the window, and is not clamped away."""
    with (
        warnings.catch_warnings(action="ignore"),  # of precisions that no device here has
        torch.backends.mkldnn.flags(enabled=False),
        torch.backends.nnpack.flags(enabled=False),
        torch.backends.cudnn.flags(enabled=False),
    ):
        yield
