"""Where each value of a graph stands in the volume, from the rules alone, and where two paths to it disagree."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from farfield.streaming.graph import Value
from farfield.streaming.labels import LabelledGraph
from farfield.streaming.spans import lengths_along
from farfield.volumes.place import Place, stretch


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
