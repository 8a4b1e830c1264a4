"""The plan of a prediction in tiles: where its passes end, and what they read, store and cost."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from farfield._refusals import door, refusal
from farfield.ops.modes import has_tf32
from farfield.streaming.adapt import MeanOverFlips, Outputs, one_grid
from farfield.streaming.arguments import Cores, cut_axes, refuse_training
from farfield.streaming.graph import Graph, Node, Value
from farfield.streaming.labels import LabelledGraph, fit_tile, label_graph, summarized_boxes
from farfield.streaming.patches import Patch, refuse_moved
from farfield.streaming.record import AROUND, record_network
from farfield.streaming.spans import Box, Halo, hull, is_empty, join_halos
from farfield.volumes.place import Place
from farfield.volumes.source import AxisLayout, Region, Span

# Bytes of a process that predicts, beside what tiles take: of libraries and what they keep; and of each byte of the
# values of a tile, with the workspace of kernels.
_LIBRARIES, _WORKSPACE = 750e6, 1.2


class PlannedPass(NamedTuple):
    """A pass over all tiles: where it ends, and what it costs. The last one writes the output."""

    summarizes: tuple[str, ...]  # paths of the layers that need the whole grid and are summarized
    stores: tuple[str, ...]  # paths of the layers whose results are stored for later passes
    reductions: tuple[int, ...]  # the nodes that are summarized
    writes: tuple[Value, ...]  # the values that are stored
    reads: tuple[Value, ...]  # the values of earlier passes that it reads
    halo: Halo  # positions of the volume that a tile reads before and after its own
    macs: float = 0.0  # for one sample, or for all of them where a layer mixes samples
    bytes: int = 0  # the most that the values of a tile take at once


@dataclass
class StreamingPlan:
    """The plan of `predict_whole`. It can be pickled, and passed to it for other volumes of the same shape.

    Attributes:
        labelled: The recorded network, of one sample, or of all where layers mix them.
        tile: Size of the tiles that are written.
        passes: The passes, each of which runs over all tiles of each sample.
        cuts: The nodes behind which a pass ends though nothing is summed, as halos cost more than to store what
            crosses.
        patch: The patch that a tile runs on, if norms, means and pooling see what a tile reads.
        layout: Axes of the volume; of the first of several.
        channels: Number of channels of each volume that the network takes.
        padding: How many positions are padded before and after each spatial axis.
        pad: How they are padded.
        samples: Number of samples that run one after the other; 1 if layers mix samples.
        outputs: The names of several outputs.
        places: For each spatial axis of the volume, without padding, the axis of the output that runs along it, and
            where what is kept stands; None if none runs along it.
        doubts: By axis of the volume, what makes the place of the output along it uncertain.
        kept: The spatial region of the output that does not stand for padding alone.
        is_moved: Whether tiles write from where that begins, in whole chunks.
        on_disk: Whether values that passes store for later ones are in files; else they are in memory.
        with_disk: Bytes of disk with which these tiles would compute much less again, and how often the network's MACs
            that is; None if they would not.
        reduction: The fingerprint of the argument `reduce`.
        check: The check on a region of the volume before the first pass, or why there is none.
        threads: Number of torch's threads that a tile runs with, of which its rounding follows; 0 is torch's own.
        workers: Number of tiles that run at once.
    """

    labelled: LabelledGraph = field(repr=False)
    tile: tuple[int, ...]
    passes: tuple[PlannedPass, ...]
    cuts: tuple[int, ...] = ()
    patch: Patch | None = field(default=None, repr=False)
    layout: AxisLayout = field(default_factory=lambda: AxisLayout(0, False, 0))
    channels: tuple[int, ...] = ()
    padding: tuple[Span, ...] = ()
    pad: str | None = None
    samples: int = 1
    outputs: Outputs = field(default_factory=Outputs)
    places: tuple[tuple[int, Place] | None, ...] = ()
    doubts: dict[int, str] = field(default_factory=dict)
    kept: Region = ()
    is_moved: bool = False
    on_disk: bool = False
    with_disk: tuple[int, float] | None = None
    reduction: str = ""
    check: RegionCheck | str = ""
    threads: int = 0
    workers: int = 1

    @property
    def size(self) -> tuple[int, ...]:
        """Size of the volume, padded."""
        return self.labelled.size

    @cached_property
    def cores(self) -> Cores:
        """The own positions of each tile, in the padded volume: those that it writes, without halo."""
        return Cores(self.size, self.tile)

    @property
    def cut(self) -> tuple[int, ...]:
        """The axes that are cut."""
        return cut_axes(self.size, self.tile)

    @property
    def batch(self) -> int:
        """Number of samples of the volume."""
        graph = self.labelled.graph
        return self.samples * graph.info(graph.inputs[0]).shape[0]

    @property
    def output_shape(self) -> tuple[int, ...]:
        """Shape of the network's output, of all samples, with what stands for padding."""
        shape = self.labelled.graph.info(self.labelled.graph.output).shape
        return (shape[0] * self.samples, *shape[1:])

    @property
    def output_dtype(self) -> torch.dtype:
        """That of the network's output."""
        return self.labelled.graph.info(self.labelled.graph.output).dtype

    @property
    def output_layout(self) -> AxisLayout:
        """Axes of the output: those of the volume; answers and several outputs have one of channels, also of one."""
        return self.layout._replace(channels=True) if self.outputs.channels else self.layout

    @property
    def patch_size(self) -> tuple[int, ...]:
        """The size of a patch, if norms, means and pooling see what a tile reads: statistics="tile"."""
        return self.patch.labelled.size if self.patch else ()

    @property
    def halo(self) -> Halo:
        """The largest halo of all passes."""
        return join_halos(each.halo for each in self.passes)

    @property
    def macs(self) -> int:
        """MACs of the untiled network on all samples."""
        return self.samples * sum(self.labelled.graph.nodes[index].macs for index in self.labelled.order)

    @property
    def recomputed(self) -> float:
        """MACs of all passes, relative to those of the untiled network."""
        return self.samples * sum(each.macs for each in self.passes) / max(1, self.macs)

    @property
    def tile_bytes(self) -> int:
        """The most bytes that the values of a tile take at once."""
        return max(each.bytes for each in self.passes)

    # ---- what passes store -------------------------------------------------------------------------------------------
    @cached_property
    def lives(self) -> dict[Value, tuple[int, int]]:
        """Of each value that is stored, the pass that writes it, and the last one that reads it."""
        last = {value: number for number, each in enumerate(self.passes) for value in each.reads}
        first = {value: number for number, each in enumerate(self.passes) for value in each.writes}
        # What training returns of several values ends with its last pass, and is not read.
        return {value: (first[value], last.get(value, first[value])) for value in sorted(first)}

    @property
    def stored(self) -> tuple[Value, ...]:
        """The values that passes store for later ones."""
        return tuple(self.lives)

    @property
    def stored_bytes(self) -> int:
        """The most bytes that stored values take at once."""
        return count_stored(self.labelled, self.passes)

    @property
    def disk_bytes(self) -> int:
        """The most bytes of disk that stored values take at once; the output is not counted."""
        return self.stored_bytes if self.on_disk else 0

    @property
    def process_bytes(self) -> float:
        """About the most bytes of memory that the process takes, beside the network, and volumes that are arrays."""
        tiles = self.workers * self.tile_bytes * _WORKSPACE if self.labelled.graph.device.type == "cpu" else 0
        written = self.workers * self.output_bytes / len(self.cores)
        check = self.check.bytes if isinstance(self.check, RegionCheck) else 0
        return _LIBRARIES + max(tiles, check) + written + (0 if self.on_disk else self.stored_bytes)

    @property
    def output_bytes(self) -> int:
        """Bytes of the output, which is packed in most files."""
        return math.prod(self.output_shape) * self.output_dtype.itemsize

    # ---- in another process ------------------------------------------------------------------------------------------
    def __getstate__(self) -> dict[str, Any]:
        """Save what describes the graph; its constants come from the network again, but those of `reduce`."""
        state = self._convert(_without_labels)
        return {each.name: getattr(state, each.name) for each in fields(state)}

    def _convert(self, function: Callable[[LabelledGraph], LabelledGraph]) -> StreamingPlan:
        """Return the plan, and that of the region that is checked, with other graphs."""
        patch, check = self.patch, self.check
        if patch:
            patch = replace(patch, labelled=function(patch.labelled))
        if isinstance(check, RegionCheck):
            check = check._replace(plan=check.plan._convert(function))
        return replace(self, labelled=function(self.labelled), patch=patch, check=check)

    def bind(self, caller: str, network: nn.Module) -> StreamingPlan:
        """Return the plan with the tensors and layers of a network; refuse one that runs others than was planned.

        The network is recorded again: what it reads in Python, such as attributes and `tensor.item()`, is in its graph.
        """
        with door(caller):
            refuse_training(network.network if isinstance(network, MeanOverFlips) else network)
            bound = self._convert(lambda labelled: _bind_graph(labelled, network, self.outputs))
            refuse_moved_parts(bound)
        return bound

    # ---- as text -----------------------------------------------------------------------------------------------------
    def __str__(self) -> str:
        """Return the text that `predict_whole` prints."""
        memory, output, disk = (
            f"{each / 1e9:,.2f} GB" if each >= 1e7 else f"{each / 1e6:,.2g} MB"
            for each in (self.process_bytes, self.output_bytes, self.disk_bytes)
        )
        needs = f"about {memory} of memory in the process, beside the network; an output of {output}"
        return "\n".join([*self.lines(), needs + f", and {disk} of disk until it is finished" * bool(self.disk_bytes)])

    def lines(self) -> list[str]:
        """Return the lines of text that `predict_whole` prints."""
        size, tile = (" × ".join(map(str, each)) for each in (self.size, self.tile))
        halo = " × ".join(f"{before}+{after}" for before, after in zip(*self.halo, strict=True))
        text = [f"volume {size} positions" + (" (padded)" if any(map(any, self.padding)) else "")]
        count = f"{len(self.cores)} tiles" if len(self.cores) > 1 else "1 tile"
        memory = f"about {self.tile_bytes / 2**20:,.0f} MiB each"
        text.append(f"{count} of {tile} positions with a halo of {halo}, {memory}")
        threads = f"{self.threads} thread{'s' * (self.threads > 1)}" if self.threads else "the threads"
        at_once = f"{self.workers} tiles at once, each" if self.workers > 1 else "one tile after the other,"
        text.append(f"{at_once} with {threads} of torch")
        if self.labelled.graph.device.type == "cuda" and has_tf32():
            text.append("products of float32 are rounded to TF32 where torch's switches say so; the check is without")
        if self.patch:
            patch = " × ".join(map(str, self.patch_size))
            text.append(f'norms and pooling see the {patch} positions that a tile reads: statistics="tile"')
        if self.samples > 1:
            names = {"T": "times", "Z": "planes"}
            samples = " × ".join(f"{length} {names[letter]}" for letter, length in self.layout.samples if length > 1)
            text.append(f"{samples or f'{self.samples} samples'} one after the other: no layer mixes them")
        for number, each in enumerate(self.passes):
            done = [("summarize", each.summarizes), ("store", each.stores)]
            what = ", ".join(f"{verb} {_list_names(names)}" for verb, names in done if names) or "write"
            work = self.samples * each.macs / max(1, self.macs)
            text.append(f"pass {number + 1} of {len(self.passes)}: {what}; {work:.2f} times the network's MACs")
        if self.stored:
            where = "on disk" if self.on_disk else "in memory"
            where += f" as {stored}".replace("torch.", "") if (stored := self.labelled.graph.stored) else ""
            count = f"{len(self.stored)} values are" if len(self.stored) > 1 else "1 value is"
            text.append(f"{count} stored {where} between passes, at most {self.stored_bytes:,} bytes at once")
        total = f"{self.macs / 1e9:,.1f} billion" if self.macs >= 1e9 else f"{self.macs / 1e6:,.3g} million"
        text.append(f"in total {self.recomputed:.2f} times the MACs of the untiled network, which are {total}")
        if isinstance(self.check, RegionCheck):
            region = " × ".join(map(str, self.check.plan.size))
            share = f"{self.check.macs / max(1, self.macs):.2g} times the network's MACs"
            if self.check.bytes > self.tile_bytes:
                share += f", and {self.check.bytes:,} bytes for parameters in float64"
            text.append(f"before, tiles are compared with the network on a region of {region} positions: {share}")
        else:
            text.append(f"not checked: {self.check}")
        text += [f"place of the output along axis {axis}: {each}" for axis, each in self.doubts.items()]
        if self.with_disk is not None:
            disk, recomputed = self.with_disk
            text.append(f"to do less work: with tile=Tiles(…, disk={disk:,}) it is {recomputed:.2f} times the MACs")
        return text


