"""Linear maps as matrices: what a module of any kind does to a grid's channels, so that it can act on a summary."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from farfield.ops.call import IDENTITY
from farfield.ops.grid import accumulation
from farfield.ops.projection import Projection, score_matrix


def projection(module: nn.Module | None, like: Tensor, vector: Tensor | None = None, heads: int = 1) -> Projection:
    """What a module does to channels, and after it a vector's scores, one a head; as far as there are any."""
    scores = None if vector is None else score_matrix(vector.to(like.dtype), heads)
    if module is None:
        return IDENTITY if scores is None else Projection(scores)
    matrix, bias = linear_map(module, like)
    if scores is None:
        return Projection(matrix, bias)
    # wᵀ(Wx + b) = (wᵀW)x + wᵀb: one row a head
    return Projection(scores @ matrix.to(scores.dtype), None if bias is None else scores @ bias.to(scores.dtype))


def is_plain(module: nn.Module) -> bool:
    """Whether a module is nothing but its weight and bias."""
    return type(module) is nn.Linear and not (module._forward_hooks or module._forward_pre_hooks)


def is_biased(module: nn.Module | None) -> bool:
    """Whether a map adds something; of a module that is more than a weight and a bias one cannot know."""
    return module is not None and not (is_plain(module) and module.bias is None)


def draw(layer: nn.Linear | nn.Conv2d) -> None:
    """Draw a projection: Glorot uniform, so that it keeps the size of what it reads, and a bias of 0."""
    nn.init.xavier_uniform_(layer.weight)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)


def linear_map(module: nn.Module, like: Tensor) -> tuple[Tensor, Tensor | None]:
    """Matrix `(out, in)` and bias `(out,)` of any affine module.

    Read off a bare `nn.Linear`; anything else (LoRA, quantized, hooked) is asked: bias = m(0), matrix = (m(I) - m(0))ᵀ.
    """
    if is_plain(module):
        linear = cast(nn.Linear, module)
        return linear.weight, linear.bias
    parameter = next(module.parameters(), None)
    dtype = parameter.dtype if parameter is not None and parameter.is_floating_point() else accumulation(like.dtype)
    width = cast(int, module.in_features)
    probe = torch.eye(width + 1, width, dtype=dtype, device=like.device)
    answers = module(probe)  # the last row asks with 0
    return (answers[:-1] - answers[-1]).mT.to(like.dtype), answers[-1].to(like.dtype)
