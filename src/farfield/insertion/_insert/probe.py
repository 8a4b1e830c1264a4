"""Run a model once and record what its modules return, and how often they are called.

A probe leaves the model as it was: it runs in eval mode without gradients and restores flags, buffers and random
numbers. Hooks and attributes that a model adds in its first run, as models of transformers do, are removed again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from farfield.nn.tracing import EnoughError, call, keep_random_numbers


class Seen(NamedTuple):
    """The record of a probe: how often each module was called, and the output of its first call."""

    calls: Counter[str]
    outputs: dict[str, Any]


def probe(
    model: nn.Module,
    example: Any,
    paths: Iterable[str],
    *,
    stop_early: bool = False,
    change: Mapping[str, Callable[[Any], Any]] | None = None,
) -> Seen:
    """Run a model once and record the calls and outputs of some modules.

    Args:
        model: The model, unchanged afterwards.
        example: A tensor, a tuple of arguments or a dict of named ones.
        paths: Paths of the modules to record.
        stop_early: Whether to stop once each module has been called, and to ignore errors of the model.
        change: Functions that replace the outputs of modules, by their paths.

    Returns:
        The calls and first outputs.

    Raises:
        Exception: Any error of the model, unless `stop_early`.
    """
    seen = Seen(Counter(), {})
    watched = dict.fromkeys(paths)

    def watch(path: str) -> Callable[..., None]:
        def record(module: nn.Module, inputs: Any, outputs: Any) -> None:
            seen.calls[path] += 1
            seen.outputs.setdefault(path, outputs)
            if stop_early and len(seen.outputs) == len(watched):
                raise EnoughError

        return record

    with ExitStack() as stack:
        stack.enter_context(undisturbed(model))
        for path, function in (change or {}).items():
            # Before all other hooks, so that they see the changed output.
            hook = partial(replace_output, function)
            stack.enter_context(model.get_submodule(path).register_forward_hook(hook, prepend=True))
        for path in watched:
            stack.enter_context(model.get_submodule(path).register_forward_hook(watch(path)))
        try:
            call(model, example)
        except Exception:
            if not stop_early:
                raise
    return seen


def replace_output(function: Callable[[Any], Any], module: nn.Module, inputs: Any, outputs: Any) -> Any:
    """Replace an output by a function of it, as a forward hook."""
    return function(outputs)


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Run in eval mode without gradients or autocast; then restore flags, buffers, hooks and random numbers."""
    modules = list(model.modules())
    names = [(module, set(vars(module)), hook_keys(module)) for module in modules]
    training = [module.training for module in modules]
    buffers = [(module, name, buffer, buffer.clone()) for module in modules for name, buffer in named_buffers(module)]
    kinds = {"cpu", *(tensor.device.type for tensor in [*model.parameters(), *model.buffers()])} - {"meta"}
    with ExitStack() as stack:
        # Not inference mode: tensors that a host caches would then be unusable in training.
        stack.enter_context(torch.no_grad())
        stack.enter_context(keep_random_numbers(model))
        for kind in kinds:
            stack.enter_context(torch.autocast(kind, enabled=False))
        try:
            # Flags are set one by one: a host's own `eval()` may do more, for example merge weights.
            for module in modules:
                module.training = False
            yield
        finally:
            for module, flag in zip(modules, training, strict=True):
                module.training = flag
            for module, name, buffer, value in buffers:
                put_back(module, name, buffer, value)
            for module, attributes, keys in names:
                drop_new(module, attributes, keys)


def hook_keys(module: nn.Module) -> dict[str, set[Any]]:
    """Return the keys of a module's hooks of each kind."""
    return {name: set(value) for name, value in vars(module).items() if "_hooks" in name and isinstance(value, dict)}


def drop_new(module: nn.Module, attributes: set[str], keys: Mapping[str, set[Any]]) -> None:
    """Delete the attributes and hooks that a module did not have before."""
    for name in vars(module).keys() - attributes:
        del vars(module)[name]
    for name, known in keys.items():
        for key in vars(module)[name].keys() - known:
            del vars(module)[name][key]


def named_buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Iterate over a module's own buffers."""
    return ((name, buffer) for name, buffer in module._buffers.items() if buffer is not None)


def put_back(module: nn.Module, name: str, buffer: Tensor, value: Tensor) -> None:
    """Restore a buffer: the same tensor object with the same numbers.

    A non-persistent buffer of another shape is a cache that has grown. It stays, because the host also stores its
    length elsewhere.
    """
    now = module._buffers.get(name)
    if name in module._non_persistent_buffers_set and now is not None and now.shape != value.shape:
        return
    if not (buffer.is_meta or torch.equal(buffer, value)):
        buffer.copy_(value)
    module._buffers[name] = buffer
