"""The graph of a network's operations: values, nodes, how they run on whole volumes, and how operations are added."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from farfield.streaming.fourier import add_waves, sum_modes
from farfield.streaming.linear_scan import scan_linear
from farfield.streaming.random_numbers import draw


class RecordingError(ValueError):
    """A network runs an operation that no part of the volume can repeat."""


class Value(NamedTuple):
    """A tensor of a graph: an output of a node."""

    node: int
    output: int = 0


class Info(NamedTuple):
    """Shape and dtype of a value."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass
class RecordedLayer:
    """A call of a layer that needs the whole grid."""

    path: str
    # None in a saved plan without a network.
    module: Any = field(default=None, repr=False)
    # Its MACs while the whole grid is summarized; the others are those of responses.
    summing: int = field(default=0, repr=False)
    # Of a summary that has a slot for each key.
    summary_bytes: int = field(default=0, repr=False)

    def __getstate__(self) -> dict[str, Any]:
        """Save all but the layer, which is that of the network that the plan runs."""
        return vars(self) | {"module": None}


class Node(NamedTuple):
    """An operation, with `Value` in the place of tensors among its arguments."""

    # "aten.add.Tensor"; or `input`, `constant`, `layer`, or one of `OWN`.
    op: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: tuple[Info, ...]
    # The module that ran it.
    path: str = ""
    macs: int = 0
    # The values among its arguments, in order.
    inputs: tuple[Value, ...] = ()
    # Whether it follows from the tensors of the network alone, and from no volume.
    known: bool = False


class FunctionCall(NamedTuple):
    """A call of a function of torch by a network: which it is, and the operations that it ran."""

    # The module that calls, the function, and how often the module called it before.
    path: str
    function: str
    number: int
    # The first of its nodes, and the one after the last.
    nodes: tuple[int, int] = (0, 0)
    shapes: tuple[tuple[int, ...], ...] = ()

    @property
    def key(self) -> tuple[str, str, int]:
        """What tells it from the other calls of a run."""
        return self[:3]


def name_function(function: Any) -> str:
    """Return a short name of a function of torch, such as `mean`, or `F.group_norm`."""
    name = getattr(function, "__name__", str(function))
    return f"F.{name}" if getattr(function, "__module__", None) == F.__name__ else name


@dataclass
class Graph:
    """The operations of a network on grids of one size, in the order in which they run."""

    nodes: list[Node] = field(default_factory=list)
    inputs: list[Value] = field(default_factory=list)
    output: Value = field(default_factory=lambda: Value(-1))
    # Parameters, buffers and other tensors of the network, by name.
    constants: dict[str, Tensor] = field(default_factory=dict)
    # Where the network is.
    device: torch.device = field(default_factory=torch.get_default_device)
    # The calls of functions of torch that ran them.
    calls: list[FunctionCall] = field(default_factory=list)
    # Tensors of the network that it writes, by name, and what they are after a run.
    writes: dict[str, Value] = field(default_factory=dict)
    # The dtype in which passes store what is of a wider one; None for that of each value.
    stored: torch.dtype | None = None

    def info(self, value: Value) -> Info:
        """Return the shape and dtype of a value."""
        return self.nodes[value.node].outputs[value.output]

    def stored_info(self, value: Value) -> Info:
        """Return the shape and dtype of a value where passes store it."""
        info = self.info(value)
        is_wide = info.dtype.is_floating_point and info.dtype.itemsize > 2
        return info._replace(dtype=self.stored) if self.stored and is_wide else info

    def add(self, op: str, args: Sequence[Any], kwargs: dict[str, Any], outputs: Sequence[Info], **more: Any) -> Value:
        """Append a node and return its first output."""
        inputs: list[Value] = []
        map_values((tuple(args), kwargs), Value, inputs.append)
        known = op != "input" and all(self.nodes[value.node].known for value in inputs)
        self.nodes.append(Node(op, tuple(args), kwargs, tuple(outputs), **more, inputs=tuple(inputs), known=known))
        return Value(len(self.nodes) - 1)

    def needed(self, output: Value | None = None) -> list[int]:
        """Return the nodes that a value depends on, by default the output, in order."""
        needed: set[int] = set()
        waiting = [(output or self.output).node]
        while waiting:
            node = waiting.pop()
            if node not in needed:
                needed.add(node)
                waiting += [value.node for value in self.nodes[node].inputs]
        return sorted(needed)