class RegionCheck(NamedTuple):
    """A check on a region, which runs as if it were the volume."""

    # The passes over its tiles, of which there are at least two.
    plan: StreamingPlan
    # Of the untiled network in two precisions, and of the tiles.
    macs: float
    # Of the network's parameters and buffers in float64, and of what a convolution unfolds; grids take less.
    bytes: int


def count_stored(labelled: LabelledGraph, passes: Sequence[PlannedPass], *, keeps_all: bool = False) -> int:
    """Return the most bytes that stored values take at once, each kept until it is not read any more, or to the end."""
    most, there = 0, set[Value]()
    for number, each in enumerate(passes):
        there |= {*each.writes}
        most = max(most, sum(labelled.graph.stored_info(value).bytes for value in there))
        if not keeps_all:
            there &= {value for later in passes[number + 1 :] for value in later.reads}
    return most


# ---- what a task computes --------------------------------------------------------------------------------------------
def find_wanted(
    plan: StreamingPlan, number: int, tile: Sequence[Span]
) -> tuple[dict[int, dict[Value, Box]], dict[Value, Box]]:
    """Return what a pass summarizes of a tile, for each reduction, and all boxes that it computes."""
    labelled = plan.labelled
    every = {index: summarized_boxes(labelled, index, tile) for index in plan.passes[number].reductions}
    summarized = {index: boxes for index, boxes in every.items() if boxes}
    pairs = [pair for boxes in summarized.values() for pair in boxes.items() if pair[0] not in labelled.kept]
    ends = find_ends(labelled, plan.passes, number)
    pairs += [(value, box) for value in ends if (box := own_box(plan, value, tile)) is not None]
    wanted: dict[Value, Box] = {}
    for value, box in pairs:
        wanted[value] = hull(wanted.get(value, box), box)
    return summarized, wanted


