"""Build the network that `--network` names: one of farfield, or what a function of another package returns.

It needs no more packages than the network itself.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from farfield import models
from farfield._checks import unknown
from farfield.cli.machine import find_extra

OURS = "farfield.models."


def full_name(builder: str) -> str:
    """Return the full name of a network's function; a name without a dot is one of `farfield.models`."""
    return builder if "." in builder else f"{OURS}{builder}"


def build_named(builder: str, arguments: Mapping[str, Any]) -> nn.Module:
    """Build a network with the function of this name.

    Raises:
        LookupError: If farfield has no network of this name.
        TypeError: If the function does not return a module.
        ValueError: If the function cannot be imported.
        ModuleNotFoundError: If an extra of farfield has its package, and it is not installed.
    """
    network = import_function(full_name(builder))(**arguments)
    if not isinstance(network, nn.Module):
        raise TypeError(f"--network {full_name(builder)} must return a torch.nn.Module, got {type(network).__name__}.")
    return network


def import_function(name: str) -> Callable[..., Any]:
    """Import a function or class by its full name; the current folder is the last place searched for its module."""
    module, _, function = name.rpartition(".")
    if module == OURS[:-1] and not hasattr(models, function):
        raise unknown("--network", "model", function, models.MODELS)
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        return getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        if isinstance(error, ModuleNotFoundError) and find_extra((error.name or "").partition(".")[0]):
            raise  # the command line has the fix
        raise ValueError(f"--network {name} cannot be imported: {error}.") from error
