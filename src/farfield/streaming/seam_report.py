"""What `find_seams` returns: numbers, a table with the advice, and a picture."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from farfield._checks import load_library
from farfield._refusals import door
from farfield.streaming.spans import Halo

# The largest difference, by the range of the output, up to which there is no seam.
_SEAMLESS = 1e-3
# The share of the difference from which on constants mend it.
_MENDED = 0.5
# Distances up to which statistics are alike, whatever those of single patches are.
_NEAR = 0.05
# Layers that are printed.
_SHOWN = 8


class Mismatch(NamedTuple):
    """How far two tilings of a network differ at the same positions.

    Attributes:
        mean: The mean difference, by the range of the output.
        largest: The largest difference, by the range of the output.
        step: The mean difference of neighbours across borders of tiles, by that of neighbours elsewhere.
    """

    mean: float
    largest: float
    step: float


def compare_tilings(predictions: Sequence[Tensor], extent: float, borders: Sequence[Sequence[int]]) -> Mismatch:
    """Compare two predictions, and the steps of the first at its borders with those elsewhere."""
    one, other = predictions
    difference = (one - other).abs() / extent
    sums, counts = [0.0, 0.0], [0, 0]
    for axis, places in enumerate(borders):
        steps = one.diff(dim=axis + 2).abs()
        at_border = torch.zeros(steps.shape[axis + 2], dtype=torch.bool)
        at_border[[place - 1 for place in places]] = True
        for index, chosen in enumerate((at_border, ~at_border)):
            own = steps.index_select(axis + 2, chosen.nonzero()[:, 0])
            # Along an axis that is not cut no step is one elsewhere.
            if places:
                sums[index] += float(own.sum(dtype=torch.float64))
                counts[index] += own.numel()
    at_borders, elsewhere = (total / max(1, count) for total, count in zip(sums, counts, strict=True))
    step = at_borders / elsewhere if elsewhere else 1.0 if not at_borders else math.inf
    return Mismatch(float(difference.mean()), float(difference.max()), step)


class GlobalLayer(NamedTuple):
    """A layer, or another call of a function of torch, that sums over all positions.

    Distances are from the average of the patches, or of the tiles where no patches are given: of a norm, of its mean
    and deviation in units of the deviation; of another layer, of its result in units of the result.

    Attributes:
        name: Module and function.
        kept: Why it cannot be constant; "" if it can.
        removed: The share of the difference of two tilings that goes where it alone is constant; None if it cannot be.
        tiles: Mean distance of the statistics in tiles; None if there are none.
        whole: Distance of those in the part of the volume as a whole.
        patches: Mean distance of those in single patches.
    """

    name: str
    kept: str = ""
    removed: float | None = None
    tiles: float | None = None
    whole: float | None = None
    patches: float | None = None


@dataclass(frozen=True, eq=False)
class SeamReport:
    """How far a network in tiles depends on where they are cut, which layers are why, and what mends it.

    Attributes:
        network: The network's class.
        tile: Size of the tiles, without halo.
        halo: Positions that a tile reads before and after its own, one number per spatial dim each.
        size: Size of the part of the volume that was examined.
        volume_size: Size of the volume.
        mismatch: Difference of two tilings that are shifted by half a tile, each tile with its halo.
        without_halo: The same without halo.
        predictions: Those of the two tilings with halo, `(channels, *size)` of the output.
        borders: Along each axis of the output, where tiles of the first tiling begin.
        layers: Layers that sum over all positions; the one with which most of the difference goes is the first.
        removed: The share of the difference, in the tiles that differ most, that goes where all that can be are
            constant; None if it was not found.
        patches: Number of samples of the patches.
        exact: Why the network does not run exactly in tiles; "" if it does.
        missing_halo: The halo that its operations need, if there was no room for it in the part; () if there was.
        notes: What else is to be known.
    """

    network: str
    tile: tuple[int, ...]
    halo: Halo
    size: tuple[int, ...]
    volume_size: tuple[int, ...]
    mismatch: Mismatch
    without_halo: Mismatch
    predictions: tuple[Tensor, Tensor]
    borders: tuple[tuple[int, ...], ...]
    layers: tuple[GlobalLayer, ...] = ()
    removed: float | None = None
    patches: int = 0
    exact: str = ""
    missing_halo: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def reads(self) -> tuple[int, ...]:
        """Size of what each tile reads."""
        return tuple(
            min(length, own + before + after)
            for length, own, before, after in zip(self.size, self.tile, *self.halo, strict=True)
        )

    @property
    def is_seamless(self) -> bool:
        """Whether tiles with their halo differ by less than a thousandth of the range."""
        return self.mismatch.largest <= _SEAMLESS

    def distances(self) -> tuple[float, float, float] | None:
        """Return the distances of tiles, whole and patches, averaged over layers by what they remove; None if unknown.

        Layers count by what goes with them, as statistics that differ and change nothing do not matter; all equally if
        nothing goes with one alone.
        """
        known = [
            (max(0.0, each.removed or 0.0), (each.tiles, each.whole, each.patches))
            for each in self.layers
            if each.tiles is not None and each.whole is not None and each.patches is not None
        ]
        if not known:
            return None
        if not any(weight for weight, _ in known):
            known = [(1.0, own) for _, own in known]
        total = sum(weight for weight, _ in known)
        tiles, whole, patches = (
            sum(weight * float(own[place] or 0) for weight, own in known) / total for place in range(3)
        )
        return tiles, whole, patches

    @property
    def choice(self) -> str:
        """What to take: "nothing", "halo", "whole", "tile", "frozen" or "overlap"; "compare" if no number tells it."""
        return self._decide()[0]

    @property
    def advice(self) -> str:
        """What to take and why, with the line of code."""
        return self._decide()[1]

    def _decide(self) -> tuple[str, str]:
        tile = f"({', '.join(map(str, self.tile))}{',' * (len(self.tile) == 1)})"
        whole = f"predict_whole(network, volume, tile={tile})"
        by_tile = f'predict_whole(network, volume, tile=Tiles({tile}, statistics="tile"))'
        frozen = "frozen = freeze_statistics(network, patches)"
        not_whole = f"The whole cannot be had in tiles ({self.exact}). " if self.exact else ""
        if self.is_seamless and self.without_halo.largest <= _SEAMLESS:
            return "nothing", "Nothing to do: the result does not depend on where tiles are cut."
        if self.is_seamless or not (self.layers or self.exact):
            return "halo", f"A halo alone, which predict_whole derives: {whole}"
        if self.removed is None or self.removed < _MENDED:
            if self.exact:
                return "overlap", f"{not_whole}Larger tiles, or tiles that overlap and are averaged."
            named = next((each.name for each in self.layers if each.kept), "")
            if not named and self.missing_halo:
                return "halo", f"First of all its halo of {_times(self.missing_halo)} positions: {whole}"
            named = named or "a chain of layers"
            return "whole", f"Whole: {named} needs all positions, and no constant can take its place: {whole}"
        distances = self.distances()
        if distances is None:
            if self.exact:
                return "frozen", f"{not_whole}Frozen: {frozen}"
            return "compare", (
                f"What it was trained on is not known here: patches=… tells it. Trained on whole volumes: {whole}. "
                f"Trained on patches: compare {frozen} with {by_tile} where you know the result."
            )
        tiles, own, patches = distances
        away = (
            f"from the patches' average, single patches are {patches:.2f} away, the whole {own:.2f}, tiles {tiles:.2f}"
        )
        if own <= max(patches, _NEAR) and not self.exact:
            return "whole", f"Whole, whose statistics are like those of patches ({away}): {whole}"
        if tiles <= max(patches, _NEAR) and not self.exact:
            return "tile", (
                f"Tile, whose statistics are like those of patches, unlike those of the whole ({away}): {by_tile}. "
                f"That keeps steps; without them: {frozen}"
            )
        scaled = " Perhaps the volume is scaled otherwise than the patches." if tiles > 1 + patches else ""
        return (
            "frozen",
            f"{not_whole}Frozen, as statistics of the volume are unlike those of patches ({away}): {frozen}.{scaled}",
        )

    def __str__(self) -> str:
        """Return the report as a table, with the advice."""
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        tile, reads, size, whole = map(_times, (self.tile, self.reads, self.size, self.volume_size))
        yield f"{self.network}: tiles of {tile} positions that read {reads}, on {size} of {whole} positions"
        yield ""
        yield f"{'two tilings, half a tile apart':32}{'mean':>10}{'largest':>10}{'step at borders':>18}"
        for name, each in (("without halo", self.without_halo), ("with halo", self.mismatch)):
            yield f"{name:32}{each.mean:>10.2%}{each.largest:>10.2%}{each.step:>16.2f} ×"
        if self.removed is not None:
            yield f"constant statistics of all layers remove {self.removed:.0%} of the difference with halo"
        if self.layers:
            yield ""
            yield from self._list_layers()
        yield ""
        if self.missing_halo:
            yield f"note: for its halo of {_times(self.missing_halo)} positions there was no room"
        yield from (f"note: {note}" for note in self.notes)
        yield self.advice

    def _list_layers(self) -> Iterator[str]:
        width = max(len(each.name) for each in self.layers[:_SHOWN])
        heading = f"{f'{len(self.layers)} layers over all positions':{width}}"
        center = "the patches'" if self.patches else "the tiles'"
        yield f"{heading}  removes   tiles   whole  patches   (distance from {center} average)"
        for each in self.layers[:_SHOWN]:
            if each.kept:
                yield f"{each.name:{width}}  not constant: {each.kept}"
                continue
            removed = "–" if each.removed is None else f"{each.removed:.0%}"
            columns = ("–" if number is None else f"{number:.2f}" for number in (each.tiles, each.whole, each.patches))
            tiles, whole, patches = columns
            yield f"{each.name:{max(width, len(heading))}}{removed:>9}{tiles:>8}{whole:>8}{patches:>9}"
        if len(self.layers) > _SHOWN:
            yield f"and {len(self.layers) - _SHOWN} more"

    @door("SeamReport.plot")
    def plot(self, path: str | Path) -> None:
        """Draw both predictions, their difference, and the curve along a line across a border of tiles.

        The line passes through the largest difference, in the channel that has it; of a grid of three spatial dims the
        plane through it is drawn. Needs matplotlib, which the extra `plots` has.

        Args:
            path: A file of a format that matplotlib writes, such as .png.

        Raises:
            ImportError: If matplotlib is not installed.
        """
        figures = load_library("matplotlib.figure", "plots", "it")
        one, other = self.predictions
        difference = (one - other).abs()
        channel, *place = (int(each) for each in torch.unravel_index(difference.argmax(), difference.shape))
        axis = max(range(len(place)), key=lambda each: (bool(self.borders[each]), each))
        beside = [each for each in range(len(place)) if each != axis][-1:]
        kept = sorted([axis, *beside])
        plane = (channel, *(slice(None) if each in kept else at for each, at in enumerate(place)))
        line = (channel, *(slice(None) if each == axis else at for each, at in enumerate(place)))
        figure = figures.Figure(figsize=(12, 7 if len(kept) == 2 else 3), layout="constrained")
        panels = figure.subplot_mosaic("012;333" if len(kept) == 2 else "3")
        names = ("tiling", "tiling shifted by half a tile", "difference")
        for number, grid in enumerate((one, other, difference) if len(kept) == 2 else ()):
            low, high = (None, None) if number == 2 else (float(one[plane].min()), float(one[plane].max()))
            axes = panels[str(number)]
            image = axes.imshow(grid[plane].numpy(), cmap="magma" if number == 2 else "gray", vmin=low, vmax=high)
            axes.set_title(names[number])
            axes.set_yticks([each - 0.5 for each in self.borders[kept[0]]], labels=[])
            axes.set_xticks([each - 0.5 for each in self.borders[kept[1]]], labels=[])
            figure.colorbar(image, ax=axes, shrink=0.7)
        for grid, name in zip((one, other), names, strict=False):
            panels["3"].plot(grid[line].numpy(), label=name, linewidth=1)
        for border in self.borders[axis]:
            panels["3"].axvline(border - 0.5, color="grey", linewidth=0.5)
        panels["3"].set_xlabel(f"position along axis {axis}; borders of tiles in grey")
        panels["3"].legend()
        figure.savefig(path)


def _times(numbers: Sequence[int]) -> str:
    return " × ".join(map(str, numbers))