def find_ends(labelled: LabelledGraph, passes: Sequence[PlannedPass], number: int) -> list[Value]:
    """Return the values that a pass computes to store and write them."""
    return [*passes[number].writes, *([labelled.graph.output] if number == len(passes) - 1 else [])]


def own_box(plan: StreamingPlan, value: Value, tile: Sequence[Span]) -> Box | None:
    """Return a tile's own part of a value; None if it has none. What it writes of the output may be moved."""
    labelled, layout = plan.labelled, plan.labelled.layouts[value]
    box = labelled.core(layout, tile)
    if plan.is_moved and value == labelled.graph.output:
        moved = []
        for (piece,), ((start, stop),), (low, high) in zip(layout[2:], box[2:], plan.kept, strict=True):
            first = min(high, low + start)
            moved.append(((first, high if stop == piece.length else max(first, min(high, low + stop))),))
        box = (*box[:2], *moved)
    return None if is_empty(box) or not labelled.owns(layout, tile) else box


def refuse_moved_parts(plan: StreamingPlan) -> None:
    """Refuse a network of which a constant, or what a position reads, is another on a patch than on the whole."""
    if plan.patch:
        numbers = range(len(plan.passes))
        refuse_moved(
            plan.labelled, plan.patch, plan.tile, lambda own: [find_wanted(plan, number, own)[1] for number in numbers]
        )


