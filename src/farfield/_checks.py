"""Checks of arguments and the refusals that they raise: the problem, the shapes and a fix; the door adds the name."""

from __future__ import annotations

import contextlib
import difflib
import importlib
import json
import math
import operator
import re
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any
from urllib.parse import urlparse
from urllib.request import url2pathname

import torch
from torch import Tensor, nn

from farfield._operators import FACTS
from farfield._refusals import refusal

# Suffixes of networks that are not torch's, and packages of their classes.
_FOREIGN = (".onnx", ".keras", ".h5", ".pb", ".tflite", "onnx", "onnxruntime", "keras", "tensorflow", "flax")


class ShapeError(ValueError):
    """Raised for shapes that do not fit together; the text has the function, the problem, the shapes and a fix."""


def shape_error(problem: str, fix: str, **tensors: Tensor) -> ShapeError:
    """Build a refusal: one line with the problem, one with the shape of each tensor, one with the fix."""
    width = max((len(name) for name in tensors), default=0)
    shapes = [f"  {name:{width}}  {tuple(tensor.shape)}" for name, tensor in tensors.items()]
    return refusal(ShapeError, "\n".join([problem, *shapes, f"  fix: {fix}"]))


def unknown(what: str, name: object, names: Iterable[str]) -> LookupError:
    """Build a refusal with the nearest known names, or with all of them if none is near.

    Example:
        >>> print(unknown("operator", "siamse", ["softmax", "siamese", "dot"]))
        no operator "siamse"; nearest: siamese.
    """
    names = list(names)
    nearest = difflib.get_close_matches(str(name), names, n=3, cutoff=0.5)
    hint = f"nearest: {', '.join(nearest)}" if nearest else f"it has {', '.join(names)}"
    return refusal(LookupError, f'no {what} "{name}"; {hint}.')


def install_command(extra: str) -> str:
    """Return the pip command that adds an extra, from the checkout, wheel, repository or index of the installation."""
    repository, path, editable = _installed_from()
    if repository:
        return f'pip install "farfield[{extra}] @ {repository}"'
    return f'pip install {editable}"{path or "farfield"}[{extra}]"'


def load_library(name: str, extra: str, what: str) -> Any:
    """Import what something needs and farfield does not; an error has the line to install its extra."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        fix = install_command(extra)
        raise refusal(ImportError, f"{what} needs {name.partition('.')[0]}; fix: {fix}") from error


def install_papers(extra: str = "") -> str:
    """Return the pip command that adds the papers' networks and training, from where this installation came."""
    repository, path, editable = _installed_from()
    extra = f"[{extra}]" if extra else ""
    if repository:
        return f'pip install "farfield-papers{extra} @ {repository}#subdirectory=papers"'
    if path and (folder := Path(path, "papers")).is_dir():
        return f'pip install {editable}"{folder}{extra}"'
    return f'pip install "farfield-papers{extra}"'


def _installed_from() -> tuple[str, str, str]:
    """Return the repository, or the path and pip's option for an editable one, that this installation came from."""
    # pip records them in `direct_url.json` (PEP 610); a path that is gone counts as the index.
    try:
        text = distribution("farfield").read_text("direct_url.json")
    except PackageNotFoundError:
        text = None
    source: dict[str, Any] = json.loads(text) if text else {}
    address = source.get("url", "")
    if "vcs_info" in source:
        return f"{source['vcs_info']['vcs']}+{address}", "", ""
    path = url2pathname(urlparse(address).path)
    if address.startswith("file:") and Path(path).exists():
        return "", path, "-e " if source.get("dir_info", {}).get("editable") else ""
    return "", "", ""


