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


def fingerprint(value: Any) -> str:
    """Return a checksum of a network, a function, an array, or a container of these and of plain values."""
    return _hash_text(_Describer().part(value))


def _hash_text(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


class _Describer:
    """Describes values by texts, each object once."""

    def __init__(self) -> None:
        # Of each object the text; with the object itself, as the address of one that is gone is used again.
        self.texts: dict[int, tuple[Any, str | None]] = {}

    def part(self, value: Any) -> str:
        """Return the text of a value; of one without a text that lasts, the name of its type."""
        text = self.describe(value)
        return f"a {type(value).__qualname__}" if text is None else text

    def parts(self, values: Iterable[Any]) -> str:
        return f"({', '.join(map(self.part, values))})"

    def describe(self, value: Any) -> str | None:
        """Return the text of a value; None if it has none that is the same in every process."""
        if type(value) in NUMBERS:
            return repr(value)
        if id(value) not in self.texts:
            self.texts[id(value)] = value, "within itself"
            way = next((way for kind, way in _WAYS if isinstance(value, kind)), _describe_object)
            text = way(self, value)
            if text is not None:
                text = f"{type(value).__qualname__} {text}"
                # Bounded, although what is met in several places is repeated.
                text = text if len(text) < 100 else _hash_text(text)
            self.texts[id(value)] = value, text
        return self.texts[id(value)][1]


def _describe_tensor(_: _Describer, tensor: Tensor) -> str:
    kind = f"{tensor.dtype} {tuple(tensor.shape)}"
    try:
        flat = tensor.detach().cpu().contiguous().flatten()
        return f"{kind} {hashlib.sha256(flat.view(torch.uint8).numpy().data).hexdigest()}"
    except (RuntimeError, NotImplementedError, TypeError):  # without bytes of its own: sparse, meta
        return kind


def _describe_array(describer: _Describer, given: np.ndarray | np.generic) -> str:
    array = np.asarray(given)
    if array.dtype.hasobject:
        return f"{array.shape} {describer.parts(array.flat)}"
    mask = describer.part(np.ma.getmaskarray(given)) if isinstance(given, np.ma.MaskedArray) else ""
    return f"{array.dtype.str} {array.shape} {hashlib.sha256(array.tobytes()).hexdigest()} {mask}"


def _describe_module(describer: _Describer, module: nn.Module) -> str:
    state = [dict(module.named_parameters(recurse=False)), dict(module.named_buffers(recurse=False))]
    attributes = {name: value for name, value in vars(module).items() if name not in OWN}
    shown = ADDRESS.sub("", module.extra_repr())
    return f"{shown} {describer.parts([*state, attributes, type(module).forward, dict(module._modules.items())])}"


def _describe_function(describer: _Describer, function: types.FunctionType) -> str:
    """Describe a function by its code, its defaults, and the values that it takes from around it."""
    around = [each.cell_contents for each in function.__closure__ or () if each != EMPTY]
    read = [function.__globals__.get(name) for name in _global_names(function.__code__)]
    # Functions and modules among them are not followed: that would lead through whole libraries.
    plain = [each for each in read if isinstance(each, (*NUMBERS, tuple, list, dict, Tensor, np.ndarray, np.generic))]
    values = (function.__code__, function.__defaults__, function.__kwdefaults__, around, plain)
    return f"{function.__qualname__} {describer.parts(values)}"


def _describe_code(describer: _Describer, code: types.CodeType) -> str:
    # Not by its place in a file.
    return f"{code.co_code.hex()} {describer.parts([code.co_consts, code.co_names])}"


def _global_names(code: types.CodeType) -> Iterator[str]:
    yield from (str(each.argval) for each in dis.get_instructions(code) if each.opname == "LOAD_GLOBAL")
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):  # of a function within
            yield from _global_names(constant)


def _describe_object(describer: _Describer, value: Any) -> str | None:
    """Describe a dataclass by its fields, another object by its attributes, where all of these have texts."""
    if dataclasses.is_dataclass(value):
        return describer.parts(getattr(value, field.name, None) for field in dataclasses.fields(value))
    # One of Python's own library leads far: a logger, for example, to all others.
    if not hasattr(value, "__dict__") or type(value).__module__.partition(".")[0] in sys.stdlib_module_names:
        return None
    texts = []
    for name, each in vars(value).items():
        text = describer.describe(each)
        if text is None:
            return None
        texts.append(f"{name}={text}")
    return ", ".join(texts)


def _describe_by_name(_: _Describer, value: Any) -> str:
    return f"{getattr(value, '__qualname__', None) or getattr(value, '__name__', None) or value}"


# How values are described, by the first kind that fits; `_describe_object` describes others.
_WAYS: tuple[tuple[Any, Callable[[_Describer, Any], str | None]], ...] = (
    (Enum | type | torch.dtype | torch.memory_format | torch.layout, _describe_by_name),
    (types.BuiltinFunctionType | np.ufunc | np.dtype, _describe_by_name),
    (Tensor, _describe_tensor),
    (np.ndarray | np.generic, _describe_array),
    (nn.Module, _describe_module),
    (types.FunctionType, _describe_function),
    (types.CodeType, _describe_code),
    (types.MethodType, lambda describer, bound: describer.parts([bound.__func__, bound.__self__])),
    (functools.partial, lambda describer, bound: describer.parts([bound.func, bound.args, bound.keywords])),
    (types.SimpleNamespace | argparse.Namespace, lambda describer, space: describer.part(vars(space))),
    (Mapping, lambda describer, mapping: describer.parts(each for pair in mapping.items() for each in pair)),
    # The order of a set differs between processes.
    (Set, lambda describer, values: f"{sorted(map(describer.part, values))}"),
    (tuple | list | deque, _Describer.parts),
    (NUMBERS, lambda _, value: repr(value)),
)
