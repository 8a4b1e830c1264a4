"""Checksums of networks and functions that are the same in every process: an unfinished prediction is known by them.

Parameters and buffers are not all that a network computes from: it can hold numbers in attributes, by
`self.high = high`. A value that does not outlive its process (an open file, a lock, a trainer) counts by its type.
"""

from __future__ import annotations

import argparse
import dataclasses
import dis
import functools
import hashlib
import re
import sys
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from enum import Enum
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

# What torch keeps in every module: state and modules, which are described apart, and hooks, which are no values.
OWN = {*vars(nn.Module()), "_compiled_call_impl"} - {"training"}
NUMBERS = (bool, int, float, complex, str, bytes, range, slice, type(None), type(...))
EMPTY = types.CellType()
ADDRESS = re.compile(r"0x[0-9a-fA-F]+")


class UnstableError(TypeError):
    """A value has no text that is the same in every process."""


def fingerprint(value: Any) -> str:
    """Return a checksum of a network, a function, an array, or a container of these and of plain values.

    Example:
        >>> fingerprint(nn.ReLU()) == fingerprint(nn.ReLU()), fingerprint(nn.ReLU()) == fingerprint(nn.ReLU6())
        (True, False)
    """
    return hash_text(Describer().part(value))


def hash_text(text: str) -> str:
    """Return a checksum of a text."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


class Describer:
    """Describes values by texts, each object once."""

    def __init__(self) -> None:
        # Of each object the text; with the object itself, as the address of one that is gone is used again.
        self.texts: dict[int, tuple[Any, str | None]] = {}

    def part(self, value: Any) -> str:
        """Return the text of a value; of one without a text that lasts, the name of its type."""
        try:
            return self.describe(value)
        except UnstableError:
            return f"a {type(value).__qualname__}"

    def parts(self, values: Iterable[Any]) -> str:
        """Return the texts of several values in their order."""
        return f"({', '.join(map(self.part, values))})"

    def describe(self, value: Any) -> str:
        """Return the text of a value.

        Raises:
            UnstableError: If it has none that is the same in every process.
        """
        if type(value) in NUMBERS:
            return repr(value)
        if id(value) not in self.texts:
            self.texts[id(value)] = value, "within itself"
            way = next((way for kind, way in WAYS if isinstance(value, kind)), of_object)
            try:
                text = f"{type(value).__qualname__} {way(self, value)}"
            except UnstableError:
                self.texts[id(value)] = value, None
                raise
            # Bounded, although what is met in several places is repeated.
            self.texts[id(value)] = value, text if len(text) < 100 else hash_text(text)
        text_or_none = self.texts[id(value)][1]
        if text_or_none is None:
            raise UnstableError
        return text_or_none


def of_tensor(describer: Describer, tensor: Tensor) -> str:
    """Describe a tensor; one without bytes of its own (sparse, meta) by dtype and shape alone."""
    kind = f"{tensor.dtype} {tuple(tensor.shape)}"
    try:
        flat = tensor.detach().cpu().contiguous().flatten()
        return f"{kind} {hashlib.sha256(flat.view(torch.uint8).numpy().data).hexdigest()}"
    except (RuntimeError, NotImplementedError, TypeError):
        return kind


def of_array(describer: Describer, given: np.ndarray | np.generic) -> str:
    """Describe an array, or a number, of NumPy, with its mask if it has one."""
    array = np.asarray(given)
    if array.dtype.hasobject:
        return f"{array.shape} {describer.parts(array.flat)}"
    mask = describer.part(np.ma.getmaskarray(given)) if isinstance(given, np.ma.MaskedArray) else ""
    return f"{array.dtype.str} {array.shape} {hashlib.sha256(array.tobytes()).hexdigest()} {mask}"


def of_module(describer: Describer, module: nn.Module) -> str:
    """Describe a module by its parameters and buffers, its attributes, the code of its `forward`, and its modules."""
    state = [dict(module.named_parameters(recurse=False)), dict(module.named_buffers(recurse=False))]
    attributes = {name: value for name, value in vars(module).items() if name not in OWN}
    shown = ADDRESS.sub("", module.extra_repr())
    return f"{shown} {describer.parts([*state, attributes, type(module).forward, dict(module._modules.items())])}"


def of_function(describer: Describer, function: types.FunctionType) -> str:
    """Describe a function by its code, its defaults, and the values that it takes from around it."""
    around = [each.cell_contents for each in function.__closure__ or () if each != EMPTY]
    read = [function.__globals__.get(name) for name in global_names(function.__code__)]
    # Functions and modules among them are not followed: that would lead through whole libraries.
    plain = [each for each in read if isinstance(each, (*NUMBERS, tuple, list, dict, Tensor, np.ndarray, np.generic))]
    values = (function.__code__, function.__defaults__, function.__kwdefaults__, around, plain)
    return f"{function.__qualname__} {describer.parts(values)}"


def global_names(code: types.CodeType) -> Iterator[str]:
    """Yield the names of global variables that code reads, that of functions within it included."""
    yield from (str(each.argval) for each in dis.get_instructions(code) if each.opname == "LOAD_GLOBAL")
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from global_names(constant)


def of_code(describer: Describer, code: types.CodeType) -> str:
    """Describe code by its instructions, constants and names, not by its place in a file."""
    return f"{code.co_code.hex()} {describer.parts([code.co_consts, code.co_names])}"


def of_object(describer: Describer, value: Any) -> str:
    """Describe an instance of a dataclass by its fields; another object by its attributes, where all have texts.

    Raises:
        UnstableError: If one has none, or the object has no attributes in a `__dict__`, or is one of Python's own
            library: a logger, for example, leads to all others.
    """
    if dataclasses.is_dataclass(value):
        return describer.parts(getattr(value, field.name, None) for field in dataclasses.fields(value))
    if not hasattr(value, "__dict__") or type(value).__module__.partition(".")[0] in sys.stdlib_module_names:
        raise UnstableError
    return ", ".join(f"{name}={describer.describe(each)}" for name, each in vars(value).items())


def named(describer: Describer, value: Any) -> str:
    """Describe what is known by its name: a class, a member of an enum, a dtype, a function of C."""
    return f"{getattr(value, '__qualname__', None) or getattr(value, '__name__', None) or value}"


# How values are described, by the first kind that fits; `of_object` describes others.
WAYS: tuple[tuple[Any, Callable[[Describer, Any], str]], ...] = (
    (Enum | type | torch.dtype | torch.memory_format | torch.layout, named),
    (types.BuiltinFunctionType | np.ufunc | np.dtype, named),
    (Tensor, of_tensor),
    (np.ndarray | np.generic, of_array),
    (nn.Module, of_module),
    (types.FunctionType, of_function),
    (types.CodeType, of_code),
    (types.MethodType, lambda describer, bound: describer.parts([bound.__func__, bound.__self__])),
    (functools.partial, lambda describer, bound: describer.parts([bound.func, bound.args, bound.keywords])),
    (types.SimpleNamespace | argparse.Namespace, lambda describer, space: describer.part(vars(space))),
    (Mapping, lambda describer, mapping: describer.parts(each for pair in mapping.items() for each in pair)),
    # The order of a set differs between processes.
    (Set, lambda describer, values: f"{sorted(map(describer.part, values))}"),
    (tuple | list | deque, Describer.parts),
    (NUMBERS, lambda describer, value: repr(value)),
)
