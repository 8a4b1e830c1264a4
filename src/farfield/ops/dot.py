"""Dot-product attention in the quadratic order: the reference of factorized attention."""

from __future__ import annotations

from jaxtyping import Bool, Float
from torch import Tensor

from farfield.ops.attend import attend, document_arguments


@document_arguments
def dot_attention(
    query: Float[Tensor, "b c *m"],
    key: Float[Tensor, "b c *n"],
    value: Float[Tensor, "b p *n"],
    *,
    heads: int = 1,
    mask: Bool[Tensor, " b *n"] | None = None,
    query_mask: Bool[Tensor, " b *m"] | None = None,
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
    return attend("dot", query, key, value, heads=heads, mask=mask, query_mask=query_mask)
