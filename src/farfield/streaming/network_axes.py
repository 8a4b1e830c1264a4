"""What a network takes: spatial dims, channels, dtype and device; and that it is in eval mode."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

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


def refuse_training(caller: str, model: nn.Module) -> None:
    """Refuse a model in training mode: running statistics would change, and dropout would be active.

    Raises:
        ValueError: If any module is in training mode; the text names one, a batch norm if there is one.
    """
    training = [(path, module) for path, module in model.named_modules() if module.training]
    training.sort(key=lambda each: not isinstance(each[1], _BatchNorm))
    for path, module in training[:1]:
        raise ValueError(f"{caller}: {describe_module(path, module)} is in training; fix: model.eval().")


def describe_module(path: str, module: nn.Module) -> str:
    """Return a module's type and path."""
    return f'{type(module).__name__} at "{path}"' if path else type(module).__name__


def dtype_of(model: nn.Module) -> torch.dtype:
    """Return the dtype of a model's input: that of its first floating-point parameter or buffer."""
    state = [*model.parameters(), *model.buffers()]
    return next((tensor.dtype for tensor in state if tensor.is_floating_point()), torch.get_default_dtype())


def device_of(model: nn.Module) -> torch.device:
    """Return the device of a model's first parameter or buffer; the CPU if it has none."""
    return next((tensor.device for tensor in [*model.parameters(), *model.buffers()]), torch.device("cpu"))