def check_network(network: Any, name: str, call: str) -> None:
    """Refuse what is no module; `call` is the call as it should be."""
    if isinstance(network, nn.Module):
        return
    kind, given = type(network), Path(network) if isinstance(network, str | Path) else None
    fix, library = f"the network comes first, {call}", kind.__module__.partition(".")[0]
    if isinstance(network, Mapping):
        fix = "the network that it has the weights of, after network.load_state_dict(…)"
    elif given is not None and given.suffix.lower() not in _FOREIGN:
        fix = f'the network, after network.load_state_dict(torch.load("{given}")), or torch.jit.load("{given}")'
    elif given is not None or library in _FOREIGN:
        fix = "the same network in torch: those of other libraries are not run"
    elif hasattr(network, "graph_module"):
        fix = "the network of an exported program, model.module()"
    elif isinstance(network, type):
        fix = f"an instance of it, {network.__name__}(…)"
    elif callable(network):
        builder = getattr(network, "__name__", "builder")
        fix = (
            f"its result, {builder}(…), if it builds the network; else wrap it in a torch.nn.Module whose forward "
            "calls it"
        )
    raise refusal(TypeError, f"{name} must be a torch.nn.Module, got {kind.__name__}; fix: {fix}.")


def check_grid(name: str, grid: Tensor) -> None:
    """Refuse anything but a floating-point grid `(batch, channels, *size)` with channels and positions."""
    if not isinstance(grid, Tensor):
        raise refusal(
            TypeError,
            f"{name} must be a tensor (batch, channels, *size), got {type(grid).__name__}; "
            f"fix: {_tensor_fix(name, grid)}.",
        )
    if grid.dim() < 3:
        fix = (
            f"add dims: {name}[None] if it is (channels, positions), {name}.mT[None] if it is (positions, channels), "
            f"{name}[..., None] if it is (batch, channels)."
        )
        if grid.dim() < 2:
            fix = f"add dims: {name}[None, :, None] if it has channels, {name}[None, None] if it has positions."
        problem = f"{name} must be (batch, channels, *size) with at least one spatial dim."
        raise shape_error(problem, fix, **{name: grid})
    if not grid.is_floating_point():
        raise refusal(TypeError, f"{name} must be floating point, got {grid.dtype}; fix: {name}.float().")
    if 0 in grid.shape[1:]:
        raise shape_error(f"{name} has an empty dimension.", "leave empty grids out.", **{name: grid})


def _tensor_fix(name: str, value: object) -> str:
    """Return the fix for a value that must be a grid: an expression that makes a tensor of it."""
    if not (isinstance(value, list | tuple) and value and all(isinstance(each, Tensor) for each in value)):
        return f"torch.as_tensor({name})"
    if len({each.shape for each in value}) == 1:
        return f"torch.stack({name})"
    return f"{name}, mask = farfield.pad_grids({name}), as they differ in size, and mask=mask"


def check_same_kind(**tensors: Tensor) -> None:
    """Refuse tensors of different dtypes (`TypeError`) or on different devices (`ValueError`)."""
    (first_name, first), *others = tensors.items()
    for name, tensor in others:
        if tensor.dtype != first.dtype:
            raise refusal(
                TypeError,
                f"{first_name} and {name} must have one dtype, got {first.dtype} and {tensor.dtype}; "
                f"fix: {name}.to({first_name}.dtype).",
            )
        if tensor.device != first.device:
            raise refusal(
                ValueError,
                f"{first_name} and {name} must be on one device, got {first.device} and {tensor.device}; "
                f"fix: {name}.to({first_name}.device).",
            )


def check_mask(name: str, mask: Tensor | None, owner: str, grid: Tensor) -> None:
    """Refuse a mask that is not boolean, not `(batch, *size)` of the grid it belongs to, or on another device."""
    if mask is None:
        return
    if not isinstance(mask, Tensor):
        raise refusal(
            TypeError, f"{name} must be a boolean tensor, got {type(mask).__name__}; fix: torch.as_tensor({name})."
        )
    if mask.dtype != torch.bool:
        additive = f", or {name} == 0 if it is additive, 0 and -inf" if mask.is_floating_point() else ""
        raise refusal(
            TypeError,
            f"{name} must be boolean, True where a position is valid, got {mask.dtype}; fix: {name} > 0{additive}.",
        )
    check_positions(name, mask, owner, grid)


