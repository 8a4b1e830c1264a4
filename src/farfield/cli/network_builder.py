"""Build the network that `--network` names: one that an installed package offers, or what a function returns.

It needs no more packages than the network itself.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from farfield._checks import install_papers, unknown
from farfield._networks import builders
from farfield._refusals import put_name, refusal
from farfield.cli.machine import find_extra
from farfield.ops import Operator


def build_named(builder: str, arguments: Mapping[str, Any]) -> nn.Module:
    """Build the network of a name that a package offers, or of the full name of a function."""
    network = import_function(builder)(**arguments)
    if not isinstance(network, nn.Module):
        raise TypeError(f"--network {builder} must return a torch.nn.Module, got {type(network).__name__}.")
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
    """Return what builds a network: by its name, or a function or class by its full name, whose module is imported.

    The current folder is the last place searched for the module.
    """
    module, _, function = name.rpartition(".")
    if function == "py" and Path(name).is_file():
        fix = f"the function in it that builds the network, {option} {Path(name).stem}.FUNCTION"
        if Path(name).parent != Path():
            fix += f", in the folder {Path(name).parent} or with it on PYTHONPATH"
        raise ValueError(f"{option} {name} is a file; fix: {fix}.")
    if not module:
        if name not in builders():
            raise put_name(option, unknown_network(name))
        return builders()[name]
    try:
        return _import_attribute(module, function)
    except (ImportError, AttributeError, ValueError) as error:
        if isinstance(error, ModuleNotFoundError) and find_extra((error.name or "").partition(".")[0]):
            raise  # the command line has the fix
        near = difflib.get_close_matches(function, builders()) if isinstance(error, AttributeError) else []
        hint = f"; nearest: {', '.join(near)}" if near else ""
        raise ValueError(f"{option} {name} cannot be imported: {error}{hint}.") from error


def import_operator(name: str) -> Operator:
    """Import a user's own operator, "module:attribute"."""
    module, _, attribute = name.partition(":")
    try:
        operator = _import_attribute(module, attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"--operator {name} cannot be imported: {error}.") from error
    if not isinstance(operator, Operator):
        raise TypeError(f"--operator {name} must be an ops.Operator, got {type(operator).__name__}.")
    return operator


def _import_attribute(module: str, name: str) -> Any:
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    return getattr(importlib.import_module(module), name)
