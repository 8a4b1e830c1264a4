"""Runs the passes of a prediction over the tiles of a volume; of each flip, where their mean is wanted."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, cast

from torch import Tensor, nn

from farfield.nn.tracing import EnoughError
from farfield.streaming._plan_whole import ProbedPlan
from farfield.streaming.flips import MeanOverFlips, flip_grid, flip_region, mean_of
from farfield.streaming.geometry import Halo, count_positions, enlarge_region, index_within
from farfield.streaming.global_layers import NotLocalError
from farfield.streaming.reduction import Reduction, call_reduction, reduce_channels
from farfield.streaming.replacement import GlobalLayer, replace_layers
from farfield.streaming.runner import Stream
from farfield.streaming.spilling import SpillPlan
from farfield.streaming.statistics import TilePlace
from farfield.streaming.stored_grids import StoredGrids, axis_tiles, store_grids
from farfield.streaming.stored_keys import store_keys
from farfield.streaming.summaries import Merged
from farfield.streaming.tiling import Pass
from farfield.volumes.sink import box_index
from farfield.volumes.source import Region


class Prediction:
    """Runs a network's passes over the tiles of a volume; `run` starts them.

    Args:
        model: The network.
        plan: Its tiles and passes.
        reduce: Reduces its output over channels if it is a name.
        stream: Reads the volume, writes the output, and saves the progress.
    """

    def __init__(self, model: nn.Module, plan: ProbedPlan, reduce: Reduction, stream: Stream) -> None:
        self.model, self.plan, self.reduce, self.stream = model, plan, reduce, stream
        self.merged: list[Merged] = []
        if len(plan.passes) > 1:
            self.merged = [call.layer.start(f"predict_whole: {call.grid.name}") for call in plan.calls]
            layers, tiles = [call.layer for call in plan.calls], axis_tiles(plan.size, plan.tile)
            store_keys("predict_whole", self.merged, layers, plan.keys, tiles, len(plan.passes), stream)
        stream.merged = self.merged
        self.stored = store_grids("predict_whole", plan.spill, plan.size, plan.tile, stream) if plan.spill else None
        self.summaries: dict[int, Any] = {}  # call -> the merged summary
        self.call, self.core, self.region = 0, plan.cores[0], plan.cores[0]

    def run(self, quiet: bool) -> Any:
        """Run the remaining passes, and return the finished output."""
        passes = [("volume", partial(self.run_tile, each.calls, each.halo)) for each in self.plan.passes]
        if self.stored is not None:
            passes = [("volume", partial(self.run_part, index)) for index in range(len(passes))]
        return self.stream.run(passes, quiet)

    def run_part(self, stage: int, index: int, core: Region) -> None:
        """Run the part of the network that a pass needs on a tile, from stored grids; store grids or write the result.

        Args:
            stage: Index of the pass.
            index: Index of the tile.
            core: The tile's own positions.
        """
        spill, stored = cast(SpillPlan, self.plan.spill), cast(StoredGrids, self.stored)
        each, grids, size = spill.parts[stage], spill.network.grids, self.plan.size
        stored.begin(stage)
        self.core, self.region = core, self.plan.passes[stage].halo.around(core, size)
        given: dict[int | None, Tensor] = {}
        if each.part.volume:
            given[None] = self.stream.read("volume", index, self.region)
        own = {step: grids[step].part(core, size) for step in each.part.wanted}
        if not any(map(count_positions, own.values())):
            stored.skip(each.writes, index)
            return
        for step in each.part.reads:
            given[step] = stored.read(step, index, grids[step].part(self.region, size)).to(spill.network.device)
        results = spill.network.run(each.part, spill.network.graph_at(self.region, size), given, self.respond)
        for call, step in zip(each.calls, each.inputs, strict=True):
            self.summarize(call, self.plan.calls[call].layer, results[step], None)
        for step in each.writes:
            stored.write(step, index, results[step][index_within(own[step], grids[step].part(self.region, size))])
        if not each.calls:
            self.write(results[each.part.wanted[0]])

    def run_tile(self, calls: Sequence[int], halo: Halo, index: int, core: Region) -> None:
        """Run the network on a tile as far as the pass needs, and write the result in the last pass.

        Args:
            calls: Indices of the calls that the pass summarizes; empty in the last pass.
            halo: Halo of the pass.
            index: Index of the tile.
            core: The tile's own positions.
        """
        grid = self.read(halo, index, core)
        if not self.has_positions(calls):
            return
        output = self.run_network(grid, calls)
        if output is not None:
            self.write(output)

    def read(self, halo: Halo, index: int, core: Region) -> Tensor:
        """Read what a tile needs, and make it the tile that the other methods work on."""
        self.core = core
        self.region = enlarge_region(self.plan.least, halo.around(core, self.plan.size), self.plan.size)
        return self.stream.read("volume", index, self.region)

    def has_positions(self, calls: Sequence[int]) -> bool:
        """Whether the tile has positions of any grid that the pass needs."""
        grids = [self.plan.calls[call].grid for call in calls] or [self.plan.output.grid]
        return any(count_positions(grid.part(self.core, self.plan.size)) for grid in grids)

    def run_network(self, grid: Tensor, calls: Sequence[int]) -> Tensor | None:
        """Run the network on what the tile read; return its output, None if it ends at the last layer in `calls`."""
        self.call = 0
        try:
            return self.run_with_summaries(grid, calls) if self.merged else self.model(grid)
        except EnoughError:
            return None

    def run_with_summaries(self, grid: Tensor, calls: Sequence[int]) -> Tensor:
        """Run the network on what a tile reads, and return its output.

        A layer in `calls` is summarized. Any other responds to its summary, or by a placeholder if an earlier pass has
        not summarized it: then no layer in `calls` depends on it. Layers whose statistics are those of a tile run.

        Raises:
            EnoughError: When the last layer in `calls` is summarized.
            NotLocalError: If the network calls other layers than on the whole volume.
        """

        def forward(path: str | None, layer: GlobalLayer, own: Tensor, mask: Tensor | None) -> Tensor:
            call, self.call = self.call, self.call + 1
            self.check_call(call, layer, own)
            if self.plan.calls[call].in_tile:
                return layer.run_whole(own, mask)[1]
            if call in calls:
                self.summarize(call, layer, own, mask)
                if call == calls[-1]:
                    raise EnoughError
            elif not calls or self.merged[call].parts:
                return self.respond(call, layer, own, mask)
            return layer.placeholder(own)

        with replace_layers(self.model, forward):
            output = self.model(grid)
        self.check_call(self.call, None, None)
        return output

    def check_call(self, call: int, layer: GlobalLayer | None, own: Tensor | None) -> None:
        """Refuse a network that calls another layer, or ends earlier or later, on a tile than on the whole volume.

        Args:
            call: Index of the call.
            layer: The layer that is called; None at the end of the network.
            own: Its input.

        Raises:
            NotLocalError: If another layer, or none, is called with that index on the whole volume.
        """
        planned = self.plan.calls[call] if call < len(self.plan.calls) else None
        if planned is None or layer is None or own is None:
            same = planned is None and layer is None
        else:
            same = type(layer) is type(planned.layer) and own.shape[:2] == planned.grid.shape[:2]
        if not same:
            raise NotLocalError(
                f"predict_whole: {type(self.model).__name__} runs other layers on a tile of {self.region} than on the "
                f"whole volume, so tiles would not give its result; fix: another size of tiles, or model(volume) where "
                f"the volume fits in memory."
            )

    def summarize(self, call: int, layer: GlobalLayer, grid: Tensor, mask: Tensor | None) -> None:
        """Add a tile's own positions, without the halo, to the summary of a call."""
        network_grid = self.plan.calls[call].grid
        part = network_grid.part(self.core, self.plan.size)
        if not count_positions(part):
            return
        positions = index_within(part, network_grid.part(self.region, self.plan.size))
        own, valid = grid[positions], None if mask is None else mask[positions]
        place = TilePlace(tuple(start for start, _ in part), network_grid.size)
        layer.add(self.merged[call], own, valid, place)

    def respond(self, call: int, layer: GlobalLayer, grid: Tensor, mask: Tensor | None) -> Tensor:
        """Return the result for all positions that a tile reads, halo included, from the summary of the whole."""
        network_grid = self.plan.calls[call].grid
        if call not in self.summaries:
            self.summaries[call] = self.merged[call].whole(grid.device)
        origin = tuple(start for start, _ in network_grid.part(self.region, self.plan.size))
        return layer.respond(self.summaries[call], grid, mask, TilePlace(origin, network_grid.size))

    def write(self, output: Tensor) -> None:
        """Write the output at a tile's own positions, without those that stand for padding alone."""
        plan, own = self.plan, self.plan.output.grid.part(self.core, self.plan.size)
        kept = zip(own, plan.kept, strict=True)
        part = tuple((max(start, low), min(stop, high)) for (start, stop), (low, high) in kept)
        if any(start >= stop for start, stop in part):
            return
        box = output[index_within(part, plan.output.grid.part(self.region, plan.size))]
        box = reduce_channels("predict_whole", self.reduce, box)
        target = tuple((start - low, stop - low) for (start, stop), (low, _) in zip(part, plan.kept, strict=True))
        shape = plan.layout.shape(output.shape[0], plan.output.channels, box.shape[2:])
        self.stream.write(box_index(shape, target), box.reshape(shape))


