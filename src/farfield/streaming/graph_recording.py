"""Record a network's operations as a graph: it runs without numbers, on grids of several sizes.

Each operation of torch is recorded, in a form without side effects. Numbers that differ between sizes, such as the size
to which a grid is upsampled, become functions of the size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from fractions import Fraction
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functionalize
from torch.utils._python_dispatch import TorchDispatchMode

from farfield.nn.leftovers import sweep
from farfield.nn.macs import count_macs
from farfield.nn.network_copy import copied, keep
from farfield.nn.tracing import tensors, without_numbers
from farfield.streaming.graph import (
    INPUT,
    Graph,
    Length,
    Node,
    UntraceableError,
    Value,
    ValueInfo,
    replace_leaves,
    values_in,
)
from farfield.streaming.replacement import GlobalLayer
from farfield.streaming.trace import Step, device_of, dtype_of, record

aten = torch.ops.aten


class Recorder(TorchDispatchMode):
    """Records operations as nodes.

    Args:
        grid: The network's input.

    Attributes:
        nodes: The nodes so far.
        calls: The nodes of layers that need the whole grid.
    """

    def __init__(self, grid: Tensor) -> None:
        super().__init__()
        info = ValueInfo(tuple(grid.shape), grid.dtype)
        self.nodes, self.calls = [Node(None, None, (), {}, (info,), (), 0)], list[int]()
        # The tensors are kept, so that no other gets the same id.
        self.known: dict[int, tuple[Value, Tensor]] = {id(grid): (INPUT, grid)}
        self.handle: Callable[..., None] = self.add

    @contextmanager
    def handled_by(self, handle: Callable[..., None]) -> Iterator[None]:
        """Call another function than `add` with what runs."""
        self.handle = handle
        try:
            yield
        finally:
            self.handle = self.add

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and record it."""
        outputs = function(*args, **(kwargs or {}))
        self.handle(function, args, kwargs or {}, outputs)
        return outputs

    def add(self, function: Any, args: Any, kwargs: Any, outputs: Any) -> None:
        """Add a node for an operation of torch; none for one that returns no tensor, such as the device of one."""
        returned = tensors(outputs)
        if not returned:
            return
        if function is aten.as_strided.default:
            raise UntraceableError("it takes a tensor apart by its strides")
        macs = count_macs(function, args, kwargs, outputs)
        args, kwargs = (replace_leaves(part, Tensor, self.find) for part in (args, kwargs))
        self.append(Node(function, None, args, kwargs, (), tuple(values_in((args, kwargs))), macs), returned)

    def append(self, node: Node, returned: list[Tensor]) -> None:
        """Append a node that returns these tensors."""
        for output, tensor in enumerate(returned):
            self.known[id(tensor)] = Value(len(self.nodes), output), tensor
        self.nodes.append(node._replace(outputs=tuple(ValueInfo(tuple(each.shape), each.dtype) for each in returned)))

    def find(self, tensor: Tensor) -> Value | Tensor:
        """Return the value that a tensor is; a parameter, a buffer or another constant itself."""
        if id(tensor) in self.known:
            return self.known[id(tensor)][0]
        if type(tensor) in (Tensor, nn.Parameter):
            return tensor
        raise UntraceableError(f"it uses a {type(tensor).__name__} whose origin is unknown")

    def value_of(self, tensor: Tensor) -> Value | Tensor:
        """Return the value that a tensor of the network is, at this time of its run."""
        found: list[Value | Tensor] = []

        def handle(function: Any, args: Any, kwargs: Any, outputs: Any) -> None:
            if function is aten.clone.default:
                found.append(self.find(args[0]))
            else:  # earlier writes to a view of the tensor
                self.add(function, args, kwargs, outputs)

        with self.handled_by(handle):
            tensor.clone()
        return found[-1]

    def call(self, path: str | None, layer: GlobalLayer, grid: Tensor, mask: Tensor | None) -> Tensor:
        """Add a node for a layer that needs the whole grid, and return a tensor of the shape of its result."""
        own = replace_leaves(layer.arguments, Tensor, self.value_of)
        args = (self.value_of(grid), None if mask is None else self.value_of(mask), own)
        needed = values_in(args if layer.keeps_size else args[1:])
        inputs = tuple(value for value in needed if layer.keeps_size or value != args[0])

        def handle(function: Any, _: Any, __: Any, outputs: Any) -> None:
            if function is aten.new_empty.default:
                self.calls.append(len(self.nodes))
                self.append(Node(None, layer, args, {}, (), inputs, sum(macs)), [outputs])

        macs: list[int] = []
        with self.handled_by(lambda *operation: macs.append(count_macs(*operation))):
            shape = layer.placeholder(grid)
            macs.clear()
            layer.run_whole(grid, mask)
        with self.handled_by(handle):
            return grid.new_empty(shape.shape, dtype=shape.dtype)


