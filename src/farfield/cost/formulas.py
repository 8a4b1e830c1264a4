"""The cost of each operator, one short function each: the papers' MACs, and the steps that execute here.

All numbers are for one sample of self-attention on a grid of N positions and c channels; queries and keys have d
channels, values p, outputs o; h heads. One multiply and one add are one MAC. A reduction without a product (means,
maxima), an elementwise step and a softmax count 0, in the papers and here.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from farfield._checks import unknown
from farfield._refusals import refusal
from farfield.ops.slots import exponentials
from farfield.ops.table import OPERATORS
from farfield.ops.work import Work, is_composed, is_quadratic_cheaper


class Sizes(NamedTuple):
    """The sizes of self-attention, which the formulas are functions of."""

    size: tuple[int, ...]
    channels: int  # of the grid, c
    inner: int  # channels of queries and keys, d
    width: int  # channels of values, p
    heads: int  # h
    project: str  # letters of "qkvo"
    biased: bool = False  # whether a bias or a norm's shift is added to the responses
    score_biased: bool = True  # whether projections of queries and keys have biases
    latents: int = 0  # of each head, where the operator learns them

    @property
    def positions(self) -> int:
        """The number of positions, N."""
        return math.prod(self.size)

    @property
    def windows(self) -> int:
        """The number of windows of pooling by 2 on each axis in ceil mode."""
        return math.prod(math.ceil(length / 2) for length in self.size)

    @property
    def indices(self) -> int:
        """The number of indices of all axes, Σ size."""
        return sum(self.size)

    @property
    def out(self) -> int:
        """Channels of the response after the output projection, if there is one."""
        return self.channels if "o" in self.project else self.width

    def projections(self, queries: int, keys: int) -> int:
        """Return the MACs of projecting so many queries, keys and responses, and as many values as keys, in full."""
        outputs = {"q": queries * self.inner, "k": keys * self.inner, "v": keys * self.width, "o": queries * self.width}
        return self.channels * sum(outputs[letter] for letter in self.project)


class OperatorSteps(NamedTuple):
    printed: int  # MACs as the papers count them
    queries: int
    keys: int  # after pooling or averaging
    slots: int  # of the summary, per head
    # Numbers of the basis or the coefficients in memory at once; for a softmax of products, of queries and keys.
    formed: int
    basis: bool = True  # whether a basis weighs keys into the slots; otherwise each key is its own slot
    rows: int = 0  # of the matrix per head that queries and keys are multiplied with: 1 for scores, 0 if there is none
    keys_apart: bool = True  # whether keys are projected, or multiplied so, apart from queries


# ---- the operators ---------------------------------------------------------------------------------------------------
def dense(s: Sizes, queries: int, keys: int) -> OperatorSteps:
    """Return the steps of a softmax of products, KᵀQ and V times it, whose coefficients are never formed."""
    printed = s.projections(queries, keys) + queries * keys * (s.inner + s.width)
    return OperatorSteps(printed, queries, keys, keys, (queries + keys) * s.inner, basis=False)


def softmax(s: Sizes) -> OperatorSteps:
    """KAN 1, SAN 1, FA 9: N²·(d + p), KᵀQ and V times its column softmax."""
    return dense(s, s.positions, s.positions)


def softmax_pooled(s: Sizes) -> OperatorSteps:
    """KAN Table 2: N·(N/4)·(d + p), K and V of KAN 1 pooled by 2 on each axis in ceil mode."""
    return dense(s, s.positions, s.windows)


def kronecker_kv(s: Sizes) -> OperatorSteps:
    """KAN 16: N·Σsize·(d + p) for attn(X, C, C), C the axis means."""
    return dense(s, s.positions, s.indices)


def kronecker_qkv(s: Sizes) -> OperatorSteps:
    """KAN 17-18: (Σsize)²·(d + p) for attn(C, C, C) and an outer sum."""
    return dense(s, s.indices, s.indices)


def dot(s: Sizes) -> OperatorSteps:
    """FA 6: N²·(d + p) for V (KᵀQ) / d in this order; the coefficients are formed."""
    return dense(s, s.positions, s.positions)._replace(formed=s.heads * s.positions * s.positions)


def factorized(s: Sizes) -> OperatorSteps:
    """FA 3, 5: 2·N·d·p/h for (V Bᵀ) C / d; basis and coefficients are the keys and queries themselves."""
    n = s.positions
    return OperatorSteps(s.projections(n, n) + 2 * n * s.inner * s.width // s.heads, n, n, s.inner // s.heads, 0)


def averaged(s: Sizes) -> OperatorSteps:
    """SAN 2: 2·N·d·p for (1/N) (V Kᵀ) Q, heads not counted; basis and coefficients as in FA 3."""
    return factorized(s)._replace(printed=s.projections(s.positions, s.positions) + 2 * s.positions * s.inner * s.width)


def factorized_gaussian(s: Sizes) -> OperatorSteps:
    """FA 4: FA 3 with a softmax of B over positions and of C over channels; both are formed, one after the other."""
    return factorized(s)._replace(formed=s.positions * s.inner)


def siamese(s: Sizes) -> OperatorSteps:
    """SAN 5-6: 2·N·(d + p) for v̄ (wᵀqᵢ) + (1/N) Σⱼ vⱼ (kⱼᵀw), two scores and two products; two slots per head."""
    n = s.positions
    printed = s.projections(n, n) + 2 * n * (s.inner + s.width)
    return OperatorSteps(printed, n, n, 2, 3 * s.heads * n, rows=1, keys_apart=bool({"q", "k"} & set(s.project)))


def siamese_local(s: Sizes) -> OperatorSteps:
    """SAN 5, first term: N·(d + p) for v̄ (wᵀqᵢ), one score and one product; one slot per head."""
    n = s.positions
    printed = s.projections(n, n) + n * (s.inner + s.width)
    return OperatorSteps(printed, n, n, 1, s.heads * n, rows=1, keys_apart=False)


# Of what follows no paper of PAPERS prints a number: `printed` is the count in their way.
def flare(s: Sizes) -> OperatorSteps:
    """FLARE 7-10: N·s·(d + 2·p) for the scores Lᵀk, which serve keys and queries, and FA 4 on them."""
    n = s.positions
    printed = s.projections(n, n) + n * s.latents * (s.inner + 2 * s.width)
    apart = "q" in s.project  # as in a replaced attention
    return OperatorSteps(printed, n, n, s.latents, 2 * s.heads * n * s.latents, rows=s.latents, keys_apart=apart)


def linear(s: Sizes) -> OperatorSteps:
    """EfficientViT, Katharopoulos et al.: FA 3 of features, which are formed; their quotient is elementwise."""
    return factorized_gaussian(s)


def hedgehog(s: Sizes) -> OperatorSteps:
    """Hedgehog 6: 2·N·d²/h for the maps, and FA 3 with two slots for each channel."""
    n, width = s.positions, s.inner // s.heads
    printed = s.projections(n, n) + 2 * n * (s.inner * width + 2 * width * s.width)
    return OperatorSteps(printed, n, n, 2 * width, 4 * n * s.inner, rows=width)


def shifted(s: Sizes) -> OperatorSteps:
    """InLine 6, MALA: 2·N·(d/h + 1)·p for FA 3 of features and one slot more, the sum of the values."""
    n, slots = s.positions, s.inner // s.heads + 1
    return OperatorSteps(s.projections(n, n) + 2 * n * slots * s.width, n, n, slots, n * slots * s.heads)


FORMULAS: dict[str, Callable[[Sizes], OperatorSteps]] = {
    "softmax": softmax,
    "softmax_pooled": softmax_pooled,
    "kronecker_kv": kronecker_kv,
    "kronecker_qkv": kronecker_qkv,
    "kronecker_qkv_literal": kronecker_qkv,
    "dot": dot,
    "factorized": factorized,
    "averaged": averaged,
    "factorized_gaussian": factorized_gaussian,
    "siamese": siamese,
    "siamese_local": siamese_local,
    "siamese_ones": siamese,
    "flare": flare,
    "linear_relu": linear,
    "linear_elu": linear,
    "hedgehog": hedgehog,
    "inline": shifted,
    "mala": shifted,
}


# ---- the steps that execute here: reduce first, project second -------------------------------------------------------
def executed_macs(s: Sizes, steps: OperatorSteps) -> int:
    """Return the MACs of `GridAttention` that each sample adds: projections of values and outputs act on slots."""
    # Where keys are not projected apart, queries are made as they are.
    queries = projection_macs(s, steps, steps.queries, "q" if steps.keys_apart else "k")
    queries += projection_macs(s, steps, steps.keys, "k") * steps.keys_apart
    return queries + work(s, steps).macs(steps.slots, basis=steps.basis)


def work(s: Sizes, steps: OperatorSteps) -> Work:
    """Return the sizes from which the MACs of the products of one sample follow."""
    channels, out = s.channels * ("v" in s.project), s.channels * ("o" in s.project)
    return Work(steps.queries, steps.keys, s.inner, s.width, s.heads, channels, out, s.biased, s.latents)


def in_order(operator: str, s: Sizes, steps: OperatorSteps) -> OperatorSteps:
    """Return the steps in the order that executes: for few positions KᵀQ comes first, and no slots are formed."""
    quadratic = OPERATORS[operator].has_orders and is_quadratic_cheaper(work(s, steps))
    if not quadratic or not steps.basis:
        return steps
    return dot(s)._replace(printed=steps.printed)


def projection_macs(s: Sizes, steps: OperatorSteps, positions: int, letter: str) -> int:
    """Return the MACs of projecting `positions` queries (letter "q") or keys ("k"), and of multiplying them by head."""
    projected = s.channels * s.inner * (letter in s.project)
    if not steps.rows or is_by_head(s, steps, letter):
        return positions * (projected + s.inner * steps.rows)
    return positions * s.channels * s.heads * steps.rows


def is_by_head(s: Sizes, steps: OperatorSteps, letter: str) -> bool:
    """Whether matrices act on the channels of a head, and are not composed with a projection to one for all heads."""
    if letter in s.project:
        return not is_composed(s.heads, steps.rows, s.inner, s.channels)
    return steps.rows > 1


def batch_independent_macs(s: Sizes, steps: OperatorSteps) -> int:
    """Return the MACs that do not grow with the batch: matrices by head times the projections and their biases."""
    projections = sum(not is_by_head(s, steps, letter) for letter in "qk" if letter in s.project)
    return steps.rows * s.inner * (s.channels + s.score_biased) * projections


def activation_numbers(s: Sizes, steps: OperatorSteps) -> int:
    """Count the numbers that a forward pass forms on one sample."""
    own = [letter in s.project and (not steps.rows or is_by_head(s, steps, letter)) for letter in "qk"]
    projected = s.inner * (steps.queries * own[0] + steps.keys * own[1])
    projected += steps.keys * s.width * work(s, steps).projects_values_first
    slots = steps.slots * s.width
    response = s.positions * s.out
    if "o" in s.project:
        folds = work(s, steps).folds_output(steps.slots, basis=steps.basis)
        response += steps.slots * s.heads * s.out if folds else steps.queries * s.width
    return projected + steps.formed + slots + response


def gathered_numbers(operator: str, s: Sizes, steps: OperatorSteps) -> int | None:
    """Count the numbers of a summary and of the query sums, which a process sends; None if the summary is the grid."""
    entry, values = OPERATORS[operator], steps.slots * s.width
    if not entry.merges_by_adding:
        return None
    if entry.basis is None:  # per index a key and a count; for queries that are sums also a sum of the grid and a count
        sums = 0 if entry.queries_from.side_by_side else steps.slots * (s.channels + 1)
        return values + steps.slots * (s.inner + 1) + 1 + sums
    weights = s.heads * steps.slots
    return values + weights + 1 + weights * (entry.basis is exponentials)


# ---- memory as the papers count it, in bytes -------------------------------------------------------------------------
NUMBER = 4  # bytes of a float32
# Operator -> copies of (N·c, Σsize·c) in addition to four of the coefficients, from the memory column of KAN Table 2.
KAN_COPIES = {"softmax": (5, 0), "softmax_pooled": (5, 0), "kronecker_kv": (4, 2)}
KAN_COPIES |= {"kronecker_qkv": (2, 8), "kronecker_qkv_literal": (2, 8)}


def coefficients(s: Sizes, steps: OperatorSteps) -> int:
    """Count the coefficients: one for each head, slot and query."""
    return s.heads * steps.slots * steps.queries


def kan_bytes(operator: str, s: Sizes, steps: OperatorSteps, batch: int) -> int:
    """KAN Table 2: four live copies of the coefficients (KAN §2.1) and KAN_COPIES of the grid and of its axis means."""
    grids, means = KAN_COPIES[operator]
    numbers = 4 * coefficients(s, steps) + (grids * s.positions + means * s.indices) * s.channels
    return NUMBER * batch * numbers


def san_bytes(operator: str, s: Sizes, steps: OperatorSteps, batch: int) -> int:
    """SAN Table 2: each buffer rounded up to a power of two; twice the grid and the intermediate (SAN Table 1)."""
    total = 2 * power_of_two(NUMBER * batch * s.positions * s.channels)
    if steps.rows:
        vectors = 4 * (NUMBER * batch * s.channels)
        return total + 2 * power_of_two(NUMBER * batch * s.positions) + vectors
    # The c² numbers of V Kᵀ (Attn1/N), or the coefficients (Attn).
    intermediate = s.inner * s.width if steps.basis else coefficients(s, steps)
    return total + 2 * power_of_two(NUMBER * batch * intermediate)


def fa_bytes(operator: str, s: Sizes, steps: OperatorSteps, batch: int) -> int:
    """FA Table 9: the input, the result of each projection, the intermediate (hN² or bm/h numbers) and the output."""
    intermediate = s.inner * s.width // s.heads if steps.basis else coefficients(s, steps)
    projected = s.inner * (("q" in s.project) + ("k" in s.project)) + s.width * ("v" in s.project)
    output = s.channels * ("o" in s.project)
    return NUMBER * batch * (s.positions * (s.channels + projected + s.width + output) + intermediate)


def power_of_two(size: int) -> int:
    """Return the least power of two that is not below `size`."""
    return 1 << (size - 1).bit_length()


class Paper(NamedTuple):
    """How a paper counts memory, and the operators that it covers."""

    size: Callable[[str, Sizes, OperatorSteps, int], int]
    rows: tuple[str, ...]


PAPERS = {
    "KAN": Paper(kan_bytes, tuple(KAN_COPIES)),
    "SAN": Paper(san_bytes, ("averaged", "siamese", "siamese_local", "siamese_ones", "softmax", "softmax_pooled")),
    "FA": Paper(fa_bytes, ("factorized", "factorized_gaussian", "dot", "softmax", "averaged")),
}


def find_paper(operator: str, convention: str) -> Paper:
    """Return the paper of a convention, "paper" being that of the operator; LookupError if it does not cover it."""
    if convention == "paper":
        convention = next((name for name, paper in PAPERS.items() if operator in paper.rows), "paper")
    if convention == "paper":
        problem = f"no convention of {', '.join(PAPERS)} covers {operator}"
        raise refusal(LookupError, f'{problem}; fix: convention="farfield", which covers every operator.')
    if operator not in PAPERS[convention].rows:
        raise unknown(f"operator of {convention}", operator, PAPERS[convention].rows)
    return PAPERS[convention]
