"""Every equation of the papers again, as plain float64 loops over positions.

Written from the papers and not from the library, slow on purpose, and used only by tests. A grid is an array
`(batch, channels, *size)`, a mask an array `(batch, *size)` that is True where a position is valid; that of keys may
hold their weights, 0 where one is masked. A masked position is never read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from farfield.testing.loops import (
    Array,
    Mask,
    Position,
    attend,
    each_head,
    measure_of,
    softmax_of,
    sum_over_keys,
    valid_positions,
    weighted_sum,
)


def softmax(
    query: Array, key: Array, value: Array, *, heads: int = 1, mask: Mask | None = None, scale: float = 1.0
) -> Array:
    """KAN Eq. 1, SAN Eq. 1, FA Eq. 9: response_i = Σ_j softmax_j(k_jᵀ q_i) v_j."""

    def head(q: Array, k: Array, v: Array, valid: Mask, _query_valid: Mask) -> Array:
        positions = valid_positions(valid)
        keys, values = ([grid[:, *j] for j in positions] for grid in (k, v))
        return attend(q, keys, values, scale, v.shape[0], measure_of(valid, positions))

    return each_head(head, query, key, value, heads=heads, mask=mask)


def _windows(valid: Mask, size: tuple[int, ...]) -> list[list[Position]]:
    """The valid positions of each pooling window, stride = size, ceil mode (7 → 4), without empty windows."""
    windows = []
    for window in np.ndindex(*(-(-length // step) for length, step in zip(valid.shape, size, strict=True))):
        members = [j for j in valid_positions(valid) if all(j[a] // size[a] == window[a] for a in range(valid.ndim))]
        if members:
            windows.append(members)
    return windows


def softmax_pooled(
    query: Array,
    key: Array,
    value: Array,
    *,
    heads: int = 1,
    mask: Mask | None = None,
    scale: float = 1.0,
    size: int | tuple[int, ...] = 2,
    kind: str = "max",
) -> Array:
    """KAN Table 2 ("+Pool", Wang et al. 2018): `softmax` whose keys and values are pooled first, channel by channel."""

    def pooled(grid: Array, members: list[Position], measure: list[float]) -> Array:
        vectors = np.stack([grid[:, *j] for j in members])
        return vectors.max(axis=0) if kind == "max" else np.average(vectors, axis=0, weights=measure)

    def head(q: Array, k: Array, v: Array, valid: Mask, _query_valid: Mask) -> Array:
        windows = _windows(valid, (size,) * valid.ndim if isinstance(size, int) else size)
        measures = [measure_of(valid, members) for members in windows]
        keys, values = ([pooled(grid, *each) for each in zip(windows, measures, strict=True)] for grid in (k, v))
        # A window counts for one position, of the mean weight of its valid ones.
        return attend(q, keys, values, scale, v.shape[0], [float(np.mean(each)) for each in measures])

    return each_head(head, query, key, value, heads=heads, mask=mask)


def dot(query: Array, key: Array, value: Array, *, heads: int = 1, mask: Mask | None = None) -> Array:
    """FA Eq. 6: response_i = (1/d) Σ_j (k_jᵀ q_i) v_j, a pair of positions at a time."""
    return sum_over_keys(lambda q, k, w, n: float(k @ q) / len(k), query, key, value, heads=heads, mask=mask)


def averaged(query: Array, key: Array, value: Array, *, heads: int = 1, mask: Mask | None = None) -> Array:
    """SAN Eq. 2: response_i = (1/N) Σ_j v_j (k_jᵀ q_i), N the number of valid keys."""
    return sum_over_keys(lambda q, k, w, n: float(k @ q) / n, query, key, value, heads=heads, mask=mask)


def factorized(query: Array, key: Array, value: Array, *, heads: int = 1, mask: Mask | None = None) -> Array:
    """FA Eq. 3 and 8: the context Σ_j v_j k_jᵀ first, combined by q_i, divided by d, the channels of the basis."""

    def head(q: Array, k: Array, v: Array, valid: Mask, _query_valid: Mask) -> Array:
        context = np.zeros((v.shape[0], k.shape[0]))
        for j in valid_positions(valid):
            context += float(valid[j]) * np.outer(v[:, *j], k[:, *j])
        out = np.zeros((v.shape[0], *q.shape[1:]))
        for i in np.ndindex(q.shape[1:]):
            out[:, *i] = context @ q[:, *i] / k.shape[0]
        return out

    return each_head(head, query, key, value, heads=heads, mask=mask)


def factorized_gaussian(query: Array, key: Array, value: Array, *, heads: int = 1, mask: Mask | None = None) -> Array:
    """FA Eq. 4 and §3.2.2: softmax over the positions of each basis channel, and over the channels of each query."""

    def head(q: Array, k: Array, v: Array, valid: Mask, _query_valid: Mask) -> Array:
        positions = valid_positions(valid)
        values = [v[:, *j] for j in positions]
        measure = measure_of(valid, positions)
        context = [
            weighted_sum(softmax_of([float(k[r, *j]) for j in positions], measure), values, v.shape[0])
            for r in range(k.shape[0])
        ]
        out = np.zeros((v.shape[0], *q.shape[1:]))
        for i in np.ndindex(q.shape[1:]):
            out[:, *i] = weighted_sum(softmax_of(q[:, *i]), context, v.shape[0])
        return out

    return each_head(head, query, key, value, heads=heads, mask=mask)


def _lines(valid: Mask) -> list[list[Position]]:
    """The valid positions of each index of each axis."""
    positions = valid_positions(valid)
    return [
        [j for j in positions if j[axis] == index] for axis, length in enumerate(valid.shape) for index in range(length)
    ]


def _axis_vectors(grid: Array, valid: Mask) -> list[Array | None]:
    """KAN Eq. 14–15 for one sample: for each index of each axis, the mean of the valid positions of that slice."""
    return [
        np.average([grid[:, *j] for j in line], axis=0, weights=measure_of(valid, line)) if line else None
        for line in _lines(valid)
    ]


def axis_means(grid: Array, mask: Mask | None = None) -> Array:
    """KAN Eq. 14–15: the axes' mean matrices concatenated, `(batch, channels, Σ size)`; 0 without a valid position."""
    mask = np.ones((grid.shape[0], *grid.shape[2:]), bool) if mask is None else mask
    zeros = np.zeros(grid.shape[1])
    return np.stack(
        [
            np.stack([zeros if vector is None else vector for vector in _axis_vectors(sample, valid)], axis=1)
            for sample, valid in zip(grid, mask, strict=True)
        ]
    )


