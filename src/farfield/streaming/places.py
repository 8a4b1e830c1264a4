"""Where the values of a recorded network stand in the volume: its strides, and the axes along which it is cut."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from farfield._refusals import is_refusal, refusal
from farfield.nn.network_copy import CannotCopyError
from farfield.nn.scripted_network import ScriptError
from farfield.streaming.adapt import Outputs, Reduce, one_grid
from farfield.streaming.graph import Graph, Info, RecordedLayer, RecordingError, Value, map_values
from farfield.streaming.labels import GraphError, LabelledGraph, box_at, find_ratio, find_regions, label_graph
from farfield.streaming.record import record_network
from farfield.streaming.rules import POINTWISE, find_rule
from farfield.streaming.spans import Piece, lengths_along
from farfield.volumes.place import Place, stretch

# Steps of more positions, or in more parts of one, are no even ones, if they are no multiple or part of one.
_FINEST = 8
# Samples that are looked at for whether they are mixed, evenly from the first to the last.
_LOOKED_AT = 31
# The place of the number of samples among the arguments.
_TOLD = ("aten.native_group_norm.default", 3)
# Operations that move numbers and compute none.
_MOVES = ("view", "expand", "permute", "aten.clone.default")

# Axis of the volume -> positions of the volume from one position of a value to the next.
Scales = dict[int, Fraction]


class Places(NamedTuple):
    # Of each value, by axis of the volume; without those that are not even.
    of: dict[Value, dict[int, Place]]
    # By axis, the first operation whose operands stand elsewhere than each other, in words.
    doubts: dict[int, str]


def find_places(labelled: LabelledGraph) -> Places:
    """Return the places of all values along the axes of their labels."""
    places, nodes, depths = Places({}, {}), labelled.graph.nodes, dict[int, int]()
    for value, layout in labelled.layouts.items():
        lengths, node = lengths_along(layout), nodes[value.node]
        depths[value.node] = 1 + max((depths[source.node] for source in node.inputs), default=0)
        places.of[value] = dict.fromkeys(lengths, Place()) if node.op == "input" else {}
        for axis, length in lengths.items():
            # Of operands that are joined along the axis, the longest has most positions; of others, the shortest path
            # comes first: what was skipped, and not what was brought back to its size.
            found = sorted(
                (-own, depths[source.node], source, places.of[source][axis].take(step))
                for source, own, step in find_steps(labelled, value, axis)
                if axis in places.of[source]
            )
            for *_, other in found:
                first = places.of[value].setdefault(axis, other)
                # What is rolled, or padded by its other end, stands where it does without, or a whole length away.
                around = [first.scale * each for each in (length, -found[0][0])]
                if other.scale != first.scale or all((other.offset - first.offset) % each for each in around):
                    places.doubts.setdefault(axis, f"{node.path} joins positions at {first} and at {other}")
    return places


def find_steps(labelled: LabelledGraph, value: Value, axis: int) -> Iterator[tuple[Value, int, Place]]:
    """Iterate over operands that a value has an axis from: their lengths, and where it stands among their positions."""
    sources, rule = labelled.graph.nodes[value.node].inputs, labelled.rules.get(value.node)
    length = lengths_along(labelled.layouts[value])[axis]
    given = rule.places(labelled.calls[value.node]) if rule else [{} for _ in sources]
    is_given = any(axis in each for each in given)
    for source, steps in zip(sources, given, strict=True):
        own = lengths_along(labelled.layouts[source]).get(axis)
        if not own or not length or is_given != (axis in steps):
            continue
        # An operation without a rule is in place where it keeps the length.
        step = steps[axis] if is_given else stretch(own, length) if rule or own == length else None
        if step is not None:
            yield source, own, step


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


@dataclass
class RecordedNetwork:
    """A network that was recorded on one size; `halo` is how far operations without a rule reach, as of its labels."""

    graph: Graph
    size: tuple[int, ...]
    halo: Sequence[int] | None = None
    outputs: Outputs = field(default_factory=Outputs)
    # Records the same network on so many samples of a size.
    record: Callable[[int, tuple[int, ...]], RecordedNetwork] | None = None
    _tried: dict[tuple[int, ...], LabelledGraph | GraphError] = field(default_factory=dict)

    def label(self, axes: Sequence[int]) -> LabelledGraph:
        """Return the graph with its labels for a volume that is cut along these axes; raise GraphError if it cannot."""
        found = self.try_label(axes)
        if isinstance(found, LabelledGraph):
            return found
        if "; fix: " in str(found):
            raise found
        cuttable = self.cuttable
        tile = tuple(max(1, length // 2) if axis in cuttable else None for axis, length in enumerate(self.size))
        where = "" if cuttable else ", in one piece"
        raise GraphError(f"{found}; fix: tile={tile}{where}") from found

    def try_label(self, axes: Sequence[int]) -> LabelledGraph | GraphError:
        """Return the graph with its labels, or why there are none."""
        axes = tuple(axes)
        if axes not in self._tried:
            try:
                self._tried[axes] = label_graph(self.graph, self.size, axes, halo=self.halo)
            except GraphError as error:
                self._tried[axes] = error
        return self._tried[axes]

    @cached_property
    def cuttable(self) -> tuple[int, ...]:
        """The axes along which it can be cut: all together, or else each by itself."""
        axes = tuple(range(len(self.size)))
        if isinstance(self.try_label(axes), LabelledGraph):
            return axes
        return tuple(axis for axis in axes if isinstance(self.try_label([axis]), LabelledGraph))

    @cached_property
    def places(self) -> Places:
        """Where each value stands along all axes, those along which it cannot be cut included."""
        axes = tuple(range(len(self.size)))
        found = self.try_label(axes)
        if isinstance(found, GraphError):
            found = label_graph(self.graph, self.size, axes, halo=self.halo, refused={})
        return find_places(found)

    @cached_property
    def strides(self) -> tuple[int, ...]:
        """For each axis, the least common multiple of all strides to the volume, which are those of any size."""
        strides: list[set[int]] = [{1} for _ in self.size]
        scales = find_scales(self.places)
        others = self._scales_twice_the_size() or scales
        for value, own in scales.items():
            node = self.graph.nodes[value.node]
            if node.op == "view":  # which takes windows apart: it computes nothing, and has no stride
                continue
            # What is resized to one size has another scale there, and no stride.
            for axis, scale in own.items() & others.get(value, {}).items():
                if any(scales.get(source, {}).get(axis, scale) != scale for source in node.inputs):
                    strides[axis].add(scale.numerator)
        return tuple(math.lcm(*own) for own in strides)

    def _scales_twice_the_size(self) -> dict[Value, Scales] | None:
        """Return the scales on twice the size, of a network that resizes to sizes that may follow from the volume's."""
        nodes = [self.graph.nodes[index] for index in self.graph.needed()]
        resizes = any("adaptive" in node.op or ("upsample" in node.op and node.args[-1] is None) for node in nodes)
        if resizes and self.record is not None:
            with suppress(ValueError):
                batch = self.graph.info(self.graph.inputs[0]).shape[0]
                other = self.record(batch, tuple(2 * length for length in self.size))
                if [node.op for node in other.graph.nodes] == [node.op for node in self.graph.nodes]:
                    return find_scales(other.places)
        return None


