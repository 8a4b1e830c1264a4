"""Softmax attention over all positions, or over pooled keys and values."""

from __future__ import annotations

from jaxtyping import Bool, Float, Real
from torch import Tensor

from farfield.ops.attend import attend, document_arguments


@document_arguments
def softmax_attention(
    query: Float[Tensor, "b c *m"],
    key: Float[Tensor, "b c *n"],
    value: Float[Tensor, "b p *n"],
    *,
    heads: int = 1,
    mask: Bool[Tensor, " b *n"] | None = None,
    query_mask: Bool[Tensor, " b *m"] | None = None,
    key_weight: Real[Tensor, " b *n"] | None = None,
    scale: float = 1.0,
) -> Float[Tensor, "b p *m"]:
    """Attend to every position by the softmax of its product with the query.

    `response_i = Σ_j softmax_j(k_jᵀ q_i) v_j`, V · Softmax(KᵀQ) in matrices.

    The regular (non-local) operator: exact, quadratic in the number of positions. The papers do not scale the products.
    The logarithm of the weight of a key is added to its products.

    Cost:
        b·M·N·(c + p) MACs; b·h·M·N coefficients, in memory only for small grids.

    Reference: KAN Eq. 1, SAN Eq. 1, FA Eq. 9.

    Example:
        >>> import torch
        >>> from farfield import ops
        >>> image = torch.randn(2, 8, 7, 7)
        >>> ops.softmax_attention(image, image, image, heads=4).shape
        torch.Size([2, 8, 7, 7])
    """
    return attend("softmax", query, key, value, heads, mask, query_mask, key_weight, scale=scale)


@document_arguments
def softmax_pooled_attention(
    query: Float[Tensor, "b c *m"],
    key: Float[Tensor, "b c *n"],
    value: Float[Tensor, "b p *n"],
    *,
    heads: int = 1,
    mask: Bool[Tensor, " b *n"] | None = None,
    query_mask: Bool[Tensor, " b *m"] | None = None,
    key_weight: Real[Tensor, " b *n"] | None = None,
    scale: float = 1.0,
) -> Float[Tensor, "b p *m"]:
    """Attend to keys and values that are max-pooled by 2 along each axis.

    `response_i = Σ_j softmax_j(pool(K)_jᵀ q_i) pool(V)_j`.

    Non-local networks pool keys and values, channel by channel, which divides the cost by 2^spatial_dims. An axis of
    size 7 has 4 windows (ceil mode). A window pools its valid keys and counts for their mean weight; one without any
    takes no part. `ops.pooled` is for operators with other windows or with means.

    Cost:
        b·M·N'·(c + p) MACs with N' windows, a quarter of N for images of even size.

    Reference: KAN Table 2.

    Example:
        >>> import torch
        >>> from farfield import ops
        >>> image = torch.randn(2, 8, 7, 7)
        >>> ops.softmax_pooled_attention(image, image, image).shape
        torch.Size([2, 8, 7, 7])
    """
    return attend("softmax_pooled", query, key, value, heads, mask, query_mask, key_weight, scale=scale)
