"""Run a model once and record what its modules return, and how often they are called.

A probe leaves the model as it was: a copy with the same parameters runs in eval mode, and random numbers are restored.
Hooks, attributes and caches that a model adds in its first run are the copy's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_map_only

from farfield._refusals import refusal
from farfield.insertion._places import parents
from farfield.nn.network_copy import CannotCopyError, copied, share_parameters
from farfield.nn.tracing import EnoughError, call, keep_random_numbers, tensors


class Seen(NamedTuple):
    """The record of a probe: how often each module was called, and the output of its first call."""

    calls: Counter[str]
    outputs: dict[str, Any]

    def caller_of(self, path: str) -> str:
        """Return the path of the nearest module around a place that was called; "" is the model."""
        return next((name for name in parents(path) if self.calls[name]), "")

    def is_called_once(self, path: str) -> bool:
        """Whether a module that runs is called once for each call of the nearest module around it, or is the model."""
        return not path or self.calls[path] <= self.calls[self.caller_of(path)]


def probe(
    model: nn.Module,
    example: Any,
    paths: Iterable[str],
    *,
    stop_early: bool = False,  # once each module has been called; errors of the model are ignored
    change: Mapping[str, Callable[[Any], Any]] | None = None,  # path -> what replaces the output
    gradients: bool = False,
) -> Seen:
    """Run a copy of a model once, without autocast, and record the calls and first outputs of some modules."""
    seen, watched = Seen(Counter(), {}), dict.fromkeys(paths)

    def record(path: str, module: nn.Module, inputs: Any, outputs: Any) -> None:
        seen.calls[path] += 1
        seen.outputs.setdefault(path, outputs)
        if stop_early and len(seen.outputs) == len(watched):
            raise EnoughError

    def replace(function: Callable[[Any], Any], module: nn.Module, inputs: Any, outputs: Any) -> Any:
        return function(outputs)

    kinds = {"cpu", *(tensor.device.type for tensor in [*model.parameters(), *model.buffers()])} - {"meta"}
    with ExitStack() as stack:
        # Not inference mode: tensors that a host caches would then be unusable in training.
        stack.enter_context(torch.set_grad_enabled(gradients))
        stack.enter_context(keep_random_numbers(model))
        for kind in kinds:
            stack.enter_context(torch.autocast(kind, enabled=False))
        own = stack.enter_context(copied(model, share_parameters))
        # Flags are set one by one: a host's own `eval()` may do more, for example merge weights.
        for module in own.modules():
            module.training = False
        for path, function in (change or {}).items():
            # Before all other hooks, so that they see the changed output.
            own.get_submodule(path).register_forward_hook(partial(replace, function), prepend=True)
        for path in watched:
            own.get_submodule(path).register_forward_hook(partial(record, path))
        with suppress(Exception) if stop_early else ExitStack():
            call(own, example)
    return seen


def run_example(model: nn.Module, paths: Iterable[str], example: Any) -> Seen:
    """Run the model and record the modules at some paths; refuse an example that it does not take, or without batch."""
    try:
        seen = probe(model, example, paths)
    except CannotCopyError as error:
        raise refusal(ValueError, f"{type(model).__name__} cannot be run for inspection: {error}") from error
    except Exception as error:
        weights = ", ".join(sorted({f"{weight.dtype} on {weight.device}" for weight in model.parameters()}))
        problem = f"{type(model).__name__} refuses example {describe_value(example)}: {describe_error(error)}"
        fix = _fix_of_example(model, example)
        raise refusal(ValueError, f"{problem}\n  its weights are {weights}.\n  fix: {fix}") from error
    _check_has_batch(model, example)
    if not tensors(seen.outputs[""]):
        problem = "returns no tensor for this example, so the effect of an addition cannot be checked"
        fix = "an example, or a configuration of the model, for which it returns one."
        raise refusal(ValueError, f"{type(model).__name__} {problem}.\n  fix: {fix}")
    return seen


def _takes(model: nn.Module, example: Any) -> bool:
    try:
        probe(model, example, ())
    except Exception:  # noqa: BLE001  (a model may raise anything)
        return False
    return True


def _check_has_batch(model: nn.Module, example: Any) -> None:
    """Refuse a sample of the first convolution if a batch of it runs too: its channels would be read as the batch."""
    first = next((each for each in model.modules() if isinstance(each, nn.Conv1d | nn.Conv2d | nn.Conv3d)), None)
    if first is None or is_lazy(first.weight) or not isinstance(example, Tensor):
        return
    if example.dim() != first.weight.dim() - 1 or len(example) != first.in_channels or not _takes(model, example[None]):
        return
    problem = f"it is one sample of the {first.in_channels} channels of the first convolution"
    fix = "add the batch, example[None]."
    raise refusal(ValueError, f"example {tuple(example.shape)} has no batch: {problem}.\n  fix: {fix}")


def _fix_of_example(model: nn.Module, example: Any) -> str:
    """Return the fix for an example that the model refuses: an input for its shape, device, batch, or dtype."""
    device = next((weight.device for weight in model.parameters()), torch.device("cpu"))
    if any(each.device != device for each in tensors(example)):
        moved = tree_map_only(Tensor, lambda each: each.to(device), example)
        whole = f'example.to("{device}")' if isinstance(example, Tensor) else f'its tensors by .to("{device}")'
        if _takes(model, moved):
            return f"put the example where the weights are, {whole}."
    if isinstance(example, tuple | list) and example and all(isinstance(length, int) for length in example):
        return f"an input and not its shape: torch.zeros{tuple(example)}."
    if isinstance(example, Tensor):
        dtype = next((weight.dtype for weight in model.parameters() if weight.is_floating_point()), torch.float32)
        fixes = {"add the batch, example[None].": example[None], f"example.to({dtype}).": example.to(dtype)}
        if example.dim() > 2:
            fixes["channels first, example.movedim(-1, 1)."] = example.movedim(-1, 1)
        for fix, changed in fixes.items():
            if _takes(model, changed):
                return fix
    elif hasattr(example, "__array__"):
        return "a tensor, torch.as_tensor(example)."
    return "an input that model(example) takes."


def describe_error(error: Exception) -> str:
    """Return an error's class and text; of a long text, such as all signatures of an operation, the first line."""
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0] if len(lines) > 5 else error}"


def describe_value(value: Any) -> str:
    """Describe a value by its shapes: `(1, 3, 8, 8) of torch.float32`, within their tuples, lists and dicts."""
    if isinstance(value, Tensor):
        return "a nested tensor" if value.is_nested else f"{tuple(value.shape)} of {value.dtype}"
    if isinstance(value, Mapping | tuple | list):
        inside = ", ".join(f"{name}: {describe_value(part)}" for name, part in entries(value).items())
        return f"{type(value).__name__}({inside})"
    return type(value).__name__


def entries(outputs: Any) -> dict[str, Any]:
    """Return the entries of a tuple, list or dict under the names that `insert` takes."""
    named = outputs.items() if isinstance(outputs, Mapping) else enumerate(outputs)
    return {str(name): value for name, value in named}