def outer_sum(vectors: Array, size: tuple[int, ...]) -> Array:
    """KAN Eq. 18: Y[:, x_1, …, x_n] = Σ_a vectors of axis a at x_a; `vectors` is `(batch, channels, Σ size)`."""
    out = np.zeros((*vectors.shape[:2], *size))
    for position in np.ndindex(*size):
        for axis, index in enumerate(position):
            out[:, :, *position] += vectors[:, :, sum(size[:axis]) + index]
    return out


def _attend_to_axes(q: Array, k: Array, v: Array, valid: Mask, scale: float) -> Array:
    keys, values = ([each for each in _axis_vectors(grid, valid) if each is not None] for grid in (k, v))
    # A line counts for one position, of the mean weight of its valid ones.
    measure = [float(np.mean(measure_of(valid, line))) for line in _lines(valid) if line]
    return attend(q, keys, values, scale, v.shape[0], measure)


def kronecker_kv(
    query: Array, key: Array, value: Array, *, heads: int = 1, mask: Mask | None = None, scale: float = 1.0
) -> Array:
    """KAN Eq. 16: attn(X, C, C): queries from every position, keys and values from the axes' means."""

    def head(q: Array, k: Array, v: Array, valid: Mask, _query_valid: Mask) -> Array:
        return _attend_to_axes(q, k, v, valid, scale)

    return each_head(head, query, key, value, heads=heads, mask=mask)


def kronecker_qkv_literal(
    query: Array,
    key: Array,
    value: Array,
    *,
    heads: int = 1,
    mask: Mask | None = None,
    query_mask: Mask | None = None,
    scale: float = 1.0,
) -> Array:
    """KAN Eq. 17–18: attn(C, C, C), queries are the axes' means too; their responses are added by outer sum."""

    def head(q: Array, k: Array, v: Array, valid: Mask, query_valid: Mask) -> Array:
        queries = [np.zeros(q.shape[0]) if vector is None else vector for vector in _axis_vectors(q, query_valid)]
        responses = _attend_to_axes(np.stack(queries, axis=1), k, v, valid, scale)
        return outer_sum(responses[None], q.shape[1:])[0]

    return each_head(head, query, key, value, heads=heads, mask=mask, query_mask=query_mask)