class FlippedPrediction:
    """Runs the passes of each flip of a volume, then one that writes the mean over all of them; `run` starts them.

    A flip reads the region that the tile itself reads, flipped: its halo is the same before and after.

    Args:
        model: The network, and the axes that are flipped.
        plan: Its tiles and passes; each flip takes all but the last by itself.
        reduce: Reduces the mean.
        stream: Reads the volume, writes the output, and saves the progress.
    """

    def __init__(self, model: MeanOverFlips, plan: ProbedPlan, reduce: Reduction, stream: Stream) -> None:
        self.model, self.plan, self.reduce, self.stream = model, plan, reduce, stream
        self.predictions = {flip: Prediction(model.network, plan, reduce, stream) for flip in model.flips}
        stream.merged = [each for prediction in self.predictions.values() for each in prediction.merged]

    def run(self, quiet: bool) -> Any:
        """Run the remaining passes, and return the finished output."""
        *first, last = self.plan.passes
        passes = [("volume", partial(self.summarize, flip, each)) for flip in self.predictions for each in first]
        return self.stream.run([*passes, ("volume", partial(self.write_mean, last))], quiet)

    def summarize(self, flip: tuple[int, ...], each: Pass, index: int, core: Region) -> None:
        """Run the network on a tile of a flip as far as a pass needs."""
        prediction, grid = self.read(flip, each, index, core)
        if prediction.has_positions(each.calls):
            prediction.run_network(grid, each.calls)

    def write_mean(self, last: Pass, index: int, core: Region) -> None:
        """Run the network on a tile of each flip, and write their mean."""
        mean = mean_of(self.output(flip, last, index, core) for flip in self.predictions)
        # The first is not flipped: its tile lies in the volume as the mean does.
        self.predictions[()].write(
            call_reduction("predict_whole", self.reduce, mean) if callable(self.reduce) else mean
        )

    def output(self, flip: tuple[int, ...], last: Pass, index: int, core: Region) -> Tensor:
        """Run the network on a tile of a flip, and return its output, flipped back."""
        prediction, grid = self.read(flip, last, index, core)
        return flip_grid(cast(Tensor, prediction.run_network(grid, last.calls)), flip)

    def read(self, flip: tuple[int, ...], each: Pass, index: int, core: Region) -> tuple[Prediction, Tensor]:
        """Return the prediction of a flip, and what a tile of it needs."""
        prediction, size = self.predictions[flip], self.plan.size
        region = enlarge_region(self.plan.least, each.halo.around(core, size), size)
        prediction.core, prediction.region = flip_region(core, flip, size), flip_region(region, flip, size)
        return prediction, flip_grid(self.stream.read("volume", index, region), flip)
