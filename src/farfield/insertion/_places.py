"""Places to insert at: the papers' names as paths, paths with `*` and `[entry]`, and the modules they lead to."""

from __future__ import annotations

import ast
import difflib
import inspect
import re
from collections.abc import Iterator, Sequence
from functools import cache
from types import FunctionType
from typing import Any, NamedTuple

from torch import nn

from farfield._checks import unknown
from farfield._refusals import put_name, refusal

# Name of the child module that holds an addition.
CHILD = "farfield"

# Functions that count or iterate over what they get. Others, such as `checkpoint_sequential`, may run a sequence whole.
_ITERATE = {"enumerate", "iter", "len", "list", "map", "reversed", "set", "tuple", "zip"}

# Names of the stages of a residual network in the papers; their numbers are one less than in Detectron.
_STAGES = {f"res{stage}": f"layer{stage}" for stage in range(1, 5)}
_LEVELS = {f"fpn{level + 1}": f"fpn[{entry}]" for level, entry in enumerate((0, 1, 2, 3, "pool"))}
# Every other block of conv3_x and conv4_x in a network of 50 layers, Wang et al. 2018.
_NONLOCAL_BLOCKS = ("res2.1", "res2.3", "res3.1", "res3.3", "res3.5")


def detector_places(*names: str) -> list[str]:
    """Translate places of a detector into paths of torchvision's Mask R-CNN, Faster R-CNN and Keypoint R-CNN.

    The names are those of Factorized Attention, which counts stages as torchvision does: res4 is `layer4`, Detectron's
    "res5". The levels of the pyramid are entries of its output, so attention at one level changes that level alone: the
    top-down path uses the grids before attention, and so does fpn5, which is computed from fpn4.

    Args:
        names: "res1" to "res4" (stages of the backbone), "fpn1" to "fpn5" (levels of the pyramid; fpn5 is "pool"),
            "fpn_all" (all five).

    Returns:
        The paths for `insert`, in the order given, without duplicates.

    Raises:
        LookupError: If there is no such place.

    Reference: FA Table 1.

    Example:
        >>> from farfield.insertion import detector_places
        >>> detector_places("res4", "fpn1", "fpn5")
        ['backbone.body.layer4', 'backbone.fpn[0]', 'backbone.fpn[pool]']
    """
    levels = {name: [f"backbone.{level}"] for name, level in _LEVELS.items()}
    paths = {name: [f"backbone.body.{stage}"] for name, stage in _STAGES.items()} | levels
    paths["fpn_all"] = [path for level in levels.values() for path in level]
    places: list[str] = []
    for name in names:
        if name not in paths:
            raise put_name("detector_places", unknown("place", name, list(paths)))
        places += paths[name]
    return list(dict.fromkeys(places))


def resnet_places(*names: str, prefix: str = "") -> list[str]:
    """Translate places of a residual network for images or video into module paths of torchvision and timm.

    It works for every network whose stages are `layer1` to `layer4`: ResNet, ResNeXt and similar ones in torchvision
    and timm, torchvision's r3d_18, mc3_18 and r2plus1d_18, and each of them as the encoder of a larger network.

    Args:
        names: "res1" to "res4" for a stage; "res3.5" for one of its blocks, "res3.*" for all of them; "nonlocal" for
            the five blocks of the non-local networks in a network of 50 layers (Wang et al. 2018).
        prefix: Path of the network inside a larger one, for example "encoder".

    Returns:
        The paths for `insert`, in the order given, without duplicates.

    Raises:
        LookupError: If there is no such place.

    Example:
        >>> from farfield.insertion import resnet_places
        >>> resnet_places("res4", "res3.*", prefix="backbone")
        ['backbone.layer4', 'backbone.layer3.*']
    """
    places = []
    for name in names:
        for block in _NONLOCAL_BLOCKS if name == "nonlocal" else (name,):
            stage, dot, rest = block.partition(".")
            if stage not in _STAGES:
                raise put_name("resnet_places", unknown("place", name, [*_STAGES, "nonlocal"]))
            places.append(f"{prefix}{'.' * bool(prefix)}{_STAGES[stage]}{dot}{rest}")
    return list(dict.fromkeys(places))


class Place(NamedTuple):
    """The path of a module, and one entry of its output if it returns several grids."""

    path: str
    entry: str | None = None

    def __str__(self) -> str:
        return self.path if self.entry is None else f"{self.path}[{self.entry}]"

    @property
    def label(self) -> str:
        """The place in an error: its notation, or "the model" for the output of the model itself."""
        return str(self) or "the model"


def join(path: str, name: str) -> str:
    return f"{path}.{name}" if path and name else path or name


def parents(path: str) -> list[str]:
    """Return the paths of all modules around one, from the nearest to the model itself, which is ""."""
    names = path.split(".") if path else []
    return [".".join(names[:end]) for end in reversed(range(len(names)))]


