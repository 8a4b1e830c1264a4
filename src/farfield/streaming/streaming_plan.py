"""The plan of a prediction in tiles: tiles, passes and costs, known before the prediction starts."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import nn

from farfield.streaming.adapt import Outputs
from farfield.streaming.geometry import AxisScale, Halo, cores, cut_axes
from farfield.streaming.labels import label_graph
from farfield.streaming.layers import RecordedLayer
from farfield.streaming.operations import Graph, Value
from farfield.streaming.patches import PatchPlan, attention_only, see_tiles
from farfield.streaming.plan import GraphPlan, make_graph_plan
from farfield.streaming.scales import find_scales
from farfield.volumes.source import AxisLayout, Region, Span

# Work, in MACs of the network, above which a plan names a way to do less.
WORK = 4


class PlannedPass(NamedTuple):
    """A pass over all tiles.

    Attributes:
        summarizes: Paths of the layers that need the whole grid and are summarized.
        stores: Paths of the layers whose results are stored for later passes.
        halo: Positions of the volume that a tile reads before and after its own.
        macs: MACs for one sample, or for all of them where a layer mixes samples.
        bytes: The most bytes that the values of a tile take at once.
    """

    summarizes: tuple[str, ...]
    stores: tuple[str, ...]
    halo: Halo
    macs: float
    bytes: int


class PlannedOutput(NamedTuple):
    """The network's output.

    Attributes:
        shape: Its shape, of all samples.
        dtype: Its dtype.
        scales: For each spatial axis of the volume: the axis of the output that runs along it, and positions of the
            output per position of the volume; None if none does.
        kept: The spatial region that does not stand for padding alone.
        written: Size of the part that the first tile writes.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    scales: tuple[AxisScale | None, ...]
    kept: Region
    written: tuple[int, ...]


