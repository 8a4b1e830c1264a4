"""The axes that a network takes: how many spatial dims, how many channels, and sizes that its strides divide."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from torch.nn.modules.conv import _ConvNd

from farfield.streaming.scale import Scale, trace_or_raise
from farfield.streaming.trace import Trace, trace
from farfield.volumes.source import Span


def spatial_dims_of(caller: str, model: nn.Module, tile: object) -> int:
    """Return the number of spatial dims of a model's input: the length of `tile`, or that of its first convolution."""
    if isinstance(tile, Sequence):
        return len(tile)
    convolution = first_convolution(model)
    if convolution is None:
        name = type(model).__name__
        raise ValueError(
            f"{caller}: the number of spatial dims is unknown, because {name} has no convolution; fix: tile with "
            f"one number per spatial dim."
        )
    return convolution.weight.dim() - 2


def first_convolution(model: nn.Module) -> _ConvNd | None:
    """Return the first convolution of a model, transposed ones included; None if it has none."""
    return next((module for module in model.modules() if isinstance(module, _ConvNd)), None)


def split_padding(length: int, multiple: int, pad: str | None) -> Span:
    """Return how many positions to pad before and after an axis to make it a multiple: half on each end, as in CARE."""
    missing = -length % multiple if pad is not None else 0
    return missing // 2, missing - missing // 2


def trace_volume(
    caller: str, model: nn.Module, batch: int, inputs: tuple[int, ...], size: tuple[int, ...], scale: Scale
) -> Trace:
    """Trace the network on the whole volume.

    Raises:
        ValueError: If the network does not take its size; the text has sizes that it takes if the strides are why.
    """
    try:
        trace_or_raise(caller, model, sum(inputs), size)
        return trace(caller, model, (batch, sum(inputs), *size), whole=True)
    except ValueError as error:
        refuse_axes(caller, model, inputs, size, error)
        if any(length % multiple for length, multiple in zip(size, scale.strides, strict=True)):
            multiples = " × ".join(map(str, scale.strides))
            raise ValueError(f'{error}\n  fix: a size that {multiples} divides, or pad="reflect".') from error
        raise


def refuse_axes(
    caller: str, model: nn.Module, inputs: tuple[int, ...], size: tuple[int, ...], error: ValueError
) -> None:
    """Raise ValueError for a volume whose channels or spatial dims are not those of the first convolution.

    Of several inputs it is not known which the convolution takes; their channels are added to the text.
    """
    convolution = first_convolution(model)
    if convolution is None:
        return
    expected = convolution.weight.dim() - 2
    if expected != len(size):
        raise ValueError(
            f"{caller}: tile has {len(size)} numbers, and the first convolution of {type(model).__name__} takes "
            f"{expected} spatial dims.\n  fix: tile with {expected} numbers, or one number."
        ) from error
    if len(inputs) > 1:
        listed = ", ".join(map(str, inputs))
        raise ValueError(
            f"{error}\n  fix: volumes with the channels that the network takes, in the order of its arguments; these "
            f"have {listed}."
        ) from error
    if convolution.in_channels != inputs[0]:
        raise ValueError(
            f"{error}\n  fix: a volume of {convolution.in_channels} channels; (*size) is one channel, and in "
            f"(channels, *size) this one has {inputs[0]} channels of size {size}."
        ) from error
