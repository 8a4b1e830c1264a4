"""A recorded network: the axes along which it is cut, its strides, and the region on which it is checked."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property

import torch

from farfield.streaming.arguments import round_up
from farfield.streaming.graph import Graph, RecordedLayer, Value, map_values
from farfield.streaming.labels import (
    GraphError,
    LabelledGraph,
    box_at,
    count_bytes,
    find_ratio,
    find_regions,
    label_graph,
)
from farfield.streaming.places import Places, find_places
from farfield.streaming.plan import GraphPlan, PatchPlan, RegionCheck, find_stored, join_halos, make_graph_plan
from farfield.streaming.rules import POINTWISE, find_rule
from farfield.streaming.spans import Piece, whole_box

# Steps of more positions, or in more parts of one, are no even ones, if they are no multiple or part of one.
_FINEST = 8
# The share of the planned MACs that a check may take, and what it may take of any volume: a tenth of a second.
_SHARE, _FEW_MACS, _FEW_BYTES = 0.02, 2 * 10**9, 2**26
# Positions along an axis of a region that are enough where halos are smaller.
_ENOUGH = 32
# Tiles of a volume above which a region is cut along all axes, and not along the last alone.
_MANY = 64

# Samples that are looked at for whether they are mixed, evenly from the first to the last.
_LOOKED_AT = 31
# The place of the number of samples among the arguments.
_TOLD = ("aten.native_group_norm.default", 3)
# Operations that move numbers and compute none.
_MOVES = ("view", "expand", "permute", "aten.clone.default")

# Axis of the volume -> positions of the volume from one position of a value to the next.
Scales = dict[int, Fraction]


@dataclass
class Recording:
    """A network that was recorded on one size; `halo` is how far operations without a rule reach, as of its labels."""

    graph: Graph
    size: tuple[int, ...]
    halo: Sequence[int] | None
    # Records the same network on another size.
    record: Callable[[tuple[int, ...]], Recording] | None = None
    _labelled: dict[tuple[int, ...], LabelledGraph] = field(default_factory=dict)

    def label(self, axes: Sequence[int]) -> LabelledGraph:
        """Return the graph with its labels for a volume that is cut along these axes; raise GraphError if it cannot."""
        try:
            return self._label(axes)
        except GraphError as error:
            if "; fix: " in str(error):
                raise
            tile = tuple(
                max(1, length // 2) if axis in self.cuttable else None for axis, length in enumerate(self.size)
            )
            where = "" if self.cuttable else ", in one piece"
            raise GraphError(f"{error}; fix: tile={tile}{where}") from error

    def _label(self, axes: Sequence[int]) -> LabelledGraph:
        if tuple(axes) not in self._labelled:
            self._labelled[tuple(axes)] = label_graph(self.graph, self.size, axes, halo=self.halo)
        return self._labelled[tuple(axes)]

    def _try_label(self, axes: Sequence[int]) -> LabelledGraph | None:
        try:
            return self._label(axes)
        except GraphError:
            return None

    @cached_property
    def cuttable(self) -> tuple[int, ...]:
        """The axes along which it can be cut: all together, or else each by itself."""
        axes = tuple(range(len(self.size)))
        return axes if self._try_label(axes) else tuple(axis for axis in axes if self._try_label([axis]))

    @cached_property
    def scales(self) -> dict[Value, Scales]:
        """The scales of each value along all these axes, where it has even steps."""
        return find_scales(self.places)

    @cached_property
    def places(self) -> Places:
        """Where each value stands along all axes, those along which it cannot be cut included."""
        axes = tuple(range(len(self.size)))
        return find_places(
            self._try_label(axes) or label_graph(self.graph, self.size, axes, halo=self.halo, refused={})
        )

    def _scales_twice_the_size(self) -> dict[Value, Scales]:
        """Return the scales on twice the size, of a network that resizes to sizes that may follow from the volume's."""
        nodes = [self.graph.nodes[index] for index in self.graph.needed()]
        resizes = any("adaptive" in node.op or ("upsample" in node.op and node.args[-1] is None) for node in nodes)
        if resizes and self.record is not None:
            with suppress(ValueError):
                other = self.record(tuple(2 * length for length in self.size))
                if [node.op for node in other.graph.nodes] == [node.op for node in self.graph.nodes]:
                    return other.scales
        return self.scales

    @cached_property
    def strides(self) -> tuple[int, ...]:
        """For each axis, the least common multiple of all strides to the volume, which are those of any size."""
        strides: list[set[int]] = [{1} for _ in self.size]
        others = self._scales_twice_the_size()
        for value, own in self.scales.items():
            node = self.graph.nodes[value.node]
            if node.op == "view":  # which takes windows apart: it computes nothing, and has no stride
                continue
            # What is resized to one size has another scale there, and no stride.
            for axis, scale in own.items() & others.get(value, {}).items():
                if any(self.scales.get(source, {}).get(axis, scale) != scale for source in node.inputs):
                    strides[axis].add(scale.numerator)
        return tuple(math.lcm(*own) for own in strides)

    @property
    def output_axes(self) -> dict[int, int]:
        """Axis of the volume -> the dimension of the output that runs along it."""
        labelled = self._try_label(self.cuttable)
        layout = labelled.layouts[self.graph.output] if labelled else ()
        return {dim[0].axis: place for place, dim in enumerate(layout) if len(dim) == 1 and dim[0].axis is not None}

    def runs_as(self, one: Recording) -> bool:
        """Whether each sample of several is what a network that was recorded on `one` gives for it alone."""
        count, graph = self.graph.info(self.graph.inputs[0]).shape[0], self.graph
        try:
            labelled = label_graph(graph, (count,), [0], first=0)
        except GraphError:
            return False
        if labelled.reductions or labelled.gathered or labelled.layouts[graph.output][0] != (Piece(count, 0),):
            return False
        # Few places move samples in the middle alone, and each of very many takes its time.
        looked_at = sorted({round(place * (count - 1) / _LOOKED_AT) for place in range(_LOOKED_AT + 1)})
        return _compute_the_same(graph, one.graph) and all(_needs_itself(labelled, sample) for sample in looked_at)


