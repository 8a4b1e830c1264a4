"""Find which dimension holds the channels: compare the assumed layout with other input sizes and with the weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, TypeGuard, get_args

import torch
from torch import Tensor, nn

from farfield._checks import ShapeError
from farfield._refusals import refusal
from farfield.insertion._places import Place

Layout = Literal["channels_first", "channels_last"]
_LAYOUTS = get_args(Layout)
_OTHER: dict[Layout, Layout] = {"channels_first": "channels_last", "channels_last": "channels_first"}
Shape = tuple[int, ...]


@dataclass
class Seen:
    """What a place returned first, its shapes for other inputs that the model accepts, and whether it has an effect."""

    value: Any
    sizes: list[Shape] = field(default_factory=list)
    batches: list[Shape] = field(default_factory=list)
    reaches: bool = False


def check_layout_name(layout: Any) -> None:
    if layout not in (None, *_LAYOUTS):
        raise refusal(ValueError, f"layout must be one of {', '.join(_LAYOUTS)}, got {layout!r}.")


def channel_axis(dimensions: int, layout: Layout) -> int:
    return 1 if layout == "channels_first" else dimensions - 1


def resize(example: Any) -> Iterator[Any]:
    """Yield the example at other sizes: once for each length among its spatial axes, with all axes of it changed."""
    tensors: list[tuple[Tensor, int]] = []
    map_tensors(example, lambda *pair: tensors.append(pair))
    # In a floating-point tensor of three dimensions, the second or the third may hold the channels: both are tried.
    both = any(tensor.is_floating_point() and tensor.dim() - start == 2 for tensor, start in tensors)
    for channels in (0, 1) if both else (0,):
        axes = ((tensor, axis) for tensor, start in tensors for axis in _spatial_axes(tensor, start, channels))
        lengths = {(tensor.shape[axis], tensor.is_floating_point()) for tensor, axis in axes}
        for length in sorted({length for length, _ in lengths} - {0, 1}, reverse=True):
            # Integers may be indices: a longer axis could exceed a table or trigger a device assertion, so halve it.
            shorter = (length, False) in lengths
            yield map_tensors(example, partial(_change_size, length=length, shorter=shorter, channels=channels))


def _change_size(tensor: Tensor, start: int, length: int, shorter: bool, channels: int) -> Tensor:
    """Return a tensor with all spatial axes of one length halved (`shorter`) or doubled."""
    for axis in _spatial_axes(tensor, start, channels):
        if tensor.shape[axis] == length:
            tensor = tensor.narrow(axis, 0, length // 2) if shorter else torch.cat([tensor, tensor], axis)
    return tensor


def is_floating(value: Any) -> TypeGuard[Tensor]:
    """Whether a value is a floating-point tensor with one shape."""
    return isinstance(value, Tensor) and value.is_floating_point() and not value.is_nested


def map_tensors(example: Any, change: Callable[[Tensor, int], Any], start: int = 1) -> Any:
    """Apply `change(tensor, start)` to each tensor; `start` is its first dimension after the batch, 0 in a list."""
    if isinstance(example, Tensor):
        return change(example, start)
    if isinstance(example, Mapping):
        return {name: map_tensors(value, change, start) for name, value in example.items()}
    if isinstance(example, tuple):
        return tuple(map_tensors(value, change, start) for value in example)
    if isinstance(example, list):
        return [map_tensors(value, change, 0) for value in example]
    return example


def batches(example: Any) -> set[int]:
    """Return the possible batch lengths of an example: those of its tensors, and of its lists of samples."""
    if isinstance(example, Tensor):
        return set(example.shape[:1])
    if isinstance(example, Mapping | tuple):
        values = example.values() if isinstance(example, Mapping) else example
        return {length for value in values for length in batches(value)}
    return {len(example)} if isinstance(example, list) else set()


def repeat_batch(example: Any) -> Any:
    if isinstance(example, list):
        return example * 2
    if isinstance(example, Mapping):
        return {name: repeat_batch(value) for name, value in example.items()}
    if isinstance(example, tuple):
        return tuple(map(repeat_batch, example))
    return torch.cat([example, example]) if isinstance(example, Tensor) and example.dim() else example


def _spatial_axes(tensor: Tensor, start: int, channels: int) -> list[int]:
    """Return the spatial dimensions of an input: all but the batch and, in floating-point grids, the channels."""
    axes = list(range(start, tensor.dim()))
    if tensor.is_floating_point() and len(axes) > 1:
        # The first of three and more, as in an image; of two, the one that the caller gives.
        axes.pop(channels if len(axes) == 2 else 0)
    return axes


def check_layouts(model: nn.Module, grids: Mapping[Place, Seen], layout: Layout | None) -> None:
    """Refuse a layout that another input size contradicts, and the default if neither it nor the weights confirm it."""
    reasons = {place: _find_misfit(model, place, seen, layout) for place, seen in grids.items()}
    misfits = {place: misfit for place, misfit in reasons.items() if misfit is not None}
    if not misfits:
        return
    problem, fix = next(iter(misfits.values()))
    assumed = layout or _LAYOUTS[0]
    other = _OTHER[assumed]
    wrong = [place for place, (_, remedy) in misfits.items() if remedy == f'layout="{other}"']
    right = [place for place in grids if place not in misfits]
    if wrong and right:
        problem = misfits[wrong[0]][0]
        ours, others = (", ".join(map(str, places)) for places in (right, wrong))
        fix = f'two calls, layout="{assumed}" for {ours} and layout="{other}" for {others}'
    raise refusal(ShapeError, f"{problem}.\n  fix: {fix}.")


def _find_misfit(model: nn.Module, place: Place, seen: Seen, layout: Layout | None) -> tuple[str, str] | None:
    """Return the reason why a layout is refused at one place, and the fix; None if it is accepted."""
    assumed, shape = layout or _LAYOUTS[0], tuple(seen.value.shape)
    other = _OTHER[assumed]
    axis, swapped = channel_axis(len(shape), assumed), channel_axis(len(shape), other)
    changed = changes(shape, seen.sizes)
    if axis in changed:
        return (
            f"{place.label} returns {shape}, and {changed[axis]} at another input size: dimension {axis}, the channels "
            f'of layout="{assumed}", is spatial',
            "insert at a module whose output has one channel dimension" if swapped in changed else f'layout="{other}"',
        )
    # A layout that is given is accepted where nothing contradicts it.
    if changed or layout is not None:
        return None
    widths = _widths_of(model.get_submodule(place.path))
    if not widths & {shape[axis], shape[swapped]}:
        widths = _widths_of(model)
    if shape[axis] in widths and shape[swapped] not in widths:
        return None
    problem = f"{place.label} returns {shape}, and no other input size shows which dimension holds the channels"
    if shape[swapped] in widths and shape[axis] not in widths:
        return f"{problem}; its weights have {shape[swapped]}", f'layout="{other}"'
    fit = "both" if shape[axis] in widths else "none"
    return (
        f"{problem}; its weights fit {fit} of {shape[axis]} and {shape[swapped]}",
        f'choose one, layout="{assumed}" for {shape[axis]} channels or layout="{other}" for {shape[swapped]}',
    )


def choose_layout(model: nn.Module, place: Place, seen: Seen, layout: Layout | None) -> Layout | None:
    """Return the layout with which `insert` accepts a place: the given one, or by default the one that is confirmed."""
    misfit = _find_misfit(model, place, seen, layout)
    assumed = layout or _LAYOUTS[0]
    if misfit is None:
        return assumed
    return _OTHER[assumed] if layout is None and misfit[1] == f'layout="{_OTHER[assumed]}"' else None


def changes(shape: Shape, others: list[Shape]) -> dict[int, Shape]:
    """Map each dimension after the batch in which a shape differs from some of the others to one of these others."""
    axes = range(1, len(shape))
    return {axis: other for other in others for axis in axes if other[axis : axis + 1] != (shape[axis],)}


def _widths_of(module: nn.Module) -> set[int]:
    """Return the lengths of biases and norms, the parameters of one dimension, except 1: numbers of channels."""
    return {parameter.numel() for parameter in module.parameters() if parameter.dim() == 1} - {1}
