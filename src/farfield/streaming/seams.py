"""Seams of a network in tiles: how far two tilings differ, which layers it comes from, and what mends it."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor, nn

from farfield._checks import ShapeError, check_network
from farfield._refusals import door, refusal
from farfield.nn.devices import device_of, dtype_of, free_bytes
from farfield.nn.tracing import looks_at_a_copy
from farfield.streaming._plan_whole import plan_volumes, record_calls
from farfield.streaming.adapt import one_grid
from farfield.streaming.arguments import (
    Tiles,
    arrange_volumes,
    parse_layouts,
    parse_tiles,
    refuse_meta,
    refuse_training,
    round_up,
    round_up_tile,
    spatial_dims_of,
)
from farfield.streaming.check import find_varied
from farfield.streaming.frozen import ObservedNetwork, RunningMeans, observe_patches, read_patches
from farfield.streaming.global_calls import NORMS, GlobalCall, Key, find_global_calls
from farfield.streaming.graph import Info
from farfield.streaming.places import Record
from farfield.streaming.plan import StreamingPlan
from farfield.streaming.seam_report import GlobalLayer, SeamReport, compare_tilings
from farfield.streaming.spans import Halo, Span
from farfield.volumes.source import VolumeSource, overlap, size_of

# Tiles of the part of a volume that is examined, at most; and the share of the free memory that it may take untiled.
_MOST_TILES, _MEMORY_SHARE = 16, 0.25
# Runs on tiles for which single layers are frozen, at most, but for four a layer.
_MOST_RUNS = 256
# Statistics of each call.
_Statistics = Mapping[Key, Sequence[Tensor]]
_Region = tuple[Span, ...]
# Own positions of each tile, and the region that it reads.
_Tiles = Sequence[tuple[_Region, _Region]]


@door("find_seams")
def find_seams(network: nn.Module, volume: Any, tile: int | Sequence[int | None], patches: Any = None) -> SeamReport:
    """Find out how far a network in tiles depends on where they are cut, by which layers, and what mends it.

    The same positions are predicted by two tilings that are shifted by half a tile, as by a sliding window: each tile
    runs alone, with a halo and without. What differs with the halo comes from layers that sum over all positions of a
    tile. Of each of these the statistics in tiles, in the whole and in patches are compared, and tiles run again in
    which it alone is constant: the layers are in the order of how much of the difference goes with them. Mismatch of
    tiles and disparity of statistics are those of arXiv 2503.19545.

    Args:
        network: Network in eval mode, as of `predict_whole`; also one that does not run exactly in tiles. Of one that
            cannot be recorded, as a scripted one, the tilings alone are compared.
        volume: As of `predict_whole`. A part of at most 16 tiles around its middle, or where it is not constant, is
            read and examined as if it were the volume, of a batch the first sample.
        tile: Size of the tiles without halo: one number, or one per spatial dim, None for those that are not cut;
            rounded up to multiples of the strides.
        patches: Patches as the training had them, as of `freeze_statistics`. Without them it is not known whether the
            statistics of the whole are like those of the training, and the advice is what to compare.

    Returns:
        A report: `print` shows it as a table with the advice, `plot(path)` draws it.

    Raises:
        TypeError: If network is no module, volume or patches no arrays of numbers, or tile no integers.
        ValueError: If the network is in training mode or does not run on a tile, if tile is not smaller than the volume
            (`ShapeError`), or if its result is not finite, or no grid whose size is a multiple or a fraction of its
            input's; if a patch is not finite, or the network does not run on it.

    Cost:
        Up to about 130 tiles, 256 tiles in which single layers are constant or four for each layer, the part untiled
        where it takes a quarter of the free memory at most, and the patches.

    Example:
        >>> from farfield.streaming import find_seams
        >>> layers = [nn.Conv2d(1, 8, 3, padding=1), nn.InstanceNorm2d(8), nn.Conv2d(8, 1, 3, padding=1)]
        >>> seams = find_seams(nn.Sequential(*layers).eval(), torch.rand(1, 96, 96), tile=32)
        >>> seams.layers[0].name, round(seams.layers[0].removed, 2)
        ('1: F.instance_norm', 1.0)
        >>> find_seams(nn.Conv2d(1, 8, 3, padding=1).eval(), torch.rand(1, 96, 96), tile=32).choice
        'halo'
    """
    check_network(network, "network", "find_seams(network, volume, tile)")
    refuse_training(network)
    refuse_meta(device_of(network))
    scripted = any(isinstance(module, torch.jit.ScriptModule) for module in network.modules())
    examine = _examine if scripted else looks_at_a_copy(_examine, "find_seams")
    with torch.no_grad():
        report: SeamReport = examine(network, volume, tile, patches)
    return report


def _examine(network: nn.Module, volume: Any, tile: Any, patches: Any) -> SeamReport:
    part = _Part(network, volume, parse_tiles(tile))
    tilings = [part.find_tiles(part.halo, shifted) for shifted in (False, True)]
    observed = [[part.run(region) for _, region in tiles] for tiles in tilings]
    one, other = (
        part.assemble(tiles, [grid for grid, _ in runs]) for tiles, runs in zip(tilings, observed, strict=True)
    )
    if not (one.isfinite().all() and other.isfinite().all()):
        raise refusal(
            ValueError,
            f"the result of {type(network).__name__} is not finite on the part of the volume that was read; fix: "
            "numpy.nan_to_num(volume), or a module around the network that returns finite numbers.",
        )
    bare = [part.find_tiles(Halo(*[(0,) * len(part.size)] * 2), shifted) for shifted in (False, True)]
    alone = [part.assemble(tiles, [part.run(region)[0] for _, region in tiles]) for tiles in bare]
    extent = float(one.max() - one.min()) or 1.0
    borders = part.find_borders()
    report = SeamReport(
        network=type(network).__name__,
        tile=part.tile,
        halo=part.halo,
        size=part.size,
        volume_size=part.volume_size,
        mismatch=compare_tilings([one, other], extent, borders),
        without_halo=compare_tilings(alone, extent, borders),
        predictions=(one[0], other[0]),
        borders=borders,
        notes=tuple(part.notes),
        exact=part.exact,
        missing_halo=part.missing,
    )
    if not part.calls or report.is_seamless:
        return replace(report, layers=tuple(GlobalLayer(str(call), kept=call.kept) for call in part.calls))
    in_tiles = [statistics for _, statistics in itertools.chain(*observed)]
    in_patches = []
    if patches is not None:
        samples = read_patches("find_seams", network, patches)
        in_patches = list(observe_patches(part.observed, samples))
    in_whole = part.run_whole()
    center = RunningMeans()
    for each in in_patches or in_tiles:
        center.add(each)
    able = [call.key for call in part.calls if call.key in center]
    removed, together = _find_removed(part, tilings, observed, center, able)

    def spread(statistics: Sequence[_Statistics], key: Key) -> float | None:
        own = [_distance(key, each[key], center[key]) for each in statistics if key in each and key in center]
        return sum(own) / len(own) if own else None

    layers = [
        GlobalLayer(
            str(call),
            call.kept,
            removed.get(call.key),
            *(spread(each, call.key) for each in (in_tiles, in_whole, in_patches)),
        )
        for call in part.calls
    ]
    layers.sort(key=lambda layer: -math.inf if layer.removed is None else layer.removed, reverse=True)
    notes = tuple(part.notes)
    return replace(report, layers=tuple(layers), removed=together, patches=len(in_patches), notes=notes)


def _find_removed(
    part: _Part,
    tilings: Sequence[_Tiles],
    observed: Sequence[Sequence[tuple[Tensor, Any]]],
    center: _Statistics,
    able: Sequence[Key],
) -> tuple[dict[Key, float], float | None]:
    """Return the share of the difference that goes where each call alone is constant, and where all are.

    The difference is that of the pairs of tiles, one of each tiling, that differ most.
    """
    pairs = []
    for places in itertools.product(*(range(len(tiles)) for tiles in tilings)):
        cores = (tiles[place][0] for tiles, place in zip(tilings, places, strict=True))
        if (both := overlap(*cores)) is not None:
            pairs.append((places, both))

    def differ(chosen: Sequence[tuple[Any, _Region]], results: Callable[[int, int], Tensor]) -> list[float]:
        sums = []
        for places, both in chosen:
            one, other = (
                part.crop(results(tiling, place), tilings[tiling][place][1], both)
                for tiling, place in enumerate(places)
            )
            sums.append(float((one.double() - other.double()).abs().sum()))
        return sums

    scores = differ(pairs, lambda tiling, place: observed[tiling][place][0])
    chosen, total, regions = [], 0.0, set[tuple[int, int]]()
    for score, (places, both) in sorted(zip(scores, pairs, strict=True), reverse=True):
        if len(regions | {*enumerate(places)}) <= max(4, _MOST_RUNS // max(1, len(able))):
            regions |= {*enumerate(places)}
            chosen.append((places, both))
            total += score

    def remove(keys: Sequence[Key]) -> float:
        frozen = {key: center[key] for key in keys}
        run = functools.cache(lambda tiling, place: part.run(tilings[tiling][place][1], frozen)[0])
        return 1 - sum(differ(chosen, run)) / total

    return {key: remove([key]) for key in able}, remove(able) if able else None


class _Part:
    """The part of a volume that is examined, and how the network runs on tiles of it."""

    def __init__(self, network: nn.Module, volume: Any, tiles: Tiles) -> None:
        self.network, self.notes = network, list[str]()
        _, volumes, known = arrange_volumes("find_seams", network, tiles, volume)
        if tiles.size is None:
            raise refusal(TypeError, "tile must be the size of tiles, got None; fix: tile=64, for example.")
        dims = spatial_dims_of(network, tiles.size, known=known[0])
        layouts = parse_layouts([each.shape for each in volumes.values()], dims, known)
        sources = [
            VolumeSource(array, layout, device_of(network), dtype_of(network, array), caller="find_seams")
            for array, layout in zip(volumes.values(), layouts, strict=True)
        ]
        self.volume_size = sources[0].size
        shapes = [(1, source.channels, *self.volume_size) for source in sources]
        self.volumes = [(Info(shape, dtype_of(network)), None) for shape in shapes]
        self.record: Record | None = None
        self.calls, strides = self._find_calls()
        self.tile = round_up_tile(tiles.size, self.volume_size, strides)
        self.size = _choose_size(self.tile, self.volume_size, strides)
        if self.size == self.tile:
            raise refusal(
                ShapeError,
                f"tiles of {self.tile} are not smaller than the volume.\n  volume  {self.volume_size}\n"
                f"  fix: tile={max(1, min(self.volume_size) // 4)}, for example.",
            )
        # Half a tile, by strides.
        self.shift = tuple(
            round_up(own // stride, 2) // 2 * stride if own < length else 0
            for own, length, stride in zip(self.tile, self.size, strides, strict=True)
        )
        self.volumes = [(info._replace(shape=(*info.shape[:2], *self.size)), None) for info, _ in self.volumes]
        self.missing: tuple[int, ...] = ()
        self.halo = self._find_halo(strides)
        region, first = find_varied(self.size, self.volume_size, lambda region: sources[0].read(region, 0)[:1])
        self.grids = [first, *(source.read(region, 0)[:1] for source in sources[1:])]
        self.observed = ObservedNetwork(network, self.calls)
        self.ratios: list[Fraction] = []

    def _find_calls(self) -> tuple[list[GlobalCall], tuple[int, ...]]:
        """Return the calls that sum over all positions, and the strides."""
        try:
            recorded = record_calls(self.network, [info.shape[1] for info, _ in self.volumes], self.volume_size)
            self.record = recorded.record
            return find_global_calls(recorded), recorded.strides
        except (ValueError, TypeError) as error:
            self.notes.append(f"its layers are not known: {_first_line(error)}")
            return [], (1,) * len(self.volume_size)

    def _find_halo(self, strides: Sequence[int]) -> Halo:
        """Return the halo that its operations need; where that is not known or too large, one of a part of the tile."""
        cut = [own < length for own, length in zip(self.tile, self.size, strict=True)]
        quarter = tuple(
            round_up(own // 4, stride) if there else 0
            for own, stride, there in zip(self.tile, strides, cut, strict=True)
        )
        _, self.exact = self._plan(Tiles(self.tile))
        plan, _ = self._plan(Tiles(self.tile, statistics="tile"))
        if plan is None:
            self.notes.append("the halo is a quarter of the tile, as it is not known")
            return Halo(quarter, quarter)
        halo = plan.halo
        room = zip(self.size, self.tile, *halo, self.shift, strict=True)
        if any(own + before + after + shift > length for length, own, before, after, shift in room):
            self.missing = tuple(map(max, *halo))
            halo = Halo(*(tuple(map(min, side, quarter)) for side in halo))
        return halo

    def _plan(self, tiles: Tiles) -> tuple[StreamingPlan | None, str]:
        """Return how the network runs on the part; None, and why not, if it does not."""
        try:
            return plan_volumes(self.network, self.volumes, tiles, record=self.record), ""
        except (ValueError, TypeError) as error:
            return None, _first_line(error)

    def find_tiles(self, halo: Halo, shifted: bool) -> _Tiles:
        """Return the own positions of each tile, and the region that it reads: of one size, within the part."""
        axes = []
        for length, own, before, after, shift in zip(self.size, self.tile, *halo, self.shift, strict=True):
            ends = [0, *range(shift if shifted and shift else own, length, own), length]
            size = min(length, own + before + after)
            spans = []
            for start, stop in itertools.pairwise(ends):
                first = min(max(0, start - before), length - size)
                spans.append(((start, stop), (first, first + size)))
            axes.append(spans)
        return [(tuple(core for core, _ in tile), tuple(read for _, read in tile)) for tile in itertools.product(*axes)]

    def run(self, region: _Region, frozen: _Statistics | None = None) -> tuple[Tensor, dict[Key, list[Tensor]]]:
        """Run the network on a region; return the result, and the statistics of its calls."""
        inside = tuple(slice(start, stop) for start, stop in region)
        grids = [grid[(slice(None), slice(None), *inside)] for grid in self.grids]
        try:
            output, statistics = self.observed.run(*grids, frozen=frozen or {})
        except (RuntimeError, IndexError, ValueError, TypeError, AssertionError) as error:
            size = tuple(grids[0].shape[2:])
            text = f"{type(self.network).__name__} does not run on a tile of size {size}: {error}"
            raise refusal(ValueError, f"{text}\n  fix: a tile that it takes.") from error
        grid = one_grid(self.network, grids[0].shape, output)[0]
        self._check_output(grid, size_of(region))
        return grid, statistics

    def _check_output(self, grid: Tensor, size: Sequence[int]) -> None:
        ratios = [Fraction(own, length) for own, length in zip(grid.shape[2:], size, strict=False)]
        if grid.dim() == 2:
            text = f"{type(self.network).__name__} returns an answer for the whole, which has no seams"
            raise refusal(TypeError, f"{text}; fix: its part that returns a grid, before the mean over positions.")
        known = len(ratios) == grid.dim() - 2 == len(size)
        # Along an axis that is not cut, tiles have the whole, whatever its length is.
        axes = zip(ratios, self.tile, self.size, strict=False)
        if not known or any(own < length and 1 not in (by.numerator, by.denominator) for by, own, length in axes):
            raise refusal(
                ValueError,
                f"{type(self.network).__name__} returns a grid of size {tuple(grid.shape[2:])} for a tile of size "
                f"{tuple(size)}, which is no multiple or fraction of it; fix: a module around it that pads the grid.",
            )
        self.ratios = ratios

    def run_whole(self) -> list[_Statistics]:
        """Return the statistics of the part untiled, if it fits."""
        plan, _ = self._plan(Tiles(self.size))
        needed = plan.passes[0].bytes if plan else 0
        if needed > _MEMORY_SHARE * free_bytes(device_of(self.network)):
            self.notes.append(f"the whole was not run, as it takes {needed:,} bytes")
            return []
        return [self.run(tuple((0, length) for length in self.size))[1]]

    def crop(self, grid: Tensor, region: _Region, inside: _Region) -> Tensor:
        """Return the positions of a region's result that stand for a region inside it."""
        parts = zip(region, inside, self.ratios, strict=True)
        spans = tuple(
            slice(int((start - first) * ratio), int((stop - first) * ratio))
            for (first, _), (start, stop), ratio in parts
        )
        return grid[(slice(None), slice(None), *spans)]

    def assemble(self, tiles: _Tiles, grids: Sequence[Tensor]) -> Tensor:
        """Put the results of tiles together, each its own positions."""
        size = [int(length * ratio) for length, ratio in zip(self.size, self.ratios, strict=True)]
        dtype = torch.promote_types(torch.float32, grids[0].dtype)
        result = torch.empty(*grids[0].shape[:2], *size, dtype=dtype, device=grids[0].device)
        origin = tuple((0, length) for length in self.size)
        for (core, region), grid in zip(tiles, grids, strict=True):
            self.crop(result, origin, core).copy_(self.crop(grid, region, core))
        return result.cpu()

    def find_borders(self) -> tuple[tuple[int, ...], ...]:
        """Return along each axis of the output where tiles of the first tiling begin, but for the first."""
        axes = zip(self.size, self.tile, self.ratios, strict=True)
        return tuple(tuple(int(start * ratio) for start in range(own, length, own)) for length, own, ratio in axes)