def find_places(model: nn.Module, where: str | Sequence[str]) -> dict[Place, Place]:
    """Map every place that matches one path or several to the place that has its addition; see `host_of`."""
    places: dict[Place, Place] = {}
    for text in [where] if isinstance(where, str) else where or ():
        parts = re.fullmatch(r"([^\[\]]*)(?:\[([^\[\]]+)\])?", text)
        if parts is None:
            raise refusal(ValueError, f'a place is a path, or a path and one entry as in "fpn[pool]"; got "{text}".')
        matches = [Place(name, parts[2]) for name, _ in matching(model, parts[1])]
        if not matches:
            raise no_match(model, parts[1])
        places |= {place: host_of(model, place) for place in matches}
    if not places:
        raise refusal(ValueError, "where names no place; fix: give at least one path.")
    paths: dict[nn.Module, str] = {}
    for place, host in places.items():
        other = paths.setdefault(model.get_submodule(host.path), place.path)
        if other != place.path:
            raise refusal(ValueError, f'"{other}" and "{place.path}" are one module; fix: name one of them.')
    return places


def matching(model: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    """Iterate over the modules whose path matches: `*` is any part of a segment, `**` any number; no addition is."""
    matches = [("", model)]
    for segment in path.split(".") if path else ():
        if segment == "**":
            below = ((prefix, *each) for prefix, module in matches for each in module.named_modules())
            matches = [(join(prefix, name), each) for prefix, name, each in below if CHILD not in name.split(".")]
            continue
        form = re.compile(re.escape(segment).replace(r"\*", ".*"))
        matches = [
            (join(prefix, name), child)
            for prefix, module in matches
            for name, child in module._modules.items()
            if child is not None and form.fullmatch(name) and not ("*" in segment and name == CHILD)
        ]
    yield from matches


def no_match(model: nn.Module, path: str) -> LookupError:
    """Return the error for a path that matches nothing: the children where the match ends, and the nearest paths."""
    stem, parent = next((stem, module) for stem in parents(path) for _, module in matching(model, stem))
    children = ", ".join(parent._modules) or "no children"
    close = difflib.get_close_matches(path, [name for name, _ in model.named_modules() if name], n=3, cutoff=0.6)
    hint = f"; nearest: {', '.join(close)}" if close else ""
    name = type(model).__name__
    return refusal(LookupError, f'no module of {name} matches "{path}"; {stem or "it"} has {children}{hint}.')


def runs_in_order(host: nn.Module) -> bool:
    """Whether a host runs its children one after the other and does nothing else."""
    # A scripted module has no `forward` of its class.
    in_order = isinstance(host, nn.Sequential) and type(host).forward is nn.Sequential.forward
    return in_order and "forward" not in vars(host)


def host_of(model: nn.Module, place: Place) -> Place:
    """Return the place that has the addition: the given one, or the last child of a sequence that others look into."""
    # One more element would be one more block to a model that runs or counts the blocks of a sequence in some of its
    # methods, as `forward_intermediates` of timm does.
    path, host = place.path, model.get_submodule(place.path)
    while runs_in_order(host) and host._modules and CHILD not in host._modules and _is_opened(model, path):
        path = join(path, list(host._modules)[-1])
        host = model.get_submodule(path)
    return Place(path, place.entry)


def _is_opened(model: nn.Module, path: str) -> bool:
    """Whether a module around a sequence runs, counts or indexes its children, or has features of some of them."""
    for outer in parents(path):
        around, below = model.get_submodule(outer), f"{path[len(outer) + bool(outer) :]}."
        declared = getattr(around, "feature_info", None) or ()
        # timm declares the modules whose outputs are features.
        features = [entry for entry in getattr(declared, "info", declared) if isinstance(entry, dict)]
        if any(str(feature.get("module")).startswith(below) for feature in features):
            return True
        if any(path.rpartition(".")[2] in _opened_names(kind) for kind in type(around).__mro__):
            return True
    return False


@cache
def _opened_names(kind: type) -> frozenset[str]:
    """Return the names of the attributes that the methods of a class count, index or iterate over."""
    if kind.__module__.partition(".")[0] in ("torch", "builtins"):
        return frozenset()
    nodes: list[ast.AST] = []
    for name, method in vars(kind).items():
        if inspect.isfunction(method) and name != "__init__":  # which runs before there is an addition
            nodes += ast.walk(parse_source(method))
    return frozenset(part.attr for node in nodes for part in _opened_parts(node) if isinstance(part, ast.Attribute))


@cache
def parse_source(function: FunctionType) -> ast.Module:
    """Return the syntax tree of a function, which is empty where its source is not at hand."""
    try:
        source = inspect.getsource(function)
        return ast.parse("if True:\n" * source[0].isspace() + source)
    except (OSError, SyntaxError, TypeError):
        return ast.Module([], [])


def _opened_parts(node: ast.AST) -> list[Any]:
    """Return the parts of a node of a syntax tree whose elements it reads, or to which it gives another name."""
    match node:
        case ast.For(iter=part) | ast.comprehension(iter=part):
            return [part]
        case ast.Subscript(value=part) | ast.Attribute(value=part) | ast.Starred(value=part) | ast.Assign(value=part):
            return [part]
        case ast.Call(func=ast.Name(id=name)) if name in _ITERATE:
            return list(node.args)
    return []
