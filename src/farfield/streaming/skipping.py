"""The mask of a volume: which of its positions are valid, and which tiles have none and are skipped."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from farfield._checks import ShapeError
from farfield._refusals import refusal
from farfield.streaming.graph import Value
from farfield.streaming.masks import find_mask
from farfield.streaming.plan import StreamingPlan
from farfield.streaming.planning import count_costs, make_plan
from farfield.streaming.progress import warn_caller
from farfield.streaming.run import compute
from farfield.streaming.spans import Box, axes_of, is_empty
from farfield.volumes.axes_view import SlicedArray, as_slice
from farfield.volumes.checks import check_volume
from farfield.volumes.chunk_cache import keep_chunks
from farfield.volumes.matched_masks import match_mask, take_alpha
from farfield.volumes.source import AxisLayout, Region, VolumeSource
from farfield.volumes.volume import Volume, open_volume, split_volume

# The argument `mask` for positions that have the number that is none in the file, and for those that are transparent.
NODATA, ALPHA = "nodata", "alpha"


def check_fill(fill: Any, has_mask: bool) -> None:
    """Refuse a `fill` that is no number, or without a mask."""
    if isinstance(fill, bool) or not isinstance(fill, int | float | np.integer | np.floating):
        raise refusal(TypeError, f"fill must be a number, got {fill!r}; fix: fill=0.")
    if fill and not has_mask:
        raise refusal(ValueError, "got fill but no mask; fix: give the mask too.")


def choose_mask(mask: Any, volume: Any) -> tuple[Any, Any]:
    """Return the volume and the mask of a call: alpha apart, a path opened, and, with a warning, nodata if stated."""
    if isinstance(mask, str) and mask == ALPHA:
        return take_alpha(volume)
    if mask is not None:
        return volume, _open_mask_file(mask)
    stated = [each for each in find_nodata(volume) if each is not None]
    if not stated:
        return volume, None
    warn_caller(
        f"predict_whole: the file of the volume states that {stated[0]:g} is no number, so positions where a "
        f'channel has it are left out; fix: mask="{NODATA}" if that is meant; if it is a number, '
        "Volume(volume.array, dataclasses.replace(volume.metadata, nodata=None))."
    )
    return volume, NODATA


def stated_mask(volume: Volume) -> Any:
    """Return where no channel of a volume has the number that is none, with its other axes; None if it states none."""
    known, array = volume.metadata, volume.array
    if known.nodata is None:
        return None
    place, channels = max(known.axes.find("C"), 0), "C" in known.axes
    return _Stated([(array, AxisLayout(place, channels, len(known.axes) - place - channels), known.nodata)])


def _open_mask_file(mask: Any) -> Any:
    if mask == NODATA if isinstance(mask, str) else not isinstance(mask, Path):
        return mask
    try:
        return open_volume(mask)
    except (ValueError, OSError, ImportError) as error:
        raise refusal(type(error), f"mask: {error}") from error


def find_nodata(volume: Any) -> list[float | None]:
    """Return for each volume of a call the number that is none, if it states one."""
    given = volume if isinstance(volume, tuple) else (volume,)
    return [known.nodata if known is not None else None for known, _ in map(split_volume, given)]


class _Stated(SlicedArray):
    """A mask that is True where no channel of any volume has the number that is none."""

    dtype = np.dtype(bool)

    def __init__(self, parts: Sequence[tuple[Any, AxisLayout, float]]) -> None:
        self.parts = [(keep_chunks(array), layout, nodata) for array, layout, nodata in parts]
        array, layout, _ = parts[0]
        self.shape = (*array.shape[: layout.batch], *array.shape[len(array.shape) - layout.spatial_dims :])

    def read(self, wanted: Sequence[range]) -> np.ndarray:
        valid = np.ones([len(each) for each in wanted], bool)
        for array, layout, nodata in self.parts:
            spans = [as_slice(each) for each in wanted]
            spans[layout.batch : layout.batch] = [slice(None)] * layout.channels
            part = np.asarray(array[tuple(spans)])
            is_none = np.isnan(part) if np.isnan(nodata) else part == nodata
            valid &= ~(is_none.any(layout.batch) if layout.channels else is_none)
        return valid


def open_mask(mask: Any, volume: Any, arranged: Sequence[Any]) -> Any:
    """Return a mask as an array with its axes in the order of a volume's; refuse one of floats."""
    if isinstance(mask, str):
        given = zip(arranged[1].values(), arranged[2], find_nodata(volume), strict=True)
        parts = [(array, layout, nodata) for array, layout, nodata in given if nodata is not None]
        if not parts or any(layout is None for _, layout, _ in parts):
            text = f'mask="{NODATA}" needs a volume of open_volume whose file states what is no number; fix: an array'
            raise refusal(ValueError, f"{text}, such as volume[:] != -9999.")
        return _Stated(parts)
    mask = match_mask(mask, "TZYX", next(iter(arranged[1].values())).shape, arranged[0])
    check_volume("predict_whole", "mask", mask)
    if "float" in str(getattr(mask, "dtype", "")):
        text = f"mask must be boolean, True where a position is valid, got {mask.dtype}; fix: mask > 0."
        raise refusal(TypeError, text)
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
            ShapeError,
            f"mask must have shape {allowed}, got {given}; fix: one value per position, without channels, or both as "
            "farfield.volumes.Volume with their voxel sizes.",
        )
    if mixed:
        raise refusal(
            ValueError,
            f"layers mix samples, which have one mask; fix: a mask of shape {size}, or one sample at a time.",
        )
    return layout._replace(channels=False)


