"""Projections of the channels of a grid to queries, keys, values and outputs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from farfield.ops.bare import is_bare, is_unchanged
from farfield.ops.grid import accumulation


class Projection(NamedTuple):
    """A linear map of channels; the identity if it has no matrix.

    Attributes:
        matrix: `(out, in)`; `out` holds the channels of all heads in order.
        bias: `(out,)`.
    """

    matrix: Tensor | None = None
    bias: Tensor | None = None

    def by_head(self, heads: int) -> Tensor:
        """Split the matrix by the output channels of each head: `(h, out/h, in)`."""
        return self.matrix.unflatten(0, (heads, -1))  # type: ignore[union-attr]  # never called on the identity


IDENTITY = Projection()
Run = Callable[[Tensor], Tensor]  # positions (b, in, n) -> (b, out, n)


class ProjectionRuns(NamedTuple):
    """The projections that run on positions, since no matrix defines them; None for the others."""

    query: Run | None = None
    key: Run | None = None
    value: Run | None = None
    output: Run | None = None


NO_RUNS = ProjectionRuns()


def read_projection(module: nn.Module | None, like: Tensor) -> tuple[Projection, Run | None]:
    """Return a projection as a matrix and bias, which can act on a summary, or a function that runs it on positions.

    The matrix and bias are the weight and bias of a bare `nn.Linear`, and the identity for None. Any other affine
    module m (LoRA, parametrized) runs once on unit vectors: bias = m(0), matrix = (m(I) - m(0))ᵀ. That m is affine is
    not checked. Where m has hooks, patched methods, weights of a tensor subclass or active dropout, it runs on the
    positions: hooks then see those and their gradients, and dropout is drawn for each of them.

    Args:
        module: An affine module with `in_features`, or None.
        like: A grid; the matrix and bias of a module that is run have its dtype and device.
    """
    if module is None:
        return IDENTITY, None
    if is_bare(module, nn.Linear):
        return Projection(module.weight, module.bias), None
    if not all(is_unchanged(part) and not drops(part) for part in module.modules()):
        return IDENTITY, partial(run_on_positions, module, like.dtype)
    parameter = next(module.parameters(), None)
    dtype = parameter.dtype if parameter is not None and parameter.is_floating_point() else accumulation(like.dtype)
    width = cast(int, module.in_features)
    outputs = module(torch.eye(width + 1, width, dtype=dtype, device=like.device))  # the last row is 0
    return Projection((outputs[:-1] - outputs[-1]).mT.to(like.dtype), outputs[-1].to(like.dtype)), None


def run_on_positions(module: nn.Module, dtype: torch.dtype, positions: Tensor) -> Tensor:
    """Run a module of channels-last inputs on positions `(b, in, n)`, in the dtype of the grid."""
    return cast(Tensor, module(positions.mT.to(dtype)).mT)


def drops(module: nn.Module) -> bool:
    """Whether a module is a dropout that draws at each call."""
    return isinstance(module, nn.modules.dropout._DropoutNd) and module.training and module.p > 0


def is_biased(module: nn.Module | None) -> bool:
    """Whether a module adds a bias; assumed for a module that is not a bare `nn.Linear`."""
    return module is not None and not (is_bare(module, nn.Linear) and module.bias is None)


def project_to_scores(projection: Projection, vector: Tensor, heads: int) -> Projection:
    """Compose a projection with the scores by a vector, one score per head: wᵀ(Wx + b) = (wᵀW)x + wᵀb."""
    scores, (matrix, bias) = score_matrix(vector, heads), projection
    if matrix is None:
        return Projection(scores)
    return Projection(scores @ matrix.to(scores.dtype), None if bias is None else scores @ bias.to(scores.dtype))


def score_matrix(vector: Tensor, heads: int) -> Tensor:
    """Return the matrix `(heads, c)` of one score per head, from a vector `(c,)` of c/heads numbers per head."""
    if heads == 1:
        return vector[None]
    return (torch.eye(heads, dtype=vector.dtype, device=vector.device)[:, :, None] * vector.view(heads, -1)).flatten(1)


def split_heads(positions: Tensor, heads: int) -> Tensor:
    """View `(b, c, n)` as `(b, h, c/h, n)`."""
    return positions[:, None] if heads == 1 else positions.unflatten(1, (heads, -1))


def project(positions: Tensor, projection: Projection) -> Tensor:
    """Project positions `(b, in, n)` to `(b, out, n)`; the identity returns them unchanged."""
    matrix, bias = projection
    if matrix is None:
        return positions
    matrix = matrix.to(positions.dtype).expand(positions.shape[0], -1, -1)  # sums over half precision are float32
    if bias is None:
        return torch.bmm(matrix, positions)
    return torch.baddbmm(bias[:, None].to(positions.dtype), matrix, positions)
