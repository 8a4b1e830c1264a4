"""The implied attention matrix of every operator in float64 torch: a second independent form, for gradients and norms.

`matrix(operator, …)` is A `(batch, heads, queries, keys)` and a response is A·V. It is checked against the loops of
`reference.py`, and its autograd against central differences of those loops; the library is then checked against both.
A mask of keys may hold their weights, 0 where one is masked.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

Normalize = Callable[[Tensor, Tensor], Tensor]

# Operators whose queries are axis means.
MEAN_ROWS = ("kronecker_qkv", "kronecker_qkv_literal")
# Operators that put a softmax on the coefficient matrix E = KᵀQ.
SOFTMAX_ROWS = ("softmax", "softmax_pooled", "kronecker_kv", *MEAN_ROWS)
AXIS_ROWS = ("kronecker_kv", *MEAN_ROWS)
WEIGHT_ROWS = ("siamese", "siamese_local")
# What operators learn beside projections.
LEARNED = ("weight", "latents", "query_map", "key_map")
# Operators that divide products of features by their sum: the features, and what is added to the sum.
QUOTIENTS: dict[str, tuple[Callable[[Tensor], Tensor], float]] = {
    "linear_relu": (torch.relu, 1e-6),
    # elu + 1, without the cancellation of a small exponential.
    "linear_elu": (lambda x: torch.where(x > 0, x + 1, torch.where(x > 0, 0, x).exp()), 0.0),
    "hedgehog": (lambda x: torch.cat([x.softmax(2), (-x).softmax(2)], 2), 0.0),
}


class Axes(NamedTuple):
    """Axis means as matrices: `means` (b, n, Σ size), `spread` (n, Σ size) of 0 and 1, `share` (b, Σ size)."""

    means: Tensor
    spread: Tensor
    share: Tensor  # what an index counts for: the mean weight of its valid positions, 0 without one

    @property
    def present(self) -> Tensor:
        return self.share > 0


def axes(size: tuple[int, ...], mask: Tensor) -> Axes:
    """The averaging matrix (KAN Eq. 14–15), the spreading matrix (KAN Eq. 18), which indices have a valid position."""
    positions = torch.stack(torch.meshgrid(*map(torch.arange, size), indexing="ij")).flatten(1)
    blocks = [positions[axis][:, None] == torch.arange(length) for axis, length in enumerate(size)]
    spread = torch.cat(blocks, dim=1).double()  # (n, Σ)
    weights = mask.flatten(1).double()[:, :, None] * spread  # (b, n, Σ)
    sums, counts = weights.sum(dim=1), (weights > 0).sum(dim=1)  # (b, Σ)
    return Axes(weights / torch.where(sums == 0, 1, sums)[:, None], spread, sums / counts.clamp(min=1))


def split(grid: Tensor, heads: int) -> Tensor:
    """A grid as `(batch, heads, channels per head, positions)`."""
    return grid.flatten(2).unflatten(1, (heads, -1))


def valid_positions(grid: Tensor, mask: Tensor | None) -> Tensor:
    """The mask, or all True."""
    return torch.ones(grid.shape[0], *grid.shape[2:], dtype=torch.bool) if mask is None else mask


def measure(mask: Tensor | None, weight: Tensor | None) -> Tensor | None:
    """The weights of positions, 0 where one is masked, which no gradient reaches; the mask if there are none."""
    if weight is None:
        return mask
    return torch.where(weight > 0 if mask is None else mask & (weight > 0), weight, 0)


def pool(grid: Tensor, mask: Tensor | None, width: int = 2, kind: str = "max") -> tuple[Tensor, Tensor]:
    """Windows of `width` per axis (ceil mode), reduced over their valid positions, and the mean weight of these."""
    valid = valid_positions(grid, mask)
    size = tuple(grid.shape[2:])
    positions = torch.stack(torch.meshgrid(*map(torch.arange, size), indexing="ij")).flatten(1)
    windows = [-(-length // width) for length in size]
    index = torch.zeros(math.prod(size), dtype=torch.long)
    for axis, count in enumerate(windows):
        index = index * count + positions[axis] // width
    shape = (*grid.shape[:2], math.prod(windows))
    weights = valid.flatten(1)[:, None].to(grid.dtype)
    hidden = weights == 0
    where = index.expand(*shape[:2], -1)
    zeros = torch.zeros(shape, dtype=grid.dtype)
    counts = zeros.scatter_add(2, where, (~hidden).to(grid.dtype).expand(*shape[:2], -1))
    totals = zeros.scatter_add(2, where, weights.expand(*shape[:2], -1))
    if kind == "mean":
        sums = zeros.scatter_add(2, where, grid.flatten(2).masked_fill(hidden, 0.0) * weights)
        out = sums / torch.where(totals == 0, 1, totals)
    else:
        least = grid.new_full(shape, -math.inf)
        out = least.scatter_reduce(2, where, grid.flatten(2).masked_fill(hidden, -math.inf), "amax")
        out = torch.where(counts > 0, out, 0.0)
    share = (totals / counts.clamp(min=1))[:, 0].unflatten(1, windows)
    return out.unflatten(2, windows), share > 0 if valid.dtype == torch.bool else share


def _softmax(scores: Tensor, weights: Tensor) -> Tensor:
    """Softmax over the last axis among positions of a weight; zeros where there is none. `weights` (b, 1, 1, n)."""
    valid = weights > 0
    some = valid.any(dim=-1, keepdim=True)
    masked = torch.where(valid | ~some, scores + torch.where(valid, weights, 1).double().log(), -math.inf)
    return torch.where(valid, masked.softmax(dim=-1), 0.0)


def _softmax_matrix(
    query: Tensor, key: Tensor, weights: Tensor, query_valid: Tensor, scale: float, normalize: Normalize | None
) -> Tensor:
    scores = scale * query.transpose(2, 3) @ key  # (b, h, m, n)
    if normalize is not None:
        scores = normalize(scores, query_valid[:, None, :, None] & (weights > 0)[:, None, None, :])
    return _softmax(scores, weights[:, None, None, :])


def matrix(
    operator: str,
    query: Tensor,
    key: Tensor,
    *,
    heads: int = 1,
    mask: Tensor | None = None,
    query_mask: Tensor | None = None,
    scale: float = 1.0,
    normalize: Normalize | None = None,
    **learned: Tensor,
) -> Tensor:
    """A of an operator, `(b, h, m, n)`; `normalize(E, pairs)` acts between E = scale · KᵀQ and the softmax."""
    key_grid_mask, query_grid_mask = valid_positions(key, mask), valid_positions(query, query_mask)
    query = query.masked_fill(~query_grid_mask[:, None], 0.0)
    q, k = split(query, heads), split(key, heads)  # (b, h, d, m), (b, h, d, n)
    key_valid, query_valid = key_grid_mask.flatten(1), query_grid_mask.flatten(1)
    keep = key_valid[:, None, None, :].double()
    count = keep.sum(dim=3, keepdim=True)
    count = torch.where(count == 0, 1, count)
    if operator == "softmax":
        return _softmax_matrix(q, k, key_valid, query_valid, scale, normalize)
    if operator in AXIS_ROWS:
        key_axes = axes(tuple(key.shape[2:]), key_grid_mask)
        means = k @ key_axes.means[:, None]  # (b, h, d, Σn)
        gather = key_axes.means[:, None].transpose(2, 3)  # (b, 1, Σn, n)
        if operator == "kronecker_kv":
            return _softmax_matrix(q, means, key_axes.share, query_valid, scale, normalize) @ gather
        query_axes = axes(tuple(query.shape[2:]), query_grid_mask)
        query_means = q @ query_axes.means[:, None]  # (b, h, d, Σm)
        inner = _softmax_matrix(query_means, means, key_axes.share, query_axes.present, scale, normalize)
        whole = query_axes.spread @ inner @ gather
        if operator == "kronecker_qkv_literal":
            return whole
        # KAN 13: the mean of all rows, which the outer sum of n axes contains n times, is counted once.
        spatial_dims, ones = query.dim() - 2, query_valid[:, None, None].to(whole)
        return whole - (spatial_dims - 1) / spatial_dims * (ones @ whole) / ones.sum(dim=3, keepdim=True).clamp(min=1)
    if operator in ("dot", "factorized"):
        return q.transpose(2, 3) @ k / k.shape[2] * keep
    if operator == "averaged":
        return q.transpose(2, 3) @ k / count * keep
    if operator == "factorized_gaussian":
        return q.softmax(dim=2).transpose(2, 3) @ _softmax(k, key_valid[:, None, None, :])
    if operator == "flare":
        scores = [learned["latents"] @ each for each in (q, k)]  # (b, h, s, m), (b, h, s, n)
        return scores[0].softmax(dim=2).transpose(2, 3) @ _softmax(scores[1], key_valid[:, None, None, :])
    if operator in QUOTIENTS:
        features, epsilon = QUOTIENTS[operator]
        if "query_map" in learned:
            q, k = learned["query_map"] @ q, learned["key_map"] @ k
        products = features(q).transpose(2, 3) @ features(k) * keep
        total = products.sum(dim=3, keepdim=True) + epsilon
        return products / torch.where(total == 0, 1, total)
    if operator in ("inline", "mala"):
        features = QUOTIENTS["linear_elu"][0] if operator == "mala" else (lambda each: each)
        products = features(q).transpose(2, 3) @ features(k) / q.shape[2] ** 0.5 * keep / count
        z = products.sum(dim=3, keepdim=True)
        return (
            products * (1 + 1 / (z + 1e-6)) - z * keep / count
            if operator == "mala"
            else products + (1 - z) * keep / count
        )
    if operator not in ("siamese", "siamese_local", "siamese_ones"):
        raise LookupError(f"tests/helpers/explicit.py: matrix has no form of {operator}.")
    w = learned.get("weight", torch.ones(query.shape[1]).to(query)).view(heads, -1)
    local = torch.einsum("bhdm,hd->bhm", q, w)[..., None]
    if operator == "siamese_local":
        return local * keep / count
    return (local + torch.einsum("bhdn,hd->bhn", k, w)[:, :, None]) * keep / count


def attention(
    operator: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    heads: int = 1,
    mask: Tensor | None = None,
    query_mask: Tensor | None = None,
    scale: float = 1.0,
    normalize: Normalize | None = None,
    key_weight: Tensor | None = None,
    **learned: Tensor,
) -> Tensor:
    """A·V of an operator, on the query grid."""
    mask = measure(mask, key_weight)
    if operator == "softmax_pooled":
        (value, _), (key, mask), operator = pool(value, mask), pool(key, mask), "softmax"
    attending = matrix(
        operator,
        query,
        key,
        heads=heads,
        mask=mask,
        query_mask=query_mask,
        scale=scale,
        normalize=normalize,
        **learned,
    )
    response = attending @ split(value, heads).transpose(2, 3)  # (b, h, m, p)
    return response.transpose(2, 3).flatten(1, 2).unflatten(2, query.shape[2:])