def check_positions(name: str, mask: Tensor, owner: str, grid: Tensor) -> None:
    """Refuse a mask or weights that are not `(batch, *size)` of the grid they belong to, or on another device."""
    if mask.shape != grid.shape[:1] + grid.shape[2:]:
        fix = _mask_fix(name, mask, grid)
        raise shape_error(f"{name} must be (batch, *size) of {owner}.", fix, **{name: mask, owner: grid})
    if mask.device != grid.device:
        raise refusal(
            ValueError,
            f"{name} must be on the device of {owner}, {grid.device}, got {mask.device}; "
            f"fix: {name}.to({owner}.device).",
        )


def _mask_fix(name: str, mask: Tensor, grid: Tensor) -> str:
    """Return the fix for a mask that must be `(batch, *size)`: an expression, if its shape shows which dims it has."""
    batch, size = grid.shape[0], tuple(grid.shape[2:])
    right = (batch, *size)
    made = {
        (batch, 1, *size): f"{name}[:, 0]",
        (batch, math.prod(size)): f"{name}.reshape{right}",
        size: f"{name}.expand{right}",
        (1, *size): f"{name}.expand{right}",
        (batch, *size, 1): f"{name}[..., 0]",
    }.get(tuple(mask.shape))
    return f"one value per position, without channels, {right}{f': {made}' if made else ''}."


def check_whole(name: str, value: object, smallest: int) -> None:
    """Refuse a value that is not a whole number, or below the smallest allowed."""
    if not isinstance(value, int) or value < smallest:
        # Such as numpy's int64 or a tensor of one: a whole number, but it would stand in saved configurations.
        is_whole = False
        with contextlib.suppress(TypeError):  # what is no whole number, or several
            is_whole = operator.index(value) >= smallest  # type: ignore[arg-type]
        fix = f"; fix: int({value})" if is_whole else ""
        raise refusal(ValueError, f"{name} must be a whole number from {smallest}, got {value!r:.60}{fix}.")


def check_heads(heads: int, channels: int, owner: str) -> None:
    """Refuse a number of heads that does not divide the channels; the error names the nearest number that does."""
    check_whole("heads", heads, 1)
    if channels % heads:
        divisors = [divisor for divisor in range(1, channels + 1) if channels % divisor == 0]
        nearest = min(divisors, key=lambda divisor: (abs(divisor - heads), divisor))
        raise refusal(
            ShapeError, f"heads={heads} does not divide the {channels} channels of {owner}; try heads={nearest}."
        )


def check_attention(
    query: Tensor, key: Tensor, value: Tensor, heads: int, mask: Tensor | None, query_mask: Tensor | None
) -> None:
    """Refuse queries, keys, values, heads and masks that do not fit each other."""
    check_grid("query", query)
    if not (query is key and key is value):
        _check_different(query, key, value)
    check_heads(heads, query.shape[1], "query")
    check_heads(heads, value.shape[1], "value")
    check_mask("mask", mask, "key", key)
    check_mask("query_mask", query_mask, "query", query)


def _check_different(query: Tensor, key: Tensor, value: Tensor) -> None:
    """Refuse grids of different kinds, channels (query, key), sizes (key, value) or batches."""
    grids = {"query": query, "key": key, "value": value}
    check_grid("key", key)
    check_grid("value", value)
    check_same_kind(**grids)
    if query.shape[1] != key.shape[1]:
        problem = f"query and key must have the same channels, got {query.shape[1]} and {key.shape[1]}."
        pairs = ("query", query, key), ("key", key, query)
        last = [name for name, one, other in pairs if one.movedim(-1, 1).shape == other.shape]
        fix = f"{last[0]}.movedim(-1, 1), whose channels are last." if last else ""
        raise shape_error(problem, fix or _projection_fix("key", key, query.shape[1]), query=query, key=key)
    if key.shape[2:] != value.shape[2:]:
        raise shape_error("key and value must have the same size.", "take both from one grid.", key=key, value=value)
    if not query.shape[0] == key.shape[0] == value.shape[0]:
        name = min(grids, key=lambda name: len(grids[name]))
        batch = max(map(len, grids.values()))
        fix = f"give all the same batch; a batch of 1 can be repeated, e.g. {name}.expand({batch}, *{name}.shape[1:])."
        raise shape_error("query, key and value must have the same batch.", fix, **grids)


