"""Record a network once, at the volume's own size, as a graph of torch's operations.

The network runs on tensors that have shapes and no numbers, so the size costs nothing, and lengths, branches on the
size and coordinates are those of the untiled run. Writes in place become values, views a few operations of our own, and
a layer of farfield that needs the whole grid is one node.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)
from torch.func import functionalize
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from farfield.nn.leftovers import note_outputs
from farfield.nn.macs import count_macs
from farfield.nn.tracing import tensors
from farfield.streaming.operations import Graph, Info, RecordingError, Value, map_values, run_whole
from farfield.streaming.rewrites import REWRITTEN, with_numbers
from farfield.streaming.writer import Writer

aten = torch.ops.aten
# Named arguments for where a tensor lies: a part lies where the volume lies.
PLACES = ("device", "pin_memory", "layout", "generator")
# Arguments with which an operation that may draw random numbers draws none.
STILL = {"dropout_p": 0.0, "train": False, "training": False}
# Operations that update running statistics beside what they return, if they are given and `training` is set.
BATCH_NORMS = (aten.native_batch_norm, aten._native_batch_norm_legit, aten._native_batch_norm_legit_functional)


class Recorder(TorchDispatchMode):
    """Records operations as nodes of a graph.

    Args:
        graph: The graph.
        names: id of a fake tensor of the network -> name of the constant.
        reals: The real tensors of the constants.
    """

    def __init__(self, graph: Graph, names: dict[int, str], reals: dict[str, Tensor]) -> None:
        super().__init__()
        self.graph, self.names, self.reals = graph, names, reals
        # The tensors are kept, so that no other gets the same id.
        self.known: dict[int, tuple[Value, Tensor]] = {}
        self.running: list[str] = []
        self.watched: list[Tensor] | None = None
        self.macs: list[int] | None = None
        self.next_node: tuple[str, Any, int] | None = None

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and record it."""
        if function is aten._local_scalar_dense.default:
            return self.number_of(args[0])
        outputs = function(*args, **(kwargs or {}))
        if self.macs is not None:
            self.macs.append(count_macs(function, args, kwargs or {}, outputs))
        elif self.watched is not None and function is aten.clone.default:
            self.watched.append(args[0])
        elif self.next_node is not None and function is aten.new_empty.default:
            op, given, macs = self.next_node
            self.append(op, given, {}, outputs, macs)
        elif tensors(outputs):
            self.add(function, args, kwargs or {}, outputs)
        return outputs

    def add(self, function: Any, args: Any, kwargs: Any, outputs: Any) -> None:
        """Record an operation that returned tensors.

        Raises:
            RecordingError: If it writes to the network, or draws random numbers.
        """
        macs = count_macs(function, args, kwargs, outputs)
        args, kwargs = read_arguments(function, args, kwargs)
        still = self.check_repeatable(function, args, kwargs)
        if function._schema.is_mutable and not still:
            function = self.without_writing(function, args[0])
        rewrite = REWRITTEN.get(function.overloadpacket)
        results = None if rewrite is None else rewrite(self, args, kwargs, outputs)
        if results is not None:
            for tensor, value in zip(tensors(outputs), results, strict=True):
                self.known[id(tensor)] = value, tensor
            return
        args, kwargs = (map_values(part, Tensor, self.value_of) for part in (args, kwargs))
        self.append(str(function), args, kwargs, outputs, macs)

    def check_repeatable(self, function: Any, args: Any, kwargs: Any) -> bool:
        """Refuse what draws random numbers or updates running statistics; return whether it could, and does not."""
        named = dict(zip((each.name for each in function._schema.arguments), args, strict=False)) | kwargs
        still = any(named.get(name, self) == number for name, number in STILL.items())
        if torch.Tag.nondeterministic_seeded in function.tags and not still:
            raise RecordingError(f"{self.where()} draws random numbers, {function.overloadpacket}")
        if function.overloadpacket in BATCH_NORMS and named["training"] and named["running_mean"] is not None:
            raise RecordingError(f"{self.where()} updates its running statistics: it is in training mode")
        return still

    def without_writing(self, function: Any, tensor: Tensor) -> Any:
        """Return the operation that returns what this one writes to its first argument.

        Functionalization has replaced the writes of the network; what still writes is inside of torch, to a tensor that
        it made, or a write to a tensor of the network itself.
        """
        storage = tensor.untyped_storage()._cdata
        others = [each for _, each in self.known.values() if each is not tensor]
        name = self.names.get(id(tensor))
        if name is not None or id(tensor) not in self.known:
            raise RecordingError(f"{self.where()} writes to {name or 'a tensor of the network'}, {function}")
        if any(each.untyped_storage()._cdata == storage for each in others):
            raise RecordingError(f"{self.where()} writes to a view of a tensor, {function}")
        packet = getattr(aten, function.overloadpacket.__name__.rstrip("_"), None)
        if packet is None or function._overloadname not in packet.overloads():
            raise RecordingError(f"{self.where()} writes in place, {function}")
        return getattr(packet, function._overloadname)

    def append(self, op: str, args: Any, kwargs: Any, outputs: Any, macs: int = 0) -> None:
        """Append a node that returns these tensors."""
        returned = list(outputs) if isinstance(outputs, tuple | list) else [outputs]
        infos = [
            Info(tuple(each.shape), each.dtype) if isinstance(each, Tensor) else Info((), torch.bool)
            for each in returned
        ]
        node = self.graph.add(op, args, kwargs, infos, path=self.where(), macs=macs).node
        for output, tensor in enumerate(returned):
            if isinstance(tensor, Tensor):
                self.known[id(tensor)] = Value(node, output), tensor

    def derive(self, op: str, tensor: Tensor, args: Sequence[Any], like: Tensor | tuple[int, ...]) -> Value:
        """Record one of our own operations on a tensor, and return its output of this shape."""
        shape = tuple(like.shape) if isinstance(like, Tensor) else like
        return self.write.append(op, (self.value_of(tensor), *args), shape)

    @property
    def write(self) -> Writer:
        """Appends our own operations on values."""
        return Writer(self.graph, self.where())

    def where(self) -> str:
        """Return the path of the module that runs."""
        return self.running[-1] if self.running else "the network"

    def value_of(self, tensor: Tensor) -> Value:
        """Return the value that a tensor is; a constant of the network becomes a node."""
        if id(tensor) in self.known:
            return self.known[id(tensor)][0]
        name = self.names.get(id(tensor))
        real = self.reals[name] if name is not None else tensor
        if name is None:
            constant = getattr(tensor, "constant", None)
            real = tensor if constant is None else constant
            if type(real) not in (Tensor, torch.nn.Parameter):
                raise RecordingError(f"{self.where()} uses a {type(tensor).__name__} whose origin is unknown")
        value = self.write.constant(real, name)
        self.known[id(tensor)] = value, tensor
        return value

    def is_known(self, tensor: Tensor) -> bool:
        """Whether a tensor follows from those of the network alone, and from no volume."""
        value = self.value_of(tensor)
        return all(self.graph.nodes[index].op != "input" for index in self.graph.needed(value))

    def numbers_of(self, tensor: Tensor) -> Tensor:
        """Return the numbers of a tensor that follows from those of the network; call it inside `with_numbers`."""
        return run_whole(self.graph, [], self.value_of(tensor))

    def number_of(self, tensor: Tensor) -> Any:
        """Return a number that the network reads from a tensor.

        Raises:
            RecordingError: If it depends on the volume.
        """
        if not self.is_known(tensor):
            raise RecordingError(f"{self.where()} reads a computed number in Python (item, float, if)")
        with with_numbers():
            return self.numbers_of(tensor).item()

    @contextmanager
    def counted(self) -> Iterator[list[int]]:
        """Count MACs inside the context, and record nothing."""
        self.macs = []
        try:
            yield self.macs
        finally:
            self.macs = None

    def returned(self, op: str, args: Any, macs: int, make: Callable[[], Tensor]) -> Tensor:
        """Record a node whose output is the tensor that `make` makes."""
        self.next_node = op, args, macs
        try:
            return make()
        finally:
            self.next_node = None

    def value_now(self, tensor: Tensor) -> Value:
        """Return the value that a tensor of the network, which functionalization wraps, is at this time of its run."""
        self.watched = []
        try:
            tensor.clone()
            return self.value_of(self.watched[-1])
        finally:
            self.watched = None