def kronecker_qkv(
    query: Array,
    key: Array,
    value: Array,
    *,
    heads: int = 1,
    mask: Mask | None = None,
    query_mask: Mask | None = None,
    scale: float = 1.0,
) -> Array:
    """KAN Eq. 17–18 with Eq. 13: the outer sum of n axes contains its mean n times; it is counted once."""
    options = {"heads": heads, "mask": mask, "query_mask": query_mask, "scale": scale}
    literal, spatial_dims = kronecker_qkv_literal(query, key, value, **options), query.ndim - 2
    out = literal.copy()
    for sample in range(len(query)):
        # The mean over the valid queries, one by one.
        positions = valid_positions(np.ones(query.shape[2:], bool) if query_mask is None else query_mask[sample])
        for channel in range(value.shape[1]):
            total = sum(literal[sample, channel, *position] for position in positions)
            once = total / len(positions) / spatial_dims if positions else 0.0
            out[sample, channel] -= (spatial_dims - 1) * once
    return out


def similarity(a: Array, b: Array, weight: Array) -> float:
    """SAN Eq. 3, not symmetric: [aᵀ, bᵀ] w with a weight of twice the channels."""
    return float(sum(a[i] * weight[i] + b[i] * weight[len(a) + i] for i in range(len(a))))


def siamese_similarity(a: Array, b: Array, weight: Array) -> float:
    """SAN Eq. 4, symmetric: (a + b)ᵀ w."""
    return float(sum((a[i] + b[i]) * weight[i] for i in range(len(a))))


def siamese(
    query: Array, key: Array, value: Array, *, weight: Array, heads: int = 1, mask: Mask | None = None
) -> Array:
    """SAN Eq. 5, its first line: response_i = (1/N) Σ_j v_j (q_i + k_j)ᵀ w."""

    def similarity(q: Array, k: Array, w: Array, n: float) -> float:
        return siamese_similarity(q, k, w) / n

    return sum_over_keys(similarity, query, key, value, heads=heads, mask=mask, weight=weight)


def siamese_local(
    query: Array, key: Array, value: Array, *, weight: Array, heads: int = 1, mask: Mask | None = None
) -> Array:
    """SAN Eq. 5's local term alone (SAN Table 6): response_i = v̄ (wᵀ q_i)."""

    def similarity(q: Array, k: Array, w: Array, n: float) -> float:
        return float(w @ q) / n

    return sum_over_keys(similarity, query, key, value, heads=heads, mask=mask, weight=weight)


def siamese_ones(query: Array, key: Array, value: Array, *, heads: int = 1, mask: Mask | None = None) -> Array:
    """SAN Table 8: `siamese` with a vector of ones that is not learned."""
    return siamese(query, key, value, weight=np.ones(query.shape[1]), heads=heads, mask=mask)


# ---- operators of this decade ----------------------------------------------------------------------------------------
def flare(query: Array, key: Array, value: Array, *, latents: Array, heads: int = 1, mask: Mask | None = None) -> Array:
    """FLARE Eq. 7–10: z_s = Σ_j softmax_j(L_sᵀ k_j) v_j for each latent, response_i = Σ_s softmax_s(L_sᵀ q_i) z_s."""

    def head(q: Array, k: Array, v: Array, valid: Mask, _query_valid: Mask, own: Array) -> Array:
        positions = valid_positions(valid)
        keys, values = ([grid[:, *j] for j in positions] for grid in (k, v))
        measure = measure_of(valid, positions)
        slots = [
            weighted_sum(softmax_of([float(latent @ each) for each in keys], measure), values, v.shape[0])
            for latent in own
        ]
        return attend(q, list(own), slots, 1.0, v.shape[0])

    return each_head(head, query, key, value, heads=heads, mask=mask, learned=[latents])


def _elu_plus_one(vector: Array) -> Array:
    return np.where(vector > 0, vector + 1, np.exp(np.minimum(vector, 0)))


