"""What an attention names in its code, its parameters and its children, where nothing else says what it computes."""

from __future__ import annotations

import ast
import dis
import inspect
import re
from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial
from types import CodeType, FunctionType, MethodType
from typing import Any

import torch.nn.functional as F
from torch import nn

from farfield.insertion._places import parse_source

FUNCTION = "scaled_dot_product_attention"

# Parameters and flags of what is added to the products of queries and keys.
BIASES = re.compile("relative|rel_pos|rel_attn|attention_bias|pos(ition)?_bias|distance_embedding|sinks")
# Names of what rotates queries and keys, other than "property"; and of what a rotation needs, and more than that.
ROTATIONS = re.compile("rope(?!r)|rotary|rotat|freqs", re.IGNORECASE)
ANGLES = re.compile("(?<![a-z])sin(?![a-z])|polar|view_as_complex")


def calls_torch(module: Any, function: Any, levels: int = 1) -> bool:
    """Whether a function that attends in a module calls torch's, itself or in what it names, `levels` names on."""
    if function is F.scaled_dot_product_attention:
        return True
    if levels < 0 or not isinstance(function := _unwrap(function), FunctionType):
        return False
    return any(
        each is not function and calls_torch(module, each, levels - 1) and _is_reached(module, function, name)
        for name, each in _find_named(module, function)
    )


def _find_named(module: Any, function: FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield what the names in a function may stand for: attributes and methods of the module, and what its file has."""
    kinds = getattr(type(module), "host", type(module)).__mro__
    for name, is_global in _list_names(function):
        if is_global:
            each = _unwrap(function.__globals__.get(name))
            is_near = isinstance(each, FunctionType) and each.__module__ == function.__module__
            if is_near or each is F.scaled_dot_product_attention:
                yield name, each
        else:
            found = [vars(kind)[name] for kind in kinds if name in vars(kind)]
            found = found if ("super", True) in _list_names(function) else found[:1]
            found += [vars(module)[name]] if name in vars(module) else []
            # Of another module, as in `F.scaled_dot_product_attention`, if this one has nothing of its name.
            found = found or [F.scaled_dot_product_attention] * (name == FUNCTION)
            yield from ((name, _unwrap(each)) for each in found)


def _is_reached(module: Any, function: FunctionType, name: str) -> bool:
    """Whether a function names something outside of branches that the module's flags rule out, such as `self.flash`."""
    tree = parse_source(function)
    # timm's flag is set where an attention is replaced.
    has = {**vars(module), "fused_attn": True}
    flags = {f"self.{flag}": value for flag, value in has.items() if isinstance(value, bool)}
    flags |= {f"not {flag}": not value for flag, value in flags.items()}
    return not tree.body or any(
        name in (getattr(node, "id", ""), getattr(node, "attr", ""), getattr(node, "name", ""))
        for node in _walk_reached([tree], flags)
    )


def _walk_reached(nodes: Iterable[ast.AST], flags: dict[str, bool]) -> Iterator[ast.AST]:
    for node in nodes:
        inner: Iterable[ast.AST] = ast.iter_child_nodes(node)
        if isinstance(node, ast.If) and (flag := flags.get(ast.unparse(node.test))) is not None:
            inner = node.body if flag else node.orelse
        yield from (node, *_walk_reached(inner, flags))


@cache
def list_code(function: FunctionType) -> tuple[CodeType, ...]:
    """Return the code of a function, and that of the functions that it defines."""
    codes = [function.__code__]
    for code in codes:
        codes += [each for each in code.co_consts if isinstance(each, CodeType)]
    return tuple(codes)


@cache
def _list_names(function: FunctionType) -> frozenset[tuple[str, bool]]:
    """Return the names of globals and of attributes in a function, each with whether it is a global."""
    steps = [step for code in list_code(function) for step in dis.get_instructions(code)]
    kinds = ("LOAD_GLOBAL", "LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR", "IMPORT_FROM")
    return frozenset((step.argval, step.opname == kinds[0]) for step in steps if step.opname in kinds)


def _unwrap(function: Any) -> Any:
    """Return the function of a method, a decorated or a partial one."""
    if isinstance(function, partial | staticmethod | classmethod | MethodType):
        function = function.func if isinstance(function, partial) else function.__func__
    return inspect.unwrap(function) if isinstance(function, FunctionType) else function


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
    function = _unwrap(function)
    waiting, seen, names = [function], set[FunctionType](), set[str]()
    while waiting:
        each = waiting.pop()
        if isinstance(each, FunctionType) and each not in seen and each.__module__ == function.__module__:
            seen.add(each)
            found = {n for c in list_code(each) for n in (*c.co_names, *c.co_varnames, *c.co_freevars)}
            names |= found
            waiting += map(each.__globals__.get, found)
    return names
