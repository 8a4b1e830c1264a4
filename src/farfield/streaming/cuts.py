"""Where passes also end though nothing is summed: where halos cost more than to store the values that cross.

The nodes of a network have an order, by what is summed before them. A pass is a stretch of it, from one end to a later
one: it reads the values that cross the first, and stores those that cross the other. What a stretch costs, halo
included, follows from the regions of a tile, and the ends that cost least in total are a shortest path.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from farfield.streaming.arguments import axis_spans
from farfield.streaming.graph import Value
from farfield.streaming.labels import LabelledGraph, find_regions, summarized_boxes
from farfield.streaming.spans import Box, Span, hull, is_empty, region_of

if TYPE_CHECKING:
    from farfield.streaming.plan import StreamingPlan

# Seconds of a MAC, of a byte that an operation gives, of one that is stored in a file that is there, or read from it,
# and of a task: of one core of a server, as benchmarks/cuts.py measures them.
MAC, _GIVEN, _STORED, _READ, _TASK = 2.5e-11, 1e-10, 1e-10, 1.4e-10, 1e-3


class Stretch(NamedTuple):
    """Nodes that run in one pass, after one place in the order and up to another, and what they take of a tile."""

    first: int
    last: int
    computed: float  # seconds
    stored: float  # seconds to store what crosses the end, and to read what crosses the beginning


def order_nodes(labelled: LabelledGraph) -> list[int]:
    """Return the nodes in the order in which passes run them: by the reductions before them, then as recorded."""
    return sorted(labelled.order, key=lambda index: (labelled.levels[index], index))


def cut_levels(labelled: LabelledGraph, cuts: Sequence[int]) -> Mapping[int, int]:
    """Return the pass of each node, if passes also end behind these nodes."""
    levels, number, before = dict[int, int](), 0, None
    for index in order_nodes(labelled):
        if before is not None:
            number += before in cuts or labelled.levels[before] != labelled.levels[index]
        levels[index], before = number, index
    return levels


class Crossing:
    """The values that cross each place in the order of nodes, which a pass that ends there stores."""

    def __init__(self, labelled: LabelledGraph) -> None:
        self.labelled, self.order = labelled, order_nodes(labelled)
        self.places = {index: place for place, index in enumerate(self.order)}
        # Of each value that depends on the volume, the place of the last node that takes it.
        self.last: dict[Value, int] = {}
        for place, index in enumerate(self.order):
            for source in labelled.graph.nodes[index].inputs:
                if source not in labelled.known and source not in labelled.graph.inputs and labelled.layouts[source]:
                    self.last[source] = max(place, self.last.get(source, 0))

    def at(self, place: int) -> set[Value]:
        """Return the values that nodes up to a place give and later ones take, each as what is cheapest to store."""
        there = (value for value, last in self.last.items() if self.places[value.node] <= place < last)
        return {cheapest_source(self.labelled, value) for value in there}


def find_stretches(labelled: LabelledGraph, tile: Sequence[int]) -> list[Stretch]:
    """Return all stretches between places where a pass may end: before a node with MACs, and where one must."""
    crossing, levels, nodes = Crossing(labelled), labelled.levels, labelled.graph.nodes
    counted = ((length, own, -(-length // own) // 2) for length, own in zip(labelled.size, tile, strict=True))
    middle = [axis_spans(length, own, [place])[0] for length, own, place in counted]
    stretches, begun = list[Stretch](), -1
    for _, places in itertools.groupby(range(len(crossing.order)), lambda place: levels[crossing.order[place]]):
        own = list(places)
        follow = (place for place in own[1:] if nodes[crossing.order[place]].macs)
        ends = [place - 1 for place in follow] + own[-1:]
        for end in ends:
            starts = [begun, *(each for each in ends if each < end)]
            stretches += _trace_back(crossing, middle, begun, starts, end)
        begun = own[-1]
    return stretches


def _trace_back(
    crossing: Crossing, tile: Sequence[Span], begun: int, starts: Sequence[int], end: int
) -> Iterator[Stretch]:
    """Iterate over the stretches that end at a place, from one trace of what a tile needs for what is stored there."""
    labelled, places, graph = crossing.labelled, crossing.places, crossing.labelled.graph
    stored = crossing.at(end) | ({graph.output} if end + 1 == len(crossing.order) else set())
    pairs = [(value, labelled.core(labelled.layouts[value], tile)) for value in stored]
    pairs += [pair for index in labelled.reductions for pair in summarized_boxes(labelled, index, tile).items()]
    wanted: dict[Value, Box] = {}
    for value, box in pairs:
        if begun < places.get(value.node, -1) <= end and not is_empty(box):
            wanted[value] = hull(wanted.get(value, box), box)
    given = {value for value in labelled.layouts if places.get(value.node, -1) <= begun}.union(graph.inputs)
    sizes, computed = dict[Value, int](), dict[int, float]()

    def narrow(value: Value, size: int) -> float:
        return size * graph.stored_info(value).dtype.itemsize / graph.info(value).dtype.itemsize

    for value, region in find_regions(labelled, wanted, given).items():
        sizes[value] = labelled.bytes_on(value, region)
        if value not in given and value.node in places:
            share = sizes[value] / max(1, graph.info(value).bytes)
            macs = 0 if value.output else graph.nodes[value.node].macs * share
            place = places[value.node]
            computed[place] = computed.get(place, 0) + macs * MAC + sizes[value] * _GIVEN
    for start in starts:
        read = sum(narrow(value, sizes.get(value, 0)) for value in crossing.at(start))
        own = [value for value in stored if places[value.node] > start and value in wanted]
        written = sum(narrow(value, labelled.bytes_on(value, region_of(wanted[value]))) for value in own)
        seconds = sum(each for place, each in computed.items() if place > start)
        yield Stretch(start, end, seconds, written * _STORED + read * _READ)


def choose_cuts(labelled: LabelledGraph, stretches: Sequence[Stretch]) -> tuple[int, ...]:
    """Return the nodes behind which passes end that cost least."""
    if not stretches:
        return ()
    order, least = order_nodes(labelled), {-1: (0.0, tuple[int, ...]())}
    for each in stretches:
        before, cuts = least[each.first]
        total = before + each.computed + each.stored + _TASK
        if each.last not in least or total < least[each.last][0]:
            least[each.last] = total, (*cuts, each.last)
    cuts = least[len(order) - 1][1]
    # Where levels end, passes end anyway.
    return tuple(
        order[place] for place in cuts[:-1] if labelled.levels[order[place]] == labelled.levels[order[place + 1]]
    )


def estimate_seconds(plan: StreamingPlan) -> float:
    """Return about how long a plan with costs takes beside what is the same for all plans."""
    sizes = (plan.labelled.graph.stored_info(value).bytes for value in plan.stored)
    stored = sum(size * (_STORED + _READ) for size in sizes)
    return sum(each.macs for each in plan.passes) * MAC + stored + len(plan.passes) * len(plan.cores) * _TASK


def scale_seconds(seconds: float, region: StreamingPlan, plan: StreamingPlan) -> float:
    """Return about how long a plan takes, from the seconds of one sample of the plan of a region of the volume."""
    macs = [sum(each.macs for each in own.passes) for own in (region, plan)]
    tasks = [len(own.passes) * len(own.cores) for own in (region, plan)]
    # What a task takes beside its numbers is the same in a small region.
    of_numbers = max(0.0, seconds - tasks[0] * _TASK) * macs[1] / max(1, macs[0])
    return plan.samples * (of_numbers + tasks[1] * _TASK) / plan.workers


def cheapest_source(labelled: LabelledGraph, value: Value) -> Value:
    """Return the value from which this one follows without MACs, and which has no more bytes."""
    graph = labelled.graph
    while True:
        node = graph.nodes[value.node]
        sources = [source for source in node.inputs if source not in labelled.known]
        grids = {source for source in sources if graph.info(source).bytes * 8 > graph.info(value).bytes}
        if node.macs or len(grids) != 1 or value in labelled.gathered:
            return value
        (source,) = grids
        if graph.info(source).bytes > graph.info(value).bytes or source.node not in labelled.calls:
            return value
        value = source
