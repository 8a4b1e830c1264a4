"""Linear maps of the channels of a grid: how its positions are projected to queries, keys, values and outputs."""

from __future__ import annotations

from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from farfield.ops.grid import accumulation


class Projection(NamedTuple):
    """A linear map of channels; the identity, if it has no matrix.

    Attributes:
        matrix: `(out, in)`; `out` are the heads' channels side by side.
        bias: `(out,)`.
    """

    matrix: Tensor | None = None
    bias: Tensor | None = None

    def by_head(self, heads: int) -> Tensor:
        """The matrix of each head's output channels, `(h, out/h, in)`."""
        return self.matrix.unflatten(0, (heads, -1))  # type: ignore[union-attr]  # asked of maps alone


IDENTITY = Projection()


def read_projection(module: nn.Module | None, like: Tensor) -> Projection:
    """The linear map of any affine module, so that it can act on a summary; the identity for None.

    It is the weight of a bare `nn.Linear`; any other module (LoRA, quantized, hooked) runs once on unit vectors:
    bias = m(0), matrix = (m(I) - m(0))ᵀ.

    Args:
        module: Has `in_features`.
        like: A grid of the dtype and on the device that the matrix of such a module is to have.
    """
    if module is None:
        return IDENTITY
    if is_plain(module):
        return Projection(cast(Tensor, module.weight), cast(Tensor | None, module.bias))
    parameter = next(module.parameters(), None)
    dtype = parameter.dtype if parameter is not None and parameter.is_floating_point() else accumulation(like.dtype)
    width = cast(int, module.in_features)
    outputs = module(torch.eye(width + 1, width, dtype=dtype, device=like.device))  # the last row is 0
    return Projection((outputs[:-1] - outputs[-1]).mT.to(like.dtype), outputs[-1].to(like.dtype))


def is_plain(module: nn.Module) -> bool:
    """Whether a module is nothing but its weight and bias."""
    return type(module) is nn.Linear and not (module._forward_hooks or module._forward_pre_hooks)


def is_biased(module: nn.Module | None) -> bool:
    """Whether a module adds something; of one that is more than a weight and a bias one cannot know."""
    return module is not None and not (is_plain(module) and module.bias is None)


def project_to_scores(projection: Projection, vector: Tensor, heads: int) -> Projection:
    """A projection, and after it a vector's scores, one a head: wᵀ(Wx + b) = (wᵀW)x + wᵀb."""
    scores, (matrix, bias) = score_matrix(vector, heads), projection
    if matrix is None:
        return Projection(scores)
    return Projection(scores @ matrix.to(scores.dtype), None if bias is None else scores @ bias.to(scores.dtype))


def score_matrix(vector: Tensor, heads: int) -> Tensor:
    """A vector `(c,)`, c/heads numbers a head, as a map to one score a head, `(heads, c)`."""
    if heads == 1:
        return vector[None]
    return (torch.eye(heads, dtype=vector.dtype, device=vector.device)[:, :, None] * vector.view(heads, -1)).flatten(1)


def split_heads(positions: Tensor, heads: int) -> Tensor:
    """`(b, c, n)` to `(b, h, c/h, n)`, by view."""
    return positions[:, None] if heads == 1 else positions.unflatten(1, (heads, -1))


def project(positions: Tensor, projection: Projection) -> Tensor:
    """`(b, out, n)`: positions `(b, in, n)` through a map, or as they are."""
    matrix, bias = projection
    if matrix is None:
        return positions
    # Expanded, or matmul would fold samples and positions into one dimension, by a copy of them.
    matrix = matrix.to(positions.dtype).expand(positions.shape[0], -1, -1)  # sums of half precision are float32
    return matrix @ positions if bias is None else torch.baddbmm(bias[:, None].to(positions.dtype), matrix, positions)