@dataclass
class StreamingPlan:
    """The plan of `predict_whole`. It can be pickled, and passed to it for other volumes of the same shape.

    Attributes:
        layout: Axes of the volume; of the first of several.
        channels: Number of channels of each volume that the network takes.
        size: Size of the volume, padded.
        padding: How many positions are padded before and after each spatial axis.
        pad: How they are padded.
        tile: Size of the tiles that are written.
        samples: Number of samples that run one after the other; 1 if layers mix samples.
        passes: The passes, each of which runs over all tiles of each sample.
        output: The network's output.
        outputs: The names of several outputs.
        macs: MACs of the untiled network on all samples.
        on_disk: Whether values that passes store for later ones are in files; else they are in memory.
        stored_bytes: The most bytes that they take at once.
        graph: The recorded network.
        stored: The stored values.
        halo: Positions of the volume that operations without a rule reach; None if there are none of those.
        reduction: The fingerprint of the argument `reduce`.
        patch: The graph of one patch, if norms, means and pooling see what a tile reads: statistics="tile".
        patch_size: The patch's size, if there is one.
        patch_halo: What its tile reads before and after its own positions.
    """

    layout: AxisLayout
    channels: tuple[int, ...]
    size: tuple[int, ...]
    padding: tuple[Span, ...]
    pad: str | None
    tile: tuple[int, ...]
    samples: int
    passes: tuple[PlannedPass, ...]
    output: PlannedOutput
    outputs: Outputs
    macs: int
    on_disk: bool
    stored_bytes: int
    graph: Graph
    stored: tuple[Value, ...]
    halo: tuple[int, ...] | None = None
    reduction: str = ""
    patch: Graph | None = None
    patch_size: tuple[int, ...] = ()
    patch_halo: Halo = field(default_factory=lambda: Halo((), ()))
    bound: GraphPlan | None = field(default=None, repr=False, compare=False)
    patches: PatchPlan | None = field(default=None, repr=False, compare=False)

    @property
    def unpadded(self) -> tuple[int, ...]:
        """Size of the volume."""
        return tuple(length - before - after for length, (before, after) in zip(self.size, self.padding, strict=True))

    @property
    def cores(self) -> list[Region]:
        """The own positions of each tile, in the padded volume: those that it writes, without halo."""
        return cores(self.size, self.tile)

    @property
    def recomputed(self) -> float:
        """MACs of all passes, relative to those of the untiled network."""
        return self.samples * sum(each.macs for each in self.passes) / max(1, self.macs)

    @property
    def tile_bytes(self) -> int:
        """The most bytes that the values of a tile take at once."""
        return max(each.bytes for each in self.passes)

    @property
    def disk_bytes(self) -> int:
        """The most bytes of disk that stored values take at once; the output is not counted."""
        return self.stored_bytes if self.on_disk else 0

    def __getstate__(self) -> dict[str, object]:
        """Save what describes the graph; its constants that are parameters or buffers come from the network again."""
        patch = None if self.patch is None else without_named(self.patch)
        return vars(self) | {"graph": without_named(self.graph), "patch": patch, "bound": None, "patches": None}

    def bind(self, caller: str, network: nn.Module) -> GraphPlan:
        """Return the plan of the graph with the parameters, buffers and layers of a network.

        Raises:
            ValueError: If the network is another one than was planned.
        """
        if self.bound is not None:
            return self.bound
        self.graph = bind_graph(caller, self.graph, network)
        labelled = label_graph(self.graph, self.size, cut_axes(self.size, self.tile), halo=self.halo)
        self.bound = make_graph_plan(labelled, self.tile, self.stored)
        if self.patch is not None:
            self.patch = bind_graph(caller, self.patch, network)
            self.patches = PatchPlan(
                attention_only(make_graph_plan(see_tiles(labelled), self.tile, [])),
                self.patch,
                self.patch_size,
                self.patch_halo,
                find_scales(labelled),
            )
            self.bound = self.patches.whole
        return self.bound

    def __str__(self) -> str:
        """Return the text that `predict_whole` prints."""
        return "\n".join(self.lines())

    def lines(self) -> list[str]:
        """Return the lines of text that `predict_whole` prints."""
        largest = functools.reduce(Halo.join, (each.halo for each in self.passes))
        size, tile = (" × ".join(map(str, each)) for each in (self.size, self.tile))
        halo = " × ".join(f"{before}+{after}" for before, after in zip(*largest, strict=True))
        text = [f"volume {size} positions" + (" (padded)" if any(map(any, self.padding)) else "")]
        count = f"{len(self.cores)} tiles" if len(self.cores) > 1 else "1 tile"
        memory = f"about {self.tile_bytes / 2**20:,.0f} MiB each"
        text.append(f"{count} of {tile} positions with a halo of {halo}, {memory}")
        if self.patch is not None:
            patch = " × ".join(map(str, self.patch_size))
            text.append(f'norms and pooling see the {patch} positions that a tile reads: statistics="tile"')
        if self.samples > 1:
            text.append(f"{self.samples} samples one after the other: no layer mixes them")
        for number, each in enumerate(self.passes):
            done = [("summarize", each.summarizes), ("store", each.stores)]
            what = ", ".join(f"{verb} {list_names(names)}" for verb, names in done if names) or "write"
            work = self.samples * each.macs / max(1, self.macs)
            text.append(f"pass {number + 1} of {len(self.passes)}: {what}; {work:.2f} times the network's MACs")
        if self.stored:
            where = "on disk" if self.on_disk else "in memory"
            count = f"{len(self.stored)} values are" if len(self.stored) > 1 else "1 value is"
            text.append(f"{count} stored {where} between passes, at most {self.stored_bytes:,} bytes at once")
        total = f"{self.macs / 1e9:,.1f} billion" if self.macs >= 1e9 else f"{self.macs / 1e6:,.3g} million"
        text.append(f"in total {self.recomputed:.2f} times the MACs of the untiled network, which are {total}")
        if self.recomputed > WORK and self.patch is None:
            text.append("to do less work: tile=Tiles(…, disk=bytes) stores values inside the network between passes")
        return text


# Names of constants that are no parameters or buffers begin with this.
UNNAMED = "tensor "


def without_named(graph: Graph) -> Graph:
    """Return a graph without the constants that are parameters or buffers of its network."""
    own = {name: tensor for name, tensor in graph.constants.items() if name.startswith(UNNAMED)}
    return replace(graph, constants=own)


def bind_graph(caller: str, graph: Graph, network: nn.Module) -> Graph:
    """Return a graph with the parameters, buffers and layers of a network.

    Raises:
        ValueError: If the network has not what the graph names.
    """
    named, modules = dict([*network.named_parameters(), *network.named_buffers()]), dict(network.named_modules())
    constants = dict(without_named(graph).constants)
    for index in graph.needed():
        node = graph.nodes[index]
        if node.op == "constant" and node.args[0] not in constants:
            tensor = named.get(node.args[0])
            if tensor is None or (tuple(tensor.shape), tensor.dtype) != tuple(node.outputs[0]):
                raise other_network(caller, network, f'no "{node.args[0]}" of shape {node.outputs[0].shape}')
            constants[node.args[0]] = tensor.detach()
        for part in node.args:
            if isinstance(part, RecordedLayer):
                if part.path not in modules:
                    raise other_network(caller, network, f'no "{part.path}"')
                part.module = modules[part.path]
    return replace(graph, constants=constants)


def list_names(names: Sequence[str], most: int = 4) -> str:
    """Return names as text, a few of them."""
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + rest


def other_network(caller: str, network: nn.Module, why: str) -> ValueError:
    """Return the error for a network that is not the one that was planned."""
    return ValueError(
        f"{caller}: plan is of another network: {type(network).__name__} has {why}; fix: plan_whole of this network."
    )
