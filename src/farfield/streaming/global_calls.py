"""The calls of torch's functions in which a network sums over all positions, and their statistics.

They are found in the recorded graph: a call is one of them if an operation that it ran sums over an axis of positions.
A call is known by the module that makes it, its function, and how often the module called that before in a run.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from contextvars import ContextVar
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from farfield.nn.tracing import tensors
from farfield.ops.modes import attending
from farfield.streaming.graph import FunctionCall, Value, name_function
from farfield.streaming.labels import LabelledGraph, find_gathered, label_graph
from farfield.streaming.places import RecordedNetwork
from farfield.streaming.record import named_outside_layers
from farfield.streaming.rules.aligned import ALIGNED_RULES
from farfield.streaming.rules.norms import find_norm
from farfield.streaming.spans import axes_of

# Parts of the names of operations whose result does not grow with the number of positions.
_AVERAGES = ("mean", "var", "std", "max", "min", "pool")
# The path of the module that calls, the function, and how often the module called it before.
Key = tuple[str, str, int]
# Operations that sum over positions and give no statistics of channels.
_PRODUCTS = ("aten.mm.", "aten.bmm.", "aten.addmm.", "aten.baddbmm.")


class GlobalCall(NamedTuple):
    """A call that sums over all positions."""

    key: Key
    # Why its result, or its mean and variance, cannot be constants a channel; "" if they can.
    kept: str = ""

    def __str__(self) -> str:
        path, function, number = self.key
        return f"{path}: {function}" + (f" ({number + 1})" if number else "")


def find_global_calls(recorded: RecordedNetwork) -> list[GlobalCall]:
    """Return the calls of a network that sum over all positions, in order."""
    graph, size = recorded.graph, recorded.size
    positions = dict[int, str]()
    labelled = label_graph(graph, size, range(len(size)), halo=[0] * len(size), refused=positions)
    shape = graph.info(graph.inputs[0]).shape
    by_sample = label_graph(graph, shape, [0], halo=[0] * len(shape), first=0, refused={})
    found = []
    for call in graph.calls:
        own = [index for index in range(*call.nodes) if Value(index) in labelled.layouts]
        summing = [index for index in own if index in labelled.reductions]
        # Without the fix, which is one for tiles.
        kept = next((positions[index].partition("; fix")[0] for index in own if index in positions), "")
        if not summing and not kept and not any(_gathers(labelled, index) for index in own):
            continue
        found.append(GlobalCall(call.key, kept or _find_obstacle(labelled, by_sample, call, summing)))
    return found


def _gathers(labelled: LabelledGraph, index: int) -> bool:
    """Whether one position of a result needs all positions of an operand, as a product with all keys does."""
    node = labelled.graph.nodes[index]
    if index in labelled.scans:
        return True
    if node.op not in ALIGNED_RULES or index not in labelled.calls:
        return False
    return bool(find_gathered(labelled, node, labelled.calls[index], labelled.rules[index]))


def _find_obstacle(
    labelled: LabelledGraph, by_sample: LabelledGraph, call: FunctionCall, summing: Sequence[int]
) -> str:
    """Return why a call's result, or its mean and variance, cannot be constants; "" if they can."""
    if not summing:
        return "each position needs all others"
    if call.function in NORMS:
        first = labelled.calls[summing[0]]
        over, layout = find_norm(first).dims, first.operands[0].layout
        apart = axes_of(tuple(dim for place, dim in enumerate(layout) if place not in over))
        return "positions have statistics of their own" if apart else ""
    ops = [labelled.graph.nodes[index].op for index in summing]
    if "layer" in ops or call.function.startswith("ops."):
        return "it attends to all positions"
    if any(op.startswith(_PRODUCTS) for op in ops):
        return "a product over positions is no statistic of a channel"
    if call.function not in _SUMS and not all(any(part in op for part in _AVERAGES) for op in ops):
        return "its result grows with the number of positions"
    values = [_find_value(labelled, call, shape) for shape in call.shapes]
    for value in values:
        if value is None or axes_of(labelled.layouts[value]):
            return "its result has positions"
        if any(piece.axis is not None for dim in by_sample.layouts.get(value, ()) for piece in dim[1:]):
            return "its samples do not stand first"
    numbers = any(value and labelled.graph.info(value).dtype.is_floating_point for value in values)
    return "" if numbers else "its result are places or conditions"


def _find_value(labelled: LabelledGraph, call: FunctionCall, shape: tuple[int, ...]) -> Value | None:
    for index in reversed(range(*call.nodes)):
        for output, info in enumerate(labelled.graph.nodes[index].outputs):
            if info.shape == shape and Value(index, output) in labelled.layouts:
                return Value(index, output)
    return None


# ---- runs ------------------------------------------------------------------------------------------------------------
class FollowedRun(TorchFunctionMode):
    """A run of a network whose modules `follow_modules` has prepared: `answer` answers calls of torch's functions.

    Args:
        name: That of `follow_modules`.
        answer: `(key, function, args, kwargs)` -> the result.
    """

    def __init__(self, name: str, answer: Callable[[Key, Any, Any, Any], Any]) -> None:
        super().__init__()
        self.name, self.answer = name, answer
        # Paths of the modules that run now.
        self.running: list[str] = []
        self.counts: Counter[tuple[str, str]] = Counter()

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # What an operator's function calls is not told apart: it runs kernels, or equations as in the graph.
        if not self.running or attending() is not None:
            return function(*args, **kwargs)
        own = self.running[-1], name_function(function)
        number = self.counts[own]
        self.counts[own] += 1
        return self.answer((*own, number), function, args, kwargs)

    def __enter__(self) -> FollowedRun:
        self.token = _RUNS.set((*_RUNS.get(), self))
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        _RUNS.reset(self.token)
        super().__exit__(*error)


