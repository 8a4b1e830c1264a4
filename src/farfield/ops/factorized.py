"""Factorized attention, three matrices multiplied in the order that is linear in the positions, and its reference."""

from __future__ import annotations

from jaxtyping import Bool, Float, Real
from torch import Tensor

from farfield.ops.attend import attend, document_arguments


@document_arguments
def averaged_attention(
    query: Float[Tensor, "b c *m"],
    key: Float[Tensor, "b c *n"],
    value: Float[Tensor, "b p *n"],
    *,
    heads: int = 1,
    mask: Bool[Tensor, " b *n"] | None = None,
    query_mask: Bool[Tensor, " b *m"] | None = None,
    key_weight: Real[Tensor, " b *n"] | None = None,
) -> Float[Tensor, "b p *m"]:
    """Attend to every position by its product with the query, divided by the number of positions.

    `response_i = (1/N) (Σ_j v_j k_jᵀ) q_i`, N the number of valid keys.

    Without a softmax the product is associative: with keys and values first, the cost is linear in the positions. For
    so few positions that the quadratic order takes fewer MACs, that order is used.

    Cost:
        At most b·(M + N)·c·p/h MACs; c·p/h numbers in the summary.

    Reference: SAN Eq. 2.

    Example:
        >>> import torch
        >>> from farfield import ops
        >>> volume = torch.randn(2, 8, 5, 6, 7)
        >>> ops.averaged_attention(volume, volume, volume).shape
        torch.Size([2, 8, 5, 6, 7])
    """
    return attend("averaged", query, key, value, heads, mask, query_mask, key_weight)


@document_arguments
def factorized_attention(
    query: Float[Tensor, "b c *m"],
    key: Float[Tensor, "b c *n"],
    value: Float[Tensor, "b p *n"],
    *,
    heads: int = 1,
    mask: Bool[Tensor, " b *n"] | None = None,
    query_mask: Bool[Tensor, " b *m"] | None = None,
    key_weight: Real[Tensor, " b *n"] | None = None,
) -> Float[Tensor, "b p *m"]:
    """Sum the values with each key channel as weights, and combine the sums with the query channels as coefficients.

    `response_i = (1/d) (Σ_j v_j k_jᵀ) q_i`, d channels per head: dot-product attention in the linear order.

    Each key channel holds one weight per position (the basis); each query channel is the coefficient of one such sum.
    The divisor is the number of channels, not of positions: in float16, responses to large grids whose values have one
    sign can exceed 65,504. For so few positions that the quadratic order takes fewer MACs, that order is used.

    Cost:
        At most b·(M + N)·c·p/h MACs; c·p/h numbers in the summary.

    Reference: FA Eq. 3, FA Eq. 8.

    Example:
        >>> import torch
        >>> from farfield import ops
        >>> text = torch.randn(2, 8, 512)
        >>> ops.factorized_attention(text, text, text, heads=2).shape
        torch.Size([2, 8, 512])
    """
    return attend("factorized", query, key, value, heads, mask, query_mask, key_weight)


@document_arguments
def factorized_gaussian_attention(
    query: Float[Tensor, "b c *m"],
    key: Float[Tensor, "b c *n"],
    value: Float[Tensor, "b p *n"],
    *,
    heads: int = 1,
    mask: Bool[Tensor, " b *n"] | None = None,
    query_mask: Bool[Tensor, " b *m"] | None = None,
    key_weight: Real[Tensor, " b *n"] | None = None,
) -> Float[Tensor, "b p *m"]:
    """Average the values by a softmax of each key channel, and combine the means by a softmax of the query channels.

    `response_i = Σ_r softmax_r(q_i) Σ_j softmax_j(k_j,r) v_j`: the softmax of the keys runs over *positions*, that of
    the queries over *channels*.

    Both factors are normalised, so the implied attention row is a distribution over positions, as in softmax attention,
    at a cost linear in the positions. Its values are not those of softmax attention. FA's Eq. 4 prints the inner
    softmax around the product of keys and values; here, as in FA's text, it is taken of the keys alone.

    Cost:
        b·(M + N)·c·p/h MACs and b·c·(M + N) exponentials; c·p/h numbers in the summary.

    Reference: FA Eq. 4.

    Example:
        >>> import torch
        >>> from farfield import ops
        >>> image, ones = torch.randn(2, 8, 7, 7), torch.ones(2, 1, 7, 7)
        >>> torch.allclose(ops.factorized_gaussian_attention(image, image, ones), ones)
        True
    """
    return attend("factorized_gaussian", query, key, value, heads, mask, query_mask, key_weight)


@document_arguments
def dot_attention(
    query: Float[Tensor, "b c *m"],
    key: Float[Tensor, "b c *n"],
    value: Float[Tensor, "b p *n"],
    *,
    heads: int = 1,
    mask: Bool[Tensor, " b *n"] | None = None,
    query_mask: Bool[Tensor, " b *m"] | None = None,
    key_weight: Real[Tensor, " b *n"] | None = None,
) -> Float[Tensor, "b p *m"]:
    """Attend to every position by its product with the query, over the channels.

    `response_i = (1/d) Σ_j (k_jᵀ q_i) v_j`, d channels per head.

    It always computes in the quadratic order and is the reference for `factorized_attention`, which is equal. The
    divisor is the number of channels, not of positions: in float16, responses to large grids whose values have one sign
    can exceed 65,504.

    Cost:
        b·M·N·(c + p) MACs; b·h·M·N coefficients in memory.

    Reference: FA Eq. 6.

    Example:
        >>> import torch
        >>> from farfield import ops
        >>> image = torch.randn(2, 8, 7, 7)
        >>> both = ops.dot_attention(image, image, image), ops.factorized_attention(image, image, image)
        >>> torch.allclose(*both, atol=1e-4)
        True
    """
    return attend("dot", query, key, value, heads, mask, query_mask, key_weight)
