"""How a network reads the axes of a volume, where nothing states them; what else it takes, found without numbers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.fx import GraphModule
from torch.nn.modules.conv import _ConvNd

from farfield._refusals import refusal
from farfield.nn.devices import dtype_of
from farfield.nn.scripted_network import ScriptedNetwork
from farfield.nn.tracing import copied_empty

# Lengths of a last axis that is one of colours.
_COLOURS = (3, 4)
# Positions of a tile along an axis where none are given.
_TILE = 256


def takes_grid(network: nn.Module, channels: int, size: Sequence[int]) -> bool:
    """Whether a network runs on grids of so many channels and a size, found without numbers."""
    try:
        with torch.no_grad(), copied_empty(network) as empty:
            # Layers of torch take a grid without samples too: one sample alone may be read as its channels.
            for samples in (1, 2):
                empty(torch.empty(samples, channels, *size, dtype=dtype_of(network), device="cpu"))
    except Exception:  # noqa: BLE001  # a network may refuse a shape by any error
        return False
    return True


def find_reading(
    network: nn.Module, shape: tuple[int, ...], dims: int, tile: Any, plan: Callable[[Any, Any], Collection[int]]
) -> tuple[str, str] | None:
    """Return how else than with so many spatial dims a network takes a volume, and the fix; None if it does not."""
    # `plan` raises the error of a call with another shape and tile, or returns the axes that can be cut.
    for expression, moved, own in _list_readings(shape):
        (samples, channels), size = (1, 1, *moved[:-own])[-2:], moved[-own:]
        is_known = isinstance(tile, tuple) if own != dims else not expression
        if is_known or not takes_grid(network, channels, size):
            continue
        with suppress(ValueError, TypeError):
            parts, chosen = [expression] * bool(expression), tile
            if own != dims:
                cuttable = plan(moved, (None,) * own)
                chosen = tuple(tile or _TILE if axis in cuttable else None for axis in range(own))
                parts.append(f"tile={chosen}")
            plan(moved, chosen)
            several = f"{samples} samples of " if samples > 1 else ""
            return f"{several}{channels} channels of size {size}", ", ".join(parts)
    return None


def _list_readings(shape: tuple[int, ...]) -> Iterator[tuple[str, tuple[int, ...], int]]:
    """Iterate over expressions of a volume, if it is not taken as it is, their shapes and numbers of spatial dims."""
    count = len(shape)
    yield from (("", shape, dims) for dims in (count - 1, count - 2, count) if dims > 0)
    for name, source, place in (("moveaxis", -1, 0), ("moveaxis", -1, 1), ("swapaxes", 1, 0), ("swapaxes", 2, 1)):
        if max(source, place) + 1 < count:
            moved = [*shape]
            moved.insert(place, moved.pop(source))
            yield f"numpy.{name}(volume, {source}, {place})", tuple(moved), count - 1 - place


class _Convolution(NamedTuple):
    spatial_dims: int
    in_channels: int


def first_convolution(model: nn.Module) -> _Convolution | None:
    for module in model.modules():
        if isinstance(module, _ConvNd):
            return _Convolution(len(module.kernel_size), module.in_channels)
        if isinstance(module, ScriptedNetwork) and (found := module.first_convolution()) is not None:
            return _Convolution(*found)
    return None


def refuse_axes(
    model: nn.Module, inputs: tuple[int, ...], size: tuple[int, ...], is_batch: bool, error: ValueError
) -> None:
    """Raise ValueError for a volume whose channels or spatial dims are not those of the first convolution."""
    convolution = first_convolution(model)
    if isinstance(model, GraphModule):
        fix = "a program for any size, of torch.export.export(network, (example,), dynamic_shapes=…) with Dim.AUTO"
        raise refusal(ValueError, f"{error}\n  fix: {fix}.") from error
    if convolution is None:
        return
    expected = convolution.spatial_dims
    if expected != len(size):
        text = (
            f"tile has {len(size)} numbers, and the first convolution of {type(model).__name__} takes "
            f"{expected} spatial dims.\n  fix: tile with {expected} numbers, or one number."
        )
    elif len(inputs) > 1:  # it is not known which of them the convolution takes
        text = (
            f"{error}\n  fix: volumes with the channels that the network takes, in the order of its arguments; these "
            f"have {', '.join(map(str, inputs))}."
        )
    elif convolution.in_channels != inputs[0]:
        fix = _channels_fix(convolution.in_channels, inputs[0], size, is_batch)
        text = (
            f"{error}\n  fix: {fix}; (*size) is one channel, and in (channels, *size) this one has {inputs[0]} "
            f"channels of size {size}."
        )
    else:
        return
    raise refusal(ValueError, text) from error


def _channels_fix(expected: int, channels: int, size: tuple[int, ...], is_batch: bool) -> str:
    """Return the fix for a volume of other channels: what its axes probably are, as an expression."""
    if size[-1] == expected > 1:
        return f"numpy.moveaxis(volume, -1, {int(is_batch)}), if the last axis has the channels"
    if expected > 1:
        one = "volume" if is_batch else f"volume.reshape({(1, *size)})"
        alike = f", numpy.repeat({one}, {expected}, {int(is_batch)}) if all are alike" if channels == 1 else ""
        return f"a volume of {expected} channels{alike}"
    if size[-1] in _COLOURS:
        return "one channel of it, volume[..., 0], if the last axis has colours"
    one, samples = "volume[:1]", "volume[:, None]"
    if is_batch:
        one, samples = "volume[:, :1]", "volume.reshape(-1, 1, *volume.shape[2:])"
    what = "planes" if len(size) == 2 else "grids"
    return f"one of them, {one}, or each as a sample, {samples}, such as the {what} of a stack"
