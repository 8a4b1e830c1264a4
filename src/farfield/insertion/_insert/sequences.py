"""Tell the sequences that take an addition as their last element from those that stand for their last child."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from functools import cache
from typing import Any

from torch import nn

from farfield.insertion._places import CHILD, Place, inside, join, parents

# Functions that count or iterate over what they get. Others, such as `checkpoint_sequential`, may run a sequence whole.
ITERATE = {"enumerate", "iter", "len", "list", "map", "range", "reversed", "set", "tuple", "zip"}


def runs_in_order(host: nn.Module) -> bool:
    """Whether a host runs its children one after the other and does nothing else."""
    # A scripted module has no `forward` of its class.
    in_order = isinstance(host, nn.Sequential) and type(host).forward is nn.Sequential.forward
    return in_order and "forward" not in vars(host)


def host_of(model: nn.Module, place: Place) -> Place:
    """Return the place that has the addition: the given one, or the last child of a sequence that others look into.

    One more element would be one more block to a model that runs or counts the blocks of a sequence in some of its
    methods, as `forward_intermediates` of timm does.
    """
    path, host = place.path, model.get_submodule(place.path)
    while runs_in_order(host) and host._modules and CHILD not in host._modules and is_opened(model, path):
        path = join(path, list(host._modules)[-1])
        host = model.get_submodule(path)
    return Place(path, place.entry)


def is_opened(model: nn.Module, path: str) -> bool:
    """Whether a module around a sequence runs, counts or indexes its children, or has features of some of them."""
    name = path.rpartition(".")[2]
    for outer in parents(path):
        around = model.get_submodule(outer)
        below = f"{inside(outer, path)}."
        if any(name in opened_names(kind) for kind in type(around).__mro__):
            return True
        if any(feature.startswith(below) for feature in feature_modules(around)):
            return True
    return False


def feature_modules(model: nn.Module) -> list[str]:
    """Return the paths of the modules whose outputs are the features of a model, as timm declares them."""
    declared = getattr(model, "feature_info", None)
    entries = getattr(declared, "info", declared)
    return [str(entry.get("module")) for entry in entries if isinstance(entry, dict)] if entries else []


@cache
def opened_names(kind: type) -> frozenset[str]:
    """Return the names of the attributes that the methods of a class count, index or iterate over.

    Constructors run before there is an addition. A class without source code is taken for one that does nothing so.
    """
    if kind.__module__.partition(".")[0] in ("torch", "builtins"):
        return frozenset()
    functions = [method for name, method in vars(kind).items() if inspect.isfunction(method) and name != "__init__"]
    return frozenset(name for function in functions for name in names_in(function))


def names_in(function: Any) -> Iterator[str]:
    """Iterate over the names of the attributes that a function counts, indexes or iterates over."""
    try:
        source = inspect.getsource(function)
        tree = ast.parse(f"if True:\n{source}" if source[0].isspace() else source)
    except (OSError, SyntaxError, TypeError):
        return
    for node in ast.walk(tree):
        for part in opened_parts(node):
            if isinstance(part, ast.Attribute):
                yield part.attr


def opened_parts(node: ast.AST) -> list[Any]:
    """Return the parts of a node of a syntax tree whose elements it reads, or to which it gives another name."""
    match node:
        case ast.For(iter=part) | ast.comprehension(iter=part):
            return [part]
        case ast.Subscript(value=part) | ast.Attribute(value=part) | ast.Starred(value=part) | ast.Assign(value=part):
            return [part]
        case ast.Call(func=ast.Name(id=name)) if name in ITERATE:
            return list(node.args)
    return []
