"""Running a model for inspection: on real or fake tensors, with the random states restored and bytes counted."""

from __future__ import annotations

import functools
import logging
import random
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from farfield.nn.leftovers import FakeTensors, leftovers_cleared, sweep
from farfield.nn.network_copy import CannotCopyError, copied, make_empty, share_parameters


@contextmanager
def keep_random_numbers(model: nn.Module) -> Iterator[None]:
    """Restore the random states after a run: of torch on the CPU and the model's GPUs, of Python, of NumPy."""
    devices = {tensor.device for tensor in [*model.parameters(), *model.buffers()]}
    state, numpy = random.getstate(), sys.modules.get("numpy")
    numpy_state = numpy.random.get_state() if numpy is not None else None
    try:
        with torch.random.fork_rng([device.index for device in devices if device.type == "cuda"]):
            yield
    finally:
        random.setstate(state)
        if numpy is not None:
            numpy.random.set_state(numpy_state)


def call(model: nn.Module, example: Any) -> Any:
    """Call a model with a dict of named arguments, a tuple of arguments, or the one argument: it may write to them."""
    if isinstance(example, Mapping):
        return model(**{name: _clone(each) for name, each in example.items()})
    return model(*map(_clone, example if isinstance(example, tuple) else (example,)))


def _clone(argument: Any) -> Any:
    return tree_map_only(Tensor, Tensor.clone, argument)


def tensors(outputs: Any) -> list[Tensor]:
    """Return the tensors of an output, nested in mappings, tuples, lists, dataclasses or other nodes of a pytree."""
    if isinstance(outputs, Tensor):
        return [outputs]
    if isinstance(outputs, Mapping):
        parts = list(outputs.values())
    elif isinstance(outputs, tuple | list):
        parts = list(outputs)
    elif hasattr(type(outputs), "__dataclass_fields__"):
        parts = list(vars(outputs).values())
    else:  # a leaf, or an object of a registered class, such as the caches of transformers
        parts = [leaf for leaf in tree_leaves(outputs) if leaf is not outputs]
    return [tensor for part in parts for tensor in tensors(part)]


@contextmanager
def hooked(
    modules: Mapping[str, nn.Module],
    *,
    before: Callable[[str, Any, Any], None] | None = None,
    after: Callable[[str, Any, Any, Any], Any] | None = None,
    first: bool = False,
    always: bool = False,
) -> Iterator[None]:
    """Call `before(path, args, kwargs)` and `after(path, args, kwargs, output)` where modules run in the context.

    What `after` returns replaces the output, unless it is None. With `first`, both are called before all other hooks;
    with `always`, `after` also behind an error of the module.
    """

    def without_module(function: Callable[..., Any], path: str, module: nn.Module, *call: Any) -> Any:
        return function(path, *call)

    with ExitStack() as hooks:
        for path, module in modules.items():
            options: dict[str, Any] = {"prepend": first, "with_kwargs": True}
            if before is not None:
                hook = functools.partial(without_module, before, path)
                hooks.callback(module.register_forward_pre_hook(hook, **options).remove)
            if after is not None:
                hook = functools.partial(without_module, after, path)
                hooks.callback(module.register_forward_hook(hook, always_call=always, **options).remove)
        yield


# ---- without numbers -------------------------------------------------------------------------------------------------
@contextmanager
def without_numbers() -> Iterator[None]:
    """Make tensors fake inside the context: shapes without numbers. Their errors are raised and not also logged."""
    log, thread = logging.getLogger("torch._subclasses.fake_tensor"), threading.get_ident()

    def is_of_others(record: logging.LogRecord) -> bool:
        return record.thread != thread

    log.addFilter(is_of_others)
    try:
        with FakeTensors(allow_non_fake_inputs=True):
            yield
    finally:
        log.removeFilter(is_of_others)


@contextmanager
def copied_empty(model: nn.Module, *kept: Any) -> Iterator[nn.Module]:
    """Copy a model with uninitialized tensors on the CPU, without numbers; only `kept` keeps tensors of its runs."""
    with without_numbers(), copied(model, make_empty, discard=True) as empty:
        yield empty
    sweep(*kept)


def looks_at_a_copy(function: Callable[..., Any], caller: str = "", *, scripted: bool = False) -> Callable[..., Any]:
    """Give a function, in place of a network, a copy with the same parameters and clones of all other tensors.

    Errors name the function, or `caller`. With `scripted`, a scripted network is given as its operations.
    """
    caller = caller or function.__name__

    @functools.wraps(function)
    def on_copy(model: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(model, nn.Module):  # the function refuses it
            return function(model, *args, **kwargs)
        with leftovers_cleared(caller, model) as kept:
            try:
                with copied(model, share_parameters, reports=True, scripted=scripted) as own:
                    kept.append(function(own, *args, **kwargs))
            except CannotCopyError as error:
                raise ValueError(f"{caller}: {type(model).__name__} does not run in tiles: {error}") from error
            return kept[0]

    return on_copy


# ---- bytes -----------------------------------------------------------------------------------------------------------
class LiveBytes(TorchDispatchMode):
    """Count the bytes of all storages that operations allocate in this context, each until it is freed."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        # Address -> weak reference, of all live storages that were seen; those from before the context count 0 bytes.
        self.seen: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in tensors([args, kwargs]):
            self.follow(tensor, counts=False)
        outputs = func(*args, **(kwargs or {}))
        for tensor in tensors(outputs):
            self.follow(tensor, counts=True)
        return outputs

    def follow(self, tensor: Tensor, *, counts: bool) -> None:
        """Register a tensor's storage if it is new; with `counts`, count its bytes until it is freed."""
        storage = tensor.untyped_storage()
        address = storage._cdata
        if address in self.seen:
            return
        size = storage.nbytes() if counts else 0

        def forget(_: object) -> None:
            del self.seen[address]
            self.live -= size

        self.seen[address] = weakref.ref(storage, forget)
        self.live += size
        self.peak = max(self.peak, self.live)
