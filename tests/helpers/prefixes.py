"""Causal attention in float64, one query and its prefix at a time, written from the formulas of the operators."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

ROWS = ("factorized", "averaged", "linear_relu", "linear_elu", "hedgehog", "inline", "mala")


def row_of(row: str, q: Tensor, k: Tensor, w: Tensor) -> Tensor:
    """What one query `(d,)` multiplies each value with, for keys `(n, d)` that count `w` `(n,)` times: `(n,)`."""
    s, total = len(q) ** -0.5, w.sum()
    total = total if total > 0 else total + 1
    if row == "factorized":
        return w * (k @ q) / len(q)
    if row == "averaged":
        return w * (k @ q) / total
    if row == "inline":
        products = s * (k @ q) / total
        return w * (products - (w * products).sum() / total + 1 / total)
    features = {
        "linear_relu": lambda x: x.relu(),
        "hedgehog": lambda x: torch.cat([x.softmax(-1), (-x).softmax(-1)], -1),
    }.get(row, lambda x: F.elu(x) + 1)
    products = features(k) @ features(q)
    if row == "mala":
        z = s * (w * products).sum() / total
        return w * ((1 + 1 / (z + 1e-6)) * s * products - z) / total
    sums = (w * products).sum() + (1e-6 if row == "linear_relu" else 0)
    return w * products / (sums if sums > 0 else sums + 1)


def loops(row: str, query: Tensor, key: Tensor, value: Tensor, heads: int = 1, weight: Tensor | None = None) -> Tensor:
    """The responses `(b, p, t)`, in float64."""
    weight = torch.ones_like(key[:, 0]) if weight is None else weight
    samples = []
    for q, k, v, w in zip(query, key, value, weight, strict=True):
        parts = []
        for each in zip(*(x.unflatten(0, (heads, -1)) for x in (q, k, v)), strict=True):
            qh, kh, vh = (x.T for x in each)
            up_to = range(1, len(qh) + 1)
            parts.append(torch.stack([row_of(row, qh[n - 1], kh[:n], w[:n]) @ vh[:n] for n in up_to], 1))
        samples.append(torch.cat(parts))
    return torch.stack(samples)
