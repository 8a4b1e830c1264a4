"""Running a model for inspection: on real or fake tensors, with hooks, bytes counted, and influences followed."""

from __future__ import annotations

import functools
import logging
import operator
import random
import sys
import threading
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping
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
        return model(**tree_map_only(Tensor, Tensor.clone, dict(example)))
    return model(*tree_map_only(Tensor, Tensor.clone, example if isinstance(example, tuple) else (example,)))


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
    options: dict[str, Any] = {"prepend": first, "with_kwargs": True}
    with ExitStack() as hooks:
        for path, module in modules.items():
            if before is not None:
                hook = functools.partial(lambda path, module, *call: before(path, *call), path)
                hooks.callback(module.register_forward_pre_hook(hook, **options).remove)
            if after is not None:
                hook = functools.partial(lambda path, module, *call: after(path, *call), path)
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


# ---- influences ------------------------------------------------------------------------------------------------------
# They read the shape of their input, and no number.
_LIKE = {f"{fill}_like" for fill in ("empty", "full", "ones", "rand", "randint", "randn", "zeros")}
_LIKE |= {f"new_{fill}" for fill in ("empty", "empty_strided", "full", "ones", "zeros")}


class Influences(TorchDispatchMode):
    """Note of each tensor, within the context, from which marked tensors it is computed."""

    def __init__(self) -> None:
        super().__init__()
        # Of each mark a bit.
        self.marks: dict[Hashable, int] = {}
        # Address of a storage -> where a tensor lies in it -> the bits of what it is computed from.
        self.bits: dict[int, dict[Any, int]] = {}
        # Of the numbers that Python has read, by which a model may choose what it computes.
        self.read = 0

    def mark(self, name: Hashable, tensor: Tensor) -> None:
        self._add(tensor, self.marks.setdefault(name, 1 << len(self.marks)))

    def names(self, value: Any) -> set[Hashable]:
        """Return the names of the marked tensors on which those in a value depend."""
        bits = self._read(value) | self.read
        return {name for name, bit in self.marks.items() if bits & bit}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = func(*args, **(kwargs or {}))
        arguments, operation = func._schema.arguments, func.overloadpacket.__name__
        given = dict(zip((each.name for each in arguments), args, strict=False)) | (kwargs or {})
        read = {} if operation in _LIKE else dict(given)
        if operation == "where" and "self" in given and not given["condition"].is_meta:
            # Of a side that is chosen nowhere, no number is read.
            for side, chosen in (("self", given["condition"]), ("other", given["condition"].logical_not())):
                if not chosen.any():
                    del read[side]
        bits, made = self._read(read), tensors(outputs)
        written = [each.name for each in arguments if each.alias_info is not None and each.alias_info.is_write]
        for tensor in tensors([given.get(each) for each in written]):
            self._add(tensor, bits)
            parts = self.bits[_lies(tensor)[0]]
            parts.update({where: own | bits for where, own in parts.items()})
        if outputs is not None and not made:
            self.read |= bits
        # A new storage may have the address of one that is gone.
        for address in {_lies(tensor)[0] for tensor in made} - {_lies(tensor)[0] for tensor in tensors(given)}:
            self.bits[address] = {}
        for tensor in made:
            self._add(tensor, bits)
        return outputs

    def _add(self, tensor: Tensor, bits: int) -> None:
        address, where = _lies(tensor)
        parts = self.bits.setdefault(address, {})
        parts[where] = parts.get(where, 0) | bits

    def _read(self, value: Any) -> int:
        bits = 0
        for address, where in map(_lies, tensors(value)):
            parts = self.bits.get(address, {})
            bits |= parts[where] if where in parts else functools.reduce(operator.or_, parts.values(), 0)
        return bits


def is_held_twice(tensor: Tensor, held: Any) -> bool:
    """Whether two of some tensors are this one, so that what one of them becomes does not change the other."""
    return [_lies(each) for each in tensors(held)].count(_lies(tensor)) > 1


def _lies(tensor: Tensor) -> tuple[int, Any]:
    """Return the address of a tensor's storage, and where the tensor lies in it."""
    try:
        where = tensor.storage_offset(), tuple(tensor.shape), tensor.stride()
        return tensor.untyped_storage()._cdata, where
    except RuntimeError:  # nested and sparse tensors have several
        return 0, None
