"""A transformer's encoder layer with any operator as its attention."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn import functional

from farfield._checks import check_heads, check_mask, shape_error
from farfield._operators import DEFAULT
from farfield._refusals import door, refusal
from farfield.nn.attention import GridAttention
from farfield.nn.bare import is_unchanged
from farfield.nn.token_attention import attend_tokens
from farfield.ops.grid import ALL, hide
from farfield.ops.modes import autocast_dtype, is_recorded
from farfield.ops.table import Operator, look_up_operator


class TokenAttention(GridAttention):
    """The attention of a `TransformerLayer`: a class of its own, by which `replace_attention` knows it."""


class TransformerLayer(nn.Module):
    """Attend over tokens, then apply a feed-forward layer to each: BERT's encoder layer, with norms after the sums.

    `x = norm(tokens + attention(tokens))`, `response = feedforward_norm(x + contract(GELU(expand(x))))`

    With a factorized operator this is FA's factorized Transformer: per head queries give the coefficients C, keys the
    basis B, and the response is C (Bᵀ V), so that memory and time are linear in the tokens. Weights have the shapes of
    conventional attention: its queries, keys and values are coefficients, basis and values here.

    Args:
        channels: Channels of each token.
        operator: A name in `ops.OPERATORS`, or an `ops.Operator` of your own.
        heads: Number of heads, which the channels are split into.
        hidden: Channels of the feed-forward layer; `4 * channels` by default.
        dropout: Dropout of the outputs of attention and feed-forward layer, in training.
        attention_dropout: Dropout of attention, in training: of the weights of the basis, or, where each token is a
            slot, of the coefficients, whose N × N matrix is then formed. It needs an operator that attends to every
            token and learns nothing beside the projections.
        epsilon: Epsilon of the norms.

    Raises:
        LookupError: If there is no such operator.
        ShapeError: If heads do not divide the channels.
        ValueError: If heads are not a whole number from 1, or the operator does not permit attention dropout.

    Cost:
        Factorized, with N tokens of c channels, d = c/heads and hidden = 4·c: 12·N·c² MACs for the projections and the
        feed-forward layer, and about 2·c·d·min(N, c) for the slots. The backward pass keeps O(N·c) numbers, none of N².

    Reference: FA Table 8, FA Eq. 5.

    Example:
        >>> import torch
        >>> from farfield.nn import TransformerLayer
        >>> layer = TransformerLayer(64, "factorized_gaussian", heads=4)
        >>> tokens, mask = torch.randn(2, 50, 64), torch.arange(50) < torch.tensor([[50], [20]])
        >>> layer(tokens, mask=mask).shape
        torch.Size([2, 50, 64])
    """

    def __init__(
        self,
        channels: int,
        operator: str | Operator = DEFAULT,
        *,
        heads: int = 1,
        hidden: int | None = None,
        dropout: float = 0.0,
        attention_dropout: float = 0.0,
        epsilon: float = 1e-12,
    ) -> None:
        super().__init__()
        with door("TransformerLayer"):
            _, entry = look_up_operator(operator)
            check_heads(heads, channels, "tokens")
        self.attention: GridAttention = TokenAttention(
            channels,
            operator,
            heads=heads,
            project=entry.projections("qkvo"),
            # The papers have no scale. Transformers have one, and only products before a softmax need it.
            scale=(channels // heads) ** -0.5 if entry.has_scale else 1.0,
        )
        drops = entry.score in (None, "ones") and entry.keys_from == entry.queries_from == ALL
        if attention_dropout and not drops:
            raise ValueError(
                f"TransformerLayer: {attention_dropout=} drops weights of tokens, and {self.attention.operator_name} "
                f"pools tokens or multiplies them with what it learns; fix: attention_dropout=0.0."
            )
        hidden = 4 * channels if hidden is None else hidden
        self.norm = nn.LayerNorm(channels, epsilon)
        self.expand, self.contract = nn.Linear(channels, hidden), nn.Linear(hidden, channels)
        self.feedforward_norm = nn.LayerNorm(channels, epsilon)
        self.dropout, self.attention_dropout = nn.Dropout(dropout), attention_dropout

    def forward(self, tokens: Float[Tensor, "b n c"], *, mask: Bool[Tensor, "b n"] | None = None) -> Tensor:
        """Return the response of each token.

        Args:
            tokens: `(b, n, c)`, channels last.
            mask: True where a token is valid. Others may hold anything, and change no response and no gradient.

        Returns:
            `(b, n, c)`; finite but meaningless for tokens that are not valid.

        Raises:
            ShapeError: If the tokens are not `(b, n, c)` with the layer's channels, or the mask not `(b, n)`.
            TypeError: If the tokens are not floating-point of the layer's dtype (any under autocast), or the mask is
                not boolean.
        """
        self._check(tokens, mask)
        # Otherwise tokens that are not valid, NaN for example, would enter the gradients of the norms.
        tokens = hide(tokens.transpose(1, 2), mask).transpose(1, 2)
        tokens = self.norm(tokens + self.dropout(self.attend(tokens, mask)))
        inner = functional.gelu(self.expand(tokens))
        return self.feedforward_norm(tokens + self.dropout(self.contract(inner)))

    @door("TransformerLayer")
    def _check(self, tokens: Tensor, mask: Tensor | None) -> None:
        """Refuse tokens or a mask that do not fit the layer or each other."""
        channels, dtype = self.attention.channels, self.norm.weight.dtype
        if tokens.dim() != 3 or tokens.shape[2] != channels:
            problem = f"tokens must be (batch, tokens, {channels})."
            fix = "channels come last, e.g. grid.flatten(2).mT for a grid (batch, channels, *size)."
            raise shape_error(problem, fix, tokens=tokens)
        if not tokens.is_floating_point() or (tokens.dtype != dtype and autocast_dtype(tokens) is None):
            raise refusal(TypeError, f"tokens are {tokens.dtype} and the layer {dtype}; fix: tokens.to({dtype}).")
        if mask is not None and mask.dtype == torch.bool and mask.shape != tokens.shape[:2]:
            problem = f"mask must be boolean, (batch, tokens), got {mask.dtype}."
            raise shape_error(problem, "True where a token is valid.", mask=mask, tokens=tokens)
        check_mask("mask", mask, "tokens", tokens.transpose(1, 2))

    def attend(self, tokens: Tensor, mask: Tensor | None) -> Tensor:
        """Attend within tokens `(b, n, c)`: as a grid of one spatial dim, or by `attend_tokens`, which has dropout."""
        attention, dropout = self.attention, self.attention_dropout if self.training else 0.0
        if not (dropout or self.projects_first(tokens.shape[1])):
            return attention(tokens.transpose(1, 2), mask=mask).transpose(1, 2)
        projections = (attention.query, attention.key, attention.value)
        query, key, value = (
            (tokens if part is None else part(tokens)).unflatten(2, (attention.heads, -1)).transpose(1, 2)
            for part in projections
        )
        valid = None if mask is None else mask[:, None, None]
        learned = {name: getattr(attention, name) for name in attention.operator.parameter_shapes(1, 1)}
        options: Any = {"scale": attention.scale, "dropout": dropout, "learned": learned}
        response, _ = attend_tokens(attention.operator, query, key, value, valid, **options)
        response = response.flatten(2)
        return response if attention.output is None else attention.output(response)

    def projects_first(self, tokens: int) -> bool:
        """Whether values are projected before they are summed in slots: where there are fewer tokens than channels.

        For each sample and projection, reducing first takes c²·d MACs and keeps c² numbers; projecting first takes
        N·c·d MACs and keeps N·c numbers. `attend_tokens` projects first, for operators with a basis of all tokens.
        """
        attention, operator = self.attention, self.attention.operator
        # A compiled graph has one order; choosing would compile it again for other lengths.
        if tokens >= attention.channels or is_recorded():
            return False
        # The attention module itself is not called then; its projections are.
        own = isinstance(attention, GridAttention) and type(attention).forward is GridAttention.forward
        if not (own and is_unchanged(attention)) or attention.residual or attention.coefficient_norm is not None:
            return False
        if operator.basis is None or operator.score is not None:
            return False
        return operator.keys_from == operator.queries_from == ALL
