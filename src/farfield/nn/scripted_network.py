"""A network of TorchScript as a plain module: its operations run one by one in Python, where they can be recorded."""

from __future__ import annotations

import inspect
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn

# Convolutions, and the place of the number of groups among their arguments.
_GROUPS = {"aten::conv1d": 6, "aten::conv2d": 6, "aten::conv3d": 6, "aten::_convolution": 8}


class ScriptError(ValueError):
    """A scripted network does what does not run operation by operation."""


class _Step(NamedTuple):
    """An operation of the graph of a network: names of the values that it reads and makes, and what it runs inside."""

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    blocks: tuple[_Block, ...] = ()


class _Block(NamedTuple):
    """Steps in series, such as those of one side of an `if`."""

    inputs: tuple[str, ...]
    steps: tuple[_Step, ...]
    outputs: tuple[str, ...]


class ScriptedNetwork(nn.Module):
    """A scripted, traced or frozen network whose operations run in Python, with its parameters and buffers.

    Args:
        script: The network, a `torch.jit.ScriptModule`. It stays as it is.
        make: What becomes of each of its tensors.

    Raises:
        ScriptError: If it calls what has no graph, such as a class of TorchScript, or kernels and weights that only
            TorchScript has, such as those of `torch.jit.optimize_for_inference`; when it runs, if it changes its own
            attributes.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> script = torch.jit.trace(nn.Conv2d(1, 2, 3), torch.zeros(1, 1, 9, 9))
        >>> plain, grid = ScriptedNetwork(script), torch.randn(1, 1, 20, 30)
        >>> torch.equal(plain(grid), script(grid))
        True
    """

    def __init__(self, script: Any, make: Callable[[Tensor], Tensor] = lambda tensor: tensor) -> None:
        super().__init__()
        self.make, self.constants = make, dict[str, Any]()
        self.signature = _signature(script)
        graph = script.inlined_graph
        own, *_ = graph.inputs()
        self.tensors = dict[str, str]()
        self.block = self._read_block(graph, {own.debugName(): ("", script)})
        del self.make
        self.train(getattr(script, "training", False))  # a frozen one has no mode

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Run the steps."""
        try:
            given = self.signature.bind(*inputs, **named)
        except TypeError as error:
            fix = f"the inputs of forward{self.signature}, in their order"
            raise ScriptError(f"it does not take these inputs: {error}; fix: {fix}.") from error
        given.apply_defaults()
        values = self.constants | {name: getattr(self, own) for name, own in self.tensors.items()}
        own = {id(each) for value in self.constants.values() for each in _containers(value)}
        outputs = _run(self.block, [self, *given.args], values, own)
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    def first_convolution(self) -> tuple[int, int] | None:
        """Return the spatial dims and the channels that the first convolution takes; None if it is not known."""
        for step in _iterate(self.block):
            if step.name in _GROUPS and step.inputs[1] in self.tensors:
                weight = getattr(self, self.tensors[step.inputs[1]])
                return weight.dim() - 2, weight.shape[1] * self.constants[step.inputs[_GROUPS[step.name]]]
        return None

    def _read_block(self, block: Any, objects: dict[str, tuple[str, Any]]) -> _Block:
        """Read the steps of a block; `objects` are the modules and attributes that are known, with their paths."""
        steps = []
        for node in block.nodes():
            kind = node.kind()
            types = [each.type().str() for each in (*node.inputs(), *node.outputs())]
            if any(each.endswith("torch.autograd.grad_mode.no_grad") for each in types):
                continue  # numbers are the same with and without gradients
            if not kind.startswith(("aten::", "prim::")) or "mkldnn" in kind.lower():
                raise _refusal(kind, "an operation that only TorchScript runs", _BEFORE_OPTIMIZING)
            if kind == "prim::Constant":
                self._keep(node.output().debugName(), "", node.output().toIValue())
            elif kind == "prim::GetAttr" and node.input().debugName() in objects:
                path, value = objects[node.input().debugName()]
                inner, name = f"{path}{node.s('name')}", node.output().debugName()
                objects[name] = f"{inner}/", getattr(value, node.s("name"))
                self._keep(name, inner, objects[name][1])
            elif kind in ("prim::CallMethod", "prim::CallFunction", "prim::fork", "prim::rpc_async"):
                raise _refusal(kind, "which has no graph")
            else:
                name = node.schema().partition("(")[0] if "::" in node.schema() else kind
                blocks = tuple(self._read_block(each, objects) for each in node.blocks())
                steps.append(_Step(name, _names(node.inputs()), _names(node.outputs()), blocks))
        return _Block(_names(block.inputs()), tuple(steps), _names(block.outputs()))

    def _keep(self, name: str, path: str, value: Any) -> None:
        """Keep a tensor as a parameter or buffer, each once, and a plain value as a constant."""
        if isinstance(value, torch.ScriptObject) or (isinstance(value, Tensor) and value.is_quantized):
            raise _refusal(
                path or name,
                "an object or a quantized weight of TorchScript",
                "the module before it was quantized or scripted",
            )
        if isinstance(value, Tensor) and value.is_mkldnn:
            raise _refusal(path or name, "a weight in the layout of oneDNN", _BEFORE_OPTIMIZING)
        if not isinstance(value, Tensor):
            if not isinstance(value, nn.Module):
                self.constants[name] = value
            return
        own = (path or f"value {name}").replace(".", "/")
        self.tensors[name] = own
        if own in self._parameters or own in self._buffers:
            return
        made = self.make(value)
        if isinstance(made, nn.Parameter):
            self.register_parameter(own, made)
        else:
            self.register_buffer(own, made)


def _refusal(name: str, why: str, fix: str = "the module before it was scripted or traced") -> ScriptError:
    return ScriptError(f"it has {name}, {why}; fix: {fix}.")


def _signature(script: Any) -> inspect.Signature:
    """Return the arguments of a script, with their defaults."""
    _, *arguments = script.forward.schema.arguments
    return inspect.Signature(
        [
            inspect.Parameter(
                each.name,
                inspect.Parameter.POSITIONAL_OR_KEYWORD,
                default=each.default_value if each.has_default_value() else inspect.Parameter.empty,
            )
            for each in arguments
        ]
    )


def _containers(value: Any) -> Iterator[Any]:
    """Return a list or dict and those in it."""
    if isinstance(value, list | dict):
        yield value
    if isinstance(value, list | tuple | dict):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _containers(each)


def _names(values: Iterable[Any]) -> tuple[str, ...]:
    return tuple(each.debugName() for each in values)


def _iterate(block: _Block) -> Iterator[_Step]:
    for step in block.steps:
        yield step
        for inner in step.blocks:
            yield from _iterate(inner)


def _run(block: _Block, inputs: Sequence[Any], values: dict[str, Any], own: set[int]) -> list[Any]:
    """Run steps; `own` are the addresses of the lists and dicts of the network."""
    values.update(zip(block.inputs, inputs, strict=True))
    for step in block.steps:
        given = [values[name] for name in step.inputs]
        if step.name == "prim::If":
            results = _run(step.blocks[not given[0]], (), values, own)
        elif step.name == "prim::Loop":
            results = _run_loop(step.blocks[0], given, values, own)
        else:
            if given and id(given[0]) in own and _look_up(_CHANGES, step.name):
                raise _refusal(step.name, "which changes a list or dict of the network")
            result = _find(step.name)(*given)
            results = [result] if len(step.outputs) == 1 else list(result or ())
        values.update(zip(step.outputs, results, strict=True))
    return [values[name] for name in block.outputs]


def _run_loop(block: _Block, given: Sequence[Any], values: dict[str, Any], own: set[int]) -> list[Any]:
    most, goes_on, *state = given
    for index in range(most):
        if not goes_on:
            break
        goes_on, *state = _run(block, [index, *state], values, own)
    return state


def _look_up(table: Mapping[str, Callable[..., Any]], name: str) -> Callable[..., Any] | None:
    """Return what a table has for an operation, or for all of its overloads."""
    return table.get(name) or table.get(name.partition(".")[0])


def _find(name: str) -> Callable[..., Any]:
    """Return what runs a step: Python, where it is of lists and numbers, or an operation of torch."""
    if in_python := _look_up(_CHANGES, name) or _look_up(_IN_PYTHON, name):
        return in_python
    plain, _, overload = name.partition(".")
    namespace, _, own = plain.partition("::")
    try:
        operation = getattr(getattr(getattr(torch.ops, namespace), own), overload or "default")
    except AttributeError:
        raise _refusal(name, "which only TorchScript runs") from None
    arguments = operation._schema.arguments
    for each in arguments:
        # It would change a copy in C++ of what it is given.
        if each.alias_info is not None and each.alias_info.is_write and str(each.type) not in _TENSORS:
            raise _refusal(name, "which changes a list or dict in place")
        if _ANY_TYPE.search(str(each.type)):
            raise _refusal(name, "which takes values of any type")
    named = [each.name for each in arguments if each.kwarg_only]
    return partial(_call, operation, named) if named else operation


def _call(operation: Callable[..., Any], named: Sequence[str], *given: Any) -> Any:
    # A graph has all arguments in their order, also those that go by name alone.
    first = len(given) - len(named)
    return operation(*given[:first], **dict(zip(named, given[first:], strict=True)))


def _convolve(*given: Any) -> Tensor:
    # Traces have the choice of kernels with a convolution, which then is no operation that consists of others.
    return torch.ops.aten.convolution.default(*given[:9])


def _make_tensor(data: Any, dtype: int | None, device: torch.device | None, gradient: bool = False) -> Tensor:
    # A graph has dtypes as numbers, of which only operations know what they are.
    known = None if dtype is None else torch.ops.aten.empty.memory_format([0], dtype=dtype, device="meta").dtype
    return torch.tensor(data, dtype=known, device=device, requires_grad=gradient)


def _sort(values: list[Any], reverse: bool) -> None:
    values.sort(reverse=reverse)


def _fail(message: str, *_: Any) -> NoReturn:
    raise ValueError(message)


_ANY_TYPE = re.compile(r"\bt\b")  # which operations do not take from Python
_TENSORS = ("Tensor", "Optional[Tensor]")
_BEFORE_OPTIMIZING = "the network before torch.jit.optimize_for_inference, or the module before it was scripted"

# What changes a list or dict, its first argument.
_CHANGES: Mapping[str, Callable[..., Any]] = {
    "aten::_set_item": operator.setitem,
    "aten::append": list.append,
    "aten::reverse": list.reverse,
    "aten::extend": list.extend,
    "aten::insert": list.insert,
    "aten::pop": lambda values, *place: values.pop(*place),
    "aten::remove": list.remove,
    "aten::clear": lambda values: values.clear(),
    "aten::Delete": operator.delitem,
    "aten::update": dict.update,
    "aten::setdefault": dict.setdefault,
    "aten::add_.t": operator.iadd,
    "aten::mul_.t": operator.imul,
    **{f"aten::sort.{kind}": _sort for kind in ("int", "float", "bool", "str")},
}

# What torch's operators do not do to the lists of Python themselves, or have no operator for.
_IN_PYTHON: Mapping[str, Callable[..., Any]] = {
    "prim::ListConstruct": lambda *values: list(values),
    "prim::TupleConstruct": lambda *values: values,
    "prim::DictConstruct": lambda *pairs: dict(zip(pairs[::2], pairs[1::2], strict=True)),
    "prim::ListUnpack": tuple,
    "prim::TupleUnpack": tuple,
    "prim::TupleIndex": operator.getitem,
    "prim::NumToTensor": torch.tensor,
    "prim::unchecked_cast": lambda value: value,
    "prim::Uninitialized": lambda: None,
    "prim::RaiseException": _fail,
    "prim::device": lambda tensor: tensor.device,
    "prim::dtype": lambda tensor: tensor.dtype,
    "aten::_convolution": _convolve,
    "aten::__getitem__": operator.getitem,
    "aten::__contains__": operator.contains,
    "aten::__is__": operator.is_,
    "aten::__isnot__": operator.is_not,
    "aten::__not__": operator.not_,
    "aten::slice.t": lambda values, *ends: values[slice(*ends)],
    "aten::add.t": operator.add,
    "aten::mul.left_t": operator.mul,
    "aten::get": dict.get,
    "aten::keys": list,
    "aten::values": lambda values: list(values.values()),
    "aten::items": lambda values: list(values.items()),
    "aten::len": len,
    "aten::list": list,
    "aten::format": str.format,
    "aten::copy.t": list.copy,
    "aten::copy.Dict_str": dict.copy,
    "aten::copy.Dict_int": dict.copy,
    "aten::tensor": _make_tensor,
    "aten::as_tensor.list": _make_tensor,
    "aten::warn": lambda *_: None,
    "prim::Print": lambda *_: None,
}