def record_graph(caller: str, model: nn.Module, shape: tuple[int, ...]) -> Graph:
    """Record the operations of a model on a grid of this shape.

    Args:
        caller: The function that errors name.
        model: The model.
        shape: Shape of the grid, with batch and channels.

    Raises:
        UntraceableError: If they cannot be recorded.
    """
    with torch.no_grad(), without_numbers():
        grid = torch.empty(shape, dtype=dtype_of(model), device=device_of(model))
        recorder, steps = Recorder(grid), list[Step]()

        def run(given: Tensor) -> Tensor:
            steps.extend(record(caller, own, partial(own, given), recorder.call, keep=recorder.value_of))
            return given

        try:
            # With its parameters, which are constants of the graph; what it makes of them without numbers goes.
            with copied(model, keep) as own, recorder:
                functionalize(run)(grid)
        except (RuntimeError, NotImplementedError, TypeError) as error:
            raise UntraceableError(str(error)) from error
    # What the recorder knows is no leftover: layers hold it, within tensors that `functionalize` wraps.
    sweep(recorder.nodes, *(tensor for _, tensor in recorder.known.values()))
    recorder.known.clear()
    values = [step._replace(grid=step.grid if isinstance(step.grid, Value) else None) for step in steps]
    return Graph(recorder.nodes, values, recorder.calls)


def record_any_size(
    caller: str, model: nn.Module, leading: tuple[int, int], size: Sequence[int], growth: Sequence[int]
) -> Graph:
    """Record the operations of a model on grids of any size `size + k * growth`, with whole numbers k per axis.

    Args:
        caller: The function that errors name.
        model: The model.
        leading: Batch and channels.
        size: A size that the model takes.
        growth: Positions by which each axis may grow or shrink: multiples of the strides.

    Raises:
        UntraceableError: If the operations cannot be recorded, or are others on a larger grid.
    """
    sizes = [tuple(size)]
    for axis in range(len(size)):
        sizes.append(tuple(own + (other == axis) * growth[axis] for other, own in enumerate(size)))
    larger = tuple(own + 2 * more for own, more in zip(size, growth, strict=True))
    *graphs, last = (record_graph(caller, model, (*leading, *each)) for each in [*sizes, larger])
    lengths = partial(generalize, size=size, growth=growth)
    described = lengths([describe_graph(graph) for graph in graphs])
    if not same(replace_leaves(described, Length, lambda length: length.at(larger)), describe_graph(last)):
        raise UntraceableError("a number in it does not grow in proportion to the size of the grid")
    nodes = [
        node._replace(
            args=args,
            kwargs=kwargs,
            outputs=tuple(ValueInfo(shape, info.dtype) for shape, info in zip(shapes, node.outputs, strict=True)),
        )
        for node, (_, args, kwargs, shapes) in zip(graphs[0].nodes, described[0], strict=True)
    ]
    return Graph(nodes, graphs[0].steps, graphs[0].calls)


def check_recording(caller: str, model: nn.Module, graph: Graph, shape: tuple[int, ...]) -> None:
    """Refuse a graph for any size that does not have the operations that the model runs on a grid of this shape.

    Raises:
        UntraceableError: If it does not.
    """
    if not same(describe_graph(graph.at(shape[2:])), describe_graph(record_graph(caller, model, shape))):
        raise UntraceableError("it runs other operations on grids of another size")


def describe_graph(graph: Graph) -> Any:
    """Return all of a graph that may depend on the size of its input, and what must not."""
    nodes = [
        (node.function, node.args, node.kwargs, tuple(info.shape for info in node.outputs)) for node in graph.nodes
    ]
    return nodes, [step.grid for step in graph.steps], graph.calls


def generalize(parts: Sequence[Any], size: Sequence[int], growth: Sequence[int]) -> Any:
    """Return what parts of graphs have in common, with a `Length` in the place of each number that differs.

    Args:
        parts: The same part at `size`, and at sizes in which each axis in turn is longer.
        size: The size.
        growth: By how much each axis is longer.

    Raises:
        UntraceableError: If anything else differs.
    """
    first = parts[0]
    kinds = {type(part) for part in parts}
    if kinds <= {list, tuple, torch.Size} and len({len(part) for part in parts}) == 1:
        return type(first)([generalize(each, size, growth) for each in zip(*parts, strict=True)])
    if kinds == {dict} and len({tuple(part) for part in parts}) == 1:
        return {name: generalize([part[name] for part in parts], size, growth) for name in first}
    if all(same(first, part) for part in parts):
        return first
    if kinds != {int}:
        raise UntraceableError("its operations depend on the size of the grid")
    ratios = tuple(Fraction(part - first, more) for part, more in zip(parts[1:], growth, strict=True))
    return Length(first - sum(ratio * own for ratio, own in zip(ratios, size, strict=True)), ratios)


def same(one: Any, other: Any) -> bool:
    """Whether two parts of graphs are equal; tensors by their numbers, and layers always, as their arguments count."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one is other or (one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[name], other[name]) for name in one)
    if isinstance(one, tuple | list) and isinstance(other, tuple | list):
        return len(one) == len(other) and all(same(*each) for each in zip(one, other, strict=True))
    return bool(one == other)
