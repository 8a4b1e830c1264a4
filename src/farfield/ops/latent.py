"""Attention through learned latents: they average all positions, and each position averages them."""

from __future__ import annotations

from dataclasses import replace

from jaxtyping import Bool, Float, Real
from torch import Tensor

from farfield._checks import check_whole
from farfield._refusals import door
from farfield.ops.attend import attend, document_arguments
from farfield.ops.table import OPERATORS, Operator


@door("flare")
def flare(slots: int = 64) -> Operator:
    """Return the operator of FLARE with another number of latents, to be given to `GridAttention`.

    Args:
        slots: Latents of each head.

    Returns:
        The operator.

    Raises:
        TypeError, ValueError: If `slots` is not a whole number from 1.

    Cost:
        As `flare_attention`, of so many latents.

    Reference: Puri et al. 2025 (FLARE, arXiv 2508.12594).

    Example:
        >>> from farfield.nn import GridAttention
        >>> from farfield.ops import flare
        >>> GridAttention(8, flare(16), heads=2, project="kvo").latents.shape
        torch.Size([2, 16, 4])
    """
    check_whole("slots", slots, 1)
    return replace(OPERATORS["flare"], slots=slots)


@document_arguments
def flare_attention(
    query: Float[Tensor, "b c *m"],
    key: Float[Tensor, "b c *n"],
    value: Float[Tensor, "b p *n"],
    *,
    latents: Float[Tensor, "h s d"],
    heads: int = 1,
    mask: Bool[Tensor, " b *n"] | None = None,
    query_mask: Bool[Tensor, " b *m"] | None = None,
    key_weight: Real[Tensor, " b *n"] | None = None,
) -> Float[Tensor, "b p *m"]:
    """Average the values into a slot for each latent, and average the slots for each query.

    `response_i = Σ_s softmax_s(q_iᵀ L_s) z_s`, `z_s = Σ_j softmax_j(L_sᵀ k_j) v_j`: two softmax attentions through the
    latents L, the second with the transposed products of the first. In FLARE a query is the key of its position.

    The implied attention matrix has the rank of the number of latents, and its rows sum to 1. It is
    `factorized_gaussian_attention` of the scores Lᵀk.

    Cost:
        b·(M + N)·s·(c + p) MACs and b·h·s·(M + N) exponentials, for s latents; s·p numbers in the summary. Where
        query is key the scores are computed once.

    Reference: Puri et al. 2025 (FLARE, arXiv 2508.12594), Eq. 7 to 10.

    Example:
        >>> import torch
        >>> from farfield import ops
        >>> volume, latents = torch.randn(2, 8, 5, 6, 7), torch.randn(2, 16, 4)
        >>> ops.flare_attention(volume, volume, volume, latents=latents, heads=2).shape
        torch.Size([2, 8, 5, 6, 7])
    """
    return attend("flare", query, key, value, heads, mask, query_mask, key_weight, learned={"latents": latents})
