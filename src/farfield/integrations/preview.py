"""The prediction of one block of a volume, before that of the whole is started."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from farfield._refusals import refusal
from farfield.streaming import StreamingPlan, predict_whole
from farfield.streaming.adapt import Reduce
from farfield.streaming.plan import join_halos
from farfield.streaming.prediction import Prediction
from farfield.streaming.recording import Recording
from farfield.volumes import Volume
from farfield.volumes.sink import to_numpy
from farfield.volumes.source import Region
from farfield.volumes.volume import describe_output


class Preview(NamedTuple):
    """The prediction of a block of a volume.

    Attributes:
        volume: The numbers, with voxel size and origin.
        start: Letter of an axis -> first position of the block in the volume.
        is_exact: Whether these are the numbers of the whole prediction, up to rounding.
        text: What they are, in a sentence.
    """

    volume: Volume
    start: Mapping[str, int]
    is_exact: bool
    text: str


def predict_block(prediction: Prediction, reduce: Reduce, position: Mapping[str, int]) -> Preview:
    """Predict the tile of a plan that has a position, with its halo as if it were the volume."""
    plan = prediction.plan
    (known, _, _), dims = prediction.arranged, plan.layout.spatial_dims
    scales = [each for each in plan.output.scales if each is not None]
    if known is None or len(scales) < dims:
        raise refusal(ValueError, "the network's output has other axes than the volume; fix: start without a preview.")
    letters, paddings = known.axes[-dims:], plan.padding
    place = [position.get(letter, 0) + before for letter, (before, _) in zip(letters, paddings, strict=True)]
    core = next(each for each in plan.cores if all(a <= at < b for (a, b), at in zip(each, place, strict=True)))
    region = _add_halo(core, plan)
    sample = 0
    for letter, length in plan.layout.samples:
        sample = sample * length + position.get(letter, 0)
    source = next(iter(prediction.sources.values()))
    grid = source.read(region, sample if plan.samples > 1 else None)
    tile = tuple(stop - start for start, stop in region)
    result = predict_whole(prediction.model, grid, tile=tile, reduce=reduce, quiet=True)
    # Without what stands for padding.
    kept = [
        (max(start, before), min(stop, length - after))
        for (start, stop), length, (before, after) in zip(core, plan.size, paddings, strict=True)
    ]
    index = [
        slice(int((start - first) * scale.ratio), math.ceil((stop - first) * scale.ratio))
        for (start, stop), (first, _), scale in zip(kept, region, scales, strict=True)
    ]
    numbers = to_numpy(result[(0, slice(None), *index)])
    parts = {
        letter: range(start - before, stop - before)
        for letter, (start, stop), (before, _) in zip(letters, kept, paddings, strict=True)
    }
    layout = plan.layout._replace(batch=0, channels=len(numbers) > 1, samples=())
    part = known.with_axes(letters).cropped(parts)
    metadata = describe_output(part, layout, source.channels, len(numbers), plan.output.scales)
    names = list(dict.fromkeys(name for each in plan.passes for name in each.summarizes))
    text = "the numbers of the whole prediction"
    if names:
        text = f"this block alone; in the prediction {_list(names)} will see all positions, and give other numbers"
    volume = Volume(numbers if layout.channels else numbers[0], metadata)
    return Preview(volume, {letter: part.start for letter, part in parts.items()}, not names, text)


def _add_halo(core: Region, plan: StreamingPlan) -> Region:
    """Return what a tile reads, out to multiples of the strides: a region that the network takes as it is."""
    strides = Recording(plan.graph_plan.labelled.graph, plan.size, None).strides
    halo = join_halos(each.halo for each in plan.passes)
    return tuple(
        (max(0, (start - before) // stride * stride), min(length, -(-(stop + after) // stride) * stride))
        for (start, stop), before, after, stride, length in zip(core, *halo, strides, plan.size, strict=True)
    )


def _list(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
