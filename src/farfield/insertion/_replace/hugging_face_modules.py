"""Attention of transformers that has no `attn_implementation`: modules with any operator; see `modules`."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from farfield._refusals import door
from farfield.insertion._replace.masks import find_valid_positions
from farfield.insertion._replace.modules import Replaced, split_heads


class SeparateAttention(Replaced, nn.Module):
    """The self-attention of ViLT and of FLAVA with any operator; created by `replace_attention`."""

    num_attention_heads: int
    query: nn.Module
    key: nn.Module
    value: nn.Module
    dropout: nn.Dropout

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, output_attentions: bool = False
    ) -> tuple[Tensor, ...]:
        """Attend with tokens `(b, n, c)` and an additive mask; the matrix follows if requested."""
        projected = (project(hidden_states) for project in (self.query, self.key, self.value))
        query, key, value = (split_heads(positions, self.num_attention_heads) for positions in projected)
        with door(f"{type(self).__name__} with {self.operator_name}"):
            valid = find_valid_positions(attention_mask, key)
        dropout = self.dropout.p if self.training else 0.0
        scale = query.shape[-1] ** -0.5
        response, matrix = self.attend(
            query, key, value, valid, scale=scale, dropout=dropout, weights=output_attentions
        )
        return (response.flatten(2),) if matrix is None else (response.flatten(2), matrix)


class _StackedAttention(Replaced, nn.Module):
    num_heads: int
    scale: float
    qkv: nn.Linear

    @property
    def head_dim(self) -> int:
        return self.qkv.in_features // self.num_heads

    def attend_stacked(self, tokens: Tensor, dropout: nn.Dropout, weights: bool) -> tuple[Tensor, Tensor | None]:
        """Attend with one matrix for queries, keys and values of tokens `(b, n, c)`."""
        query, key, value = (split_heads(each, self.num_heads) for each in self.qkv(tokens).chunk(3, -1))
        rate = dropout.p if self.training else 0.0
        response, matrix = self.attend(query, key, value, None, scale=self.scale, dropout=rate, weights=weights)
        return response.flatten(2), matrix


class BlipVisionAttention(_StackedAttention):
    """The attention of BLIP's vision tower with any operator; created by `replace_attention`."""

    dropout: nn.Dropout
    projection: nn.Module

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """Attend with tokens `(b, n, c)`; the matrix only if requested."""
        response, matrix = self.attend_stacked(hidden_states, self.dropout, bool(kwargs.get("output_attentions")))
        return self.projection(response), matrix


class TimesformerAttention(_StackedAttention):
    """The attention of TimeSformer with any operator; created by `replace_attention`."""

    attn_drop: nn.Dropout

    def forward(self, hidden_states: Tensor, output_attentions: bool = False) -> tuple[Tensor, ...]:
        """Attend with tokens `(b, n, c)`; the matrix follows if requested."""
        response, matrix = self.attend_stacked(hidden_states, self.attn_drop, output_attentions)
        return (response,) if matrix is None else (response, matrix)
