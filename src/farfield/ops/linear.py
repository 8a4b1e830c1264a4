"""Linear attention of this decade: features of queries and keys in place of the softmax of their products."""

from __future__ import annotations

from jaxtyping import Bool, Float, Real
from torch import Tensor

from farfield.ops.attend import attend, document_arguments


@document_arguments
def linear_relu_attention(
    query: Float[Tensor, "b c *m"],
    key: Float[Tensor, "b c *n"],
    value: Float[Tensor, "b p *n"],
    *,
    heads: int = 1,
    mask: Bool[Tensor, " b *n"] | None = None,
    query_mask: Bool[Tensor, " b *m"] | None = None,
    key_weight: Real[Tensor, " b *n"] | None = None,
) -> Float[Tensor, "b p *m"]:
    """Average the values with products of the positive parts of queries and keys as weights.

    `response_i = φ(q_i)ᵀ Σ_j φ(k_j) v_jᵀ / (φ(q_i)ᵀ Σ_j φ(k_j) + 10⁻⁶)`, φ(x) = max(x, 0).

    The attention of EfficientViT and of Sana. The weights of a query sum to 1, or to 0 where no channel is positive
    both in it and in a key.

    Cost:
        b·(M + N)·c·p/h MACs; c·p/h numbers in the summary.

    Reference: Cai et al. 2022 (EfficientViT, arXiv 2205.14756), Xie et al. 2024 (Sana, arXiv 2410.10629).

    Example:
        >>> import torch
        >>> from farfield import ops
        >>> image = torch.randn(2, 8, 7, 7)
        >>> ops.linear_relu_attention(image, image, image).shape
        torch.Size([2, 8, 7, 7])
    """
    return attend("linear_relu", query, key, value, heads, mask, query_mask, key_weight)


@document_arguments
def linear_elu_attention(
    query: Float[Tensor, "b c *m"],
    key: Float[Tensor, "b c *n"],
    value: Float[Tensor, "b p *n"],
    *,
    heads: int = 1,
    mask: Bool[Tensor, " b *n"] | None = None,
    query_mask: Bool[Tensor, " b *m"] | None = None,
    key_weight: Real[Tensor, " b *n"] | None = None,
) -> Float[Tensor, "b p *m"]:
    """Average the values with products of positive features of queries and keys as weights.

    `response_i = φ(q_i)ᵀ Σ_j φ(k_j) v_jᵀ / φ(q_i)ᵀ Σ_j φ(k_j)`, φ(x) = elu(x) + 1.

    The first linear attention. The weights of a query are positive and sum to 1, as those of softmax attention. In
    float32, φ(x) may be 0 where x is below -87; a query whose channels all are has the response 0.

    Cost:
        b·(M + N)·c·p/h MACs and b·c·(M + N) exponentials; c·p/h numbers in the summary.

    Reference: Katharopoulos et al. 2020 (arXiv 2006.16236), Eq. 5 and 7.

    Example:
        >>> import torch
        >>> from farfield import ops
        >>> image, ones = torch.randn(2, 8, 7, 7), torch.ones(2, 1, 7, 7)
        >>> torch.allclose(ops.linear_elu_attention(image, image, ones), ones)
        True
    """
    return attend("linear_elu", query, key, value, heads, mask, query_mask, key_weight)


@document_arguments
def hedgehog_attention(
    query: Float[Tensor, "b c *m"],
    key: Float[Tensor, "b c *n"],
    value: Float[Tensor, "b p *n"],
    *,
    query_map: Float[Tensor, "h d d"],
    key_map: Float[Tensor, "h d d"],
    heads: int = 1,
    mask: Bool[Tensor, " b *n"] | None = None,
    query_mask: Bool[Tensor, " b *m"] | None = None,
    key_weight: Real[Tensor, " b *n"] | None = None,
) -> Float[Tensor, "b p *m"]:
    """Average the values with products of learned features, which are trained to weigh as a softmax does.

    `response_i = φ(W q_i)ᵀ Σ_j φ(W' k_j) v_jᵀ / φ(W q_i)ᵀ Σ_j φ(W' k_j)`, φ(x) = [softmax(x), softmax(−x)] over the
    channels of a head.

    The features are spiky as those of softmax attention, where the maps W of the queries and W' of the keys are
    trained; with the identity they are a start. Each head has twice as many slots as channels.

    Cost:
        2·b·(M + N)·c·p/h MACs, b·(M + N)·c²/h of the maps, and 2·b·c·(M + N) exponentials; 2·c·p/h numbers in the
        summary.

    Reference: Zhang et al. 2024 (Hedgehog, arXiv 2402.04347), Eq. 6.

    Example:
        >>> import torch
        >>> from farfield import ops
        >>> text, maps = torch.randn(2, 8, 512), torch.eye(4).expand(2, 4, 4)
        >>> ops.hedgehog_attention(text, text, text, query_map=maps, key_map=maps, heads=2).shape
        torch.Size([2, 8, 512])
    """
    learned = {"query_map": query_map, "key_map": key_map}
    return attend("hedgehog", query, key, value, heads, mask, query_mask, key_weight, learned=learned)