def _needs_itself(labelled: LabelledGraph, sample: int) -> bool:
    """Whether the output of a sample is computed of that sample of each volume."""
    output, inputs = labelled.graph.output, labelled.graph.inputs
    regions = find_regions(labelled, {output: box_at(labelled.layouts[output], 0, sample)}, inputs)
    return all(regions[value][0] == (((sample, sample + 1),),) for value in inputs if value in regions)


def _compute_the_same(several: Graph, one: Graph) -> bool:
    """Whether graphs of several samples and of one have the same operations, whose constants repeat for each sample."""
    pairs = list(itertools.zip_longest(_list_steps(several), _list_steps(one)))
    if any(first is None or other is None or first[1] != other[1] for first, other in pairs):
        return False
    for (index, _), (place, _) in pairs:
        node, alone = several.nodes[index], one.nodes[place]
        if node.op == "constant" and not torch.equal(several.constants[node.args[0]], one.constants[node.args[0]]):
            return False
        # What is pointwise repeats what its operands do.
        if node.known and node.op != "full" and find_rule(node.op) is not POINTWISE:
            lengths = [
                [math.prod(graph.info(value).shape) for value in own]
                for graph, own in ((several, (*node.inputs, Value(index))), (one, (*alone.inputs, Value(place))))
            ]
            if lengths[0] != lengths[1]:
                return False
    return True


def _list_steps(graph: Graph) -> Iterator[tuple[int, str]]:
    """Iterate over operations that compute, and not only move numbers, as torch does for several samples alone."""
    steps, numbers = dict[Value, str](), itertools.count()
    for index in graph.needed():
        node = graph.nodes[index]
        if node.op in _MOVES:
            steps[Value(index)] = steps[node.inputs[0]]
            continue
        number = next(numbers)
        steps |= {Value(index, output): f"{number} {output}" for output in range(len(node.outputs))}
        args = tuple(each for place, each in enumerate(node.args) if (node.op, place) != _TOLD)
        args = map_values(map_values((args, node.kwargs), RecordedLayer, lambda layer: layer.path), Value, steps.get)
        yield index, f"{node.op} {node.path} {args}"


def find_scales(places: Places) -> dict[Value, Scales]:
    """Return the even steps of values."""
    scales = dict[Value, Scales]()
    for value, own in places.of.items():
        scales[value] = {}
        for axis, (scale, _) in own.items():
            # Resampling to a size takes somewhat more or less than an even step, which no stride is to follow.
            many, few = find_ratio(scale.denominator, abs(scale.numerator))
            if min(many, few) == 1 or max(many, few) <= _FINEST:
                scales[value][axis] = Fraction(few, many)
    return scales