def read_arguments(
    function: Any, args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return all arguments in the order of the schema, defaults included, and those that go by name alone."""
    positional, named = [], {}
    for place, argument in enumerate(function._schema.arguments):
        given = args[place] if place < len(args) else kwargs.get(argument.name, argument.default_value)
        if not argument.kwarg_only:
            positional.append(given)
        elif argument.name not in PLACES:
            named[argument.name] = given
    return tuple(positional), named


class NetworkFunctions(TorchFunctionMode):
    """Notes the tensors that a network gets, which functionalization wraps, and pads circularly by concatenations.

    Circular padding of torch writes to views below what can be recorded.
    """

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function of torch."""
        kwargs = kwargs or {}
        if function in (F.pad, torch._C._nn.pad):
            given = (*args, *(kwargs[name] for name in ("input", "pad", "mode") if name in kwargs), "constant")
            grid, pads, mode = given[:3]
            if mode == "circular":
                return pad_circularly(grid, pads)
        outputs = function(*args, **kwargs)
        note_outputs(outputs)
        return outputs


def pad_circularly(grid: Tensor, pads: Sequence[int]) -> Tensor:
    """Pad the last dimensions with what stands at their other ends; negative padding crops before."""
    for place in range(len(pads) // 2):
        (before, after), dim = pads[2 * place : 2 * place + 2], grid.dim() - 1 - place
        length = grid.shape[dim] + min(before, 0) + min(after, 0)
        grid = grid.narrow(dim, max(-before, 0), length)
        first, last = max(before, 0), max(after, 0)
        grid = torch.cat([grid.narrow(dim, length - first, first), grid, grid.narrow(dim, 0, last)], dim)
    return grid.contiguous()


def record_graph(
    run: Callable[..., Any], inputs: Sequence[Tensor], names: dict[int, str], reals: dict[str, Tensor]
) -> Graph:
    """Record a network.

    Args:
        run: Runs the network on fake tensors, of which it returns one.
        inputs: Its inputs, fake.
        names: id of each fake tensor of the network -> name.
        reals: Name -> real tensor.

    Raises:
        RecordingError: If it runs an operation that cannot be recorded.
    """
    graph = Graph()
    recorder = Recorder(graph, names, reals)
    for index, tensor in enumerate(inputs):
        value = graph.add("input", (index,), {}, [Info(tuple(tensor.shape), tensor.dtype)])
        graph.inputs.append(value)
        recorder.known[id(tensor)] = value, tensor

    def note(*given: Tensor) -> Tensor:
        output = run(recorder, *given)
        graph.output = recorder.value_now(output)
        return output

    try:
        # Within a mode of functions, attention of torch runs by its operations, not as one whose parts cannot be told.
        with torch.no_grad(), recorder, NetworkFunctions():
            functionalize(note)(*inputs)
    except (DynamicOutputShapeException, DataDependentOutputException) as error:
        raise RecordingError(f"{recorder.where()} computes a shape from numbers, {error.func}") from error
    except UnsupportedOperatorException as error:
        raise RecordingError(f"{recorder.where()} runs {error.func}, whose shapes are unknown to torch") from error
    except RuntimeError as error:
        if "mutating a non-functional tensor" not in str(error):
            raise
        raise RecordingError(f"{recorder.where()} writes to a tensor of the network") from error
    return graph