# The runs of this thread, of networks one within the other.
_RUNS: ContextVar[tuple[FollowedRun, ...]] = ContextVar("runs", default=())


def follow_modules(network: nn.Module, paths: Collection[str], name: str) -> None:
    """Let runs of this name know when the modules at these paths, and those within them, run."""
    root = type(network).__name__
    for path, module in named_outside_layers(network):
        if root in paths or path.startswith(tuple(f"{each}." for each in paths)) or path in paths:
            module.register_forward_pre_hook(partial(_begin, name, path or root))
            module.register_forward_hook(partial(_end, name), always_call=True)


def _begin(name: str, path: str, *_: Any) -> None:
    for run in _RUNS.get():
        if run.name == name:
            run.running.append(path)


def _end(name: str, *_: Any) -> None:
    for run in _RUNS.get():
        if run.name == name and run.running:
            run.running.pop()


# ---- statistics ------------------------------------------------------------------------------------------------------
def _groups(grid: Tensor, groups: int) -> Tensor:
    return grid.unflatten(1, (groups, -1)).flatten(2)


# Norm -> what it takes mean and variance of, and over which dimensions.
NORMS: dict[str, Callable[[dict[str, Any]], tuple[Tensor, Sequence[int]]]] = {
    "F.batch_norm": lambda named: (named["input"], (0, *range(2, named["input"].dim()))),
    "F.instance_norm": lambda named: (named["input"], range(2, named["input"].dim())),
    "F.group_norm": lambda named: (_groups(named["input"], named["num_groups"]), (2,)),
    "F.layer_norm": lambda named: (named["input"], range(-len(named["normalized_shape"]), 0)),
}
# Functions whose result grows with the number of positions.
_SUMS = ("sum", "nansum")


def find_statistics(key: Key, function: Any, args: Any, kwargs: Any, result: Any) -> list[Tensor]:
    """Return the statistics of a call: of a norm mean and variance, else its results, of which samples stand first."""
    name = key[1]
    if name in NORMS:
        grid, dims = NORMS[name](_name_arguments(function, args, kwargs))
        variance, mean = torch.var_mean(grid.double(), tuple(dims), correction=0)
        return [_by_channel(mean), _by_channel(variance)]
    found = [each.double() for each in tensors(result) if each.is_floating_point()]
    if "adaptive" in name:
        # Regions of another size have other positions: their mean is one number a channel.
        found = [each.mean(tuple(range(2, each.dim())), keepdim=True) for each in found]
    return [each / _count_summed(args, kwargs, each) for each in found] if name in _SUMS else found


def answer_with(key: Key, function: Any, args: Any, kwargs: Any, constants: Sequence[Tensor]) -> Any:
    """Return the result of a call whose statistics are constants."""
    name = key[1]
    if name in NORMS:
        return _normalize(name, _name_arguments(function, args, kwargs), *constants)
    rest = iter(constants)

    def replace(result: Any) -> Any:
        if not isinstance(result, Tensor):
            return type(result)([replace(each) for each in result])
        if not result.is_floating_point():
            return result
        constant = _fit(next(rest), result.shape).to(result.dtype)
        return constant * _count_summed(args, kwargs, result) if name in _SUMS else constant

    # The call states the shape.
    return replace(function(*args, **kwargs))


def _name_arguments(function: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    bound = inspect.signature(function).bind(*args, **kwargs)
    bound.apply_defaults()
    return bound.arguments


def _by_channel(statistic: Tensor) -> Tensor:
    """Average over all dimensions but that of channels, which is the second where there are several."""
    if statistic.dim() < 2:
        return statistic
    return statistic.movedim(1, 0).flatten(1).mean(1)


def _normalize(name: str, named: dict[str, Any], mean: Tensor, variance: Tensor) -> Tensor:
    """Return (grid - mean) / sqrt(variance + eps) * weight + bias."""
    grid, weight, bias = named["input"], named["weight"], named["bias"]
    channels, dtype = grid.shape[1], grid.dtype if weight is None else weight.dtype
    if name == "F.group_norm":
        mean, variance = (each.repeat_interleave(channels // len(each)) for each in (mean, variance))
    mean, variance = (_fit(each, (channels,)).to(dtype) for each in (mean, variance))
    if name != "F.layer_norm":
        return F.batch_norm(grid, mean, variance, weight, bias, False, 0.0, named["eps"])
    result = F.batch_norm(grid, mean, variance, None, None, False, 0.0, named["eps"])
    result = result if weight is None else result * weight
    return result if bias is None else result + bias


def _fit(constant: Tensor, shape: Sequence[int]) -> Tensor:
    """Expand a constant of one sample to a shape; samples that stand with channels in a dimension come first in it."""
    times = [1 if own == 1 else length // own for own, length in zip(constant.shape, shape, strict=True)]
    return constant.repeat(times).expand(shape)


def _count_summed(args: Any, kwargs: Any, result: Tensor) -> float:
    return tensors((args, kwargs))[0].numel() / max(1, result.numel())
