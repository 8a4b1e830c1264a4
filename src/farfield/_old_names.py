"""Names of 0.3 that stand in farfield_papers now: they work through 0.4, with a warning, where it is installed."""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_NN = ("blocks", "block_checks", "bn_folding", "conv_norm_act", "layer_kernels", "slices", "squeeze_excite")
_MOVED = ("models", "tasks", "data", "theory", *(f"nn.{name}" for name in _NN))
_CLASSES = ("nn.AttentionBlock", "nn.BaseBlock", "nn.SqueezeExcite")


def current_name(name: str) -> str:
    """Return the name by which something is imported now, such as the network that an old configuration names."""
    rest = name.removeprefix("farfield.")
    moved = any(rest == each or rest.startswith(f"{each}.") for each in (*_MOVED, *_CLASSES))
    return f"farfield_papers.{rest}" if moved and rest != name else name


def find_moved(module: str, name: str) -> Any:
    """Return what a module of 0.3 had by this name; raise an `AttributeError` if it did not."""
    old = f"{module}.{name}"
    if current_name(old) == old:
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    is_class = old.removeprefix("farfield.") in _CLASSES
    value = getattr(_load(old, module), name) if is_class else _load(old, old)
    setattr(sys.modules[module], name, value)  # so that it is warned of once
    return value


def _load(old: str, module: str, level: int = 4) -> ModuleType:
    now = current_name(old)
    warnings.warn(f"{old} is {now} since 0.4, and gone in 0.5.", DeprecationWarning, stacklevel=level)
    try:
        return importlib.import_module(module.replace("farfield", "farfield_papers", 1))
    except ModuleNotFoundError as error:
        if error.name != "farfield_papers":
            raise
        from farfield._checks import install_papers

        raise ImportError(f"{old} is {now}, of farfield-papers; fix: {install_papers()}.", name=old) from error


class Moved(MetaPathFinder, Loader):
    """Imports modules by the names that they had."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        return ModuleSpec(name, self) if current_name(name) != name else None

    def exec_module(self, module: ModuleType) -> None:
        # What stands here when a module has run is what is imported.
        sys.modules[module.__name__] = _load(module.__name__, module.__name__, 3)
