"""Run a model once and record what its modules return, and how often they are called.

A probe leaves the model as it was: a copy with the same parameters runs in eval mode without gradients, and random
numbers are restored. Hooks, attributes and caches that a model adds in its first run are the copy's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from farfield.nn.network_copy import copied, share_parameters
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
        model: The model, of which a copy runs.
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
        own = stack.enter_context(undisturbed(model))
        for path, function in (change or {}).items():
            # Before all other hooks, so that they see the changed output.
            hook = partial(replace_output, function)
            own.get_submodule(path).register_forward_hook(hook, prepend=True)
        for path in watched:
            own.get_submodule(path).register_forward_hook(watch(path))
        try:
            call(own, example)
        except Exception:
            if not stop_early:
                raise
    return seen


def replace_output(function: Callable[[Any], Any], module: nn.Module, inputs: Any, outputs: Any) -> Any:
    """Replace an output by a function of it, as a forward hook."""
    return function(outputs)


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[nn.Module]:
    """Copy a model in eval mode, to run the copy without gradients or autocast; then restore the random numbers."""
    kinds = {"cpu", *(tensor.device.type for tensor in [*model.parameters(), *model.buffers()])} - {"meta"}
    with ExitStack() as stack:
        # Not inference mode: tensors that a host caches would then be unusable in training.
        stack.enter_context(torch.no_grad())
        stack.enter_context(keep_random_numbers(model))
        for kind in kinds:
            stack.enter_context(torch.autocast(kind, enabled=False))
        own = stack.enter_context(copied(model, share_parameters))
        # Flags are set one by one: a host's own `eval()` may do more, for example merge weights.
        for module in own.modules():
            module.training = False
        yield own
