"""Build the network that `--network` names: one of farfield, or what a function of another package returns.

It needs no more packages than the network itself.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from farfield._checks import unknown
from farfield._refusals import put_name, refusal
from farfield.cli.machine import find_extra
from farfield.ops import Operator

OURS = "farfield.models."


def full_name(builder: str) -> str:
    """Return the full name of a network's function; a name without a dot is one of `farfield.models`."""
    return builder if "." in builder else f"{OURS}{builder}"


def build_named(builder: str, arguments: Mapping[str, Any]) -> nn.Module:
    network = import_function(full_name(builder))(**arguments)
    if not isinstance(network, nn.Module):
        raise TypeError(f"--network {full_name(builder)} must return a torch.nn.Module, got {type(network).__name__}.")
    return network


def unknown_network(name: str) -> LookupError:
    """Build the error about a name that is no network of farfield; one of torchvision's is named in full."""
    from farfield import models

    with contextlib.suppress(ImportError):
        if callable(getattr(importlib.import_module("torchvision.models"), name, None)):
            return refusal(LookupError, f'no model "{name}" in farfield; fix: torchvision.models.{name}.')
    return unknown("model", name, [*models.MODELS, "kanet"])


def import_function(name: str, option: str = "--network") -> Callable[..., Any]:
    """Import a function or class by its full name; the current folder is the last place searched for its module."""
    from farfield import models  # not at the top: a user's operator needs none of them

    module, _, function = name.rpartition(".")
    if function == "py" and Path(name).is_file():
        fix = f"the function in it that builds the network, {option} {Path(name).stem}.FUNCTION"
        if Path(name).parent != Path():
            fix += f", in the folder {Path(name).parent} or with it on PYTHONPATH"
        raise ValueError(f"{option} {name} is a file; fix: {fix}.")
    if module == OURS[:-1] and not hasattr(models, function):
        raise put_name(option, unknown_network(function))
    try:
        return _import_attribute(module, function)
    except (ImportError, AttributeError, ValueError) as error:
        if isinstance(error, ModuleNotFoundError) and find_extra((error.name or "").partition(".")[0]):
            raise  # the command line has the fix
        raise ValueError(f"{option} {name} cannot be imported: {error}.") from error


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