def _quotient(
    features: Callable[[Array], Array],
    query: Array,
    key: Array,
    value: Array,
    *,
    heads: int,
    mask: Mask | None,
    epsilon: float = 0.0,
    maps: Sequence[Array] = (),
) -> Array:
    """response_i = Σ_j φ(q_i)ᵀφ(k_j) v_j / (Σ_j φ(q_i)ᵀφ(k_j) + ε), of queries and keys that `maps` multiply first."""

    def head(q: Array, k: Array, v: Array, valid: Mask, _query_valid: Mask, *own: Array) -> Array:
        query_map, key_map = own or [np.eye(q.shape[0])] * 2
        positions = valid_positions(valid)
        out = np.zeros((v.shape[0], *q.shape[1:]))
        for i in np.ndindex(q.shape[1:]):
            asked = features(query_map @ q[:, *i])
            scores = [float(valid[j]) * float(asked @ features(key_map @ k[:, *j])) for j in positions]
            weights = [score / (sum(scores) + epsilon) for score in scores]
            out[:, *i] = weighted_sum(weights, [v[:, *j] for j in positions], v.shape[0])
        return out

    return each_head(head, query, key, value, heads=heads, mask=mask, learned=maps)


def linear_elu(query: Array, key: Array, value: Array, *, heads: int = 1, mask: Mask | None = None) -> Array:
    """Katharopoulos et al. 2020: Σ_j φ(q_i)ᵀφ(k_j) v_j / Σ_j φ(q_i)ᵀφ(k_j) with φ = elu + 1."""
    return _quotient(_elu_plus_one, query, key, value, heads=heads, mask=mask)


def linear_relu(query: Array, key: Array, value: Array, *, heads: int = 1, mask: Mask | None = None) -> Array:
    """EfficientViT, Sana: the same with φ = relu, and 10⁻⁶ added to the divisor."""
    return _quotient(lambda x: np.maximum(x, 0), query, key, value, heads=heads, mask=mask, epsilon=1e-6)


def hedgehog(
    query: Array,
    key: Array,
    value: Array,
    *,
    query_map: Array,
    key_map: Array,
    heads: int = 1,
    mask: Mask | None = None,
) -> Array:
    """Hedgehog: the same with φ(x) = [softmax(Wx), softmax(−Wx)], a W for queries and one for keys."""

    def features(x: Array) -> Array:
        return np.concatenate([softmax_of(list(x)), softmax_of(list(-x))])

    return _quotient(features, query, key, value, heads=heads, mask=mask, maps=[query_map, key_map])


def _shifted(
    weigh: Callable[[Array, float, float], Array],
    features: Callable[[Array], Array],
    query: Array,
    key: Array,
    value: Array,
    *,
    heads: int,
    mask: Mask | None,
) -> Array:
    """response_i = Σ_j w_ij v_j, w_i = `weigh` of products φ(q_i)ᵀφ(k_j)/√d of all keys j, their mean and number."""

    def head(q: Array, k: Array, v: Array, valid: Mask, _query_valid: Mask) -> Array:
        positions = valid_positions(valid)
        measure = measure_of(valid, positions)
        out = np.zeros((v.shape[0], *q.shape[1:]))
        for i in np.ndindex(q.shape[1:]) if positions else ():
            products = np.array([features(q[:, *i]) @ features(k[:, *j]) / q.shape[0] ** 0.5 for j in positions])
            weights = weigh(products, float(products @ measure) / sum(measure), sum(measure))
            out[:, *i] = weighted_sum(weights * measure, [v[:, *j] for j in positions], v.shape[0])
        return out

    return each_head(head, query, key, value, heads=heads, mask=mask)


def inline(query: Array, key: Array, value: Array, *, heads: int = 1, mask: Mask | None = None) -> Array:
    """InLine: w_ij = s_ij − (1/N) Σ_l s_il + 1/N, with the products s_ij = q_iᵀk_j/(N√d) that its code takes."""

    def weigh(products: Array, mean: float, count: float) -> Array:
        return (products - mean + 1) / count

    return _shifted(weigh, lambda x: x, query, key, value, heads=heads, mask=mask)


def mala(query: Array, key: Array, value: Array, *, heads: int = 1, mask: Mask | None = None) -> Array:
    """MALA: w_ij = (1 + 1/(z_i + 10⁻⁶)) s_ij − z_i/N, z_i = Σ_j s_ij, with s_ij = φ(q_i)ᵀφ(k_j)/(N√d), φ = elu + 1."""

    def weigh(products: Array, mean: float, count: float) -> Array:
        return ((1 + 1 / (mean + 1e-6)) * products - mean) / count

    return _shifted(weigh, _elu_plus_one, query, key, value, heads=heads, mask=mask)
