"""The plan of a prediction in tiles: tiles, passes and costs, known before the prediction starts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from farfield._checks import ShapeError
from farfield._fingerprint import fingerprint
from farfield._refusals import door, refusal
from farfield.streaming.adapt import MeanOverFlips, Outputs, Reduce, one_grid
from farfield.streaming.arguments import parse_layouts, refuse_training
from farfield.streaming.graph import Graph, Node, Value
from farfield.streaming.labels import GraphError, LabelledGraph, label_graph
from farfield.streaming.patches import refuse_moved
from farfield.streaming.plan import GraphPlan, PatchPlan, PlannedPass, RegionCheck, join_halos
from farfield.streaming.record import AROUND, record_network
from farfield.streaming.recording import Recording
from farfield.streaming.spans import axes_of
from farfield.volumes.place import Place, stretch
from farfield.volumes.source import AxisLayout, Region, Span

# Work, in MACs of the network, above which a plan names a way to do less.
_WORK = 4


class PlannedOutput(NamedTuple):
    """The network's output, of all samples."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    # For each spatial axis of the volume, without padding, the axis of the output that runs along it, and where what is
    # kept stands; None if none runs along it.
    places: tuple[tuple[int, Place] | None, ...]
    # The spatial region that does not stand for padding alone.
    kept: Region
    # Size of the part that the first tile writes.
    written: tuple[int, ...]
    # By axis of the volume, what makes the place of the output along it uncertain.
    doubts: dict[int, str]


def plan_output(recording: Recording, plan: GraphPlan, padding: Sequence[Span], samples: int) -> PlannedOutput:
    """Return what is known of the output; refuse one whose axes are not those of the volume."""
    labelled, size, graph = plan.labelled, recording.size, recording.graph
    info, layout = graph.info(graph.output), labelled.layouts[graph.output]
    own = {dim[0].axis: place for place, dim in enumerate(layout) if dim[0].axis is not None}
    there, places, doubts = recording.output_axes | own, recording.places.of[graph.output], {}
    moved = (plan.cut or any(map(any, padding))) and any(place < 2 for place in there.values())
    if moved or axes_of(layout[:2]) or any(len(dim) > 1 for dim in layout):
        raise GraphError(
            f"its output {info.shape} is no grid (batch, channels, *size) of the volume's axes; fix: a module "
            "around it that returns one: self.network(grid)[:, None] where it has no channels, .movedim(-1, 1) "
            "where they are last"
        )
    along: list[tuple[int, Place] | None] = []
    kept = [(0, length) for length in info.shape[2:]]
    for axis, (length, (before, after)) in enumerate(zip(size, padding, strict=True)):
        # Labels do not tell an axis along which the network cannot be cut, nor one of a single position.
        known = axis not in labelled.cut or axis in places
        same = known and len(layout) == len(size) + 2 and axis + 2 not in there.values()
        place = there.get(axis, axis + 2 if same else None)
        if place is None:
            along.append(None)
            continue
        scale, offset = places.get(axis, stretch(length, info.shape[place]))
        ends = [int(each / abs(scale)) for each in (before, after)][:: 1 if scale > 0 else -1]
        own_place = Place(scale, offset + ends[0] * scale - before)
        if scale < 0:
            doubts[axis] = "it is flipped, which a voxel size does not tell"
        elif axis in recording.places.doubts:
            doubts[axis] = f"{recording.places.doubts[axis]}, of which it has the first"
        elif axis not in places and info.shape[place] != length:
            doubts[axis] = "no rule tells it, and it is taken to be as long as the volume"
        elif own_place != Place() and info.shape[place] == length:
            doubts[axis] = f"it has the volume's positions, as in training, and by its layers stands at {own_place}"
        kept[place - 2] = ends[0], info.shape[place] - ends[1]
        along.append((place, own_place))
    if any(start >= stop for start, stop in kept):
        raise refusal(
            ShapeError,
            f"the network returns {info.shape[2:]} for size {size}, nothing of which is left "
            f"without the {tuple(padding)} padded positions; fix: a larger volume, or one that needs no padding.",
        )
    box = labelled.core(layout, plan.tiles[0])
    written = tuple(min(stop - start, high - low) for ((start, stop),), (low, high) in zip(box[2:], kept, strict=True))
    shape = (info.shape[0] * samples, *info.shape[1:])
    return PlannedOutput(shape, info.dtype, tuple(along), tuple(kept), written, doubts)


