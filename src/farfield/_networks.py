"""Networks by name: those that other packages offer by entry points, and what a user's own function or class builds."""

from __future__ import annotations

import ast
import contextlib
import difflib
import importlib
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from functools import cache
from importlib.machinery import SourceFileLoader
from importlib.metadata import PackageNotFoundError, entry_points, requires
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from torch import nn

from farfield._checks import install_papers, unknown
from farfield._refusals import put_name, refusal

GROUP = "farfield.networks"


class NetworkPackage(Protocol):
    """What an entry point of `farfield.networks` names: a module with these names, which loads nothing heavy.

    Attributes:
        BUILDERS: The name of a network -> the function that builds it, as `farfield places --network NAME` does.
        OPENERS: A kind of trained models -> what opens the file or folder of one for volumes, as an `OpenedModel`.
    """

    BUILDERS: Mapping[str, Callable[..., nn.Module]]
    OPENERS: Mapping[str, Callable[[Any], Any]]

    def load(self, source: str, network: str | None) -> nn.Module:
        """Load a trained network from a folder, a run, a checkpoint or a repository; `network` names its function."""


@cache
def packages() -> dict[str, NetworkPackage]:
    """Return what the installed packages offer, by the names of their entry points."""
    return {each.name: each.load() for each in sorted(entry_points(group=GROUP))}


def builders() -> dict[str, Callable[..., nn.Module]]:
    """Return the networks that are built by name."""
    return {name: build for package in packages().values() for name, build in package.BUILDERS.items()}


def load_network(source: str, network: str | None = None) -> nn.Module:
    """Load a trained network from its folder, run, checkpoint or repository by the first package there is."""
    package = next(iter(packages().values()), None)
    if package is None:
        raise refusal(RuntimeError, f"trained networks are loaded by farfield-papers; fix: {install_papers()}.")
    return package.load(source, network)


# What code of a user raises by a mistake in it.
_FAULTS = (KeyError, IndexError, AttributeError, NameError, AssertionError, ArithmeticError, NotImplementedError)


def build_named(builder: str, arguments: Mapping[str, Any]) -> nn.Module:
    """Build the network of a name that a package offers, or of a function or class by its full name."""
    return build_network(builder, import_function(builder), arguments)


def build_network(name: str, function: Callable[..., Any], arguments: Mapping[str, Any]) -> nn.Module:
    """Build a network by a function of a name; refuse one that takes other arguments, or gives no network."""
    try:
        inspect.signature(function).bind(**arguments)
    except TypeError as error:
        fix = "a function without arguments that returns it, such as def build(): return Net(3)"
        raise refusal(TypeError, f"--network {name} does not give a network: {error}; fix: {fix}.") from error
    if isinstance(function, nn.Module):
        fix = "the class, or a function that returns it, such as def build(): return net"
        raise refusal(TypeError, f"--network {name} is a network, and not what builds one; fix: {fix}.")
    try:
        network = function(**arguments)
    except _FAULTS as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        text = f"--network {name} raises {type(error).__name__}: {error}"
        raise refusal(RuntimeError, f"{text}; fix: line {place.lineno} of {place.filename}.") from error
    if not isinstance(network, nn.Module):
        text = f"--network {name} must return a torch.nn.Module, got {type(network).__name__}"
        raise refusal(TypeError, f"{text}; fix: return the network in it.")
    return network


def unknown_network(name: str) -> LookupError:
    """Build the error about a name that no package offers; one of torchvision's is named in full."""
    with contextlib.suppress(ImportError):
        if callable(getattr(importlib.import_module("torchvision.models"), name, None)):
            return refusal(LookupError, f'no model "{name}" in farfield; fix: torchvision.models.{name}.')
    if not builders():
        fix = f"its full name, package.module.{name}, or {install_papers()} for those of the papers"
        return refusal(LookupError, f'no package offers a model "{name}"; fix: {fix}.')
    return unknown("model", name, builders())


def import_function(name: str, option: str = "--network") -> Callable[..., Any]:
    """Return what builds a network: by its name, or `module:function`, `module.function` or `file.py:Class`.

    Its module is imported. The current folder, or that of the file, is the last place searched for others.
    """
    module, _, function = name.rpartition(":" if ":" in name else ".")
    top = module.partition(".")[0]
    if name.endswith(".py") and Path(name).is_file():
        found = " or ".join(f"{option} {name}:{each}" for each in _list_builders(Path(name))) or "one with a class"
        raise ValueError(f"{option} {name} is a file; fix: the class or function in it, {found}.")
    if not module:
        if name not in builders():
            raise put_name(option, unknown_network(name))
        return builders()[name]
    try:
        return import_attribute(module, function)
    except (ImportError, AttributeError, ValueError, TypeError, SyntaxError, OSError) as error:
        if isinstance(error, ModuleNotFoundError) and (error.name not in (module, top) or _is_of_an_extra(top)):
            raise  # the command line has the fix
        own = _list_builders(Path(module)) if module.endswith(".py") and Path(module).is_file() else builders()
        near = difflib.get_close_matches(function, own) if isinstance(error, AttributeError) else []
        fix = f"; nearest: {', '.join(near)}" if near else ""
        if isinstance(error, OSError | ModuleNotFoundError | TypeError):
            fix = "; fix: the path of a file, networks.py:Net, or a module that is installed or in this folder"
        raise ValueError(f"{option} {name} cannot be imported: {error}{fix}.") from error


def import_attribute(module: str, name: str) -> Any:
    """Import what a module, or a file of Python, names."""
    if module.endswith(".py"):
        return getattr(_import_file(Path(module).expanduser().absolute()), name)
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    return getattr(importlib.import_module(module), name)


def _is_of_an_extra(package: str) -> bool:
    with contextlib.suppress(PackageNotFoundError):
        return any(each.startswith(package) for each in requires("farfield") or [])
    return False


def _import_file(path: Path) -> ModuleType:
    """Import a file as the module of its name, by which other processes find it too."""
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    module = ModuleType(path.stem)
    module.__file__ = str(path)
    sys.modules.setdefault(path.stem, module)
    SourceFileLoader(path.stem, str(path)).exec_module(module)
    return module


def _list_builders(file: Path) -> list[str]:
    """Return the names of the classes and functions in a file of Python, which is not run."""
    with contextlib.suppress(SyntaxError, ValueError):
        body = ast.parse(file.read_bytes()).body
        return [each.name for each in body if isinstance(each, ast.ClassDef | ast.FunctionDef)]
    return []