def find_skipped(plan: StreamingPlan, source: VolumeSource, samples: int) -> np.ndarray:
    """Return which tiles each pass skips, `(samples, passes, tiles)`: those without a valid position of what it sums.

    Tiles that store what others read are not skipped.
    """
    labelled, graph = plan.labelled, plan.labelled.graph
    own = range(samples) if source.layout.batch and samples > 1 else [None]
    # What each pass sums and writes, with its mask.
    masks: list[list[tuple[Value, Value | None]]] = []
    for each in plan.passes:
        sums = [(graph.nodes[index], labelled.reductions[index].operands[0]) for index in each.reductions]
        masks.append([(node.inputs[operand], find_mask(graph, node)) for node, operand in sums])
        if each is plan.passes[-1]:
            masks[-1].append((graph.output, find_mask(graph, graph.nodes[graph.output.node])))
        # Of values that run along fewer axes, some tiles alone have all.
        shared = (value for value in each.writes if not set(plan.cut) <= set(axes_of(labelled.layouts[value])))
        masks[-1] += [(value, None) for value in shared]
    # Of each sample, pass and tile, and of what is summed or written.
    found = [np.zeros((len(own), len(plan.cores), len(pairs)), bool) for pairs in masks]
    filled = np.zeros(len(own), bool)
    for (row, sample), (place, tile) in itertools.product(enumerate(own), enumerate(plan.cores)):
        has_valid = functools.cache(partial(_has_valid, plan, source, sample, tile))
        filled[row] |= has_valid(graph.inputs[-1])
        for own_found, pairs in zip(found, masks, strict=True):
            own_found[row, place] = [
                labelled.owns(labelled.layouts[value], tile) and has_valid(mask) for value, mask in pairs
            ]
    kept = np.stack([each.max(2, initial=False) for each in found], 1)
    # What has no valid position at all is summed nevertheless, in the first tile.
    kept[:, :, 0] |= np.stack([(~each.max(1)).max(1, initial=False) for each in found], 1)
    storing = [stage for stage, each in enumerate(plan.passes) if each.writes]
    if storing:
        kept[:, storing] |= _widen(plan, np.logical_or.reduce(kept, 1))[:, None]
    kept &= filled[:, None, None]
    return ~np.broadcast_to(kept, (samples, *kept.shape[1:]))


def _has_valid(plan: StreamingPlan, source: VolumeSource, sample: int | None, tile: Region, mask: Value | None) -> bool:
    """Whether a tile's own part of a mask has a valid position, as far as that is known before the passes."""
    labelled = plan.labelled
    if mask is None or labelled.levels[mask.node]:
        return True
    box = labelled.core(labelled.layouts[mask], tile)
    if is_empty(box):
        return False

    def read(value: Value, part: Box) -> Tensor:
        return source.read(tuple(spans[0] for spans in part[2:]), sample)

    return bool(compute(labelled, {mask: box}, labelled.graph.inputs, read, {})[mask].any())


def _widen(plan: StreamingPlan, valid: np.ndarray) -> np.ndarray:
    """Return the tiles that valid ones read of, from the output back to the volume."""
    if plan.labelled.gathered:  # one position needs all of these
        return np.ones_like(valid)
    halo = count_costs(make_plan(plan.labelled, plan.tile, [])).halo
    near = valid.reshape(len(valid), *plan.cores.counts).copy()
    for axis, (length, *sides) in enumerate(zip(plan.tile, *halo, strict=True)):
        along = np.moveaxis(near, axis + 1, 0)
        before = along.copy()
        for step in range(1, min(-(-max(sides) // length), plan.cores.counts[axis]) + 1):
            along[step:] |= before[:-step]
            along[:-step] |= before[step:]
    return near.reshape(valid.shape)