# ---- as text, and in another process ---------------------------------------------------------------------------------
def _list_names(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _without_labels(labelled: LabelledGraph) -> LabelledGraph:
    """Return a graph without labels, which follow from it, and without constants of its network."""
    graph = replace(labelled.graph, constants=_constants_around(labelled.graph), calls=[])
    return LabelledGraph(graph, labelled.size, labelled.cut, labelled.halo, labelled.tile)


def _constants_around(graph: Graph) -> dict[str, Tensor]:
    """Return the constants of what ran behind the network: of `reduce`, and where several outputs are joined."""
    names = (node.args[0] for node in graph.nodes if node.op == "constant" and node.path == AROUND)
    return {name: graph.constants[name] for name in names}


def describe_graph(nodes: Sequence[Node]) -> list[str]:
    """Return a text for each node: equal ones give equal numbers from equal constants, whose names do not count."""
    return [repr(node._replace(args=() if node.op == "constant" else node.args, path="", macs=0)) for node in nodes]


def _bind_graph(labelled: LabelledGraph, network: nn.Module, outputs: Outputs) -> LabelledGraph:
    """Return a graph with its labels, and the tensors and layers of a network; refuse one of other operations."""
    planned = labelled.graph
    volumes = [planned.info(value) for value in planned.inputs]
    found = outputs

    def finish(output: Any) -> Tensor:
        nonlocal found
        grid, found = one_grid(network, volumes[0].shape, output, outputs.taken)
        return grid

    try:
        graph = record_network(network, volumes, finish, planned)
    except (RuntimeError, IndexError, ValueError, TypeError, AssertionError) as error:
        raise _other_network(network, f"does not run on a volume of shape {volumes[0].shape}: {error}") from error
    count = len(graph.nodes)
    pairs = zip(describe_graph(graph.nodes), describe_graph(planned.nodes), strict=False)
    other = next((index for index, (own, was) in enumerate(pairs) if own != was), None)
    if other is not None:
        own, was = (f"{each.nodes[other].op} in {each.nodes[other].path}" for each in (graph, planned))
        raise _other_network(network, f"runs {own}, and the plan {was}" + " with other arguments" * (own == was))
    reduced = planned.nodes[count:]
    ends = {value for node in reduced for value in node.inputs if value.node < count} or {planned.output}
    around, own_around = (sum(node.path == AROUND for node in each.nodes) for each in (planned, graph))
    if (ends, found) != ({graph.output}, outputs) or around != own_around + len(reduced):
        raise _other_network(network, "returns other results")
    constants = _constants_around(planned) | graph.constants
    bound = replace(
        graph, constants=constants, nodes=graph.nodes + reduced, output=planned.output, stored=planned.stored
    )
    return fit_tile(label_graph(bound, labelled.size, labelled.cut, halo=labelled.halo), labelled.tile)


def _other_network(network: nn.Module, why: str) -> ValueError:
    return refusal(
        ValueError, f"plan is of another network: {type(network).__name__} {why}; fix: plan_whole of this network."
    )
