"""Slots: the summary of keys and values, small and mergeable, how keys weigh in it and how queries combine it.

Shapes of the functions: keys `(b, h, d, n)`, queries `(b, h, d, m)`, valid `(b, 1, 1, n)`; r is the number of slots.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from farfield._checks import shape_error
from farfield._refusals import put_name
from farfield.ops.grid import nonzero
from farfield.ops.modes import full_precision, is_recorded_for_onnx


def _check_mergeable(summary: Summary, other: Summary) -> None:
    """Refuse summaries whose slots do not fit each other."""
    slots = 0 if summary.side_by_side else summary.values.shape[2]
    pairs = [(summary.values, other.values), (summary.count, other.count)]
    fits = all(one.shape[:2] == two.shape[:2] and one.shape[3:] == two.shape[3:] for one, two in pairs)
    same = (summary.side_by_side, summary.peak is None) == (other.side_by_side, other.peak is None)
    if not (fits and same and slots in (0, other.values.shape[2])):
        problem = "the slots (batch, heads, slots, channels) of two summaries must be those of one attention."
        fix = "summarize every tile by the same module or operator."
        raise put_name("Summary.merge", shape_error(problem, fix, summary=summary.values, other=other.values))


class Summary(NamedTuple):
    """The summary of keys and values, small and mergeable.

    Attributes:
        values: `(b, h, r, c)`, the sum over positions of weight · value; h is 1 where heads share the values.
        weights: `(b, h, r, 1)`, the sum over positions of weight, by which a bias of the values is multiplied; h is 1
            where heads share the weights.
        count: `(b, 1, 1, 1)`, the number of valid keys, or the sum of their weights.
        keys: `(b, h, r, d)`, the sum of a slot's keys, for operators that compare queries with the keys of slots.
        peak: `(b, h, r, 1)`, the maximum that exponents are relative to.
        side_by_side: True if slots are positions, which merging concatenates; False if merging adds them.
        complete: True if every slot is known to hold a valid position, so that no slot needs a mask.
        positions: `(b, 1, r, 1)`, the number of valid positions in a slot, for operators that compare queries with
            slots whose keys have weights; None where that is `weights`.
    """

    values: Tensor
    weights: Tensor
    count: Tensor  # type: ignore[assignment]  # a tuple has a method of this name
    keys: Tensor | None = None
    peak: Tensor | None = None
    side_by_side: bool = False
    complete: bool = False
    positions: Tensor | None = None

    def merge(self, other: Summary) -> Summary:
        """Return the summary of these positions and those of `other`.

        The order of merging changes only the rounding and, where slots are positions, the order of the slots.

        Raises:
            ShapeError: If the two are of different operators, heads, channels or batches.
        """
        _check_mergeable(self, other)
        peak = None
        if self.peak is not None and other.peak is not None:
            peak = torch.maximum(self.peak, other.peak)
            self, other = self.rescaled(peak), other.rescaled(peak)

        def join(slots: Tensor, others: Tensor) -> Tensor:
            return torch.cat([slots, others], 2) if self.side_by_side else slots + others

        counts = [part.weights if part.positions is None else part.positions for part in (self, other)]
        return Summary(
            join(self.values, other.values),
            join(self.weights, other.weights),
            self.count + other.count,
            None if self.keys is None or other.keys is None else join(self.keys, other.keys),
            peak,
            self.side_by_side,
            self.complete and other.complete,
            None if self.positions is None and other.positions is None else join(*counts),
        )

    def detach(self) -> Summary:
        """Return the same summary without a history: gradients of what is made of it end here."""
        parts: Any = {name: each.detach() for name, each in self._asdict().items() if isinstance(each, Tensor)}
        return self._replace(**parts)

    def rescaled(self, peak: Tensor) -> Summary:
        """Return the same summary with exponents relative to another peak."""
        factor = torch.exp(cast(Tensor, self.peak) - peak)
        return self._replace(values=self.values * factor, weights=self.weights * factor, peak=peak)

    def project_values(self, matrix: Tensor, bias: Tensor | None = None) -> Summary:
        """Project the values of the slots: up to rounding, the same as projecting all values before they are summed.

        Args:
            matrix: `(h, p, c)`, one matrix per head.
            bias: `(h, p)`; a slot's bias is multiplied by its weight. None adds nothing.

        Returns:
            The summary of the projected values, `(b, h, r, p)`.

        Cost:
            b·h·r·c·p MACs.

        Example:
            >>> import torch
            >>> from farfield.ops import OPERATORS, summarize
            >>> key, value, valid = torch.randn(1, 2, 4, 9), torch.randn(1, 2, 3, 9), torch.ones(1, 1, 1, 9)
            >>> matrix, bias = torch.randn(2, 5, 3), torch.randn(2, 5)
            >>> after = summarize(OPERATORS["averaged"], key, value, valid).project_values(matrix, bias)
            >>> before = summarize(OPERATORS["averaged"], key, matrix @ value + bias[:, :, None], valid)
            >>> torch.allclose(after.values, before.values, atol=1e-5)
            True
        """
        dtype = self.values.dtype
        with full_precision(self.values):
            matrix, (batch, heads, slots, _) = matrix.to(dtype), self.values.shape
            # matmul would copy the matrix for every sample and keep the copies for the backward pass.
            if heads > 1 and is_recorded_for_onnx():
                projected = self.values @ matrix.transpose(-2, -1)
            elif heads == 1:
                joined = self.values[:, 0] @ matrix.flatten(0, 1).transpose(-2, -1).expand(batch, -1, -1)
                projected = joined.unflatten(2, (matrix.shape[0], -1)).transpose(1, 2)
            else:
                rows = torch.bmm(self.values.transpose(0, 1).flatten(1, 2), matrix.transpose(-2, -1))
                projected = rows.unflatten(1, (batch, slots)).transpose(0, 1)
            values = projected if bias is None else projected + self.weights * bias[:, None].to(dtype)
            return self._replace(values=values)


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
    return keys_of_slots(summary).to(query.dtype) @ query


def keys_of_slots(summary: Summary) -> Tensor:
    """The sums of the keys of slots without their weights, which the sums of values have."""
    keys = cast(Tensor, summary.keys)
    return keys if summary.positions is None else keys * (summary.positions / nonzero(summary.weights))


def shares(summary: Summary) -> Tensor:
    """What slots `(b, 1, r, 1)` whose keys have weights count for: the mean weight of their valid positions."""
    return summary.weights / nonzero(cast(Tensor, summary.positions))


def softmax_of_products(query: Tensor, summary: Summary) -> Tensor:
    """KAN 1: softmax of KᵀQ over slots that hold a valid position; `respond` computes the same without calling it."""
    valid = summary.weights > 0  # (b, 1, r, 1)
    means = summary._replace(keys=cast(Tensor, summary.keys) / weight(query, summary), positions=None)
    hidden = ~valid & valid.any(2, keepdim=True)  # nothing is hidden in a sample without valid slots: no NaN
    logits = products(query, means)
    if summary.positions is not None:
        logits = logits + nonzero(shares(summary)).log()
    return torch.where(valid, logits.masked_fill(hidden, -torch.inf).softmax(2), 0)


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
        """Return weights over the largest of their head's slots, of which shares without an ε are the same."""
        if self.epsilon:
            return weights
        # Where features are small, so are the sums of them, and the product of the two is too small for a number.
        largest = weights.detach().amax(2, keepdim=True)
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
    means = summary.weights[:, :, :-1] / position(query, summary)
    return query.shape[2] ** -0.5 * features(query.to(means.dtype)) * means


# ---- per(query, summary): the divisor of a slot's sum ----------------------------------------------------------------
def weight(query: Tensor, summary: Summary) -> Tensor:
    """The slot's weight, by which its sum becomes a weighted mean; 1 for a slot of weight 0."""
    return torch.where(summary.weights == 0, 1, summary.weights)


def position(query: Tensor, summary: Summary) -> Tensor:
    """The number of valid positions, or the sum of their weights; 1 where that is 0."""
    return torch.where(summary.count == 0, 1, summary.count)


def channel(query: Tensor, summary: Summary) -> int:
    """The number of channels per head."""
    return query.shape[2]
