"""Refuse layers that need the whole grid and have no summary: tiles would not give the result of the whole."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd


class NotLocalError(ValueError):
    """A layer needs more of the grid than a tile has, and has no summary."""


def always(module: nn.Module) -> bool:
    """Return True: the layer is global with any options."""
    return True


def is_circular(module: nn.Module) -> bool:
    """Whether a convolution has circular padding."""
    return getattr(module, "padding_mode", "") == "circular"


def aligns_corners(module: nn.Module) -> bool:
    """Whether a layer has `align_corners=True`, so that its sampling positions depend on the grid's size."""
    return bool(getattr(module, "align_corners", None))


# Type -> function that returns whether a module of that type is global; what such a module does; what to use instead.
GLOBAL: dict[type[nn.Module], tuple[Callable[[nn.Module], bool], str, str]] = {
    nn.Upsample: (
        aligns_corners,
        "has align_corners=True, so that sampling positions depend on the grid's size",
        "align_corners=False",
    ),
    nn.MultiheadAttention: (always, "attends to all positions", "GridAttention"),
    _ConvNd: (is_circular, "has circular padding", 'another padding_mode, "zeros" for example'),
}


def refuse_training(caller: str, model: nn.Module) -> None:
    """Refuse a model in training mode: running statistics would change, and dropout would be active.

    Raises:
        ValueError: If any module is in training mode; the text names one, a batch norm if there is one.
    """
    training = [(path, module) for path, module in model.named_modules() if module.training]
    training.sort(key=lambda each: not isinstance(each[1], _BatchNorm))
    for path, module in training[:1]:
        raise ValueError(f"{caller}: {describe_module(path, module)} is in training; fix: model.eval().")


def refuse_global(caller: str, model: nn.Module) -> None:
    """Refuse a model with a layer of a known type that needs the whole grid, whatever the tiles.

    Raises:
        NotLocalError: If the model has such a layer; the text names the first.
    """
    for path, module in model.named_modules():
        for kind, (is_global, what, instead) in GLOBAL.items():
            if isinstance(module, kind) and is_global(module):
                raise NotLocalError(
                    f"{caller}: {describe_module(path, module)} {what}; tiles would not give the result of the "
                    f"whole; fix: {instead} in its place, or model(volume) where the volume fits in memory."
                )


def describe_module(path: str, module: nn.Module) -> str:
    """Return a module's type and path."""
    return f'{type(module).__name__} at "{path}"' if path else type(module).__name__