@dataclass
class StreamingPlan:
    """The plan of `predict_whole`. It can be pickled, and passed to it for other volumes of the same shape.

    Attributes:
        layout: Axes of the volume; of the first of several.
        channels: Number of channels of each volume that the network takes.
        padding: How many positions are padded before and after each spatial axis.
        pad: How they are padded.
        samples: Number of samples that run one after the other; 1 if layers mix samples.
        passes: The passes, each of which runs over all tiles of each sample.
        output: The network's output.
        outputs: The names of several outputs.
        on_disk: Whether values that passes store for later ones are in files; else they are in memory.
        reduction: The fingerprint of the argument `reduce`.
        check: The check on a region of the volume before the first pass, or why there is none.
        graph_plan: How the recorded network runs on one sample, or on all where layers mix them.
    """

    layout: AxisLayout
    channels: tuple[int, ...]
    padding: tuple[Span, ...]
    pad: str | None
    samples: int
    passes: tuple[PlannedPass, ...]
    output: PlannedOutput
    outputs: Outputs
    on_disk: bool
    reduction: str
    check: RegionCheck | str
    graph_plan: GraphPlan = field(repr=False)

    @property
    def size(self) -> tuple[int, ...]:
        """Size of the volume, padded."""
        return self.graph_plan.labelled.size

    @property
    def tile(self) -> tuple[int, ...]:
        """Size of the tiles that are written."""
        return self.graph_plan.tile

    @property
    def cores(self) -> list[Region]:
        """The own positions of each tile, in the padded volume: those that it writes, without halo."""
        return self.graph_plan.tiles

    @property
    def batch(self) -> int:
        """Number of samples of the volume."""
        graph = self.graph_plan.labelled.graph
        return self.samples * graph.info(graph.inputs[0]).shape[0]

    @property
    def output_layout(self) -> AxisLayout:
        """Axes of the output: those of the volume; answers and several outputs have one of channels, also of one."""
        return self.layout._replace(channels=True) if self.outputs.channels else self.layout

    @property
    def patch_size(self) -> tuple[int, ...]:
        """The size of a patch, if norms, means and pooling see what a tile reads: statistics="tile"."""
        return self.graph_plan.patch.size if isinstance(self.graph_plan, PatchPlan) else ()

    @property
    def macs(self) -> int:
        """MACs of the untiled network on all samples."""
        labelled = self.graph_plan.labelled
        return self.samples * sum(labelled.graph.nodes[index].macs for index in labelled.order)

    @property
    def recomputed(self) -> float:
        """MACs of all passes, relative to those of the untiled network."""
        return self.samples * sum(each.macs for each in self.passes) / max(1, self.macs)

    @property
    def tile_bytes(self) -> int:
        """The most bytes that the values of a tile take at once."""
        return max(each.bytes for each in self.passes)

    @property
    def stored(self) -> tuple[Value, ...]:
        """The values that passes store for later ones."""
        return tuple(self.graph_plan.stored)

    @property
    def stored_bytes(self) -> int:
        """The most bytes that stored values take at once."""
        return self.graph_plan.bytes_stored

    @property
    def disk_bytes(self) -> int:
        """The most bytes of disk that stored values take at once; the output is not counted."""
        return self.stored_bytes if self.on_disk else 0

    def __getstate__(self) -> dict[str, object]:
        """Save what describes the graph; its constants come from the network again, but those of `reduce`."""
        return vars(self) | self._convert(_without_labels)

    def _convert(self, function: Callable[[LabelledGraph], LabelledGraph]) -> dict[str, Any]:
        """Return the plans of the volume and of the region that is checked, by field, with other graphs."""
        plan, check = self.graph_plan, self.check
        changed: dict[str, Any] = {"patch": function(plan.patch)} if isinstance(plan, PatchPlan) else {}
        plan = replace(plan, labelled=function(plan.labelled), **changed)
        if isinstance(check, RegionCheck):
            check = replace(check, plan=replace(check.plan, labelled=function(check.plan.labelled)))
        return {"graph_plan": plan, "check": check}

    def bind(self, caller: str, network: nn.Module) -> StreamingPlan:
        """Return the plan with the tensors and layers of a network; refuse one that runs others than was planned.

        The network is recorded again: what it reads in Python, such as attributes and `tensor.item()`, is in its graph.
        """
        with door(caller):
            refuse_training(network.network if isinstance(network, MeanOverFlips) else network)
            bound = replace(self, **self._convert(lambda labelled: _bind_graph(labelled, network, self.outputs)))
            if isinstance(bound.graph_plan, PatchPlan):
                refuse_moved(bound.graph_plan)
        return bound

    def __str__(self) -> str:
        """Return the text that `predict_whole` prints."""
        return "\n".join(self.lines())

    def lines(self) -> list[str]:
        """Return the lines of text that `predict_whole` prints."""
        largest = join_halos(each.halo for each in self.passes)
        size, tile = (" × ".join(map(str, each)) for each in (self.size, self.tile))
        halo = " × ".join(f"{before}+{after}" for before, after in zip(*largest, strict=True))
        text = [f"volume {size} positions" + (" (padded)" if any(map(any, self.padding)) else "")]
        count = f"{len(self.cores)} tiles" if len(self.cores) > 1 else "1 tile"
        memory = f"about {self.tile_bytes / 2**20:,.0f} MiB each"
        text.append(f"{count} of {tile} positions with a halo of {halo}, {memory}")
        if self.patch_size:
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
            count = f"{len(self.stored)} values are" if len(self.stored) > 1 else "1 value is"
            text.append(f"{count} stored {where} between passes, at most {self.stored_bytes:,} bytes at once")
        total = f"{self.macs / 1e9:,.1f} billion" if self.macs >= 1e9 else f"{self.macs / 1e6:,.3g} million"
        text.append(f"in total {self.recomputed:.2f} times the MACs of the untiled network, which are {total}")
        if isinstance(self.check, RegionCheck):
            region = " × ".join(map(str, self.check.size))
            share = f"{self.check.macs / max(1, self.macs):.2g} times the network's MACs"
            if self.check.bytes > self.tile_bytes:
                share += f", and {self.check.bytes:,} bytes for parameters in float64"
            text.append(f"before, tiles are compared with the network on a region of {region} positions: {share}")
        else:
            text.append(f"not checked: {self.check}")
        text += [f"place of the output along axis {axis}: {each}" for axis, each in self.output.doubts.items()]
        if self.recomputed > _WORK and not self.patch_size:
            text.append("to do less work: tile=Tiles(…, disk=bytes) stores values inside the network between passes")
        return text


