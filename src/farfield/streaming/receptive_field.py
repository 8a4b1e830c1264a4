"""Run a network on small grids to find its receptive field and the order of its attentions.

Meanwhile a positionwise function replaces attention: then the receptive field is the overlap that tiles need.
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

from farfield.streaming.geometry import AxisScale, round_up
from farfield.streaming.global_layers import NotLocalError, describe_module
from farfield.streaming.replacement import GlobalLayer
from farfield.streaming.scale import Scale, refuse_other_layers, replace_length
from farfield.streaming.trace import Step, device_of, dtype_of, record

# Largest half of the length of a small grid along the axis that is probed, in positions.
LONGEST = 4096
# Largest product of the lengths of a small grid along the other axes.
WIDEST = 2**14


class Probe:
    """Runs a network on small random grids.

    Args:
        caller: The function that errors name.
        model: The network.
        channels: Channels of its input.
        size: Size of the volume.
        scale: The network's strides.

    Attributes:
        least: The smallest size that the network takes, see `smallest`.
        small: Size of the small grids, from `least`; `grow` enlarges it.
    """

    def __init__(self, caller: str, model: nn.Module, channels: int, size: Sequence[int], scale: Scale) -> None:
        self.caller, self.model, self.channels, self.whole, self.scale = caller, model, channels, tuple(size), scale
        self.generator = torch.Generator().manual_seed(0)
        self.small = self.least = self.smallest()
        if scale.joins:
            self.small = self.separate(self.least)

    def run(self, grid: Tensor, last_call: int | None = None) -> list[Step]:
        """Run the network with positionwise functions in place of its global layers; return its steps, see `record`.

        Raises:
            NotLocalError: If it runs other layers than on the volume.
        """
        steps = record(self.caller, self.model, partial(self.model, grid), last_call=last_call)
        refuse_other_layers(self.caller, self.scale.steps[: len(steps)], steps)
        return steps

    @cached_property
    def labels(self) -> bool:
        """Whether any step has a dtype that is not floating-point, as labels have."""
        return not all(step.dtype.is_floating_point for step in self.run(self.draw(self.small)))

    def draw(self, size: Sequence[int], samples: int = 1) -> Tensor:
        """Draw a random grid `(samples, channels, *size)` of the network's device and dtype."""
        # The generator is on the CPU; the default device can be another one.
        grid = torch.randn(samples, self.channels, *size, generator=self.generator, device="cpu")
        return grid.to(device_of(self.model), dtype_of(self.model))

    def smallest(self) -> tuple[int, ...]:
        """Return the smallest size on which the network runs the same layers, with the remainders of the volume's size.

        Remainders are those modulo the strides. If the network takes none of the sizes that are tried, this is the size
        of the volume.
        """
        for factor in (1, 2, 4, 8, 16, 32):
            pairs = zip(self.whole, self.scale.multiple, strict=True)
            size = tuple(length % multiple + factor * multiple for length, multiple in pairs)
            try:
                self.run(self.draw(size))
            except (RuntimeError, ValueError):
                continue
            return size
        self.run(self.draw(self.whole))
        return self.whole

    def separate(self, size: tuple[int, ...]) -> tuple[int, ...]:
        """Return a size with several positions along each axis of the network's smallest grid, at most the volume's.

        In a single row the positions of a flattened grid are those of its row, and those of unequal axes in another
        order would be the same for equal ones.
        """
        return tuple(
            max(own, min(own + (axis + 1) * multiple, length))
            for axis, (own, multiple, length) in enumerate(zip(size, self.scale.multiple, self.whole, strict=True))
        )

    def reach(self, axis: int) -> list[tuple[int, int]]:
        """Find the positions that each step needs before and after a tile's own along an axis, by how far NaN spreads.

        Returns:
            For each step, positions of the volume (before, after) a tile's own.

        Raises:
            NotLocalError: If the output of a layer depends on positions further away than half of the longest small
                grid, or on the whole axis.
        """
        multiple = self.scale.multiple[axis]
        half = 16 * multiple
        while True:
            grid = self.draw(replace_length(self.small, axis, 2 * half + multiple))
            grid.narrow(axis + 2, half, multiple).fill_(torch.nan)
            with plain_kernels():
                steps = self.run(grid)
            # What happens on a flattened grid shows in the next grid.
            spans = [
                None if flattened else find_nan_span(step, scales[axis])
                for step, scales, flattened in zip(steps, self.scale.axis_scales, self.scale.flattened, strict=True)
            ]
            lost = any(
                span is None and scales[axis] is not None and step.dtype.is_floating_point
                for step, span, scales in zip(steps, spans, self.scale.axis_scales, strict=True)
            )
            if lost and self.grow(axis):
                continue
            if not any(span is not None and span.everywhere for span in spans):
                pairs = zip(spans, self.scale.axis_scales, strict=True)
                halos = [self.needed_halo(span, scales[axis], half, multiple) for span, scales in pairs]
                # Integers cannot be NaN: such a step gets the largest halo of all steps before it; it is checked later.
                return [
                    each if step.dtype.is_floating_point else tuple(map(max, *halos[: index + 1], (0, 0)))
                    for index, (step, each) in enumerate(zip(steps, halos, strict=True))
                ]
            half *= 2
            if half > max(LONGEST, 64 * multiple):
                name = next(
                    step.name for step, span in zip(steps, spans, strict=True) if span is not None and span.everywhere
                )
                raise not_local_error(self.caller, self.model, name, axis, f"sees further than {half // 2} positions")

    def grow(self, axis: int) -> bool:
        """Enlarge the small grids along the other axes, at most to the volume's size; return whether they have grown.

        In grids smaller than the dilation of a convolution, some of its windows contain nothing but padding, where NaN
        is lost.
        """
        doubled = tuple(
            own if other == axis else min(own + round_up(own, multiple), max(own, length))
            for other, (own, length, multiple) in enumerate(
                zip(self.small, self.whole, self.scale.multiple, strict=True)
            )
        )
        if doubled == self.small or math.prod(doubled) // doubled[axis] > WIDEST:
            return False
        self.small = doubled
        return True

    def needed_halo(
        self, span: NanSpan | None, axis_scale: AxisScale | None, half: int, multiple: int
    ) -> tuple[int, int]:
        """Return the halo (before, after) of a step, in positions of the volume.

        Args:
            span: The span of NaN in the step if the input is NaN in `multiple` positions from `half` on.
            axis_scale: How the step scales with the axis.
            half: The first of these positions.
            multiple: How many they are.
        """
        if span is None or axis_scale is None:
            return 0, 0
        before = Fraction(span.stop) / axis_scale.ratio - (half + multiple)
        after = half - Fraction(span.start) / axis_scale.ratio
        return round_up(max(before, Fraction(0)), multiple), round_up(max(after, Fraction(0)), multiple)

    def find_levels(self, in_tile: Sequence[bool]) -> list[int]:
        """Return the level of each call of a global layer: the number of passes that must have run before it.

        It is one more than the highest of those that it depends on, 0 without any. A layer that takes its statistics
        from a tile needs no pass, and has the level of those itself.

        Args:
            in_tile: Whether a call is of such a layer.
        """
        grid = self.draw(self.small)
        count = sum(step.summarized for step in self.run(grid))
        levels = [0] * count
        for source in range(count):
            calls = iter(range(count))

            def poison(path: str | None, layer: GlobalLayer, read: Tensor, mask: Tensor | None) -> Tensor:
                response = layer.placeholder(read)
                return response.fill_(torch.nan) if next(calls) == source else response  # noqa: B023  # used at once

            with plain_kernels():
                steps = record(self.caller, self.model, partial(self.model, grid), poison)
            steps = [step for step in steps if step.summarized]
            for later in range(source + 1, count):
                if cast(Tensor, steps[later].grid).isnan().any():
                    levels[later] = max(levels[later], levels[source] + (not in_tile[source]))
        return levels