# (samples, size) -> the network, recorded on these, of which it raises ValueError if it does not take them
Record = Callable[..., RecordedNetwork]


def make_recorder(
    model: nn.Module,
    channels: Sequence[int],
    dtype: torch.dtype,
    halo: Sequence[int] | None = None,
    reduce: Reduce = None,
    stored: torch.dtype | None = None,
    tile: int | Sequence[int | None] | None = None,
) -> Record:
    """Return what records a network on so many samples of a size, each once, for tiles and the dtype that is stored."""
    known: dict[tuple[int, tuple[int, ...], bool], RecordedNetwork] = {}
    outputs = Outputs()

    def record(batch: int, size: tuple[int, ...], *, reduced: bool = True) -> RecordedNetwork:
        key = batch, size, reduced and reduce is not None
        if key in known:
            return known[key]
        inputs = [Info((batch, own, *size), dtype) for own in channels]

        def finish(output: Any) -> Tensor:
            nonlocal outputs
            grid, outputs = one_grid(model, inputs[0].shape, output, reduce if reduced else outputs.taken)
            return grid

        try:
            edges = (tile,) * len(size) if isinstance(tile, int) else tile or ()
            cut = [axis for axis, (own, length) in enumerate(zip(edges, size, strict=False)) if own and own < length]
            graph = replace(record_network(model, inputs, finish, cut=cut), stored=stored)
        except (RecordingError, CannotCopyError, ScriptError) as error:
            raise GraphError(str(error)) from error
        except (RuntimeError, IndexError, ValueError, TypeError, AssertionError) as error:
            if is_refusal(error):
                raise
            if str(error).startswith("MeanOverFlips: "):  # which runs in the function that was called
                raise refusal(type(error), str(error).removeprefix("MeanOverFlips: ")) from error
            raise refusal(ValueError, f"{type(model).__name__} does not take a grid of size {size}: {error}") from error
        known[key] = RecordedNetwork(graph, size, halo, outputs, partial(record, reduced=reduced))
        return known[key]

    return record


# ---- samples ---------------------------------------------------------------------------------------------------------
def runs_alone(several: Graph, one: Graph) -> bool:
    """Whether each sample of several is what a network that was recorded on one gives for it alone."""
    count = several.info(several.inputs[0]).shape[0]
    try:
        labelled = label_graph(several, (count,), [0], first=0)
    except GraphError:
        return False
    if labelled.reductions or labelled.gathered or labelled.layouts[several.output][0] != (Piece(count, 0),):
        return False
    # Few places move samples in the middle alone, and each of very many takes its time.
    looked_at = sorted({round(place * (count - 1) / _LOOKED_AT) for place in range(_LOOKED_AT + 1)})
    return _compute_the_same(several, one) and all(_needs_itself(labelled, sample) for sample in looked_at)


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