def map_values(part: Any, kind: type, function: Callable[[Any], Any]) -> Any:
    """Apply a function to all objects of a type, nested in tuples, lists and dicts."""
    if isinstance(part, kind):
        return function(part)
    if isinstance(part, dict):
        return {name: map_values(each, kind, function) for name, each in part.items()}
    # Long lists of numbers are kept as they are.
    if type(part) in (tuple, list) and not set(map(type, part)) <= {int}:
        return type(part)(map_values(each, kind, function) for each in part)
    return part


def holds(part: Any, kind: type) -> bool:
    """Whether an object is of a type, or holds one, however deep."""
    inner = part.values() if isinstance(part, dict) else part if isinstance(part, tuple | list) else ()
    return isinstance(part, kind) or any(holds(each, kind) for each in inner)


@functools.cache
def find_operation(name: str) -> Any:
    """Return an operation of torch by its name, "aten.add.Tensor"."""
    namespace, packet, overload = name.split(".")
    return getattr(getattr(getattr(torch.ops, namespace), packet), overload)


def run_whole(graph: Graph, inputs: Sequence[Tensor], output: Value | None = None) -> Tensor:
    """Run a graph on whole volumes, operation by operation, and return a value, by default the output."""
    known: dict[Value, Tensor] = {}
    wanted = output or graph.output
    for index in graph.needed(wanted):
        run_node(graph, index, known, inputs)
    return known[wanted]


def run_node(graph: Graph, index: int, known: dict[Value, Tensor], inputs: Sequence[Tensor] = ()) -> None:
    """Run one operation on whole values that are known, and add its outputs to them."""
    node = graph.nodes[index]
    args, kwargs = map_values((node.args, node.kwargs), Value, known.__getitem__)
    if node.op == "input":
        outputs = inputs[args[0]]
    elif node.op == "constant":
        outputs = graph.constants[args[0]]
    elif node.op == "layer":
        mask = {"mask": args[2]} if len(args) > 2 else {}
        outputs = args[0].module(args[1], **mask)
    elif node.op == "full":
        outputs = torch.full(node.outputs[0].shape, *args, dtype=node.outputs[0].dtype, device=graph.device)
    elif node.op in OWN:
        outputs = OWN[node.op](node.outputs[0], *args)
    else:
        placed = {} if node.inputs else {"device": graph.device}
        outputs = find_operation(node.op)(*args, **kwargs, **placed)
    outputs = outputs if isinstance(outputs, tuple | list) else (outputs,)
    known.update((Value(index, place), each) for place, each in enumerate(outputs))


def _take_slice(info: Info, value: Tensor, dim: int, start: int, step: int) -> Tensor:
    stop = start + (info.shape[dim] - 1) * step + 1
    return value[(slice(None),) * dim + (slice(start, stop, step),)]


def _take_positions(info: Info, value: Tensor, dim: int, positions: Collection[int]) -> Tensor:
    # Indexing keeps the order of dimensions in memory, in which what follows may sum.
    return value[(slice(None),) * dim + (torch.tensor(positions, dtype=torch.long, device=value.device),)]


def _unpool(info: Info, value: Tensor, index: Tensor, *windows: Any) -> Tensor:
    """Write each number to the position in the flattened whole that a maximum came from."""
    count = len(windows[0])
    packet = torch.ops.aten.max_unpool2d if count == 2 else torch.ops.aten.max_unpool3d
    size = list(info.shape[-count:])
    # Stride and padding are not used by torch beyond the checks.
    return packet(value, index, size) if count == 2 else packet(value, index, size, [1] * 3, [0] * 3)


def _sum_modes(
    info: Info, value: Tensor, dims: Sequence[int], frequencies: Any, _: Any, sign: int, scale: float
) -> Tensor:
    lengths = [value.shape[dim] for dim in dims]
    spans = [(0, length) for length in lengths]
    return (sum_modes(value, dims, frequencies, spans, lengths, sign) * scale).to(info.dtype)


def _add_waves(
    info: Info, modes: Tensor, _: Tensor, dims: Sequence[int], frequencies: Any, __: Any, sign: int, scale: float
) -> Tensor:
    lengths = [info.shape[dim] for dim in dims]
    spans = [(0, length) for length in lengths]
    return add_waves(modes * scale, dims, frequencies, spans, lengths, sign, not info.dtype.is_complex)


