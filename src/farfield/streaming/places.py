"""Where each value of a graph stands in the volume, from the rules alone, and where two paths to it disagree."""

from __future__ import annotations

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
    places = Places({}, {})
    for value, layout in labelled.layouts.items():
        lengths, node = lengths_along(layout), labelled.graph.nodes[value.node]
        places.of[value] = dict.fromkeys(lengths, Place()) if node.op == "input" else {}
        for axis, length in lengths.items():
            # Where positions of several operands are joined, most are those of the longest; of others, the one that is
            # computed first lies nearest to the volume: what was skipped, and not what was brought back to its size.
            found = sorted(
                (-own, source, place) for source, own, place in _paths(labelled, places, value, axis, length)
            )
            if not found:
                continue
            longest, _, first = found[0]
            places.of[value][axis] = first
            # What is rolled, or padded by its other end, comes from where it is without that, or a whole length away.
            around = [first.scale * length, first.scale * longest]
            for _, _, other in found:
                moved = other.offset - first.offset
                if other.scale != first.scale or all(moved % each for each in around):
                    places.doubts.setdefault(axis, f"{node.path} joins positions at {first} and at {other}")
    return places


def _paths(
    labelled: LabelledGraph, places: Places, value: Value, axis: int, length: int
) -> list[tuple[Value, int, Place]]:
    """Return the operands that a value has an axis from, with their lengths, and where it stands by each of them."""
    sources, rule = labelled.graph.nodes[value.node].inputs, labelled.rules.get(value.node)
    given = rule.places(labelled.calls[value.node]) if rule else [{} for _ in sources]
    is_given = any(axis in each for each in given)
    found = []
    for source, steps in zip(sources, given, strict=True):
        own, outer = lengths_along(labelled.layouts[source]).get(axis), places.of[source].get(axis)
        if not own or not length or outer is None or is_given != (axis in steps):
            continue
        # An operation without a rule is in place where it keeps the length.
        step = steps[axis] if is_given else stretch(own, length) if rule or own == length else None
        if step is not None:
            found.append((source, own, outer.take(step)))
    return found
