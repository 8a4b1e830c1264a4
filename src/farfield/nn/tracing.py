"""Running a model for inspection: on real or fake tensors, with the random states restored and bytes counted."""

from __future__ import annotations

import logging
import random
import sys
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, register_flop_formula

aten = torch.ops.aten
# Fused attention on the CPU, for which some versions of torch count no FLOPs -> the same elsewhere, for which all do.
FUSED_ATTENTION = {
    aten._scaled_dot_product_flash_attention_for_cpu: aten._scaled_dot_product_flash_attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: aten._scaled_dot_product_flash_attention_backward,
}
for uncounted, counted in FUSED_ATTENTION.items():
    if uncounted not in flop_registry:
        register_flop_formula(uncounted, get_raw=True)(flop_registry[counted])


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
    """Call a model with a dict of named arguments, a tuple of arguments, or the one argument."""
    if isinstance(example, Mapping):
        return model(**example)
    return model(*example) if isinstance(example, tuple) else model(example)


def tensors(outputs: Any) -> list[Tensor]:
    """Return the tensors of an output, nested in mappings, tuples, lists or dataclasses."""
    if isinstance(outputs, Tensor):
        return [outputs]
    if isinstance(outputs, Mapping):
        return [tensor for value in outputs.values() for tensor in tensors(value)]
    if isinstance(outputs, tuple | list):
        return [tensor for value in outputs for tensor in tensors(value)]
    return tensors(vars(outputs)) if hasattr(type(outputs), "__dataclass_fields__") else []


class EnoughError(Exception):
    """Raised to stop a run early, when everything needed from it is known."""


# ---- without numbers -------------------------------------------------------------------------------------------------
@contextmanager
def without_numbers() -> Iterator[None]:
    """Make tensors fake inside the context: shapes without numbers. Their errors are raised and not also logged."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    disabled, log.disabled = log.disabled, True
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            yield
    finally:
        log.disabled = disabled


def empty_like(tensor: Tensor) -> Tensor:
    """Return an uninitialized tensor of this shape and dtype on the CPU."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")


def call_empty(model: nn.Module, inputs: tuple[Any, ...]) -> Any:
    """Call a model with uninitialized parameters and buffers on the CPU in place of its own, which are not touched.

    Each place of a parameter is replaced once: torch's own tying of names replaces the parameters of a module with two
    paths twice, and would leave the replacement in the model.
    """
    empty: dict[Tensor, Tensor] = {}
    state = {}
    for path, module in model.named_modules():
        for name, tensor in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
            empty.setdefault(tensor, empty_like(tensor))
            state[f"{path}.{name}" if path else name] = empty[tensor]
    return functional_call(model, state, inputs, tie_weights=False)


# ---- bytes -----------------------------------------------------------------------------------------------------------
class LiveBytes(TorchDispatchMode):
    """Count the bytes of all storages that operations allocate in this context, each until it is freed.

    Attributes:
        live: Bytes allocated now.
        peak: Largest value of `live` so far.
    """

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