# Our own operations: name -> `(info of the first output, *arguments)` -> the output, or all of them.
OWN: dict[str, Callable[..., Any]] = {
    "view": lambda info, value: value.reshape(info.shape),
    "expand": lambda info, value: value.expand(info.shape),
    "permute": lambda info, value, order: value.permute(order),
    "slice": _take_slice,
    "take": _take_positions,
    # Of two spatial dimensions, the positions of a window as channels: kernel, dilation, padding, stride.
    "windows": lambda info, value, *windows: F.unfold(value, *windows).view(info.shape),
    # Windows added up where they came from: the size, kernel, dilation, padding, stride.
    "fold": lambda info, value, *windows: F.fold(value.flatten(2), *windows),
    "unpool": _unpool,
    # Along the first dimension.
    "scan": lambda info, rates, inputs: scan_linear([rates, inputs], 0)[1],
    # Of a seed, which is a constant of a call: the number of the operation, the distribution and its numbers.
    "random": lambda info, seed, *given: draw(info.shape, seed, *given).to(info.dtype),
    "detach": lambda info, value: value.detach(),
    # What a network returns of several values, each an output.
    "several": lambda info, *values: values,
    # A few frequencies of a value along dimensions; and the grid that frequencies are of, which runs along some axes,
    # counted from the last, of a volume.
    "modes": _sum_modes,
    "waves": _add_waves,
    # All positions of a dimension, for each position of a result.
    "whole": lambda info, value, dim: value,
    # Of queries, keys and values: a mask, whether only earlier keys count, and the factor of products.
    "attend": lambda info, query, key, value, mask, causal, scale: F.scaled_dot_product_attention(
        query, key, value, mask, 0.0, causal, scale=scale
    ),
}


class Writer(NamedTuple):
    """Appends operations on values to a graph, as those of the module at `path`."""

    graph: Graph
    path: str

    def shape(self, value: Value) -> tuple[int, ...]:
        """Return a value's shape."""
        return self.graph.info(value).shape

    def is_known(self, value: Value) -> bool:
        """Whether a value follows from the tensors of the network alone, and from no volume."""
        return self.graph.nodes[value.node].known

    def append(self, op: str, args: Sequence[Any], shape: Sequence[int], dtype: torch.dtype | None = None) -> Value:
        """Append an operation; without `dtype`, the result has that of `args[0]`."""
        info = Info(tuple(shape), dtype or self.graph.info(args[0]).dtype)
        return self.graph.add(op, args, {}, [info], path=self.path)

    def constant(self, tensor: Tensor, name: str | None = None) -> Value:
        """Append a constant."""
        name = name or f"constant {len(self.graph.constants)}"
        self.graph.constants[name] = tensor
        return self.append("constant", (name,), tensor.shape, tensor.dtype)

    def view(self, value: Value, shape: Sequence[int]) -> Value:
        return value if self.shape(value) == tuple(shape) else self.append("view", (value,), shape)

    def permute(self, value: Value, order: Sequence[int]) -> Value:
        return self.append("permute", (value, tuple(order)), [self.shape(value)[dim] for dim in order])

    def part(self, value: Value, dim: int, start: int, stop: int) -> Value:
        """Take positions from `start` to `stop` along a dimension."""
        shape = list(self.shape(value))
        if (start, stop) == (0, shape[dim]):
            return value
        shape[dim] = stop - start
        return self.append("slice", (value, dim, start, 1), shape)

    def take(self, value: Value, dim: int, positions: Sequence[int]) -> Value:
        shape = list(self.shape(value))
        shape[dim] = len(positions)
        return self.append("take", (value, dim, tuple(positions)), shape)

    def join(self, values: Sequence[Value], dim: int) -> Value:
        """Concatenate values along a dimension."""
        present = [value for value in values if self.shape(value)[dim]]
        if len(present) == 1:
            return present[0]
        shape = list(self.shape(present[0]))
        shape[dim] = sum(self.shape(value)[dim] for value in present)
        return self.append("aten.cat.default", (present, dim), shape, self.graph.info(present[0]).dtype)

    def where(self, condition: Value, value: Value, other: Value) -> Value:
        """Choose between two values."""
        return self.append("aten.where.self", (condition, value, other), *self.graph.info(other))

    def cast(self, value: Value, dtype: torch.dtype) -> Value:
        """Convert a value to a dtype, unless it has it."""
        info = self.graph.info(value)
        if info.dtype == dtype:
            return value
        wanted = info._replace(dtype=dtype)
        return self.graph.add("aten._to_copy.default", (value,), {"dtype": dtype}, [wanted], path=self.path)
