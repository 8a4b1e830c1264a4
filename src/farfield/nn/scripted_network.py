"""A network of TorchScript as a plain module: its operations run one by one in Python, where they can be recorded."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn

# Convolutions, and the place of the number of groups among their arguments.
_GROUPS = {"aten::conv1d": 6, "aten::conv2d": 6, "aten::conv3d": 6, "aten::_convolution": 8}


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
        ValueError: If it calls what has no graph, such as a class of TorchScript.

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
        graph = script.inlined_graph
        own, *_ = graph.inputs()
        self.tensors = dict[str, str]()
        self.block = self._read_block(graph, {own.debugName(): ("", script)})
        del self.make
        self.train(getattr(script, "training", False))  # a frozen one has no mode

    def forward(self, *inputs: Any) -> Any:
        """Run the steps."""
        values = self.constants | {name: getattr(self, own) for name, own in self.tensors.items()}
        outputs = _run(self.block, [self, *inputs], values)
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
            if kind == "prim::Constant":
                self._keep(node.output().debugName(), "", node.output().toIValue())
            elif kind == "prim::GetAttr":
                path, value = objects[node.input().debugName()]
                inner, name = f"{path}{node.s('name')}", node.output().debugName()
                objects[name] = f"{inner}/", getattr(value, node.s("name"))
                self._keep(name, inner, objects[name][1])
            elif kind in ("prim::CallMethod", "prim::CallFunction", "prim::fork", "prim::rpc_async"):
                raise ValueError(f"it has a {kind}, which has no graph")
            else:
                name = node.schema().partition("(")[0] if "::" in node.schema() else kind
                blocks = tuple(self._read_block(each, objects) for each in node.blocks())
                steps.append(_Step(name, _names(node.inputs()), _names(node.outputs()), blocks))
        return _Block(_names(block.inputs()), tuple(steps), _names(block.outputs()))

    def _keep(self, name: str, path: str, value: Any) -> None:
        """Keep a tensor as a parameter or buffer, each once, and a plain value as a constant."""
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


def _names(values: Iterable[Any]) -> tuple[str, ...]:
    return tuple(each.debugName() for each in values)


def _iterate(block: _Block) -> Iterator[_Step]:
    for step in block.steps:
        yield step
        for inner in step.blocks:
            yield from _iterate(inner)


def _run(block: _Block, inputs: Sequence[Any], values: dict[str, Any]) -> list[Any]:
    values.update(zip(block.inputs, inputs, strict=True))
    for step in block.steps:
        given = [values[name] for name in step.inputs]
        if step.name == "prim::If":
            results = _run(step.blocks[not given[0]], (), values)
        elif step.name == "prim::Loop":
            results = _run_loop(step.blocks[0], given, values)
        else:
            result = _find(step.name)(*given)
            results = [result] if len(step.outputs) == 1 else list(result or ())
        values.update(zip(step.outputs, results, strict=True))
    return [values[name] for name in block.outputs]


def _run_loop(block: _Block, given: Sequence[Any], values: dict[str, Any]) -> list[Any]:
    most, goes_on, *state = given
    for index in range(most):
        if not goes_on:
            break
        goes_on, *state = _run(block, [index, *state], values)
    return state


def _find(name: str) -> Callable[..., Any]:
    """Return what runs a step: Python, where it is of lists and numbers, or an operation of torch."""
    plain, _, overload = name.partition(".")
    in_python = _IN_PYTHON.get(name) or _IN_PYTHON.get(plain)
    if in_python is not None:
        return in_python
    namespace, _, own = plain.partition("::")
    operation = getattr(getattr(getattr(torch.ops, namespace), own), overload or "default")
    named = [each.name for each in operation._schema.arguments if each.kwarg_only]
    return partial(_call, operation, named) if named else operation


def _call(operation: Callable[..., Any], named: Sequence[str], *given: Any) -> Any:
    # A graph has all arguments in their order, also those that go by name alone.
    first = len(given) - len(named)
    return operation(*given[:first], **dict(zip(named, given[first:], strict=True)))


def _convolve(*given: Any) -> Tensor:
    # Traces have the choice of kernels with a convolution, which then is no operation that consists of others.
    return torch.ops.aten.convolution.default(*given[:9])


def _set_item(values: Any, key: Any, value: Any) -> None:
    values[key] = value


def _fail(message: str, *_: Any) -> NoReturn:
    raise ValueError(message)


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
    "aten::_set_item": _set_item,
    "aten::__contains__": operator.contains,
    "aten::__is__": operator.is_,
    "aten::__isnot__": operator.is_not,
    "aten::__not__": operator.not_,
    "aten::slice.t": lambda values, *ends: values[slice(*ends)],
    "aten::add.t": operator.add,
    "aten::mul.left_t": operator.mul,
    "aten::append": list.append,
    "aten::reverse": list.reverse,
    "aten::extend": list.extend,
    "aten::insert": list.insert,
    "aten::pop": lambda values, *place: values.pop(*place),
    "aten::keys": list,
    "aten::values": lambda values: list(values.values()),
    "aten::items": lambda values: list(values.items()),
    "aten::len": len,
    "aten::list": list,
    "aten::format": str.format,
    "aten::warn": lambda *_: None,
}