def plan_check(
    record: Callable[[tuple[int, ...]], Recording], plan: GraphPlan, strides: Sequence[int], samples: int
) -> RegionCheck | str:
    """Plan the largest check that takes at most `_SHARE` of the planned MACs, and a tile's bytes; or tell why none.

    What takes few of both is no matter of a share, such as the whole of a small volume.
    """
    labelled, size = plan.labelled, None
    most = max(_SHARE * samples * sum(each.macs for each in plan.passes), _FEW_MACS)
    room = max(_FEW_BYTES, *(each.bytes for each in plan.passes))
    reach = tuple(map(max, *join_halos(each.halo for each in plan.passes)))
    untiled, output = sum(labelled.graph.nodes[index].macs for index in labelled.order), labelled.graph.output
    regions = find_regions(labelled, {output: whole_box(labelled.layouts[output])}, labelled.graph.inputs)
    peak = count_bytes(labelled, regions, labelled.graph.inputs, [output])
    batch = min(samples, 2)
    for each in [*region_sizes(labelled.size, plan.cut, strides, reach), labelled.size]:
        # By positions, and tiles with their halos as twice the network; in float64 that takes twice the bytes.
        share = batch * math.prod(each) / math.prod(labelled.size)
        if 4 * share * untiled <= most and 2 * share * peak <= room:
            size = each
    if size is None:
        return "the volume is one tile" if not plan.cut else "a region of two strides takes too much work, or memory"
    # A patch runs in one piece, of whatever size.
    cut = () if isinstance(plan, PatchPlan) else plan.cut
    try:
        recorded = record(size).label(cut)
    except (GraphError, ValueError, TypeError) as error:
        return f"the network does not run on a region of size {size} ({str(error).splitlines()[0]:.80})"
    # Batch norms have outputs that are empty, and not read.
    if any(0 in recorded.graph.nodes[index].outputs[0].shape for index in recorded.order):
        return f"the network crops all of a region of size {size}"
    stored = find_stored(recorded)
    if set(plan.stored) <= stored:
        stored = {*recorded.gathered, *plan.stored}
    # Tiles of a region take their time however few positions they have: two where the volume has few.
    halved = cut if len(plan.tiles) > _MANY else cut[-1:]
    tile = [
        round_up(length // stride, 2) // 2 * stride if axis in halved and length >= 2 * stride else length
        for axis, (length, stride) in enumerate(zip(size, strides, strict=True))
    ]
    own = make_graph_plan(recorded, tile, stored)
    cost = 2.0 * sum(recorded.graph.nodes[index].macs for index in recorded.order)
    cost = batch * (cost + sum(each.macs for each in own.passes))
    if cost > most:
        return "it takes too much of the work"
    # In float64, convolutions of torch on a CPU unfold: as many numbers as they take products for an output channel.
    nodes = recorded.graph.nodes
    unfolded = max((node.macs // node.outputs[0].shape[1] for node in nodes if "convolution" in node.op), default=0)
    return RegionCheck(own, cost, 8 * (unfolded + sum(each.numel() for each in recorded.graph.constants.values())))


def region_sizes(
    size: Sequence[int], cut: Sequence[int], strides: Sequence[int], reach: Sequence[int]
) -> Iterator[tuple[int, ...]]:
    """Iterate over sizes of regions, the smallest first, up to those in whose middle a halo ends within them."""
    # Along axes that are cut a region has so many strides and what the volume has beyond those; at least two along one.
    most = {}
    for axis in cut:
        halo, enough = -(-reach[axis] // strides[axis]), -(-_ENOUGH // strides[axis])
        most[axis] = min(size[axis] // strides[axis], max(2 * halo + 2, enough))
    for steps in range(1, max(most.values(), default=1) + 1):
        # Two strides along the last axis alone, then along one more, then three along all, and so on.
        for doubled in range(len(cut)) if steps == 1 else [len(cut)]:
            counts = {
                axis: min(most[axis], max(steps, 2 if place <= doubled else 1))
                for place, axis in enumerate(reversed(cut))
            }
            yield tuple(
                counts[axis] * strides[axis] + length % strides[axis] if axis in counts else length
                for axis, length in enumerate(size)
            )
