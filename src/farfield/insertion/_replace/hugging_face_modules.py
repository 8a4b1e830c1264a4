"""Attention of transformers that has no `attn_implementation`: modules with any operator; see `modules`."""

from __future__ import annotations

from typing import Any, cast

from torch import Tensor, nn

from farfield._refusals import door
from farfield.insertion._replace.masks import find_valid_positions
from farfield.insertion._replace.modules import Replaced, split_heads


class SeparateAttention(Replaced, nn.Module):
    """The self-attention of ViLT and of FLAVA with any operator; created by `replace_attention`."""

    @property
    def head_dim(self) -> int:
        part = cast(Any, self.qkv if hasattr(self, "qkv") else self.query)
        return part.in_features // self._count_heads()

    def _count_heads(self) -> int:
        return cast(Any, self).num_heads if hasattr(self, "num_heads") else cast(Any, self).num_attention_heads

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, output_attentions: bool = False
    ) -> tuple[Tensor, ...]:
        """Attend with tokens `(b, n, c)` and an additive mask; the matrix follows if requested."""
        host = cast(Any, self)
        if hasattr(self, "qkv"):
            projected = host.qkv(hidden_states).chunk(3, -1)
        else:
            projected = [project(hidden_states) for project in (host.query, host.key, host.value)]
        query, key, value = (split_heads(positions, self._count_heads()) for positions in projected)
        with door(f"{type(self).__name__} with {self.operator_name}"):
            valid = find_valid_positions(attention_mask, key)
        dropout = (host.attn_drop if hasattr(self, "attn_drop") else host.dropout).p if self.training else 0.0
        scale = query.shape[-1] ** -0.5
        response, matrix = self.attend(
            query, key, value, valid, scale=scale, dropout=dropout, weights=output_attentions
        )
        return (response.flatten(2),) if matrix is None else (response.flatten(2), matrix)


class TimesformerAttention(SeparateAttention):
    """The attention of TimeSformer, which has no mask; created by `replace_attention`."""

    def forward(self, hidden_states: Tensor, output_attentions: bool = False) -> tuple[Tensor, ...]:  # type: ignore[override]
        """Attend with tokens `(b, n, c)`; the matrix follows if requested."""
        return super().forward(hidden_states, None, output_attentions)


class BlipVisionAttention(SeparateAttention):
    """The attention of BLIP's vision tower with any operator; created by `replace_attention`."""

    projection: nn.Module

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> tuple[Tensor, Tensor | None]:  # type: ignore[override]
        """Attend with tokens `(b, n, c)`; the matrix only if requested."""
        response, *matrix = super().forward(hidden_states, None, bool(kwargs.get("output_attentions")))
        return self.projection(response), matrix[0] if matrix else None
