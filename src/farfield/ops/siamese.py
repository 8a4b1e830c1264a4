"""Siamese attention: a similarity that is a sum of two scores and splits into a local and a global term."""

from __future__ import annotations

from jaxtyping import Bool, Float, Real
from torch import Tensor

from farfield._checks import check_same_kind, shape_error
from farfield._refusals import door
from farfield.ops.attend import attend, document_arguments


@document_arguments
def siamese_attention(
    query: Float[Tensor, "b c *m"],
    key: Float[Tensor, "b c *n"],
    value: Float[Tensor, "b p *n"],
    *,
    weight: Float[Tensor, " c"],
    heads: int = 1,
    mask: Bool[Tensor, " b *n"] | None = None,
    query_mask: Bool[Tensor, " b *m"] | None = None,
    key_weight: Real[Tensor, " b *n"] | None = None,
) -> Float[Tensor, "b p *m"]:
    """Attend by the siamese similarity: a local term from the query and a global one from the keys.

    `response_i = v̄ (wᵀ q_i) + (1/N) Σ_j v_j (k_jᵀ w)`, the mean over valid keys of (q_i + k_j)ᵀ w · v_j.

    The similarity (SAN 4) is symmetric and additive, so the sum over positions splits: two vectors per head summarize
    all keys and values. With the compiled kernels, self-attention reads the grid once and writes it once.

    Cost:
        b·(M + N)·(h·c + 2·p) MACs, less b·N·h·c in self-attention; 2·p numbers in the summary.

    Reference: SAN Eq. 5, SAN Eq. 6.

    Example:
        >>> import torch
        >>> from farfield import ops
        >>> text = torch.randn(2, 64, 512)
        >>> ops.siamese_attention(text, text, text, weight=torch.ones(64), heads=4).shape
        torch.Size([2, 64, 512])
    """
    return attend("siamese", query, key, value, heads, mask, query_mask, key_weight, learned={"weight": weight})


@document_arguments
def siamese_local_attention(
    query: Float[Tensor, "b c *m"],
    key: Float[Tensor, "b c *n"],
    value: Float[Tensor, "b p *n"],
    *,
    weight: Float[Tensor, " c"],
    heads: int = 1,
    mask: Bool[Tensor, " b *n"] | None = None,
    query_mask: Bool[Tensor, " b *m"] | None = None,
    key_weight: Real[Tensor, " b *n"] | None = None,
) -> Float[Tensor, "b p *m"]:
    """Attend by the local term of siamese attention alone.

    `response_i = v̄ (wᵀ q_i)`.

    SAN's ablation without the global term: the response of a position is the mean of the valid values, multiplied by
    the score of its query. Keys are not read; they are an argument so that all operators have the same signature.

    Cost:
        b·M·(h·c + p) + b·N·p MACs; p numbers in the summary.

    Reference: SAN Table 6.

    Example:
        >>> import torch
        >>> from farfield import ops
        >>> text = torch.randn(2, 64, 512)
        >>> ops.siamese_local_attention(text, text, text, weight=torch.ones(64)).shape
        torch.Size([2, 64, 512])
    """
    return attend("siamese_local", query, key, value, heads, mask, query_mask, key_weight, learned={"weight": weight})


@document_arguments
def siamese_ones_attention(
    query: Float[Tensor, "b c *m"],
    key: Float[Tensor, "b c *n"],
    value: Float[Tensor, "b p *n"],
    *,
    heads: int = 1,
    mask: Bool[Tensor, " b *n"] | None = None,
    query_mask: Bool[Tensor, " b *m"] | None = None,
    key_weight: Real[Tensor, " b *n"] | None = None,
) -> Float[Tensor, "b p *m"]:
    """Attend by the siamese similarity with a vector of ones in place of a learned one.

    `response_i = v̄ (1ᵀ q_i) + (1/N) Σ_j v_j (k_jᵀ 1)`.

    SAN's ablation without parameters; N is the number of valid keys.

    Cost:
        b·(M + N)·(h·c + 2·p) MACs, less b·N·h·c in self-attention; 2·p numbers in the summary.

    Reference: SAN Table 8.

    Example:
        >>> import torch
        >>> from farfield import ops
        >>> text = torch.randn(2, 64, 512)
        >>> ops.siamese_ones_attention(text, text, text, heads=4).shape
        torch.Size([2, 64, 512])
    """
    return attend("siamese_ones", query, key, value, heads, mask, query_mask, key_weight)


@door("siamese_similarity")
def siamese_similarity(
    a: Float[Tensor, "... c"],
    b: Float[Tensor, "... c"],
    weight: Float[Tensor, " c"],
    other_weight: Float[Tensor, " c"] | None = None,
) -> Float[Tensor, " ..."]:
    """Compute the similarity of two vectors as the weighted sum of their features.

    `s(a, b) = (a + b)ᵀ w`; with a second weight vector `aᵀ w + bᵀ w'`, which is not symmetric.

    A siamese network processes both inputs with the same weights; sharing w makes the similarity symmetric.

    Args:
        a: `(..., c)`.
        b: `(..., c)`, with the same leading dimensions.
        weight: w, `(c,)`.
        other_weight: w', `(c,)`, for the second input (SAN Eq. 3); None shares w (SAN Eq. 4).

    Returns:
        The similarity of each pair, `(...)`.

    Raises:
        ShapeError: If a weight does not have one number per feature.
        TypeError: If dtypes differ.
        ValueError: If devices differ.

    Cost:
        2·c MACs per pair.

    Reference: SAN Eq. 3, SAN Eq. 4.

    Example:
        >>> import torch
        >>> from farfield import ops
        >>> ops.siamese_similarity(torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0]), torch.tensor([10.0, 1.0]))
        tensor(46.)
    """
    other = weight if other_weight is None else other_weight
    for name, vector, features in (("weight", weight, a), ("other_weight", other, b)):
        if vector.shape != features.shape[-1:]:
            problem = f"{name} must have one number per feature, {features.shape[-1]}."
            fix = f"a vector of {features.shape[-1]} numbers."
            raise shape_error(problem, fix, **{name: vector, "features": features})
    check_same_kind(a=a, b=b, weight=weight, other_weight=other)
    return a @ weight + b @ other
