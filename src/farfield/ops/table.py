"""The table of operators: a basis, coefficients, and where queries, keys and values come from.

    response_i = Σ_r coefficients_r(q_i) · (Σ_j basis_r(k_j) v_j) / per_r

A user's own operator is two functions (at module level, so that they can be pickled) and an `Operator`; masks, tiles,
folded projections, norms and attention maps work with it. Shapes: keys `(b, h, d, n)`, queries `(b, h, d, m)`, valid
`(b, 1, 1, n)`; r is the number of slots.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
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


# ---- features φ(x) of queries and keys (b, h, d, n), and the basis that they are -------------------------------------
def identity(positions: Tensor) -> Tensor:
    """InLine: the channels themselves."""
    return positions


def relu(positions: Tensor) -> Tensor:
    """EfficientViT, Sana: the positive part."""
    return positions.relu()


def elu_plus_one(positions: Tensor) -> Tensor:
    """Katharopoulos et al.: elu(x) + 1, which is positive."""
    # elu is -1 where exp(x) is below eps, so that the sum would be 0; the gradient of `clamp_max` at 0 would be 0.
    return positions.masked_fill(positions > 0, 0).exp() + positions.relu()


def softmax_pair(positions: Tensor) -> Tensor:
    """Hedgehog: the softmax of the channels, and that of their negatives: twice as many."""
    return torch.cat([positions.softmax(2), (-positions).softmax(2)], 2)


@dataclass(frozen=True)
class Features:
    """The basis of linear attention: each feature φ of a key is a slot; with `one`, so is a 1, which sums the values.

    Attributes:
        map: φ, from `(b, h, d, n)` to `(b, h, r, n)`.
        one: Whether the last slot has the weight 1.
    """

    map: Callable[[Tensor], Tensor]
    one: bool = False

    def __call__(self, key: Tensor, valid: Tensor) -> tuple[Tensor, None]:
        """Return the weight of each key in each slot, `(b, h, r, n)`."""
        features = self.map(key)
        return torch.cat([features, torch.ones_like(features[:, :, :1])], 2) if self.one else features, None


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


@dataclass(frozen=True)
class Quotient:
    """Linear attention: φ(q)ᵀ Σ_j φ(k_j) v_j / (φ(q)ᵀ Σ_j φ(k_j) + ε); of a slot, which is a mean, the share in that.

    Attributes:
        map: φ, which is not negative.
        epsilon: ε, added to the divisor.
    """

    map: Callable[[Tensor], Tensor]
    epsilon: float = 0.0

    def __call__(self, query: Tensor, summary: Summary) -> Tensor:
        """Return the share of each slot, `(b, h, r, m)`."""
        weights = self.scaled(summary.weights)
        shares = self.map(query.to(weights.dtype)) * weights
        total = shares.sum(2, keepdim=True)
        return (shares / torch.where(total == 0, 1, total + self.epsilon)).to(query.dtype)

    def scaled(self, weights: Tensor) -> Tensor:
        """Return weights `(b, h, r, 1)` over the largest of their head, of which shares without an ε are the same."""
        if self.epsilon:
            return weights
        # Where features are small, so are the sums of them, and the product of the two is too small for a number.
        largest = weights.detach().amax((2, 3), keepdim=True)
        return weights / torch.where(largest == 0, 1, largest)


def centred(query: Tensor, summary: Summary) -> Tensor:
    """InLine: the weights q_iᵀk_j s/N less their mean over j, plus 1/N, with s = 1/√d: they sum to 1."""
    z = _products_with_means(identity, query, summary).sum(2, keepdim=True)
    return torch.cat([query.shape[2] ** -0.5 * query, 1 - z], 2).to(query.dtype)


def magnitude_aware(query: Tensor, summary: Summary) -> Tensor:
    """MALA: with z the sum of the weights φ(q_i)ᵀφ(k_j) s/N, these times 1 + 1/z, less z/N: they sum to 1."""
    shares = _products_with_means(elu_plus_one, query, summary)
    z = shares.sum(2, keepdim=True)
    # Slots are means and not sums over N, as 1/z would leave the range of half precision where keys are small.
    return torch.cat([(1 + 1 / (z + MALA_EPSILON)) * shares, -z], 2).to(query.dtype)


MALA_EPSILON = 1e-6


def _products_with_means(features: Callable[[Tensor], Tensor], query: Tensor, summary: Summary) -> Tensor:
    """Return φ(q) s times the mean of φ(k), channel by channel `(b, h, r, m)`, s = 1/√d; the last slot has none."""
    means = summary.weights[:, :, :-1] / summary.count.clamp_min(1)
    return query.shape[2] ** -0.5 * features(query.to(means.dtype)) * means


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
        score: What queries and keys are first multiplied with, head by head: to one score each, a "learned" vector or
            "ones" (SAN 4); "latents": `slots` learned vectors, to a score each, the same for queries and keys (FLARE);
            "maps": two learned square matrices (Hedgehog). None if they are not.
        slots: The number of latents; 0 for other operators.
        reads_keys: Whether the basis depends on the keys; if not, keys are not projected.
    """

    coefficients: Callable[[Tensor, Summary], Tensor]
    basis: Callable[[Tensor, Tensor], tuple[Tensor, Tensor | None]] | None = None
    per: Callable[[Tensor, Summary], Tensor | int] = weight
    keys_from: Positions = ALL
    queries_from: Positions = ALL
    score: str | None = None
    slots: int = 0
    reads_keys: bool = True

    def projections(self, letters: str) -> str:
        """Return the `letters` (of "qkvo") of projections that the operator has.

        All but "k" if keys are not read, and all but "q" if queries are made as keys are.
        """
        missing = "" if self.reads_keys else "k"
        return "".join(letter for letter in letters if letter not in ("q" if self.score == "latents" else missing))

    def parameter_shapes(self, channels: int, heads: int) -> dict[str, tuple[int, ...]]:
        """Return the shapes of what the operator learns, by name, for so many channels of queries and keys."""
        width = channels // heads
        shapes: dict[str, dict[str, tuple[int, ...]]] = {
            "learned": {"weight": (channels,)},
            "latents": {"latents": (heads, self.slots, width)},
            "maps": {"query_map": (heads, width, width), "key_map": (heads, width, width)},
        }
        return shapes.get(self.score or "", {})

    def head_matrices(self, learned: Mapping[str, Tensor], heads: int) -> tuple[Tensor, Tensor]:
        """Return the matrices `(h, r, d)` that queries and keys are multiplied with, from what the operator learns."""
        if self.score == "maps":
            return learned["query_map"], learned["key_map"]
        matrices = learned["latents"] if self.score == "latents" else learned["weight"].view(heads, 1, -1)
        return matrices, matrices

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
        """Whether coefficients sum to 1 and are not negative, so that a response is no larger than the values."""
        softmax = self.coefficients in (softmax_of_products, softmax_over_channels)
        return softmax or isinstance(self.coefficients, Quotient)

    @property
    def weighs_by_products(self) -> bool:
        """Whether the weights of values depend on products of keys and queries, as rotary position embeddings need."""
        in_one_order = self.coefficients in (products, softmax_of_products, centred)
        return in_one_order or (self.basis is keys and self.coefficients is queries)

    @cached_property
    def has_orders(self) -> bool:
        """Whether the products of keys, queries and values can be taken in either order, as slots share a divisor."""
        return self.basis is keys and self.coefficients is queries and self.per in (position, channel)

    def in_quadratic_order(self) -> Operator:
        """Return the operator with the same responses and products V (KᵀQ), for one that `has_orders` (FA Eq. 6)."""
        return replace(self, basis=None, coefficients=products)

    def in_linear_order(self) -> Operator:
        """Return the operator with the same responses and a small summary: (V Kᵀ) Q in place of V (KᵀQ)."""
        quadratic = self.basis is None and self.coefficients is products
        return replace(self, basis=keys, coefficients=queries) if quadratic else self


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
    "flare": Operator(coefficients=softmax_over_channels, basis=exponentials, score="latents", slots=64),
    "linear_relu": Operator(coefficients=Quotient(relu, epsilon=1e-6), basis=Features(relu)),
    "linear_elu": Operator(coefficients=Quotient(elu_plus_one), basis=Features(elu_plus_one)),
    "hedgehog": Operator(coefficients=Quotient(softmax_pair), basis=Features(softmax_pair), score="maps"),
    "inline": Operator(coefficients=centred, basis=Features(identity, one=True), per=position),
    "mala": Operator(coefficients=magnitude_aware, basis=Features(elu_plus_one, one=True)),
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
    # Any number of latents is the same operator.
    return next(
        (name for name, entry in OPERATORS.items() if entry in (operator, replace(operator, slots=entry.slots))), None
    )