def _choose_size(tile: Sequence[int], size: Sequence[int], strides: Sequence[int]) -> tuple[int, ...]:
    """Return the size of the part that is examined: multiples of the strides, of few tiles."""
    counts = [_MOST_TILES if own < length else 1 for own, length in zip(tile, size, strict=True)]

    def sizes() -> list[int]:
        most = (
            min(length // stride * stride, count * own) if own < length else length
            for own, length, stride, count in zip(tile, size, strides, counts, strict=True)
        )
        return [max(own, length) for own, length in zip(tile, most, strict=True)]

    while math.prod(-(-length // own) for length, own in zip(sizes(), tile, strict=True)) > _MOST_TILES:
        longest = max(range(len(counts)), key=lambda axis: -(-sizes()[axis] // tile[axis]))
        counts[longest] = -(-sizes()[longest] // tile[longest]) - 1
    return tuple(sizes())


def _first_line(error: Exception) -> str:
    text = str(error).splitlines()[0].partition("; fix")[0]
    return text.rpartition("does not run in tiles: ")[2]


def _distance(key: Key, statistics: Sequence[Tensor], center: Sequence[Tensor]) -> float:
    """Return how far statistics are from others: of a norm in its deviations, of a result by its size.

    sqrt(sum of (mean - mean')² + (deviation - deviation')² over sum of deviation'²)
    """
    if key[1] in NORMS:
        mean, deviation = statistics[0] - center[0], statistics[1].sqrt() - center[1].sqrt()
        squares, size = mean.square() + deviation.square(), center[1]
    else:
        squares = torch.cat([(one - other).square().flatten() for one, other in zip(statistics, center, strict=True)])
        size = torch.cat([each.square().flatten() for each in center])
    return float((squares.sum() / size.sum().clamp(min=torch.finfo(torch.float64).tiny)).sqrt())
