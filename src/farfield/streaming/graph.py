"""A network's operations as a graph, of which parts are run: from some values to others, on grids of any size.

A layer that needs the whole grid is one node. Values are computed backward from what is wanted: operations on which it
does not depend do not run, and neither do those before values that are given.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from fractions import Fraction
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from farfield.nn.tracing import tensors
from farfield.streaming.replacement import GlobalLayer
from farfield.streaming.trace import Step

aten = torch.ops.aten
# A value that was stored has other strides than in the recorded run, in which a view may not have needed a copy.
FLEXIBLE = {aten.view.default: aten.reshape.default, aten._unsafe_view.default: aten.reshape.default}


class UntraceableError(ValueError):
    """The operations of a network cannot be recorded."""


class Length(NamedTuple):
    """A number that grows with the size of the network's input, such as a length in the size of an upsampled grid.

    Attributes:
        constant: The number at size 0.
        ratios: For each spatial axis, by how much it grows per position of the input.
    """

    constant: Fraction
    ratios: tuple[Fraction, ...]

    def at(self, size: Sequence[int]) -> int:
        """Return the number for an input of this size, rounded down."""
        return int(self.constant + sum(ratio * length for ratio, length in zip(self.ratios, size, strict=True)))


class Value(NamedTuple):
    """A tensor of a graph: an output of a node."""

    node: int
    output: int = 0


class ValueInfo(NamedTuple):
    """Shape and dtype of a value."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        """Size in bytes."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class Node(NamedTuple):
    """An operation.

    Attributes:
        function: An operation of torch; None for a layer that needs the whole grid, and for the network's input.
        layer: Such a layer, or None.
        args: Its arguments, with `Value` in the place of tensors; of a layer the grid, the mask and its own arguments.
        kwargs: Its named arguments.
        outputs: What it returns.
        inputs: The values that it needs. A layer whose result has a fixed size needs its summary and not its grid.
        macs: MACs of the operation; of a layer, those of its summary and of its response.
    """

    function: Any
    layer: GlobalLayer | None
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: tuple[ValueInfo, ...]
    inputs: tuple[Value, ...]
    macs: int


INPUT = Value(0)


class Graph:
    """The operations of a network on a grid of one shape, or of any shape, with `Length` in the place of numbers.

    Attributes:
        nodes: In the order in which they run; the first is the network's input.
        steps: As `record` returns them; their `grid` is the `Value`, or None if it does not depend on the input.
        calls: For each call of a layer that needs the whole grid, its node.
    """

    def __init__(self, nodes: list[Node], steps: list[Step], calls: list[int]) -> None:
        self.nodes, self.steps, self.calls = nodes, steps, calls

    def info(self, value: Value) -> ValueInfo:
        """Return the shape and dtype of a value."""
        return self.nodes[value.node].outputs[value.output]

    def order(self, wanted: Collection[Value], given: Collection[Value]) -> list[int]:
        """Return the nodes that run to compute `wanted` from `given`, among which is the input, in order."""
        needed: set[int] = set()
        waiting = [value for value in wanted if value not in given]
        while waiting:
            node = waiting.pop().node
            if node not in needed:
                needed.add(node)
                waiting += [value for value in self.nodes[node].inputs if value not in given]
        return sorted(needed)

    def sources(self, wanted: Collection[Value], given: Collection[Value]) -> list[Value]:
        """Return those of `given` that are needed to compute `wanted`."""
        needed = {value for node in self.order(wanted, given) for value in self.nodes[node].inputs} | set(wanted)
        return [value for value in given if value in needed]

    def macs(self, order: Sequence[int]) -> int:
        """Return the MACs of nodes."""
        return sum(self.nodes[index].macs for index in order)

    @cached_property
    def levels(self) -> list[int]:
        """For each node, the number of layers that need the whole grid before it in series, itself included."""
        levels: list[int] = []
        for node in self.nodes:
            before = [levels[value.node] for value in values_in((node.args, node.kwargs))]
            levels.append(max(before, default=0) + (node.layer is not None))
        return levels

    def at(self, size: Sequence[int]) -> Graph:
        """Return the graph for an input of this size.

        Lengths of grids whose stride does not divide the size are rounded down: such nodes do not run at this size.
        """

        def resolve(part: Any) -> Any:
            return replace_leaves(part, Length, lambda length: length.at(size))

        nodes = [
            node._replace(
                args=resolve(node.args),
                kwargs=resolve(node.kwargs),
                outputs=tuple(info._replace(shape=resolve(info.shape)) for info in node.outputs),
            )
            for node in self.nodes
        ]
        return Graph(nodes, self.steps, self.calls)


# (index of a call, layer with its tensors, grid, mask) -> result
Respond = Callable[[int, GlobalLayer, Tensor, "Tensor | None"], Tensor]


def placeholder_response(call: int, layer: GlobalLayer, grid: Tensor, mask: Tensor | None) -> Tensor:
    """Return a placeholder of a layer's result."""
    return layer.placeholder(grid)


def evaluate(
    graph: Graph,
    order: Sequence[int],
    values: dict[Value, Tensor],
    respond: Respond,
    wanted: Collection[Value],
    device: torch.device,
) -> dict[Value, Tensor]:
    """Run nodes of a graph.

    Args:
        graph: The graph.
        order: The nodes, as `Graph.order` returns them.
        values: The given values; it is emptied of all but `wanted`, each when no node needs it any more.
        respond: Runs the layers that need the whole grid.
        wanted: The values to return.
        device: Device of the network.

    Returns:
        Value -> tensor, for `wanted`.
    """
    users = Counter(value for node in order for value in graph.nodes[node].inputs)
    calls = {node: call for call, node in enumerate(graph.calls)}
    for index in order:
        node = graph.nodes[index]
        args, kwargs = (bind_values(graph, values, part, device) for part in (node.args, node.kwargs))
        if node.layer is not None:
            grid, mask, own = args
            outputs = respond(calls[index], node.layer.bind(own), grid, mask)
        else:
            outputs = FLEXIBLE.get(node.function, node.function)(*args, **kwargs)
        values.update(zip((Value(index, output) for output in range(len(node.outputs))), tensors(outputs), strict=True))
        del args, kwargs, outputs
        users.subtract(node.inputs)
        for value in node.inputs:
            if not users[value] and value not in wanted:
                values.pop(value, None)
    return {value: values[value] for value in wanted}


def bind_values(graph: Graph, values: dict[Value, Tensor], part: Any, device: torch.device) -> Any:
    """Replace values by tensors; by an empty tensor of its channels for the grid of a layer that does not need it."""

    def bind(value: Value) -> Tensor:
        if value in values:
            return values[value]
        shape, dtype = graph.info(value)
        return torch.empty(*shape[:2], *[0] * (len(shape) - 2), dtype=dtype, device=device)

    return replace_leaves(part, Value, bind)


def replace_leaves(part: Any, kind: type, function: Callable[[Any], Any]) -> Any:
    """Apply a function to all objects of a type, nested in tuples, lists and dicts."""
    if isinstance(part, kind):
        return function(part)
    if isinstance(part, dict):
        return {name: replace_leaves(each, kind, function) for name, each in part.items()}
    if type(part) in (tuple, list):
        return type(part)(replace_leaves(each, kind, function) for each in part)
    return part


def values_in(part: Any) -> list[Value]:
    """Return all values, nested in tuples, lists and dicts."""
    found: list[Value] = []
    replace_leaves(part, Value, found.append)
    return found
