"""Running a model to look at it: how it is called, what it returns, and that random numbers are as before."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


@contextmanager
def keep_random_numbers(model: nn.Module) -> Iterator[None]:
    """Put random numbers back behind a run: those of torch on the CPU and the model's GPUs, of Python, of NumPy."""
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
    """The tensors of an output, in whatever it puts them."""
    if isinstance(outputs, Tensor):
        return [outputs]
    if isinstance(outputs, Mapping):
        return [tensor for value in outputs.values() for tensor in tensors(value)]
    if isinstance(outputs, tuple | list):
        return [tensor for value in outputs for tensor in tensors(value)]
    return tensors(vars(outputs)) if hasattr(type(outputs), "__dataclass_fields__") else []
