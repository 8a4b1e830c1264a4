"""Attention of Kronecker attention networks (KAN): to the means along each axis in place of all positions."""

from __future__ import annotations

from jaxtyping import Bool, Float, Real
from torch import Tensor

from farfield.ops.attend import attend, document_arguments


@document_arguments
def kronecker_kv_attention(
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
    """Attend from every position to the means along each axis.

    `O = attn(X, C, C)` with C = [L | H] the axis means (`axis_means`) of the key grid and of the value grid.

    A grid has Σ size axis means: height + width for an image. With one spatial dim it is softmax attention. Means run
    over valid keys; an index without one takes no part. Weights of keys are those of the means, and an index counts for
    the mean weight of its valid keys: log of it is added to products with its mean.

    Cost:
        b·M·S·(c + p) MACs and b·h·M·S coefficients, with S = Σ size of the key grid.

    Reference: KAN Eq. 14, KAN Eq. 15, KAN Eq. 16.

    Example:
        >>> import torch
        >>> from farfield import ops
        >>> image = torch.randn(2, 64, 56, 56)
        >>> ops.kronecker_kv_attention(image, image, image, heads=4).shape
        torch.Size([2, 64, 56, 56])
    """
    return attend("kronecker_kv", query, key, value, heads, mask, query_mask, key_weight, scale=scale)


@document_arguments
def kronecker_qkv_attention(
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
    """Attend from the means along each axis to the means along each axis, and form a grid by the outer sum.

    `[L̃ | H̃] = attn(C, C, C)`, then `Y[:, y, x] = L̃[:, y] + H̃[:, x] − (n − 1)/n · mean(L̃ ⊕ H̃)` with n = 2 axes.

    The attention is quadratic in Σ size only. Means run over valid positions, and an index without a valid key takes no
    part. Weights of keys act as in `kronecker_kv_attention`; means of queries have none. The outer sum of n axes
    contains the grand mean n times; it is counted once, so that the implied attention rows sum to 1.
    `kronecker_qkv_literal_attention` is the printed form, without that correction.

    Cost:
        b·S²·(c + p) MACs with S = Σ size; with the compiled kernels, one read and one write of the grid.

    Reference: KAN Eq. 17, KAN Eq. 18, and KAN Eq. 13 for the mean that is counted once.

    Example:
        >>> import torch
        >>> from farfield import ops
        >>> volume = torch.randn(2, 64, 8, 16, 16)
        >>> ops.kronecker_qkv_attention(volume, volume, volume).shape
        torch.Size([2, 64, 8, 16, 16])
    """
    return attend("kronecker_qkv", query, key, value, heads, mask, query_mask, key_weight, scale=scale)


@document_arguments
def kronecker_qkv_literal_attention(
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
    """Attend from the means along each axis to the means along each axis, with the outer sum as the paper prints it.

    `[L̃ | H̃] = attn(C, C, C)`, then `Y[:, y, x] = L̃[:, y] + H̃[:, x]`.

    The result contains the grand mean once per axis; networks learn better with `kronecker_qkv_attention`, which counts
    it once. The implied attention rows sum to the number of spatial dims, not to 1. Masks and weights act in the same
    way.

    Cost:
        b·S²·(c + p) MACs with S = Σ size; with the compiled kernels, one read and one write of the grid.

    Reference: KAN Eq. 17, KAN Eq. 18.

    Example:
        >>> import torch
        >>> from farfield import ops
        >>> volume = torch.randn(2, 64, 8, 16, 16)
        >>> ops.kronecker_qkv_literal_attention(volume, volume, volume).shape
        torch.Size([2, 64, 8, 16, 16])
    """
    return attend("kronecker_qkv_literal", query, key, value, heads, mask, query_mask, key_weight, scale=scale)
