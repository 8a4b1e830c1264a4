"""The initial weights of modules, also where another library initializes them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd


class DrawnByItself:
    """The attribute `_is_hf_initialized` of a module whose parameters transformers must not draw in its own way."""

    # A model of transformers initializes each module in it, children first, that has this attribute not set: linear
    # layers by its own distribution, modules that it does not know not at all, although the memory of parameters that
    # were in no file is not even zero. Then its functions stand in `torch.nn.init`, which skip what was loaded, so that
    # `reset_parameters` draws the rest. Not a property, so that transformers can set it.
    def __get__(self, module: Any, _: object) -> bool:
        if module is None or nn.init.zeros_.__module__ != "transformers.initialization":
            return False
        module.reset_parameters()
        vars(module)["_is_hf_initialized"] = True
        return True


def set_identity(matrices: Tensor) -> None:
    """Set matrices `(h, d, d)` to the identity, unless transformers has loaded them."""
    if not getattr(matrices, "_is_hf_initialized", False):
        with torch.no_grad():
            matrices.copy_(torch.eye(matrices.shape[1]))


def draw(layer: nn.Linear | _ConvNd) -> None:
    """Draw a projection's weight as Glorot uniform, so that it keeps the scale of its input; set the bias to 0."""
    nn.init.xavier_uniform_(layer.weight)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