@document_arguments
def inline_attention(
    query: Float[Tensor, "b c *m"],
    key: Float[Tensor, "b c *n"],
    value: Float[Tensor, "b p *n"],
    *,
    heads: int = 1,
    mask: Bool[Tensor, " b *n"] | None = None,
    query_mask: Bool[Tensor, " b *m"] | None = None,
    key_weight: Real[Tensor, " b *n"] | None = None,
) -> Float[Tensor, "b p *m"]:
    """Attend by products of queries and keys that are shifted, and not divided, to weights that sum to 1.

    `response_i = Σ_j [s q_iᵀk_j / N − (1/N) Σ_l s q_iᵀk_l / N + 1/N] v_j`, s = 1/√d for d channels per head.

    Different queries have different weights (the map is injective), where a quotient gives parallel queries the same.
    The factor s/N of the products is that of the authors' code; without it the weights grow with the positions.

    Cost:
        b·(M + N)·(c + h)·p/h MACs; (c + h)·p/h numbers in the summary.

    Reference: Han et al. 2024 (InLine, arXiv 2412.06590), Eq. 6, with φ the identity.

    Example:
        >>> import torch
        >>> from farfield import ops
        >>> image, ones = torch.randn(2, 8, 7, 7), torch.ones(2, 1, 7, 7)
        >>> torch.allclose(ops.inline_attention(image, image, ones), ones, atol=1e-5)
        True
    """
    return attend("inline", query, key, value, heads, mask, query_mask, key_weight)


@document_arguments
def mala_attention(
    query: Float[Tensor, "b c *m"],
    key: Float[Tensor, "b c *n"],
    value: Float[Tensor, "b p *n"],
    *,
    heads: int = 1,
    mask: Bool[Tensor, " b *n"] | None = None,
    query_mask: Bool[Tensor, " b *m"] | None = None,
    key_weight: Real[Tensor, " b *n"] | None = None,
) -> Float[Tensor, "b p *m"]:
    """Attend by products of positive features, scaled and shifted so that the length of a query counts.

    `response_i = (1 + 1/(z_i + 10⁻⁶)) (s/N) φ(q_i)ᵀ Σ_j φ(k_j) v_jᵀ − z_i v̄`, z_i = s φ(q_i)ᵀ φ̄(k), φ(x) = elu(x) + 1,
    s = 1/√d for d channels per head; v̄ and φ̄(k) are means over the keys.

    A quotient cancels the length of a query; here longer queries weigh more sharply, as in softmax attention. The
    weights of a query sum to 1 and can be negative. They grow with z, and in float16 are infinite where z is above
    65504, as for queries and keys of some hundreds, unless a kernel for the CPU runs: it computes them in float32.

    Cost:
        b·(M + N)·(c + h)·p/h MACs and b·c·(M + N) exponentials; (c + h)·p/h numbers in the summary.

    Reference: Fan et al. 2025 (MALA, arXiv 2507.00698).

    Example:
        >>> import torch
        >>> from farfield import ops
        >>> image, ones = torch.randn(2, 8, 7, 7), torch.ones(2, 1, 7, 7)
        >>> torch.allclose(ops.mala_attention(image, image, ones), ones, atol=1e-4)
        True
    """
    return attend("mala", query, key, value, heads, mask, query_mask, key_weight)
