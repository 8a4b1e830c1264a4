"""What an attention names in its code, its parameters and its children, where nothing else says what it computes."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from types import CodeType, FunctionType
from typing import Any

from torch import nn

# Parameters and flags of what is added to the products of queries and keys.
BIASES = re.compile("relative|rel_pos|rel_attn|attention_bias|pos(ition)?_bias|distance_embedding|sinks")
# Names of what rotates queries and keys, other than "property"; and of what a rotation needs, and more than that.
ROTATIONS = re.compile("rope(?!r)|rotary|rotat|freqs", re.IGNORECASE)
ANGLES = re.compile("(?<![a-z])sin(?![a-z])|polar|view_as_complex")


def find_bias(module: nn.Module) -> str | None:
    """Return the parameter or the flag of what is added to the products of queries and keys, by its name, or None."""
    flags = [name for name, value in vars(module).items() if value is True]
    names = [name for name, _ in module.named_parameters()]
    return next(filter(BIASES.search, names + flags), None)


def read_names(module: nn.Module, function: Callable[..., Any]) -> set[str]:
    """Return the names in a function that attends in a module, in the methods of the module, and in its children."""
    names = _names_of(function)
    for part in module.modules():
        kinds = [kind for kind in type(part).__mro__ if not kind.__module__.startswith(("torch.", "farfield."))]
        methods = [each for kind in kinds for name, each in vars(kind).items() if name != "__init__"]
        names = names.union({type(part).__name__}, part._modules, *map(_names_of, methods))
        # What a module has as None or False, such as `self.rope = None`, it does not do.
        has: dict[str, Any] = {**vars(part), **part._modules, **part._parameters, **part._buffers}
        names -= {name for name, value in has.items() if value is None or value is False}
    return names


def _names_of(function: Any) -> set[str]:
    """Return the names in the code of a function, of those that it defines, and of those of its file that it calls."""
    function = inspect.unwrap(getattr(function, "__func__", function))
    waiting, names = [function.__code__] if isinstance(function, FunctionType) else [], set[str]()
    while waiting:
        code = waiting.pop()
        found = {*code.co_names, *code.co_varnames, *code.co_freevars} - names
        names |= found
        waiting += [each for each in code.co_consts if isinstance(each, CodeType)]
        called = [function.__globals__.get(name) for name in found]
        waiting += [
            each.__code__
            for each in called
            if getattr(each, "__module__", "") == function.__module__ and isinstance(each, FunctionType)
        ]
    return names
