"""The library on one screen: every operator is a basis, coefficients, and which positions answer and ask.

    response_i = Σ_r coefficients_r(q_i) · (Σ_j basis_r(k_j) v_j) / per_r

A row of one's own is two functions at module level and an `Operator`; masks, tiles, folded projections, norms and maps
come with it. Shapes: keys `(b, h, d, n)`, queries `(b, h, d, m)`, slots `r`, valid positions `(b, 1, 1, n)`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from farfield.ops.grid import ALL, AXES, NORMALIZED_AXES, POOLED, Positions
from farfield.ops.slots import Summary


# ---- basis(key, valid) -> weight (b, h, r, n) of each answering position in each slot, and its exponents' peak ------------
def keys(key: Tensor, valid: Tensor) -> tuple[Tensor, None]:
    """SAN 2, FA 3: each key channel is a slot."""
    return key, None


def exponentials(key: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
    """FA 4: a softmax over positions, without its division, relative to a peak that cancels in it."""
    key = key.masked_fill(valid == 0, -torch.inf)
    # Of a slot without a valid position the least finite number: -inf less -inf would be NaN.
    peak = key.detach().amax(-1, keepdim=True).clamp_min(torch.finfo(key.dtype).min)  # (b, h, r, 1)
    return torch.exp(key - peak), peak


def one(score: Tensor, valid: Tensor) -> tuple[Tensor, None]:
    """SAN 5, the local term: every position weighs the same."""
    return torch.ones_like(score), None


def one_and_key(score: Tensor, valid: Tensor) -> tuple[Tensor, None]:
    """SAN 5: with scores for keys, Σ_j v_j and Σ_j v_j (k_jᵀ w)."""
    return torch.cat([torch.ones_like(score), score], 2), None


# ---- coefficients(query, summary) -> (b, h, r, m): how an asking position combines the slots -----------------------------
def queries(query: Tensor, summary: Summary) -> Tensor:
    """SAN 2, FA 3."""
    return query


def softmax_over_channels(query: Tensor, summary: Summary) -> Tensor:
    """FA 4."""
    return query.softmax(2)


def query_and_one(score: Tensor, summary: Summary) -> Tensor:
    """SAN 5: with scores for queries, v̄ (q_iᵀ w) and the global term once."""
    return torch.cat([score, torch.ones_like(score)], 2)


def products(query: Tensor, summary: Summary) -> Tensor:
    """FA 6: the coefficient matrix E = KᵀQ."""
    return cast(Tensor, summary.keys).to(query.dtype) @ query


def softmax_of_products(query: Tensor, summary: Summary) -> Tensor:
    """KAN 1: softmax of KᵀQ over the slots in which a valid position is; `respond` never calls it but fuses it."""
    valid = summary.weights > 0  # (b, 1, r, 1)
    means = summary._replace(keys=cast(Tensor, summary.keys) / weight(query, summary))
    hidden = ~valid & valid.any(2, keepdim=True)  # of a sample with no valid slot none, or its softmax would be NaN
    return torch.where(valid, products(query, means).masked_fill(hidden, -torch.inf).softmax(2), 0)


# ---- per(query, summary): what a slot's sum is divided by ------------------------------------------------------------
def weight(query: Tensor, summary: Summary) -> Tensor:
    """The slot's weight: a weighted mean of its positions; 1 of a slot without weight, which stays in any dtype's range."""
    return torch.where(summary.weights == 0, 1, summary.weights)


def position(query: Tensor, summary: Summary) -> Tensor:
    """The number of valid positions."""
    return summary.count.clamp_min(1)


def channel(query: Tensor, summary: Summary) -> int:
    """The number of channels a head."""
    return query.shape[2]


# ---- the table -------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True)
class Operator:
    """response_i = Σ_r coefficients_r(q_i) · (Σ_j basis_r(k_j) v_j) / per_r

    Attributes:
        coefficients: How an asking position combines the slots.
        basis: What weight each answering position has in each slot; None if each position is a slot of its own.
        per: What a slot's sum is divided by: its weight, the number of positions, the number of channels.
        keys_from: Which positions answer: ALL, POOLED or AXES.
        queries_from: Which positions ask: ALL, AXES or NORMALIZED_AXES.
        score: Whether queries and keys are read through one vector a head first (SAN 4): "learned", "ones" or None.
        reads_keys: Whether the basis depends on the keys; if not, there is nothing to project them for.
    """

    coefficients: Callable[[Tensor, Summary], Tensor]
    basis: Callable[[Tensor, Tensor], tuple[Tensor, Tensor | None]] | None = None
    per: Callable[[Tensor, Summary], Tensor | int] = weight
    keys_from: Positions = ALL
    queries_from: Positions = ALL
    score: str | None = None
    reads_keys: bool = True

    def projections(self, letters: str) -> str:
        """Which of the projections, letters of "qkvo", it has: none of keys that are not read."""
        return letters if self.reads_keys else letters.replace("k", "")

    @property
    def merges_by_adding(self) -> bool:
        """Whether the slots of tiles add up; else each position is a slot, and they stand side by side."""
        return self.basis is not None or not self.keys_from.side_by_side

    @property
    def has_scale(self) -> bool:
        """Whether coefficients are a softmax of products, which a scale multiplies."""
        return self.coefficients is softmax_of_products

    @property
    def averages(self) -> bool:
        """Whether coefficients are a softmax, so that a response is no larger than the values, times what norms do."""
        return self.coefficients in (softmax_of_products, softmax_over_channels)

    @property
    def weighs_by_products(self) -> bool:
        """Whether values weigh by products of keys and queries: positions rotated into both count as distances."""
        products_of_slots = self.basis is keys and self.coefficients is queries
        return products_of_slots or self.coefficients in (products, softmax_of_products)


OPERATORS = {
    "softmax": Operator(coefficients=softmax_of_products),
    "softmax_pooled": Operator(coefficients=softmax_of_products, keys_from=POOLED),
    "kronecker_kv": Operator(coefficients=softmax_of_products, keys_from=AXES),
    "kronecker_qkv": Operator(coefficients=softmax_of_products, keys_from=AXES, queries_from=NORMALIZED_AXES),
    "kronecker_qkv_literal": Operator(coefficients=softmax_of_products, keys_from=AXES, queries_from=AXES),
    "dot": Operator(coefficients=products, per=channel),
    "factorized": Operator(coefficients=queries, basis=keys, per=channel),
    "averaged": Operator(coefficients=queries, basis=keys, per=position),
    "factorized_gaussian": Operator(coefficients=softmax_over_channels, basis=exponentials, per=weight),
    "siamese": Operator(coefficients=query_and_one, basis=one_and_key, per=position, score="learned"),
    "siamese_local": Operator(coefficients=queries, basis=one, per=position, score="learned", reads_keys=False),
    "siamese_ones": Operator(coefficients=query_and_one, basis=one_and_key, per=position, score="ones"),
}
