"""Check that tiles give the result of the whole: small grids are cut as the volume will be, and both are compared."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from farfield.streaming.geometry import AxisScale, Halo, NetworkGrid, enlarge_region, round_up
from farfield.streaming.receptive_field import Probe
from farfield.streaming.scale import replace_length
from farfield.streaming.trace import Step

# Labels may differ at up to this share of the positions with the same index on an axis, because two classes can have
# almost equal scores. Labels are compared on LABEL_SAMPLES grids, because they are often equal by chance.
TIES = 0.05
LABEL_SAMPLES = 32


def find_difference(
    probe: Probe, axis: int, halo: Halo, widths: Sequence[int], calls: Sequence[int], covered: Sequence[bool]
) -> str | None:
    """Cut a small grid along one axis, and compare its tiles with the whole.

    Args:
        probe: The network on small grids.
        axis: The spatial axis.
        halo: Positions that tiles read around their own.
        widths: Lengths of the tiles, whose sum is that of the grid; the second becomes longer if the network does not
            take so small a grid.
        calls: Indices of the calls whose input grids must be equal; if there are none, the output must be.
        covered: For each step whether the halo is as long as the step needs; others may differ where nothing that is
            required depends on them, as before a mean of all positions.

    Returns:
        The name of the first step that differs; None if all required steps are equal.
    """
    positions = list(widths)
    positions[1] += round_up(max(0, probe.least[axis] - sum(positions)), probe.scale.multiple[axis])
    stops = list(itertools.accumulate(positions))
    length, last_call = stops[-1], max(calls, default=None)
    grid = probe.draw(replace_length(probe.small, axis, length), LABEL_SAMPLES if probe.labels else 1)
    whole = probe.run(grid, last_call)
    required = needed_steps(whole, calls)
    for core in zip([0, *stops], stops, strict=False):
        spans = [
            own_span(step, axis_scales[axis], core, length)
            for step, axis_scales in zip(whole, probe.scale.axis_scales, strict=False)
        ]
        if not any(spans[index][0] < spans[index][1] for index in required):
            continue
        read = max(0, core[0] - halo.before[axis]), min(length, core[1] + halo.after[axis])
        ((start, stop),) = enlarge_region(probe.least[axis : axis + 1], (read,), (length,))
        try:
            own = probe.run(grid.narrow(axis + 2, start, stop - start).contiguous(), last_call)
        except (RuntimeError, ValueError):  # the grid is smaller than a layer takes
            return whole[required[0]].name
        pairs = zip(whole, own, probe.scale.axis_scales, spans, strict=False)
        differences = [
            is_different(one, other, axis_scales[axis], span, start) for one, other, axis_scales, span in pairs
        ]
        if any(differences[index] for index in required):
            return next(
                (step.name for step, differs, own in zip(whole, differences, covered, strict=False) if differs and own),
                whole[differences.index(True)].name,
            )
    return None


def needed_steps(steps: Sequence[Step], calls: Sequence[int]) -> list[int]:
    """Return the indices of the steps that are the inputs of these attention calls; without calls, of the output."""
    summarized = [index for index, step in enumerate(steps) if step.summarized]
    return [summarized[call] for call in calls] or [len(steps) - 1]


def own_span(whole: Step, axis_scale: AxisScale | None, core: tuple[int, int], length: int) -> tuple[int, int]:
    """Return where a tile's own positions lie in a step of the whole; (0, 1) if it does not scale with the axis."""
    if axis_scale is None:
        return 0, 1
    grid = NetworkGrid(whole.name, whole.summarized, whole.shape, ())
    return grid.span(axis_scale, core, length)


def is_different(whole: Step, own: Step, axis_scale: AxisScale | None, span: tuple[int, int], first: int) -> bool:
    """Whether a step of a tile that starts at `first` differs from the whole, at `span`, by more than rounding.

    Labels differ if more than TIES of them do at an index of the axis. False for a step that does not scale with the
    axis, and for an empty span.
    """
    start, stop = span
    if axis_scale is None or start >= stop:
        return False
    offset = int(first * axis_scale.ratio)
    if stop - offset > own.shape[axis_scale.axis]:
        return True
    one = cast(Tensor, whole.grid).narrow(axis_scale.axis, start, stop - start)
    other = cast(Tensor, own.grid).narrow(axis_scale.axis, start - offset, stop - start)
    if one.shape != other.shape:
        return True
    if not one.is_floating_point():
        return bool((one != other).double().movedim(axis_scale.axis, 0).flatten(1).mean(1).max() > TIES)
    return bool((one - other).abs().max() > math.sqrt(torch.finfo(one.dtype).eps) * one.abs().max())