class NanSpan(NamedTuple):
    """The span of NaN in a grid along an axis.

    Attributes:
        start: The first index.
        stop: The index after the last.
        everywhere: Whether the span has no limits that are known: it reaches an end, or the grid has no such axis.
    """

    start: int
    stop: int
    everywhere: bool


def find_nan_span(step: Step, axis_scale: AxisScale | None) -> NanSpan | None:
    """Return the span of NaN in a step along an axis of the volume; None if there is no NaN."""
    nan = cast(Tensor, step.grid).isnan()
    if axis_scale is None:
        return NanSpan(0, 0, True) if nan.any() else None
    places = nan.movedim(axis_scale.axis, 0).flatten(1).any(1).nonzero()
    if not len(places):
        return None
    start, last = int(places[0]), int(places[-1])
    return NanSpan(start, last + 1, start == 0 or last + 1 == step.shape[axis_scale.axis])


def not_local_error(caller: str, model: nn.Module, name: str, axis: int, what: str) -> NotLocalError:
    """Return the error for a layer other than attention that is not local; `what` describes what it does."""
    # A function that the model calls in its own forward has the name of its class.
    modules = dict(model.named_modules())
    layer = describe_module(name, modules[name]) if name in modules else type(model).__name__
    return NotLocalError(
        f"{caller}: {layer} {what}, along spatial axis {axis} of the volume, so tiles would not give the result "
        f"of the whole; fix: tile=None on that axis, which is then not cut, or another layer."
    )


@contextmanager
def plain_kernels() -> Iterator[None]:
    """Use convolution kernels in which NaN spreads exactly by the window, and is not clamped away."""
    with (
        warnings.catch_warnings(action="ignore"),  # of these flags, about precisions that this device lacks
        torch.backends.mkldnn.flags(enabled=False),
        torch.backends.nnpack.flags(enabled=False),
        torch.backends.cudnn.flags(enabled=False),
    ):
        yield
