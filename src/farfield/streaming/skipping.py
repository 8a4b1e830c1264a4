"""The mask of a volume: which of its positions are valid, and which tiles have none and are skipped."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from farfield._checks import ShapeError
from farfield._refusals import refusal
from farfield.streaming.arguments import axis_spans
from farfield.streaming.graph import Value
from farfield.streaming.plan import GraphPlan, join_halos, make_graph_plan
from farfield.streaming.spans import axes_of
from farfield.volumes.checks import check_volume
from farfield.volumes.source import AxisLayout, VolumeSource
from farfield.volumes.volume import open_volume, split_volume


def open_mask(mask: Any) -> Any:
    """Return a mask as an array, which may be a path; refuse one of floats."""
    _, mask = split_volume(open_volume(mask) if isinstance(mask, str | os.PathLike) else mask)
    check_volume("predict_whole", "mask", mask)
    if "float" in str(getattr(mask, "dtype", "")):
        raise refusal(TypeError, f"mask must be boolean, True where a position is valid, got {mask.dtype}; fix: mask > 0.")
    return mask


def layout_of_mask(mask: Any, layout: AxisLayout, shape: Sequence[int], mixed: bool) -> AxisLayout:
    """Return the axes of a mask: one for all samples of a volume, or one each."""
    size = tuple(shape[len(shape) - layout.spatial_dims :])
    given, each = tuple(mask.shape), (*shape[: layout.batch], *size)
    if given in (size, (1, *size)):
        return AxisLayout(0, given != size, layout.spatial_dims)
    if given != each:
        allowed = " or ".join(map(str, dict.fromkeys((size, each))))
        raise refusal(
            ShapeError, f"mask must have shape {allowed}, got {given}; fix: one value per position, without channels."
        )
    if mixed:
        raise refusal(
            ValueError, f"layers mix samples, which have one mask; fix: a mask of shape {size}, or one sample at a time."
        )
    return layout._replace(channels=False)


def find_skipped(plan: GraphPlan, source: VolumeSource, samples: int) -> np.ndarray:
    """Return which tiles each pass skips, `(samples, passes, tiles)`: those without a valid position.

    Not those that have what a pass stores near valid tiles, which these read, or that of tiles beside them: a tile may
    have parts of values that run along fewer axes.
    """
    each = range(samples) if source.layout.batch and samples > 1 else [None]
    valid = np.array([[bool(source.read(tile, sample).any()) for tile in plan.tiles] for sample in each])
    valid = np.broadcast_to(valid, (samples, len(plan.tiles)))
    labelled, kept, near = plan.labelled, np.stack([valid] * len(plan.stages), 1), valid
    if plan.stored:
        near = np.ones_like(valid) if labelled.gathered else _widen(plan, valid)
    for stage, each_pass in enumerate(plan.stages):
        if each_pass.writes:
            kept[:, stage] |= near
        shared = [value for value in (*plan.summarized(stage), *plan.ends(stage)) if _is_shared(plan, value)]
        kept[:, stage] |= [any(labelled.owns(labelled.layouts[value], tile) for value in shared) for tile in plan.tiles]
    return ~(kept & valid.any(1)[:, None, None])


def _is_shared(plan: GraphPlan, value: Value) -> bool:
    return value not in plan.labelled.known and not set(plan.cut) <= set(axes_of(plan.labelled.layouts[value]))


def _widen(plan: GraphPlan, valid: np.ndarray) -> np.ndarray:
    """Return the tiles that valid ones read of, from the output back to the volume."""
    whole = make_graph_plan(plan.labelled, plan.tile, [])
    halo = join_halos(each.halo for each in whole.passes)
    counts = [len(spans) for spans in axis_spans(plan.labelled.size, plan.tile)]
    near = valid.reshape(len(valid), *counts).copy()
    for axis, (length, *sides) in enumerate(zip(plan.tile, *halo, strict=True)):
        along = np.moveaxis(near, axis + 1, 0)
        before = along.copy()
        for step in range(1, min(-(-max(sides) // length), counts[axis]) + 1):
            along[step:] |= before[:-step]
            along[:-step] |= before[step:]
    return near.reshape(valid.shape)
