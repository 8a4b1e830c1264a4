"""The initial weights of modules, also where another library initializes them."""

from __future__ import annotations

import math
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


def draw_learned(name: str, parameter: Tensor, heads: int = 1) -> None:
    """Draw what an operator learns, by its name in `Operator.parameter_shapes`, for so many heads of a vector."""
    if name == "weight":  # Glorot uniform: one projection from c/heads channels to 1 per head
        bound = math.sqrt(6 / (1 + len(parameter) // heads))
        nn.init.uniform_(parameter, -bound, bound)
    elif name == "latents":  # scores vary as the channels of a key do
        nn.init.normal_(parameter, std=parameter.shape[2] ** -0.5)
    # Maps are the identity, unless transformers has loaded them.
    elif not getattr(parameter, "_is_hf_initialized", False):
        with torch.no_grad():
            parameter.copy_(torch.eye(parameter.shape[1]))


def draw(layer: nn.Linear | _ConvNd) -> None:
    """Draw a projection's weight as Glorot uniform, so that it keeps the scale of its input; set the bias to 0."""
    nn.init.xavier_uniform_(layer.weight)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
