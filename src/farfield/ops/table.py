"""The table of operators: a basis, coefficients, and where queries, keys and values come from.

    response_i = Σ_r coefficients_r(q_i) · (Σ_j basis_r(k_j) v_j) / per_r

A user's own operator is two functions (at module level, so that they can be pickled) and an `Operator`; masks, tiles,
folded projections, norms and attention maps work with it. Shapes: keys `(b, h, d, n)`, queries `(b, h, d, m)`, valid
`(b, 1, 1, n)`; r is the number of slots.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import cast

import torch
from torch import Tensor

from farfield._checks import unknown
from farfield._refusals import refusal
from farfield.ops.grid import ALL, AXES, NORMALIZED_AXES, POOLED, Positions
from farfield.ops.slots import Summary


# ---- basis(key, valid) -> weight (b, h, r, n) of each key in each slot, and the peak of its exponents or None ------
def keys(key: Tensor, valid: Tensor) -> tuple[Tensor, None]:
    """SAN 2, FA 3: each key channel is a slot."""
    return key, None


def exponentials(key: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
    """FA 4: the numerators of a softmax over positions; exponents are relative to a peak, which cancels later."""
    key = key.masked_fill(valid == 0, -torch.inf)
    # The least finite number for a slot without a valid position: -inf minus -inf would be NaN.
    peak = key.detach().amax(-1, keepdim=True).clamp_min(torch.finfo(key.dtype).min)  # (b, h, r, 1)
    return torch.exp(key - peak), peak


def one(score: Tensor, valid: Tensor) -> tuple[Tensor, None]:
    """SAN 5, the local term: every position has the same weight."""
    return torch.ones_like(score), None


def one_and_key(score: Tensor, valid: Tensor) -> tuple[Tensor, None]:
    """SAN 5: the keys are scores; the slots are Σ_j v_j and Σ_j v_j (k_jᵀ w)."""
    return torch.cat([torch.ones_like(score), score], 2), None


# ---- coefficients(query, summary) -> (b, h, r, m): how a query combines the slots ----------------------------------
def queries(query: Tensor, summary: Summary) -> Tensor:
    """SAN 2, FA 3: each query channel is the coefficient of one slot."""
    return query


def softmax_over_channels(query: Tensor, summary: Summary) -> Tensor:
    """FA 4: the softmax of each query over its channels."""
    return query.softmax(2)


def query_and_one(score: Tensor, summary: Summary) -> Tensor:
    """SAN 5: the queries are scores; the response is v̄ (q_iᵀ w) plus the global term once."""
    return torch.cat([score, torch.ones_like(score)], 2)


def products(query: Tensor, summary: Summary) -> Tensor:
    """FA 6: the coefficient matrix E = KᵀQ."""
    return cast(Tensor, summary.keys).to(query.dtype) @ query


def softmax_of_products(query: Tensor, summary: Summary) -> Tensor:
    """KAN 1: softmax of KᵀQ over slots that hold a valid position; `respond` computes the same without calling it."""
    valid = summary.weights > 0  # (b, 1, r, 1)
    means = summary._replace(keys=cast(Tensor, summary.keys) / weight(query, summary))
    hidden = ~valid & valid.any(2, keepdim=True)  # nothing is hidden in a sample without valid slots: no NaN
    return torch.where(valid, products(query, means).masked_fill(hidden, -torch.inf).softmax(2), 0)


# ---- per(query, summary): the divisor of a slot's sum ----------------------------------------------------------------
def weight(query: Tensor, summary: Summary) -> Tensor:
    """The slot's weight, by which its sum becomes a weighted mean; 1 for a slot of weight 0."""
    return torch.where(summary.weights == 0, 1, summary.weights)


def position(query: Tensor, summary: Summary) -> Tensor:
    """The number of valid positions, at least 1."""
    return summary.count.clamp_min(1)


def channel(query: Tensor, summary: Summary) -> int:
    """The number of channels per head."""
    return query.shape[2]


# ---- the table -------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True)
class Operator:
    """response_i = Σ_r coefficients_r(q_i) · (Σ_j basis_r(k_j) v_j) / per_r

    Attributes:
        coefficients: `(query, summary) -> (b, h, r, m)`, how a query combines the slots.
        basis: `(key, valid) -> ((b, h, r, n), peak or None)`, the weight of each key in each slot; None if each key is
            a slot of its own.
        per: The divisor of a slot's sum: its weight, the number of positions or the number of channels.
        keys_from: Where keys and values come from: ALL, AXES, POOLED or another `pooled(…)`.
        queries_from: Where queries come from: ALL, AXES or NORMALIZED_AXES.
        score: The vector, one per head, by which queries and keys are first reduced to scores (SAN 4): "learned" or
            "ones"; None if they are not.
        reads_keys: Whether the basis depends on the keys; if not, keys are not projected.
    """

    coefficients: Callable[[Tensor, Summary], Tensor]
    basis: Callable[[Tensor, Tensor], tuple[Tensor, Tensor | None]] | None = None
    per: Callable[[Tensor, Summary], Tensor | int] = weight
    keys_from: Positions = ALL
    queries_from: Positions = ALL
    score: str | None = None
    reads_keys: bool = True

    def projections(self, letters: str) -> str:
        """Return the `letters` (of "qkvo") of projections that the operator has: all but "k" if keys are not read."""
        return letters if self.reads_keys else letters.replace("k", "")

    @property
    def merges_by_adding(self) -> bool:
        """Whether the slots of tiles are added; if not, each position is a slot, and slots are concatenated."""
        return self.basis is not None or not self.keys_from.side_by_side

    @property
    def has_scale(self) -> bool:
        """Whether coefficients are a softmax of products, so that the products have a scale."""
        return self.coefficients is softmax_of_products

    @property
    def averages(self) -> bool:
        """Whether coefficients are a softmax, so that without a norm a response is no larger than the values."""
        return self.coefficients in (softmax_of_products, softmax_over_channels)

    @property
    def weighs_by_products(self) -> bool:
        """Whether the weights of values depend on products of keys and queries, as rotary position embeddings need."""
        return self.has_orders or self.coefficients in (products, softmax_of_products)

    @cached_property
    def has_orders(self) -> bool:
        """Whether the products of keys, queries and values can be taken in either order."""
        return self.basis is keys and self.coefficients is queries

    def in_quadratic_order(self) -> Operator:
        """Return the operator with the same responses and products V (KᵀQ), for one that `has_orders` (FA Eq. 6)."""
        return replace(self, basis=None, coefficients=products)


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


def look_up_operator(operator: object) -> tuple[str, Operator]:
    """Return the name of an operator, "custom" for a user's own, and the operator; refuse what is no operator."""
    if isinstance(operator, Operator):
        return find_name(operator) or "custom", operator
    if not isinstance(operator, str):
        raise refusal(
            TypeError,
            f"operator must be a name or an ops.Operator, got {operator!r:.60}; "
            f'fix: operator="factorized_gaussian", for example, and other arguments by their names.',
        )
    if operator not in OPERATORS:
        raise unknown("operator", operator, OPERATORS)
    return operator, OPERATORS[operator]


def find_name(operator: Operator) -> str | None:
    """Return the name in OPERATORS of an equal operator, or None for a user's own."""
    return next((name for name, entry in OPERATORS.items() if entry == operator), None)
