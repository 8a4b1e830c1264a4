"""The table of operators: a basis, coefficients, and where queries, keys and values come from.

    response_i = Σ_r coefficients_r(q_i) · (Σ_j basis_r(k_j) v_j) / per_r

A user's own operator is two functions (at module level, so that they can be pickled) and an `Operator`; masks, tiles,
folded projections, norms and attention maps work with it. The functions of the papers' operators are in `slots`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

from torch import Tensor

from farfield._checks import unknown
from farfield._refusals import refusal
from farfield.ops.grid import ALL, AXES, NORMALIZED_AXES, POOLED, Positions
from farfield.ops.slots import (
    Features,
    Quotient,
    Summary,
    centred,
    channel,
    elu_plus_one,
    exponentials,
    identity,
    keys,
    magnitude_aware,
    one,
    one_and_key,
    position,
    products,
    queries,
    query_and_one,
    relu,
    softmax_of_products,
    softmax_over_channels,
    softmax_pair,
    weight,
)


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
