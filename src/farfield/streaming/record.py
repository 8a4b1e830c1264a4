"""Record a network once, at the volume's own size, as a graph of torch's operations.

A copy of the network runs on tensors that have shapes and no numbers, so the size costs nothing, and lengths, branches
on the size and coordinates are those of the untiled run. Writes in place become values, views a few operations of our
own, and a layer that needs the whole grid is one node.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)
from torch.autograd.function import BackwardCFunction
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from farfield.nn import GridAttention
from farfield.nn.devices import device_of
from farfield.nn.leftovers import note_outputs, sweep
from farfield.nn.macs import MacCounter, count_macs
from farfield.nn.network_copy import copied, make_empty
from farfield.nn.tracing import tensors, without_numbers
from farfield.ops.modes import Attending, attending, autocast_dtype, recorded_for_tiles, without_cudnn
from farfield.streaming.functions import run_recorded
from farfield.streaming.gradients import LOSSES, Stops, own_gradient, without_functions
from farfield.streaming.graph import (
    FunctionCall,
    Graph,
    Info,
    RecordedLayer,
    RecordingError,
    Value,
    Writer,
    holds,
    map_values,
    name_function,
    run_whole,
)
from farfield.streaming.labels import label_graph
from farfield.streaming.layers import has_grid_summary, make_streamable, summary_bytes
from farfield.streaming.random_numbers import SEED, find_drawn
from farfield.streaming.rewrites import REWRITTEN, as_attention, with_numbers
from farfield.streaming.rules.rule import FIX
from farfield.streaming.scanning import recorded_scans
from farfield.streaming.spans import is_cut
from farfield.streaming.spectra import keep_modes
from farfield.streaming.tokens import split_tokens

aten = torch.ops.aten
# Named arguments for where a tensor lies: a part lies where the volume lies.
_PLACES = ("device", "pin_memory", "layout", "generator")
# Arguments with which an operation that may draw random numbers draws none.
_STILL = {"dropout_p": 0.0, "train": False, "training": False}
# Operations that update running statistics beside what they return, if they are given and `training` is set.
_BATCH_NORMS = (aten.native_batch_norm, aten._native_batch_norm_legit, aten._native_batch_norm_legit_functional)
# Operations that take one position along a dimension, or may, and how many a module takes of an axis that is cut: each
# costs a hundredth of a second, and reads all that is before it.
_TAKING, _TAKEN = (aten.select, aten.slice, aten.unbind), 512
# The path of what runs before or behind the network.
AROUND = "the network"
# While a network is recorded, a layer that needs the whole grid is this operation. It has no kernel: the recorder sees
# it with the tensors that functionalization unwrapped.
_LIBRARY = torch.library.Library("farfield_streaming", "DEF")
_LIBRARY.define("layer(int number, Tensor grid, Tensor? mask) -> Tensor")


class _Recorder(TorchDispatchMode):
    def __init__(
        self,
        device: torch.device,
        constants: dict[int, tuple[str, Tensor]],
        before: Graph,
        draws: bool,
        cut: Sequence[int],
    ) -> None:
        super().__init__()
        # Axes that will be cut, and how often modules have taken one position along a dimension of a length.
        self.cut, self.taken = cut, Counter[tuple[str, int, int]]()
        # The seed, if random numbers are recorded, and how many operations draw.
        self.seed, self.drawn = (torch.zeros((), dtype=torch.long, device=device) if draws else None), 0
        if self.seed is not None:
            constants[id(self.seed)] = SEED, self.seed
        self.in_loss = False
        # id of a fake tensor of the network -> its name, and the real tensor.
        self.graph, self.constants = Graph(device=device), constants
        # The tensors are kept, so that no other gets the same id.
        self.known: dict[int, tuple[Value, Tensor]] = {}
        # id of a tensor of the network -> the tensor, and the one that takes its writes.
        self.held: dict[int, tuple[Tensor, Tensor]] = {}
        # Each writes what a module runs that has not returned yet.
        self.running = [Writer(self.graph, AROUND)]
        self.stops = Stops(self.graph, self.running, self.numbers_of, self.value_of) if draws else None
        # Each layer that needs the whole grid, and its forward without numbers.
        self.layers: list[tuple[RecordedLayer, partial[Tensor]]] = []
        # Path and operands of a layer's call -> the layer with its costs, its MACs and its result.
        self.costed: dict[tuple[Any, ...], tuple[RecordedLayer, int, Info]] = {
            (node.args[0].path, *map(before.info, node.inputs)): (node.args[0], node.macs, node.outputs[0])
            for node in before.nodes
            if node.op == "layer"
        }

    @property
    def write(self) -> Writer:
        return self.running[-1]

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunction():  # tensors are those that functionalization unwrapped
            return self.record(function, args, kwargs or {})

    def record(self, function: Any, args: Any, kwargs: Any) -> Any:
        """Run an operation without numbers, and add it to the graph."""
        if function is torch.ops.prim.device.default:  # of a tensor without numbers, not an operation
            return function(*args)
        if function is aten._local_scalar_dense.default:
            return self.number_of(args[0])
        if function is torch.ops.farfield_streaming.layer.default:
            return self.run_layer(*args)
        if function is torch.ops.farfield_streaming.detach.default:
            result = torch.empty_like(args[0])
            self.note(result, [self.write.append("detach", [self.value_of(args[0])], *_info(result))])
            return result
        if function is torch.ops.farfield_streaming.scan.default:
            result, values = torch.empty_like(args[1]), [self.value_of(each) for each in args]
            info, macs = _info(result), result.numel()
            self.note(result, [self.graph.add("scan", values, {}, [info], path=self.write.path, macs=macs)])
            return result
        if self.in_loss or function in LOSSES:
            was, self.in_loss = self.in_loss, True
            try:
                # Operations of torch that consist of others are taken apart before they come here, but not in a loss.
                with self:
                    outputs = LOSSES.get(function, function.decompose)(*args, **kwargs)
            finally:
                self.in_loss = was
            if outputs is not NotImplemented:
                return outputs
        if function.overloadpacket in (aten.index, aten.index_put):
            indices = [place for each in args[1] for place in self.find_places(each, function is aten.index.Tensor)]
            args = (args[0], indices, *args[2:])
        try:
            outputs = function(*args, **kwargs)
        except DynamicOutputShapeException:
            if not all(self.write.is_known(self.value_of(each)) for each in tensors([args, kwargs])):
                raise
            return self.compute_known(function, args, kwargs)
        if tensors(outputs):
            self.add(function, args, kwargs, outputs)
        return outputs

    def hold(self, tensor: Tensor) -> Tensor:
        """Return a tensor whose views and writes become values; one of the network becomes such a tensor once."""
        if torch._is_functional_tensor(tensor):
            return tensor
        if id(tensor) not in self.held:
            held = torch._to_functional_tensor(tensor)
            # Whether it needs a gradient decides by which operations torch multiplies matrices.
            torch._mirror_autograd_meta_to(tensor, held)  # type: ignore[attr-defined]
            self.held[id(tensor)] = tensor, held
        return self.held[id(tensor)][1]

    def numbers_of(self, tensor: Tensor) -> Tensor:
        """Return what a tensor is after its writes, as the recorder sees it."""
        held = self.hold(tensor)
        torch._sync(held)
        return torch._from_functional_tensor(held)

    def refuse_memory(self, network: nn.Module) -> None:
        """Refuse a network that keeps something of the volume for its next run; it may count its runs."""
        own = [(self.constants[key][0], tensor) for key, (tensor, _) in self.held.items() if key in self.constants]
        tensors = dict(self.constants.values())
        for name, tensor in [*own, *network.named_buffers()]:
            last = self.numbers_of(tensor)
            if last is tensor:
                continue
            if name in tensors:
                self.graph.writes[name] = self.value_of(last)
                self.graph.constants.setdefault(name, tensors[name])
            if not self.write.is_known(self.value_of(last)):
                fix = "model.eval(), if it is in training mode; else a module without that write"
                raise RecordingError(f"{name} of the network is computed from the volume, for the next run; fix: {fix}")

    def add(self, function: Any, args: Any, kwargs: Any, outputs: Any) -> None:
        macs = count_macs(function, args, kwargs, outputs)
        args, kwargs = _read_arguments(function, args, kwargs)
        named = dict(zip((each.name for each in function._schema.arguments), args, strict=False)) | kwargs
        drawn = find_drawn(function, named)
        if drawn is not None and self.seed is not None:
            values = self.value_of(self.seed), self.drawn, *drawn
            self.drawn += 1
            self.note(outputs, [self.write.append("random", values, *_info(outputs))])
            return
        still = self.check_repeatable(function, named)
        if function._schema.is_mutable and not still:
            raise RecordingError(f"{self.write.path} writes in place, {function}")
        args, kwargs = (map_values(part, Tensor, self.value_of) for part in (args, kwargs))
        if self.cut and function.overloadpacket in _TAKING:
            self.refuse_loop(args[0], args[1], outputs)
        rewrite = REWRITTEN.get(function.overloadpacket)
        several = isinstance(outputs, tuple | list)
        infos = [_info(each) for each in (outputs if several else (outputs,))]
        result = None if rewrite is None else rewrite(self.write, infos if several else infos[0], *args)
        if result is None:
            op, args, kwargs = as_attention(self.write, function, args, kwargs) or (str(function), args, kwargs)
            node = self.graph.add(op, args, kwargs, infos, path=self.write.path, macs=macs).node
            result = [Value(node, output) for output in range(len(infos))]
        self.note(outputs, [result] if isinstance(result, Value) else result)

    def refuse_loop(self, value: Value, dim: int, outputs: Any) -> None:
        """Refuse a loop over the positions of an axis that is cut before all of its steps are recorded."""
        shape = self.graph.info(value).shape
        key, length = (self.write.path, dim % len(shape), shape[dim]), shape[dim]
        if isinstance(outputs, Tensor) and outputs.dim() == len(shape) and outputs.shape[dim] > 1:
            return
        self.taken[key] += 1 if isinstance(outputs, Tensor) else len(outputs)
        if self.taken[key] < _TAKEN:
            return
        self.graph.output = value
        size = self.graph.info(self.graph.inputs[0]).shape[2:]
        if is_cut(label_graph(self.graph, size, self.cut, refused={}).layouts[value][key[1]]):
            raise RecordingError(
                f"{self.write.path} takes {length} positions one by one along an axis that is cut, and each step is an "
                f"operation of its own; {FIX}, or an operation of torch for all steps, such as cumsum"
            )
        self.taken[key] = -sys.maxsize  # it is none of these axes

    def note(self, outputs: Any, values: Sequence[Value]) -> None:
        for tensor, value in zip(outputs if isinstance(outputs, tuple | list) else (outputs,), values, strict=True):
            if isinstance(tensor, Tensor):
                self.known[id(tensor)] = value, tensor

    def find_places(self, index: Tensor | None, of_all: bool) -> Sequence[Tensor | None]:
        """Return the places along each dimension where a mask of the network itself holds; another index as it is."""
        if index is None or index.dtype != torch.bool or not (of_all or index.dim() == 1):
            return [index]
        if not self.write.is_known(self.value_of(index)):
            return [index]
        return self.compute_known(aten.nonzero_numpy.default, (index,), {})

    def compute_known(self, function: Any, args: Any, kwargs: Any) -> Any:
        """Return new tensors of the shapes that an operation computes from numbers of the network itself."""
        with with_numbers():
            given = map_values((args, kwargs), Tensor, lambda each: run_whole(self.graph, [], self.value_of(each)))
            numbers = function(*given[0], **given[1])
        several = numbers if isinstance(numbers, tuple | list) else (numbers,)
        results = [torch.empty(each.shape, dtype=each.dtype, device=self.graph.device) for each in several]
        self.note(results, [self.write.constant(each) for each in several])
        return results if several is numbers else results[0]

    def run_layer(self, number: int, grid: Tensor, mask: Tensor | None) -> Tensor:
        """Record a layer as one node, and return a new tensor of its result's shape."""
        own, forward = self.layers[number]
        given: dict[str, Any] = {} if mask is None else {"mask": mask}
        values = [self.value_of(each) for each in (grid, *given.values())]
        call = own.path, *map(self.graph.info, values)
        if call not in self.costed:
            self.costed[call] = _cost_layer(own, forward, grid, given)
        layer, macs, info = self.costed[call]
        layer, result = replace(layer, module=own.module), grid.new_empty(info.shape, dtype=info.dtype)
        node = self.graph.add("layer", (layer, *values), {}, [info], path=self.write.path, macs=macs)
        self.note(result, [node])
        return result

    def check_repeatable(self, function: Any, named: dict[str, Any]) -> bool:
        """Refuse what draws random numbers or updates running statistics; return whether it could, and does not."""
        still = any(named.get(name, self) == number for name, number in _STILL.items())
        if torch.Tag.nondeterministic_seeded in function.tags and not still:
            raise RecordingError(f"{self.write.path} draws random numbers, {function.overloadpacket}; fix: a buffer")
        if function.overloadpacket in _BATCH_NORMS and named["training"] and named["running_mean"] is not None:
            raise RecordingError(f"{self.write.path} updates its running statistics: it is in training mode")
        return still

    def value_of(self, tensor: Tensor) -> Value:
        """Return the value that a tensor is; a constant of the network becomes a node."""
        if id(tensor) in self.known:
            return self.known[id(tensor)][0]
        name, real = self.constants.get(id(tensor), (None, getattr(tensor, "constant", None)))
        real = tensor if real is None else real
        if name is None and type(real) not in (Tensor, nn.Parameter):
            raise RecordingError(f"{self.write.path} uses a {type(tensor).__name__} whose origin is unknown")
        value = self.write.constant(real, name)
        self.known[id(tensor)] = value, tensor
        return value

    def number_of(self, tensor: Tensor) -> Any:
        value = self.value_of(tensor)
        is_drawn = any(self.graph.nodes[index].op == "random" for index in self.graph.needed(value))
        if is_drawn or not self.write.is_known(value):
            fix = "a tensor in its place, such as mean(…, keepdim=True), and torch.where for if"
            raise RecordingError(f"{self.write.path} reads a computed number in Python (item, float, if); fix: {fix}")
        with with_numbers():
            return run_whole(self.graph, [], value).item()


