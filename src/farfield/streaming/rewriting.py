"""Write a recorded graph anew, operation by operation, with the labels of what is written."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from farfield.streaming.graph import Graph, Info, Node, Value, Writer, map_values
from farfield.streaming.labels import LabelledGraph, label_node


class Rewriting(ABC):
    """What becomes of each operation of a graph; the volume is cut along all axes."""

    def __init__(self, graph: Graph) -> None:
        size = graph.info(graph.inputs[0]).shape[2:]
        self.old, self.new = graph, Graph(constants=graph.constants, device=graph.device, stored=graph.stored)
        self.labelled = LabelledGraph(self.new, size, tuple(range(len(size))))
        # Values of the graph as it was -> those of the new one, or what stands for them.
        self.moved: dict[Value, Any] = {}

    @abstractmethod
    def rewrite_node(self, index: int, node: Node, write: Writer) -> Sequence[Any]:
        """Append what becomes of an operation, and return its outputs."""

    @abstractmethod
    def read(self, write: Writer, value: Value) -> Value:
        """Return a value of the graph as it was in the new one."""

    def rewrite(self) -> Graph:
        """Return the new graph."""
        starts = []
        for index, node in enumerate(self.old.nodes):
            starts.append(len(self.new.nodes))
            results = self.rewrite_node(index, node, Writer(self.new, node.path))
            self.moved.update((Value(index, output), each) for output, each in enumerate(results))
        starts.append(len(self.new.nodes))
        self.new.inputs = [Value(starts[value.node]) for value in self.old.inputs]
        writer = Writer(self.new, self.old.nodes[-1].path)
        self.new.output = self.read(writer, self.old.output)
        self.new.writes = {name: self.read(writer, value) for name, value in self.old.writes.items()}
        for call in self.old.calls:
            first, last = call.nodes
            self.new.calls.append(call._replace(nodes=(starts[first], starts[last])))
        return self.new

    def copy(self, node: Node, operands: Sequence[Value], outputs: Sequence[Info], share: float = 1) -> list[Value]:
        """Append an operation on operands in the place of those that it has, or on a share of them."""
        rest = iter(operands)
        args, kwargs = map_values((node.args, node.kwargs), Value, lambda _: next(rest))
        macs = round(node.macs * share)
        first = self.new.add(node.op, args, kwargs, outputs, path=node.path, macs=macs).node
        return [Value(first, output) for output in range(len(outputs))]

    def label(self) -> None:
        """Find the labels of all that is written."""
        for index in range(len(self.labelled.levels), len(self.new.nodes)):
            label_node(self.labelled, index, refused={})
