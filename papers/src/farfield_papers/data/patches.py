"""Patches of pairs of stacks, drawn near bright positions, and whole pairs; normalised by random percentiles."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.ndimage import maximum_filter
from torch import Tensor
from torch.utils.data import Dataset

from farfield._refusals import door
from farfield_papers.data.readers.images import FolderError

# The largest value near a patch's centre must exceed this share of this percentile of the clean stack.
_SHARE, _PERCENTILE = 0.4, 99.9
# Ranges of the two percentiles that are drawn for each patch.
_LOW, _HIGH = (1.0, 3.0), (99.5, 99.9)
# Added to the difference of two percentiles (CARE's value).
_EPSILON = 1e-20


class Patches(Dataset[tuple[Tensor, Tensor]]):
    """Patches of one pair of stacks: their places are drawn once, a patch is cut and normalised each time it is read.

    Patches are drawn near bright positions only: in a window of half the patch's size, around the patch's centre, the
    largest value of the target exceeds 0.4 of the target's 99.9th percentile. For each patch a low percentile from 1 to
    3 and a high one from 99.5 to 99.9 are drawn. Source and target are both normalised as `(x - low) / (high - low)`,
    where low and high are the values of these two percentiles in the whole source, or in the whole target. Nothing is
    clipped.

    Args:
        name: Name of the pair in errors.
        source: `(z, y, x)`, or `(y, x)`.
        target: The same, or `(y, x)` for a projection.
        patch: Size of a patch of the source.
        number: Number of patches; fewer if there are fewer possible places, because none is drawn twice.
        seed: Seed of places and percentiles.

    Raises:
        FolderError: If the source is smaller than a patch, the target is nowhere bright enough for one, or the low and
            the high percentile of a patch have the same value.

    Reference:
        Weigert et al. 2018

    Example:
        >>> stack = np.random.default_rng(0).random((8, 20, 20))
        >>> patches = Patches("made", stack, stack, (4, 8, 8), 5, seed=0)
        >>> len(patches), patches[0][0].shape
        (5, torch.Size([1, 4, 8, 8]))
    """

    @door("Patches")
    def __init__(
        self, name: str, source: NDArray[Any], target: NDArray[Any], patch: Sequence[int], number: int, seed: int
    ) -> None:
        self.source, self.target, self.patch = source, target, tuple(patch)
        if any(side < size for side, size in zip(source.shape, patch, strict=True)):
            raise FolderError(
                f"{name} has the size {source.shape}, smaller than a patch, {self.patch}.\n"
                "  fix: a smaller patch (--data.patch), or leave this pair out."
            )
        random = np.random.default_rng(seed)
        self.corners = _draw_corners(name, target, source.shape, self.patch, number, random)
        self.levels = _draw_levels(name, source, target, len(self.corners), random)

    def __len__(self) -> int:
        return len(self.corners)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        cut = [slice(start, start + side) for start, side in zip(self.corners[index], self.patch, strict=True)]
        parts = (self.source[tuple(cut)], self.target[tuple(cut[len(cut) - self.target.ndim :])])
        return _normalise(parts, [levels[index] for levels in self.levels])


class WholePair(Dataset[tuple[Tensor, Tensor]]):
    """One pair of stacks as one sample, normalised as a patch is, each time by one of `draws` pairs of percentiles.

    The arguments are those of `Patches`, and so are its errors.

    Example:
        >>> stack = np.random.default_rng(0).random((8, 20, 20))
        >>> WholePair("made", stack, stack, draws=4, seed=0)[0][0].shape
        torch.Size([1, 8, 20, 20])
    """

    @door("WholePair")
    def __init__(self, name: str, source: NDArray[Any], target: NDArray[Any], *, draws: int, seed: int) -> None:
        self.source, self.target, self.draws = source, target, draws
        self.levels = _draw_levels(name, source, target, draws, np.random.default_rng(seed))

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        # In training torch's generator has the seed of the epoch and the sample.
        draw = int(torch.randint(self.draws, ()))
        return _normalise((self.source, self.target), [levels[draw] for levels in self.levels])


def _normalise(parts: Sequence[NDArray[Any]], levels: Sequence[NDArray[Any]]) -> tuple[Tensor, Tensor]:
    return tuple(  # type: ignore[return-value]
        torch.from_numpy(((part - low) / (high - low + _EPSILON)).astype(np.float32))[None]
        for part, (low, high) in zip(parts, levels, strict=True)
    )


def _draw_levels(
    name: str, source: NDArray[Any], target: NDArray[Any], number: int, random: np.random.Generator
) -> list[NDArray[np.float64]]:
    """Draw the levels `(number, 2)` that become 0 and 1, of the source and of the target."""
    percentiles = np.stack([random.uniform(*_LOW, number), random.uniform(*_HIGH, number)])
    drawn = [np.percentile(stack, percentiles).T for stack in (source, target)]
    for what, levels in zip(("source", "target"), drawn, strict=True):
        if (levels[:, 1] <= levels[:, 0]).any():
            raise FolderError(
                f"{name}: the {what}'s percentiles 3 and 99.5 have the same value, "
                f"{levels[:, 0].max():g}, so its patches cannot be normalised.\n"
                "  fix: crop both stacks to the region that is not background, or leave this pair out."
            )
    return drawn


def _draw_corners(
    name: str,
    target: NDArray[Any],
    size: Sequence[int],
    patch: Sequence[int],
    number: int,
    random: np.random.Generator,
) -> NDArray[np.int64]:
    """Draw first positions `(patches, spatial dims)` of patches with a bright position near the centre, none twice."""
    # A window of half the patch's size.
    near = tuple(max(1, side // 2) for side in patch[len(patch) - target.ndim :])
    bright = maximum_filter(target, near, mode="constant") > _SHARE * np.percentile(target, _PERCENTILE)
    # A projection's target has no depth.
    bright = np.broadcast_to(bright, size)
    inside = tuple(slice(cut // 2, cut // 2 + side - cut + 1) for side, cut in zip(size, patch, strict=True))
    places = np.flatnonzero(bright[inside])
    if not len(places):
        raise FolderError(
            f"{name}: no patch {tuple(patch)} has a position brighter than {_SHARE} of the target's "
            f"percentile {_PERCENTILE} near its centre.\n  fix: a smaller patch (--data.patch), or leave this pair out."
        )
    chosen = random.choice(places, min(number, len(places)), replace=False)
    return np.stack(np.unravel_index(chosen, [part.stop - part.start for part in inside]), 1)
