"""Whether tiles give what the whole gives: small grids are cut as the volume will be, and both are compared."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from farfield.streaming.geometry import Along, Halo, Placed, at_least, rounded_up
from farfield.streaming.listening import Step
from farfield.streaming.probing import Probe, replaced

# Of the labels at one place on a side so many may differ, where two classes are as good as equal; they are compared on
# so many grids, as labels are often equal by chance.
TIES = 0.05
LABELLED = 32


def differing(probe: Probe, axis: int, halo: Halo, widths: Sequence[int], calls: Sequence[int]) -> str | None:
    """Cut a small grid on one side, and see whether its parts give what the whole gives.

    Args:
        probe: The network on small grids.
        axis: The side.
        halo: What parts read beyond their own positions.
        widths: Positions of the parts; one in the middle becomes wider where the network takes no grid so small.
        calls: Attentions whose grids must be equal; none for the output.

    Returns:
        The first step that is not, and which may be the reason; None if all that must be are equal.
    """
    positions = list(widths)
    positions[1] += rounded_up(max(0, probe.least[axis] - sum(positions)), probe.scale.multiple[axis])
    stops = list(itertools.accumulate(positions))
    side, last_call = stops[-1], max(calls, default=None)
    grid = probe.draw(replaced(probe.small, axis, side), LABELLED if probe.labels else 1)
    whole = probe.run(grid, last_call)
    wanted = needed_steps(whole, calls)
    for core in zip([0, *stops], stops, strict=False):
        spans = [own_span(step, along[axis], core, side) for step, along in zip(whole, probe.scale.along, strict=False)]
        if not any(spans[index][0] < spans[index][1] for index in wanted):
            continue
        read = max(0, core[0] - halo.before[axis]), min(side, core[1] + halo.after[axis])
        ((start, stop),) = at_least(probe.least[axis : axis + 1], (read,), (side,))
        try:
            own = probe.run(grid.narrow(axis + 2, start, stop - start).contiguous(), last_call)
        except RuntimeError:  # smaller than what a layer takes
            return whole[wanted[0]].name
        pairs = zip(whole, own, probe.scale.along, spans, strict=False)
        differs = [differ(one, other, along[axis], span, start) for one, other, along, span in pairs]
        if any(differs[index] for index in wanted):
            return whole[differs.index(True)].name
    return None


def needed_steps(steps: Sequence[Step], calls: Sequence[int]) -> list[int]:
    """Which steps are read by these attentions, or are the output if there are none."""
    attends = [index for index, step in enumerate(steps) if step.attends]
    return [attends[call] for call in calls] or [len(steps) - 1]


def own_span(whole: Step, follows: Along | None, core: tuple[int, int], side: int) -> tuple[int, int]:
    """Where a part's own positions lie in a grid of the whole."""
    if follows is None:
        return 0, 1
    placed = Placed(whole.name, whole.attends, whole.shape, ())
    return placed.span(follows, core, side)


def differ(whole: Step, own: Step, follows: Along | None, span: tuple[int, int], first: int) -> bool:
    """Whether the own positions of a part that reads from `first` on are not those of the whole, by more than rounding."""
    start, stop = span
    if follows is None or start >= stop:
        return False
    offset = int(first * follows.ratio)
    if stop - offset > own.shape[follows.axis]:
        return True
    one = cast(Tensor, whole.grid).narrow(follows.axis, start, stop - start)
    other = cast(Tensor, own.grid).narrow(follows.axis, start - offset, stop - start)
    if one.shape != other.shape:
        return True
    if not one.is_floating_point():
        return bool((one != other).double().movedim(follows.axis, 0).flatten(1).mean(1).max() > TIES)
    return bool((one - other).abs().max() > math.sqrt(torch.finfo(one.dtype).eps) * one.abs().max())
