"""Layers that need the whole grid beside attention: refused by name, as tiles would not give what the whole gives."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.modules.pooling import _AdaptiveAvgPoolNd, _AdaptiveMaxPoolNd

from farfield.nn import SqueezeExcite


class NotLocalError(ValueError):
    """A layer that is no attention needs more of the grid than a tile has."""


def always(module: nn.Module) -> bool:
    """Whatever its options."""
    return True


def by_its_own_statistics(module: nn.Module) -> bool:
    """Whether a norm reads mean and variance off the grid, in eval mode too."""
    return getattr(module, "running_mean", None) is None


def around_the_border(module: nn.Module) -> bool:
    """Whether a convolution continues a side at its other end."""
    return getattr(module, "padding_mode", "") == "circular"


def by_corners(module: nn.Module) -> bool:
    """Whether where a position is read depends on the sides."""
    return bool(getattr(module, "align_corners", None))


BATCH_NORM = "batch norm with running statistics"
# Kind -> when it is global, what it does with the whole grid, what does not.
GLOBAL: dict[type[nn.Module], tuple[Callable[[nn.Module], bool], str, str]] = {
    nn.GroupNorm: (always, "norms by the statistics of the whole grid", BATCH_NORM),
    _InstanceNorm: (by_its_own_statistics, "norms by the statistics of the whole grid", BATCH_NORM),
    _BatchNorm: (by_its_own_statistics, "norms by the statistics of the whole grid", BATCH_NORM),
    SqueezeExcite: (always, "reads the means of the whole grid", 'GridAttention, "siamese_local" for example'),
    _AdaptiveAvgPoolNd: (always, "pools windows that depend on the sides", "pooling by a fixed window"),
    _AdaptiveMaxPoolNd: (always, "pools windows that depend on the sides", "pooling by a fixed window"),
    nn.Upsample: (by_corners, "has align_corners=True, so that positions shift with the sides", "align_corners=False"),
    nn.MultiheadAttention: (always, "attends to all positions", "GridAttention"),
    _ConvNd: (around_the_border, "pads each side by its other end", 'another padding_mode, "zeros" for example'),
}


def refuse_training(model: nn.Module) -> None:
    """Refuse a model in training: norms would move, dropout would drop."""
    found = [(path, module) for path, module in model.named_modules() if module.training]
    found.sort(key=lambda each: not isinstance(each[1], _BatchNorm))
    for path, module in found[:1]:
        raise ValueError(f"predict_whole: {named(path, module)} is in training; fix: model.eval().")


def refuse_global(model: nn.Module) -> None:
    """Refuse layers of known kinds that need the whole grid, whatever the tiles."""
    for path, module in model.named_modules():
        for kind, (is_global, what, instead) in GLOBAL.items():
            if isinstance(module, kind) and is_global(module):
                raise NotLocalError(
                    f"predict_whole: {named(path, module)} {what}, which no tile has; fix: {instead} in its place, or "
                    f"model(volume) where the volume fits in memory."
                )


def named(path: str, module: nn.Module) -> str:
    """A module by kind and path."""
    return f'{type(module).__name__} at "{path}"' if path else type(module).__name__
