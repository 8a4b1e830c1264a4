"""Global attention for grids of any number of spatial dims, at a cost that grows with the grid and not with its square.

The names below load on first use, so that ``import farfield`` itself is fast:

- ``ops``: the operators, ``OPERATORS``, ``summarize`` and ``respond``
- ``nn``: ``GridAttention`` and other modules
- ``cost``: ``predict`` (by formula), ``count`` (the MACs that execute), ``measure`` (seconds and bytes)
- ``maps``: which positions a position attends to
- ``predict_whole``: a network on a volume larger than memory, with the result of the whole
- ``streaming``: the same for one layer, plans, tiles, seams
- ``WholeNetwork``: training on such grids, with the gradients of the whole in the memory of a tile
- ``volumes``: ``open_volume``, for images and volumes in files, with their voxel size
- ``sharding``: ``sharded_attention``, for grids spread over processes
- ``testing``: checks for an operator, a layer in tiles or a file format of one's own
- ``insert``, ``remove``: attention at any place of a model, without a change of its weights, and its removal
- ``insertion``: the papers' names for such places, as paths
- ``replace_attention``: any operator in place of the softmax attention of a transformer
- ``pad_grids``: a list of grids of different sizes as one batch and its mask
- ``ShapeError``: the error that every function here raises for shapes that do not fit

The networks, tasks and data of the papers are a package of their own, ``farfield_papers``.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

from farfield import _old_names

if TYPE_CHECKING:
    from farfield import cost, insertion, maps, nn, ops, sharding, streaming, testing, volumes
    from farfield._checks import ShapeError
    from farfield.insertion import insert, remove, replace_attention
    from farfield.ops import pad_grids
    from farfield.streaming import predict_whole
    from farfield.streaming.training import WholeNetwork

__version__ = "0.4.0"

__all__ = [
    "ShapeError",
    "WholeNetwork",
    "__version__",
    "cost",
    "insert",
    "insertion",
    "maps",
    "nn",
    "ops",
    "pad_grids",
    "predict_whole",
    "remove",
    "replace_attention",
    "sharding",
    "streaming",
    "testing",
    "volumes",
]

# The module of each name that is not one itself.
_HOME = {
    "ShapeError": "_checks",
    "WholeNetwork": "streaming.training",
    "insert": "insertion",
    "pad_grids": "ops",
    "predict_whole": "streaming",
    "remove": "insertion",
    "replace_attention": "insertion",
}


# The first, since the package that a name has moved to has a path, on which its modules would be found once more.
sys.meta_path.insert(0, _old_names.Moved())


def __getattr__(name: str) -> Any:
    """Load ``name`` on first use and keep it."""
    if name not in __all__:
        if _old_names.current_name(f"farfield.{name}") != f"farfield.{name}":
            return _old_names.find_moved("farfield", name)
        # Python itself looks for names with an underscore; nothing is imported for these.
        homes = () if name.startswith("_") else ("nn", "ops")
        home = next((each for each in homes if name in importlib.import_module(f"farfield.{each}").__all__), "")
        hint = f"fix: from farfield.{home} import {name}" if home else f"it has {', '.join(__all__)}"
        raise AttributeError(f"module 'farfield' has no attribute {name!r}; {hint}.")
    module = importlib.import_module(f"farfield.{_HOME.get(name, name)}")
    value = getattr(module, name) if name in _HOME else module
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Return the public names, loaded or not."""
    return sorted({*globals(), *__all__})
