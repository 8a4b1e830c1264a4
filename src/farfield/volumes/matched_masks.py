"""Masks from the alpha of a volume, and masks of other voxels, with those of the volume."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from farfield._checks import ShapeError
from farfield._refusals import refusal
from farfield.volumes.axes_view import AxesView, order_axes
from farfield.volumes.image_metadata import UNITS, ImageMetadata
from farfield.volumes.volume import Volume, split_volume


def take_alpha(volume: Any) -> tuple[Volume, Volume]:
    """Return the colours of a volume of grey or colours with alpha, and its alpha; refuse another one."""
    known, array = split_volume(volume)
    place = known.axes.find("C") if known is not None else -1
    if known is None or place < 0 or array.shape[place] not in (2, 4):
        what = "no letters" if known is None else f'the axes "{known.axes}" {tuple(array.shape)}'
        text = f'mask="alpha" needs a volume whose channels are 3 colours and alpha, or grey and alpha, got {what}'
        raise refusal(ValueError, f"{text}; fix: open_volume(path) of such a file, or the mask as an array.")
    given, before = volume if isinstance(volume, Volume) else Volume(array, known), (slice(None),) * place
    return given.crop((*before, slice(-1), ...)), given.crop((*before, -1, ...))


def match_mask(mask: Any, letters: str, shape: Sequence[int], known: ImageMetadata | None) -> Any:
    """Return the array of a mask, with axes in the order of letters, and the voxels of a volume of this shape.

    A mask without an origin begins where the volume does. Axes whose voxel size is not known in both stay as they are.
    """
    own, mask = split_volume(mask)
    if own is None or not set(own.axes) <= set(letters):
        return mask
    axes = "".join(sorted(own.axes, key=letters.index))
    mask, own = order_axes(mask, [own.axes.index(letter) for letter in axes]), own.with_axes(axes)
    if known is None:
        return mask
    taken: dict[int, Sequence[int]] = {}
    for axis, letter in enumerate(own.axes):
        units = [each.units.get(letter) for each in (own, known)]
        is_known = letter in own.spacing and letter in known.spacing and known.axes.count(letter) == 1
        length = shape[known.axes.index(letter)] if is_known else mask.shape[axis]
        if length == mask.shape[axis] or (units[0] != units[1] and not set(units) <= UNITS.keys()):
            continue
        ratio = 1.0 if units[0] == units[1] else UNITS[str(units[0])].amount / UNITS[str(units[1])].amount
        step, first = own.spacing[letter] * ratio / known.spacing[letter], 0.0
        if letter in own.origin:  # where its first voxel begins, in positions of the volume
            first = (own.origin[letter] * ratio - known.origin.get(letter, 0.0)) / known.spacing[letter]
            first += (1 - step) / 2
        last = first + step * mask.shape[axis]
        if first > step or last < length - step:
            raise refusal(
                ShapeError,
                f"along {letter} the mask of {mask.shape[axis]} voxels lies from {first:g} to {last:g} of the volume's "
                f"{length} positions, by its voxel size; fix: a mask of all of them, or its own voxel size and origin.",
            )
        places = np.floor((np.arange(length) + 0.5 - first) / step).clip(0, mask.shape[axis] - 1)
        taken[axis] = places.astype(int).tolist()
    return AxesView(mask, range(len(own.axes)), taken) if taken else mask
