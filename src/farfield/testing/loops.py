"""What the loops of `reference` share: positions, heads, softmax and sums, a vector at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Mask = NDArray[np.bool_]
Position = tuple[int, ...]
Head = Callable[..., Array]  # of the queries, keys, values and masks of a sample and head, and of what is learned


def valid_positions(mask: Mask) -> list[Position]:
    """The positions where a mask is True, or a weight more than 0."""
    return [position for position in np.ndindex(mask.shape) if mask[position]]


def measure_of(mask: Mask | Array, positions: Iterable[Position]) -> list[float]:
    """The weights of positions, of a mask 1."""
    return [float(mask[position]) for position in positions]


def softmax_of(scores: Sequence[float], weights: Sequence[float] | None = None) -> Array:
    """W · exp(score) / Σ w · exp(score), w = 1 without weights; of no scores none."""
    if not len(scores):
        return np.zeros(0)
    exponentials = np.exp(np.asarray(scores) - max(scores)) * np.asarray([1.0] if weights is None else weights)
    return exponentials / exponentials.sum()


def weighted_sum(weights: Iterable[float], vectors: Iterable[Array], channels: int) -> Array:
    """Σ weight · vector, of no vectors 0."""
    total = np.zeros(channels)
    for weight, vector in zip(weights, vectors, strict=True):
        total += weight * vector
    return total


def each_head(
    head: Head,
    query: Array,
    key: Array,
    value: Array,
    *,
    heads: int,
    mask: Mask | None,
    query_mask: Mask | None = None,
    learned: Sequence[Array] = (),
) -> Array:
    """Split the channels into heads in order, apply `head` to each sample and head, concatenate (FA Eq. 5).

    The first axis of what is learned is that of the heads.
    """
    query, key, value = (np.asarray(grid, dtype=np.float64) for grid in (query, key, value))
    batch, channels, *size = query.shape
    mask = np.ones((batch, *key.shape[2:]), bool) if mask is None else mask
    query_mask = np.ones((batch, *size), bool) if query_mask is None else query_mask
    d, p = channels // heads, value.shape[1] // heads
    out = np.zeros((batch, p * heads, *size))
    for sample in range(batch):
        for h in range(heads):
            out[sample, h * p : (h + 1) * p] = head(
                query[sample, h * d : (h + 1) * d],
                key[sample, h * d : (h + 1) * d],
                value[sample, h * p : (h + 1) * p],
                mask[sample],
                query_mask[sample],
                *(np.asarray(each[h], dtype=np.float64) for each in learned),
            )
    return out


def attend(
    q: Array, keys: list[Array], values: list[Array], scale: float, channels: int, measure: list[float] | None = None
) -> Array:
    """response_i = Σ_j softmax_j(scale · k_jᵀ q_i + log w_j) v_j (KAN Eq. 1), w the weights of keys."""
    out = np.zeros((channels, *q.shape[1:]))
    for i in np.ndindex(q.shape[1:]):
        weights = softmax_of([scale * float(key @ q[:, *i]) for key in keys], measure)
        out[:, *i] = weighted_sum(weights, values, channels)
    return out


def sum_over_keys(
    similarity: Callable[[Array, Array, Array, float], float],
    query: Array,
    key: Array,
    value: Array,
    *,
    heads: int,
    mask: Mask | None,
    weight: Array | None = None,
) -> Array:
    """response_i = Σ_j similarity(q_i, k_j, w, N) v_j, a pair of positions at a time; N is the number of valid keys.

    Keys of weights are as many keys each.
    """

    def head(q: Array, k: Array, v: Array, valid: Mask, _query_valid: Mask, w: Array) -> Array:
        positions = valid_positions(valid)
        measure = measure_of(valid, positions)
        out = np.zeros((v.shape[0], *q.shape[1:]))
        for i in np.ndindex(q.shape[1:]):
            for j, times in zip(positions, measure, strict=True):
                out[:, *i] += times * similarity(q[:, *i], k[:, *j], w, sum(measure)) * v[:, *j]
        return out

    weight = np.ones(query.shape[1]) if weight is None else weight
    return each_head(head, query, key, value, heads=heads, mask=mask, learned=[weight.reshape(heads, -1)])