def channels_fix(name: str, grid: Tensor, channels: int) -> str:
    """Return the fix for a grid that must have `channels` channels: its dims in order, if one of them is as long."""
    if grid.shape[-1] == channels:
        return (
            f"the last dim has {channels}: {name}.movedim(-1, 1) if it is (batch, *size, channels), "
            f"{name}.movedim(-1, 0)[None] if it is one grid (*size, channels)."
        )
    if grid.shape[0] == channels:
        return f"add the batch, {name}[None], if it is one grid (channels, *size)."
    return _projection_fix(name, grid, channels)


def add_memory_note(caller: str, operator: str, query: Tensor, key: Tensor, heads: int, error: RuntimeError) -> None:
    """Add to an error of memory, and to no other, what does not fit and which operators would."""
    text = str(error)
    if "out of memory" not in text and "allocate memory" not in text:
        return
    numbers = query.shape[0] * heads * query.shape[2:].numel() * key.shape[2:].numel()
    linear = FACTS[operator].linear if operator in FACTS else ""
    others = f"{linear}, which is equal to {operator}" if linear else "factorized_gaussian or kronecker_kv"
    error.add_note(
        f"{caller}: {operator} forms up to {numbers:,} coefficients for {query.shape[2:].numel():,} queries and "
        f"{key.shape[2:].numel():,} keys in {heads} head(s), {4 * numbers / 1e9:,.1f} GB in float32.\n"
        f"  fix: {others}, whose memory grows with the positions and not with their square; "
        f"cost.plan lists what each operator needs."
    )


def check_size(size: object) -> None:
    """Refuse a size that is one number, text or empty."""
    if isinstance(size, int):
        raise refusal(
            TypeError,
            f"size must have one number per spatial dim, got {size}; fix: size=({size}, {size}) for an image.",
        )
    if isinstance(size, str):
        numbers = tuple(map(int, re.findall(r"[0-9]+", size))) or (56, 56)
        raise refusal(TypeError, f"size must be numbers, one per spatial dim, got {size!r}; fix: size={numbers}.")
    if isinstance(size, Sequence) and not len(size):
        raise refusal(ValueError, "size must have one number per spatial dim, got none; fix: size=(56, 56).")


def _projection_fix(name: str, grid: Tensor, channels: int) -> str:
    """Return the fix for a grid with other than `channels` channels: a projection."""
    spatial_dims = grid.dim() - 2
    layer = (
        f"Conv{spatial_dims}d({grid.shape[1]}, {channels}, 1)"
        if spatial_dims <= 3
        else f"Linear({grid.shape[1]}, {channels})"
    )
    return f"project {name} first, e.g. by torch.nn.{layer}."


def check_place(
    grid: Tensor, origin: Sequence[int] | None, size: Sequence[int] | None
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Return the place of a tile as `(origin, size)`, None for a whole grid; refuse a tile that lies partly outside."""
    if origin is None and size is None:
        return None
    if origin is None or size is None:
        raise refusal(
            ValueError,
            f"the place of a tile needs both origin and size, got {origin=}, {size=}; "
            f"fix: give both, or neither for a whole grid.",
        )
    place = tuple(origin), tuple(size)
    tile = tuple(grid.shape[2:])
    if not len(place[0]) == len(place[1]) == len(tile):
        problem = (
            f"origin and size must have one number per spatial dim, got {origin=}, {size=} for a tile of size {tile}."
        )
        raise refusal(ShapeError, problem)
    if any(start < 0 or start + length > whole for start, length, whole in zip(place[0], tile, place[1], strict=True)):
        raise refusal(ShapeError, f"a tile of size {tile} at {origin=} does not lie inside a grid of {size=}.")
    return place