def _cost_layer(
    layer: RecordedLayer, forward: partial[Tensor], grid: Tensor, given: dict[str, Any]
) -> tuple[RecordedLayer, int, Info]:
    module = forward.args[0]
    attention = isinstance(module, GridAttention)
    # The layer does not run by the graph, so its costs are those of its own way.
    with recorded_for_tiles(False), MacCounter() as counter:
        summary = (make_streamable(module) if attention else module).summarize(grid, **given)
    kept = summary_bytes(summary) if attention and has_grid_summary(module) else 0
    layer = replace(layer, summing=counter.macs, summary_bytes=kept)
    with recorded_for_tiles(False), MacCounter() as counter:
        result = forward(grid, **given)
    return layer, counter.macs, _info(result)


def _info(output: Any) -> Info:
    return Info(tuple(output.shape), output.dtype) if isinstance(output, Tensor) else Info((), torch.bool)


def _read_arguments(function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Return all arguments in the order of the schema, defaults included, and those that go by name alone."""
    positional, named = [], {}
    for place, argument in enumerate(function._schema.arguments):
        given = args[place] if place < len(args) else kwargs.get(argument.name, argument.default_value)
        if not argument.kwarg_only:
            positional.append(given)
        elif argument.name not in _PLACES:
            named[argument.name] = given
    return tuple(positional), named


class _NetworkFunctions(TorchFunctionMode):
    """Notes the calls of a network and the tensors that it gets, which functionalization wraps."""

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self.recorder, self.counts = recorder, Counter[tuple[str, str]]()
        self.attending: Attending | None = None

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for each in tensors((args, kwargs or {})):
            if issubclass(kind := type(each.grad_fn), BackwardCFunction):
                raise own_gradient(self.recorder.write.path, kind.__name__)
        args, kwargs = map_values((tuple(args), kwargs or {}), Tensor, self.recorder.hold)
        if function in (Tensor.numpy, Tensor.__array__):  # of memory in which nothing was computed
            path = self.recorder.write.path
            raise RecordingError(
                f"{path} makes an array of NumPy of a tensor; fix: the operation of torch in its place"
            )
        graph, whole = self.recorder.graph, attending()
        if whole is not None and whole is self.attending:  # an operator's function is one call
            outputs = function(*args, **kwargs)
            note_outputs(outputs)
            graph.calls[-1] = graph.calls[-1]._replace(nodes=(graph.calls[-1].nodes[0], len(graph.nodes)))
            return outputs
        self.attending = whole
        own = self.recorder.write.path, name_function(function) if whole is None else whole.function
        first, number = len(graph.nodes), self.counts[own]
        self.counts[own] += 1
        run = run_recorded if self.recorder.stops is None else self.recorder.stops.run
        outputs = run(function, *args, **kwargs)
        note_outputs(outputs)
        if len(graph.nodes) > first or whole is not None:
            shapes = tuple(tuple(each.shape) for each in tensors(outputs))
            graph.calls.append(FunctionCall(*own, number, (first, len(graph.nodes)), shapes))
        return outputs


def record_network(
    network: nn.Module,
    volumes: Sequence[Info],
    finish: Callable[[Any], Any] = lambda output: output,
    before: Graph | None = None,
    *,
    draws: bool = False,
    cut: Sequence[int] = (),
) -> Graph:
    """Record a network on volumes; `finish` makes one grid, or a list of tensors, of what it returns.

    Costs of layers are those of an earlier recording, of calls that are in it. Random numbers are refused, or, if the
    network `draws`, follow from a constant: the seed. Loops over many positions of axes that will be `cut` are refused.
    """
    device = device_of(network)
    known = {id(tensor): name for name, tensor in [*network.named_parameters(), *network.named_buffers()]}
    constants: dict[int, tuple[str, Tensor]] = {}

    def make(tensor: Tensor) -> Tensor:
        empty = make_empty(tensor, device)
        constants[id(empty)] = known.get(id(tensor), f"tensor {len(constants)}"), tensor
        return empty

    # In inference mode, operations that consist of others are not taken apart; modes of the caller count what is run.
    with torch.inference_mode(False), with_numbers(), without_numbers(), copied(network, make, discard=True) as fake:
        # No name is for the recorder: what it has recorded would be there when tensors that are left are looked for.
        graph = _record(_Recorder(device, constants, before or Graph(), draws, cut), fake, network, volumes, finish)
    # Outside of the context, in which the results of operations have no numbers; in training, with their history.
    for name, tensor in graph.constants.items():
        graph.constants[name] = (tensor if draws else tensor.detach()).to(device)
    sweep(graph)
    graph = keep_modes(split_tokens(graph))
    for node in graph.nodes:
        if holds((node.args, node.kwargs), Tensor):  # it would be that of the whole, in every tile
            raise RecordingError(f"{node.path} runs {node.op} on a tensor that is not recorded")
    return graph


def _record(
    recorder: _Recorder, fake: nn.Module, network: nn.Module, volumes: Sequence[Info], finish: Callable[[Any], Any]
) -> Graph:
    _follow(recorder, fake, network)
    graph = recorder.graph
    device = graph.device
    inputs = [torch.empty(info.shape, dtype=info.dtype, device=device) for info in volumes]
    graph.inputs = [graph.add("input", (index,), {}, [info]) for index, info in enumerate(volumes)]
    recorder.note(inputs, graph.inputs)
    torch._enable_functionalization(reapply_views=True)
    try:
        # Within a mode of functions, attention of torch runs by its operations, not as one whose parts cannot be told.
        dtype = autocast_dtype(torch.empty(0, device=device))
        autocast = torch.autocast(device.type, dtype, enabled=dtype is not None)
        # cuDNN has operations of its own for what torch has on each device.
        stops = recorder.stops
        functions = nullcontext() if stops is None else without_functions(recorder.running)
        grad = torch.set_grad_enabled(stops is not None)
        scans, modes = recorded_scans(), _NetworkFunctions(recorder)
        with functions, grad, autocast, without_cudnn(), recorder, modes, recorded_for_tiles(), scans:
            output = finish(fake(*map(recorder.hold, inputs)))
            outputs = output if isinstance(output, list) else [output]
            if stops is not None:
                stops.refuse_stale(outputs)
            values = [recorder.value_of(recorder.numbers_of(each)) for each in outputs]
            graph.output = values[0]
            if isinstance(output, list):
                graph.output = graph.add("several", values, {}, [graph.info(value) for value in values])
            recorder.refuse_memory(fake)
    except (DynamicOutputShapeException, DataDependentOutputException) as error:
        fix = "torch.where with the mask, in place of an index or an if"
        raise RecordingError(
            f"{recorder.write.path} computes a shape from numbers, {error.func}; fix: {fix}"
        ) from error
    except UnsupportedOperatorException as error:
        raise RecordingError(f"{recorder.write.path} runs {error.func}, whose shapes are unknown to torch") from error
    finally:
        torch._disable_functionalization()
    return graph


def _follow(recorder: _Recorder, fake: nn.Module, network: nn.Module) -> None:
    """Let the recorder know the path of each module while it runs, and let layers run as one operation."""

    def end(*_: Any) -> None:
        recorder.running.pop()

    for path, module in named_outside_layers(fake):
        writer = Writer(recorder.graph, path or type(fake).__name__)
        # A block that folds its attention into its other layers calls it where it has hooks.
        module.register_forward_pre_hook(lambda *_, writer=writer: recorder.running.append(writer))
        module.register_forward_hook(end)
        if is_layer(module):
            layer = RecordedLayer(path, network.get_submodule(path))
            forward = partial(type(module).forward, module)
            vars(module)["forward"] = partial(_run_as_one, len(recorder.layers), path, forward)
            recorder.layers.append((layer, forward))


def named_outside_layers(network: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Iterate over modules with their paths, but for those within a layer that is one node."""
    # It runs as in a tile: its projections have no hooks, and may be folded.
    within = tuple(f"{path}." if path else "" for path, module in network.named_modules() if is_layer(module))
    for path, module in network.named_modules():
        if not path or not path.startswith(within):
            yield path, module


def is_layer(module: nn.Module) -> bool:
    """Whether a module is an attention, or one of the user that runs in tiles by its methods."""
    if isinstance(module, GridAttention):
        return True
    return callable(getattr(module, "summarize", None)) and callable(getattr(module, "respond", None))


def _run_as_one(
    number: int,
    path: str,
    forward: partial[Tensor],
    grid: Tensor,
    context: Tensor | None = None,
    *,
    mask: Tensor | None = None,
    context_mask: Tensor | None = None,
    context_weight: Tensor | None = None,
) -> Tensor:
    if context is not None or context_mask is not None:
        raise RecordingError(f"{path} attends to a context; only self-attention runs in tiles")
    if context_weight is not None:  # by its operations, which are sums over positions
        return forward(grid, mask=mask, context_weight=context_weight)
    result: Tensor = torch.ops.farfield_streaming.layer(number, grid, mask)
    return result
