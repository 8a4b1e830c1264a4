"""The paths of a network, and which of them `insert` accepts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from farfield import insert, remove

# It accepts a grid of this number of channels alone, and changes the output at once.
made = nn.PReLU


def paths(model: nn.Module, example: Any) -> list[str]:
    """The paths of all modules, and of the entries of those that return several values."""
    found: list[str] = []
    handles = []

    def note(path: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: Any, outputs: Any) -> None:
            if isinstance(outputs, dict | tuple | list):
                names = outputs if isinstance(outputs, dict) else range(len(outputs))
                found.extend(f"{path}[{name}]" for name in names)

        return hook

    for path, module in model.named_modules():
        found.append(path)
        handles.append(module.register_forward_hook(note(path)))
    with torch.no_grad():
        model(example)
    for handle in handles:
        handle.remove()
    return found


def accepts(model: nn.Module, path: str, example: Any, layout: Any) -> bool:
    """Whether `insert` takes an addition at a path."""
    try:
        insert(model, path, made, example=example, layout=layout)
    except (ValueError, TypeError, LookupError):
        return False
    remove(model)
    return True