def _list_names(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _without_labels(labelled: LabelledGraph) -> LabelledGraph:
    """Return a graph without labels, which follow from it, and without constants of its network."""
    graph = replace(labelled.graph, constants=_constants_around(labelled.graph), calls=[])
    return LabelledGraph(graph, labelled.size, labelled.cut, labelled.halo, levels=labelled.levels)


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
    bound = replace(graph, constants=constants, nodes=graph.nodes + reduced, output=planned.output)
    # Levels are those of the plan: on patches, they are not those that follow from the labels.
    return replace(label_graph(bound, labelled.size, labelled.cut, halo=labelled.halo), levels=labelled.levels)


def _other_network(network: nn.Module, why: str) -> ValueError:
    return refusal(
        ValueError, f"plan is of another network: {type(network).__name__} {why}; fix: plan_whole of this network."
    )


def check_plan(
    plan: Any,
    volumes: Mapping[str, Any],
    tile: Any,
    pad: str | None,
    reduce: Reduce,
    known: Sequence[AxisLayout | None] = (),
) -> StreamingPlan:
    """Return a plan that was given; refuse one of other volumes, or beside what it has itself."""
    if not isinstance(plan, StreamingPlan):
        raise refusal(TypeError, f"plan must be what plan_whole returns, got {type(plan).__name__}; fix: plan=None.")
    if tile is not None or pad is not None:
        raise refusal(ValueError, "got tile or pad beside plan, which has both; fix: give them to plan_whole.")
    if reduce is not None and fingerprint(reduce) != plan.reduction:
        raise refusal(ValueError, "got another reduce than plan was made with; fix: give it to plan_whole.")
    layouts = parse_layouts([each.shape for each in volumes.values()], plan.layout.spatial_dims, known)
    size = [length - sum(positions) for length, positions in zip(plan.size, plan.padding, strict=True)]
    plan = replace(plan, layout=known[0]) if known and known[0] else plan  # a plan knows no letters
    planned = plan.layout.shape(plan.batch, plan.channels[0], size)
    first = tuple(next(iter(volumes.values())).shape)
    pairs = zip(layouts, volumes.values(), strict=True)
    if first != planned or tuple(own.batch_and_channels(each.shape)[1] for own, each in pairs) != plan.channels:
        raise refusal(
            ShapeError,
            f"plan is of volumes of another shape.\n  planned  {planned}\n  got      {first}\n"
            "  fix: plan_whole(model, volume.shape).",
        )
    return plan
